"""Part 2: attention over packed sequences against plain SDPA in float32, one sequence at a time.

As in FlashAttention's own tests, the bound of a kernel's error is twice that of SDPA in the kernel's own dtype, three
times for gradients, beyond an absolute floor: both are compared with the same computation in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyrl_train.models.ragged_attention import Segments, ragged_attention
from skyrl_train.models.shared_prompts import SharedPromptLayout
from tests.gpu_check.report import Report, Setting


@dataclass(frozen=True)
class Case:
    """Sequences of these lengths; `shared`: how many first tokens each has in common with the one before it."""

    name: str
    lengths: tuple[int, ...]
    heads: int = 8
    key_heads: int = 8
    size: int = 64
    window: int | None = None
    shared: tuple[int, ...] = ()

    def smaller(self, factor: int) -> Case:
        window = None if self.window is None else max(1, self.window // factor)
        lengths = tuple(max(2, length // factor) for length in self.lengths)
        shared = tuple(count // factor for count in self.shared)
        return Case(self.name, lengths, self.heads, self.key_heads, self.size, window, shared)


CASES = (
    Case("equal heads", (1024, 333, 64, 1024, 16)),
    Case("GQA 4:1", (1024, 333, 64, 1024, 16), heads=16, key_heads=4, size=128),
    Case("GQA, head size 256", (512, 100), heads=4, key_heads=2, size=256),
    Case("window", (1024, 333, 64, 600, 16), heads=8, key_heads=2, window=128),
    Case("shared prompts", (768, 640, 700, 400), heads=8, key_heads=2, shared=(0, 512, 512, 0)),
    Case("shared prompts, window", (768, 640, 700, 400), heads=8, key_heads=2, window=128, shared=(0, 512, 512, 0)),
)
FLOOR = 1e-5
Results = dict[str, Tensor]


def run(setting: Setting, report: Report) -> None:
    """Outputs and gradients of every case, in bfloat16 and on CUDA in float16 too."""
    for dtype in (torch.bfloat16,) if setting.toy else (torch.bfloat16, torch.float16):
        for case in CASES:
            compare(case.smaller(16) if setting.toy else case, setting.device, dtype, report)


def compare(case: Case, device: str, dtype: torch.dtype, report: Report) -> None:
    """One row a tensor: the largest error of ours, and how many times SDPA's it is."""
    inputs = inputs_of(case, device, dtype)
    exact = results(case, [x.float() for x in inputs], packed=False)
    plain = results(case, inputs, packed=False)
    ours = results(case, inputs, packed=True)
    for name, wanted in exact.items():
        error, bound = (float((found[name].float() - wanted).abs().max()) for found in (ours, plain))
        what = f"{case.name}, {str(dtype).removeprefix('torch.')}: error of {name}"
        report.at_most(what, error, (2 if name == "output" else 3) * bound + FLOOR)


def inputs_of(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    """query [T, H, D], key and value [T, K, D], and the gradient of the output; shared tokens are equal."""
    generator = torch.Generator().manual_seed(0)
    tokens = sum(case.lengths)
    heads = (case.heads, case.key_heads, case.key_heads, case.heads)
    drawn = [torch.randn(tokens, count, case.size, generator=generator) for count in heads]
    start = 0
    for length, shared, before in zip(case.lengths, case.shared, (0, *case.lengths), strict=False):
        for tensor in drawn[:3]:
            tensor[start : start + shared] = tensor[start - before : start - before + shared]
        start += length
    return [tensor.to(device, dtype) for tensor in drawn]


def results(case: Case, inputs: list[Tensor], *, packed: bool) -> Results:
    """The output and the gradients of query, key and value; those of shared tokens are summed over their copies."""
    query, key, value = (tensor.detach().clone().requires_grad_() for tensor in inputs[:3])
    offsets = torch.tensor([0, *case.lengths], device=query.device).cumsum(0)
    repeated = torch.tensor(case.shared, device=query.device) if case.shared else None
    if packed and repeated is not None:
        packing = SharedPromptLayout.from_offsets(offsets, repeated)
        q, k, v = (tensor[packing.token_indices] for tensor in (query, key, value))
        output = ragged_attention(q, k, v, packing.segments, sliding_window=case.window)[packing.inverse_indices]
    elif packed:
        output = ragged_attention(query, key, value, Segments.from_offsets(offsets), sliding_window=case.window)
    else:
        output = one_by_one(query, key, value, case)
    output.backward(inputs[3].to(output.dtype))
    found = {"output": output.detach()}
    for name, tensor in (("query's gradient", query), ("key's gradient", key), ("value's gradient", value)):
        assert tensor.grad is not None
        found[name] = summed(tensor.grad.float(), offsets, repeated)
    return found


def summed(gradient: Tensor, offsets: Tensor, repeated: Tensor | None) -> Tensor:
    """Gradients of a shared token's copies, summed at its first one: there is one such token for the packed way."""
    if repeated is None:
        return gradient
    packing = SharedPromptLayout.from_offsets(offsets, repeated)
    return gradient.new_zeros(len(packing.token_indices), *gradient.shape[1:]).index_add_(
        0, packing.inverse_indices, gradient
    )


def one_by_one(query: Tensor, key: Tensor, value: Tensor, case: Case) -> Tensor:
    outputs = []
    for q, k, v in zip(*(tensor.split(case.lengths) for tensor in (query, key, value)), strict=True):
        length = len(q)
        visible = torch.ones(length, length, dtype=torch.bool, device=q.device).tril()
        if case.window is not None:
            visible = visible.triu(1 - case.window)
        repeats = case.heads // case.key_heads
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        outputs.append(scaled_dot_product_attention(q, k, v, attn_mask=visible)[0].transpose(0, 1))
    return torch.cat(outputs)
