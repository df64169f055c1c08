"""Runs a policy in a tensordict environment and collects batches."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack

from skyrl_train.errors import ConfigError, DeadlineExceeded
from skyrl_train.tensordict.collectors.delivery import Buffer, Delivery, Postproc
from skyrl_train.tensordict.collectors.weight_updaters import WeightUpdaterBase
from skyrl_train.tensordict.envs.base import Policy, TensorDictEnv, Transform, keys_of
from skyrl_train.tensordict.envs.versions import PolicyVersion, Version
from skyrl_train.tensordict.ragged import flattened
from skyrl_train.tensordict.wrappers.weight_sync import Source

log = logging.getLogger(__name__)

MAX_TOO_LONG = 100
"""Number of consecutive times that first prompts beyond the model's context are replaced before an error."""


class LLMCollector(Delivery):
    """A collector of batches of turns: the observation, the policy's answer, "next", and the version that answered.

    - default: [B, T], the environment's rows and the number of steps that gives `dialog_turns_per_batch` turns; a row
      whose episode ends begins another. With `flatten_data` or a replay buffer, [B * T], row after row.
    - yield_completed_trajectories: [N], concatenated complete trajectories, as soon as they have
      `dialog_turns_per_batch` turns (None: as soon as there is one). Unfinished ones continue in the next batch.
    - yield_only_last_steps: [N], only the last turn of each trajectory; `dialog_turns_per_batch` counts those.

    A conversation that leaves the model no room for another answer is truncated after its last turn, and a first prompt
    that does is skipped with a warning; this needs a policy with `fits`, as wrappers have it.

    Nothing is sampled before the first batch is requested. Weights change only between two turns: every turn is sampled
    by a single version, which `track_policy_version` records.

    Args:
        env: A TensorDictEnv, or a function that makes one; its batch size is [B]. It is closed by `shutdown`.
        policy, policy_factory: A wrapper, or any callable on tensordicts [B]; or a function that makes one, which
            `shutdown` closes. Exactly one of them.
        total_dialog_turns: No more turns are begun once this many have run, yielded or not; -1: no limit.
        reset_at_each_iter: Begin new episodes in every batch.
        replay_buffer, queue: Where batches are delivered; iterating then yields None for each. See `Delivery`, also
            for `start`.
        postproc: Applied to every batch first.
        weight_updater: One, or a function that makes one from the policy; None: `WeightUpdaterBase.from_policy`.
        track_policy_version: True, or a PolicyVersion: rows get "policy_version".
        async_envs: Must be false: the environments of a batch take their turns together.
        max_staleness: Complete trajectories that contain a turn more than this many updates older than the newest
            version at the end of their batch are dropped, and counted in `dropped_turns`. Batches of turns are not
            filtered: only `start` limits their age, by waiting. None: no bound.
        timeout: Seconds to wait for the current turn, or for room in the queue.
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
            raise TypeError(
                "yield_only_last_steps=True needs completed trajectories. Leave yield_completed_trajectories=False out."
            )
        if (policy is None) == (policy_factory is None):
            raise ConfigError("LLMCollector needs exactly one of policy and policy_factory.")
        self.dialog_turns_per_batch = dialog_turns_per_batch
        self.total_dialog_turns = total_dialog_turns
        self.reset_at_each_iter, self.verbose = reset_at_each_iter, verbose
        self.flatten_data = replay_buffer is not None if flatten_data is None else flatten_data
        self.env = env if isinstance(env, TensorDictEnv) else env()
        if len(self.env.batch_size) != 1:
            raise ValueError(f"The environment's batch_size={tuple(self.env.batch_size)} must have one dimension.")
        self._versions = self._version_transform(track_policy_version)
        self._owned = policy is None
        self.policy: Any = policy_factory() if policy_factory is not None else policy
        self._fits: Callable[[TensorDictBase], list[bool]] | None = getattr(self.policy, "fits", None)
        if self._fits is not None:
            self.env.append_transform(_ContextLimit(self._fits))
        self.turns = 0
        """Number of turns that have run."""
        self.dropped_turns = 0
        """Number of turns of trajectories that were too old at the end of their batch."""
        self._sampling = threading.RLock()
        self._root: TensorDictBase | None = None
        self._trajectories: dict[int, tuple[int, list[TensorDictBase]]] = {}
        """Row -> number of updates before its first turn, and its turns so far."""
        self.weight_updater = self._updater(weight_updater)

    # -- policy and versions ----------------------------------------------------------------------------------------

    def get_policy_model(self) -> Any:
        """Return the policy."""
        return self.policy

    @property
    def policy_version(self) -> Version:
        """Version of the policy: the number of updates, or a uuid if its PolicyVersion uses uuids."""
        return self._versions.version

    def get_policy_version(self) -> Version:
        """Return `policy_version`."""
        return self.policy_version

    def increment_version(self) -> None:
        """Record that the policy has new weights; an updater calls it itself."""
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
        """Push weights to the engines. Blocks until the current turn ends and the weights have arrived.

        Give the weights in at most one of four ways. Without any, the updater pushes those of its own source.

        Args:
            policy_or_weights: Module, wrapper, or tensors by name.
            worker_ids: Engines that get the weights, for the updater; None for all.
            model_id: Only "policy" or None, because a collector has one model.
            weights: The same as `policy_or_weights`.
            policy: The same as `policy_or_weights`.
            weights_dict: {"policy": weights}.

        Raises:
            ConfigError: There is no updater, or the weights are given twice or for another model.
            Exception: The error that ended the thread of `start`.
        """
        self._check_open()
        chosen = one_source(policy_or_weights, weights, policy, weights_dict, model_id)
        if self.weight_updater is None:
            raise ConfigError(
                f"No weight updater is known for {type(self.policy).__name__}. Give the collector a weight_updater."
            )
        self.weight_updater.push_weights(chosen, worker_ids)

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

    def rollout(self) -> TensorDictBase | None:
        """Collect one batch without delivering it; return None after the last one, or if stopped.

        An error ends the current episodes; the next batch begins new ones.
        """
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
        while sum(len(step) for step in steps) < self.dialog_turns_per_batch and self._may_continue():
            steps.append(self._turn())
        if not steps:
            return None
        batch = lazy_stack(steps, dim=1)
        return flattened(batch) if self.flatten_data else batch

    def _completed(self) -> TensorDictBase | None:
        rows: list[TensorDictBase] = []
        ended: list[tuple[int, list[TensorDictBase]]] = []
        while len(rows) < (self.dialog_turns_per_batch or 1) and self._may_continue():
            updates = self._updates()
            step = self._turn()
            for place, row in enumerate(step.unbind(0)):
                trajectory = self._trajectories.setdefault(place, (updates, []))
                trajectory[1].append(row)
                if bool(row["next", "done"].any()):
                    ended.append(self._trajectories.pop(place))
            ended = self._fresh(ended)  # also those that ended earlier: there may have been updates since
            rows = [row for _, steps in ended for row in (steps[-1:] if self.yield_only_last_steps else steps)]
        return lazy_stack(rows) if rows else None

    def _fresh(self, ended: list[tuple[int, list[TensorDictBase]]]) -> list[tuple[int, list[TensorDictBase]]]:
        """Remove trajectories that are too old by now; each is paired with the updates before its first turn."""
        if self.max_staleness is None:
            return ended
        oldest = max(self._updates(), self._ahead or 0) - self.max_staleness
        self.dropped_turns += sum(len(steps) for updates, steps in ended if updates < oldest)
        return [one for one in ended if one[0] >= oldest]

    def _may_continue(self) -> bool:
        return not self._stopping.is_set() and not 0 <= self.total_dialog_turns <= self.turns

    def _turn(self) -> TensorDictBase:
        """Run one step of all rows; the result has "next"."""
        root = self._room(self.env.reset()) if self._root is None else self._root
        try:
            with self.no_sampling():
                self._versions.acting = self._versions.version
                acted = _merged(root, self.policy(root))
            step, following = self.env.step_and_maybe_reset(acted)
        finally:
            self._versions.acting = None
        self.turns += len(step)
        following = self._room(following, step["next", "done"])
        # The next observation is in the record as "next": a policy that writes into its input must not change it.
        self._root = lazy_stack([row.copy() for row in following.unbind(0)])
        return step

    def _room(self, root: TensorDictBase, new: torch.Tensor | None = None) -> TensorDictBase:
        """Begin other episodes in the rows, of those that `new` [B, 1] marks, whose first prompt leaves no room."""
        fresh = [True] * len(root) if new is None else new.reshape(len(root), -1).any(-1).tolist()
        for _ in range(MAX_TOO_LONG):
            places = [place for place, is_new in enumerate(fresh) if is_new]
            rows = root.unbind(0)
            fits = self._fits(lazy_stack([rows[place] for place in places])) if self._fits and places else []
            beyond = {place for place, fit in zip(places, fits, strict=False) if not fit}
            if not beyond:
                return root
            log.warning("skipped %d first prompts that are longer than the model's context", len(beyond))
            fresh = [place in beyond for place in range(len(root))]
            root = self.env.reset(root.set("_reset", torch.tensor(fresh)))
        raise ConfigError(
            f"{MAX_TOO_LONG} consecutive prompts are longer than the model's context (max_model_len). Filter the "
            "dataset or raise the limit."
        )

    def _forget(self) -> None:
        """Discard the current episodes: the next turn begins new ones."""
        self._root = None
        self._trajectories = {}

    def _updates(self) -> int:
        return len(self._versions.version_history) - 1

    # -- making and closing -------------------------------------------------------------------------------------------

    def _version_transform(self, asked: bool | PolicyVersion) -> PolicyVersion:
        """The environment's PolicyVersion, or a separate one that only counts; only the former writes into rows."""
        there = [one for one in self.env.transforms if isinstance(one, PolicyVersion)]
        if isinstance(asked, PolicyVersion):
            if there and asked not in there:
                raise ConfigError(
                    "track_policy_version: the environment has another PolicyVersion. Pass that one, or True."
                )
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
            self.policy.register_collector(self)
        return updater

    def _release(self, close_env: bool) -> None:
        with ExitStack() as closing:  # closes all of them, even if one raises; last in, first out
            if close_env:
                closing.callback(self.env.close)
            if self._owned and hasattr(self.policy, "close"):
                closing.callback(self.policy.close)
            if self.weight_updater is not None:
                closing.callback(self.weight_updater.close)


class _ContextLimit(Transform):
    """A transform that truncates an episode whose next prompt leaves the model no room for an answer."""

    last = True  # other transforms may still append to the prompt

    def __init__(self, fits: Callable[[TensorDictBase], list[bool]]):
        self.fits = fits

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        full = torch.zeros(len(following), 1, dtype=torch.bool)
        going = [place for place, row in enumerate(following.unbind(0)) if not row["done"].any()]
        if going:
            rows = following.unbind(0)
            full[going, 0] = torch.tensor([not fits for fits in self.fits(lazy_stack([rows[i] for i in going]))])
        following.set("truncated", following["truncated"] | full)
        return following.set("done", following["done"] | full)


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
    """Raise an error for settings of a collector that are contradictory or not supported.

    Raises RuntimeError for `async_envs`, TypeError for contradictions, ConfigError for wrong numbers of turns
    (`turns` per batch, `total`).
    """
    if async_envs:
        raise RuntimeError(
            "async_envs=True is not supported. Give the environment more rows, which share every call of the policy."
        )
    if only_last and flatten_data is not None:
        raise TypeError(f"flatten_data={flatten_data} cannot be used with yield_only_last_steps=True: rows are flat.")
    if only_last and reset_at_each_iter:
        raise TypeError(
            "reset_at_each_iter=True would end the trajectories that yield_only_last_steps=True waits for. Set one of "
            "them to False."
        )
    if completed and flatten_data is False:
        raise TypeError(
            "flatten_data=False cannot be used with complete trajectories, which differ in length. Leave it out."
        )
    if turns is None and not completed:
        raise ConfigError("dialog_turns_per_batch is required, except with yield_completed_trajectories=True.")
    if turns is not None and (type(turns) is not int or turns < 1):
        raise ConfigError(f"dialog_turns_per_batch={turns!r}: give an integer of at least 1.")
    if type(total) is not int or (total < 1 and total != -1):
        raise ConfigError(f"total_dialog_turns={total!r}: give an integer of at least 1, or -1 for no limit.")


def one_source(
    policy_or_weights: Any, weights: Any, policy: Any, weights_dict: Mapping[str, Any] | None, model_id: str | None
) -> Any:
    """Return the weights that a call gave in one of four ways, or None.

    Raises ConfigError if they are given more than once, or for another model than "policy".
    """
    if model_id not in (None, "policy"):
        raise ConfigError(f"model_id={model_id!r} is unknown; a collector has one model, 'policy'.")
    if weights_dict is not None and set(weights_dict) != {"policy"}:
        raise ConfigError(f"weights_dict has the keys {sorted(weights_dict)}, but a collector has one model, 'policy'.")
    nested = None if weights_dict is None else weights_dict["policy"]
    given = [one for one in (policy_or_weights, weights, policy, nested) if one is not None]
    if len(given) > 1:
        raise ConfigError(
            "Weights were given more than once. Use one of policy_or_weights, weights=, policy= or weights_dict=."
        )
    return given[0] if given else None


def _merged(root: TensorDictBase, answer: TensorDictBase | None) -> TensorDictBase:
    """Merge observation and action; `answer` may be the whole observation, or only the policy's additions to it."""
    if answer is None or answer is root:
        return root
    if answer.batch_size != root.batch_size:
        raise ConfigError(
            f"The policy returned batch_size={tuple(answer.batch_size)} for {tuple(root.batch_size)}; for several "
            "samples of a prompt, repeat its row: DatasetChatEnv(repeats=...)."
        )
    if "episode" in keys_of(answer):
        return answer
    rows = zip(root.unbind(0), answer.unbind(0), strict=True)
    return lazy_stack([row.copy().update(added) for row, added in rows])
