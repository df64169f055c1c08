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
def test_buckets_have_all_tensors_in_order(tensors, bucket_bytes):
    buckets = plan_buckets(Manifest(1, tensors, bucket_bytes=bucket_bytes))
    assert [name for bucket in buckets for name in bucket.names] == [spec.name for spec in tensors]
    assert [bucket.index for bucket in buckets] == list(range(len(buckets)))
    by_name = {spec.name: spec for spec in tensors}
    for bucket in buckets:
        size = buffer_bytes([by_name[name] for name in bucket.names])
        assert size <= bucket_bytes or len([n for n in bucket.names if num_bytes(by_name[n])]) == 1


def test_a_bucket_may_be_exactly_full():
    tensors = tuple(TensorSpec(name, (4, 4), "float32") for name in "abcd")
    buckets = plan_buckets(Manifest(1, tensors, bucket_bytes=128))
    assert [bucket.names for bucket in buckets] == [("a", "b"), ("c", "d")]


def test_double_buffer_keeps_previous_bucket():
    buffers = DoubleBuffer()
    first = buffers.take(0, 32, "cpu").fill_(7)
    second = buffers.take(1, 16, "cpu").fill_(9)
    assert first.tolist() == [7] * 32
    third = buffers.take(2, 16, "cpu")
    assert (third.data_ptr(), third.tolist()) == (first.data_ptr(), [7] * 16)
    assert buffers.take(3, 64, "cpu").numel() == 64
    assert second.tolist() == [9] * 16


@given(specs)
def test_mixed_dtypes_round_trip_through_buffer(tensors):
    torch.manual_seed(0)
    values = [(torch.randn(spec.shape) * 50).abs().to(getattr(torch, spec.dtype)) for spec in tensors]
    buffer = zeroed_buffer(tensors, "cpu")
    for view, value in zip(tensor_views(buffer, tensors), values, strict=True):
        view.copy_(value)
    for view, value in zip(tensor_views(buffer.clone(), tensors), values, strict=True):
        assert view.dtype == value.dtype
        assert torch.equal(view, value)
    assert buffer.numel() % ALIGNMENT == 0


@given(specs)
def test_packed_fingerprints_match_tensor_fingerprints(tensors):
    torch.manual_seed(0)
    buffer = torch.randint(0, 256, (buffer_bytes(tensors),), dtype=torch.uint8)
    zero_padding(buffer, tensors)
    assert packed_fingerprints(buffer, tensors) == [
        fingerprint(tensor.clone()) for tensor in tensor_views(buffer, tensors)
    ]
