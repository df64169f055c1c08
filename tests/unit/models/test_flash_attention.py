"""Fake kernels that check their arguments as strictly as the real ones, and use scaled dot product attention."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from skyrl_train.models import flash_attention, ragged_attention
from skyrl_train.models.flash_attention import (
    AttentionFeatures,
    FlashKernel,
    VarlenArgs,
    choose_flash_kernel,
    find_kernel_problem,
    get_flash_kernel,
)
from skyrl_train.models.shared_prompts import SharedPromptLayout

HEAD_SIZE = 8
BLACKWELL, HOPPER, AMPERE, TURING = (10, 0), (9, 0), (8, 0), (7, 5)
VARLEN = "torch's variable-length flash attention"


def varlen_attention(
    query: Tensor, key: Tensor, value: Tensor, starts: Tensor, key_starts: Tensor, max_lengths: Any, **options: Any
) -> Tensor:
    """Compute attention segment by segment, with the last query aligned with the last key.

    It rejects arguments that the CUDA kernels reject.
    """
    assert all(x.is_contiguous() and x.ndim == 3 for x in (query, key, value))
    assert starts.dtype == key_starts.dtype == torch.int32 and len(starts) == len(key_starts)
    assert (int(starts[-1]), int(key_starts[-1])) == (len(query), len(key))
    assert max_lengths == (int(starts.diff().max()), int(key_starts.diff().max()))
    left, right = options["window"]
    outputs = []
    for (a, b), (c, d) in zip(starts.unfold(0, 2, 1).tolist(), key_starts.unfold(0, 2, 1).tolist(), strict=True):
        offset = torch.arange(d - c) - (torch.arange(b - a)[:, None] + (d - c) - (b - a))  # > 0: a later key
        visible = torch.ones_like(offset, dtype=torch.bool)
        visible &= (offset <= right) if right >= 0 else True
        visible &= (offset >= -left) if left >= 0 else True
        q, k, v = (x.transpose(0, 1) for x in (query[a:b], key[c:d], value[c:d]))
        outputs.append(
            scaled_dot_product_attention(q, k, v, visible, scale=options["scale"], enable_gqa=True).transpose(0, 1)
        )
    return torch.cat(outputs)


def varlen_of_torch_2_11(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
) -> Tensor:
    assert query.shape[1] == key.shape[1], "torch 2.11 does not support grouped heads"
    return varlen_attention(query, key, value, cu_seq_q, cu_seq_k, (max_q, max_k), scale=scale, window=window_size)


def varlen_of_torch_2_13(
    query: Tensor, key: Tensor, value: Tensor, *args: Any, enable_gqa: bool = False, **rules: Any
) -> Tensor:
    assert enable_gqa == (query.shape[1] != key.shape[1])
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    return varlen_of_torch_2_11(query, key, value, *args, **rules)


def attend_with_checks(
    q: Tensor, k: Tensor, v: Tensor, args: VarlenArgs, sinks: Tensor | None = None, **options: Any
) -> Tensor:
    """Compute attention like FlashAttention-3 and 4, and reject arguments that they reject."""
    starts, key_starts = args.cu_seqlens_q, args.cu_seqlens_k
    assert all(x.is_contiguous() and x.ndim == 3 for x in (q, k, v))
    assert starts.dtype == key_starts.dtype == torch.int32 and len(starts) == len(key_starts)
    assert (int(starts[-1]), int(key_starts[-1])) == (len(q), len(k))
    assert (args.max_seqlen_q, args.max_seqlen_k) == (int(starts.diff().max()), int(key_starts.diff().max()))
    assert options == {"causal": True, "deterministic": torch.are_deterministic_algorithms_enabled()}
    return flash_attention._attend_in_float32(q, k, v, args, sinks)


def flash_attention_3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    **options: Any,
) -> Tensor:
    assert window_size == (-1, -1) or window_size[1] == 0
    args = VarlenArgs(
        cu_seqlens_q,
        cu_seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        window_size[0] + 1 or None,
        softcap or None,
    )
    return attend_with_checks(q, k, v, args, **options)


def flash_attention_3_with_lse(*args: Any, **options: Any) -> tuple[Tensor, None]:
    return flash_attention_3(*args, **options), None


def flash_attention_4(*args: Any, learnable_sink: Tensor | None = None, **options: Any) -> tuple[Tensor, None]:
    assert learnable_sink is None or learnable_sink.dtype == args[0].dtype
    return flash_attention_3(*args, sinks=learnable_sink, **options), None


def without_window(*args: Any, window_size: tuple[int, int], **options: Any) -> Tensor:
    """Ignore the window."""
    return flash_attention_3(*args, **options)


def without_value_gradient(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """Return the right output, whose gradient does not reach the values."""
    return flash_attention_3(q, k, v.detach() + 0.0 * v, **options)


def without_backward(*args: Any, **options: Any) -> Tensor:
    """Return the right output without a backward pass, as builds for inference do."""
    return flash_attention_3(*args, **options).detach()


KERNELS = {
    "2.11": flash_attention.torch_varlen(varlen_of_torch_2_11),
    "2.13": flash_attention.torch_varlen(varlen_of_torch_2_13),
    "fa3": flash_attention.flash_attention("fa3", flash_attention_3),
    "fa3 with lse": flash_attention.flash_attention("fa3", flash_attention_3_with_lse),
    "fa4": flash_attention.flash_attention("fa4", flash_attention_4),
}


@pytest.mark.defect("grouped-heads-on-torch-2-11")
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("repeated", [None, [0, 4, 4, 0]], ids=["sequences", "shared prompts"])
def test_kernels_compute_the_same_attention(
    kernel: FlashKernel,
    heads: int,
    kv_heads: int,
    window: int | None,
    repeated: list[int] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offsets = torch.tensor([0, 6, 11, 15, 18])
    layout = SharedPromptLayout.from_offsets(offsets, None if repeated is None else torch.tensor(repeated))
    generator = torch.Generator().manual_seed(0)
    shape = len(layout.token_indices), HEAD_SIZE
    inputs = [
        torch.randn(count, *shape, generator=generator, dtype=torch.float64).transpose(0, 1).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    weights = torch.randn(shape[0], heads, HEAD_SIZE, generator=generator, dtype=torch.float64)

    def attend() -> tuple[Tensor, tuple[Tensor, ...]]:
        query, key, value = inputs
        options: Any = {"scaling": 0.3, "sliding_window": window}
        output = ragged_attention.ragged_attention(query, key, value, layout.segments, **options)
        return output, torch.autograd.grad((output * weights).sum(), inputs)

    expected = attend()
    monkeypatch.setattr(ragged_attention, "get_flash_kernel", lambda query, value, **features: kernel)
    torch.testing.assert_close(attend(), expected)


@pytest.fixture
def varlen_on_cpus(monkeypatch: pytest.MonkeyPatch) -> FlashKernel:
    """Return torch's kernel for `ragged_attention` on CPUs: its operators get implementations from the paper."""
    from torch.nn.attention import varlen

    varlen._varlen_attn.register_kernel("cpu")(reference_forward)
    varlen._varlen_attn_backward.register_kernel("cpu")(reference_backward)
    kernel = flash_attention.torch_varlen(varlen.varlen_attn)
    monkeypatch.setattr(ragged_attention, "get_flash_kernel", lambda query, value, **features: kernel)
    return kernel


def attention_weights(
    query: Tensor, key: Tensor, lse: Tensor | None, starts: Tensor, key_starts: Tensor, scale: float, left: int
) -> tuple[Tensor, Tensor]:
    """Return exp(scores - lse) [H, T, S], 0 for hidden keys, and the log-sum-exp [H, T] if `lse` is None."""
    query_segment, key_segment = (
        torch.repeat_interleave(torch.arange(len(x) - 1), x.diff()) for x in (starts, key_starts)
    )
    query_offset, key_offset = (
        torch.arange(len(segment)) - x[1:][segment]
        for segment, x in ((query_segment, starts), (key_segment, key_starts))
    )
    distance = query_offset[:, None] - key_offset
    visible = (query_segment[:, None] == key_segment) & (distance >= 0) & ((distance <= left) if left >= 0 else True)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    scores = scores.masked_fill(~visible, -torch.inf)
    lse = scores.logsumexp(-1) if lse is None else lse
    return (scores - lse.unsqueeze(2)).exp(), lse


def reference_forward(
    query: Tensor, key: Tensor, value: Tensor, starts: Any, key_starts: Any, max_query: int, max_key: int, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _, scale, window, *_ = options
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    weights, lse = attention_weights(query, key, None, starts, key_starts, scale, window[0])
    return torch.einsum("hqk,khd->qhd", weights, value), lse, torch.zeros(2, dtype=torch.uint64)


def reference_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, lse: Tensor, *options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the backward pass of Dao et al. (arXiv:2205.14135, B.4) from saved tensors, without another softmax."""
    starts, key_starts, _, _, _, _, scale, window = options
    shape = key.shape
    key, value = (x.repeat_interleave(query.shape[1] // shape[1], 1) for x in (key, value))
    weights, _ = attention_weights(query, key, lse, starts, key_starts, scale, window[0])
    mean = (gradient * output).sum(-1).T.unsqueeze(2)
    score_gradient = weights * (torch.einsum("qhd,khd->hqk", gradient, value) - mean) * scale
    head_gradients = (
        torch.einsum("hqk,qhd->khd", score_gradient, query),
        torch.einsum("hqk,qhd->khd", weights, gradient),
    )
    key_gradient, value_gradient = (x.unflatten(1, (shape[1], -1)).sum(2) for x in head_gradients)
    return torch.einsum("hqk,khd->qhd", score_gradient, key), key_gradient, value_gradient


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize("repeated", [None, [0, 4, 4, 0]], ids=["sequences", "shared prompts"])
def test_sinks_are_exact(
    heads: int, kv_heads: int, window: int | None, repeated: list[int] | None, request: pytest.FixtureRequest
) -> None:
    layout = SharedPromptLayout.from_offsets(
        torch.tensor([0, 6, 11, 15, 18]), None if repeated is None else torch.tensor(repeated)
    )
    generator = torch.Generator().manual_seed(0)
    shape = len(layout.token_indices), HEAD_SIZE
    inputs = [
        torch.randn(count, *shape, generator=generator, dtype=torch.float64).transpose(0, 1).requires_grad_()
        for count in (heads, kv_heads, kv_heads)
    ]
    inputs.append(torch.linspace(-2.0, 3.0, heads, dtype=torch.float64).requires_grad_())
    weights = torch.randn(shape[0], heads, HEAD_SIZE, generator=generator, dtype=torch.float64)

    def attend() -> tuple[Tensor, tuple[Tensor, ...]]:
        query, key, value, sinks = inputs
        options: Any = {"scaling": 0.3, "sliding_window": window, "sinks": sinks}
        output = ragged_attention.ragged_attention(query, key, value, layout.segments, **options)
        return output, torch.autograd.grad((output * weights).sum(), inputs)

    expected = attend()
    request.getfixturevalue("varlen_on_cpus")
    torch.testing.assert_close(attend(), expected)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize(
    ("name", "softcap", "has_sinks"),
    [("fa3", 0.7, False), ("fa4", 0.7, False), ("fa4", None, True), ("fa4", 0.7, True)],
)
def test_kernels_get_softcap_and_sinks(
    name: str, window: int | None, softcap: float | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(18, heads, HEAD_SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, 2, 2)
    ]
    sinks = torch.linspace(-2.0, 3.0, 4).requires_grad_() if has_sinks else None  # another dtype, as under autocast
    weights = torch.randn(18, 4, HEAD_SIZE, generator=generator, dtype=torch.float64)
    segments = ragged_attention.Segments.from_offsets(torch.tensor([0, 6, 11, 15, 18]))

    def attend() -> tuple[Tensor, tuple[Tensor, ...]]:
        options: Any = {"sliding_window": window, "softcap": softcap, "sinks": sinks}
        output = ragged_attention.ragged_attention(inputs[0], inputs[1], inputs[2], segments, **options)
        leaves = inputs if sinks is None else [*inputs, sinks]
        return output, torch.autograd.grad((output * weights).sum(), leaves)

    expected = attend()
    monkeypatch.setattr(ragged_attention, "get_flash_kernel", lambda query, value, **features: KERNELS[name])
    torch.testing.assert_close(attend(), expected)


Install = Callable[[str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Return a function that installs FlashAttention-3 ("fa3") or 4 ("fa4") with this source."""
    monkeypatch.syspath_prepend(tmp_path)
    names = ("flash_attn_interface", "flash_attn", "flash_attn.cute", "flash_attn.cute.interface")
    before = {name: sys.modules.pop(name, None) for name in names}
    flash_attention._load.cache_clear()

    def write(kernel: str, source: str) -> None:
        file = tmp_path / {"fa3": "flash_attn_interface.py", "fa4": "flash_attn/cute/interface.py"}[kernel]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)

    yield write
    flash_attention._load.cache_clear()
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module


def source_of(function: str) -> str:
    return f"from {__name__} import {function} as flash_attn_varlen_func"


def choose(capability: tuple[int, int], head_size: int = 64, **features: bool) -> str | None:
    """Return the name of the kernel that is chosen for tensors on this machine."""
    kernel = choose_flash_kernel(
        capability, AttentionFeatures(head_size, 2, **features), torch.device("cpu"), torch.float32
    )
    return None if kernel is None else kernel.name


FA3, FA4 = "FlashAttention-3", "FlashAttention-4"


@pytest.fixture
def nondeterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable deterministic algorithms, as in learners on accelerators."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)


@pytest.mark.usefixtures("nondeterministic")
@pytest.mark.parametrize(
    ("capability", "head_size", "features", "names"),
    [
        (HOPPER, 128, {}, (FA3, FA4, VARLEN)),
        (HOPPER, 256, {}, (FA3, FA4, VARLEN)),
        (HOPPER, 64, {"window": True}, (FA3, FA4, VARLEN)),
        (HOPPER, 64, {"sinks": True}, (FA4, FA4, VARLEN)),
        (HOPPER, 64, {"softcap": True}, (FA3, FA4, None)),
        (BLACKWELL, 128, {}, (FA4, FA4, VARLEN)),
        (BLACKWELL, 192, {}, (VARLEN, VARLEN, VARLEN)),
        (AMPERE, 128, {}, (VARLEN, VARLEN, VARLEN)),
        ((12, 0), 128, {}, (VARLEN, VARLEN, VARLEN)),
        (TURING, 128, {}, (None, None, None)),
    ],
)
def test_fastest_supported_kernel_is_chosen(
    capability: tuple[int, int],
    head_size: int,
    features: dict[str, bool],
    names: tuple[str | None, ...],
    install: Install,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    install("fa3", source_of("flash_attention_3"))
    install("fa4", source_of("flash_attention_4"))
    for name, installed in zip(names, ("both", "fa4", "neither"), strict=True):
        if installed == "fa4":
            (tmp_path / "flash_attn_interface.py").unlink()
            sys.modules.pop("flash_attn_interface", None)
        if installed == "neither":
            shutil.rmtree(tmp_path / "flash_attn")
            for module in [module for module in sys.modules if module.partition(".")[0] == "flash_attn"]:
                del sys.modules[module]
        importlib.invalidate_caches()
        flash_attention._load.cache_clear()
        assert choose(capability, head_size, **features) == name, installed
        stderr = capfd.readouterr().err
        assert f": {name or 'scaled dot product attention'}" in stderr and "warning" not in stderr


def test_deterministic_fa3_is_limited_by_head_size(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("fa3", source_of("flash_attention_3"))
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert [choose(HOPPER, size) for size in (128, 256)] == [FA3, VARLEN]


@pytest.mark.usefixtures("nondeterministic")
@pytest.mark.parametrize("source", ["import a_part_of_it", "raise OSError('undefined symbol')"])
@pytest.mark.parametrize("kernel", ["fa3", "fa4"])
def test_broken_installation_is_reported(
    kernel: str, source: str, install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install(kernel, source)
    assert choose(HOPPER) == VARLEN
    reason = "a_part_of_it" if "import" in source else "undefined symbol"
    stderr = capfd.readouterr().err
    assert "cannot be loaded" in stderr and reason in stderr


@pytest.mark.usefixtures("nondeterministic")
@pytest.mark.parametrize(
    ("function", "features", "problem"),
    [
        ("without_window", {"window": True}, "output differs"),
        ("without_value_gradient", {}, "gradient of value differs"),
        ("without_backward", {}, "does not require grad"),
        ("flash_attention_4", {}, None),
        ("flash_attention_4", {"window": True, "softcap": True, "sinks": True}, None),
        ("without_window", {}, None),
    ],
)
def test_wrong_kernels_are_not_used(
    function: str,
    features: dict[str, bool],
    problem: str | None,
    install: Install,
    capfd: pytest.CaptureFixture[str],
) -> None:
    install("fa4", source_of(function))
    with torch.no_grad():  # as in the forward pass of a reference model
        name = choose(HOPPER, **features)
    stderr = capfd.readouterr().err
    assert name == (FA4 if problem is None else VARLEN)
    assert stderr.count("warning") == (problem is not None) and (problem or "") in stderr


def test_comparison_is_independent_of_checkpointing() -> None:
    kernel, features = KERNELS["fa4"], AttentionFeatures(64, 2, sinks=True)
    problems: list[str | None] = []

    def layer(rows: Tensor) -> Tensor:
        if not problems:  # the kernel of a layer is chosen in its first forward pass, not when it is recomputed
            problems.append(find_kernel_problem(kernel, features, rows.device, torch.bfloat16))
        return rows.sin()

    rows = torch.ones(3, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        torch.utils.checkpoint.checkpoint(layer, rows, use_reentrant=False).sum().backward()
    assert problems == [None] and rows.grad is not None
    torch.testing.assert_close(rows.grad, torch.ones(3).cos())


class FakeCudaTensor:
    """The attributes of a tensor that are read before a kernel is chosen."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, size: int, dtype: torch.dtype = torch.bfloat16):
        self.shape, self.dtype = (5, 4, size), dtype


def test_kernel_is_chosen_once_for_supported_tensors(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: AMPERE)
    kernel_for: Any = get_flash_kernel
    flash_attention._kernel_of_device.cache_clear()
    try:
        kernels = [kernel_for(FakeCudaTensor(64), FakeCudaTensor(64)) for _ in range(3)]
    finally:
        flash_attention._kernel_of_device.cache_clear()
    assert kernels[0] is not None and all(kernel is kernels[0] for kernel in kernels)
    assert capfd.readouterr().err.count("attention (") == 1
    unsupported = [
        (FakeCudaTensor(64), FakeCudaTensor(32)),
        (FakeCudaTensor(68), FakeCudaTensor(68)),
        (FakeCudaTensor(264), FakeCudaTensor(264)),
    ]
    float32_tensor = FakeCudaTensor(64, torch.float32)
    assert [kernel_for(*pair) for pair in (*unsupported, (float32_tensor, float32_tensor))] == [None] * 4
    assert kernel_for(torch.zeros(5, 4, 64, dtype=torch.bfloat16), torch.zeros(5, 4, 64)) is None
