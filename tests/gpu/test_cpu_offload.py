"""Offloading on an accelerator: what comes back is what left, buffers are pinned, and the bus is used."""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch

from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.strategies.cpu_offload import CpuOffloader
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.padded_reference import ragged_batch

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
ELEMENTS = 1 << 28
"""1 GiB of float32."""


def test_tensors_survive_the_way_while_kernels_still_write_them():
    host, tensors = CpuOffloader(CUDA), {name: torch.zeros(1 << 22, device=CUDA) for name in "abcd"}
    for step in range(1, 21):
        for tensor in tensors.values():
            tensor.add_(1.0)
        away = host.move(tensors, "cpu")
        assert all(bool((tensor == step).all()) for tensor in away.values())
        tensors = host.move(away, CUDA)
        scratch = torch.full((1 << 24,), -1.0, device=CUDA)  # takes whatever memory was freed too early
        del scratch
    assert all(bool((tensor == 20).all()) for tensor in tensors.values())


def test_buffers_are_pinned_as_long_as_they_are_used():
    host = CpuOffloader(CUDA)
    away = host.move({"a": torch.ones(1 << 20, device=CUDA)}, "cpu")["a"]
    assert away.is_pinned()
    del host
    gc.collect()
    assert not away.is_pinned()


def test_many_buffers_of_odd_sizes_are_all_pinned():
    tensors = {name: torch.full((250_000 + 37 * name,), float(name), device=CUDA) for name in range(16)}
    host = CpuOffloader(CUDA)
    away = host.move(tensors, "cpu")
    assert [name for name, tensor in away.items() if not tensor.is_pinned()] == []


def test_offloading_moves_at_the_speed_of_pinned_memory():
    host, tensor = CpuOffloader(CUDA), torch.ones(ELEMENTS, device=CUDA)
    away = host.move({"a": tensor}, "cpu")
    host.move(away, CUDA)
    torch.cuda.synchronize()
    pageable = _seconds(lambda: tensor.to("cpu"))
    pinned = _seconds(lambda: host.move({"a": tensor}, "cpu"))
    print(f"offload GB/s: pageable {tensor.nbytes / pageable / 1e9:.1f}, pinned {tensor.nbytes / pinned / 1e9:.1f}")
    assert pinned < pageable


def _seconds(work: Any) -> float:
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return sorted(times)[2]


def test_a_model_leaves_keeps_its_parameters_for_a_sync_and_trains_on():
    strategies: list[Any] = []
    for _ in range(2):
        strategy = SingleStrategy(optimizer_config=OptimizerConfig(lr=1e-2), fsdp_config=FSDPConfig(), device="cuda")
        strategy.prepare(LogprobModel(tiny_model()), 10)
        strategies.append(strategy)
    moved, stayed = strategies
    _update(moved, 0)
    _update(stayed, 0)
    held = torch.cuda.memory_allocated()
    moved.onload_parameters_only()
    moments = 2 * sum(parameter.nbytes for parameter in moved.scorer.parameters())
    assert held - torch.cuda.memory_allocated() >= moments
    assert {parameter.device.type for parameter in moved.scorer.parameters()} == {"cuda"}
    assert moved.offload() > 0
    assert {parameter.device.type for parameter in moved.scorer.parameters()} == {"cpu"}
    moved.onload()
    assert torch.cuda.memory_allocated() <= held
    assert _update(moved, 1) == pytest.approx(_update(stayed, 1), rel=1e-5)


def _update(strategy: Any, seed: int) -> dict[str, float]:
    batch = ragged_batch([5, 8, 6], seed=seed).to("cuda")
    scores = strategy.module(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    strategy.backward(-scores.logprobs.sum(), is_last_micro_batch=True)
    found: dict[str, float] = strategy.step()
    return found
