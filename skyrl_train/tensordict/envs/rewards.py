"""Helpers for transforms that give rewards, in TorchRL's shape [B, 1, 1]: one number for all tokens of a step."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from tensordict import TensorDictBase

from skyrl_train.data.reasoning import final_answer

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)  # stops at the next <answer>: linear time


def answers_in(text: str) -> list[str]:
    """Return the contents of the <answer> blocks in the final answer (`reasoning.final_answer`)."""
    return [found.strip() for found in ANSWER.findall(final_answer(text))]


def column(values: Sequence[float]) -> torch.Tensor:
    """Return one value per row as a float32 tensor [B, 1, 1]."""
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)


def add_rewards(following: TensorDictBase, rewards: Mapping[str, Sequence[float]], total: str) -> None:
    """Write columns of rewards into a tensordict, in place.

    Args:
        following: The tensordict that receives them.
        rewards: Column name -> one value for each row.
        total: Name of the column that is added to the value already there, if there is one; others replace it.
    """
    for name, values in rewards.items():
        given = column(values)
        before = following.get(name, None) if name == total else None
        following.set(name, given if before is None else before.reshape(given.shape) + given.to(before.device))


def end(following: TensorDictBase, over: Sequence[bool]) -> None:
    """Mark the rows for which `over` is True as terminated and done."""
    ended = torch.tensor(over, device=following["done"].device).reshape(-1, 1)
    following.set("terminated", following["terminated"] | ended)
    following.set("done", following["done"] | ended)
