from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.errors import WeightSyncError
from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.weight_sync.buckets import plan_buckets
from skyrl_train.weight_sync.protocol import Manifest
from skyrl_train.weight_sync.receiver import InPlaceWeightStore, WeightReceiver
from skyrl_train.weight_sync.sender import WeightSender

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32}


def sender_of(model: PreTrainedModel, wire_dtype: str = "float32", bucket_bytes: int = 20_000, rank: int = 0):
    return WeightSender(
        lambda: iter(model.named_parameters()), wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, rank=rank
    )


def receiver_of(model: PreTrainedModel) -> WeightReceiver:
    return WeightReceiver(InPlaceWeightStore(lambda: dict(model.named_parameters())), "engine-0")


def pair(**options) -> tuple[PreTrainedModel, WeightSender, PreTrainedModel, WeightReceiver]:
    """Return a trainer's model and sender, and an engine's model, with other weights, and receiver."""
    trainer, engine = tiny_model(seed=1, **SMALL, **options), tiny_model(seed=2, **SMALL, **options)
    return trainer, sender_of(trainer), engine, receiver_of(engine)


def sync(sender: WeightSender, receiver: WeightReceiver, version: int) -> int:
    manifest = sender.prepare_manifest(version)
    receiver.begin(manifest)
    count = len(plan_buckets(manifest))
    for index in range(count):
        bucket = sender.send(index)
        assert bucket is not None
        receiver.receive(bucket)
    receiver.commit(version)
    return count


def snapshot(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.named_parameters()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.fault("F30")
@pytest.mark.parametrize("tied", [True, False])
def test_sync_copies_weights_exactly(tied):
    trainer, sender, engine, receiver = pair(tied=tied)
    embedding = engine.get_input_embeddings().weight
    assert sync(sender, receiver, 1) > 3
    assert same(snapshot(trainer), snapshot(engine))
    assert (receiver.version, receiver.partially_loaded) == (1, False)
    assert engine.get_input_embeddings().weight is embedding  # loaded in place
    assert (engine.get_output_embeddings().weight is embedding) == tied


@pytest.mark.parametrize(
    ("wire", "engine_dtype"), [("bfloat16", torch.float32), ("float32", torch.bfloat16), ("bfloat16", torch.bfloat16)]
)
def test_values_are_cast_from_wire_to_engine_dtype(wire, engine_dtype):
    trainer = tiny_model(seed=1, **SMALL)
    engine = tiny_model(seed=2, dtype=engine_dtype, **SMALL)
    sync(sender_of(trainer, wire), receiver_of(engine), 1)
    for name, tensor in trainer.named_parameters():
        expected = tensor.detach().to(getattr(torch, wire)).to(engine_dtype)
        assert torch.equal(engine.get_parameter(name), expected), name


@pytest.mark.fault("F30")
def test_tied_weights_may_be_listed_under_both_names():
    trainer, engine = tiny_model(seed=1, **SMALL), tiny_model(seed=2, **SMALL)
    receiver = WeightReceiver(
        InPlaceWeightStore(lambda: dict(engine.named_parameters(remove_duplicate=False))), "engine-0"
    )
    sync(sender_of(trainer), receiver, 1)
    assert same(snapshot(trainer), snapshot(engine))


@pytest.mark.fault("F30")
def test_different_weight_tying_is_rejected():
    sender, receiver = sender_of(tiny_model(tied=False, **SMALL)), receiver_of(tiny_model(tied=True, **SMALL))
    with pytest.raises(WeightSyncError, match=r"lm_head.weight was announced.*tied"):
        receiver.begin(sender.prepare_manifest(1))
    sender, receiver = sender_of(tiny_model(tied=True, **SMALL)), receiver_of(tiny_model(tied=False, **SMALL))
    with pytest.raises(WeightSyncError, match=r"the engine has lm_head.weight, but"):
        receiver.begin(sender.prepare_manifest(1))
    engine = tiny_model(tied=True, **SMALL)
    receiver = WeightReceiver(
        InPlaceWeightStore(lambda: dict(engine.named_parameters(remove_duplicate=False))), "engine-0"
    )
    with pytest.raises(WeightSyncError, match=r"lm_head\.weight are two tensors of the trainer, but the eng"):
        receiver.begin(sender_of(tiny_model(tied=False, **SMALL)).prepare_manifest(1))


def without_norm(manifest: Manifest) -> Manifest:
    return replace(manifest, tensors=tuple(spec for spec in manifest.tensors if spec.name != "model.norm.weight"))


def with_norm(manifest: Manifest, **changes) -> Manifest:
    changed = (replace(spec, **changes) if spec.name == "model.norm.weight" else spec for spec in manifest.tensors)
    return replace(manifest, tensors=tuple(changed))


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without_norm, r"the engine has model\.norm\.weight, but"),
        (lambda m: with_norm(m, name="model.nrom.weight"), r"model\.nrom\.weight was announced, but"),
        (
            lambda m: with_norm(m, shape=(31,)),
            r"model\.norm\.weight is announced with shape \[31\], but the engine's is \[32\]",
        ),
        (
            lambda m: with_norm(m, dtype="int32"),
            r"model\.norm\.weight is announced as int32, but the engine's is float32",
        ),
        (lambda m: with_norm(m, dtype="float31"), r"model\.norm\.weight is announced as float31"),
        (lambda m: replace(m, tensors=(*m.tensors, m.tensors[0])), "announced twice"),
    ],
)
def test_unfitting_manifest_keeps_old_weights(change, message):
    _, sender, engine, receiver = pair()
    before = snapshot(engine)
    with pytest.raises(WeightSyncError, match=message):
        receiver.begin(change(sender.prepare_manifest(1)))
    bucket = sender.send(0)
    assert bucket is not None
    with pytest.raises(WeightSyncError, match="Begin a sync first"):
        receiver.receive(bucket)
    assert same(before, snapshot(engine))
    assert (receiver.partially_loaded, receiver.version) == (False, 0)


@pytest.mark.fault("F30")
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_non_finite_tensor_is_named_and_not_loaded(value):
    trainer, sender, engine, receiver = pair()
    before = snapshot(engine)
    with torch.no_grad():
        trainer.get_parameter("model.layers.1.mlp.up_proj.weight")[3, 4] = value
    with pytest.raises(WeightSyncError, match=r"engine-0: model\.layers\.1\.mlp\.up_proj\.weight contains NaN"):
        receiver.begin(sender.prepare_manifest(1))
    assert same(before, snapshot(engine))
    assert not receiver.partially_loaded


@pytest.mark.fault("F30")
def test_overflow_in_wire_dtype_is_non_finite():
    trainer = tiny_model(**SMALL)
    with torch.no_grad():
        trainer.get_parameter("model.norm.weight")[0] = 1e6
    assert sender_of(trainer, "float16").prepare_manifest(1).non_finite == ("model.norm.weight",)


@pytest.mark.fault("F31")
def test_a_version_that_is_not_newer_is_refused():
    _, sender, _, receiver = pair()
    sync(sender, receiver, 0)  # weights from the disk may be replaced as version 0, once
    sync(sender, receiver, 3)
    for stale in (3, 2, 0):
        with pytest.raises(WeightSyncError, match=f"version {stale} is stale: version 3 is being served"):
            receiver.begin(sender.prepare_manifest(stale))
    assert receiver.version == 3
    sync(sender, receiver, 4)


@pytest.mark.fault("F30")
def test_flipped_bit_rejects_bucket():
    _, sender, engine, receiver = pair()
    before = snapshot(engine)
    receiver.begin(sender.prepare_manifest(1))
    bucket = sender.send(0)
    assert bucket is not None
    assert bucket.payload is not None
    bucket.payload[5] ^= 4
    with pytest.raises(WeightSyncError, match=r"engine-0: model\.embed_tokens\.weight changed in transit"):
        receiver.receive(bucket)
    assert same(before, snapshot(engine))
    assert not receiver.partially_loaded


@pytest.mark.fault("F30")
def test_lost_bucket_leaves_engine_partially_loaded():
    trainer, sender, engine, receiver = pair()
    manifest = sender.prepare_manifest(1)
    receiver.begin(manifest)
    first, _, third = (sender.send(index) for index in range(3))
    assert first is not None
    assert third is not None
    receiver.receive(first)
    with pytest.raises(WeightSyncError, match="bucket 1 is missing"):
        receiver.receive(third)
    lost = plan_buckets(manifest)[1].names[0]
    with pytest.raises(WeightSyncError, match=rf"{lost}.* never arrived"):
        receiver.commit(1)
    assert (receiver.partially_loaded, receiver.version) == (True, 0)
    sync(sender, receiver, 1)
    assert (receiver.partially_loaded, receiver.version) == (False, 1)
    assert same(snapshot(trainer), snapshot(engine))


@pytest.mark.fault("F30")
def test_weights_changed_during_sync_are_noticed():
    trainer, sender, _, receiver = pair()
    receiver.begin(sender.prepare_manifest(1))
    with torch.no_grad():
        trainer.get_parameter("model.embed_tokens.weight")[0, 0] += 1
    bucket = sender.send(0)
    assert bucket is not None
    with pytest.raises(WeightSyncError, match=r"model\.embed_tokens\.weight changed in transit"):
        receiver.receive(bucket)


@pytest.mark.fault("F30")
def test_commit_notices_weights_that_were_not_loaded():
    trainer, engine = tiny_model(seed=1, **SMALL), tiny_model(seed=2, **SMALL)
    sender = sender_of(trainer)
    receiver = WeightReceiver(InPlaceWeightStore(lambda: snapshot(engine)), "engine-0")  # the store loads into copies
    with pytest.raises(
        WeightSyncError, match=r"model\.embed_tokens\.weight was received, but the engine has loaded something else"
    ):
        sync(sender, receiver, 1)
    assert receiver.partially_loaded


def test_a_commit_of_another_version_is_refused():
    _, sender, _, receiver = pair()
    receiver.begin(sender.prepare_manifest(2))
    with pytest.raises(WeightSyncError, match="commit of version 3, but version 2 was begun"):
        receiver.commit(3)


def test_send_requires_manifest_and_order():
    sender = sender_of(tiny_model(**SMALL))
    with pytest.raises(WeightSyncError, match="manifest"):
        sender.send(0)
    sender.prepare_manifest(1)
    with pytest.raises(WeightSyncError, match="bucket 0"):
        sender.send(1)


def test_other_ranks_gather_but_send_nothing():
    model = tiny_model(**SMALL)
    read: list[str] = []

    def parameters():
        for name, tensor in model.named_parameters():
            read.append(name)
            yield name, tensor

    sender = WeightSender(parameters, wire_dtype="float32", bucket_bytes=20_000, rank=1)
    manifest = sender.prepare_manifest(1)
    announced = [spec.name for spec in manifest.tensors]
    assert read == announced
    read.clear()
    assert [sender.send(index) for index in range(len(plan_buckets(manifest)))] == [None] * len(plan_buckets(manifest))
    assert read == announced


def test_an_unknown_route_is_refused():
    with pytest.raises(
        WeightSyncError,
        match=r"engine-0 does not support weight route 'pigeon'. Choose one of: broadcast, checkpoint, in_process",
    ):
        receiver_of(tiny_model(**SMALL)).connect("pigeon", "", 1, 2, 1.0)
