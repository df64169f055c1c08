"""Conversion of the engine's answers to output containers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict
from torch import Tensor
from torch.nested import nested_tensor
from torch.nn.utils.rnn import pad_sequence

from skyrl_train.data.chat import decode_response
from skyrl_train.data.messages import text_content
from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.containers import ChatHistory, LogProbs, Masks, Text, Tokens, ragged
from skyrl_train.tensordict.wrappers.inputs import EngineInput

Fields = Mapping[str, Tensor | tuple[Tensor, Tensor]]
"""Fields of a container for one row: values of the whole sequence, or of its prompt and its response."""


@dataclass(frozen=True)
class Answer:
    """One sampled continuation."""

    ids: list[int]
    logprobs: list[float]
    ended: bool
    """True if the model ended it: it was neither truncated nor aborted."""


@dataclass(frozen=True)
class Layout:
    """The shape and form of the output containers."""

    shape: tuple[int, ...]
    """Batch shape of the output: the input's, followed by the samples if requested."""
    padded: bool
    pad: int
    log_probs: bool
    skip_special_tokens: bool
    jagged: bool = False
    """True if unpadded rows become nested tensors."""


def generated(
    rows: Sequence[EngineInput], answers: Sequence[Answer], tokenizer: Any, ends: frozenset[int], at: Layout
) -> Any:
    """Return the output containers, by name, for prompts and their sampled answers.

    Args:
        rows: Prompts in the row-major order of `at.shape`.
        answers: One answer per row.
        tokenizer: Decodes texts and histories, which are left out if it is None.
        ends: Ids that end a turn; a message does not include them.
        at: Shape and form of the containers.
    """
    fields = [_generated_fields(row, answer) for row, answer in zip(rows, answers, strict=True)]
    out = {"tokens": _container(Tokens, [f[0] for f in fields], at, at.pad)}
    if at.log_probs:
        out["log_probs"] = _container(LogProbs, [f[1] for f in fields], at, 0.0)
    out["masks"] = _container(Masks, [f[2] for f in fields], at, False)
    if tokenizer is None:
        return out
    prompts = _texts(rows, tokenizer)
    texts = [decoded(tokenizer, answer.ids, at.skip_special_tokens) for answer in answers]
    full = [prompt + text for prompt, text in zip(prompts, texts, strict=True)]
    out["text"] = _text_container(at.shape, prompt=prompts, response=texts, full=full)
    if rows[0].history is not None:
        out["history"] = _histories(rows, answers, tokenizer, ends, at)
    return out


def scored(
    rows: Sequence[EngineInput], logprobs: Sequence[Sequence[float] | Tensor] | None, tokenizer: Any, at: Layout
) -> Any:
    """Return the output containers, by name, for scored sequences: only their `full` fields, padded on the left.

    Args:
        rows: The scored sequences.
        logprobs: Log-probs of each sequence's tokens after the first, in nats; None leaves them out.
        tokenizer: Tokenizer that decodes the texts; None leaves them out.
        at: Batch size and padding of the output.
    """
    tokens = [{"full": torch.tensor(row.ids)} for row in rows]
    attention = [torch.ones(len(row.ids), dtype=torch.bool) for row in rows]
    assistant = [torch.tensor(row.assistant, dtype=torch.bool) for row in rows]
    pairs = zip(attention, assistant, strict=True)
    masks = [{"all_attention_mask": one, "all_assistant_mask": other} for one, other in pairs]
    out = {"tokens": _container(Tokens, tokens, at, at.pad), "masks": _container(Masks, masks, at, False)}
    if logprobs is not None:
        values = [{"full": torch.cat([torch.zeros(1), torch.as_tensor(row)])} for row in logprobs]
        out["log_probs"] = _container(LogProbs, values, at, 0.0)
    if tokenizer is not None:
        out["text"] = _text_container(at.shape, full=_texts(rows, tokenizer))
    if rows[0].history is not None:
        out["history"] = ragged(ChatHistory, [{"full": row.history} for row in rows], at.shape)
    return out


def stacked_logits(logits: Tensor, lengths: Sequence[int], at: Layout) -> Tensor:
    """Return left-padded logits [B, T, V] in the form of the output: of the batch's shape, or nested rows [L, V]."""
    if not at.padded and len(at.shape) == 1:
        rows = [row[len(row) - length :] for row, length in zip(logits, lengths, strict=True)]
        return torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    return logits.reshape(*at.shape, *logits.shape[1:])


def in_layout_of(
    attention: Sequence[Tensor] | None, values: Tensor, counts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Move values [B, T, ...] of left-padded rows, and a mask [B, T], to the positions of an attention mask.

    The attention mask may be ragged, with as many positions per row as the row has tokens; None returns the arguments.
    """
    if attention is None:
        return values, counts
    rows = [row.to(values.device) for row in attention]
    present = pad_sequence(rows, batch_first=True, padding_value=False, padding_side="left")
    places = torch.arange(values.shape[1], device=values.device)
    filled = places >= len(places) - present.sum(1, keepdim=True)
    if torch.equal(filled, present):
        return values, counts
    moved = values.new_zeros(*present.shape, *values.shape[2:]).index_put((present,), values[filled])
    return moved, None if counts is None else torch.zeros_like(present).index_put((present,), counts[filled])


def _texts(rows: Sequence[EngineInput], tokenizer: Any) -> list[str]:
    return [tokenizer.decode(row.ids) if row.text is None else row.text for row in rows]


def _text_container(shape: tuple[int, ...], **columns: list[str]) -> Text:
    """A stack of rows: TorchRL's `Text.to_tokens` stores rows of different lengths only in a stack."""
    return ragged(Text, [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)], shape)


def _generated_fields(row: EngineInput, answer: Answer) -> tuple[Fields, Fields, Fields]:
    prompt, response = torch.tensor(row.ids), torch.tensor(answer.ids, dtype=torch.int64)
    logprobs = torch.tensor(answer.logprobs, dtype=torch.float32)
    before, after = torch.zeros(len(prompt), dtype=torch.bool), torch.ones(len(response), dtype=torch.bool)
    return (
        {"prompt": prompt, "response": response, "full": (prompt, response)},
        {"response": logprobs, "full": (torch.zeros(len(prompt)), logprobs)},
        {"all_attention_mask": (~before, after), "all_assistant_mask": (before, after)},
    )


def _container(kind: type, rows: Sequence[Fields], at: Layout, fill: Any) -> Any:
    if at.padded:
        columns = {name: _padded([row[name] for row in rows], fill, name) for name in rows[0]}
        shaped = {name: value.reshape(*at.shape, value.shape[-1]) for name, value in columns.items()}
        return kind(**shaped, padded=True, batch_size=at.shape)
    joined = [{k: torch.cat(v) if isinstance(v, tuple) else v for k, v in row.items()} for row in rows]
    if at.jagged:
        if len(at.shape) != 1:
            raise ConfigError(f"layout=torch.jagged needs one batch dimension, got {list(at.shape)}.")
        nested = {name: nested_tensor([row[name] for row in joined], layout=torch.jagged) for name in rows[0]}
        return kind(**nested, padded=False, batch_size=at.shape)
    out = ragged(kind, joined, at.shape)
    out.padded = False
    return out


def _padded(values: Sequence[Any], fill: Any, name: str) -> Tensor:
    if isinstance(values[0], tuple):  # so that it can be split where the prompts end
        prompts, responses = zip(*values, strict=True)
        return torch.cat([_padded(prompts, fill, "prompt"), _padded(responses, fill, "response")], -1)
    side = "right" if name == "response" else "left"
    return pad_sequence(list(values), batch_first=True, padding_value=fill, padding_side=side)


def decoded(tokenizer: Any, ids: Sequence[int], skip_special_tokens: bool) -> str:
    """Return a response's text. Graders need the markers of reasoning, also where special tokens are skipped."""
    return decode_response(tokenizer, ids) if skip_special_tokens else str(tokenizer.decode(ids))


def _histories(
    rows: Sequence[EngineInput], answers: Sequence[Answer], tokenizer: Any, ends: frozenset[int], at: Layout
) -> Any:
    """The model's answer is one message, decoded from its tokens without the end; it is never parsed from text."""
    found = []
    for row, answer in zip(rows, answers, strict=True):
        ids = answer.ids[:-1] if answer.ids and answer.ids[-1] in ends else answer.ids
        said = decoded(tokenizer, ids, at.skip_special_tokens)
        turn, kind = _turn("assistant", said, answer.ended), type(row.history)
        before = row.history._tensordict.unbind(0)
        full = [*before, turn]
        if before and (begun := _open_content(before[-1])) is not None:
            full = [*before[:-1], _turn("assistant", begun + said, answer.ended)]
        response, full = _conversation(kind, [turn]), _conversation(kind, full)
        found.append({"prompt": row.history, "response": response, "full": full})
    return ragged(ChatHistory, found, at.shape)


def _open_content(turn: Any) -> str | None:
    """Return the text of an answer that is not complete, which the model continues; None for another message."""
    fields = (getattr(value := turn.get(name, None), "data", value) for name in ("role", "is_complete", "content"))
    role, complete, content = fields
    return text_content(content) if role == "assistant" and complete is not None and not complete else None


def _turn(role: str, content: str, complete: bool) -> TensorDict:
    """The content of a History of one message; several times faster than its constructor."""
    fields = {"role": role, "content": content, "is_complete": complete}
    return TensorDict({name: NonTensorData(data=value) for name, value in fields.items()})


def _conversation(kind: Any, turns: Sequence[TensorDict]) -> Any:
    return kind._from_tensordict(LazyStackedTensorDict(*turns, stack_dim=0))
