"""A policy in a tensordict environment, batch by batch."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from tensordict import TensorDictBase, lazy_stack

from skyrl_train.errors import ConfigError, DeadlineExceeded
from skyrl_train.tensordict.collectors.delivery import Buffer, Delivery, Postproc
from skyrl_train.tensordict.collectors.weight_updaters import WeightUpdaterBase
from skyrl_train.tensordict.envs.base import Policy, TensorDictEnv, keys_of
from skyrl_train.tensordict.envs.versions import PolicyVersion, Version
from skyrl_train.tensordict.ragged import flattened
from skyrl_train.tensordict.wrappers.weight_sync import Source

log = logging.getLogger(__name__)


class LLMCollector(Delivery):
    """Batches of turns: what the environment showed, what the policy answered, "next", and which version answered.

    - default: [B, T], the environment's rows and as many steps as give `dialog_turns_per_batch` turns; a row whose
      episode ends begins another. [B * T], row after row, with `flatten_data` or a replay buffer.
    - yield_completed_trajectories: [N], whole trajectories one after the other, as soon as they have
      `dialog_turns_per_batch` turns (None: as soon as there is one). Others go on in the next batch.
    - yield_only_last_steps: [N], only the last turn of each; `dialog_turns_per_batch` counts those.

    Nothing is sampled before the first batch is asked for. Weights change between two turns, never during one: every
    turn is sampled by one version, and with `track_policy_version` says by which.

    Args:
        env: A TensorDictEnv, or a function that makes one; its batch size is [B]. It is closed by `shutdown`.
        policy, policy_factory: A wrapper, or any callable on tensordicts [B]; or what makes one, which `shutdown`
            closes. Exactly one of them.
        total_dialog_turns: No more turns are begun once as many have run, yielded or not; -1: no end.
        reset_at_each_iter: Every batch begins new episodes.
        replay_buffer, queue: Where batches go; iterating then gives None for each. See `Delivery`, also for `start`.
        postproc: What every batch goes through first.
        weight_updater: One, or a function of the policy that makes one; None: `WeightUpdaterBase.from_policy`.
        track_policy_version: True, or a PolicyVersion: rows carry "policy_version".
        async_envs: Must be false: environments of a batch take their turns together.
        max_staleness: Whole trajectories with a turn of a version more updates than this older than the newest at the
            end of their batch are dropped, and counted in `dropped_turns`. Batches of turns are kept as they are: only
            `start` sees to their age, by waiting. None: no bound.
        timeout: Seconds to wait for a turn under way, or for room in the queue.
    """

    def __init__(
        self,
        env: TensorDictEnv | Callable[[], TensorDictEnv],
        *,
        policy: Policy | None = None,
        policy_factory: Callable[[], Policy] | None = None,
        dialog_turns_per_batch: int | None = None,
        yield_only_last_steps: bool | None = None,
        yield_completed_trajectories: bool | None = None,
        postproc: Postproc | None = None,
        total_dialog_turns: int = -1,
        async_envs: bool | None = None,
        replay_buffer: Buffer | None = None,
        reset_at_each_iter: bool = False,
        flatten_data: bool | None = None,
        weight_updater: WeightUpdaterBase | Callable[[Any], WeightUpdaterBase] | None = None,
        queue: Any = None,
        track_policy_version: bool | PolicyVersion = False,
        verbose: bool = False,
        max_staleness: int | None = None,
        timeout: float = 600.0,
    ):
        super().__init__(replay_buffer, queue, postproc, max_staleness, timeout)
        self.yield_only_last_steps = bool(yield_only_last_steps)
        self.yield_completed_trajectories = self.yield_only_last_steps or bool(yield_completed_trajectories)
        check_yields(
            dialog_turns_per_batch,
            total_dialog_turns,
            completed=self.yield_completed_trajectories,
            only_last=self.yield_only_last_steps,
            flatten_data=flatten_data,
            reset_at_each_iter=reset_at_each_iter,
            async_envs=async_envs,
        )
        if yield_only_last_steps and yield_completed_trajectories is False:
            raise TypeError("yield_only_last_steps=True takes completed trajectories: leave the other one out.")
        if (policy is None) == (policy_factory is None):
            raise ConfigError("LLMCollector needs exactly one of policy and policy_factory.")
        self.dialog_turns_per_batch = dialog_turns_per_batch
        self.total_dialog_turns = total_dialog_turns
        self.reset_at_each_iter, self.verbose = reset_at_each_iter, verbose
        self.flatten_data = replay_buffer is not None if flatten_data is None else flatten_data
        self.env = env if isinstance(env, TensorDictEnv) else env()
        if len(self.env.batch_size) != 1:
            raise ValueError(f"the environment's batch_size={tuple(self.env.batch_size)} must have one dimension.")
        self._versions = self._version_transform(track_policy_version)
        self._owned = policy is None
        self.policy: Any = policy_factory() if policy_factory is not None else policy
        self.turns = 0
        """That have run."""
        self.dropped_turns = 0
        """Of trajectories that were too old by the end of their batch."""
        self._sampling = threading.RLock()
        self._root: TensorDictBase | None = None
        self._trajectories: dict[int, tuple[int, list[TensorDictBase]]] = {}
        """By row: updates before its first turn, and its turns so far."""
        self.weight_updater = self._updater(weight_updater)

    # -- policy and versions ----------------------------------------------------------------------------------------

    def get_policy_model(self) -> Any:
        return self.policy

    @property
    def policy_version(self) -> Version:
        return self._versions.version

    def get_policy_version(self) -> Version:
        return self.policy_version

    def increment_version(self) -> None:
        """The policy has new weights; an updater says so itself."""
        with self.no_sampling():
            self._versions.increment_version()

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
        """Push weights, given in one of four ways (`weights_dict` as {"policy": ...}), else the updater's own.

        Waits for the turn under way. Raises what ended the thread of `start`.
        """
        self._check_open()
        chosen = one_source(policy_or_weights, weights, policy, weights_dict, model_id)
        if self.weight_updater is None:
            raise ConfigError(f"no updater fits {type(self.policy).__name__}: give the collector a weight_updater.")
        self.weight_updater.push_weights(chosen, worker_ids)

    @contextmanager
    def no_sampling(self) -> Iterator[None]:
        """No turn is sampled meanwhile. DeadlineExceeded where the one, or a push, under way takes over `timeout`."""
        if not self._sampling.acquire(timeout=self.timeout):
            raise DeadlineExceeded("the policy's turn, or the push of weights, under way", self.timeout)
        try:
            yield
        finally:
            self._sampling.release()

    # -- turns --------------------------------------------------------------------------------------------------------

    def rollout(self) -> TensorDictBase | None:
        """See Delivery. What fails ends the episodes under way; the next batch begins new ones."""
        try:
            if self.reset_at_each_iter:
                self._forget()
            rows = self._completed() if self.yield_completed_trajectories else self._steps()
        except BaseException:
            self._forget()
            raise
        if rows is not None and self.verbose:
            log.info("batch of %d turns, %d have run, policy version %s", rows.numel(), self.turns, self.policy_version)
        return rows

    def _steps(self) -> TensorDictBase | None:
        assert self.dialog_turns_per_batch is not None
        steps: list[TensorDictBase] = []
        while sum(len(step) for step in steps) < self.dialog_turns_per_batch and self._may_go_on():
            steps.append(self._turn())
        if not steps:
            return None
        batch = lazy_stack(steps, dim=1)
        return flattened(batch) if self.flatten_data else batch

    def _completed(self) -> TensorDictBase | None:
        rows: list[TensorDictBase] = []
        ended: list[tuple[int, list[TensorDictBase]]] = []
        while len(rows) < (self.dialog_turns_per_batch or 1) and self._may_go_on():
            updates = self._updates()
            step = self._turn()
            for place, row in enumerate(step.unbind(0)):
                trajectory = self._trajectories.setdefault(place, (updates, []))
                trajectory[1].append(row)
                if bool(row["next", "done"].any()):
                    ended.append(self._trajectories.pop(place))
            ended = self._fresh(ended)  # those that ended earlier, too: there may have been updates since
            rows = [row for _, steps in ended for row in (steps[-1:] if self.yield_only_last_steps else steps)]
        return lazy_stack(rows) if rows else None

    def _fresh(self, ended: list[tuple[int, list[TensorDictBase]]]) -> list[tuple[int, list[TensorDictBase]]]:
        """Without trajectories that are too old by now; each comes with the updates before its first turn."""
        if self.max_staleness is None:
            return ended
        oldest = max(self._updates(), self._ahead or 0) - self.max_staleness
        self.dropped_turns += sum(len(steps) for updates, steps in ended if updates < oldest)
        return [one for one in ended if one[0] >= oldest]

    def _may_go_on(self) -> bool:
        return not self._stopping.is_set() and not 0 <= self.total_dialog_turns <= self.turns

    def _turn(self) -> TensorDictBase:
        """One step of all rows, with "next"."""
        root = self.env.reset() if self._root is None else self._root
        try:
            with self.no_sampling():
                self._versions.acting = self._versions.version
                acted = _merged(root, self.policy(root))
            step, following = self.env.step_and_maybe_reset(acted)
        finally:
            self._versions.acting = None
        self.turns += len(step)
        # What goes on is in the record as "next": a policy that writes into what it is shown must not reach it.
        self._root = lazy_stack([row.copy() for row in following.unbind(0)])
        return step

    def _forget(self) -> None:
        """The next turn begins new episodes."""
        self._root = None
        self._trajectories = {}

    def _updates(self) -> int:
        return len(self._versions.version_history) - 1

    # -- making and closing -------------------------------------------------------------------------------------------

    def _version_transform(self, asked: bool | PolicyVersion) -> PolicyVersion:
        """The environment's, or another that counts; only one in the environment writes into rows."""
        there = [one for one in self.env.transforms if isinstance(one, PolicyVersion)]
        if isinstance(asked, PolicyVersion):
            if there and asked not in there:
                raise ConfigError("track_policy_version: the environment has another PolicyVersion.")
            transform = asked
        else:
            transform = there[0] if there else PolicyVersion()
        if asked and transform not in there:
            self.env.append_transform(transform)
        return transform

    def _updater(self, given: Any) -> WeightUpdaterBase | None:
        made = given if given is None or isinstance(given, WeightUpdaterBase) else given(self.policy)
        updater: WeightUpdaterBase | None = WeightUpdaterBase.from_policy(self.policy) if made is None else made
        if updater is not None:
            updater.register_collector(self)
        if hasattr(self.policy, "register_collector"):
            self.policy.register_collector(weakref.ref(self))
        return updater

    def _release(self, close_env: bool) -> None:
        with ExitStack() as closing:  # all of them, whatever one raises; last in, first out
            if close_env:
                closing.callback(self.env.close)
            if self._owned and hasattr(self.policy, "close"):
                closing.callback(self.policy.close)
            if self.weight_updater is not None:
                closing.callback(self.weight_updater.close)


def check_yields(
    turns: int | None,
    total: int,
    *,
    completed: bool,
    only_last: bool,
    flatten_data: bool | None,
    reset_at_each_iter: bool,
    async_envs: bool | None,
) -> None:
    """Raises for settings that contradict each other, or that cannot be had."""
    if async_envs:
        raise RuntimeError(
            "async_envs=True needs a pool of environments, which is not offered: give the environment more rows, they "
            "share every call of the policy."
        )
    if only_last and flatten_data is not None:
        raise TypeError(f"flatten_data={flatten_data} cannot be chosen with yield_only_last_steps=True: rows are flat.")
    if only_last and reset_at_each_iter:
        raise TypeError("reset_at_each_iter=True would cut the trajectories that yield_only_last_steps=True waits for.")
    if completed and flatten_data is False:
        raise TypeError("flatten_data=False cannot be had with whole trajectories: they differ in length.")
    if turns is None and not completed:
        raise ConfigError("dialog_turns_per_batch is needed; only yield_completed_trajectories=True does without.")
    if turns is not None and (type(turns) is not int or turns < 1):
        raise ConfigError(f"dialog_turns_per_batch={turns!r}: give a whole number of at least 1.")
    if type(total) is not int or (total < 1 and total != -1):
        raise ConfigError(f"total_dialog_turns={total!r}: give a whole number of at least 1, or -1 for no end.")


def one_source(
    policy_or_weights: Any, weights: Any, policy: Any, weights_dict: Mapping[str, Any] | None, model_id: str | None
) -> Any:
    """The weights of a call that may name them in four ways; None where it names none."""
    if model_id not in (None, "policy"):
        raise ConfigError(f"model_id={model_id!r}: a collector has one model, 'policy'.")
    if weights_dict is not None and set(weights_dict) != {"policy"}:
        raise ConfigError(f"weights_dict has {sorted(weights_dict)}: a collector has one model, 'policy'.")
    nested = None if weights_dict is None else weights_dict["policy"]
    given = [one for one in (policy_or_weights, weights, policy, nested) if one is not None]
    if len(given) > 1:
        raise ConfigError("give weights once: as policy_or_weights, weights=, policy= or weights_dict=.")
    return given[0] if given else None


def _merged(root: TensorDictBase, answer: TensorDictBase | None) -> TensorDictBase:
    """Observation and action; `answer` may be the observation itself, or only what the policy adds to it."""
    if answer is None or answer is root:
        return root
    if answer.batch_size != root.batch_size:
        raise ConfigError(
            f"the policy answered {tuple(answer.batch_size)} for {tuple(root.batch_size)}; several samples of a prompt "
            "are rows of their own here: DatasetChatEnv(repeats=...)."
        )
    if "episode" in keys_of(answer):
        return answer
    rows = zip(root.unbind(0), answer.unbind(0), strict=True)
    return lazy_stack([row.copy().update(added) for row, added in rows])
