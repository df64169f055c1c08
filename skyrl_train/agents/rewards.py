"""Rewards of agents: values that they return, and results of grader commands."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.agents.commands import CommandResult
from skyrl_train.environments.base import validate_reward
from skyrl_train.errors import EnvironmentFailure

GRADER_CRASHED, GRADER_TIMEOUT = "grader_crashed", "grader_timeout"
BAD_REWARD = "bad_reward"
_UNCAUGHT = re.compile(r"(?!AssertionError)[\w.]*(Error|Exception)\b|.*: No module named ")
"""The last line of a Python program that raised, but not by an assertion."""
MAX_STDERR_CHARS = 2000
"""Characters of stderr in the detail of a failure, the last ones."""


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
    is 1 and exit code 1 is 0. A mapping in that line that is no JSON is an error, since exit code 0 would hide it.

    Args:
        result: Result of the command.
        timeout_s: Time limit of the command, for the message.

    Raises:
        EnvironmentFailure: The grader was killed at its time limit ("grader_timeout"), failed ("grader_crashed"), or
            gave no valid reward ("bad_reward").
    """
    if result.timed_out:
        raise EnvironmentFailure(GRADER_TIMEOUT, f"it did not end within {timeout_s:g} s")
    last = result.stdout.rstrip().rpartition("\n")[2]
    try:
        value = json.loads(last)
    except (ValueError, RecursionError):
        value = None
    is_reward = isinstance(value, Mapping) or (isinstance(value, int | float) and not isinstance(value, bool))
    if result.returncode in (0, 1) and is_reward:
        return parse_reward(value, "the last line of the grader")
    if result.returncode in (0, 1) and last.startswith("{") and last.endswith("}"):
        raise EnvironmentFailure(BAD_REWARD, f"the last line of the grader is not JSON: {last:.200}")
    if result.returncode in (0, 1):
        return AgentReward(1.0 - result.returncode)
    raise EnvironmentFailure(GRADER_CRASHED, describe_exit(result))


def has_raised(result: CommandResult) -> bool:
    """True if a grader ended with exit code 1 like a Python program that raised, whose reward is 0.

    The cause may be a mistake in the grader, or code of the agent that it imports. Only a person can tell them apart.
    """
    last = result.stderr.rstrip().rpartition("\n")[2]
    return result.returncode == 1 and _UNCAUGHT.match(last) is not None


def describe_exit(result: CommandResult) -> str:
    """Return the exit code of a failed command, and the end of what it wrote to stderr."""
    stderr = result.stderr.strip()[-MAX_STDERR_CHARS:]
    return f"exit code {result.returncode}" + (f"; stderr: {stderr}" if stderr else "; it wrote nothing to stderr")
