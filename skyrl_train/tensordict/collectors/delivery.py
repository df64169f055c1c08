"""Delivery of a collector's batches to the caller, a replay buffer or a queue, directly or from a thread."""

from __future__ import annotations

import logging
import queue as queues
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torchrl.collectors.llm import LLMCollector as TorchRLCollector
from torchrl.data import ReplayBuffer

from skyrl_train.errors import ConfigError, DeadlineExceeded
from skyrl_train.tensordict.wrappers.weight_sync import Source

log = logging.getLogger(__name__)

Postproc = Callable[[TensorDictBase], TensorDictBase]
POLL_S = 0.1
"""Interval at which a waiting thread checks whether it should stop."""


class Delivery(TorchRLCollector):  # type: ignore[misc]
    """A base class of collectors that delivers their batches: yielded, or to a `replay_buffer` or `queue`.

    Iterating yields batches until there are no more, or None for each batch that is delivered elsewhere.

    `start` does the same in a thread. With `max_staleness` s, the thread begins batch k (from 0) only once the policy
    has had k - s updates since `start`: with one update per batch, no update then uses a batch begun more than s
    versions before. A batch of which the buffer stored nothing (yet) is not counted.

    The thread waits at most `timeout` seconds for an update or for room in the queue; then DeadlineExceeded ends it.
    However it ends, the queue gets a None after the last row.

    Subclasses define `rollout`, `_updates()` (number of the policy's updates so far), `_push(weights, worker_ids)` and
    `_release(close_env)`, which closes what the collector made.
    """

    postproc: Postproc | None

    def deliver_to(
        self, replay_buffer: ReplayBuffer | None, queue: Any, max_staleness: int | None, timeout: float
    ) -> None:
        """Set where batches go. Raises RuntimeError for both a buffer and a queue, ConfigError for a wrong number."""
        if replay_buffer is not None and queue is not None:
            raise RuntimeError("A collector got both a replay_buffer and a queue. Give only one of them.")
        if max_staleness is not None and (type(max_staleness) is not int or max_staleness < 0):
            raise ConfigError(f"max_staleness={max_staleness!r}: give an integer of at least 0, or None.")
        if not timeout > 0:
            raise ConfigError(f"timeout={timeout!r}: must be above 0 seconds.")
        self.replay_buffer, self.queue = replay_buffer, queue
        self.max_staleness, self.timeout = max_staleness, timeout
        self._ahead: int | None = None
        """Number of updates before the current batch is trained on; None: the number so far."""
        self._stopping = threading.Event()
        self._collecting: threading.Thread | None = None
        self._failure: BaseException | None = None
        self.closed = False

    def _interrupt(self) -> None:
        """Make the thread's current rollout end soon."""
        self._stopping.set()

    def set_postproc(self, postproc: Postproc) -> None:
        """Set the function that is applied to every batch first. Raises RuntimeError if there is one."""
        if self.postproc is not None:
            raise RuntimeError("The collector already has a postproc. Make another collector.")
        self.postproc = postproc

    def __iter__(self) -> Iterator[TensorDictBase | None]:
        return self.iterator()

    def iterator(self) -> Iterator[TensorDictBase | None]:
        """Iterate as the class says. Raises RuntimeError after `shutdown`, or while the thread of `start` runs."""
        while True:
            self._check_usable()
            batch = self.rollout()
            if batch is None:
                return
            batch = self._processed(batch)
            if self.replay_buffer is None and self.queue is None:
                yield batch
            else:
                self._stored(batch)
                yield None

    def next(self) -> TensorDictBase | None:
        """Return the next batch; None if it was delivered elsewhere, or if there is none."""
        return next(self.iterator(), None)

    def is_initialized(self) -> bool:
        """True: the constructor has waited for everything."""
        return True

    def update_policy_weights_(
        self,
        policy_or_weights: Source | None = None,
        *,
        worker_ids: Any = None,
        model_id: str | None = None,
        weights: Source | None = None,
        policy: Source | None = None,
        weights_dict: Mapping[str, Source] | None = None,
    ) -> None:
        """Push weights to the policy. Blocks until the current turn ends and the weights have arrived.

        Give a module, a wrapper, or tensors by name in at most one of four ways: `policy_or_weights`, `weights`,
        `policy`, or `weights_dict={"policy": ...}`. Without any, the updater pushes those of its own source. Without an
        updater, weights are copied into a policy that is a module.

        Args:
            policy_or_weights, weights, policy, weights_dict: The weights.
            worker_ids: Engines that get the weights, for the updater; None for all.
            model_id: Only "policy" or None, because a collector has one model.

        Raises:
            ConfigError: There is no updater, or the weights are given twice or for another model.
            Exception: The error that ended the thread of `start`.
        """
        self._check_open()
        if model_id not in (None, "policy"):
            raise ConfigError(f"model_id={model_id!r} is unknown; a collector has one model, 'policy'.")
        if weights_dict is not None and set(weights_dict) != {"policy"}:
            raise ConfigError(f"weights_dict has keys {sorted(weights_dict)}; a collector has one model, 'policy'.")
        nested = None if weights_dict is None else weights_dict["policy"]
        given = [one for one in (policy_or_weights, weights, policy, nested) if one is not None]
        if len(given) > 1:
            raise ConfigError(
                "Weights were given more than once. Use one of policy_or_weights, weights=, policy= or weights_dict=."
            )
        self._push(given[0] if given else None, worker_ids)

    def start(self) -> None:
        """Collect in a thread, until there are no more batches or `shutdown`.

        Raises RuntimeError without a replay buffer or queue, if the thread already runs, or after `shutdown`.
        """
        if self.replay_buffer is None and self.queue is None:
            raise RuntimeError("start() needs a replay_buffer or a queue to write to. Give the collector one of them.")
        self._check_usable()
        self._stopping.clear()
        # Updates count from here: after this method returns, there may be one before the thread runs.
        self._collecting = threading.Thread(
            target=self._run, args=(self._updates(),), name="skyrl-collector", daemon=True
        )
        self._collecting.start()

    def is_running(self) -> bool:
        """True if the thread of `start` is collecting."""
        return self._collecting is not None and self._collecting.is_alive()

    def shutdown(self, timeout: float | None = None, close_env: bool = True, raise_on_error: bool = True) -> None:
        """End the thread after the current turn, and close what the collector made: environment and policy.

        A second call does nothing.

        Args:
            timeout: Seconds to wait for the thread; None for the collector's `timeout`.
            close_env: False keeps the environment open.
            raise_on_error: False ignores the errors below.

        Raises:
            DeadlineExceeded: The thread did not end in time.
            Exception: The error that ended the thread earlier.
        """
        if self.closed:
            return
        self.closed = True
        thread, seconds = self._collecting, self.timeout if timeout is None else timeout
        with suppress(*(() if raise_on_error else (Exception,))):
            try:
                self._interrupt()
                if thread is not None:
                    thread.join(seconds)
                    if thread.is_alive():
                        raise DeadlineExceeded("the collector's thread", seconds)
                self._raise_failure()
            finally:
                self._release(close_env)

    def async_shutdown(self, timeout: float | None = None, close_env: bool = True) -> None:
        """Call `shutdown`; this is TorchRL's name for it after `start`."""
        self.shutdown(timeout, close_env)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.shutdown()

    def __del__(self) -> None:
        """Close nothing: the environment and the policy may be in use elsewhere, and a thread cannot be awaited."""

    def _run(self, updates: int) -> None:
        """consumes: turns · produces: delivered batches · waits for: an update · unblocked by: its version, shutdown"""
        begun = 0
        try:
            while not self._stopping.is_set():
                self._wait_for_update(updates + begun)
                self._ahead = updates + begun
                batch = self.rollout()
                if batch is None:
                    return
                begun += self._stored(self._processed(batch))
        except BaseException as error:
            log.exception("the collector's thread ended; shutdown() raises the error again")
            self._failure = error
        finally:
            self._ahead = None
            if self.queue is not None:
                with suppress(Exception):  # the queue is gone, or stays full
                    self._put(None)

    def _wait_for_update(self, trained_at: int) -> None:
        """Wait until a batch to be trained on after `trained_at` updates may begin, or the thread should stop."""
        deadline = time.monotonic() + self.timeout
        while self.max_staleness is not None and trained_at - self._updates() > self.max_staleness:
            if self._stopping.wait(POLL_S / 10):
                return
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    f"the update before the next batch (max_staleness={self.max_staleness}: one for each batch)",
                    self.timeout,
                )

    def _processed(self, batch: TensorDictBase) -> TensorDictBase:
        batch = batch if self.postproc is None else self.postproc(batch)
        if self.post_collect_hook is not None:
            self.post_collect_hook(batch)
        return batch

    def _stored(self, batch: TensorDictBase) -> bool:
        """Store a batch; return whether any row was stored: a buffer may hold rows back for an incomplete group."""
        if self.replay_buffer is not None:
            numbers = self.replay_buffer.extend(batch)
            return numbers is None or torch.as_tensor(numbers).numel() > 0
        for row in batch.unbind(0):
            if not self._stopping.is_set():
                self._put(row)
        return True

    def _put(self, item: TensorDictBase | None) -> None:
        """Put an item into the queue, waiting for room until the thread should stop.

        Raises DeadlineExceeded after `timeout` seconds.
        """
        deadline = time.monotonic() + self.timeout
        while True:
            try:
                self.queue.put(item, timeout=POLL_S)
                return
            except queues.Full:
                if self._stopping.is_set():
                    return
                if time.monotonic() > deadline:
                    raise DeadlineExceeded("room in the collector's queue", self.timeout) from None

    def _check_usable(self) -> None:
        self._check_open()
        if self.is_running():
            raise RuntimeError(
                "The collector's thread is running. Read from its replay buffer or queue, or call shutdown()."
            )

    def _check_open(self) -> None:
        """Raise RuntimeError after `shutdown`, or the error that ended the thread."""
        self._raise_failure()
        if self.closed:
            raise RuntimeError("The collector was shut down. Make another one.")

    def _raise_failure(self) -> None:
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
