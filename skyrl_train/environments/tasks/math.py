r"""Competition mathematics (arXiv:2103.03874) in a single turn. The answer is LaTeX in \boxed{...}."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.graders import math_grader
from skyrl_train.environments.graders.boxed import extract_boxed_answer
from skyrl_train.environments.graders.math_grader import GradingMethod
from skyrl_train.environments.tasks.gsm8k import parse_ground_truth
from skyrl_train.errors import DataError


class MathEnv(TextEnv):
    r"""An environment that rewards an answer equal to the row's ground truth with 1, and anything else with 0.

    The answer is the content of \boxed{...} in the final answer (`boxed.extract_boxed_answer`). There is no answer if
    no box exists, if several boxes differ, or if the content hedges (`math_grader.is_unambiguous`). 1/2 equals
    \frac{2}{4}, x = 3 equals 3, and 1,2 equals \{2, 1\}; docs/reference/graders.md has the rules. A comparison that
    takes more than `timeout` seconds is killed and scores 0. The metrics `timeout` and `no_answer` are the fractions of
    such answers.
    """

    parse_row = staticmethod(parse_ground_truth)

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        math_grader.check_installed()

    @classmethod
    def check_rows(cls, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> None:
        """Check that `parse_row` accepts every row and that the grader can parse its ground truth.

        No answer would equal a ground truth that cannot be parsed.

        Args:
            rows: Pairs of a row's location, such as "file, row N", and its extras.

        Raises:
            DataError: A row fails one of these checks. The message names the row's location.
        """
        rows = list(rows)
        super().check_rows(rows)
        with math_grader.MathGrader() as grader:
            for location, extras in rows:
                if problem := grader.ground_truth_problem(truth := cls.parse_row(extras)):
                    raise DataError(
                        f"{location}: ground truth {truth!r:.80} cannot be read ({problem}); correct or remove the row."
                    )

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.ground_truth = self.parse_row(self.extras)
        self.grader = math_grader.get_grader(float(self.env_config.get("timeout", 5.0)))
        self.grader.start()  # it loads while the model generates

    def step(self, action: str) -> StepOutput:
        answer = extract_boxed_answer(action)
        same, method = (False, GradingMethod.NO_ANSWER)
        if answer is not None:
            same, method = self.grader.grade(answer, self.ground_truth)
        metadata = {
            "no_answer": float(method == GradingMethod.NO_ANSWER),
            "timeout": float(method in (GradingMethod.TIMEOUT, GradingMethod.DIED)),
            "how": method,
        }
        return StepOutput([], float(same), done=True, metadata=metadata)
