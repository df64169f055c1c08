"""Recurrences of linear attention by their definitions, in float64: the reference for transformers' functions.

Legend: B sequences, L tokens, H heads, K key size, V value size, G groups of heads, C channels.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from skyrl_train.models.recurrent_layers import get_recurrent_mixers


def delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Return outputs [B, L, H, V] and, if asked for, the last state S [B, H, K, V].

        S_t = (I - beta_t k_t k_t') exp(g_t) S_{t-1} + beta_t k_t v_t',    o_t = S_t' q_t / sqrt(K)

    with normalized keys and queries. g is one number [B, L, H] (gated delta net, arXiv:2412.06464), or one for each
    channel of the key [B, L, H, K] (Kimi delta attention, arXiv:2510.26692).
    """
    dtype, (batch, length, heads, key_size) = query.dtype, key.shape
    query, key, value, g, beta = (x.double() for x in (query, key, value, g, beta))
    query, key = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (query, key))
    decay = (g if g.ndim == 4 else g.unsqueeze(-1)).exp().unsqueeze(-1)
    state = (
        initial_state.double()
        if initial_state is not None
        else value.new_zeros(batch, heads, key_size, value.shape[-1])
    )
    outputs = []
    for t in range(length):
        state = decay[:, t] * state
        error = value[:, t] - torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t] * beta[:, t, :, None], error)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) / key_size**0.5)
    return torch.stack(outputs, 1).to(dtype), state if output_final_state else None


def mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int = 0,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Return outputs [B, L, H, V], and the last state S [B, H, V, K] if asked for (Mamba2, arXiv:2405.21060).

        d_t = softplus(dt_t + bias),    S_t = exp(A d_t) S_{t-1} + d_t x_t B_t',    y_t = S_t C_t + D x_t

    B and C [B, L, G, K] are shared by the heads of a group.
    """
    x, dt, A, B, C = (tensor.double() for tensor in (hidden_states, dt, A, B, C))
    heads = x.shape[2]
    dt = nn.functional.softplus(dt + (0 if dt_bias is None else dt_bias.double())).clamp(*dt_limit)
    B, C = (tensor.repeat_interleave(heads // tensor.shape[2], 2) for tensor in (B, C))
    state = x.new_zeros(len(x), *x.shape[2:], B.shape[-1]) if initial_states is None else initial_states.double()
    outputs = []
    for t in range(x.shape[1]):
        state = (A * dt[:, t]).exp()[..., None, None] * state
        state = state + torch.einsum("bhv,bhk->bhvk", dt[:, t, :, None] * x[:, t], B[:, t])
        outputs.append(torch.einsum("bhvk,bhk->bhv", state, C[:, t]))
    output = torch.stack(outputs, 1) + (0 if D is None else D.double()[:, None] * x)
    output = output.to(hidden_states.dtype)
    return (output, state) if return_final_states else output


def causal_convolution(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_: Any
) -> Tensor:
    """Return y [B, C, L] with y_t = bias + sum_j w_j x_{t - W + 1 + j}, for weights [C, W], after the activation."""
    x, length = hidden_states.double(), hidden_states.shape[-1]
    y = torch.zeros_like(x) if bias is None else bias.double()[:, None].expand_as(x)
    for shift in range(min(weight.shape[1], length)):
        shifted = torch.cat([x.new_zeros(*x.shape[:2], shift), x[..., : length - shift]], -1)
        y = y + weight[:, -1 - shift, None].double() * shifted
    return (y if activation is None else ACT2FN[activation](y)).to(hidden_states.dtype)


REFERENCES = {
    "causal_conv1d_fn": causal_convolution,
    "torch_chunk_gated_delta_rule": delta_rule,
    "torch_recurrent_gated_delta_rule": delta_rule,
    "chunk_kimi_delta_attention": delta_rule,
    "recurrent_kimi_delta_attention": delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
}
"""Function of transformers' modeling modules -> its definition."""


@contextmanager
def reference_recurrences(model: nn.Module) -> Iterator[None]:
    """Compute the recurrences of a model by their definitions while the context is active."""
    namespaces: list[Any] = [
        sys.modules[type(mixer.module).__module__] for mixer in get_recurrent_mixers(model).values()
    ]
    originals = [
        (namespace, name, getattr(namespace, name))
        for namespace in dict.fromkeys(namespaces)
        for name in REFERENCES
        if hasattr(namespace, name)
    ]
    for namespace, name, _ in originals:
        setattr(namespace, name, REFERENCES[name])
    try:
        yield
    finally:
        for namespace, name, original in originals:
            setattr(namespace, name, original)
