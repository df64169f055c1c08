"""Rewards of agents: values that they return, and results of grader commands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.agents.commands import CommandResult
from skyrl_train.environments.base import validate_reward
from skyrl_train.errors import EnvironmentFailure

NO_CALL, NO_REWARD = "agent_no_call", "agent_no_reward"
GRADER_CRASHED, GRADER_TIMEOUT = "grader_crashed", "grader_timeout"
BAD_REWARD = "bad_reward"
_UNCAUGHT = re.compile(r"(?!AssertionError)[\w.]*(Error|Exception)\b|.*: No module named ")
"""The last line of a Python program that raised, but not by an assertion."""
MAX_OUTPUT_CHARS = 2000
"""Characters of a command's output in the detail of a failure, the last ones."""


@dataclass(frozen=True, slots=True)
class AgentReward:
    """A reward and other numbers, which become metrics."""

    reward: float
    metrics: dict[str, Any] = field(default_factory=dict)


def parse_reward(value: Any, name: str) -> AgentReward:
    """Return the reward in a number, or in a mapping {"reward": number, ...} with further metrics.

    Args:
        value: The value that an agent or grader gave.
        name: Name of the value, for the error.

    Raises:
        EnvironmentFailure: The value has another form (kind "bad_reward").
    """
    if isinstance(value, Mapping):
        if "reward" not in value:
            raise EnvironmentFailure(BAD_REWARD, f"{name} has no key 'reward', only {sorted(map(str, value))}")
        metrics = {str(key): number for key, number in value.items() if key != "reward"}
        return AgentReward(validate_reward(value["reward"], f"the reward of {name}"), metrics)
    return AgentReward(validate_reward(value, name))


def grade(result: CommandResult, timeout_s: float) -> AgentReward:
    """Return the reward that a grader command gave.

    It is the number in the last line of its output, also as {"reward": number, ...}. Without such a line, exit code 0
    is 1 and exit code 1 is 0. A mapping in that line that is no JSON, and a number that is not finite, are errors,
    since exit code 0 would hide them.

    Args:
        result: Result of the command.
        timeout_s: Time limit of the command, for the message.

    Raises:
        EnvironmentFailure: The grader was killed at its time limit ("grader_timeout"), failed ("grader_crashed"), or
            gave no valid reward ("bad_reward").
    """
    if result.timed_out:
        raise EnvironmentFailure(GRADER_TIMEOUT, describe_end(f"it did not end within {timeout_s:g} s", result))
    if result.returncode not in (0, 1):
        raise EnvironmentFailure(GRADER_CRASHED, describe_exit(result))
    last = last_line(result.stdout)
    value = _parse_last_line(last)
    if value is not None:
        return parse_reward(value, "the last line of the grader")
    if last.startswith("{") and last.endswith("}"):
        raise EnvironmentFailure(BAD_REWARD, f"the last line of the grader is not JSON: {last:.200}")
    return AgentReward(1.0 - result.returncode)


def last_line(text: str) -> str:
    """Return the last line of an output, without the white space around it."""
    return text.rstrip().rpartition("\n")[2].strip()


def _parse_last_line(line: str) -> float | Mapping[str, Any] | None:
    """Return the number, which may be nan or inf, or the JSON object in a line; None for any other line."""
    with suppress(ValueError):
        return float(line)
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, Mapping) else None


def lacks_reward_line(result: CommandResult) -> bool:
    """True if a grader printed a last line that is neither a number nor a JSON object, so its exit code counts."""
    line = last_line(result.stdout)
    return bool(line) and _parse_last_line(line) is None


def has_raised(result: CommandResult) -> bool:
    """True if a grader ended with exit code 1 like a Python program that raised, whose reward is 0.

    The cause may be a mistake in the grader, or code of the agent that it imports. Only a person can tell them apart.
    """
    return result.returncode == 1 and _UNCAUGHT.match(last_line(result.stderr)) is not None


def describe_exit(result: CommandResult) -> str:
    """Return the exit code of a failed command, and the end of its output."""
    return describe_end(f"exit code {result.returncode}", result)


def describe_end(reason: str, result: CommandResult) -> str:
    """Return why the episode of a command failed, and the end of the command's stderr, or of stdout if that is empty.

    Args:
        reason: The cause.
        result: Result of the command.
    """
    for name, text in (("stderr", result.stderr), ("stdout", result.stdout)):
        if text := text.strip():
            return f"{reason}; {name}: {text[-MAX_OUTPUT_CHARS:]}"
    return f"{reason}; it printed nothing"
