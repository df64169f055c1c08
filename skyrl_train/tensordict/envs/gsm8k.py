"""Grade-school mathematics as a tensordict environment (arXiv:2110.14168)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from tensordict import TensorDictBase
from torchrl.data import Composite
from torchrl.envs.llm import datasets, reward

from skyrl_train.environments.graders.numbers import parse_number
from skyrl_train.environments.tasks.gsm8k import extract_strict_answer
from skyrl_train.tensordict.envs.chat import TaskEnv
from skyrl_train.tensordict.envs.conversation import text_of
from skyrl_train.tensordict.envs.rewards import AnswerRewards, answers_in, single_thought
from skyrl_train.tensordict.ragged import rows_of

SCALES = frozenset({"dozen", "hundred", "thousand", "million", "billion", "k", "m", "percent", "or", "and", "not"})
Source = str | Iterable[Mapping[str, Any]]
"""Rows of a dataset, or where they are."""


def given_answer(text: str) -> str | None:
    """Return a response's answer, a number in canonical form; None if there is no answer, or several that differ.

    It is read from <answer> blocks after the reasoning ("72 clips" is 72), else after "####" (`gsm8k.strict_answer`).
    A block that is not a number is returned unchanged.
    """
    blocks = answers_in(text)
    if not blocks:
        return extract_strict_answer(text)
    values = {_number(block) or block for block in blocks}
    return values.pop() if len(values) == 1 else None


def _number(block: str) -> str | None:
    """Return the number that a text consists of, which one word may follow unless it is part of the number."""
    head, _, unit = block.strip().removesuffix(".").rpartition(" ")
    has_unit = unit.isalpha() and unit.lower() not in SCALES
    return parse_number(block) or (parse_number(head) if has_unit else None)


def true_answer(answer: str) -> str:
    """Return the number in a row's "answer": after "####", else the whole text. Raises ValueError for no number."""
    truth = parse_number(answer.rpartition("####")[2])
    if truth is None:
        raise ValueError(
            f"The row's answer {answer!r:.80} neither is a number nor ends in '#### <number>'. Correct the row, or "
            "leave it out."
        )
    return truth


class GSM8KRewardParser(AnswerRewards, reward.GSM8KRewardParser):  # type: ignore[misc]
    """TorchRL's transform that rewards the policy's text of this step by the row's "answer".

    Writes, each [B, 1, 1]: "reward_answer", 1 for exactly one answer; "reward_think", 1 for exactly one block
    of reasoning; "success", True for the right answer; "reward" and "reward_right": `correct_reward` for the right
    answer, `format_reward` for another one, else 0. The arguments are TorchRL's.
    """

    def _expected(self, answer: str) -> tuple[str]:
        return (true_answer(answer),)

    @staticmethod
    def extract_tags(text: str) -> tuple[str, str]:
        return single_thought(text), given_answer(text) or ""

    @staticmethod
    def normalize_answer(answer: str) -> str:
        """Return a number in canonical form: 1234 for "$1,234.00" and for "1,234 clips"."""
        return _number(answer) or reward.GSM8KRewardParser.normalize_answer(answer)


class GSM8KEnv(TaskEnv, datasets.GSM8KEnv):  # type: ignore[misc]
    """A TaskEnv with a question of GSM8K in every row: "question" and "answer" ("... #### 72")."""

    HUB = {"dataset": "openai/gsm8k", "name": "main", "split": "train"}  # noqa: RUF012
    DATA_KEY = "question"
    REWARD = GSM8KRewardParser


class GSM8KPrepareQuestion(datasets.GSM8KPrepareQuestion):  # type: ignore[misc]
    """TorchRL's transform that inserts the question into the base prompt, for models without a chat template.

    Reads `in_keys` in every reset and writes `out_keys` (by default the same).
    """

    def _reset_env_preprocess(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Replace each question by the prompt that asks for reasoning and an answer in tags.

        Raises:
            KeyError: A row has no text at one of the input keys, which TorchRL's transform would write as "None".
        """
        for key in self.in_keys:
            if any(text_of(row, key) is None for row in rows_of(tensordict)):
                raise KeyError(
                    f"GSM8KPrepareQuestion: the tensordict has no text under {key!r}. Name the column of the question "
                    "with in_keys."
                )
        return super()._reset_env_preprocess(tensordict)

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict  # the question has been inserted at the reset

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        for source, out in zip(self.in_keys, self.out_keys, strict=True):
            if source in observation_spec.keys(True) and out not in observation_spec.keys(True):
                observation_spec[out] = observation_spec[source].clone()
        return observation_spec
