"""The fused attention kernel for ragged sequences that a GPU supports: chosen once per device, with one interface.

FlashAttention-3 and 4 are used where they are installed. Both may be built without some features, and FlashAttention-4
compiles its kernels when they are first called. Before either is used, its output and gradients for a small batch are
compared with attention in float32.

Legend: T queries, S keys, H query heads, K key/value heads (H a multiple of K), D head size, B segments.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_train.models.activation_checkpointing import keep_output
from skyrl_train.terminal import print_stderr

MAX_HEAD_SIZE = 256
"""Maximum head size that the fused kernels support. Head sizes must also be multiples of 8."""
_MAX_ORDERED_HEAD_SIZE_FA3 = 192
"""Maximum head size for which FlashAttention-3 can sum gradients in a fixed order.

It matters only if deterministic algorithms are enabled. Learners do not enable them on accelerators: their updates are
not bitwise equal from run to run.
"""
MAX_KERNEL_ERROR = 0.02
"""Maximum distance of a kernel's result from attention in float32, relative to the norm of the latter.

The rounding of bfloat16 accounts for about 0.004.
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
    softcap: float | None = None
    """With a softcap c, scores become c·tanh(scores/c). None: no softcap."""


class AttentionFeatures(NamedTuple):
    """The features of a layer's attention that a kernel must support."""

    head_size: int
    queries_per_key: int = 1
    """Number of query heads for each key/value head."""
    window: bool = False
    softcap: bool = False
    sinks: bool = False


@dataclass(frozen=True)
class FlashKernel:
    """A fused kernel behind the arguments that all kernels share."""

    name: str
    attend: Callable[[Tensor, Tensor, Tensor, VarlenArgs, Tensor | None], Tensor]
    """Maps query [T, H, D], key and value [S, K, D], varlen_args and sinks [H] or None to [T, H, D].

    See `ragged_attention`.
    """
    is_verified: bool = False
    """True if PyTorch ships and tests the kernel. Others are compared with attention in float32 before they are used.
    """


def get_flash_kernel(
    query: Tensor, value: Tensor, *, window: bool = False, softcap: bool = False, sinks: bool = False
) -> FlashKernel | None:
    """Return the fused kernel for tensors like these; None if scaled dot product attention must run instead.

    Args:
        query: Queries [T, H, D].
        value: Values [S, K, D].
        window: Attention has a sliding window.
        softcap: Attention has a softcap.
        sinks: Attention has sinks.
    """
    size = query.shape[-1]
    if not query.is_cuda or query.dtype not in (torch.bfloat16, torch.float16) or size != value.shape[-1]:
        return None
    if size > MAX_HEAD_SIZE or size % 8:
        return None
    features = AttentionFeatures(size, query.shape[1] // value.shape[1], window, softcap, sinks)
    return _kernel_of_device(query.device, query.dtype, features)


@cache
def _kernel_of_device(device: torch.device, dtype: torch.dtype, features: AttentionFeatures) -> FlashKernel | None:
    return choose_flash_kernel(torch.cuda.get_device_capability(device), features, device, dtype)


def choose_flash_kernel(
    capability: tuple[int, int], features: AttentionFeatures, device: torch.device, dtype: torch.dtype
) -> FlashKernel | None:
    """Return the fastest installed kernel that computes attention correctly, and print its name on stderr.

    Args:
        capability: Compute capability of the GPU.
        features: What the kernel must support.
        device: The GPU, for the comparison with attention in float32.
        dtype: Dtype of query, key and value.

    Returns:
        The kernel; None if there is none, for example because the compute capability is below 8.0.
    """
    options = [name for name in ("window", "softcap", "sinks") if getattr(features, name)]
    conditions = ", ".join(
        [f"compute capability {capability[0]}.{capability[1]}", f"head size {features.head_size}", *options]
    )
    for kernel in find_flash_kernels(capability, features):
        if kernel.is_verified or (problem := find_kernel_problem(kernel, features, device, dtype)) is None:
            print_stderr(f"note: attention ({conditions}): {kernel.name}")
            return kernel
        print_stderr(f"warning: attention ({conditions}): {kernel.name} is not used: {problem}")
    reason = "; fused kernels need 8.0" if capability < (8, 0) else ""
    print_stderr(f"note: attention ({conditions}): scaled dot product attention{reason}")
    return None


def find_flash_kernels(capability: tuple[int, int], features: AttentionFeatures) -> Iterator[FlashKernel]:
    """Yield the installed kernels that should support an attention on a GPU, the fastest first.

    Args:
        capability: Compute capability of the GPU.
        features: What the kernel must support.
    """
    major, size = capability[0], features.head_size
    deterministic = torch.are_deterministic_algorithms_enabled()
    supports_fa3 = major == 9 and not features.sinks and (size <= _MAX_ORDERED_HEAD_SIZE_FA3 or not deterministic)
    if supports_fa3 and (kernel := _load("FlashAttention-3", "flash_attn_interface")) is not None:
        yield kernel
    supports_fa4 = major == 9 or (major == 10 and (size <= 128 or size == 256))
    if supports_fa4 and (kernel := _load("FlashAttention-4", "flash_attn.cute.interface")) is not None:
        yield kernel
    if major >= 8 and not features.softcap:
        yield torch_varlen(importlib.import_module("torch.nn.attention.varlen").varlen_attn)


@cache
def has_separate_kernels() -> bool:
    """True if FlashAttention-3 or 4 is installed. Selective checkpointing also keeps what their results are made of."""
    try:
        distribution("flash-attn-4")
    except PackageNotFoundError:
        return find_spec("flash_attn_interface") is not None
    return True


@cache
def _load(name: str, module: str) -> FlashKernel | None:
    """Return a kernel; None if it is not installed, or, with a warning on stderr, if it does not load."""
    try:
        library = importlib.import_module(module)
    except Exception as error:  # a build for another torch or CUDA may raise anything
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            return None
        reason = f"{type(error).__name__}: {error}"
        print_stderr(f"warning: {name} is installed but cannot be loaded; it is not used ({reason})")
        return None
    return flash_attention(name, library.flash_attn_varlen_func)


def flash_attention(name: str, function: Callable[..., Any]) -> FlashKernel:
    """Return FlashAttention-3 (arXiv:2407.08608) or FlashAttention-4 as a kernel.

    Args:
        name: Name of the kernel.
        function: Its `flash_attn_varlen_func`.
    """

    def attend(query: Tensor, key: Tensor, value: Tensor, varlen_args: VarlenArgs, sinks: Tensor | None) -> Tensor:
        # Under autocast, sinks are float32 parameters, which FlashAttention-4 refuses.
        options: dict[str, Any] = {} if sinks is None else {"learnable_sink": sinks.to(query.dtype)}
        if varlen_args.softcap is not None:
            options["softcap"] = varlen_args.softcap
        call = partial(
            function,
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            cu_seqlens_q=varlen_args.cu_seqlens_q,
            cu_seqlens_k=varlen_args.cu_seqlens_k,
            max_seqlen_q=varlen_args.max_seqlen_q,
            max_seqlen_k=varlen_args.max_seqlen_k,
            softmax_scale=varlen_args.softmax_scale,
            causal=True,
            window_size=_window_size(varlen_args.sliding_window, right=-1),
            deterministic=torch.are_deterministic_algorithms_enabled(),
            **options,
        )
        return keep_output(lambda: _first(call()))

    def _first(result: Any) -> Tensor:
        """Return the output: some versions also return the log-sum-exp."""
        output: Tensor = result[0] if isinstance(result, tuple) else result
        return output

    return FlashKernel(name, attend)


def find_kernel_problem(
    kernel: FlashKernel, features: AttentionFeatures, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Compare a kernel's output and gradients with attention in float32.

    Args:
        kernel: The kernel.
        features: The features that it must support.
        device: Device of the tensors.
        dtype: Dtype of the tensors.

    Returns:
        A description of the difference or of the kernel's error; None if the kernel computes attention correctly.
    """
    # The caller may be a checkpointed layer under autocast. A new thread inherits none of its modes and hooks.
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_find_kernel_problem, kernel, features, device, dtype).result()


def _find_kernel_problem(
    kernel: FlashKernel, features: AttentionFeatures, device: torch.device, dtype: torch.dtype
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    lengths, num_keys = torch.tensor([5, 1, 130, 64]), torch.tensor([5, 129, 130, 100])
    query, key, value = (
        torch.randn(int(count.sum()), heads, features.head_size, generator=generator).to(device, dtype)
        for count, heads in ((lengths, 2 * features.queries_per_key), (num_keys, 2), (num_keys, 2))
    )
    sinks = torch.linspace(-2.0, 3.0, query.shape[1]).to(device, dtype) if features.sinks else None
    weights = torch.randn(query.shape, generator=generator).to(device)
    starts, key_starts = (
        torch.cat([count.new_zeros(1), count.cumsum(0)]).to(device, torch.int32) for count in (lengths, num_keys)
    )
    args = VarlenArgs(
        starts,
        key_starts,
        int(lengths.max()),
        int(num_keys.max()),
        features.head_size**-0.5,
        40 if features.window else None,
        1.5 if features.softcap else None,
    )

    def run(attend: Callable[..., Tensor], compute_dtype: torch.dtype) -> dict[str, Tensor]:
        named = {"query": query, "key": key, "value": value} | ({} if sinks is None else {"sinks": sinks})
        leaves = {name: tensor.to(compute_dtype, copy=True).requires_grad_() for name, tensor in named.items()}
        output = attend(leaves["query"], leaves["key"], leaves["value"], args, leaves.get("sinks"))
        gradients = torch.autograd.grad((output.float() * weights).sum(), list(leaves.values()))
        names = ["output", *(f"gradient of {name}" for name in leaves)]
        return {name: tensor.float() for name, tensor in zip(names, (output.detach(), *gradients), strict=True)}

    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        expected = run(_attend_in_float32, torch.float32)
        try:
            actual = run(kernel.attend, dtype)
        except torch.OutOfMemoryError:  # says nothing about the kernel
            raise
        except Exception as error:  # kernels raise assertions, errors of their compilers, and others
            return f"it failed with {type(error).__name__}: {error}"
        for name, tensor in expected.items():
            difference = float((actual[name] - tensor).norm() / tensor.norm())
            if not difference <= MAX_KERNEL_ERROR:
                return f"its {name} differs from float32 by {difference:.2g}; the limit is {MAX_KERNEL_ERROR}"
    return None


def _attend_in_float32(query: Tensor, key: Tensor, value: Tensor, args: VarlenArgs, sinks: Tensor | None) -> Tensor:
    """Compute attention with the scores of all queries and keys as a tensor."""
    key, value = (_repeat_heads(heads, query.shape[1] // key.shape[1]) for heads in (key, value))
    segments, ends = zip(*map(_segments, (args.cu_seqlens_q, args.cu_seqlens_k)), strict=True)
    age = ends[1] - ends[0].unsqueeze(1)  # number of keys between a query's own and a key, [T, S]
    visible = (segments[0].unsqueeze(1) == segments[1]) & (age >= 0)
    if args.sliding_window is not None:
        visible &= age < args.sliding_window
    scores = torch.einsum("qhd,khd->hqk", query, key) * args.softmax_scale
    if args.softcap is not None:
        scores = torch.tanh(scores / args.softcap) * args.softcap
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)], 2)
    return torch.einsum("hqk,khd->qhd", scores.softmax(2)[..., : len(key)], value)


def _segments(starts: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row's segment and its distance to the end of the segment, both [T], from boundaries [B+1]."""
    segments = torch.repeat_interleave(starts.diff())
    return segments, starts[1:][segments] - torch.arange(len(segments), device=starts.device)


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
        options |= {
            "scale": varlen_args.softmax_scale,
            "window_size": _window_size(varlen_args.sliding_window, right=0),
        }
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

    return FlashKernel("torch's variable-length flash attention", attend, is_verified=True)


def _window_size(window: int | None, right: int) -> tuple[int, int]:
    """Return the number of keys before and after a query's own that it attends to; -1 for all.

    Args:
        window: The sliding window, with the query's own key; None for all keys.
        right: The second number without a window: -1 if causality is another argument, else 0.
    """
    return (-1, right) if window is None else (window - 1, 0)


def _varlen_backward(varlen_args: VarlenArgs, gradient: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of query, key and value.

    `saved` are these three, the output, and the log-sum-exp of the scores [H, T] float32.
    """
    window = _window_size(varlen_args.sliding_window, right=0)
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
