"""Behavior of single routes: shared memory, files, and syncs of changed tensors only."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.errors import WeightSyncError
from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.weight_sync.buckets import plan_buckets
from skyrl_train.weight_sync.checkpoint_route import BucketFolder
from skyrl_train.weight_sync.protocol import Bucket, Manifest
from skyrl_train.weight_sync.receiver import InPlaceWeightStore, WeightReceiver
from skyrl_train.weight_sync.sender import PERTURB_FACTOR, WeightSender

SMALL: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32}
UP = "model.layers.1.mlp.up_proj.weight"


class Pair:
    """A trainer's sender, an engine's receiver, and the two models."""

    def __init__(
        self, route: str = "in_process", folder: Path | None = None, *, weight_sync_only_changed: bool = False
    ):
        self.trainer, self.engine = tiny_model(seed=1, **SMALL), tiny_model(seed=2, **SMALL)
        self.sender = WeightSender(
            self.trainer.named_parameters,
            wire_dtype="float32",
            bucket_bytes=20_000,
            rank=0,
            weight_sync_only_changed=weight_sync_only_changed,
        )
        self.receiver = WeightReceiver(InPlaceWeightStore(lambda: dict(self.engine.named_parameters())), "engine-0")
        self.sender.connect(route, str(folder or ""), 2, 5.0)
        self.receiver.connect(route, str(folder or ""), 1, 2, 5.0)

    def send_all(self, manifest: Manifest) -> list[Bucket]:
        buckets = [self.sender.send(bucket.index) for bucket in plan_buckets(manifest)]
        assert None not in buckets
        return buckets  # type: ignore[return-value]

    def sync(self, version: int, *, perturbed: bool = False) -> Manifest:
        manifest = self.sender.prepare_manifest(version, perturbed)
        self.receiver.begin(manifest)
        for bucket in plan_buckets(manifest):
            sent_bucket = self.sender.send(bucket.index)
            assert sent_bucket is not None
            self.receiver.receive(sent_bucket)
        self.receiver.commit(version)
        self.sender.mark_delivered(version)
        return manifest

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    @property
    def same(self) -> bool:
        weights = dict(self.engine.named_parameters())
        return all(torch.equal(weights[name], tensor) for name, tensor in self.trainer.named_parameters())


@pytest.fixture
def pair_of(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Create pairs with `pair_of(route, ...)`, which are closed after the test."""
    pairs: list[Pair] = []

    def make(route: str = "in_process", **options: Any) -> Pair:
        pairs.append(Pair(route, tmp_path / "weights", **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def perturb(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


@pytest.mark.parametrize("route", ["in_process", "ipc", "checkpoint"])
def test_repeated_syncs_arrive_exactly(pair_of, route: str):
    pair = pair_of(route)
    for version in (0, 1, 2):
        perturb(pair.trainer)
        assert not pair.same
        pair.sync(version)
        assert pair.same


@pytest.mark.defect("sync-keeps-last-parameter")
@pytest.mark.parametrize("route", ["in_process", "ipc"])
def test_finished_sync_keeps_no_parameter(route: str):
    references: list[weakref.ref[torch.Tensor]] = []

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            tensor = torch.ones(8)
            references.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    sender = WeightSender(parameters, wire_dtype="float32", bucket_bytes=32, rank=0)
    sender.connect(route, "", 2, 5.0)
    for bucket in plan_buckets(sender.prepare_manifest(1)):
        assert sender.send(bucket.index) is not None
    sender.mark_delivered(1)
    assert [reference() for reference in references] == [None] * len(references)
    sender.close()


def test_padding_of_reused_buffer_is_zeroed():
    sizes = {"a": 8, "b": 8, "c": 5, "d": 3}  # one bucket each; c and d reuse the buffers of a and b
    sent = {name: torch.full((size,), -1.5) for name, size in sizes.items()}
    loaded = {name: torch.zeros(size) for name, size in sizes.items()}
    sender = WeightSender(lambda: iter(sent.items()), wire_dtype="float32", bucket_bytes=32, rank=0)
    receiver = WeightReceiver(InPlaceWeightStore(lambda: loaded), "engine-0")
    sender.connect("ipc", "", 2, 5.0)
    receiver.connect("ipc", "", 1, 2, 5.0)
    manifest = sender.prepare_manifest(1)
    receiver.begin(manifest)
    for bucket in plan_buckets(manifest):
        sent_bucket = sender.send(bucket.index)
        assert sent_bucket is not None
        receiver.receive(sent_bucket)
    receiver.commit(1)
    assert all(torch.equal(loaded[name], sent[name]) for name in sizes)
    sender.close()
    receiver.close()


# -- checkpoint -------------------------------------------------------------------------------------------------------


@pytest.mark.fault("F30")
def test_files_leave_the_old_version_serving_until_commit(pair_of):
    pair = pair_of("checkpoint")
    pair.sync(1)
    before = {name: tensor.clone() for name, tensor in pair.engine.named_parameters()}
    perturb(pair.trainer)
    manifest = pair.sender.prepare_manifest(2)
    pair.receiver.begin(manifest)
    for bucket in pair.send_all(manifest):
        pair.receiver.receive(bucket)
        assert not pair.receiver.partially_loaded
    assert all(torch.equal(before[name], tensor) for name, tensor in pair.engine.named_parameters())
    pair.receiver.commit(2)
    assert pair.same


def test_delivered_files_are_deleted(pair_of, tmp_path: Path):
    pair = pair_of("checkpoint")
    for version in (1, 2):
        pair.sync(version)
        assert list(tmp_path.rglob("*.safetensors")) == []


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-8])


def _flip(file: Path) -> None:
    bits = bytearray(file.read_bytes())
    bits[-1] ^= 1
    file.write_bytes(bits)


@pytest.mark.fault("F30")
@pytest.mark.parametrize(
    ("damage", "message"),
    [(_truncate, "did not arrive"), (_flip, "changed in transit"), (Path.unlink, "did not arrive")],
)
@pytest.mark.parametrize("late", [False, True], ids=["when received", "before commit"])
def test_damaged_file_is_rejected(pair_of, damage: Callable[[Path], None], message: str, late: bool):
    pair = pair_of("checkpoint")
    manifest = pair.sender.prepare_manifest(1)
    pair.receiver.begin(manifest)
    buckets = pair.send_all(manifest)
    damaged = buckets[0]
    assert damaged.file is not None
    if not late:
        damage(Path(damaged.file))
        with pytest.raises(WeightSyncError, match=rf"{damaged.names[-1]}.*{message}"):
            pair.receiver.receive(damaged)
    else:
        for bucket in buckets:
            pair.receiver.receive(bucket)
        damage(Path(damaged.file))
        with pytest.raises(WeightSyncError, match=rf"{damaged.names[-1]}.*{message}"):
            pair.receiver.commit(1)
    assert not pair.receiver.partially_loaded
    assert pair.receiver.version == 0


def test_leftover_files_of_same_version_are_deleted(tmp_path: Path):
    leftover = tmp_path / "version_1" / "bucket_00007.safetensors"
    leftover.parent.mkdir()
    leftover.write_text("from a run that was killed")
    BucketFolder(str(tmp_path)).write(1, 0, [("a", torch.zeros(1))])
    assert [path.name for path in leftover.parent.iterdir()] == ["bucket_00000.safetensors"]


def test_unwritable_folder_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    pair = Pair("checkpoint", tmp_path / "file")
    pair.sender.prepare_manifest(1)
    with pytest.raises(WeightSyncError, match=r"bucket 0 could not be written to .*file/version_1"):
        pair.sender.send(0)
    pair.close()


# -- only what changed ------------------------------------------------------------------------------------------------


def test_incremental_sync_sends_only_changes(pair_of):
    pair = pair_of(weight_sync_only_changed=True)
    everything = pair.sync(1)
    assert everything.base_version is None
    with torch.no_grad():
        pair.trainer.get_parameter(UP)[3, 4] += 1
    part = pair.sync(2)
    assert [spec.name for spec in part.tensors] == [UP]
    assert part.base_version == 1
    assert pair.same
    assert pair.sync(3).tensors == ()
    assert pair.receiver.version == 3


@pytest.mark.fault("F30")
def test_incremental_sync_requires_same_base_version(pair_of):
    pair = pair_of(weight_sync_only_changed=True)
    pair.sync(1)
    late = WeightReceiver(InPlaceWeightStore(lambda: dict(pair.engine.named_parameters())), "late")
    with torch.no_grad():
        pair.trainer.get_parameter(UP).add_(1)
    manifest = pair.sender.prepare_manifest(2)
    with pytest.raises(WeightSyncError, match=r"late: .* what changed since version 1.*serves version 0.* a complete"):
        late.begin(manifest)
    pair.receiver.partially_loaded = True
    with pytest.raises(
        WeightSyncError, match=r"engine-0: .* this engine is partially loaded: a complete sync is needed"
    ):
        pair.receiver.begin(manifest)


def test_failed_sync_is_followed_by_complete_sync(pair_of):
    pair = pair_of(weight_sync_only_changed=True)
    pair.sync(1)
    pair.sender.disconnect()  # as after a failed sync
    assert pair.sync(2).base_version is None


def test_unconfirmed_sync_is_no_base(pair_of):
    pair = pair_of(weight_sync_only_changed=True)
    pair.sender.prepare_manifest(1)
    assert pair.sender.prepare_manifest(2).base_version is None
    with pytest.raises(WeightSyncError, match="version 1 is not the version that was sent last"):
        pair.sender.mark_delivered(1)


# -- self-tests --------------------------------------------------------------------------------------------------------


def test_self_test_is_followed_by_same_version(pair_of):
    pair = pair_of(weight_sync_only_changed=True)
    assert pair.sync(0, perturbed=True).is_self_test
    for name, tensor in pair.trainer.named_parameters():
        assert torch.equal(pair.engine.get_parameter(name), PERTURB_FACTOR * tensor), name
    true = pair.sync(0)
    assert true.base_version is None
    assert len(true.tensors) == len(list(pair.trainer.parameters()))
    assert pair.same
    with pytest.raises(WeightSyncError, match="version 0 is stale"):
        pair.receiver.begin(pair.sender.prepare_manifest(0))
