"""Problems of a configuration, each described in one line: key, value, what is allowed, what to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.redaction import redact
from skyrl_train.errors import ConfigError
from skyrl_train.terminal import escape_control_chars


@dataclass(frozen=True)
class Problem:
    """A wrong key, a wrong value or an invalid combination of values. `str()` is its line in the error message."""

    key: str
    value: Any
    allowed: str
    """Allowed values, as a phrase that follows "must be"."""
    advice: str = ""
    """Complete sentences: the reason, and what to do."""

    def __str__(self) -> str:
        return one_line(f"{self.key}={format_value(self.value)}: must be {self.allowed}. {self.advice}")


@dataclass(frozen=True)
class UnknownKey(Problem):
    """A key that is not part of the configuration."""

    def __str__(self) -> str:
        return one_line(f"{self.key}={format_value(self.value)}: unknown key. {self.advice}")


def format_value(value: Any) -> str:
    """Return a value as it is written on the command line, for messages.

    Values of credential variables are redacted. Texts of more than 200 characters are truncated.
    """
    value = redact(value)
    if value is None or isinstance(value, bool):
        text = {None: "null", True: "true", False: "false"}[value]
    elif isinstance(value, str):
        text = value if value and value.isprintable() and value.strip() == value else repr(value)
    else:
        text = repr(list(value) if isinstance(value, tuple) else value)
    return text if len(text) <= 200 else text[:200] + "..."


def one_line(text: str) -> str:
    """Return a text as one printable line: control characters are escaped, secrets are redacted.

    Use it for messages, which may quote any user input.
    """
    return escape_control_chars(redact(text).rstrip())


def raise_problems(problems: Iterable[Problem | ConfigError]) -> None:
    """Raise one ConfigError that lists all problems, one per line without duplicates. Without problems, do nothing."""
    lines = list(dict.fromkeys(line for problem in problems for line in _split(problem)))
    if lines:
        count = "1 problem" if len(lines) == 1 else f"{len(lines)} problems"
        raise ConfigError("\n".join([f"{count} in the configuration:", *(f"  {line}" for line in lines)]))


def _split(problem: Problem | ConfigError) -> list[str]:
    """Return the lines of a problem: several if it is an error of `raise_problems`, otherwise its text."""
    head, _, rest = str(problem).partition(":\n")
    if rest and head.endswith("in the configuration"):
        return [line.removeprefix("  ") for line in rest.split("\n")]
    return [str(problem)]
