"""SGLang's scheduler process, with a scheduler that implements the engine protocol. Imports SGLang: see engine.py.

- A request that is aborted while the scheduler is paused, or after a retraction, ends immediately, with its tokens.
- Sequences can be scored while requests are paused.
- The tokens of chosen requests are sent to the front end after every step.
- The prefix cache can be reset while requests run. Other requests no longer find their keys and values.
- A scheduler that waits or is paused sleeps, and one that fails ends only its own process.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, NoReturn

import psutil
import torch
from sglang.srt.managers import scheduler as sglang_scheduler
from sglang.srt.managers.io_struct import AbortReq, PauseGenerationReqInput, SetInternalStateReq
from sglang.srt.managers.schedule_batch import FINISH_ABORT, Req, ScheduleBatch
from sglang.srt.mem_cache.common import release_kv_cache
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from skyrl_train.engines.sglang import sampler

SCORE = "score-"
"""Prefix of the ids of scoring requests, which run even while other requests are paused."""

STREAM = "stream-"
"""Prefix of the keys of a SetInternalStateReq that name requests whose tokens are to be sent after every step."""


class Scheduler(sglang_scheduler.Scheduler):
    """SGLang's scheduler with the changes listed above."""

    running_batch: ScheduleBatch
    last_batch: Any
    chunked_req: Req | None
    waiting_queue: list[Req]
    result_queue: deque[Any]
    """Batches with results that are not processed yet, with overlap scheduling; empty while paused."""
    _engine_paused: bool
    _pending_chunked_abort_req: Req | None

    _cache_generation = 0
    """Number of resets of the prefix cache."""
    _saved_state: tuple[Any, ...] | None = None
    """Running and queued requests of the paused state while sequences are scored; None otherwise."""

    # -- prefix cache ------------------------------------------------------------------------------------------------

    def _add_request_to_queue(self, req: Req, is_retracted: bool = False) -> None:
        req.cache_salt = str(self._cache_generation)
        super()._add_request_to_queue(req, is_retracted)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        """Hide all cached prompts from later requests, and free their memory if no request runs.

        Args:
            empty_cache: True to also release unused memory of the accelerator.

        Returns:
            True.
        """
        self._cache_generation += 1
        for req in self.waiting_queue:
            req.cache_salt = str(self._cache_generation)
        if self._saved_state is None and self.is_fully_idle(ignore_waiting=self._engine_paused):
            # On a CPU, empty_cache would only run a slow garbage collection.
            super().flush_cache(empty_cache and self.device != "cpu")
        return True

    # -- pausing -----------------------------------------------------------------------------------------------------

    def pause_generation(self, recv_req: PauseGenerationReqInput) -> None:
        """Process the pending result, end aborted requests, then pause as SGLang does."""
        if self.enable_overlap and self.last_batch:
            self._flush_last_result()
        self._end_aborted()
        super().pause_generation(recv_req)

    def _flush_last_result(self) -> None:
        # With overlap scheduling a result is pending when a pause begins. It belongs to the old weights.
        self.process_batch_result(*self.result_queue.popleft())
        last, self.last_batch = self.last_batch, None
        self.running_batch.batch_is_full = False
        if last.forward_mode.is_extend():
            last.filter_batch(chunked_req_to_exclude=[self.chunked_req, last.chunked_req])
            if self.running_batch.is_empty():
                self.running_batch = last
            elif not last.is_empty():
                self.running_batch.merge_batch(last)

    def _record_scheduler_state_for_paused_engine(self) -> None:
        super()._record_scheduler_state_for_paused_engine()
        self.cur_batch_for_debug = None  # Otherwise the watchdog would take a long pause for a hanging batch.
        self.maybe_sleep_on_idle()

    # -- aborting ----------------------------------------------------------------------------------------------------

    def abort_request(self, recv_req: AbortReq) -> None:
        """Abort requests. Retracted ones, and all if the scheduler is paused, end now with their tokens so far."""
        retracted = [req for req in self.waiting_queue if req.output_ids and _matches(recv_req, req)]
        self.waiting_queue = [req for req in self.waiting_queue if req not in retracted]
        for req in retracted:
            self._release_aborted_request(req)
            self._finish_aborted(req)
        super().abort_request(recv_req)
        if self._engine_paused:
            self._end_aborted()

    def process_pending_chunked_abort(self) -> None:
        """End a request that is aborted during its chunked prefill. A retracted one returns its tokens so far."""
        req = self._pending_chunked_abort_req
        if req is not None and req.output_ids and req is self.chunked_req:
            self._pending_chunked_abort_req = self.chunked_req = None
            self._release_aborted_request(req)
            release_kv_cache(req, self.tree_cache, is_insert=False)
            self._finish_aborted(req)
        super().process_pending_chunked_abort()

    def _end_aborted(self) -> None:
        """End aborted requests now, which SGLang does only after a step. None of them may be in a running step."""
        self.process_pending_chunked_abort()
        for req in self.collect_inflight_reqs():
            if req.to_finish is not None and not req.finished():
                release_kv_cache(req, self.tree_cache)
                self._finish_aborted(req)

    def _finish_aborted(self, req: Req) -> None:
        req.finished_reason, req.to_finish = req.to_finish or FINISH_ABORT(), None
        self.output_streamer.stream_output([req], req.return_logprob)

    # -- streaming ---------------------------------------------------------------------------------------------------

    def set_internal_state(self, recv_req: SetInternalStateReq) -> Any:
        """Send the tokens of the named requests after every step from now on. SGLang would do this for all or none."""
        rids = {key.removeprefix(STREAM) for key in recv_req.server_args if key.startswith(STREAM)}
        if not rids:
            return super().set_internal_state(recv_req)
        saved = self._saved_state or (None, None, None, ())
        batches = [self.running_batch, self.last_batch, *saved[:2]]
        chunked = [req for req in (self.chunked_req, saved[2]) if req is not None]
        running = [req for batch in batches if batch is not None for req in batch.reqs]
        for req in (*running, *chunked, *self.waiting_queue, *saved[3]):
            if req.rid in rids:
                req.stream = True
        return None

    # -- scoring while paused ----------------------------------------------------------------------------------------

    def ingest_requests(self) -> list[Any]:
        """Receive requests. If the scheduler is paused, scoring requests run while the paused ones are set aside."""
        if self._saved_state is not None and self._all_scored():
            self._restore_paused_state()  # Messages that arrive below may concern the paused requests.
        received: list[Any] = super().ingest_requests()
        if self._saved_state is None and self._engine_paused and any(map(_is_score, self.waiting_queue)):
            self._save_paused_state()
        return received

    def on_idle(self) -> None:
        """Handle an idle step. If sequences to score wait for memory, retract the paused requests."""
        if self._saved_state is None:  # Otherwise SGLang would report the memory of paused requests as a leak.
            super().on_idle()
        elif self.waiting_queue:
            self._retract_for_scores()

    def _retract_for_scores(self) -> None:
        """Retract the paused requests, because the sequences to score do not fit into the remaining memory.

        If no paused request uses memory, abort the scoring requests.
        """
        scores = self.waiting_queue
        self._restore_paused_state()
        is_empty = not self.collect_inflight_reqs() and self.chunked_req is None
        others, self.waiting_queue = self.waiting_queue, []
        super().pause_generation(PauseGenerationReqInput(mode="retract"))
        self.waiting_queue += [*others, *scores]
        if is_empty:
            self.abort_request(AbortReq(rid=SCORE))

    def _save_paused_state(self) -> None:
        scores = [req for req in self.waiting_queue if _is_score(req)]
        others = [req for req in self.waiting_queue if not _is_score(req)]
        self._saved_state = (self.running_batch, self.last_batch, self.chunked_req, others)
        self.running_batch = ScheduleBatch(reqs=[], batch_is_full=False)
        self.last_batch = self.chunked_req = None
        self.waiting_queue = scores
        self._engine_paused = False

    def _all_scored(self) -> bool:
        batches = [self.running_batch, *([self.last_batch] if self.last_batch else [])]
        is_running = any(not req.finished() for batch in batches for req in batch.reqs) or self.chunked_req is not None
        return not (is_running or self.waiting_queue or getattr(self, "result_queue", None))

    def _restore_paused_state(self) -> None:
        assert self._saved_state is not None
        self.running_batch, self.last_batch, self.chunked_req, self.waiting_queue = self._saved_state
        self._saved_state = None
        self._engine_paused = True


def _is_score(req: Req) -> bool:
    return bool(req.rid.startswith(SCORE))


def _matches(abort: AbortReq, req: Req) -> bool:
    return bool(abort.abort_all or req.rid.startswith(abort.rid))


@dataclass(frozen=True)
class SchedulerSettings:
    """Settings that are passed to every scheduler process."""

    tokenizer: PreTrainedTokenizerBase
    stop_tokens: frozenset[int]
    """The model's end-of-sequence tokens."""
    threads: int | None
    """Number of CPU threads; None for torch's default."""


def run_scheduler(settings: SchedulerSettings, *args: Any, **kwargs: Any) -> None:
    """Run a scheduler process until SGLang ends it, then exit the process.

    Args:
        settings: Settings of the process.
        args: Positional arguments of SGLang's `run_scheduler_process`, which this function replaces.
        kwargs: Its keyword arguments.
    """
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    tqdm.set_lock(threading.RLock())  # tqdm's own lock is a file in /dev/shm, which outlives a killed process.
    _protect_parent()
    sampler.install_sampler(settings.tokenizer, settings.stop_tokens)
    sglang_scheduler.Scheduler = Scheduler
    # A file in /dev/shm that outlives a killed process. It balances data-parallel schedulers, of which there is one.
    sglang_scheduler.create_load_snapshot_writer = lambda *args, **kwargs: None
    sglang_scheduler.run_scheduler_process(*args, **kwargs)
    _end_this_process(0)  # A regular interpreter shutdown would take seconds.


def _protect_parent() -> None:
    """Prevent a failing SGLang process from killing its parent. The parent detects the end of the process itself."""
    parent, send = os.getppid(), psutil.Process.send_signal

    def send_signal(process: psutil.Process, number: int) -> None:
        if process.pid == parent and number == signal.SIGQUIT:
            _end_this_process(1)
        send(process, number)

    psutil.Process.send_signal = send_signal  # type: ignore[method-assign,assignment]


def _end_this_process(status: int) -> NoReturn:
    sys.stderr.flush()
    os._exit(status)
