"""TorchRL environments of conversations with given numbers of turns, and a policy for them."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torchrl.data.llm import History
from torchrl.envs import EnvBase, StepCounter, Transform
from torchrl.envs.llm import ChatEnv

import tests.support.torchrl  # noqa: F401 - before the imports below, with their warnings


class EndsByQuestion(Transform):  # type: ignore[misc]
    """Question "q<i>/<n>" takes n turns; every turn is rewarded with i."""

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        numbers = [str(question)[1:].split("/") for question in tensordict["query"]]
        over = next_tensordict["step_count"] >= torch.tensor([[int(turns)] for _, turns in numbers])
        reward = torch.tensor([float(number) for number, _ in numbers]).reshape(-1, 1, 1)
        next_tensordict.set("reward", reward)
        next_tensordict.set("terminated", over)
        return next_tensordict.set("done", next_tensordict["done"] | over)


def conversations(*turns: int, rows: int = 2) -> EnvBase:
    """Return an environment with endlessly repeated questions in order, each of so many turns."""
    questions = [f"q{place}/{count}" for place, count in enumerate(turns)]
    env = ChatEnv.from_dataloader([{"query": [one]} for one in questions], batch_size=(rows,), group_repeats=True)
    return env.append_transform(StepCounter()).append_transform(EndsByQuestion())


def answer(tensordict: TensorDictBase, text: str = "ok") -> TensorDictBase:
    """Answer every conversation with a text."""
    if tensordict.ndim > 1:
        return lazy_stack([answer(part, text) for part in tensordict.unbind(0)])
    said = History(role="assistant", content=text, batch_size=())
    prompts = [row["history"].prompt for row in tensordict.unbind(0)]
    tensordict["history"].full = lazy_stack([prompt.append(said, inplace=False) for prompt in prompts])
    return tensordict


def questions(batch: TensorDictBase | None) -> list[Any]:
    """Return the numbers of a batch's questions, e.g. "q0", in the batch's shape."""
    assert batch is not None
    return [row["query"][:2] if row.ndim == 0 else questions(row) for row in batch.unbind(0)]
