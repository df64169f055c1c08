r"""Competition mathematics as a tensordict environment (arXiv:2103.03874)."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from torchrl.envs.llm import datasets, reward

from skyrl_train.environments.graders import math_grader
from skyrl_train.environments.graders.boxed import extract_boxed_answer
from skyrl_train.tensordict.envs.chat import DatasetChatEnv
from skyrl_train.tensordict.envs.gsm8k import Source
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

    def _rewarded(self, answer: str, said: str, thought: str) -> TensorDictBase:
        return self._single_correctness_reward(self.extract_boxed(answer), said, thought)

    @staticmethod
    def extract_tags(text: str) -> tuple[str, str]:
        """Return the only block of reasoning and the answer after it; "" for a missing or ambiguous one."""
        return single_thought(text), single_answer(text) or extract_boxed_answer(text) or ""

    @staticmethod
    def answers_match(predicted: str, reference: str) -> bool:
        """True if two answers in LaTeX are equal (docs/reference/graders.md)."""
        answer = reward.MATHRewardParser.extract_boxed(predicted).strip("$ ")
        return math_grader.get_grader(SECONDS_PER_COMPARISON).grade(answer, reference)[0]


class MATHEnv(DatasetChatEnv, datasets.MATHEnv):  # type: ignore[misc]
    """A ChatEnv with a problem of MATH in every row; an episode has one turn by default (`max_steps`).

    Rows have "problem" and "solution"; the arguments are DatasetChatEnv's.
    """

    def __init__(
        self,
        *,
        dataset: Source = "DigitalLearningGmbH/MATH-lighteval",
        compute_reward: bool = True,
        max_steps: int = 1,
        **settings: Any,
    ):
        super().__init__(dataset=dataset, **{"data_key": "problem", "split": "train", **settings})
        parser = MATHRewardParser(tokenizer=settings.get("tokenizer")) if compute_reward else None
        self.add_rewards(max_steps, parser)
