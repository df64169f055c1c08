"""Environments and transforms on tensordicts, with the names and arguments of TorchRL's; torchrl is not needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if not TYPE_CHECKING:  # else every misspelled name would pass
    from skyrl_train.tensordict.not_offered import raise_not_offered

    def __getattr__(name: str) -> NoReturn:
        raise_not_offered(__name__, name)
