"""Offloading on an accelerator: tensors return unchanged, buffers are pinned, and copies use the full bus."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.data.device_copy import copy_to_device
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.strategies.cpu_offload import CpuOffloader
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.padded_reference import ragged_batch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ELEMENTS = 1 << 28
"""1 GiB of float32."""


def test_offloading_waits_for_pending_kernels():
    offloader, tensors = CpuOffloader(CUDA), {name: torch.zeros(1 << 22, device=CUDA) for name in "abcd"}
    for step in range(1, 21):
        for tensor in tensors.values():
            tensor.add_(1.0)
        offloaded = offloader.move(tensors, "cpu")
        assert all(bool((tensor == step).all()) for tensor in offloaded.values())
        tensors = offloader.move(offloaded, CUDA)
        scratch = torch.full((1 << 24,), -1.0, device=CUDA)  # would reuse memory that was freed too early
        del scratch
    assert all(bool((tensor == 20).all()) for tensor in tensors.values())


def test_buffers_are_pinned_while_used():
    offloader = CpuOffloader(CUDA)
    offloaded = offloader.move({"a": torch.ones(1 << 20, device=CUDA)}, "cpu")["a"]
    assert offloaded.is_pinned()
    del offloader
    gc.collect()
    assert not offloaded.is_pinned()


def test_buffers_of_odd_sizes_are_pinned():
    tensors = {name: torch.full((250_000 + 37 * name,), float(name), device=CUDA) for name in range(16)}
    offloader = CpuOffloader(CUDA)
    offloaded = offloader.move(tensors, "cpu")
    assert [name for name, tensor in offloaded.items() if not tensor.is_pinned()] == []


def test_offloading_is_faster_than_pageable_copies():
    offloader, tensor = CpuOffloader(CUDA), torch.ones(ELEMENTS, device=CUDA)
    offloaded = offloader.move({"a": tensor}, "cpu")
    offloader.move(offloaded, CUDA)
    torch.cuda.synchronize()
    pageable = _seconds(lambda: tensor.to("cpu"))
    pinned = _seconds(lambda: offloader.move({"a": tensor}, "cpu"))
    print(f"offload GB/s: pageable {tensor.nbytes / pageable / 1e9:.1f}, pinned {tensor.nbytes / pinned / 1e9:.1f}")
    assert pinned < pageable


def _seconds(work: Any) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return sorted(times)[2]


def test_offloaded_model_trains_like_its_twin():
    strategies: list[Any] = []
    for _ in range(2):
        strategy = SingleStrategy(optimizer_config=OptimizerConfig(lr=1e-2), fsdp_config=FSDPConfig(), device="cuda")
        strategy.prepare(LogprobModel(tiny_model()), 10)
        strategies.append(strategy)
    moved, twin = strategies
    _update(moved, 0)
    _update(twin, 0)
    allocated = torch.cuda.memory_allocated()
    moved.onload_parameters_only()
    moments = 2 * sum(parameter.nbytes for parameter in moved.module.parameters())
    assert allocated - torch.cuda.memory_allocated() >= moments
    assert {parameter.device.type for parameter in moved.module.parameters()} == {"cuda"}
    assert moved.offload() > 0
    assert {parameter.device.type for parameter in moved.module.parameters()} == {"cpu"}
    moved.onload()
    assert torch.cuda.memory_allocated() <= allocated
    assert _update(moved, 1) == pytest.approx(_update(twin, 1), rel=1e-5)


def _update(strategy: Any, seed: int) -> dict[str, float]:
    batch = ragged_batch([5, 8, 6], seed=seed)
    scores = strategy.module(copy_to_device(strategy.module.lay_out(batch), "cuda"))
    strategy.backward(-scores.logprobs.sum(), is_last_micro_batch=True)
    metrics: dict[str, float] = strategy.step()
    return metrics
