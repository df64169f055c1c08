"""An engine's end: refuses what does not fit before a byte is loaded, proves what arrived and what is held."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.buckets import buffer_bytes, empty_buffer, views
from skyrl_train.weight_sync.transport import BroadcastGroup
from skyrl_train.weight_sync.wire import Bucket, Manifest, TensorSpec, dtype_name, fingerprint

ROUTES = frozenset({"in_process", "broadcast"})


class WeightReceiver:
    """begin(manifest), receive(bucket) for all buckets in order, commit(version).

    Whatever fails before the first tensor is overwritten leaves the old weights serving. From there to `commit` the
    model is a mixture of two versions: `torn` is True, also after a transfer that died, until a complete sync.
    Not thread-safe: one call at a time; `receive` blocks (broadcast: until the bytes came, at most `timeout_s`).
    """

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor]], name: str, device: torch.device | str = "cpu"):
        """`parameters` gives the tensors held by Hugging Face name (tied ones under one or both); written in place."""
        self._parameters = parameters
        self._name = name
        self._device = torch.device(device)
        self._group: BroadcastGroup | None = None
        self._manifest: Manifest | None = None
        self._specs: dict[str, TensorSpec] = {}
        self._held_prints: dict[str, int] = {}
        self._next = 0
        self._synced = False
        self.torn = False
        self.version = 0
        """Of the weights last committed; 0 before: loaded from disk, which a first sync may replace as 0."""

    def connect(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the trainer's group as `rank` (1 to world_size - 1), leaving an earlier one; `in_process` has none."""
        if route not in ROUTES:
            raise WeightSyncError(f"{self._name} has no weight route {route!r}; it has {', '.join(sorted(ROUTES))}.")
        self.close()
        if route == "broadcast":
            self._group = BroadcastGroup(address, rank, world_size, self._device, timeout_s)

    def begin(self, manifest: Manifest) -> None:
        """Check version, finiteness, names, shapes, dtypes. Changes nothing; WeightSyncError names the tensor."""
        self._manifest = None
        if manifest.version < self.version or (self._synced and manifest.version == self.version):
            raise self._error(f"version {manifest.version} is stale: version {self.version} is being served.")
        if manifest.non_finite:
            raise self._error(f"{_some(manifest.non_finite)} holds NaN or infinity; nothing was sent.")
        held = self._parameters()
        specs = {spec.name: spec for spec in manifest.tensors}
        if len(specs) != len(manifest.tensors):
            raise self._error("a tensor is announced twice.")
        if extra := [name for name in specs if name not in held]:
            hint = " (the trainer's model is untied, the engine's tied?)" if "lm_head.weight" in extra else ""
            raise self._error(f"{_some(extra)} was announced, but the engine holds no such tensor{hint}.")
        covered = {_place(held[name]) for name in specs}
        if missing := [name for name, tensor in held.items() if name not in specs and _place(tensor) not in covered]:
            raise self._error(f"{_some(missing)} is held by the engine, but the trainer does not send it.")
        for name, spec in specs.items():
            self._check_fit(spec, held[name])
        self._manifest, self._specs = manifest, specs
        self._held_prints = {}
        self._next = 0

    def receive(self, bucket: Bucket) -> None:
        """Take one bucket, verify the bytes of every tensor in it, then load them. Raises WeightSyncError."""
        manifest = self._begun(f"bucket {bucket.index}")
        if bucket.index != self._next:
            raise self._error(f"bucket {self._next} is missing: bucket {bucket.index} came instead.")
        specs = [self._spec(name) for name in bucket.names]
        tensors = list(views(self._bytes(manifest, bucket, specs), specs))
        for spec, tensor, expected in zip(specs, tensors, bucket.fingerprints, strict=True):
            if fingerprint(tensor) != expected:
                raise self._error(f"{spec.name} arrived altered: its fingerprint is not the trainer's.")
        held = self._parameters()
        self.torn = True
        with torch.no_grad():
            for spec, tensor in zip(specs, tensors, strict=True):
                target = held[spec.name]
                target.copy_(tensor)
                self._held_prints[spec.name] = fingerprint(tensor.to(target.dtype))
        self._next += 1

    def commit(self, version: int) -> None:
        """All that was announced arrived and is held: serve `version`. Raises WeightSyncError naming the tensor."""
        manifest = self._begun(f"commit of version {version}")
        if version != manifest.version:
            raise self._error(f"commit of version {version}, but version {manifest.version} was begun.")
        if lost := [name for name in self._specs if name not in self._held_prints]:
            raise self._error(f"{_some(lost)} never arrived.")
        held = self._parameters()
        for name, expected in self._held_prints.items():
            if fingerprint(held[name]) != expected:
                raise self._error(f"{name} was received but is not what the engine holds.")
        self._manifest = None
        self.version = version
        self.torn = False
        self._synced = True

    def close(self) -> None:
        """Leave the transfer group."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _bytes(self, manifest: Manifest, bucket: Bucket, specs: list[TensorSpec]) -> Tensor:
        size = buffer_bytes(specs)
        if bucket.payload is not None:
            if bucket.payload.numel() != size:
                raise self._error(f"bucket {bucket.index} has {bucket.payload.numel()} bytes instead of {size}.")
            return bucket.payload.to(self._device)
        if self._group is None:
            raise self._error(f"bucket {bucket.index} cannot come: no transfer group is connected.")
        buffer = empty_buffer(specs, self._device)
        try:
            self._group.receive_bucket(manifest.version, bucket.index, buffer)
        except WeightSyncError as error:
            self.close()  # what comes next would be out of step
            raise self._error(f"{_some(bucket.names)} did not arrive: {error}") from error
        return buffer

    def _check_fit(self, spec: TensorSpec, held: Tensor) -> None:
        if spec.shape != tuple(held.shape):
            raise self._error(f"{spec.name} is announced as {list(spec.shape)}, the engine's is {list(held.shape)}.")
        wire = getattr(torch, spec.dtype, None)
        # Between floating-point dtypes values are cast; anything else would change their meaning.
        both_float = isinstance(wire, torch.dtype) and wire.is_floating_point and held.is_floating_point()
        if wire != held.dtype and not both_float:
            raise self._error(f"{spec.name} is announced as {spec.dtype}, the engine's is {dtype_name(held.dtype)}.")

    def _begun(self, what: str) -> Manifest:
        if self._manifest is None:
            raise self._error(f"{what} came without a manifest; begin a sync first.")
        return self._manifest

    def _spec(self, name: str) -> TensorSpec:
        if name not in self._specs:
            raise self._error(f"{name} was sent but not announced.")
        return self._specs[name]

    def _error(self, detail: str) -> WeightSyncError:
        return WeightSyncError(f"engine {self._name}: {detail}")


def _place(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """Equal for tied tensors."""
    return tensor.data_ptr(), tuple(tensor.shape)


def _some(names: tuple[str, ...] | list[str]) -> str:
    """The first names of a list that may be long."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
