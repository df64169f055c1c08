from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from skyrl_train.weight_sync import buckets
from skyrl_train.weight_sync.buckets import all_finite, fingerprint, fingerprints, scan_on_device, scan_shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fingerprint_is_additive_and_sees_every_bit(dtype: torch.dtype):
    tensor = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    top, bottom = tensor.split(3)
    assert (fingerprint(top) + fingerprint(bottom) - fingerprint(tensor)) % 2**64 == 0
    for byte in range(tensor.nbytes):
        for bit in range(8):
            changed = tensor.clone()
            changed.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            assert fingerprint(changed) != fingerprint(tensor)


def on_cpu(elements: torch.Tensor, position: int) -> tuple[int, int]:
    return scan_shards([(elements, position)])[0]


def on_device(elements: torch.Tensor, position: int) -> tuple[int, int]:
    """Scan a shard as on an accelerator."""
    first, second = scan_on_device(elements, position, True).tolist()
    return first, second


@pytest.mark.parametrize("scan", [on_cpu, on_device])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shard_fingerprints_add_up_for_any_split(scan, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "CACHE_BYTES", 64)  # several pieces per shard
    tensor = torch.randn(101, generator=torch.Generator().manual_seed(0)).to(dtype)
    for cuts in ((), (1,), (50,), (3, 8, 9, 77), (0, 101)):
        bounds = [0, *cuts, 101]
        parts = [(tensor[a:b], a * tensor.itemsize) for a, b in pairwise(bounds)]
        results = [scan(*part) for part in parts]
        assert (sum(total for total, _ in results) - fingerprint(tensor)) % 2**64 == 0
        assert not any(flags for _, flags in results)
        for value in (torch.nan, torch.inf, -torch.inf):
            changed = tensor.clone()
            changed[60] = value
            flags = [scan(changed[a:b], a * tensor.itemsize)[1] for a, b in pairwise(bounds)]
            assert flags == [int(a <= 60 < b) for a, b in pairwise(bounds)]


def test_scan_keeps_order_across_devices(monkeypatch: pytest.MonkeyPatch):
    """Uses stubs for tensors on accelerators, and one real tensor on the CPU."""

    class DeviceTensor:
        is_cpu = False

        def __init__(self, number: int):
            self.number, self.device = number, torch.device("cpu")

    def inspect(elements: DeviceTensor, position: int, also_finite: bool) -> torch.Tensor:
        return torch.tensor([elements.number, position])

    monkeypatch.setattr(buckets, "scan_on_device", inspect)
    cpu_tensor = torch.ones(3)
    parts = [(DeviceTensor(5), 1), (cpu_tensor, 0), (DeviceTensor(6), 0), (DeviceTensor(7), 1)]
    assert scan_shards(parts) == [(5, 1), (fingerprint(cpu_tensor), 0), (6, 0), (7, 1)]  # type: ignore[arg-type]
    assert scan_shards([]) == []
    assert fingerprints([part for part, _ in parts]) == [5, fingerprint(cpu_tensor), 6, 7]  # type: ignore[misc]


def test_fingerprint_is_independent_of_memory_layout():
    for numel in (0, 1, 3, 7, 8, 4097):
        strided = torch.arange(2 * numel, dtype=torch.bfloat16)[::2]
        begins_inside_a_word = torch.cat([torch.zeros(1, dtype=torch.bfloat16), strided])[1:]
        assert fingerprint(strided) == fingerprint(strided.clone()) == fingerprint(begins_inside_a_word)
    assert fingerprint(torch.tensor(2.5)) == fingerprint(torch.tensor([2.5])) != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_overflowing_sum_is_not_non_finite(dtype: torch.dtype):
    largest = torch.finfo(dtype).max
    for values in ([], [largest] * 8, [-largest] * 8, [largest, -largest] * 8):
        assert all_finite(torch.tensor(values, dtype=dtype)), values
    for values in ([torch.inf], [-torch.inf], [torch.nan], [torch.inf, -torch.inf], [largest, torch.nan, largest]):
        for start in (0, 7, 4000):
            tensor = torch.ones(5000, dtype=dtype)
            tensor[start : start + len(values)] = torch.tensor(values, dtype=dtype)
            assert not all_finite(tensor), values


def test_sums_wrap_like_int64(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "CACHE_BYTES", 64)
    largest = torch.full((101,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert scan_shards([(largest, 0)]) == [(fingerprint(largest), 0)]
    assert abs(fingerprint(largest)) < 2**63 < 101 * int(largest.view(torch.int64)[0])
    assert fingerprints([torch.full((4,), 2**63 - 1)]) == [-4]
