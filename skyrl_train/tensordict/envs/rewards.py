"""The common base of transforms that reward answers; rewards have TorchRL's shape [B, 1, 1]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Composite, Unbounded
from torchrl.envs import Transform

from skyrl_train.data.reasoning import final_answer, reasoning_blocks
from skyrl_train.tensordict.envs.conversation import last_response, value_of
from skyrl_train.tensordict.envs.rows import chat_setting
from skyrl_train.tensordict.ragged import rows_of

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)  # stops at the next <answer>: linear time
REWARD_KEYS = ("reward_answer", "reward_think", "reward_right", "reward", "success")


def answers_in(text: str) -> list[str]:
    """Return the contents of the <answer> blocks in the final answer (`reasoning.final_answer`)."""
    return [found.strip() for found in ANSWER.findall(final_answer(text))]


def single_answer(text: str) -> str:
    """Return the content of the <answer> blocks in the final answer; "" for no block, or blocks that differ."""
    answers = set(answers_in(text))
    return answers.pop() if len(answers) == 1 else ""


def single_thought(text: str) -> str:
    """Return the only block of reasoning in a response; "" for none, or several."""
    blocks = reasoning_blocks(text)
    return blocks[0].strip() if len(blocks) == 1 else ""


def response_of(transform: Transform, row: TensorDictBase, tokenizer: Any = None) -> str | None:
    """Return `last_response` of a row with the tokenizer (unless given) and the role of the transform's environment."""
    role = chat_setting(transform, "policy_role", "assistant")
    return last_response(row, tokenizer or chat_setting(transform, "tokenizer", None), role)


def add_reward(following: TensorDictBase, key: NestedKey, values: torch.Tensor) -> None:
    """Add rewards, one per row, to those that other transforms wrote in this step; write them as [B, 1, 1]."""
    values = values.reshape(*following.batch_size, 1, 1).to(following.device)
    before = following.get(key, None)
    following.set(key, values if before is None else values + before.reshape(values.shape))


def end(following: TensorDictBase, over: Sequence[bool]) -> None:
    """Mark the rows for which `over` is True as terminated and done."""
    for key in ("terminated", "done"):
        flags = following.get(key)
        following.set(key, flags | torch.tensor(over, device=flags.device).reshape(flags.shape))


class AnswerRewards(Transform):  # type: ignore[misc]
    """A base of TorchRL's reward parsers that reads the policy's text of this step, and nothing of the prompt.

    TorchRL's parsers take the first <answer> in prompt and response. This one calls `extract_tags` with the response,
    which may have reasoning, and `_single_correctness_reward` with what it finds. The rewards are written under
    `out_keys`, in the order of REWARD_KEYS. "reward" is added to the rewards of other transforms in this step.

    The expected answer is at the last of `in_keys`, by default "answer", or at one of ANSWER_KEYS.
    """

    ANSWER_KEYS: tuple[str, ...] = ("answer",)
    _input_mode: str | None = None

    def set_container(self, container: Any) -> None:
        """Attach the transform. Raises ValueError if its `input_mode` is not the environment's."""
        super().set_container(container)
        wanted, mode = self._input_mode, getattr(self.parent, "input_mode", None)
        if wanted is not None and mode is not None and wanted != mode:
            raise ValueError(
                f"{type(self).__name__}: input_mode={wanted!r}, but the environment has {mode!r}. Give both the same "
                "input_mode."
            )

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Add the rewards of the step's responses to `next_tensordict`.

        Raises:
            ValueError: A row lacks the policy's response or the expected answer.
        """
        found: Any = torch.stack([self._scored(row) for row in rows_of(tensordict)])
        for name, key in zip(REWARD_KEYS, self.out_keys, strict=True):
            if name != "reward":
                next_tensordict.pop(key, None)
            add_reward(next_tensordict, key, found[name])
        if self.set_done_if_answer:
            end(next_tensordict, (found["reward_answer"] > 0).tolist())
        return next_tensordict

    def _scored(self, row: TensorDictBase) -> TensorDictBase:
        keys = [*self.in_keys[-1:], *self.ANSWER_KEYS]
        answer = next((found for key in keys if (found := value_of(row, key)) is not None), None)
        text = response_of(self, row, self.tokenizer)
        if text is None or answer is None:
            missing = "the model's response" if text is None else f"the row's {keys[0]!r}"
            raise ValueError(
                f"{type(self).__name__}: {missing} is missing; the row has the keys {sorted(map(str, row.keys()))}. "
                "The reward needs both the response and the answer."
            )
        text = text.removesuffix(self.eos_token) if self.eos_token else text
        thought, said = self.extract_tags(text)
        rewards: TensorDictBase = self._single_correctness_reward(*self._expected(str(answer)), said, thought)
        return rewards

    @staticmethod
    def extract_tags(text: str) -> tuple[str, str]:
        """Return the only block of reasoning and the answer after it; "" for a missing or ambiguous one."""
        return single_thought(text), single_answer(text)

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Return the spec of rewards with the keys that the parser adds; it may change the one given."""
        shape = (*reward_spec.shape, 1, 1)
        for name, key in zip(REWARD_KEYS, self.out_keys, strict=True):
            dtype = torch.bool if name == "success" else torch.float32
            reward_spec[key] = Unbounded(shape, dtype=dtype, device=reward_spec.device)
        return reward_spec
