"""Collectors and weight updaters on tensordicts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

if not TYPE_CHECKING:  # else every misspelled name would pass
    from skyrl_train.tensordict.not_offered import raise_not_offered

    def __getattr__(name: str) -> NoReturn:
        raise_not_offered(__name__, name)
