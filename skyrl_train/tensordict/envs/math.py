r"""Competition mathematics as a tensordict environment (arXiv:2103.03874)."""

from __future__ import annotations

from typing import Any

from torchrl.envs.llm import datasets, reward

from skyrl_train.environments.graders import math_grader
from skyrl_train.environments.graders.boxed import extract_boxed_answer
from skyrl_train.tensordict.envs.chat import TaskEnv
from skyrl_train.tensordict.envs.rewards import AnswerRewards, single_answer, single_thought

SECONDS_PER_COMPARISON = 5.0


class MATHRewardParser(AnswerRewards, reward.MATHRewardParser):  # type: ignore[misc]
    r"""TorchRL's transform that rewards an answer equal to the \boxed{...} of the row's "answer".

    The policy's answer is read from <answer>, else from \boxed{...}, after its reasoning. The trainer's grader compares
    it, in a child process with a time limit. Writes the keys of `GSM8KRewardParser`; the arguments are TorchRL's.

    Raises:
        ConfigError: The extra `math` is not installed.
    """

    ANSWER_KEYS = ("answer", "solution")

    def __init__(self, *args: Any, **settings: Any):
        math_grader.check_installed()
        super().__init__(*args, **settings)

    def _expected(self, answer: str) -> tuple[str]:
        return (self.extract_boxed(answer),)

    @staticmethod
    def extract_tags(text: str) -> tuple[str, str]:
        return single_thought(text), single_answer(text) or extract_boxed_answer(text) or ""

    @staticmethod
    def answers_match(predicted: str, reference: str) -> bool:
        """True if two answers in LaTeX are equal (docs/reference/graders.md)."""
        answer = reward.MATHRewardParser.extract_boxed(predicted).strip("$ ")
        return math_grader.get_grader(SECONDS_PER_COMPARISON).grade(answer, reference)[0]


class MATHEnv(TaskEnv, datasets.MATHEnv):  # type: ignore[misc]
    """A TaskEnv with a problem of MATH in every row: "problem" and "solution"."""

    HUB = {"dataset": "DigitalLearningGmbH/MATH-lighteval", "split": "train"}  # noqa: RUF012
    DATA_KEY = "problem"
    REWARD = MATHRewardParser
