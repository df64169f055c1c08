from __future__ import annotations

import torch
from hypothesis import given, strategies as st

from skyrl_train.weight_sync.buckets import (
    ALIGNMENT,
    DoubleBuffer,
    buffer_bytes,
    fingerprint,
    num_bytes,
    packed_fingerprints,
    plan_buckets,
    tensor_views,
    zero_padding,
    zeroed_buffer,
)
from skyrl_train.weight_sync.protocol import Manifest, TensorSpec

specs = st.lists(
    st.tuples(st.lists(st.integers(0, 5), max_size=3), st.sampled_from(["float32", "bfloat16", "int64", "uint8"])),
    min_size=1,
    max_size=12,
).map(lambda many: tuple(TensorSpec(f"w{i}", tuple(shape), dtype) for i, (shape, dtype) in enumerate(many)))


@given(specs, st.integers(1, 400))
def test_buckets_hold_every_tensor_once_in_order_within_their_bound(tensors, bucket_bytes):
    cut = plan_buckets(Manifest(1, tensors, bucket_bytes=bucket_bytes))
    assert [name for bucket in cut for name in bucket.names] == [spec.name for spec in tensors]
    assert [bucket.index for bucket in cut] == list(range(len(cut)))
    by_name = {spec.name: spec for spec in tensors}
    for bucket in cut:
        size = buffer_bytes([by_name[name] for name in bucket.names])
        assert size <= bucket_bytes or len([n for n in bucket.names if num_bytes(by_name[n])]) == 1


def test_a_bucket_may_be_exactly_full():
    tensors = tuple(TensorSpec(name, (4, 4), "float32") for name in "abcd")
    cut = plan_buckets(Manifest(1, tensors, bucket_bytes=128))
    assert [bucket.names for bucket in cut] == [("a", "b"), ("c", "d")]


def test_a_bucket_stays_in_its_buffer_while_the_next_one_is_packed():
    alternating = DoubleBuffer()
    first = alternating.take(0, 32, "cpu").fill_(7)
    second = alternating.take(1, 16, "cpu").fill_(9)
    assert first.tolist() == [7] * 32
    third = alternating.take(2, 16, "cpu")
    assert (third.data_ptr(), third.tolist()) == (first.data_ptr(), [7] * 16)
    assert alternating.take(3, 64, "cpu").numel() == 64
    assert second.tolist() == [9] * 16


@given(specs)
def test_tensors_of_mixed_dtypes_come_out_of_the_buffer_as_they_went_in(tensors):
    torch.manual_seed(0)
    values = [(torch.randn(spec.shape) * 50).abs().to(getattr(torch, spec.dtype)) for spec in tensors]
    buffer = zeroed_buffer(tensors, "cpu")
    for place, value in zip(tensor_views(buffer, tensors), values, strict=True):
        place.copy_(value)
    for place, value in zip(tensor_views(buffer.clone(), tensors), values, strict=True):
        assert place.dtype == value.dtype
        assert torch.equal(place, value)
    assert buffer.numel() % ALIGNMENT == 0


@given(specs)
def test_fingerprints_of_a_buffer_are_those_of_its_tensors_whatever_lay_in_the_gaps(tensors):
    torch.manual_seed(0)
    buffer = torch.randint(0, 256, (buffer_bytes(tensors),), dtype=torch.uint8)
    zero_padding(buffer, tensors)
    assert packed_fingerprints(buffer, tensors) == [
        fingerprint(tensor.clone()) for tensor in tensor_views(buffer, tensors)
    ]
