"""The adapter for TorchRL's environments, collectors and losses, which accept wrappers without one."""

from __future__ import annotations

from skyrl_train.tensordict.wrappers.base import LLMWrapperBase


def ForTorchRL(wrapper: LLMWrapperBase) -> LLMWrapperBase:
    """Return the wrapper, which needs no adapter."""
    return wrapper
