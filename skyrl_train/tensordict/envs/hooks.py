"""TorchRL's hooks, which let transforms written for it run in the environments here.

torchrl itself is not imported: its transforms are recognized by their hooks.
"""

from __future__ import annotations

import dis
import itertools
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import NestedKey

from skyrl_train.errors import ConfigError

HOOKS = ("_call", "_step", "_reset", "_inv_call", "_reset_env_preprocess")
"""Hooks that an environment calls."""
NOT_CALLED = ("_post_step_mdp_hooks", "set_container")
"""Hooks that only a TorchRL environment calls, apart from those about its specs."""


class Hooks:
    """Default hooks with TorchRL's names, arguments and defaults; tensordicts are [B].

    `_call` and `_apply_transform` see what a step stores under "next", and a first observation if `_reset` calls them.
    """

    in_keys: Sequence[NestedKey] = ()
    out_keys: Sequence[NestedKey] = ()
    in_keys_inv: Sequence[NestedKey] = ()
    out_keys_inv: Sequence[NestedKey] = ()
    missing_tolerance: bool = False
    """True if missing `in_keys` are skipped; otherwise they raise KeyError."""

    def __init__(
        self,
        in_keys: Sequence[NestedKey] | None = None,
        out_keys: Sequence[NestedKey] | None = None,
        in_keys_inv: Sequence[NestedKey] | None = None,
        out_keys_inv: Sequence[NestedKey] | None = None,
    ):
        """Set the keys to read and write; output keys default to the input keys."""
        self.in_keys, self.in_keys_inv = list(in_keys or ()), list(in_keys_inv or ())
        self.out_keys = list(self.in_keys if out_keys is None else out_keys)
        self.out_keys_inv = list(self.in_keys_inv if out_keys_inv is None else out_keys_inv)

    def _apply_transform(self, obs: Any) -> Any:
        """Return the value for an out key, given the value at its in key."""
        raise NotImplementedError(f"{type(self).__name__} has in_keys, and must define _apply_transform.")

    def _inv_apply_transform(self, state: Any) -> Any:
        """Return the value for a key of in_keys_inv, given the policy's value at its key of out_keys_inv."""
        return state

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for source, out in zip(self.in_keys, self.out_keys, strict=True):
            self._applied(next_tensordict, source, out, self._apply_transform)
        return next_tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Return the data to store under "next", given a step's observation and action and the data so far."""
        return self._call(next_tensordict)

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Return the first observation, given the input of a reset and the observation so far."""
        return tensordict_reset

    def _reset_env_preprocess(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return the input of the environment's reset."""
        return tensordict

    def _inv_call(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Return observation and action as the environment's step receives them."""
        for source, out in zip(self.in_keys_inv, self.out_keys_inv, strict=True):
            self._applied(tensordict, out, source, self._inv_apply_transform)
        return tensordict

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Transform data outside an environment; a replay buffer applies this to samples.

        Raises NotImplementedError if the transform has neither `_call` nor `in_keys`, and would do nothing; KeyError
        for missing `in_keys` unless `missing_tolerance`.
        """
        if not self.in_keys and type(self)._call is Hooks._call:
            raise NotImplementedError(
                f"{type(self).__name__} only works in an environment: use env.append_transform(...)."
            )
        return self._call(tensordict)

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply the inverse of `forward`; a replay buffer applies this to rows that are written."""
        return self._inv_call(tensordict)

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        return self.forward(tensordict)

    def _applied(self, tensordict: TensorDictBase, source: NestedKey, out: NestedKey, change: Any) -> None:
        value = tensordict.get(source, None)
        if value is not None:
            tensordict.set(out, change(value))
        elif not self.missing_tolerance:
            raise KeyError(
                f"{type(self).__name__}: the key {source!r} is missing; the tensordict has "
                f"{sorted(map(str, tensordict.keys()))}. Correct in_keys."
            )


class Parent:
    """An environment under the names by which TorchRL's transforms ask for their parent; there are no specs."""

    batch_locked = True
    done_keys, reward_keys, reset_keys = ["done", "terminated", "truncated"], ["reward"], ["_reset"]
    _filtered_reset_keys = reset_keys

    def __init__(self, environment: Any):
        self.base_env = environment

    def __getattr__(self, name: str) -> Any:
        return getattr(self.base_env, name)


def check_hooks(transform: Any, base: type, environment: Any) -> None:
    """Raise ConfigError for a transform with hooks that nothing calls, or that needs attributes of specs or parents.

    `base` is the class whose own hooks do nothing.
    """
    name, parent = type(transform).__name__, Parent(environment)
    methods: dict[str, FunctionType] = {}
    for kind in reversed([kind for kind in type(transform).__mro__ if kind is not base and issubclass(kind, base)]):
        found = {key: getattr(value, "fget", value) for key, value in vars(kind).items()}
        methods |= {key: function for key, function in found.items() if isinstance(function, FunctionType)}
    if dead := sorted(methods.keys() & set(NOT_CALLED)):
        raise ConfigError(
            f"{name} defines {dead}, which environments of skyrl_train.tensordict do not call. Define {list(HOOKS)}, "
            "or use the transform of the same name in skyrl_train.tensordict."
        )
    asked = sorted(wanted for wanted in _asked(methods) if not hasattr(parent, wanted))
    if asked:
        raise ConfigError(
            f"{name} asks its environment for {asked}, but environments of skyrl_train.tensordict have neither specs "
            "nor parent environments. Use the transform of the same name in skyrl_train.tensordict (StepCounter, "
            "PolicyVersion, ...: docs/torchrl/environments.md), or write its hooks in a subclass of "
            "skyrl_train.tensordict.Transform."
        )


def hooks_base(transform: Any) -> type | None:
    """Return the base class of TorchRL's transforms if `transform` is one of them, else None."""
    for kind in reversed(type(transform).__mro__):
        if all(callable(vars(kind).get(hook)) for hook in HOOKS):
            return kind
    return None


def _asked(methods: Mapping[str, FunctionType]) -> set[str]:
    """Return the attributes of `self.parent`, or a variable `parent`, that the hooks and the methods they use read."""
    asked: set[str] = set()
    seen: set[str] = set()
    waiting = {*HOOKS, "_apply_transform", "_inv_apply_transform"} & methods.keys()
    while waiting:
        name = waiting.pop()
        seen.add(name)
        code = list(dis.get_instructions(methods[name]))
        for one, following in itertools.pairwise(code):
            if one.opname.startswith("LOAD_") and following.opname.startswith("LOAD_"):
                if one.argval == "parent":
                    asked.add(str(following.argval))
                elif one.argval == "container":  # a TorchRL environment, of which there is none
                    asked.add(f"container.{following.argval}")
        waiting |= {one.argval for one in code if isinstance(one.argval, str)} & methods.keys() - seen
    return asked
