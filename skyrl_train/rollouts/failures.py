"""Failed episodes of a step or an evaluation: counts by kind, and a description of the first one of a kind."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence

from skyrl_train.data.trajectory import FAILED, Trajectory
from skyrl_train.environments.tasks.agent import NAME as AGENT
from skyrl_train.rollouts.conversation import FailureKind
from skyrl_train.terminal import escape_control_chars

_UNKNOWN = "unknown"


def count_failures(items: Iterable[Trajectory]) -> Counter[str]:
    """Return the number of failed episodes by failure kind."""
    return Counter(item.error or _UNKNOWN for item in items if item.status == FAILED)


def describe_first_failure(kind: str, items: Iterable[Trajectory], overrides: Sequence[str]) -> str:
    """Describe the first failed episode of a kind and its row.

    The text ends with a command to reproduce the failure if the episode's environment failed.

    Args:
        kind: A kind that `count_failures` counted.
        items: The episodes.
        overrides: Arguments of `skyrl-train env try` with which it finds the run's environments.
    """
    item = next(item for item in items if item.status == FAILED and (item.error or _UNKNOWN) == kind)
    prompt, problem = item.prompt, f"{item.error}: {item.detail}" if item.detail else str(item.error)
    description = f"{escape_control_chars(problem)} (row {prompt.uid}, environment {prompt.env_class})"
    if item.error is None or item.error in [*FailureKind] or not prompt.source or prompt.env_class == AGENT:
        return f"{description}."
    command = ["skyrl-train", "env", "try", prompt.env_class, "--data", prompt.source, "--row", str(prompt.source_row)]
    return f"{description}. Try it: `{escape_control_chars(shlex.join([*command, *overrides]))}`."
