from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from skyrl_train.weight_sync import buckets
from skyrl_train.weight_sync.buckets import all_finite, fingerprint, fingerprints, scan_on_device, scan_shards


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fingerprint_adds_up_over_shards_and_sees_every_bit(dtype: torch.dtype):
    tensor = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)).to(dtype)
    top, bottom = tensor.split(3)
    assert (fingerprint(top) + fingerprint(bottom) - fingerprint(tensor)) % 2**64 == 0
    for byte in range(tensor.nbytes):
        for bit in range(8):
            altered = tensor.clone()
            altered.view(-1).view(torch.uint8)[byte] ^= 1 << bit
            assert fingerprint(altered) != fingerprint(tensor)


def on_cpu(elements: torch.Tensor, position: int) -> tuple[int, int]:
    return scan_shards([(elements, position)])[0]


def on_device(elements: torch.Tensor, position: int) -> tuple[int, int]:
    """A part of a tensor as an accelerator inspects it."""
    first, second = scan_on_device(elements, position, True).tolist()
    return first, second


@pytest.mark.parametrize("look", [on_cpu, on_device])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_add_up_wherever_they_are_cut(look, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "CACHE_BYTES", 64)  # several pieces of one part
    tensor = torch.randn(101, generator=torch.Generator().manual_seed(0)).to(dtype)
    for cuts in ((), (1,), (50,), (3, 8, 9, 77), (0, 101)):
        bounds = [0, *cuts, 101]
        parts = [(tensor[a:b], a * tensor.itemsize) for a, b in pairwise(bounds)]
        found = [look(*part) for part in parts]
        assert (sum(total for total, _ in found) - fingerprint(tensor)) % 2**64 == 0
        assert not any(wrong for _, wrong in found)
        for value in (torch.nan, torch.inf, -torch.inf):
            spoilt = tensor.clone()
            spoilt[60] = value
            wrong = [look(spoilt[a:b], a * tensor.itemsize)[1] for a, b in pairwise(bounds)]
            assert wrong == [int(a <= 60 < b) for a, b in pairwise(bounds)]


def test_results_come_in_the_order_of_their_parts_whatever_devices_they_lie_on(monkeypatch: pytest.MonkeyPatch):
    """Stand-ins for tensors on two accelerators, and one that is not."""

    class Elsewhere:
        is_cpu = False

        def __init__(self, number: int):
            self.number, self.device = number, torch.device("cpu")

    def inspect(elements: Elsewhere, position: int, also_finite: bool) -> torch.Tensor:
        return torch.tensor([elements.number, position])

    monkeypatch.setattr(buckets, "scan_on_device", inspect)
    here = torch.ones(3)
    parts = [(Elsewhere(5), 1), (here, 0), (Elsewhere(6), 0), (Elsewhere(7), 1)]
    assert scan_shards(parts) == [(5, 1), (fingerprint(here), 0), (6, 0), (7, 1)]  # type: ignore[arg-type]
    assert scan_shards([]) == []
    assert fingerprints([part for part, _ in parts]) == [5, fingerprint(here), 6, 7]  # type: ignore[misc]


def test_a_fingerprint_is_of_the_values_not_of_where_they_lie():
    for numel in (0, 1, 3, 7, 8, 4097):
        strided = torch.arange(2 * numel, dtype=torch.bfloat16)[::2]
        begins_inside_a_word = torch.cat([torch.zeros(1, dtype=torch.bfloat16), strided])[1:]
        assert fingerprint(strided) == fingerprint(strided.clone()) == fingerprint(begins_inside_a_word)
    assert fingerprint(torch.tensor(2.5)) == fingerprint(torch.tensor([2.5])) != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_non_finite_values_are_told_from_sums_that_overflow(dtype: torch.dtype):
    largest = torch.finfo(dtype).max
    for values in ([], [largest] * 8, [-largest] * 8, [largest, -largest] * 8):
        assert all_finite(torch.tensor(values, dtype=dtype)), values
    for values in ([torch.inf], [-torch.inf], [torch.nan], [torch.inf, -torch.inf], [largest, torch.nan, largest]):
        for place in (0, 7, 4000):
            tensor = torch.ones(5000, dtype=dtype)
            tensor[place : place + len(values)] = torch.tensor(values, dtype=dtype)
            assert not all_finite(tensor), values


def test_sums_wrap_as_int64_does_also_those_of_several_pieces(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(buckets, "CACHE_BYTES", 64)
    largest = torch.full((101,), torch.finfo(torch.float64).max, dtype=torch.float64)
    assert scan_shards([(largest, 0)]) == [(fingerprint(largest), 0)]
    assert abs(fingerprint(largest)) < 2**63 < 101 * int(largest.view(torch.int64)[0])
    assert fingerprints([torch.full((4,), 2**63 - 1)]) == [-4]
