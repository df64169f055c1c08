"""Inputs and outputs of the wrappers: containers with fields prompt, response and full, or masks.

Unpadded ones (`padded` False) are lazy stacks of rows of any length: read them with `get(key, as_list=True)`,
`as_padded_tensor=True` or `as_nested_tensor=True`, or row by row. Padded ones are tensors, with prompts padded on the
left and responses on the right.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from tensordict import TensorClass, TensorDict, lazy_stack
from torch import Tensor

from skyrl_train.tensordict.history import History


class Tokens(TensorClass["nocast"]):  # type: ignore[name-defined]
    """int64 token ids: prompt [B, Lp], response [B, Lr], full [B, L]."""

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    padded: bool | None = None


class LogProbs(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Log-probs in nats, of the same shapes as Tokens, after temperature and before truncation.

    When generating, `prompt` is None (not computed) and `full` is 0 for tokens that were not sampled. When only
    scoring, `full` has the log-probs of all tokens but the first, which is 0.
    """

    prompt: Tensor | None = None
    response: Tensor | None = None
    full: Tensor | None = None
    padded: bool | None = None


class Masks(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Boolean masks of the shape of Tokens.full: tokens that are not padding, and tokens of the assistant.

    The end-of-turn token of an answer belongs to the assistant.
    """

    all_attention_mask: Tensor | None = None
    all_assistant_mask: Tensor | None = None
    padded: bool | None = None


class Text(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Texts: prompt, response, and full (the prompt followed by the response)."""

    prompt: str | None = None
    response: str | None = None
    full: str | None = None


class ChatHistory(TensorClass["nocast"]):  # type: ignore[name-defined]
    """Conversations; each History has an additional batch dimension for its turns."""

    prompt: History | None = None
    response: History | None = None
    full: History | None = None

    def __post_init__(self) -> None:
        for name in ("prompt", "response", "full"):
            history = getattr(self, name)
            if isinstance(history, History) and history.ndim == self.ndim:
                warnings.warn(
                    f"ChatHistory.{name} has batch size {tuple(history.batch_size)}, without a dimension of turns; "
                    "each message is treated as a conversation of one turn.",
                    stacklevel=3,
                )
                setattr(self, name, lazy_stack([history], -1))


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


def nested_stack(rows: Sequence[Any], shape: Sequence[int]) -> Any:
    """Stack rows of any length lazily into `shape`; `rows` are in row-major order."""
    if not shape:
        return rows[0]
    step = len(rows) // shape[0]
    return lazy_stack([nested_stack(rows[i * step : (i + 1) * step], shape[1:]) for i in range(shape[0])])


def ragged(kind: type, rows: Sequence[dict[str, Any]], shape: Sequence[int]) -> Any:
    """Return an unpadded container of class `kind` and batch size `shape`, from rows of fields in row-major order."""
    return kind.from_tensordict(nested_stack([TensorDict(row) for row in rows], shape))  # type: ignore[attr-defined]
