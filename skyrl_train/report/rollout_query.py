"""What is asked of a run's rollouts: filters, an order, and which page of what they leave."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from skyrl_train.errors import DataError

ORDERS = ("step", "-step", "reward", "-reward", "tokens", "-tokens")
MOST_ROWS = 500
_LONGEST_TEXT = 1000


@dataclass(frozen=True)
class Query:
    """Ranges include their ends. A failed rollout has no reward: no range of rewards has it, and it comes last."""

    step: int | None = None
    step_from: int | None = None
    step_to: int | None = None
    source: str | None = None
    status: str | None = None
    stop_reason: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    text: str = ""
    """Anywhere in the conversation, in small letters or capitals."""
    order: str = "step"
    """"-" is downwards. Equal ones, and those of a step, are as they were trained on."""
    offset: int = 0
    limit: int = 50

    @classmethod
    def parsed(cls, given: Mapping[str, str]) -> Query:
        """That of a URL's parameters, of which empty ones ask nothing. Raises DataError."""
        readers: dict[str, Callable[[str, str], Any]] = {
            "order": _order,
            "text": _text,
            "limit": _rows,
            "offset": _count,
        }
        readers |= dict.fromkeys(("step", "step_from", "step_to", "tokens_min", "tokens_max"), whole_number)
        readers |= dict.fromkeys(("reward_min", "reward_max"), _number)
        known = [field.name for field in fields(cls)]
        if unknown := sorted(given.keys() - {*known}):
            raise DataError(f"{unknown[0][:40]!r} is no parameter of rollouts, which are {', '.join(known)}.")
        read = {name: readers.get(name, _word)(name, value) for name, value in given.items() if value}
        return cls(**read)


def whole_number(name: str, value: str) -> int:
    """Of 32 bits. Raises DataError."""
    try:
        number = int(value)
    except ValueError:
        raise DataError(f"{name}={value[:40]!r} is not a whole number.") from None
    if not -(2**31) <= number < 2**31:
        raise DataError(f"{name}={number} is out of range: it has at most 31 bits.")
    return number


def _count(name: str, value: str) -> int:
    number = whole_number(name, value)
    if number < 0:
        raise DataError(f"{name}={number} must be at least 0.")
    return number


def _rows(name: str, value: str) -> int:
    number = whole_number(name, value)
    if not 1 <= number <= MOST_ROWS:
        raise DataError(f"{name}={number} must be from 1 to {MOST_ROWS}; ask for the next page by offset.")
    return number


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if number != number:
        raise DataError(f"{name}={value[:40]!r} is not a number.")
    return number


def _order(name: str, value: str) -> str:
    if value not in ORDERS:
        raise DataError(f"{name}={value[:40]!r} is not one of {', '.join(ORDERS)}.")
    return value


def _text(name: str, value: str) -> str:
    if len(value) > _LONGEST_TEXT:
        raise DataError(f"{name} has {len(value)} characters; at most {_LONGEST_TEXT} are searched for.")
    return value


def _word(name: str, value: str) -> str:
    return value
