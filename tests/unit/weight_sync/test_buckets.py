from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from skyrl_train.weight_sync import wire
from skyrl_train.weight_sync.buckets import (
    ALIGNMENT,
    buckets,
    buffer_bytes,
    clear_gaps,
    empty_buffer,
    fingerprints,
    num_bytes,
    views,
)
from skyrl_train.weight_sync.wire import Manifest, TensorSpec, all_finite, fingerprint, looks

specs = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["float32", "bfloat16", "int64", "uint8"])),
    min_size=1,
    max_size=12,
).map(lambda many: tuple(TensorSpec(f"w{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(many)))


@given(specs, st.integers(1, 400))
def test_buckets_hold_every_tensor_once_in_order_within_their_bound(tensors, bucket_bytes):
    cut = buckets(Manifest(1, tensors, bucket_bytes=bucket_bytes))
    assert [name for bucket in cut for name in bucket.names] == [spec.name for spec in tensors]
    assert [bucket.index for bucket in cut] == list(range(len(cut)))
    by_name = {spec.name: spec for spec in tensors}
    for bucket in cut:
        size = buffer_bytes([by_name[name] for name in bucket.names])
        assert size <= bucket_bytes or len([n for n in bucket.names if num_bytes(by_name[n])]) == 1


@given(specs)
def test_tensors_of_mixed_dtypes_come_out_of_the_buffer_as_they_went_in(tensors):
    torch.manual_seed(0)
    values = [(torch.randn(spec.shape) * 50).abs().to(getattr(torch, spec.dtype)) for spec in tensors]
    buffer = empty_buffer(tensors, "cpu")
    for place, value in zip(views(buffer, tensors), values, strict=True):
        place.copy_(value)
    for place, value in zip(views(buffer.clone(), tensors), values, strict=True):
        assert place.dtype == value.dtype
        assert torch.equal(place, value)
    assert buffer.numel() % ALIGNMENT == 0


@given(specs)
def test_fingerprints_of_a_buffer_are_those_of_its_tensors_whatever_lay_in_the_gaps(tensors):
    torch.manual_seed(0)
    buffer = torch.randint(0, 256, (buffer_bytes(tensors),), dtype=torch.uint8)
    clear_gaps(buffer, tensors)
    assert fingerprints(buffer, tensors) == [fingerprint(tensor.clone()) for tensor in views(buffer, tensors)]


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


def on_device(elements: torch.Tensor, position: int) -> tuple[int, int]:
    """A part of a tensor as an accelerator looks at it."""
    first, second = wire._look_on_device(elements, position).tolist()
    return first, second


@pytest.mark.parametrize("look", [wire._look, on_device])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_add_up_wherever_they_are_cut(look, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(wire, "_IN_CACHE", 64)  # several looks at one part
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


def test_looks_come_in_the_order_of_their_parts_whatever_devices_they_lie_on(monkeypatch: pytest.MonkeyPatch):
    """Stand-ins for tensors on two accelerators, and one that is not."""

    class Elsewhere:
        is_cpu = False

        def __init__(self, number: int):
            self.number, self.device = number, torch.device("cpu")

    def look(elements: Elsewhere, position: int) -> torch.Tensor:
        return torch.tensor([elements.number, position])

    monkeypatch.setattr(wire, "_look_on_device", look)
    here = torch.ones(3)
    parts = [(Elsewhere(5), 1), (here, 0), (Elsewhere(6), 0), (Elsewhere(7), 1)]
    assert looks(parts) == [(5, 1), (fingerprint(here), 0), (6, 0), (7, 1)]  # type: ignore[arg-type]
    assert looks([]) == []


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
