"""TorchRL's collector of conversations, with exact counts, versions and limits."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import nn
from torchrl.data import ReplayBuffer
from torchrl.envs import Compose, EnvBase, TransformedEnv

from skyrl_train.errors import ConfigError, DeadlineExceeded
from skyrl_train.tensordict.collectors.delivery import POLL_S, Delivery, Postproc, TorchRLCollector
from skyrl_train.tensordict.collectors.weight_updaters import WeightUpdaterBase
from skyrl_train.tensordict.envs.versions import PolicyVersion, write_version
from skyrl_train.tensordict.ragged import flattened, rows_of
from skyrl_train.tensordict.wrappers.weight_sync import Source

log = logging.getLogger(__name__)

Policy = Callable[[TensorDictBase], TensorDictBase | None]
_OWN_SETTINGS = {"self", "__class__", "weight_updater", "queue", "track_policy_version", "max_staleness", "timeout"}
"""Local variables of the constructor that TorchRL's does not get."""


class LLMCollector(Delivery):
    """A collector of batches of turns: the observation, the policy's answer, "next", and the version that answered.

    - default: [B, T], the environment's rows and the number of steps that gives `dialog_turns_per_batch` turns; a row
      whose episode ends begins another. With `flatten_data` or a replay buffer, [B * T], row after row.
    - yield_completed_trajectories: [N], concatenated complete trajectories, as soon as they have
      `dialog_turns_per_batch` turns (None: at least one turn per row). Unfinished ones continue in the next batch. With
      an AsyncEnvPool, every batch is one trajectory, in the order in which they end.
    - yield_only_last_steps: [N], only the last turn of each trajectory; `dialog_turns_per_batch` counts those.

    Nothing is sampled and no environment is reset before the first batch is requested. Weights change only between two
    turns: every turn is sampled by a single version, which `track_policy_version` records.

    Args:
        env: An environment, or a function that makes one. It is closed by `shutdown`.
        policy, policy_factory: A wrapper, or any callable on tensordicts; or a function that makes one, which
            `shutdown` closes. Exactly one of them.
        dialog_turns_per_batch: Number of turns of a batch, rounded up to a multiple of the environment's rows.
        total_dialog_turns: No batch is begun once this many turns have run, yielded or not; -1: no limit.
        reset_at_each_iter: Begin new episodes in every batch.
        replay_buffer, queue: Where batches are delivered; iterating then yields None for each. A queue gets rows. See
            `Delivery`, also for `start`.
        postproc: Applied to every batch first.
        weight_updater: One, or a function that makes one, from the policy if it takes an argument; None:
            `WeightUpdaterBase.from_policy`.
        track_policy_version: True, or a PolicyVersion: rows get "policy_version".
        async_envs: True only with an AsyncEnvPool.
        max_staleness: Complete trajectories that contain a turn more than this many updates older than the newest
            version at the end of their batch are dropped, and counted in `dropped_turns`. Batches of turns are not
            filtered: only `start` limits their age, by waiting. None: no bound.
        timeout: Seconds to wait for the current turn, or for room in the queue.
    """

    def __init__(
        self,
        env: EnvBase | Callable[[], EnvBase],
        *,
        policy: Policy | None = None,
        policy_factory: Callable[[], Policy] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Postproc | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: ReplayBuffer | None = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: WeightUpdaterBase | Callable[..., WeightUpdaterBase] | None = None,
        queue: Any = None,
        track_policy_version: bool | PolicyVersion = False,
        verbose: bool = False,
        max_staleness: int | None = None,
        timeout: float = 600.0,
    ):
        settings: dict[str, Any] = {name: value for name, value in locals().items() if name not in _OWN_SETTINGS}
        check_settings(settings)
        self.deliver_to(replay_buffer, queue, max_staleness, timeout)
        completed, only_last = settings["yield_completed_trajectories"], bool(yield_only_last_steps)
        settings |= {"yield_completed_trajectories": False, "yield_only_last_steps": False}  # TorchRL's need flat rows
        settings["dialog_turns_per_batch"] = dialog_turns_per_batch or 1
        super().__init__(**settings)
        self.yield_completed_trajectories, self.yield_only_last_steps = completed, only_last
        self.track_traj_ids = False
        self.records_version = bool(track_policy_version)
        self.policy_version_tracker = self._version_tracker(track_policy_version)
        self._owned = policy is None
        self.dropped_turns = 0
        """Number of turns of trajectories that were too old at the end of their batch."""
        self._sampling = threading.RLock()
        self._root: TensorDictBase | None = None
        self._trajectories: dict[tuple[int, int], tuple[int, list[TensorDictBase]]] = {}
        """Row -> number of updates before its first turn, and its turns so far."""
        self._acted_at: dict[tuple[int, int], int] = {}
        """Row -> number of updates before its latest turn."""
        self._ended: list[tuple[int, list[TensorDictBase]]] = []
        self._trajectory_ids: dict[tuple[int, int], int] = defaultdict(count().__next__)
        """Row -> number of the trajectory that it runs, which batches have under ("collector", "traj_ids")."""
        self._running = 0
        """Number of environments of an AsyncEnvPool that run a step."""
        self.weight_updater = WeightUpdaterBase.made(weight_updater, self.policy)

    @property
    def turns(self) -> int:
        """Number of turns that have run."""
        return self._frames  # type: ignore[no-any-return]

    # -- policy and versions ----------------------------------------------------------------------------------------

    def increment_version(self) -> None:
        """Record that the policy has new weights; an updater calls it itself."""
        with self.no_sampling():
            self.policy_version_tracker.increment_version()

    def _push(self, weights: Source | None, worker_ids: Any) -> None:
        if self.weight_updater is not None:
            self.weight_updater.push_weights(weights, worker_ids)
        elif isinstance(self.policy, nn.Module) and next(self.policy.parameters(), None) is not None:
            with self.no_sampling():
                TorchRLCollector.update_policy_weights_(self, _as_tensordict(weights))
        else:
            raise ConfigError(
                f"No weight updater is known for {type(self.policy).__name__}. Give the collector a weight_updater."
            )

    @contextmanager
    def no_sampling(self) -> Iterator[None]:
        """Prevent turns from being sampled inside the block, after waiting for the current one.

        Raises DeadlineExceeded if the current turn, or another push, takes longer than `timeout`.
        """
        if not self._sampling.acquire(timeout=self.timeout):
            raise DeadlineExceeded("the current turn, or another push of weights", self.timeout)
        try:
            yield
        finally:
            self._sampling.release()

    # -- turns --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def rollout(self) -> TensorDictBase | None:
        """Collect one batch without delivering it; return None after the last one, or if stopped.

        An error ends the current episodes; the next batch begins new ones.
        """
        if self._stopping.is_set() or (self._frames >= self.total_frames and not self._running and not self._ended):
            return None
        if self.pre_collect_hook is not None:
            self.pre_collect_hook()
        try:
            if self.reset_at_each_iter:
                self._forget()
            rows = self._complete_trajectories() if self.yield_completed_trajectories else self._steps()
        except BaseException:
            self._forget()
            raise
        if rows is not None and self.verbose:
            log.info("batch of %d turns, %d have run, policy version %s", rows.numel(), self.turns, self.policy_version)
        return rows

    def reset(self) -> None:
        """Discard the current episodes: the next batch begins new ones."""
        with self.no_sampling():
            self._forget()

    def _steps(self) -> TensorDictBase | None:
        steps: list[TensorDictBase] = []
        while len(steps) < self.frames_per_batch and not self._stopping.is_set():
            root = self.env.reset() if self._root is None else self._root
            step, following = self.env.step_and_maybe_reset(self._act(root))
            self._record(step, following)
            steps.append(step)
        if not steps:
            return None
        batch = lazy_stack(steps, dim=-1)
        return flattened(batch) if self.flatten_data else batch

    def _complete_trajectories(self) -> TensorDictBase | None:
        while not (rows := self._complete_rows()) and not self._stopping.is_set():
            if self._root is None:
                self._root = self.env.reset()
            if not self.async_envs:
                step, following = self.env.step_and_maybe_reset(self._act(self._root))
            else:
                # The last turns are those that run already, unless no conversation has ended with them.
                if self._frames < self.total_frames or not self._running:
                    self._running += self._root.shape[0]
                    self.env.async_step_and_maybe_reset_send(self._act(self._root))
                step, following = self._received(1)
                self._running -= step.shape[0]
            self._record(step, following)
            for place, row in zip(self._places(step), rows_of(step), strict=True):
                self._trajectories.setdefault(place, (self._acted_at[place], []))[1].append(row)
                if bool(row["next", "done"].any()):
                    self._ended.append(self._trajectories.pop(place))
        return lazy_stack(rows) if rows else None

    def _complete_rows(self) -> list[TensorDictBase]:
        """Remove and return a batch of complete trajectories, or an empty list if there are too few."""
        self._ended = self._recent(self._ended)  # also those that ended earlier: there may have been updates since
        taken = self._ended[:1] if self.async_envs else self._ended
        rows = [row for _, steps in taken for row in (steps[-1:] if self.yield_only_last_steps else steps)]
        if len(rows) < (1 if self.async_envs else self.dialog_turns_per_batch):
            return []
        self._ended = self._ended[len(taken) :]
        return rows

    def _recent(self, ended: list[tuple[int, list[TensorDictBase]]]) -> list[tuple[int, list[TensorDictBase]]]:
        """Remove trajectories that are too old by now; each is paired with the updates before its first turn."""
        if self.max_staleness is None:
            return ended
        oldest = max(self._updates(), self._ahead or 0) - self.max_staleness
        self.dropped_turns += sum(len(steps) for updates, steps in ended if updates < oldest)
        return [one for one in ended if one[0] >= oldest]

    def _places(self, step: TensorDictBase) -> list[tuple[int, int]]:
        """Return (environment, row) of each row, where an AsyncEnvPool returns some of its environments."""
        size = step[:1].numel()
        if not self.async_envs:
            return [divmod(place, size) for place in range(step.numel())]
        numbers = rows_of(step)[::size]
        return [(int(row[self.env._env_idx_key]), place) for row in numbers for place in range(size)]

    def _act(self, root: TensorDictBase) -> TensorDictBase:
        """Return the observations with the policy's actions and the version that acted."""
        with self.no_sampling():
            version = self.policy_version
            if self.yield_completed_trajectories:
                self._acted_at |= dict.fromkeys(self._places(root), self._updates())
            acted = _merged(root, self.policy(root))
        self._frames += root.numel()
        if self.records_version:
            write_version(acted, version)
        return acted

    def _record(self, step: TensorDictBase, following: TensorDictBase) -> None:
        """Complete the record of a step, and keep the next observations."""
        # They are in the record as "next", which a policy that writes into its input must not change.
        self._root = following.copy()
        if self.records_version:
            step.set(("next", "policy_version"), step.get("policy_version"))
        places = self._places(step)
        ids = torch.tensor([self._trajectory_ids[place] for place in places])
        step.set(("collector", "traj_ids"), ids.reshape(step.batch_size))
        for place, done in zip(places, step["next", "done"].reshape(len(places), -1).any(-1), strict=True):
            if done:
                del self._trajectory_ids[place]

    def _forget(self) -> None:
        """Discard the current episodes: the next turn begins new ones."""
        self._root = None
        self._trajectories, self._ended = {}, []
        self._trajectory_ids.clear()
        running, self._running = self._running, 0
        if running:
            self._received(running)

    def _received(self, count: int) -> Any:
        """Return what at least `count` environments of a pool send. Raises DeadlineExceeded after `timeout` seconds."""
        deadline = time.monotonic() + self.timeout
        while True:
            with suppress(TimeoutError):  # with a longer timeout, a pool waits for all of its environments
                return self.env.async_step_and_maybe_reset_recv(min_get=count, timeout=0.0)
            if time.monotonic() > deadline:
                raise DeadlineExceeded("an environment of the AsyncEnvPool", self.timeout)
            time.sleep(POLL_S / 10)

    def _updates(self) -> int:
        return len(self.policy_version_tracker.version_history) - 1

    # -- construction and closing -------------------------------------------------------------------------------------

    def _make_carrier(self) -> None:
        self._carrier = None  # TorchRL's general collector resets the environment here

    def _maybe_make_final_rollout(self, make_rollout: bool) -> None:
        pass  # TorchRL's general collector calls the policy here

    def _maybe_setup_policy_env_transforms(self, env: EnvBase, policy: Any) -> EnvBase:
        return env  # language models have no state for which the environment would need a transform

    def _setup_total_frames(self, total_frames: int, frames_per_batch: int) -> None:
        self.total_frames = float("inf") if total_frames < 0 else total_frames

    def _setup_frames_per_batch(self, frames_per_batch: int) -> None:
        self.frames_per_batch = -(-frames_per_batch // self.n_env)
        self.requested_frames_per_batch = self.frames_per_batch * self.n_env

    def _version_tracker(self, asked: bool | PolicyVersion) -> Any:
        """Return the given PolicyVersion, the environment's, or a new one that counts the updates."""
        if not isinstance(asked, bool):
            return asked
        outer = self.env.transform if isinstance(self.env, TransformedEnv) else None
        transforms = outer.transforms if isinstance(outer, Compose) else [outer]
        found = [one for one in transforms if isinstance(one, PolicyVersion)]
        return found[0] if found else PolicyVersion()

    def _release(self, close_env: bool) -> None:
        with ExitStack() as closing:  # closes all of them, even if one raises; last in, first out
            if close_env:
                closing.callback(self.env.close, raise_if_closed=False)
            if self._owned and hasattr(self.policy, "close"):
                closing.callback(self.policy.close)
            if hasattr(self.weight_updater, "close"):
                closing.callback(self.weight_updater.close)


def _as_tensordict(weights: Source | None) -> TensorDictBase:
    """Return the weights of a module, or tensors by name, in the form of TensorDict.from_module."""
    if weights is None:
        raise ConfigError("Give update_policy_weights_ a model or its tensors: the policy has no weight updater.")
    if isinstance(weights, nn.Module):
        return TensorDict.from_module(weights)
    return weights if isinstance(weights, TensorDictBase) else TensorDict(dict(weights)).unflatten_keys(".")


def check_settings(settings: dict[str, Any]) -> None:
    """Set whether complete trajectories are yielded.

    Raises TypeError for settings that contradict each other, ConfigError for wrong numbers of turns or of policies.
    """
    completed, only_last = settings["yield_completed_trajectories"], settings["yield_only_last_steps"]
    flatten_data, turns = settings["flatten_data"], settings["dialog_turns_per_batch"]
    total = settings["total_dialog_turns"]
    if (settings["policy"] is None) == (settings["policy_factory"] is None):
        raise ConfigError("A collector needs exactly one of policy and policy_factory.")
    if only_last and completed is False:
        raise TypeError("yield_only_last_steps=True needs completed trajectories: omit yield_completed_trajectories.")
    if only_last and flatten_data is not None:
        raise TypeError(f"flatten_data={flatten_data} cannot be used with yield_only_last_steps=True: rows are flat.")
    if only_last and settings["reset_at_each_iter"]:
        raise TypeError("reset_at_each_iter=True would end the trajectories that yield_only_last_steps=True waits for.")
    settings["yield_completed_trajectories"] = completed = bool(completed or only_last)
    if completed and flatten_data is False:
        raise TypeError("Omit flatten_data=False: complete trajectories, which differ in length, are always flat.")
    if turns is None and not completed:
        raise ConfigError("dialog_turns_per_batch is required, except with yield_completed_trajectories=True.")
    if turns is not None and (type(turns) is not int or turns < 1):
        raise ConfigError(f"dialog_turns_per_batch={turns!r}: give an integer of at least 1.")
    if type(total) is not int or (total < 1 and total != -1):
        raise ConfigError(f"total_dialog_turns={total!r}: give an integer of at least 1, or -1 for no limit.")


def _merged(root: TensorDictBase, answer: TensorDictBase | None) -> TensorDictBase:
    """Merge observation and action; `answer` may be the whole observation, or only the policy's additions to it."""
    if answer is None or answer is root:
        return root
    if answer.batch_size != root.batch_size:
        raise ConfigError(
            f"The policy returned batch_size={tuple(answer.batch_size)} for {tuple(root.batch_size)}; for several "
            "samples of a prompt, repeat its row: DatasetChatEnv(repeats=...)."
        )
    if set(root.keys()) <= set(answer.keys()):
        return answer
    if root.ndim == 0:
        return root.copy().update(answer)
    rows = zip(root.unbind(0), answer.unbind(0), strict=True)
    return lazy_stack([row.copy().update(added) for row, added in rows])
