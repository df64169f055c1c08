"""Inputs and outputs of the wrappers: TorchRL's containers, and functions that stack rows of any length into them.

Unpadded containers (`padded` False) are lazy stacks of rows of any length: read them with `get(key, as_list=True)`,
`as_padded_tensor=True` or `as_nested_tensor=True`, or row by row. Padded ones are tensors, with prompts padded on the
left and responses on the right.

LogProbs are in nats, after temperature and before truncation. When a wrapper generates, `LogProbs.prompt` is None and
`full` is 0 for tokens that were not sampled. When it scores, `full` has the log-probs of all tokens but the first,
which is 0. In Masks, the end-of-turn token of an answer belongs to the assistant.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tensordict import TensorClass, TensorDict
from torch import Tensor
from torchrl.modules.llm.policies import (
    ChatHistory as ChatHistory,
    LogProbs as LogProbs,
    Masks as Masks,
    Text as Text,
    Tokens as Tokens,
)

from skyrl_train.tensordict.ragged import nested_stack


class LLMData(TensorClass["nocast"]):  # type: ignore[name-defined]
    """TorchRL's flat container from before Text, Tokens and LogProbs."""

    tokens: Tensor | None = None
    tokens_response: Tensor | None = None
    attention_mask: Tensor | None = None
    token_list: list[int] | list[list[int]] | None = None
    tokens_response_list: list[list[int]] | None = None
    logits: Tensor | None = None
    log_probs: Tensor | None = None
    text: str | list[str] | None = None
    text_response: str | list[str] | None = None


def ragged(kind: type, rows: Sequence[dict[str, Any]], shape: Sequence[int]) -> Any:
    """Return an unpadded container of class `kind` and batch size `shape`, from rows of fields in row-major order."""
    return kind.from_tensordict(nested_stack([TensorDict(row) for row in rows], shape))  # type: ignore[attr-defined]
