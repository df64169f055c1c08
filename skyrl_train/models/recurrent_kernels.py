"""Triton kernels of `fla-core` for recurrent layers on GPUs, which know the boundaries of packed sequences.

Each function has the signature of the function of transformers that it replaces, for one row [1, T, ...], plus
`sequences`. Kernels for half precision accumulate in float32. In float32 they would multiply in TF32, so float32 models
use transformers' PyTorch functions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from skyrl_train.models.ragged_attention import PackedSequences

_DISTRIBUTION = "fla-core"

_replaced_kernels: ContextVar[Mapping[str, Callable[..., Any]] | None] = ContextVar("replaced_kernels", default=None)


@cache
def has_kernels() -> bool:
    """True if fla-core is installed. Another distribution may have a package of the same name, `fla`."""
    try:
        distribution(_DISTRIBUTION)
    except PackageNotFoundError:
        return False
    return True


def get_kernel(name: str, values: Tensor) -> Callable[..., Any] | None:
    """Return the kernel that replaces a function of transformers for a tensor; None for the PyTorch function.

    Args:
        name: Name of transformers' function.
        values: The function's first argument.
    """
    if (kernels := _replaced_kernels.get()) is not None:
        return kernels.get(name)
    return KERNELS.get(name) if values.is_cuda and values.dtype.itemsize == 2 and has_kernels() else None


@contextmanager
def replaced_kernels(kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Use these kernels, by names of transformers' functions, on all devices while the context is active."""
    token = _replaced_kernels.set(kernels)
    try:
        yield
    finally:
        _replaced_kernels.reset(token)


def convolve(
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str | None = None,
    *,
    sequences: PackedSequences,
    **_: Any,
) -> Tensor:
    """Return the causal depthwise convolution [1, channels, T]; see `causal_conv1d_fn` of transformers."""
    kernel = _import("fla.modules.causal_conv1d", "causal_conv1d")
    rows = hidden_states.transpose(1, 2).contiguous()
    output: Tensor = kernel(rows, weight, bias, activation=activation, **_boundaries(sequences))[0]
    return output.transpose(1, 2)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool,
    sequences: PackedSequences,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return outputs [1, T, heads, value size] and no state; see `torch_chunk_gated_delta_rule` of transformers."""
    return _delta_rule(
        _import("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
        (query, key, value, g, beta),
        use_qk_l2norm_in_kernel,
        sequences,
    )


def kimi_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool,
    sequences: PackedSequences,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return outputs [1, T, heads, value size] and no state; see `chunk_kimi_delta_attention` of transformers."""
    kernel = _import("fla.ops.kda", "chunk_kda")
    return _delta_rule(kernel, (query, key, value, g, beta), use_qk_l2norm_in_kernel, sequences)


def mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor,
    dt_bias: Tensor,
    dt_limit: tuple[float, float],
    sequences: PackedSequences,
    **_: Any,
) -> Tensor:
    """Return outputs [1, T, heads, head size]; see `mamba2_chunk_scan` of transformers.

    The recurrence S_t = exp(A d_t) S_{t-1} + d_t B_t x_t', y_t = S_t' C_t + D x_t is that of gated linear attention,
    with queries C, keys B, values d x and log decay A d.
    """
    kernel = _import("fla.ops.simple_gla", "chunk_simple_gla")
    steps = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    heads_per_group = hidden_states.shape[2] // B.shape[2]
    query, key = (x.repeat_interleave(heads_per_group, 2) for x in (C, B))
    values = (hidden_states * steps.unsqueeze(-1)).to(hidden_states.dtype)
    output: Tensor = kernel(query, key, values, A.float() * steps, scale=1.0, **_boundaries(sequences))[0]
    return output + D.unsqueeze(-1) * hidden_states


KERNELS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": convolve,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": kimi_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
}
"""Function of transformers -> kernel."""


def _delta_rule(
    kernel: Callable[..., Any], inputs: tuple[Tensor, ...], normalizes: bool, sequences: PackedSequences
) -> tuple[Tensor, None]:
    query, key, value, g, beta = inputs
    options = _boundaries(sequences)
    return kernel(query, key, value, g=g, beta=beta, use_qk_l2norm_in_kernel=normalizes, **options)[0], None


def _boundaries(sequences: PackedSequences) -> dict[str, Tensor]:
    return {"cu_seqlens": sequences.offsets, "cu_seqlens_cpu": sequences.offsets_on_cpu}


@cache
def _import(module: str, name: str) -> Callable[..., Any]:
    return getattr(import_module(module), name)  # type: ignore[no-any-return]
