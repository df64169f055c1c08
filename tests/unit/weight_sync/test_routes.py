"""What is particular to single routes: memory of another process, files, and syncs of what changed only."""

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
from skyrl_train.weight_sync.handover import BucketFolder
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

    def sent(self, manifest: Manifest) -> list[Bucket]:
        found = [self.sender.send(bucket.index) for bucket in plan_buckets(manifest)]
        assert None not in found
        return found  # type: ignore[return-value]

    def sync(self, version: int, *, altered: bool = False) -> Manifest:
        manifest = self.sender.prepare_manifest(version, altered)
        self.receiver.begin(manifest)
        for bucket in plan_buckets(manifest):
            offered = self.sender.send(bucket.index)
            assert offered is not None
            self.receiver.receive(offered)
        self.receiver.commit(version)
        self.sender.mark_delivered(version)
        return manifest

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()

    @property
    def same(self) -> bool:
        held = dict(self.engine.named_parameters())
        return all(torch.equal(held[name], tensor) for name, tensor in self.trainer.named_parameters())


@pytest.fixture
def pair_of(tmp_path: Path):  # type: ignore[no-untyped-def]
    """`pair_of(route, ...)`; closed at the end."""
    made: list[Pair] = []

    def make(route: str = "in_process", **options: Any) -> Pair:
        made.append(Pair(route, tmp_path / "weights", **options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


def perturb(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))


@pytest.mark.parametrize("route", ["in_process", "ipc", "checkpoint"])
def test_buckets_that_are_handed_over_arrive_bit_for_bit_sync_after_sync(pair_of, route: str):
    pair = pair_of(route)
    for version in (0, 1, 2):
        perturb(pair.trainer)
        assert not pair.same
        pair.sync(version)
        assert pair.same


@pytest.mark.defect("the-last-parameter-kept-after-a-sync")
@pytest.mark.parametrize("route", ["in_process", "ipc"])
def test_a_sync_that_is_over_holds_no_parameter(route: str):
    alive: list[weakref.ref[torch.Tensor]] = []

    def parameters() -> Iterator[tuple[str, torch.Tensor]]:
        for name in "abc":
            tensor = torch.ones(8)
            alive.append(weakref.ref(tensor))
            yield name, tensor
            del tensor

    sender = WeightSender(parameters, wire_dtype="float32", bucket_bytes=32, rank=0)
    sender.connect(route, "", 2, 5.0)
    for bucket in plan_buckets(sender.prepare_manifest(1)):
        assert sender.send(bucket.index) is not None
    sender.mark_delivered(1)
    assert [one() for one in alive] == [None] * len(alive)
    sender.close()


def test_what_an_earlier_bucket_left_between_tensors_is_not_taken_for_theirs():
    sizes = {"a": 8, "b": 8, "c": 5, "d": 3}  # each a bucket; c and d lie where a and b lay
    sent = {name: torch.full((size,), -1.5) for name, size in sizes.items()}
    held = {name: torch.zeros(size) for name, size in sizes.items()}
    sender = WeightSender(lambda: iter(sent.items()), wire_dtype="float32", bucket_bytes=32, rank=0)
    receiver = WeightReceiver(InPlaceWeightStore(lambda: held), "engine-0")
    sender.connect("ipc", "", 2, 5.0)
    receiver.connect("ipc", "", 1, 2, 5.0)
    manifest = sender.prepare_manifest(1)
    receiver.begin(manifest)
    for bucket in plan_buckets(manifest):
        offered = sender.send(bucket.index)
        assert offered is not None
        receiver.receive(offered)
    receiver.commit(1)
    assert all(torch.equal(held[name], sent[name]) for name in sizes)
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
    for bucket in pair.sent(manifest):
        pair.receiver.receive(bucket)
        assert not pair.receiver.torn
    assert all(torch.equal(before[name], tensor) for name, tensor in pair.engine.named_parameters())
    pair.receiver.commit(2)
    assert pair.same


def test_files_are_gone_when_they_were_delivered(pair_of, tmp_path: Path):
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
    ("spoil", "message"),
    [(_truncate, "did not arrive"), (_flip, "arrived altered"), (Path.unlink, "did not arrive")],
)
@pytest.mark.parametrize("late", [False, True], ids=["when received", "before commit"])
def test_a_file_that_is_torn_altered_or_gone_is_caught_by_the_tensors_name(
    pair_of, spoil: Callable[[Path], None], message: str, late: bool
):
    pair = pair_of("checkpoint")
    manifest = pair.sender.prepare_manifest(1)
    pair.receiver.begin(manifest)
    offered = pair.sent(manifest)
    victim = offered[0]
    assert victim.file is not None
    if not late:
        spoil(Path(victim.file))
        with pytest.raises(WeightSyncError, match=rf"{victim.names[-1]}.*{message}"):
            pair.receiver.receive(victim)
    else:
        for bucket in offered:
            pair.receiver.receive(bucket)
        spoil(Path(victim.file))
        with pytest.raises(WeightSyncError, match=rf"{victim.names[-1]}.*{message}"):
            pair.receiver.commit(1)
    assert not pair.receiver.torn
    assert pair.receiver.version == 0


def test_files_that_a_killed_run_left_of_the_same_version_are_deleted(tmp_path: Path):
    left = tmp_path / "version_1" / "bucket_00007.safetensors"
    left.parent.mkdir()
    left.write_text("of a run that was killed")
    BucketFolder(str(tmp_path)).write(1, 0, [("a", torch.zeros(1))])
    assert [path.name for path in left.parent.iterdir()] == ["bucket_00000.safetensors"]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    pair = Pair("checkpoint", tmp_path / "file")
    pair.sender.prepare_manifest(1)
    with pytest.raises(WeightSyncError, match=r"bucket 0 could not be written to .*file/version_1"):
        pair.sender.send(0)
    pair.close()


# -- only what changed ------------------------------------------------------------------------------------------------


def test_a_sync_of_what_changed_sends_only_that(pair_of):
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
def test_what_changed_is_refused_by_an_engine_with_another_base(pair_of):
    pair = pair_of(weight_sync_only_changed=True)
    pair.sync(1)
    late = WeightReceiver(InPlaceWeightStore(lambda: dict(pair.engine.named_parameters())), "late")
    with torch.no_grad():
        pair.trainer.get_parameter(UP).add_(1)
    manifest = pair.sender.prepare_manifest(2)
    with pytest.raises(WeightSyncError, match=r"late: .* what changed since version 1.*serves version 0.* a complete"):
        late.begin(manifest)
    pair.receiver.torn = True
    with pytest.raises(WeightSyncError, match=r"engine-0: .* this engine is torn: a complete sync is needed"):
        pair.receiver.begin(manifest)


def test_after_a_sync_that_failed_everything_is_sent_again(pair_of):
    pair = pair_of(weight_sync_only_changed=True)
    pair.sync(1)
    pair.sender.disconnect()  # what a publisher does after a failure
    assert pair.sync(2).base_version is None


def test_a_sync_that_nobody_confirmed_is_no_base(pair_of):
    pair = pair_of(weight_sync_only_changed=True)
    pair.sender.prepare_manifest(1)
    assert pair.sender.prepare_manifest(2).base_version is None
    with pytest.raises(WeightSyncError, match="version 1 was not the one that was sent"):
        pair.sender.delivered(1)


# -- self-tests --------------------------------------------------------------------------------------------------------


def test_a_self_test_sends_altered_weights_and_the_same_version_may_follow(pair_of):
    pair = pair_of(weight_sync_only_changed=True)
    assert pair.sync(0, altered=True).rehearsal
    for name, tensor in pair.trainer.named_parameters():
        assert torch.equal(pair.engine.get_parameter(name), PERTURB_FACTOR * tensor), name
    true = pair.sync(0)
    assert true.base_version is None
    assert len(true.tensors) == len(list(pair.trainer.parameters()))
    assert pair.same
    with pytest.raises(WeightSyncError, match="version 0 is stale"):
        pair.receiver.begin(pair.sender.prepare_manifest(0))
