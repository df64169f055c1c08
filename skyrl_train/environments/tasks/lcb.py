"""Single-turn programming problems with tests in LiveCodeBench's format. The answer is the last ```python block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders.code_tests import (
    CodeTest,
    GradingFailure,
    grade,
    last_python_block,
    parse_tests,
)
from skyrl_train.environments.tools.sandbox import Sandbox


class LCBEnv(TextEnv):
    """An environment that rewards a program with 1.0 if it passes every test that is run, else with 0.0.

    The first `max_tests` tests of the row are run. A program passes a test if it exits with status 0 within
    `test_timeout_s` and the sandbox's limits, and gives the expected answer (graders/code_tests.py). All tests together
    may take `timeout_s`; tests that have not run by then count as failed. The program is the last closed ```python
    block of the final answer, or else a last block that is not closed (`code_tests.last_python_block`). Without a
    program the reward is 0.0.
    """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> list[CodeTest]:
        """Return the row's tests, from `reward_spec["ground_truth"]`.

        Raises:
            ValueError: The row has no `reward_spec`, or its ground truth has no tests in a known format.
        """
        reward_spec = extras.get("reward_spec")
        if not isinstance(reward_spec, Mapping):
            raise ValueError(
                'the row needs reward_spec={"method": "rule", "ground_truth": TESTS}, where TESTS is JSON such as '
                '[{"input": "1 2", "output": "3", "testtype": "stdin"}]'
            )
        return parse_tests(reward_spec.get("ground_truth"))

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        Sandbox.from_config(env_config.get("sandbox")).check()

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.test_timeout_s = float(self.env_config.get("test_timeout_s", 6.0))
        self.timeout_s = float(self.env_config.get("timeout_s", 45.0))
        self.tests = self.parse_row(self.extras)[: int(self.env_config.get("max_tests", 20))]
        self.sandbox = Sandbox.from_config(self.env_config.get("sandbox"))

    def step(self, action: str) -> StepOutput:
        code = last_python_block(action)
        if code is None:
            return StepOutput([], 0.0, done=True, metadata={"has_code": False, "tests_passed": 0.0})
        verdict = grade(code, self.tests, self.sandbox, self.test_timeout_s, self.timeout_s)
        metadata = {
            "has_code": True,
            "tests_passed": verdict.passed / verdict.total,
            "failure": verdict.failure,
            "hit_limit": verdict.failure in (GradingFailure.LIMIT, GradingFailure.OUT_OF_TIME),
        }
        return StepOutput([], float(verdict.failure is None), done=True, metadata=metadata)
