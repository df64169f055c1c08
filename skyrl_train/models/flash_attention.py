"""The fused attention kernel for packed sequences that a GPU has: chosen once for a device, called in one way.

Legend: T queries, S keys, H query heads, K key/value heads (H a multiple of K), D head size, B stretches.
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
"""Of every kernel; a head's size must be a multiple of 8 besides."""
_MAX_ORDERED_HEAD_SIZE_FA3 = 192
"""Beyond it, FlashAttention-3 adds up gradients in any order, even if it is asked for one. Learners ask for none on
accelerators: their updates are not the same bits from run to run."""


class VarlenArgs(NamedTuple):
    """What of a packed batch attends to what. Causal: the last query of a stretch is level with its last key."""

    cu_seqlens_q: Tensor
    """[B+1] int32, in the queries."""
    cu_seqlens_k: Tensor
    """[B+1] int32, in the keys."""
    max_seqlen_q: int
    """Of a stretch."""
    max_seqlen_k: int
    """Of a stretch."""
    softmax_scale: float
    sliding_window: int | None
    """How many keys a query sees, that on its level included; None for all."""


@dataclass(frozen=True)
class FlashKernel:
    """One kernel under the arguments that all of them share."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, VarlenArgs, Tensor | None], Tensor]
    """query [T, H, D], key and value [S, K, D], stretches, sinks [H] or None -> [T, H, D]: see `ragged_attention`."""


def get_flash_kernel(query: Tensor, value: Tensor, *, with_sinks: bool = False) -> FlashKernel | None:
    """The kernel for tensors like these; None where there is none, and scaled dot product attention runs instead."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or size != value.shape[-1]:
        return None
    return _kernel_of_device(query.device, size, with_sinks) if size <= MAX_HEAD_SIZE and size % 8 == 0 else None


@cache
def _kernel_of_device(device: torch.device, head_size: int, with_sinks: bool) -> FlashKernel | None:
    return choose_flash_kernel(torch.cuda.get_device_capability(device), head_size, with_sinks)


def choose_flash_kernel(capability: tuple[int, int], head_size: int, with_sinks: bool = False) -> FlashKernel | None:
    """The fastest kernel installed for a compute capability and a head size; a line on stderr says which.

    With attention sinks it is torch's, whose backward pass can be called by itself: see `_WithSinks`.
    """
    where = f"compute capability {capability[0]}.{capability[1]}, head size {head_size}"
    if capability < (8, 0):
        print_stderr(f"note: attention ({where}): scaled dot product attention, as fused kernels need 8.0")
        return None
    ordered = torch.are_deterministic_algorithms_enabled()
    fits = capability[0] == 9 and not with_sinks and (head_size <= _MAX_ORDERED_HEAD_SIZE_FA3 or not ordered)
    kernel = _flash_attention_3() if fits else None
    kernel = kernel or torch_varlen(importlib.import_module("torch.nn.attention.varlen").varlen_attn)
    print_stderr(f"note: attention ({where}): {kernel.name}")
    return kernel


def _flash_attention_3() -> FlashKernel | None:
    """From the package flash_attn_3, if it is installed; one that does not load is said, and not used."""
    if find_spec("flash_attn_interface") is None:
        return None
    try:
        library = importlib.import_module("flash_attn_interface")
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        reason = f"{type(error).__name__}: {error}"
        print_stderr(f"warning: FlashAttention-3 is installed but does not load, and is not used ({reason})")
        return None
    return flash_attention_3(library.flash_attn_varlen_func)


def flash_attention_3(function: Callable[..., Any]) -> FlashKernel:
    """FlashAttention-3 (arXiv:2407.08608), by its `flash_attn_varlen_func`."""

    def attend(query: Tensor, key: Tensor, value: Tensor, varlen_args: VarlenArgs, sinks: Tensor | None) -> Tensor:
        assert sinks is None, "FlashAttention-3 has no backward pass for sinks"
        window = varlen_args.sliding_window
        found: Any = function(
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
        output: Tensor = found[0] if isinstance(found, tuple) else found  # older ones return the log-sum-exp too
        return output

    return FlashKernel("FlashAttention-3", attend)


def torch_varlen(function: Callable[..., Any]) -> FlashKernel:
    """FlashAttention-2 as it comes with torch, by its `varlen_attn`."""
    groups = "enable_gqa" in inspect.signature(function).parameters  # since torch 2.12

    def attend(query: Tensor, key: Tensor, value: Tensor, varlen_args: VarlenArgs, sinks: Tensor | None) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        options: dict[str, Any] = {"enable_gqa": shared > 1} if groups else {}
        if shared > 1 and not groups:
            key, value = (_repeated(heads, shared) for heads in (key, value))
        heads = query.contiguous(), key.contiguous(), value.contiguous()
        options |= {"scale": varlen_args.softmax_scale, "window_size": _two_sided(varlen_args.sliding_window)}
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


def _two_sided(window: int | None) -> tuple[int, int]:
    return (-1 if window is None else window - 1, 0)


def _varlen_backward(varlen_args: VarlenArgs, gradient: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `saved` are these, the output, and the scores' log-sum-exp [H, T] float32."""
    window = _two_sided(varlen_args.sliding_window)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.torch_attn._varlen_attn_backward(
        gradient.contiguous(),
        *saved,
        varlen_args.cu_seqlens_q,
        varlen_args.cu_seqlens_k,
        varlen_args.max_seqlen_q,
        varlen_args.max_seqlen_k,
        window == (-1, 0),
        torch.zeros(2, dtype=torch.uint64, device=gradient.device),  # the state of dropout's generator: there is none
        scale=varlen_args.softmax_scale,
        window_size=list(window),
    )
    return found


class _SinkAttention(torch.autograd.Function):
    """Attention with sinks, from a kernel that knows none.

    A sink joins the denominator of a softmax, so the output shrinks by a factor, and the log-sum-exp grows. The
    backward pass of flash attention (arXiv:2205.14135, B.4) gets its weights from scores and log-sum-exp, and the mean
    of their gradients from the output: with those of all keys, sink included, it has the gradients of the whole.
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
        output, of_keys = attend(query, key, value)  # [T, H, D], [H, T]
        scores = sinks.to(of_keys.dtype).unsqueeze(1)
        output = output * torch.sigmoid(of_keys - scores).T.unsqueeze(2).to(output.dtype)
        ctx.save_for_backward(query, key, value, output, torch.logaddexp(of_keys, scores), sinks)
        ctx.backward_of_keys = backward
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *saved, sinks = ctx.saved_tensors
        output, of_all = saved[3:]
        weights = torch.exp(sinks.to(of_all.dtype).unsqueeze(1) - of_all)
        mean = (gradient.to(of_all.dtype) * output.to(of_all.dtype)).sum(2).T
        return *ctx.backward_of_keys(gradient, *saved), -(weights * mean).sum(1).to(sinks.dtype), None, None


def _repeated(heads: Tensor, times: int) -> Tensor:
    """[S, K, D] -> [S, K · times, D], each head next to its copies; their gradients are added up in one reduction."""
    return heads.unsqueeze(2).expand(-1, -1, times, -1).flatten(1, 2)
