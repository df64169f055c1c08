"""Part 2: every kernel for packed sequences against plain SDPA in float32, one sequence at a time.

As in FlashAttention's own tests, the bound of a kernel's error is twice that of SDPA in the kernel's own dtype, three
times for gradients, beyond an absolute floor: both are compared with the same computation in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyrl_train.models import ragged_attention as ragged_attention_module
from skyrl_train.models.flash_attention import AttentionFeatures, FlashKernel, find_flash_kernels, find_kernel_problem
from skyrl_train.models.ragged_attention import Segments, ragged_attention
from skyrl_train.models.shared_prompts import SharedPromptLayout
from tests.gpu_check.report import Report, Setting


@dataclass(frozen=True)
class Case:
    """Shapes of one comparison."""

    name: str
    lengths: tuple[int, ...]
    """Lengths of the sequences in tokens."""
    heads: int = 8
    key_heads: int = 8
    size: int = 64
    window: int | None = None
    shared: tuple[int, ...] = ()
    """Number of first tokens that each sequence has in common with the previous one; empty for none."""
    softcap: float | None = None
    has_sinks: bool = False

    def shrink(self, factor: int) -> Case:
        return replace(
            self,
            window=None if self.window is None else max(1, self.window // factor),
            lengths=tuple(max(2, length // factor) for length in self.lengths),
            shared=tuple(count // factor for count in self.shared),
        )

    @property
    def features(self) -> AttentionFeatures:
        """The features that a kernel must support."""
        return AttentionFeatures(
            self.size, self.heads // self.key_heads, self.window is not None, self.softcap is not None, self.has_sinks
        )


CASES = (
    Case("equal heads", (1024, 333, 64, 1024, 16)),
    Case("GQA 4:1", (1024, 333, 64, 1024, 16), heads=16, key_heads=4, size=128),
    Case("GQA, head size 256", (512, 100), heads=4, key_heads=2, size=256),
    Case("window", (1024, 333, 64, 600, 16), heads=8, key_heads=2, window=128),
    Case("shared prompts", (768, 640, 700, 400), heads=8, key_heads=2, shared=(0, 512, 512, 0)),
    Case("shared prompts, window", (768, 640, 700, 400), heads=8, key_heads=2, window=128, shared=(0, 512, 512, 0)),
    Case("softcap, window", (1024, 333, 64), heads=8, key_heads=4, size=256, window=128, softcap=2.0),
    Case("sinks, window", (1024, 333, 64), heads=8, key_heads=1, window=128, has_sinks=True),
)
FLOOR = 1e-5
Results = dict[str, Tensor]


def run(setting: Setting, report: Report) -> None:
    """Compare outputs and gradients of every kernel and case in bfloat16, and on CUDA also in float16."""
    for dtype in (torch.bfloat16,) if setting.toy else (torch.bfloat16, torch.float16):
        for case in CASES:
            if setting.toy:
                compare(case.shrink(16), setting.device, dtype, report)
                continue
            for kernel in usable_kernels(case.features, setting.device, dtype, report, f"{case.name}, {dtype}"):
                with patch.object(ragged_attention_module, "get_flash_kernel", lambda *_, k=kernel, **__: k):
                    compare(case, setting.device, dtype, report, f"{kernel.name}, ")


def usable_kernels(
    features: AttentionFeatures, device: str, dtype: torch.dtype, report: Report, what: str
) -> list[FlashKernel]:
    """Return the kernels that a run may use, the fastest first, and report those that it would reject.

    Args:
        features: What the kernels must support.
        device: The GPU.
        dtype: Dtype of query, key and value.
        report: Receives a row for each rejected kernel.
        what: The use of the kernels, for these rows.
    """
    kernels = []
    for kernel in find_flash_kernels(torch.cuda.get_device_capability(device), features):
        problem = None if kernel.is_verified else find_kernel_problem(kernel, features, torch.device(device), dtype)
        if problem is None:
            kernels.append(kernel)
        else:
            report.note(f"{kernel.name}, {what}", f"not used: {problem}")
    return kernels


def compare(case: Case, device: str, dtype: torch.dtype, report: Report, kernel: str = "") -> None:
    """Report the largest error of each tensor, with a bound from the error of SDPA in the same dtype.

    Args:
        case: The shapes.
        device: Device of the tensors.
        dtype: Dtype of the tensors.
        report: Receives a row for each tensor.
        kernel: Beginning of each row's name.
    """
    inputs = make_inputs(case, device, dtype)
    exact = compute_results(case, [x.float() for x in inputs], packed=False)
    sdpa = compute_results(case, inputs, packed=False)
    packed = compute_results(case, inputs, packed=True)
    for name, expected in exact.items():
        error, sdpa_error = (float((results[name].float() - expected).abs().max()) for results in (packed, sdpa))
        what = f"{kernel}{case.name}, {str(dtype).removeprefix('torch.')}: error of {name}"
        report.at_most(what, error, (2 if name == "output" else 3) * sdpa_error + FLOOR)


def make_inputs(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    """Return query [T, H, D], key [T, K, D], value [T, K, D], the output's gradient [T, H, D] and any sinks [H].

    Shared tokens have equal queries, keys and values.
    """
    generator = torch.Generator().manual_seed(0)
    tokens = sum(case.lengths)
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    tensors = [torch.randn(tokens, count, case.size, generator=generator) for count in heads]
    start = 0
    for length, shared, before in zip(case.lengths, case.shared, (0, *case.lengths), strict=False):
        for tensor in tensors[:3]:
            tensor[start : start + shared] = tensor[start - before : start - before + shared]
        start += length
    if case.has_sinks:
        tensors.append(torch.linspace(-2.0, 3.0, case.heads))
    return [tensor.to(device, dtype) for tensor in tensors]


def compute_results(case: Case, inputs: list[Tensor], *, packed: bool) -> Results:
    """Return the output and the gradients of query, key and value, by name.

    Gradients of shared tokens are summed over their copies.
    """
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in inputs[:3])
    sinks = inputs[4].detach().clone().requires_grad_() if case.has_sinks else None
    options: Any = {"sliding_window": case.window, "softcap": case.softcap, "sinks": sinks}
    offsets = torch.tensor([0, *case.lengths], device=query.device).cumsum(0)
    repeated = torch.tensor(case.shared, device=query.device) if case.shared else None
    if packed and repeated is not None:
        packing = SharedPromptLayout.from_offsets(offsets, repeated)
        q, k, v = (tensor[packing.token_indices] for tensor in (query, key, value))
        output = ragged_attention(q, k, v, packing.segments, **options)[packing.inverse_indices]
    elif packed:
        output = ragged_attention(query, key, value, Segments.from_offsets(offsets), **options)
    else:
        output = sdpa_by_sequence(query, key, value, sinks, case)
    output.backward(inputs[3].to(output.dtype))
    results = {"output": output.detach()}
    for name, tensor in (("query's gradient", query), ("key's gradient", key), ("value's gradient", value)):
        assert tensor.grad is not None
        results[name] = sum_shared_gradients(tensor.grad.float(), offsets, repeated)
    if sinks is not None:
        assert sinks.grad is not None
        results["sinks' gradient"] = sinks.grad.float()
    return results


def sum_shared_gradients(gradient: Tensor, offsets: Tensor, repeated: Tensor | None) -> Tensor:
    """Sum the gradients of a shared token's copies, because the packed layout holds such a token only once."""
    if repeated is None:
        return gradient
    packing = SharedPromptLayout.from_offsets(offsets, repeated)
    return gradient.new_zeros(len(packing.token_indices), *gradient.shape[1:]).index_add_(
        0, packing.inverse_indices, gradient
    )


def sdpa_by_sequence(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, case: Case) -> Tensor:
    outputs = []
    for q, k, v in zip(*(tensor.split(case.lengths) for tensor in (query, key, value)), strict=True):
        length = len(q)
        visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if case.window is not None:
            visible = visible.triu(1 - case.window)
        repeats = case.heads // case.key_heads
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        q, k, v = (x.transpose(0, 1) for x in (q, k, v))
        if case.softcap is None and sinks is None:
            output = scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=visible)[0]
        else:
            output = attend_with_scores(q, k, v, visible, case.softcap, sinks)
        outputs.append(output.transpose(0, 1))
    return torch.cat(outputs)


def attend_with_scores(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Return attention [H, T, D] with a softcap or sinks, which scaled dot product attention does not support."""
    scores = query @ key.transpose(1, 2) * query.shape[-1] ** -0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.view(-1, 1, 1).expand(*scores.shape[:2], 1)], 2)
    return scores.softmax(2)[..., : key.shape[1]] @ value
