"""The fused attention kernel for packed sequences that a GPU has: chosen once for a device, called in one way.

Legend: T queries, S keys, H query heads, K key/value heads (H a multiple of K), D head size, B stretches.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from skyrl_train.messages import to_stderr

MAX_HEAD_SIZE = 256
"""Of every kernel; a head's size must be a multiple of 8 besides."""
_MAX_ORDERED_HEAD_SIZE_FA3 = 192
"""Beyond it, FlashAttention-3 adds up gradients in any order, even if it is asked for one. Learners ask for none on
accelerators: their updates are not the same bits from run to run."""


@dataclass(frozen=True)
class FlashKernel:
    """One kernel under the arguments that all of them share."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, int, int, float, int | None], Tensor]
    """query [T, H, D], key and value [S, K, D], offsets of stretches in the queries and in the keys (both [B+1] int32),
    the most queries and the most keys of a stretch, scaling, sliding window (None for none) -> [T, H, D].

    Causal: the last query of a stretch is level with its last key.
    """


def flash_kernel(query: Tensor, value: Tensor) -> FlashKernel | None:
    """The kernel for tensors like these; None where there is none, and scaled dot product attention runs instead."""
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or size != value.shape[-1]:
        return None
    return _of_device(query.device, size) if size <= MAX_HEAD_SIZE and size % 8 == 0 else None


@cache
def _of_device(device: torch.device, head_size: int) -> FlashKernel | None:
    return choose(torch.cuda.get_device_capability(device), head_size)


def choose(capability: tuple[int, int], head_size: int) -> FlashKernel | None:
    """The fastest kernel installed for a compute capability and a head size; a line on stderr says which."""
    where = f"compute capability {capability[0]}.{capability[1]}, head size {head_size}"
    if capability < (8, 0):
        to_stderr(f"note: attention ({where}): scaled dot product attention, as fused kernels need 8.0")
        return None
    ordered = torch.are_deterministic_algorithms_enabled()
    fits = capability[0] == 9 and (head_size <= _MAX_ORDERED_HEAD_SIZE_FA3 or not ordered)
    kernel = _flash_attention_3() if fits else None
    kernel = kernel or torch_varlen(importlib.import_module("torch.nn.attention.varlen").varlen_attn)
    to_stderr(f"note: attention ({where}): {kernel.name}")
    return kernel


def _flash_attention_3() -> FlashKernel | None:
    """From the package flash_attn_3, if it is installed; one that does not load is said, and not used."""
    if find_spec("flash_attn_interface") is None:
        return None
    try:
        library = importlib.import_module("flash_attn_interface")
    except (ImportError, OSError, RuntimeError) as error:  # built for another torch or CUDA
        reason = f"{type(error).__name__}: {error}"
        to_stderr(f"warning: FlashAttention-3 is installed but does not load, and is not used ({reason})")
        return None
    return flash_attention_3(library.flash_attn_varlen_func)


def flash_attention_3(function: Callable[..., Any]) -> FlashKernel:
    """FlashAttention-3 (arXiv:2407.08608), by its `flash_attn_varlen_func`."""

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: Tensor,
        key_offsets: Tensor,
        most_queries: int,
        most_keys: int,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        found: Any = function(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            cu_seqlens_q=offsets,
            cu_seqlens_k=key_offsets,
            max_seqlen_q=most_queries,
            max_seqlen_k=most_keys,
            softmax_scale=scaling,
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

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        offsets: Tensor,
        key_offsets: Tensor,
        most_queries: int,
        most_keys: int,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        shared = query.shape[1] // key.shape[1]
        options: dict[str, Any] = {"enable_gqa": shared > 1} if groups else {}
        if shared > 1 and not groups:
            key, value = (_repeated(heads, shared) for heads in (key, value))
        output: Tensor = function(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            offsets,
            key_offsets,
            most_queries,
            most_keys,
            scale=scaling,
            window_size=(-1 if window is None else window - 1, 0),
            **options,
        )
        return output

    return FlashKernel("torch's variable-length flash attention", attend)


def _repeated(heads: Tensor, times: int) -> Tensor:
    """[S, K, D] -> [S, K · times, D], each head next to its copies; their gradients are added up in one reduction."""
    return heads.unsqueeze(2).expand(-1, -1, times, -1).flatten(1, 2)
