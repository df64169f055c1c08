"""The fused attention kernel for ragged sequences that a GPU supports: chosen once per device, with one interface.

Legend: T queries, S keys, H query heads, K key/value heads (H a multiple of K), D head size, B segments.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_train.terminal import print_stderr

MAX_HEAD_SIZE = 256
"""Maximum head size that the fused kernels support. Head sizes must also be multiples of 8."""
_MAX_ORDERED_HEAD_SIZE_FA3 = 192
"""Maximum head size for which FlashAttention-3 can sum gradients in a fixed order.

It matters only if deterministic algorithms are enabled. Learners do not enable them on accelerators: their updates are
not bitwise equal from run to run.
"""


class VarlenArgs(NamedTuple):
    """Sequence boundaries and options of a variable-length attention call.

    Attention is causal within each segment. If a segment has more keys than queries, the last query is aligned with the
    last key.
    """

    cu_seqlens_q: Tensor
    """[B+1] int32: boundaries of segments in the queries."""
    cu_seqlens_k: Tensor
    """[B+1] int32: boundaries of segments in the keys."""
    max_seqlen_q: int
    """Maximum number of queries of a segment."""
    max_seqlen_k: int
    """Maximum number of keys of a segment."""
    softmax_scale: float
    sliding_window: int | None
    """Number of keys that a query attends to, the one aligned with it included; None for all."""


@dataclass(frozen=True)
class FlashKernel:
    """A fused kernel behind the arguments that all kernels share."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, VarlenArgs, Tensor | None], Tensor]
    """Maps query [T, H, D], key and value [S, K, D], varlen_args and sinks [H] or None to [T, H, D].

    See `ragged_attention`.
    """


def get_flash_kernel(query: Tensor, value: Tensor, *, with_sinks: bool = False) -> FlashKernel | None:
    """Return the fused kernel for tensors like these; None if scaled dot product attention must run instead.

    Args:
        query: Queries [T, H, D].
        value: Values [S, K, D].
        with_sinks: Attention has sinks.
    """
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or size != value.shape[-1]:
        return None
    return _kernel_of_device(query.device, size, with_sinks) if size <= MAX_HEAD_SIZE and size % 8 == 0 else None


@cache
def _kernel_of_device(device: torch.device, head_size: int, with_sinks: bool) -> FlashKernel | None:
    return choose_flash_kernel(torch.cuda.get_device_capability(device), head_size, with_sinks)


def choose_flash_kernel(capability: tuple[int, int], head_size: int, with_sinks: bool = False) -> FlashKernel | None:
    """Return the fastest installed kernel, and print its name on stderr.

    With attention sinks it is torch's kernel, whose backward pass can be called separately: see `_SinkAttention`.

    Args:
        capability: Compute capability of the GPU.
        head_size: Head size, D.
        with_sinks: Attention has sinks.

    Returns:
        The kernel; None if the compute capability is below 8.0.
    """
    conditions = f"compute capability {capability[0]}.{capability[1]}, head size {head_size}"
    if capability < (8, 0):
        print_stderr(f"note: attention ({conditions}): scaled dot product attention; fused kernels need 8.0")
        return None
    deterministic = torch.are_deterministic_algorithms_enabled()
    supports_fa3 = (
        capability[0] == 9 and not with_sinks and (head_size <= _MAX_ORDERED_HEAD_SIZE_FA3 or not deterministic)
    )
    kernel = _flash_attention_3() if supports_fa3 else None
    kernel = kernel or torch_varlen(importlib.import_module("torch.nn.attention.varlen").varlen_attn)
    print_stderr(f"note: attention ({conditions}): {kernel.name}")
    return kernel


def _flash_attention_3() -> FlashKernel | None:
    """Return the kernel of the package flash_attn_3; None, with a warning on stderr, if it does not load."""
    if find_spec("flash_attn_interface") is None:
        return None
    try:
        library = importlib.import_module("flash_attn_interface")
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        reason = f"{type(error).__name__}: {error}"
        print_stderr(f"warning: FlashAttention-3 is installed but cannot be loaded; it is not used ({reason})")
        return None
    return flash_attention_3(library.flash_attn_varlen_func)


def flash_attention_3(function: Callable[..., Any]) -> FlashKernel:
    """Return FlashAttention-3 (arXiv:2407.08608) as a kernel.

    Args:
        function: Its `flash_attn_varlen_func`.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, varlen_args: VarlenArgs, sinks: Tensor | None) -> Tensor:
        assert sinks is None, "FlashAttention-3 has no backward pass for sinks"
        window = varlen_args.sliding_window
        result: Any = function(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            cu_seqlens_q=varlen_args.cu_seqlens_q,
            cu_seqlens_k=varlen_args.cu_seqlens_k,
            max_seqlen_q=varlen_args.max_seqlen_q,
            max_seqlen_k=varlen_args.max_seqlen_k,
            softmax_scale=varlen_args.softmax_scale,
            causal=True,
            window_size=(-1, -1) if window is None else (window - 1, 0),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        # Older versions also return the log-sum-exp.
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    return FlashKernel("FlashAttention-3", attend)


def torch_varlen(function: Callable[..., Any]) -> FlashKernel:
    """Return torch's FlashAttention-2 as a kernel.

    Args:
        function: `torch.nn.attention.varlen.varlen_attn`.
    """
    supports_gqa = "enable_gqa" in inspect.signature(function).parameters  # since torch 2.12

    def attend(query: Tensor, key: Tensor, value: Tensor, varlen_args: VarlenArgs, sinks: Tensor | None) -> Tensor:
        queries_per_key = query.shape[1] // key.shape[1]
        options: dict[str, Any] = {"enable_gqa": queries_per_key > 1} if supports_gqa else {}
        if queries_per_key > 1 and not supports_gqa:
            key, value = (_repeat_heads(heads, queries_per_key) for heads in (key, value))
        heads = query.contiguous(), key.contiguous(), value.contiguous()
        options |= {"scale": varlen_args.softmax_scale, "window_size": _window_size(varlen_args.sliding_window)}
        run = partial(function, cu_seq_q=varlen_args.cu_seqlens_q, cu_seq_k=varlen_args.cu_seqlens_k, **options)
        run = partial(run, max_q=varlen_args.max_seqlen_q, max_k=varlen_args.max_seqlen_k)
        output: Tensor
        if sinks is None:
            output = run(*heads)
        else:
            varlen = importlib.import_module("torch.nn.attention.varlen")
            run = partial(run, return_aux=varlen.AuxRequest(lse=True))
            output = _SinkAttention.apply(*heads, sinks, run, partial(_varlen_backward, varlen_args))
        return output

    return FlashKernel("torch's variable-length flash attention", attend)


def _window_size(window: int | None) -> tuple[int, int]:
    return (-1 if window is None else window - 1, 0)


def _varlen_backward(varlen_args: VarlenArgs, gradient: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value.

    `saved` are these three, the output, and the log-sum-exp of the scores [H, T] float32.
    """
    window = _window_size(varlen_args.sliding_window)
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        gradient.contiguous(),
        *saved,
        varlen_args.cu_seqlens_q,
        varlen_args.cu_seqlens_k,
        varlen_args.max_seqlen_q,
        varlen_args.max_seqlen_k,
        window == (-1, 0),
        torch.zeros(2, dtype=torch.uint64, device=gradient.device),  # state of the dropout generator: unused
        scale=varlen_args.softmax_scale,
        window_size=list(window),
    )
    return gradients


class _SinkAttention(torch.autograd.Function):
    """Attention with sinks, from a kernel without support for them.

    A sink joins the denominator of a softmax, so the output shrinks by a factor, and the log-sum-exp grows. The
    backward pass of flash attention (arXiv:2205.14135, B.4) computes its weights from scores and log-sum-exp, and the
    mean of their gradients from the output. Given the output and log-sum-exp over all keys, sink included, it computes
    the gradients of attention with sinks.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        attend: Callable[..., tuple[Tensor, Tensor]],
        backward: Callable[..., tuple[Tensor, Tensor, Tensor]],
    ) -> Tensor:
        output, logsumexp_of_keys = attend(query, key, value)  # [T, H, D], [H, T]
        scores = sinks.to(logsumexp_of_keys.dtype).unsqueeze(1)
        output = output * torch.sigmoid(logsumexp_of_keys - scores).T.unsqueeze(2).to(output.dtype)
        ctx.save_for_backward(query, key, value, output, torch.logaddexp(logsumexp_of_keys, scores), sinks)
        ctx.kernel_backward = backward
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, sinks = ctx.saved_tensors
        output, logsumexp = saved[3:]
        weights = torch.exp(sinks.to(logsumexp.dtype).unsqueeze(1) - logsumexp)
        mean = (gradient.to(logsumexp.dtype) * output.to(logsumexp.dtype)).sum(2).T
        return *ctx.kernel_backward(gradient, *saved), -(weights * mean).sum(1).to(sinks.dtype), None, None


def _repeat_heads(heads: Tensor, times: int) -> Tensor:
    """Repeat heads [S, K, D] to [S, K · times, D], copies adjacent; backward sums their gradients in one reduction."""
    return heads.unsqueeze(2).expand(-1, -1, times, -1).flatten(1, 2)
