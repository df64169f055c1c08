"""An engine's end of a weight sync: checks the manifest before loading, verifies what arrived and what was loaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.broadcast import BroadcastGroup
from skyrl_train.weight_sync.buckets import (
    DoubleBuffer,
    buffer_bytes,
    fingerprints,
    packed_fingerprints,
    tensor_views,
)
from skyrl_train.weight_sync.handover import MappedBuffers, read_bucket
from skyrl_train.weight_sync.protocol import (
    WEIGHT_ROUTES,
    AdapterSpec,
    Bucket,
    Manifest,
    TensorSpec,
    adapter_names,
    dtype_name,
)


class WeightReceiver:
    """Receives weights: begin(manifest), receive(bucket) for all buckets in order, commit(version).

    A failure before the first tensor is overwritten leaves the old weights serving; with `checkpoint` nothing is
    overwritten before `commit`. From then until the end of `commit` the model is a mixture of two versions: `torn` is
    True and, if the transfer fails, stays so until a complete sync. With `broadcast` a bucket is verified and loaded
    while the next one arrives, so its errors are raised by the next call.
    Not thread-safe: one call at a time. `receive` blocks (broadcast: until the bytes arrive, at most `timeout_s`).
    """

    def __init__(self, store: WeightStore, name: str, device: torch.device | str = "cpu", slot: int = 0, rank: int = 0):
        """`slot`: the engine's placement slot; `ipc` takes the bytes of the trainer rank in the same slot.

        `rank`: the receiver's among those of its engine.
        """
        self._store = store
        self._name = name
        self._device = torch.device(device)
        self._slot = slot
        self._rank = rank
        self._route = "in_process"
        self._group: BroadcastGroup | None = None
        self._buffers = DoubleBuffer()
        self._shared_buffers = MappedBuffers(self._device)
        self._manifest: Manifest | None = None
        self._specs_by_name: dict[str, TensorSpec] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        """The engine's dtypes of the announced tensors."""
        self._pending: tuple[Bucket, Tensor] | None = None
        """The last bucket and its bytes, if it is neither verified nor loaded yet."""
        self._received_fingerprints: dict[str, int] = {}
        """Fingerprints of the loaded tensors, in the engine's dtypes."""
        self._staged: list[Bucket] = []
        """`checkpoint`: verified files, to be loaded by `commit`."""
        self._next = 0
        self._loading = False
        """Whether the store has been started."""
        self._has_trainer_weights = False
        """Whether the weights are the trainer's, and not those of a rehearsal."""
        self._latest_version = -1
        """The last version over this connection: a sync must be newer. A new connection resets it."""
        self.partially_loaded = False
        """Whether the model is a mixture of two versions."""
        self.version = 0
        """The version last committed; 0 for the weights loaded from disk."""

    def connect(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Use `route`; for `broadcast` join the trainer's group. `rank` (1 to world_size - 1): the engine's first."""
        if route not in WEIGHT_ROUTES:
            raise WeightSyncError(
                f"{self._name} has no weight route {route!r}; it has {', '.join(sorted(WEIGHT_ROUTES))}."
            )
        self.close()
        self._route = route
        self._latest_version = -1
        if route == "broadcast":
            self._group = BroadcastGroup(address, rank + self._rank, world_size, self._device, timeout_s)

    def begin(self, manifest: Manifest) -> None:
        """Check version, finiteness, names, shapes and dtypes, without loading anything.

        Raises WeightSyncError naming the tensor.
        """
        self._manifest = None
        if manifest.version <= self._latest_version:
            raise self._error(f"version {manifest.version} is stale: version {self.version} is being served.")
        if manifest.non_finite:
            raise self._error(f"{_shorten(manifest.non_finite)} holds NaN or infinity; nothing was sent.")
        self._check_base(manifest)
        held = self._layout(manifest.adapter)
        specs = {spec.name: spec for spec in manifest.tensors}
        if len(specs) != len(manifest.tensors):
            raise self._error("a tensor is announced twice.")
        if extra := [name for name in specs if name not in held]:
            hint = " (the trainer's model is untied, the engine's tied?)" if "lm_head.weight" in extra else ""
            raise self._error(f"{_shorten(extra)} was announced, but the engine holds no such tensor{hint}.")
        places: dict[tuple[int, tuple[int, ...]], str] = {}
        for name in specs:
            if (other := places.setdefault(_storage_key(held[name]), name)) != name:
                raise self._error(
                    f"{other} and {name} are two tensors of the trainer, but the engine's model ties them: set "
                    "tie_word_embeddings to false in the config.json that it reads."
                )
        missing = [name for name in held if _storage_key(held[name]) not in places]
        if missing and manifest.base_version is None:
            raise self._error(f"{_shorten(missing)} is held by the engine, but the trainer does not send it.")
        for name, spec in specs.items():
            self._check_fit(spec, held[name])
        self._manifest = manifest
        self._specs_by_name = specs
        self._dtypes = {name: held[name].dtype for name in specs}
        self._pending = None
        self._loading = False
        self._received_fingerprints = {}
        self._staged = []
        self._next = 0

    def receive(self, bucket: Bucket) -> None:
        """Take one bucket, verify the bytes of all of its tensors, then load them. Raises WeightSyncError."""
        manifest = self._require_manifest(f"bucket {bucket.index}")
        if bucket.index != self._next:
            raise self._error(f"bucket {self._next} is missing: bucket {bucket.index} came instead.")
        if extra := [name for name in bucket.names if name not in self._specs_by_name]:
            raise self._error(f"{_shorten(extra)} was sent but not announced.")
        if bucket.file is not None:
            self._read(bucket)
            self._staged.append(bucket)
        elif bucket.payload is not None or bucket.handles:
            self._pending = bucket, self._open_buffer(bucket)
            self._load_pending()
            if bucket.handles:
                self._shared_buffers.wait_for_reads()
        else:
            self._pending = bucket, self._broadcast(manifest.version, bucket)
        self._next += 1

    def commit(self, version: int) -> None:
        """Verify that all announced tensors arrived and were loaded, then serve `version`.

        Raises WeightSyncError naming the tensor.
        """
        manifest = self._require_manifest(f"commit of version {version}")
        if version != manifest.version:
            raise self._error(f"commit of version {version}, but version {manifest.version} was begun.")
        self._load_pending()
        came = self._received_fingerprints.keys() | {name for bucket in self._staged for name in bucket.names}
        if lost := [spec.name for spec in manifest.tensors if spec.name not in came]:
            raise self._error(f"{_shorten(lost)} never arrived.")
        for bucket in self._staged:
            self._load(bucket, self._read(bucket))
        if self._loading:
            self._store.finish()
        held = {
            name: tensor
            for name in self._received_fingerprints
            if (tensor := self._store.loaded_tensor(name)) is not None
        }
        for name, found in zip(held, fingerprints(held.values()), strict=True):
            if found != self._received_fingerprints[name]:
                raise self._error(f"{name} was received but is not what the engine holds.")
        self._manifest = None
        self._staged = []
        self._loading = False
        self.version = version
        self.partially_loaded = False
        self._has_trainer_weights = not manifest.rehearsal
        self._latest_version = version - manifest.rehearsal

    def close(self) -> None:
        """Leave the transfer group, and unmap the trainer's memory."""
        group, self._group = self._group, None
        self._buffers = DoubleBuffer()
        self._shared_buffers.close()
        self._pending = None
        if group is not None:
            group.close()

    def _layout(self, adapter: AdapterSpec | None) -> Mapping[str, Tensor]:
        try:
            return self._store.layout(adapter)
        except WeightSyncError as error:
            raise self._error(str(error)) from error

    def _check_base(self, manifest: Manifest) -> None:
        if manifest.base_version is None:
            return
        if self.partially_loaded or not self._has_trainer_weights or manifest.base_version != self.version:
            state = "is torn" if self.partially_loaded else f"serves version {self.version}"
            raise self._error(
                f"version {manifest.version} was announced as what changed since version {manifest.base_version}, "
                f"but this engine {state}: a complete sync is needed."
            )

    def _load_pending(self) -> None:
        """Verify and load the pending bucket."""
        pending, self._pending = self._pending, None
        if pending is not None:
            bucket, buffer = pending
            specs = self._specs(bucket)
            self._verify(bucket, packed_fingerprints(buffer, specs))
            self._load(bucket, list(tensor_views(buffer, specs)))

    def _verify(self, bucket: Bucket, arrived: Sequence[int]) -> None:
        for name, found, expected in zip(bucket.names, arrived, bucket.fingerprints, strict=True):
            if found != expected:
                raise self._error(f"{name} arrived altered: its fingerprint is not the trainer's.")

    def _load(self, bucket: Bucket, tensors: Sequence[Tensor]) -> None:
        if not self._loading:
            self.partially_loaded = self._loading = True
            self._store.start()
        self._store.load(list(zip(bucket.names, tensors, strict=True)))
        self._received_fingerprints |= ((name, self._specs_by_name[name].fingerprint) for name in bucket.names)
        named = zip(bucket.names, tensors, strict=True)
        others = {name: tensor for name, tensor in named if tensor.dtype != self._dtypes[name]}
        cast = (tensor.to(self._dtypes[name]) for name, tensor in others.items())
        self._received_fingerprints |= zip(others, fingerprints(cast), strict=True)

    def _specs(self, bucket: Bucket) -> list[TensorSpec]:
        return [self._specs_by_name[name] for name in bucket.names]

    def _read(self, bucket: Bucket) -> list[Tensor]:
        """Read and verify the tensors of a bucket in a file, on this engine's device."""
        if bucket.file is None:
            raise self._error(f"{_shorten(bucket.names)} did not arrive: the bucket names no file")
        try:
            found = read_bucket(bucket.file, self._device)
        except WeightSyncError as error:
            raise self._error(f"{_shorten(bucket.names)} did not arrive: {error}") from error
        if absent := [name for name in bucket.names if name not in found]:
            raise self._error(f"{_shorten(absent)} is not in {bucket.file}.")
        for spec in self._specs(bucket):
            self._check_fit(spec, found[spec.name])
        tensors = [found[name] for name in bucket.names]
        self._verify(bucket, fingerprints(tensors))
        return tensors

    def _open_buffer(self, bucket: Bucket) -> Tensor:
        """The bytes of a bucket passed in the call or in shared memory, on this engine's device."""
        size = buffer_bytes(self._specs(bucket))
        try:
            if bucket.payload is not None:
                buffer = bucket.payload
            else:
                colocated = [handle for handle in bucket.handles if handle.slot == self._slot]
                buffer = self._shared_buffers.open((colocated or bucket.handles)[0])
            if buffer.numel() != size:
                raise WeightSyncError(f"bucket {bucket.index} has {buffer.numel()} bytes instead of {size}")
            return buffer.to(self._device)
        except WeightSyncError as error:
            raise self._error(f"{_shorten(bucket.names)} did not arrive: {error}") from error

    def _broadcast(self, version: int, bucket: Bucket) -> Tensor:
        """Receive a bucket's bytes from the group; meanwhile verify and load the pending bucket."""
        group = self._group
        failures: list[Exception] = []

        def settle() -> None:
            try:
                self._load_pending()
            except Exception as error:  # it concerns the pending bucket, so this transfer must not be interrupted
                failures.append(error)

        buffer = self._buffers.take(bucket.index, buffer_bytes(self._specs(bucket)), self._device)
        try:
            if group is None:
                raise WeightSyncError("no transfer group is connected")
            group.receive_bucket(version, bucket.index, buffer, settle)
        except WeightSyncError as error:
            if self._group is group:
                self.close()  # later transfers would be out of sync
            raise self._error(f"{_shorten(bucket.names)} did not arrive: {error}") from error
        if failures:
            raise failures[0]
        return buffer

    def _check_fit(self, spec: TensorSpec, held: Tensor) -> None:
        if spec.shape != tuple(held.shape):
            raise self._error(f"{spec.name} is announced as {list(spec.shape)}, the engine's is {list(held.shape)}.")
        wire = getattr(torch, spec.dtype, None)
        # Floating-point values are cast to the engine's dtype; any other cast would change their meaning.
        both_float = isinstance(wire, torch.dtype) and wire.is_floating_point and held.is_floating_point()
        if wire != held.dtype and not both_float:
            raise self._error(f"{spec.name} is announced as {spec.dtype}, the engine's is {dtype_name(held.dtype)}.")

    def _require_manifest(self, what: str) -> Manifest:
        if self._manifest is None:
            raise self._error(f"{what} came without a manifest; begin a sync first.")
        return self._manifest

    def _error(self, detail: str) -> WeightSyncError:
        return WeightSyncError(f"engine {self._name}: {detail}")


def _storage_key(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """A key that is equal for tied tensors."""
    return (id(tensor) if tensor.is_meta else tensor.data_ptr()), tuple(tensor.shape)


def _shorten(names: tuple[str, ...] | list[str]) -> str:
    """The first names of a possibly long list."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# -- the storage of an engine's weights


class WeightStore(Protocol):
    """Loads full Hugging Face tensors into an engine, which may fuse, split and repack them.

    A sync is start(), load() for every bucket, finish(); in between the engine has a mixture of two versions.
    """

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        """Hugging Face name -> tensor, the engine's own or one on the meta device; tied ones under one or both names.

        It includes the tensors of the sync's `adapter`, which is served once `finish` returns; None: from then on no
        adapter is served. Raises WeightSyncError for an adapter that cannot be served, e.g. by `refuse_adapter`.
        """

    def start(self) -> None:
        """Prepare to load, even if an earlier sync was not finished."""

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load full tensors, on the receiver's device and in the wire dtype; their memory is reused after the call."""

    def finish(self) -> None:
        """All tensors of the sync were loaded: use them."""

    def loaded_tensor(self, name: str) -> Tensor | None:
        """The loaded tensor of this name, no copy of it; None if the engine does not keep it as such."""


class InPlaceWeightStore:
    """A WeightStore for a plain model: overwrites the tensors of the same names."""

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor]]):
        self._parameters = parameters
        self._tensors: Mapping[str, Tensor] = {}

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        reject_adapter(adapter)
        return self._parameters()

    def start(self) -> None:
        self._tensors = self._parameters()

    @torch.no_grad()
    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        torch._foreach_copy_([self._tensors[name] for name, _ in tensors], [tensor for _, tensor in tensors])

    def finish(self) -> None:
        self._tensors = self._parameters()  # read again: the model must still use the tensors that were loaded into

    def loaded_tensor(self, name: str) -> Tensor | None:
        return self._tensors[name]


def reject_adapter(adapter: AdapterSpec | None) -> None:
    """Raises WeightSyncError if there is an adapter."""
    if adapter is not None:
        raise WeightSyncError(
            "this engine takes no adapter apart from its model; set trainer.policy.model.lora.sync=merged."
        )


def adapter_layout(adapter: AdapterSpec, linears: Mapping[str, nn.Linear]) -> dict[str, Tensor]:
    """Name -> A and B of every layer on the meta device, in the layer's dtype. Raises WeightSyncError."""
    layout = {}
    for layer in adapter.layers:
        if layer not in linears:
            raise WeightSyncError(f"the adapter changes {layer}, which is no linear layer of the engine's model.")
        linear = linears[layer]
        shapes = ((adapter.rank, linear.in_features), (linear.out_features, adapter.rank))
        for name, shape in zip(adapter_names(layer), shapes, strict=True):
            layout[name] = torch.empty(shape, dtype=linear.weight.dtype, device="meta")
    return layout
