"""Trajectories and completions built from plain lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import mask_to_spans, to_logprob_array, to_token_array
from skyrl_train.data.trajectory import Trajectory, Turn
from skyrl_train.engines.base import Completion, VersionSpan


def trajectory_from(
    prompt: Prompt,
    sample: int,
    prompt_ids: Sequence[int],
    response_ids: Sequence[int],
    loss_mask: Sequence[int],
    logprobs: Sequence[float],
    turns: list[Turn],
    reward: float,
    stop_reason: str,
    temperature: float,
    *more: Any,
    **named: Any,
) -> Trajectory:
    """`loss_mask` [L] instead of spans."""
    assert len(loss_mask) == len(response_ids)
    tokens = (
        to_token_array(prompt_ids),
        to_token_array(response_ids),
        mask_to_spans(loss_mask),
        to_logprob_array(logprobs),
    )
    return Trajectory(prompt, sample, *tokens, turns, reward, stop_reason, temperature, *more, **named)


def completion_from(
    request_id: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    full_logprobs: Sequence[float],
    stop_reason: str,
    versions: list[VersionSpan],
    *more: Any,
    **named: Any,
) -> Completion:
    arrays = to_token_array(token_ids), to_logprob_array(logprobs), to_logprob_array(full_logprobs)
    return Completion(request_id, *arrays, stop_reason, versions, *more, **named)
