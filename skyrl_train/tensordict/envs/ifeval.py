"""Instruction following as a tensordict environment (IFEval, arXiv:2311.07911)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform
from torchrl.envs.llm import IFEvalData as IFEvalData, IFEvalScoreData as IFEvalScoreData, datasets, reward

from skyrl_train.data.reasoning import reasoning_blocks
from skyrl_train.environments.tasks.ifeval import score
from skyrl_train.tensordict.envs.chat import QUESTION_KEYS, TaskEnv
from skyrl_train.tensordict.envs.conversation import full_messages, text_of, value_of
from skyrl_train.tensordict.envs.rewards import add_reward, answers_in, end, response_of
from skyrl_train.tensordict.ragged import rows_of

log = logging.getLogger(__name__)
ACCURACIES = ("prompt_level_strict_acc", "inst_level_strict_acc", "prompt_level_loose_acc", "inst_level_loose_acc")
Aggregate = Callable[..., Any]
"""Function of one row's scores, and perhaps think_blocks=, answer_blocks= (list[str]) and complete= (bool)."""


class IfEvalScorer(reward.IfEvalScorer):  # type: ignore[misc]
    """TorchRL's transform that scores the policy's text of this step by the row's instructions, in history mode.

    It scores the content of a single <answer> block, else the whole response after its reasoning. TorchRL's scores the
    first block, and "" without one. The trainer's checks of instructions need neither nltk nor langdetect. Writes the
    accuracies under `score_key` (`IFEvalScoreData`, each [B, 1], those of instructions as the share that is followed),
    and "reward" [B, 1, 1]: the weighted sum of the accuracies (strict prompt, strict instructions, loose prompt, loose
    instructions), + 0.1 for exactly one <answer>, + 0.05 for exactly one block of reasoning; 0 to 1.15.

    Args:
        instruction_ids_key, keyword_args_key, prompt_key: Columns of the row; the prompt may also be under the question
            keys of ChatEnv.
        id_key: A column that identifies the row in errors and in the scores that `verbose` logs.
        response_column: Accepted without effect: the policy's text is scored, under whatever key it is.
        aggregate_reward: False for no reward, or a function that replaces `default_reward_aggregator`: see `Aggregate`.
        set_done_if_answer: Terminate the episode if the response has exactly one <answer>.
    """

    def __init__(
        self,
        *,
        instruction_ids_key: str = "instruction_id_list",
        prompt_key: str = "text",
        keyword_args_key: str = "kwargs",
        id_key: str = "key",
        response_column: str = "text_response",
        score_key: str = "ifeval_score",
        aggregate_reward: bool | Aggregate = True,
        format_weights: Sequence[float] | None = None,
        verbose: bool = False,
        set_done_if_answer: bool = True,
    ):
        columns = [instruction_ids_key, prompt_key, keyword_args_key, id_key, response_column]
        Transform.__init__(self, columns, [score_key, "reward"] if aggregate_reward else [score_key])
        self.format_weights = list(format_weights or (0.4, 0.3, 0.2, 0.1))
        if len(self.format_weights) != 4:
            raise ValueError(
                f"format_weights={format_weights!r} must have four numbers, one for each part of the format."
            )
        self.instruction_ids_key, self.keyword_args_key = instruction_ids_key, keyword_args_key
        self.prompt_key, self.id_key, self.response_key = prompt_key, id_key, response_column
        self.score_key, self.aggregate_reward = score_key, aggregate_reward
        self.verbose, self.set_done_if_answer = verbose, set_done_if_answer

    def set_container(self, container: Any) -> None:
        """Attach the transform. Raises ValueError if the environment is not in history mode."""
        super().set_container(container)
        if getattr(self.parent, "input_mode", "history") != "history":
            raise ValueError("IfEvalScorer needs a ChatEnv with input_mode='history'.")

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Add the scores and the reward of the step's responses to `next_tensordict`.

        Raises:
            ValueError: The history does not end with the model's answer, or a row lacks the columns that scoring needs.
        """
        scores, rewards, answered = [], [], []
        for row in rows_of(tensordict):
            text = response_of(self, row)
            if text is None:
                raise ValueError(
                    "IfEvalScorer: the history does not end with an answer of the model. Append the policy's answer "
                    "before the step."
                )
            blocks = answers_in(text)
            scores.append(self._score(row, blocks[0] if len(blocks) == 1 else text))
            answered.append(len(blocks) == 1)
            rewards.append(self._reward(row, scores[-1], reasoning_blocks(text), blocks))
            if self.verbose:
                log.info("row %s: reward %.3f", value_of(row, self.id_key), rewards[-1])
        found = torch.stack(scores).reshape(next_tensordict.batch_size)
        next_tensordict.set(self.score_key, found.to(next_tensordict.device))
        if self.aggregate_reward is not False:
            add_reward(next_tensordict, "reward", torch.tensor(rewards))
        if self.set_done_if_answer:
            end(next_tensordict, answered)
        return next_tensordict

    def _score(self, row: TensorDictBase, text: str) -> IFEvalScoreData:
        names, kwargs = value_of(row, self.instruction_ids_key), value_of(row, self.keyword_args_key)
        keys = dict.fromkeys((self.prompt_key, "prompt", *QUESTION_KEYS))
        prompt = next((found for key in keys if (found := text_of(row, key)) is not None), None)
        if not names or kwargs is None or prompt is None:
            wanted = (self.instruction_ids_key, self.keyword_args_key, self.prompt_key)
            place, there = value_of(row, self.id_key), sorted(map(str, row.keys()))
            raise ValueError(f"IfEvalScorer: the row {place!r} needs {wanted}, got {there}. Correct the row.")
        metrics = score(names, kwargs, prompt, text).metrics()
        return IFEvalScoreData(**{name: torch.tensor([metrics[name]]) for name in ACCURACIES}, batch_size=[])

    def _reward(
        self, row: TensorDictBase, found: IFEvalScoreData, think_blocks: list[str], answer_blocks: list[str]
    ) -> float:
        if not callable(self.aggregate_reward):
            return float(self.default_reward_aggregator(found, think_blocks, answer_blocks))
        complete = full_messages(row)[-1].get("is_complete", True)  # type: ignore[index]
        more = {"think_blocks": think_blocks, "answer_blocks": answer_blocks, "complete": complete}
        try:
            inspect.signature(self.aggregate_reward).bind(found, **more)
        except TypeError:
            more = {}
        return float(self.aggregate_reward(found, **more))

    def _reset(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        size = tensordict_reset.batch_size
        nothing = {name: torch.zeros(*size, 1, device=tensordict_reset.device) for name in ACCURACIES}
        return tensordict_reset.set(self.score_key, IFEvalScoreData(**nothing, batch_size=size))

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        return super().transform_reward_spec(reward_spec) if self.aggregate_reward else reward_spec

    def transform_observation_spec(self, observation_spec: Composite) -> Composite:
        size, device = observation_spec.shape, observation_spec.device
        shares = {name: Unbounded((*size, 1), device=device) for name in ACCURACIES}
        observation_spec[self.score_key] = Composite(shares, shape=size, data_cls=IFEvalScoreData)
        return observation_spec


class IFEvalEnv(TaskEnv, datasets.IFEvalEnv):  # type: ignore[misc]
    """A TaskEnv with a prompt of IFEval in every row: "prompt", "instruction_id_list" and "kwargs"."""

    HUB = {"dataset": "google/IFEval"}  # noqa: RUF012
    DATA_KEY = "prompt"
    REWARD = staticmethod(lambda tokenizer: IfEvalScorer(prompt_key="prompt"))
