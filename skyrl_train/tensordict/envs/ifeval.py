"""Instruction following as a tensordict environment (IFEval, arXiv:2311.07911)."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorClass, TensorDictBase, lazy_stack

from skyrl_train.data.reasoning import reasoning_blocks
from skyrl_train.environments.tasks.ifeval import score
from skyrl_train.tensordict.envs.base import StepCounter, Transform
from skyrl_train.tensordict.envs.chat import QUESTION_KEYS, ChatEnv, DatasetChatEnv
from skyrl_train.tensordict.envs.conversation import full_messages, last_response, text_of, value_of
from skyrl_train.tensordict.envs.rewards import add_rewards, answers_in, end

log = logging.getLogger(__name__)
ONE_ANSWER, ONE_THOUGHT = 0.1, 0.05


class IFEvalScoreData(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Accuracies of a response, each [B, 1]: 1 if it follows all instructions, and the share that it follows."""

    prompt_level_strict_acc: torch.Tensor
    inst_level_strict_acc: torch.Tensor
    prompt_level_loose_acc: torch.Tensor
    inst_level_loose_acc: torch.Tensor


Aggregate = Callable[..., Any]
"""Function from one row's scores to a reward.

It may also take think_blocks=, answer_blocks= (list[str]) and complete= (bool).
"""


class IfEvalScorer(Transform):
    """A transform that scores the model's text of this step by the row's instructions, in history mode.

    It scores the content of a single <answer> block, else the whole response after its reasoning. Writes the accuracies
    under `score_key` (`IFEvalScoreData`), and "reward" [B, 1, 1]: the weighted sum of the accuracies (strict prompt,
    strict instructions, loose prompt, loose instructions), + 0.1 for exactly one <answer>, + 0.05 for exactly one
    block of reasoning; 0 to 1.15.

    Args:
        instruction_ids_key, keyword_args_key, prompt_key: Columns of the row; the prompt may also be under the question
            keys of ChatEnv.
        id_key: A column that identifies the row in errors and in the scores that `verbose` logs.
        response_column: Only "text_response": the policy's text is scored, under whatever key it is.
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
        if response_column != "text_response":
            raise ValueError(
                f"response_column={response_column!r} is not supported, because the policy's text is scored. Use "
                "'text_response'."
            )
        self.id_key, self.verbose = id_key, verbose
        self.weights = tuple(format_weights or (0.4, 0.3, 0.2, 0.1))
        if len(self.weights) != 4:
            raise ValueError(
                f"format_weights={format_weights!r} must have four numbers, one for each part of the format."
            )
        self.instruction_ids_key, self.keyword_args_key = instruction_ids_key, keyword_args_key
        self.prompt_keys = tuple(dict.fromkeys((prompt_key, "prompt", *QUESTION_KEYS)))
        self.score_key, self.aggregate_reward = score_key, aggregate_reward
        self.of_one_step = (score_key,)
        self.set_done_if_answer = set_done_if_answer

    def attach(self, environment: Any) -> None:
        """Attach the transform to an environment.

        Raises:
            ValueError: The environment is not a ChatEnv with input_mode="history".
        """
        if not isinstance(environment, ChatEnv) or environment.input_mode != "history":
            raise ValueError("IfEvalScorer needs a ChatEnv with input_mode='history'.")
        super().attach(environment)

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        """Add the scores and the reward of the step's responses to `following`.

        Raises:
            ValueError: The history does not end with the model's answer, or a row lacks the columns that scoring needs.
        """
        scores, rewards, answered = [], [], []
        role = getattr(self.environment, "policy_role", "assistant")
        for row in root.unbind(0):
            text = last_response(row, getattr(self.environment, "tokenizer", None), role)
            if text is None:
                raise ValueError(
                    "IfEvalScorer: the history does not end with an answer of the model. Append the policy's answer "
                    "before the step."
                )
            blocks = answers_in(text)
            found = self._score(row, blocks[0] if len(blocks) == 1 else text)
            scores.append(found)
            answered.append(len(blocks) == 1)
            rewards.append(self._reward(row, found, reasoning_blocks(text), blocks))
            if self.verbose:
                log.info("row %s: reward %.3f", value_of(row, self.id_key), rewards[-1])
        following.set(self.score_key, lazy_stack(scores))
        if self.aggregate_reward is not False:
            add_rewards(following, {"reward": rewards}, total="reward")
        if self.set_done_if_answer:
            end(following, answered)
        return following

    def _score(self, row: TensorDictBase, text: str) -> IFEvalScoreData:
        names, kwargs = value_of(row, self.instruction_ids_key), value_of(row, self.keyword_args_key)
        prompt = next((found for key in self.prompt_keys if (found := text_of(row, key)) is not None), None)
        if not names or kwargs is None or prompt is None:
            wanted = (self.instruction_ids_key, self.keyword_args_key, self.prompt_keys[0])
            place, there = value_of(row, self.id_key), sorted(map(str, row.keys()))
            raise ValueError(f"IfEvalScorer: the row {place!r} needs {wanted}, got {there}. Correct the row.")
        metrics = score(names, kwargs, prompt, text).metrics()
        return IFEvalScoreData(**{name: torch.tensor([value]) for name, value in metrics.items()}, batch_size=[])

    def default_reward_aggregator(
        self,
        score: IFEvalScoreData,
        think_blocks: Sequence[str] | None = None,
        answer_blocks: Sequence[str] | None = None,
        complete: bool | None = None,
    ) -> torch.Tensor:
        """Return the reward [..., 1] of a response: the weighted accuracies, plus bonuses for the format.

        Args:
            score: The accuracies of the response.
            think_blocks: Blocks of reasoning; exactly one gives a bonus. None counts as no block.
            answer_blocks: Blocks of answers; exactly one gives a bonus. None counts as no block.
            complete: Ignored.
        """
        parts = (
            score.prompt_level_strict_acc.sum(-1, keepdim=True),
            score.inst_level_strict_acc.mean(-1, keepdim=True),
            score.prompt_level_loose_acc.sum(-1, keepdim=True),
            score.inst_level_loose_acc.mean(-1, keepdim=True),
        )
        weighted = sum(weight * part for weight, part in zip(self.weights, parts, strict=True))
        bonus = ONE_ANSWER * (len(answer_blocks or ()) == 1) + ONE_THOUGHT * (len(think_blocks or ()) == 1)
        return torch.as_tensor(weighted) + bonus

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


class IFEvalEnv(DatasetChatEnv):
    """A ChatEnv with a prompt of IFEval in every row; an episode has one turn by default (`max_steps`).

    Rows have "prompt", "instruction_id_list" and "kwargs"; the arguments are DatasetChatEnv's.
    """

    def __init__(
        self,
        *,
        dataset: str | Sequence[Mapping[str, Any]] | Iterable[Mapping[str, Any]] = "google/IFEval",
        compute_reward: bool = True,
        max_steps: int = 1,
        **settings: Any,
    ):
        settings.setdefault("data_key", "prompt")
        super().__init__(dataset=dataset, **settings)
        self.append_transform(StepCounter(max_steps))
        if compute_reward:
            self.append_transform(IfEvalScorer(prompt_key=self.data_key))
