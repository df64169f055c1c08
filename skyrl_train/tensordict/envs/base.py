"""The interface of environments on tensordicts, and of the transforms around them."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import torch
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack
from torch import nn

from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.envs.hooks import Hooks, Parent, check_hooks, hooks_base

Policy = Callable[[TensorDictBase], TensorDictBase]
DONE_KEYS = ("done", "terminated", "truncated")
ACTION_KEYS = ("text_response", "tokens_response")
CONTAINERS = ("history", "text", "tokens", "masks", "log_probs", "ref_log_probs")
OF_ONE_STEP = frozenset({"next", "_reset", "reward", "action", *ACTION_KEYS, *DONE_KEYS, *CONTAINERS})
"""Root keys that are not carried over to the next step, unless the environment writes them again; see also
`Transform.of_one_step`."""


def keys_of(tensordict: TensorDictBase) -> set[str]:
    """Return the first-level keys; for a lazy stack, the keys that all rows have."""
    return set(tensordict.keys())


class Transform(Hooks):
    """A transform of the data between an environment and its policy. Methods take and return tensordicts [B].

    Subclasses define `before_reset`, `after_reset`, `before_step` or `after_step`, or TorchRL's hooks, which these call
    unless they are defined. `environment` is the one to which the transform was appended; a transform can belong to
    only one.
    """

    last: bool = False
    """True if it runs after all transforms for which this is False, even those appended later."""
    environment: TensorDictEnv | None = None
    of_one_step: Sequence[str] = ()
    """Keys that it writes about a single step (rewards, scores); they are not carried over to the next one."""

    def attach(self, environment: TensorDictEnv) -> None:
        """Bind the transform to an environment; `append_transform` calls this.

        Raises RuntimeError if it already belongs to an environment, ConfigError if its hooks cannot work there.
        """
        if self.environment is not None:
            raise RuntimeError(f"{type(self).__name__} already belongs to an environment. Make another one.")
        check_hooks(self, Transform, environment)
        self.environment = environment

    @property
    def parent(self) -> Parent | None:
        """The environment under TorchRL's names, or None before `attach`."""
        return None if self.environment is None else Parent(self.environment)

    def before_reset(self, given: TensorDictBase) -> TensorDictBase:
        """Transform the input of the environment's reset."""
        return self._reset_env_preprocess(given)

    def after_reset(self, given: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        """Transform the first observation."""
        return self._reset(given, root)

    def before_step(self, root: TensorDictBase) -> TensorDictBase:
        """Transform the observation and action that the environment receives.

        Changes made in place are stored with the step; changes to a copy are not.
        """
        inverts = self.in_keys_inv or type(self)._inv_call is not Hooks._inv_call
        return self._inv_call(root.copy()) if inverts else root

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        """Transform the data stored under "next"."""
        return self._step(root, following)

    def end_episodes(self, episodes: Sequence[int] | None) -> None:
        """Release the resources of these episodes, or of all episodes if None."""

    def close(self) -> None:
        """Release all resources; the environment calls this once, when it is closed."""
        self.end_episodes(None)


class _Theirs(Transform):
    """An adapter of one of TorchRL's transforms, which calls its hooks."""

    def __init__(self, transform: Any, base: type):
        super().__init__()
        self.transform, self.base = transform, base

    def attach(self, environment: TensorDictEnv) -> None:
        check_hooks(self.transform, self.base, environment)
        if self.transform.parent is not None:
            raise RuntimeError(
                f"{type(self.transform).__name__} already belongs to an environment. Append its clone()."
            )
        super().attach(environment)
        self.transform.__dict__["_parent"] = self.parent  # where torchrl keeps it, and looks first

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform._step(tensordict, next_tensordict)  # type: ignore[no-any-return]

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self.transform._reset(tensordict, tensordict_reset)  # type: ignore[no-any-return]

    def _reset_env_preprocess(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform._reset_env_preprocess(tensordict)  # type: ignore[no-any-return]

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.transform._inv_call(tensordict)  # type: ignore[no-any-return]

    def close(self) -> None:
        self.transform.close()


class _Function(Transform):
    """A function of a tensordict, applied to first observations and to the data under "next"."""

    def __init__(self, function: Callable[[TensorDictBase], TensorDictBase]):
        super().__init__()
        self.function = function

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return self.function(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        return self.function(tensordict_reset)


def _transforms(given: Any) -> list[Transform]:
    """Return the transforms to append for one of ours, one or a composition of TorchRL's, or a function."""
    if isinstance(given, Transform):
        return [given]
    if (base := hooks_base(given)) is not None:
        parts = getattr(given, "transforms", None)
        return [_Theirs(given, base)] if parts is None else [one for part in parts for one in _transforms(part)]
    if callable(given) and not isinstance(given, type | nn.Module):
        return [_Function(given)]
    raise ConfigError(
        f"append_transform got {given!r:.80}. Give a skyrl_train.tensordict.Transform, a TorchRL transform, or a "
        "function of a tensordict."
    )


class StepCounter(Transform):
    """A transform that counts steps in "step_count" [B, 1] and truncates an episode after `max_steps`.

    Raises ValueError for `max_steps` below 1; None means no limit.
    """

    def __init__(self, max_steps: int | None = None):
        if max_steps is not None and max_steps < 1:
            raise ValueError(f"max_steps={max_steps} must be at least 1, or None for no limit.")
        self.max_steps = max_steps

    def after_reset(self, given: TensorDictBase, root: TensorDictBase) -> TensorDictBase:
        return root.set("step_count", torch.zeros(*root.batch_size, 1, dtype=torch.int64))

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        count = root["step_count"] + 1
        following.set("step_count", count)
        if self.max_steps is not None:
            cut = count >= self.max_steps
            following.set("truncated", following["truncated"] | cut)
            following.set("done", following["done"] | cut)
        return following


class TensorDictEnv(ABC):
    """A batch of episodes: `reset` returns observations, `step` adds "next" to observations with actions.

    Rows may have different lengths: batches are lazy stacks of rows without padding. "episode" [B] numbers the
    episodes, so that an episode's resources (a browser, a session) follow its row; "done", "terminated" and "truncated"
    are [B, 1]. Subclasses define `_reset_row` and `_step_row`.

    `batch_size` is [B]; None means [1], or the number of rows given to a reset.
    """

    def __init__(self, batch_size: Sequence[int] | int | None = None, device: torch.device | str | None = None):
        self._any_batch = batch_size is None
        size = (1,) if batch_size is None else (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        if len(size) != 1 or size[0] < 1:
            raise ValueError(f"batch_size={size} must have one dimension of at least 1, e.g. (1,).")
        self.batch_size = torch.Size(size)
        self.device = torch.device(device) if device is not None else None
        self.transforms: list[Transform] = []
        self._of_one_step: set[str] = {"reward"}
        self._episodes = itertools.count()
        self._closed = False

    # --------------------------------------------------------------------------------------- for subclasses

    @abstractmethod
    def _reset_row(self, given: TensorDictBase) -> TensorDictBase:
        """Return the first observation of one episode, batch []."""

    @abstractmethod
    def _step_row(self, root: TensorDictBase) -> TensorDictBase:
        """Return the result of an observation and its action, batch []: "reward", and those of DONE_KEYS not False."""

    def _end_episodes(self, episodes: Sequence[int] | None) -> None:  # noqa: B027 - there may be nothing to end
        """Release the resources of these episodes, or of all episodes if None."""

    # ---------------------------------------------------------------------------------------------- for users

    def append_transform(self, transform: Transform | Any) -> Self:
        """Add `transform` around the earlier ones; return the environment.

        It may also be a TorchRL transform, a composition of them, or a function of a tensordict. Raises ConfigError for
        anything else or for hooks that cannot work here, RuntimeError if it already belongs to an environment.
        """
        for each in _transforms(transform):
            each.attach(self)
            self._of_one_step.update(each.of_one_step)
            self.transforms.append(each)
        self.transforms.sort(key=lambda each: each.last)
        return self

    def reset(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Return the first observations [B]. With a mask "_reset" ([B] or [B, 1]), only the marked rows are reset.

        A tensordict without a batch dimension is used for every row; without a tensordict, rows start empty. Ends the
        episodes of the rows that are reset. Raises ValueError for a wrong batch size.
        """
        given = self._rows_given(tensordict)
        mask = given.pop("_reset", None)
        if mask is None or mask.all():
            self.end_episodes(given["episode"].flatten().tolist() if "episode" in keys_of(given) else None)
            return self._fresh(given)
        chosen = mask.reshape(len(mask), -1).any(-1).tolist()
        rows = [row.exclude("next") for row in given.unbind(0)]
        again = [place for place, reset in enumerate(chosen) if reset]
        if again:
            part = lazy_stack([rows[place] for place in again])
            self.end_episodes(part["episode"].flatten().tolist())
            for place, row in zip(again, self._fresh(part).unbind(0), strict=True):
                rows[place] = row
        return _same_keys(rows)

    def step(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Add "next" to a tensordict [B] of observations and actions, and return it as a lazy stack.

        The input gets "next", too. Raises RuntimeError without "episode" (not made by `reset`), ValueError for other
        batch dimensions, ConfigError if a transform sets "_step".
        """
        if "episode" not in keys_of(tensordict):
            raise RuntimeError(
                "step needs a tensordict from reset with the policy's keys added, but it has no 'episode'. Call reset "
                "first."
            )
        if tensordict.batch_dims != 1:
            raise ValueError(
                f"step needs a tensordict with one batch dimension, got batch_size={tuple(tensordict.batch_size)}. "
                "Pass the tensordict that reset returned, with the actions added."
            )
        lazy = isinstance(tensordict, LazyStackedTensorDict)
        root: TensorDictBase = tensordict if lazy else lazy_stack(list(tensordict.unbind(0)))
        received = root
        for transform in reversed(self.transforms):
            received = transform.before_step(received)
        if "_step" in keys_of(received):
            raise ConfigError(
                'A transform set "_step" to skip the steps of some rows, which is not supported. Remove that transform.'
            )
        following = self._stacked([self._completed(row, self._step_row(row)) for row in received.unbind(0)])
        for transform in self.transforms:
            following = transform.after_step(received, following)
        if over := following["episode"][following["done"].reshape(len(following), -1).any(-1)].tolist():
            self.end_episodes(over)
        if root is not tensordict:
            tensordict.set("next", following)
        return root.set("next", following)

    def step_and_maybe_reset(self, tensordict: TensorDictBase) -> tuple[TensorDictBase, TensorDictBase]:
        """Return (`step`'s result, the next observations), in which rows that are done begin a new episode."""
        stepped = self.step(tensordict)
        following = stepped["next"]
        done = following["done"]
        if not done.any():
            return stepped, self._observations(following)
        return stepped, self.reset(self._observations(following).set("_reset", done))

    def rollout(
        self,
        max_steps: int,
        policy: Policy | None = None,
        *,
        auto_reset: bool = True,
        break_when_any_done: bool = True,
        tensordict: TensorDictBase | None = None,
    ) -> TensorDictBase:
        """Run up to `max_steps` steps, and return them as a tensordict [B, T].

        Args:
            max_steps: Maximum number of steps T.
            policy: Function that adds the action to an observation. None calls no function; the observation of each
                step must then already contain the action, for example from a transform.
            auto_reset: Begin with `reset(tensordict)`; otherwise, `tensordict` is the first observation.
            break_when_any_done: Stop after the first step in which any of the B rows is done; otherwise, a row that is
                done begins a new episode.
            tensordict: Input of the reset, or the first observation.

        Raises:
            RuntimeError: `auto_reset` is False and there is no `tensordict`, or it did not come from `reset`.
        """
        if not auto_reset and tensordict is None:
            raise RuntimeError(
                "auto_reset=False needs tensordict=, the first observation. Pass the result of reset, or leave "
                "auto_reset out."
            )
        root: TensorDictBase = self.reset(tensordict) if auto_reset else tensordict  # type: ignore[assignment]
        steps: list[TensorDictBase] = []
        for _ in range(max_steps):
            root = root if policy is None else policy(root)
            stepped, root = self._advance(root, break_when_any_done)
            steps.append(stepped)
            if break_when_any_done and stepped["next", "done"].any():
                break
        return lazy_stack(steps, dim=1)

    def close(self) -> None:
        """Release the resources of the environment and its transforms."""
        if not self._closed:
            self._closed = True
            self._end_episodes(None)
            for transform in self.transforms:
                transform.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def end_episodes(self, episodes: Sequence[int] | None) -> None:
        """Release the resources of these episodes, or of all episodes if None."""
        self._end_episodes(episodes)
        for transform in self.transforms:
            transform.end_episodes(episodes)

    # ------------------------------------------------------------------------------------------------- internal

    def _rows_given(self, tensordict: TensorDictBase | None) -> TensorDictBase:
        if tensordict is None:
            return lazy_stack([TensorDict({}, batch_size=[]) for _ in range(self.batch_size[0])])
        given = tensordict.exclude("next")
        if given.batch_dims == 0:
            return lazy_stack([given.clone() for _ in range(self.batch_size[0])])
        if given.batch_dims != 1 or (given.batch_size != self.batch_size and not self._any_batch):
            raise ValueError(
                f"reset got batch_size={tuple(given.batch_size)}, but this environment has {tuple(self.batch_size)}. "
                "Pass as many rows as the environment has."
            )
        return lazy_stack([row.copy() for row in given.unbind(0)])

    def _fresh(self, given: TensorDictBase) -> TensorDictBase:
        for transform in self.transforms:
            given = transform.before_reset(given)
        rows = []
        for row in given.unbind(0):
            row.set("episode", torch.tensor(next(self._episodes)))
            rows.append(self._completed(row, self._reset_row(row)))
        root = self._stacked(rows)
        for transform in self.transforms:
            root = transform.after_reset(given, root)
        return root

    def _advance(self, root: TensorDictBase, stops: bool) -> tuple[TensorDictBase, TensorDictBase]:
        if not stops:
            return self.step_and_maybe_reset(root)
        stepped = self.step(root)
        return stepped, self._observations(stepped["next"])

    def _observations(self, following: TensorDictBase) -> TensorDictBase:
        return following.exclude(*self._of_one_step)

    def _stacked(self, rows: list[TensorDictBase]) -> TensorDictBase:
        stacked = lazy_stack(rows)
        return stacked.to(self.device) if self.device is not None else stacked

    def _completed(self, before: TensorDictBase, row: TensorDictBase) -> TensorDictBase:
        """Return `row` completed with the entries carried over from `before` and with defaults."""
        for key in keys_of(before) - keys_of(row):
            if key not in OF_ONE_STEP and key not in self._of_one_step:
                row.set(key, before.get(key))
        for key in DONE_KEYS[1:]:
            row.setdefault(key, torch.zeros(1, dtype=torch.bool))
        row.set("done", row["terminated"] | row["truncated"])
        return row


def _same_keys(rows: Sequence[TensorDictBase]) -> TensorDictBase:
    """Return a lazy stack of rows with the keys that all of them have."""
    common = set.intersection(*(set(row.keys()) for row in rows))
    return lazy_stack([row.select(*common) for row in rows])
