from __future__ import annotations

from typing import Any

import pytest

from skyrl_train.agents.commands import CommandResult
from skyrl_train.agents.rewards import grade, has_raised, parse_reward
from skyrl_train.errors import EnvironmentFailure


@pytest.mark.parametrize(
    ("result", "reward", "metrics"),
    [
        (CommandResult(0), 1.0, {}),
        (CommandResult(1), 0.0, {}),
        (CommandResult(0, "2 tests passed\n"), 1.0, {}),
        (CommandResult(1, "log\n0.25\n"), 0.25, {}),
        (CommandResult(0, '{"reward": -1, "tests": 3}\n'), -1.0, {"tests": 3}),
        (CommandResult(0, "true"), 1.0, {}),
        (CommandResult(1, "score: 0.3\n"), 0.0, {}),
        (CommandResult(0, " .5 \n\n"), 0.5, {}),
    ],
    ids=str,
)
def test_grader_gives_a_reward(result: CommandResult, reward: float, metrics: dict[str, Any]):
    graded = grade(result, 5.0)
    assert (graded.reward, graded.metrics) == (reward, metrics)


@pytest.mark.parametrize(
    ("result", "kind", "detail"),
    [
        (CommandResult(2, "1.0", "usage: grade\n"), "grader_crashed", "exit code 2; stderr: usage: grade"),
        (CommandResult(139), "grader_crashed", "exit code 139; it printed nothing"),
        (CommandResult(2, "", "#" * 5000), "grader_crashed", "exit code 2; stderr: " + "#" * 2000),
        (
            CommandResult(143, "test 1\n", timed_out=True),
            "grader_timeout",
            "it did not end within 5 s; stdout: test 1",
        ),
        (CommandResult(0, "nan\n"), "bad_reward", "the last line of the grader is float nan"),
        (CommandResult(0, "log\n inf\n"), "bad_reward", "the last line of the grader is float inf"),
        (CommandResult(1, "-inf"), "bad_reward", "the last line of the grader is float -inf"),
        (CommandResult(0, '{"score": 1}'), "bad_reward", "the last line of the grader has no key 'reward'"),
        (CommandResult(0, "NaN"), "bad_reward", "the last line of the grader is float nan"),
        (
            CommandResult(0, "{'reward': 0.0}\n"),
            "bad_reward",
            "the last line of the grader is not JSON: {'reward': 0.0}",
        ),
        (CommandResult(0, '{"reward": "high"}'), "bad_reward", "the reward of the last line of the grader is str"),
    ],
    ids=str,
)
def test_grader_failures_are_no_reward(result: CommandResult, kind: str, detail: str):
    with pytest.raises(EnvironmentFailure) as caught:
        grade(result, 5.0)
    assert caught.value.kind == kind
    assert caught.value.detail.startswith(detail)
    assert len(caught.value.detail) < 2100


@pytest.mark.parametrize(
    ("stderr", "returncode", "raised"),
    [
        ("Traceback (most recent call last):\n  ...\nFileNotFoundError: tests.json\n", 1, True),
        ("Traceback (most recent call last):\n  ...\nyaml.scanner.ScannerError\n", 1, True),
        ("/usr/bin/python3: No module named pytest\n", 1, True),
        ("Traceback (most recent call last):\n  ...\nAssertionError: 2 != 3\n", 1, False),
        ("KeyError: 'a'\n\n-----\nRan 1 test in 0.1s\n\nFAILED (errors=1)\n", 1, False),
        ("ValueError: 1\n", 0, False),
        ("", 1, False),
    ],
)
def test_raised_graders_are_recognised(stderr: str, returncode: int, raised: bool):
    assert has_raised(CommandResult(returncode, "", stderr)) == raised


@pytest.mark.parametrize("value", ["1", [1], None, {"metric": 1}, float("inf")], ids=repr)
def test_other_values_are_no_reward(value: Any):
    with pytest.raises(EnvironmentFailure):
        parse_reward(value, "the value")
