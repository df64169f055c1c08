r"""Competition mathematics (arXiv:2103.03874): one turn, the answer is LaTeX in \boxed{...}."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders import math_grader
from skyrl_train.environments.graders.boxed import extract_boxed_answer
from skyrl_train.environments.tasks.gsm8k import parse_ground_truth
from skyrl_train.errors import DataError


class MathEnv(TextEnv):
    r"""Rewards an answer equal to the row's with 1, anything else with 0.

    The answer is the content of all \boxed{...} in the final answer (`boxed.boxed_answer`). None, or several that
    differ, are no answer, and neither is one that hedges (`latex.is_one_answer`). 1/2 equals \frac{2}{4}, x = 3 equals
    3, and 1,2 equals \{2, 1\}: docs/environments.md has the rules. A comparison of more than `timeout` seconds
    is killed and scores 0; the metrics `timeout` and `no_answer` are the shares of such answers.
    """

    parse_row = staticmethod(parse_ground_truth)

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        math_grader.check_installed()

    @classmethod
    def check_rows(cls, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Also refuse ground truths that the grader cannot read, to which no answer would be equal."""
        rows = list(rows)
        super().check_rows(rows)
        with math_grader.MathGrader() as grader:
            for where, extras in rows:
                if why := grader.ground_truth_problem(truth := cls.parse_row(extras)):
                    raise DataError(
                        f"{where}: ground truth {truth!r:.80} cannot be read ({why}); correct or remove it."
                    )

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.ground_truth = self.parse_row(self.extras)
        self.grader = math_grader.get_grader(float(self.env_config.get("timeout", 5.0)))
        self.grader.start()  # it loads while the model generates

    def step(self, action: str) -> StepOutput:
        answer = extract_boxed_answer(action)
        same, how = (False, "no_answer") if answer is None else self.grader.grade(answer, self.ground_truth)
        metadata = {"no_answer": float(how == "no_answer"), "timeout": float(how in ("timeout", "died")), "how": how}
        return StepOutput([], float(same), done=True, metadata=metadata)
