"""The common base of transforms that reward answers; rewards have TorchRL's shape [B, 1, 1]."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torchrl.data import Composite, Unbounded

from skyrl_train.data.reasoning import final_answer, reasoning_blocks
from skyrl_train.tensordict.envs.conversation import last_response, text_of
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


def end(following: TensorDictBase, over: Sequence[bool]) -> None:
    """Mark the rows for which `over` is True as terminated and done."""
    for key in ("terminated", "done"):
        flags = following.get(key)
        following.set(key, flags | torch.tensor(over, device=flags.device).reshape(flags.shape))


class AnswerRewards:
    """A mixin for TorchRL's reward parsers that reads the policy's text of this step, and nothing of the prompt.

    TorchRL's parsers take the first <answer> in prompt and response. This one calls `extract_tags` with the response,
    which may have reasoning, and `_single_correctness_reward` with what it finds. The rewards are written under
    `out_keys`, in the order of REWARD_KEYS. "reward" is added to the rewards of other transforms in this step.

    The expected answer is at the last of `in_keys`, by default "answer", or at one of ANSWER_KEYS.
    """

    ANSWER_KEYS: tuple[str, ...] = ("answer",)

    tokenizer: Any
    eos_token: str | None
    in_keys: list[Any]
    out_keys: list[Any]
    set_done_if_answer: bool
    parent: Any

    def set_container(self, container: Any) -> None:
        """Attach the transform. Raises ValueError if its `input_mode` is not the environment's."""
        super().set_container(container)  # type: ignore[misc]
        wanted, mode = self._input_mode, getattr(self.parent, "input_mode", None)
        if wanted is not None and mode is not None and wanted != mode:
            raise ValueError(
                f"{type(self).__name__}: input_mode={wanted!r}, but the environment has {mode!r}. Give both the same "
                "input_mode."
            )

    _input_mode: str | None = None

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        """Add the rewards of the step's responses to `next_tensordict`.

        Raises:
            ValueError: A row lacks the policy's response or the expected answer.
        """
        parent = self.parent
        tokenizer = self.tokenizer or getattr(parent, "tokenizer", None)
        role = getattr(parent, "policy_role", None) or "assistant"
        found = [self._scored(row, tokenizer, role) for row in rows_of(tensordict)]
        shape = (*next_tensordict.batch_size, 1, 1)
        for name, key in zip(REWARD_KEYS, self.out_keys, strict=True):
            values = torch.stack([score[name] for score in found]).reshape(shape).to(next_tensordict.device)
            before = next_tensordict.get(key, None) if name == "reward" else None
            next_tensordict.set(key, values if before is None else values + before.reshape(shape))
        if self.set_done_if_answer:
            end(next_tensordict, [bool(score["reward_answer"] > 0) for score in found])
        return next_tensordict

    def _scored(self, row: TensorDictBase, tokenizer: Any, role: str) -> TensorDictBase:
        keys = [*self.in_keys[-1:], *self.ANSWER_KEYS]
        answer = next((found for key in keys if (found := text_of(row, key)) is not None), None)
        text = last_response(row, tokenizer, role)
        if text is None or answer is None:
            missing = "the model's response" if text is None else f"the row's {keys[0]!r}"
            raise ValueError(
                f"{type(self).__name__}: {missing} is missing; the row has the keys {sorted(map(str, row.keys()))}. "
                "The reward needs both the response and the answer."
            )
        text = text.removesuffix(self.eos_token) if self.eos_token else text
        thought, said = self.extract_tags(text)  # type: ignore[attr-defined]
        return self._rewarded(answer, said, thought)

    def _rewarded(self, answer: str, said: str, thought: str) -> TensorDictBase:
        """Return the rewards of an extracted answer, given the row's expected answer."""
        raise NotImplementedError

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        """Return the spec of rewards with the keys that the parser adds; it may change the one given."""
        shape = (*reward_spec.shape, 1, 1)
        for name, key in zip(REWARD_KEYS, self.out_keys, strict=True):
            dtype = torch.bool if name == "success" else torch.float32
            reward_spec[key] = Unbounded(shape, dtype=dtype, device=reward_spec.device)
        return reward_spec
