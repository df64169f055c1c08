"""Syncs of changed elements: their bytes, exact values, and the errors of deltas that do not fit."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.buckets import num_bytes, plan_buckets
from skyrl_train.weight_sync.changes import sends_changes, wire_spec
from skyrl_train.weight_sync.protocol import AdapterSpec, Bucket, Manifest, TensorSpec
from skyrl_train.weight_sync.receiver import InPlaceWeightStore, WeightReceiver, WeightStore
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train.weight_sync.sync import WeightSync
from tests.support.weight_targets import FakeEngine, LocalTrainer

ROUTES = ("in_process", "ipc", "checkpoint")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(_BITS[tensor.itemsize])


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    return (10 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


class MetaStore(WeightStore):
    """An engine with fused tensors: it loads them only all together, and keeps none in the form of a sync."""

    loads_separately = False

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._layout = {name: tensor.to("meta") for name, tensor in tensors.items()}
        self._arrived: dict[str, Tensor] = {}
        self.fused = torch.zeros(0, dtype=torch.uint8)

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        return self._layout

    def start(self) -> None:
        self._arrived = {}

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self._arrived |= {name: tensor.clone() for name, tensor in tensors}

    def finish(self) -> None:
        assert self._arrived.keys() == self._layout.keys(), "a fused tensor is incomplete"
        self.fused = torch.cat([bits(self._arrived[name]).view(-1).view(torch.uint8) for name in self._layout])

    def loaded_tensor(self, name: str) -> None:
        return None


def make_sender(weights: Mapping[str, Tensor]) -> WeightSender:
    return WeightSender(
        lambda: iter(weights.items()), wire_dtype="bfloat16", bucket_bytes=1000, rank=0, weight_sync_only_changed=True
    )


class Pair:
    """A sender of `weights` and a receiver into `loaded`, or into a store."""

    def __init__(
        self, weights: dict[str, Tensor], route: str = "in_process", folder: str = "", store: WeightStore | None = None
    ):
        self.weights = weights
        self.loaded = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
        self.sender = make_sender(weights)
        self.receiver = WeightReceiver(store or InPlaceWeightStore(lambda: self.loaded), "engine-0")
        self.sender.connect(route, folder, 2, 5.0)
        self.receiver.connect(route, folder, 1, 2, 5.0)

    def begin(self, version: int) -> Manifest:
        manifest = self.sender.prepare_manifest(version)
        self.receiver.begin(manifest)
        return manifest

    def send(self, index: int) -> Bucket:
        bucket = self.sender.send(index)
        assert bucket is not None
        return bucket

    def sync(self, version: int) -> Manifest:
        manifest = self.begin(version)
        for bucket in plan_buckets(manifest):
            self.receiver.receive(self.send(bucket.index))
        self.receiver.commit(version)
        self.sender.mark_delivered(version)
        return manifest

    def assert_exact(self) -> None:
        for name, tensor in self.weights.items():
            sent = tensor.bfloat16() if tensor.is_floating_point() else tensor
            assert torch.equal(bits(self.loaded[name]), bits(sent.to(self.loaded[name].dtype))), name

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()


@pytest.fixture
def pair_of(tmp_path: Path):  # type: ignore[no-untyped-def]
    """Create pairs with `pair_of(weights, route, ...)`, which are closed after the test."""
    pairs: list[Pair] = []

    def make(weights: dict[str, Tensor], route: str = "in_process", **options: Any) -> Pair:
        pairs.append(Pair(weights, route, str(tmp_path), **options))
        return pairs[-1]

    yield make
    for pair in pairs:
        pair.close()


def bfloat16_weights() -> dict[str, Tensor]:
    return {f"layer.{index}": random_tensor((50, 21), torch.bfloat16, index) for index in range(3)}


def change(tensor: Tensor, every: int, start: int = 0) -> None:
    """Flip the lowest bit of every `every`-th element."""
    bits(tensor).view(-1)[start::every] ^= 1


def test_ranks_of_an_engine_share_copies() -> None:
    weights, file = bfloat16_weights(), os.memfd_create("copies")
    stores = [MetaStore(weights) for _ in range(2)]
    receivers = [WeightReceiver(store, "engine", rank=rank, copies_file=file) for rank, store in enumerate(stores)]
    sender = make_sender(weights)
    sender.connect("in_process", "", 3, 5.0)
    for receiver in receivers:
        receiver.connect("in_process", "", 1, 3, 5.0)
    for version in range(1, 5):
        for index, tensor in enumerate(weights.values()):
            change(tensor, every=40, start=version + index)
        manifest = sender.prepare_manifest(version)
        for receiver in receivers:
            receiver.begin(manifest)
        for bucket in plan_buckets(manifest):
            sent = sender.send(bucket.index)
            assert sent is not None
            for receiver in receivers[:: -1 if version % 2 else 1]:  # the second one reads what the first one wrote
                receiver.receive(sent)
        for store, receiver in zip(stores, receivers, strict=True):
            receiver.commit(version)
            assert torch.equal(store.fused, torch.cat([bits(x).view(-1).view(torch.uint8) for x in weights.values()]))
        sender.mark_delivered(version)
        assert (manifest.base_version is None) == (version == 1)
    size = sum(tensor.nbytes for tensor in weights.values())
    assert size <= os.fstat(file).st_size < 1.1 * size
    sender.close()
    os.close(file)


def test_old_copies_are_freed_before_new_ones(pair_of, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = bfloat16_weights()
    pair = pair_of(weights, store=MetaStore(weights))
    pair.sync(1)
    old = [weakref.ref(tensor) for tensor in pair.receiver._copies.values()]
    assert len(old) == len(weights)
    alive: list[Tensor | None] = []
    allocate = pair.receiver._allocate_copies

    def record_and_allocate(manifest: Manifest) -> dict[str, Tensor]:
        alive.extend(reference() for reference in old)
        return allocate(manifest)

    monkeypatch.setattr(pair.receiver, "_allocate_copies", record_and_allocate)
    pair.sender.disconnect()  # so that the next sync is complete
    pair.sender.connect("in_process", "", 2, 5.0)
    assert pair.sync(2).base_version is None
    assert alive == [None] * len(old)


@pytest.mark.parametrize(
    ("numel", "dtype", "changed", "expected"),
    [
        (1000, "bfloat16", None, 2000),
        (1000, "bfloat16", 20, 4 * 20 + 2 * 20 + 8),  # values end with padding
        (1000, "bfloat16", 1000, 2000),
        (1000, "float32", 500, 4000),
        (1000, "float32", 496, 4 * 496 + 4 * 496),
        (2, "float32", 1, 8),
        (2**31, "bfloat16", 4, 32),
        (2**31 + 1, "bfloat16", 4, 48),
    ],
)
def test_smaller_of_tensor_and_changes_is_sent(numel: int, dtype: str, changed: int | None, expected: int):
    spec = TensorSpec("w", (numel,), dtype, changed=changed)
    assert num_bytes(wire_spec(spec)) == expected
    assert sends_changes(spec) == (expected < num_bytes(spec))
    assert sends_changes(replace(spec)) == sends_changes(spec)


@pytest.mark.parametrize("route", ROUTES)
def test_changes_of_every_dtype_are_exact(pair_of, route: str):
    weights = {str(dtype): random_tensor((31, 33), dtype) for dtype in DTYPES}
    weights |= {
        "empty": torch.zeros(0, 4),
        "scalar": torch.tensor(3.0),
        "odd": random_tensor((7,), torch.bfloat16),
        "zeros": torch.zeros(100, dtype=torch.bfloat16),
        "unchanged": random_tensor((40, 5), torch.bfloat16),
        "transposed": random_tensor((60, 50), torch.float32).T,
        "rewritten": random_tensor((30, 30), torch.float32),
    }
    pair = pair_of(weights, route)
    assert pair.sync(1).base_version is None
    pair.assert_exact()
    for version in (2, 3):
        weights["zeros"][50] *= -1  # -0.0 equals 0.0
        weights["rewritten"].neg_()
        weights["scalar"] += 1
        weights["torch.bool"][3].logical_not_()
        weights["transposed"][7, 5:20] *= 2
        for name in ("torch.float32", "torch.bfloat16", "torch.float16", "torch.int64", "torch.uint8", "odd"):
            weights[name].view(-1)[version::40] += 2
        manifest = pair.sync(version)
        pair.assert_exact()
        specs = {spec.name: spec for spec in manifest.tensors}
        assert manifest.base_version == version - 1
        assert specs.keys() == weights.keys() - {"empty", "unchanged"}
        assert {name for name, spec in specs.items() if not sends_changes(spec)} == {"scalar", "rewritten", "odd"}
        assert specs["zeros"].changed == 1


def test_smaller_change_than_wire_dtype_is_not_sent(pair_of):
    pair = pair_of({"w": torch.ones(64)})
    pair.sync(1)
    pair.weights["w"] += 1e-5  # rounds to 1 in bfloat16
    assert pair.sync(2).tensors == ()
    pair.weights["w"][3] += 1
    (spec,) = pair.sync(3).tensors
    assert spec.changed == 1
    pair.assert_exact()


@pytest.mark.parametrize("route", ROUTES)
def test_fused_tensors_are_loaded_completely(pair_of, route: str):
    weights = bfloat16_weights()
    store = MetaStore(weights)
    pair = pair_of(weights, route, store=store)
    for version in range(1, 4):
        manifest = pair.sync(version)
        assert torch.equal(store.fused, torch.cat([w.view(-1).view(torch.uint8) for w in weights.values()]))
        assert list(store._arrived) == list(weights)  # an engine holds tensors until their layer is complete
        assert (version == 1) or (len(manifest.tensors) == 1 and sends_changes(manifest.tensors[0]))
        change(weights["layer.1"], 50, version)


@pytest.mark.parametrize("route", ROUTES)
def test_only_changed_tensors_are_loaded_if_engine_loads_them_separately(pair_of, route: str):
    """The engine's tensors are not in the form of a sync, so changes apply to copies."""

    class SeparateStore(MetaStore):
        loads_separately = True

        def __init__(self, tensors: Mapping[str, Tensor]):
            super().__init__(tensors)
            self.loads: list[str] = []

        def start(self) -> None:
            self.loads.clear()

        def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
            super().load(tensors)
            self.loads.extend(name for name, _ in tensors)

    weights = bfloat16_weights()
    store = SeparateStore(weights)
    pair = pair_of(weights, route, store=store)
    for version, changed in enumerate([list(weights), ["layer.1"], [], ["layer.0", "layer.2"], ["layer.1"]], start=1):
        for name in changed:
            change(weights[name], 50, version)
        pair.sync(version)
        assert torch.equal(store.fused, torch.cat([bits(w).view(-1).view(torch.uint8) for w in weights.values()]))
        assert changed == [] or store.loads == changed


def test_engine_in_another_dtype_keeps_received_bits(pair_of):
    pair = pair_of({"w": random_tensor((500,), torch.bfloat16)})
    pair.loaded = {"w": torch.zeros(500, dtype=torch.float16)}  # rounds small numbers, and has other bits
    for version in range(1, 4):
        pair.sync(version)
        assert torch.equal(pair.loaded["w"], pair.weights["w"].half())
        change(pair.weights["w"], 50, version)


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.fault("F30")
@pytest.mark.parametrize("meta", [False, True], ids=["in place", "from a copy"])
@pytest.mark.parametrize(
    ("byte", "message"),
    [
        (0, "layer.1 changed in transit"),  # lowest byte of the first position
        (3, "changes of layer.1 have positions outside its 1050 elements"),  # its sign
        (100, "layer.1 changed in transit"),  # a value
    ],
)
def test_corrupt_changes_are_not_loaded(pair_of, meta: bool, byte: int, message: str):
    weights = bfloat16_weights()
    pair = pair_of(weights, store=MetaStore(weights) if meta else None)
    pair.sync(1)
    before = {name: tensor.clone() for name, tensor in weights.items()}
    change(weights["layer.1"], 50)
    (planned,) = plan_buckets(pair.begin(2))
    bucket = pair.send(planned.index)
    assert bucket.payload is not None
    assert bucket.payload.numel() < 200
    bucket.payload[byte] ^= 129
    with pytest.raises(WeightSyncError, match=f"engine engine-0: {message}"):
        pair.receiver.receive(bucket)
    assert not pair.receiver.partially_loaded
    if not meta:
        assert all(torch.equal(pair.loaded[name], tensor) for name, tensor in before.items())


@pytest.mark.fault("F30")
def test_changes_of_other_weights_are_rejected(pair_of):
    pair = pair_of(bfloat16_weights())
    pair.sync(1)
    change(pair.loaded["layer.1"], 500)  # something else wrote into the engine's weights
    change(pair.weights["layer.1"], 50, 1)
    (planned,) = plan_buckets(pair.begin(2))
    with pytest.raises(WeightSyncError, match=r"layer\.1 changed in transit"):
        pair.receiver.receive(pair.send(planned.index))
    pair.sender.disconnect()
    assert pair.sync(2).base_version is None
    pair.assert_exact()


def test_changes_without_copy_are_rejected(pair_of):
    weights = bfloat16_weights()
    pair = pair_of(weights)
    pair.sync(1)
    change(weights["layer.1"], 50)
    manifest = pair.sender.prepare_manifest(2)
    other = Pair(weights, store=MetaStore(weights))
    complete = other.sender.prepare_manifest(1)
    other.receiver.begin(replace(complete, precedes_changes=False))
    for bucket in plan_buckets(complete):
        other.receiver.receive(other.send(bucket.index))
    other.receiver.commit(1)
    with pytest.raises(
        WeightSyncError, match=r"only changed elements of layer\.1 are sent, but the engine has no copy"
    ):
        other.receiver.begin(manifest)
    other.close()


def test_interrupted_sync_is_followed_by_complete_one(pair_of):
    pair = pair_of(bfloat16_weights())
    pair.sync(1)
    change(pair.weights["layer.0"], 50)
    pair.begin(2)
    assert pair.sender.prepare_manifest(3).base_version == 1  # nothing was sent
    pair.send(0)
    assert pair.sync(4).base_version is None
    pair.assert_exact()


# -- all routes through WeightSync ------------------------------------------------------------------------------------


@pytest.mark.parametrize("route", [*ROUTES, "broadcast"])
def test_metrics_count_bytes_and_changed_elements(route: str, tmp_path: Path):
    def model(seed: int) -> Any:
        shapes = {"a": (100, 80), "b": (50, 40), "c": (10,)}
        parameters = {
            name: torch.nn.Parameter(random_tensor(shape, torch.bfloat16, seed)) for name, shape in shapes.items()
        }
        return torch.nn.ParameterDict(parameters)

    trainer = LocalTrainer(
        model(1),
        wire_dtype="bfloat16",
        bucket_bytes=10_000,
        weight_sync_only_changed=True,
    )
    engine = FakeEngine(model(2), "engine-0")
    weight_sync = WeightSync(trainer, lambda: [engine], route=route, deadline_s=30, folder=str(tmp_path))

    async def run() -> tuple[dict[str, float], dict[str, float], dict[str, float]]:
        first = await weight_sync.sync_all(1)
        for name in ("a", "b"):
            change(trainer.model.get_parameter(name).data, 50)
        return first, await weight_sync.sync_all(2), await weight_sync.sync_all(3)

    try:
        first, second, unchanged = asyncio.run(run())
    finally:
        trainer.sender.close()
        engine.receiver.close()
    assert (first["weights/bytes"], "weights/changed" in first) == (2 * 10_010, False)
    assert unchanged == {"weights/version": 3, "weights/bytes": 0, "weights/buckets": 0, "weights/changed": 0}
    assert engine.receiver.version == 3
    assert second["weights/changed"] == 200 / 10_010
    assert second["weights/bytes"] == 4 * 160 + 2 * 160 + 4 * 40 + 2 * 40 < 0.07 * first["weights/bytes"]
    for name, tensor in trainer.model.named_parameters():
        assert torch.equal(bits(engine.model.get_parameter(name).data), bits(tensor.data)), name
