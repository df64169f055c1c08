"""An engine's end of a weight sync: checks the manifest, verifies the buckets that arrive, and the tensors that it
loads.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor, nn

from skyrl_train.data.host_memory import empty_host_tensor
from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.broadcast import BroadcastGroup
from skyrl_train.weight_sync.buckets import (
    DoubleBuffer,
    buffer_bytes,
    fingerprints,
    packed_fingerprints,
    plan_buckets,
    tensor_views,
)
from skyrl_train.weight_sync.changes import apply_changes, sends_changes, wire_spec
from skyrl_train.weight_sync.checkpoint_route import read_bucket
from skyrl_train.weight_sync.ipc import MappedBuffers
from skyrl_train.weight_sync.protocol import (
    WEIGHT_ROUTES,
    AdapterSpec,
    Bucket,
    Manifest,
    TensorSpec,
    WeightRoute,
    adapter_names,
    dtype_name,
)


class WeightReceiver:
    """Receiver of weight syncs: begin(manifest), receive(bucket) for all buckets in order, commit(version).

    After a failure before the first tensor is overwritten, the engine still serves the old weights. With the route
    `checkpoint` nothing is overwritten before `commit`. From then until the end of `commit` the model is a mixture of
    two versions: `partially_loaded` is True and, if the transfer fails, stays True until a complete sync. With
    `broadcast` a bucket is verified and loaded while the next one arrives, so its errors are raised by the next call.

    If only changed elements of a tensor are sent, it is reconstructed from the engine's own tensor. If that is not in
    the form in which tensors are sent, from a copy in host memory of what was received last. The ranks of an engine
    that are on one node share the copy, and each of them writes it: they write the same bytes, and the result of
    changes is the same if another rank has already applied them.

    Not thread-safe: one call at a time. `receive` blocks (`broadcast`: until the bytes arrive, at most `timeout_s`).
    """

    def __init__(
        self,
        store: WeightStore,
        name: str,
        device: torch.device | str = "cpu",
        slot: int = 0,
        rank: int = 0,
        copies_file: int | None = None,
    ):
        """Create a receiver that is not connected.

        Args:
            store: Storage of the engine's weights.
            name: Name of the engine in errors.
            device: Device on which tensors are received.
            slot: Placement slot of the engine. `ipc` reads the memory of the trainer rank in the same slot.
            rank: Rank of this receiver among those of its engine.
            copies_file: Descriptor of a file in memory for copies of tensors, which the ranks of the engine on this
                node share. None: this rank has its own copies.
        """
        self._store = store
        self._name = name
        self._device = torch.device(device)
        self._slot = slot
        self._rank = rank
        self._copies_file = copies_file

        self._group: BroadcastGroup | None = None
        self._buffers = DoubleBuffer()
        self._shared_buffers = MappedBuffers(self._device)
        self._manifest: Manifest | None = None
        self._specs_by_name: dict[str, TensorSpec] = {}
        self._dtypes: dict[str, torch.dtype] = {}
        """Dtypes of the announced tensors in the engine."""
        self._bases: dict[str, Tensor] = {}
        """The engine's own tensors that are in the form in which they are sent. Empty between syncs, because the engine
        may free them.
        """
        self._copies: dict[str, Tensor] = {}
        """Copies in host memory of the tensors received last, without those of `_bases`. Empty if the trainer never
        sends only changed elements.
        """
        self._copy_memory: dict[str, Tensor] = {}
        """Memory for `_copies`, before the tensors of a complete sync are stored in it."""
        self._order: dict[str, int] = {}
        """Position of each of `_copies` in a complete sync."""
        self._unchanged: deque[str] = deque()
        """The tensors of `_copies` that this sync does not send, and that the engine still has to load."""
        self._pending: tuple[Bucket, Tensor] | None = None
        """Last bucket and its bytes, if it is neither verified nor loaded yet."""
        self._received_fingerprints: dict[str, int] = {}
        """Fingerprints of the loaded tensors, in the engine's dtypes."""
        self._staged: list[Bucket] = []
        """Route `checkpoint`: buckets whose files are verified, to be loaded by `commit`."""
        self._next = 0
        self._loading = False
        """True if the store has been started in this sync."""
        self._has_trainer_weights = False
        """True if the weights are the trainer's true weights, and not those of the disk or a self-test."""
        self._latest_version = -1
        """Last version over this connection. A sync must be newer. A new connection resets it."""
        self.partially_loaded = False
        """True if the model is a mixture of two versions."""
        self.version = 0
        """Last committed version; 0 for the weights loaded from disk."""

    def connect(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Close the previous connection and use a route. For `broadcast`, block until all ranks have joined the
        trainer's group.

        Args:
            route: Name of the route, from `WeightRoute`.
            address: Address of the group ("host:port"), for `broadcast`.
            rank: Rank of the engine's first receiver in the group, from 1 to world_size - 1.
            world_size: Number of ranks of the group.
            timeout_s: Seconds for joining, and for each later transfer.

        Raises:
            WeightSyncError: The route is unknown, or not all ranks joined in time.
        """
        if route not in WEIGHT_ROUTES:
            raise WeightSyncError(
                f"{self._name} does not support weight route {route!r}. "
                f"Choose one of: {', '.join(sorted(WEIGHT_ROUTES))}."
            )
        self.close()
        self._latest_version = -1
        if route == WeightRoute.BROADCAST:
            self._group = BroadcastGroup(address, rank + self._rank, world_size, self._device, timeout_s)

    def begin(self, manifest: Manifest) -> None:
        """Begin a sync: check version, finiteness, names, shapes and dtypes, without loading anything.

        Raises:
            WeightSyncError: The sync cannot be served. The message names the tensor.
        """
        self._manifest = None
        if manifest.version <= self._latest_version:
            raise self._error(f"version {manifest.version} is stale: version {self.version} is being served.")
        if manifest.non_finite:
            raise self._error(f"{_shorten(manifest.non_finite)} contains NaN or infinity, so nothing was sent.")
        self._check_base(manifest)
        layout = self._layout(manifest.adapter)
        specs = {spec.name: spec for spec in manifest.tensors}
        if len(specs) != len(manifest.tensors):
            raise self._error("a tensor is announced twice.")
        if extra := [name for name in specs if name not in layout]:
            hint = " (is the trainer's model untied and the engine's tied?)" if "lm_head.weight" in extra else ""
            raise self._error(f"{_shorten(extra)} was announced, but the engine has no such tensor{hint}.")
        name_by_storage: dict[tuple[int, tuple[int, ...]], str] = {}
        for name in specs:
            if (other := name_by_storage.setdefault(_storage_key(layout[name]), name)) != name:
                raise self._error(
                    f"{other} and {name} are two tensors of the trainer, but the engine's model ties them. Set "
                    "tie_word_embeddings to false in the config.json that the engine reads."
                )
        missing = [name for name in layout if _storage_key(layout[name]) not in name_by_storage]
        if missing and manifest.base_version is None:
            raise self._error(f"the engine has {_shorten(missing)}, but the trainer does not send it.")
        for name, spec in specs.items():
            self._check_fit(spec, layout[name])
        self._specs_by_name = specs
        self._dtypes = {name: layout[name].dtype for name in specs}
        self._bases = {
            name: layout[name]
            for name, spec in specs.items()
            if not layout[name].is_meta and dtype_name(layout[name].dtype) == spec.dtype
        }
        if manifest.base_version is None:
            self._copies, self._copy_memory = {}, {}  # otherwise both the old and the new memory would exist
            self._copy_memory = self._allocate_copies(manifest)
        if lost := [name for name, spec in specs.items() if sends_changes(spec) and self._base(name) is None]:
            raise self._error(f"only changed elements of {_shorten(lost)} are sent, but the engine has no copy of it.")
        self._order = {name: index for index, name in enumerate(self._copies)}
        unchanged = () if self._store.loads_separately else (name for name in self._copies if name not in specs)
        self._unchanged = deque(unchanged)
        self._pending = None
        self._loading = False
        self._received_fingerprints = {}
        self._staged = []
        self._next = 0
        self._manifest = manifest

    def receive(self, bucket: Bucket) -> None:
        """Take the next bucket, verify the bytes of its tensors, then load them.

        Over the route `broadcast`, this verifies and loads the previous bucket while the bytes arrive, and `commit`
        loads the last one. Over the route `checkpoint`, this only verifies, and `commit` loads all buckets.

        Raises:
            WeightSyncError: The bucket is not the next one, was not announced, or its bytes did not arrive intact.
        """
        manifest = self._require_manifest(f"bucket {bucket.index}")
        if bucket.index != self._next:
            raise self._error(f"bucket {self._next} is missing: bucket {bucket.index} was sent instead.")
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

        Raises:
            WeightSyncError: Another version was begun, or a tensor is missing or differs. The message names it.
        """
        manifest = self._require_manifest(f"commit of version {version}")
        if version != manifest.version:
            raise self._error(f"commit of version {version}, but version {manifest.version} was begun.")
        self._load_pending()
        arrived = self._received_fingerprints.keys() | {name for bucket in self._staged for name in bucket.names}
        if missing := [spec.name for spec in manifest.tensors if spec.name not in arrived]:
            raise self._error(f"{_shorten(missing)} never arrived.")
        for bucket in self._staged:
            self._load(bucket, self._read(bucket))
        if self._loading:
            self._load_unchanged()
            self._store.finish()
        loaded = {
            name: tensor
            for name in self._received_fingerprints
            if (tensor := self._store.loaded_tensor(name)) is not None
        }
        for name, fingerprint in zip(loaded, fingerprints(loaded.values()), strict=True):
            if fingerprint != self._received_fingerprints[name]:
                raise self._error(f"{name} was received, but the engine has loaded something else.")
        self._manifest = None
        self._bases = {}
        self._staged = []
        self._loading = False
        self.version = version
        self.partially_loaded = False
        self._has_trainer_weights = not manifest.is_self_test
        self._latest_version = version - manifest.is_self_test

    def close(self) -> None:
        """Leave the transfer group, and unmap the trainer's memory."""
        group, self._group = self._group, None
        self._buffers = DoubleBuffer()
        self._shared_buffers.close()
        self._bases = {}
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
            state = "is partially loaded" if self.partially_loaded else f"serves version {self.version}"
            raise self._error(
                f"version {manifest.version} only has what changed since version {manifest.base_version}, "
                f"but this engine {state}: a complete sync is needed."
            )

    def _load_pending(self) -> None:
        """Verify and load the pending bucket, if there is one."""
        pending, self._pending = self._pending, None
        if pending is not None:
            bucket, buffer = pending
            specs = self._specs(bucket)
            arrived = list(tensor_views(buffer, [wire_spec(spec) for spec in specs]))
            tensors = self._reconstruct(bucket, arrived)
            if any(map(sends_changes, specs)):
                self._verify(bucket, fingerprints(tensors))
            else:
                self._verify(bucket, packed_fingerprints(buffer, specs))
            self._load(bucket, tensors)

    def _reconstruct(self, bucket: Bucket, arrived: Sequence[Tensor]) -> list[Tensor]:
        """Return the tensors of a bucket in full from what arrived."""
        try:
            return [
                apply_changes(spec, sent, base)
                if sends_changes(spec) and (base := self._base(spec.name)) is not None
                else sent
                for spec, sent in zip(self._specs(bucket), arrived, strict=True)
            ]
        except WeightSyncError as error:
            raise self._error(str(error)) from error

    def _verify(self, bucket: Bucket, arrived: Sequence[int]) -> None:
        for name, actual, expected in zip(bucket.names, arrived, bucket.fingerprints, strict=True):
            if actual != expected:
                raise self._error(f"{name} changed in transit: its fingerprint is not the trainer's.")

    def _load(self, bucket: Bucket, tensors: Sequence[Tensor]) -> None:
        if not self._loading:
            self.partially_loaded = self._loading = True
            self._store.start()
        self._load_unchanged(until=bucket.names[0])
        self._store.load(list(zip(bucket.names, tensors, strict=True)))
        self._keep_copies(bucket, tensors)
        self._received_fingerprints |= ((name, self._specs_by_name[name].fingerprint) for name in bucket.names)
        named = zip(bucket.names, tensors, strict=True)
        others = {name: tensor for name, tensor in named if tensor.dtype != self._dtypes[name]}
        cast = (tensor.to(self._dtypes[name]) for name, tensor in others.items())
        self._received_fingerprints |= zip(others, fingerprints(cast), strict=True)

    def _allocate_copies(self, manifest: Manifest) -> dict[str, Tensor]:
        """Return host memory for the tensors of a complete sync that later syncs need and the engine does not keep.

        On GPUs it is pinned: changes and unchanged tensors of each sync are read from it.
        """
        specs = [spec for spec in manifest.tensors if spec.name not in self._bases] if manifest.precedes_changes else []
        size = buffer_bytes(specs)
        if self._copies_file is not None:
            # Other ranks may have mapped the file, so it never becomes smaller.
            os.ftruncate(self._copies_file, max(size, os.fstat(self._copies_file).st_size))
        memory = empty_host_tensor((size,), torch.uint8, self._device, self._copies_file)
        return dict(zip((spec.name for spec in specs), tensor_views(memory, specs), strict=True))

    def _keep_copies(self, bucket: Bucket, tensors: Sequence[Tensor]) -> None:
        manifest = self._manifest
        if manifest is None or not manifest.precedes_changes:
            return
        for name, tensor in zip(bucket.names, tensors, strict=True):
            if name in self._copy_memory:
                self._copies[name] = self._copy_memory[name].copy_(tensor)

    def _load_unchanged(self, until: str | None = None) -> None:
        """Load the copies of tensors that were not sent, up to `until` in the order of a complete sync.

        Engines that fuse tensors load them only together, and hold the tensors of a layer until it is complete.
        """
        assert self._manifest is not None
        end = len(self._order) if until is None else self._order.get(until, 0)
        specs = []
        while self._unchanged and self._order[self._unchanged[0]] < end:
            copy = self._copies[name := self._unchanged.popleft()]
            specs.append(TensorSpec(name, tuple(copy.shape), dtype_name(copy.dtype)))
        for bucket in plan_buckets(replace(self._manifest, tensors=tuple(specs))):
            self._store.load([(name, self._copies[name].to(self._device)) for name in bucket.names])

    def _specs(self, bucket: Bucket) -> list[TensorSpec]:
        return [self._specs_by_name[name] for name in bucket.names]

    def _base(self, name: str) -> Tensor | None:
        """Return the tensor before this sync, or None if the engine has none in the form in which it is sent."""
        own = self._bases.get(name)
        return self._copies.get(name) if own is None else own

    def _buffer_bytes(self, bucket: Bucket) -> int:
        return buffer_bytes([wire_spec(spec) for spec in self._specs(bucket)])

    def _read(self, bucket: Bucket) -> list[Tensor]:
        """Read and verify the tensors of a bucket's file, on this engine's device."""
        if bucket.file is None:
            raise self._error(f"{_shorten(bucket.names)} did not arrive: the bucket has no file.")
        try:
            tensors_by_name = read_bucket(bucket.file, self._device)
        except WeightSyncError as error:
            raise self._error(f"{_shorten(bucket.names)} did not arrive: {error}") from error
        if absent := [name for name in bucket.names if name not in tensors_by_name]:
            raise self._error(f"{_shorten(absent)} is not in {bucket.file}.")
        for spec in self._specs(bucket):
            self._check_fit(wire_spec(spec), tensors_by_name[spec.name])
        tensors = self._reconstruct(bucket, [tensors_by_name[name] for name in bucket.names])
        self._verify(bucket, fingerprints(tensors))
        return tensors

    def _open_buffer(self, bucket: Bucket) -> Tensor:
        """Return the bytes of a bucket that was passed in the call or in shared memory, on this engine's device."""
        size = self._buffer_bytes(bucket)
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
        """Receive the bytes of a bucket from the group. Verify and load the pending bucket during the transfer."""
        group = self._group
        failures: list[Exception] = []

        def load_pending() -> None:
            try:
                self._load_pending()
            except Exception as error:  # an error of the pending bucket must not interrupt this transfer
                failures.append(error)

        buffer = self._buffers.take(bucket.index, self._buffer_bytes(bucket), self._device)
        try:
            if group is None:
                raise WeightSyncError("no transfer group is connected")
            group.receive_bucket(version, bucket.index, buffer, load_pending)
        except WeightSyncError as error:
            if self._group is group:
                self.close()  # later transfers would be out of sync
            raise self._error(f"{_shorten(bucket.names)} did not arrive: {error}") from error
        if failures:
            raise failures[0]
        return buffer

    def _check_fit(self, spec: TensorSpec, loaded: Tensor) -> None:
        if spec.shape != tuple(loaded.shape):
            raise self._error(
                f"{spec.name} is announced with shape {list(spec.shape)}, but the engine's is {list(loaded.shape)}."
            )
        wire_dtype = getattr(torch, spec.dtype, None)
        # Floating-point values are cast to the engine's dtype; any other cast would change their meaning.
        both_float = isinstance(wire_dtype, torch.dtype) and wire_dtype.is_floating_point and loaded.is_floating_point()
        if wire_dtype != loaded.dtype and not both_float:
            raise self._error(
                f"{spec.name} is announced as {spec.dtype}, but the engine's is {dtype_name(loaded.dtype)}."
            )

    def _require_manifest(self, what: str) -> Manifest:
        if self._manifest is None:
            raise self._error(f"{what} was sent without a manifest. Begin a sync first.")
        return self._manifest

    def _error(self, detail: str) -> WeightSyncError:
        return WeightSyncError(f"engine {self._name}: {detail}")


def _storage_key(tensor: Tensor) -> tuple[int, tuple[int, ...]]:
    """Return a key that is equal for tied tensors."""
    return (id(tensor) if tensor.is_meta else tensor.data_ptr()), tuple(tensor.shape)


def _shorten(names: tuple[str, ...] | list[str]) -> str:
    """Return the first names of a possibly long list as text."""
    shown = ", ".join(names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"


# -- the storage of an engine's weights


class WeightStore(Protocol):
    """Storage of an engine's weights, which loads full Hugging Face tensors and may fuse, split and repack them.

    A sync calls start(), load() for every bucket, then finish(). In between the engine has a mixture of two versions.

    Attributes:
        loads_separately: True if each tensor can be loaded without the others: a sync of changed elements then loads
            only the tensors that changed. False: it loads all.
    """

    loads_separately: bool

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        """Return the tensors that a sync must send, by Hugging Face name.

        Args:
            adapter: Adapter of the sync, whose tensors are included. It is served once `finish` returns. None: no
                adapter is served then.

        Returns:
            Name -> the engine's tensor, or one on the meta device of its shape and dtype. Tied tensors are under one
            or both names. A sync of changed elements reads a tensor that is not on the meta device.

        Raises:
            WeightSyncError: The adapter cannot be served; see `reject_adapter`.
        """

    def start(self) -> None:
        """Prepare to load, even if an earlier sync was not finished."""

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load full tensors by name, on the receiver's device and in the wire dtype. Their memory is reused after the
        call.
        """

    def finish(self) -> None:
        """Start to use the loaded tensors: all tensors of the sync were loaded."""

    def loaded_tensor(self, name: str) -> Tensor | None:
        """Return the loaded tensor of this name without a copy, or None if the engine does not keep it in this form."""


class InPlaceWeightStore(WeightStore):
    """A WeightStore for a plain model that overwrites the tensors of the same names."""

    loads_separately = True

    def __init__(self, parameters: Callable[[], Mapping[str, Tensor]]):
        """Create a store of the tensors that `parameters` returns, by name."""
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
        self._tensors = (
            self._parameters()
        )  # read again, to check that the model still uses the tensors that were overwritten

    def loaded_tensor(self, name: str) -> Tensor | None:
        return self._tensors[name]


def reject_adapter(adapter: AdapterSpec | None) -> None:
    """Raise WeightSyncError if there is an adapter."""
    if adapter is not None:
        raise WeightSyncError(
            "this engine does not support an adapter separate from its model. "
            "Set trainer.policy.model.lora.sync=merged."
        )


def adapter_layout(adapter: AdapterSpec, linears: Mapping[str, nn.Linear]) -> dict[str, Tensor]:
    """Return A and B of every layer of an adapter by name, on the meta device and in the layer's dtype.

    Args:
        adapter: The adapter.
        linears: Linear layers of the engine's model, by name.

    Raises:
        WeightSyncError: The adapter changes a layer that the model does not have.
    """
    layout = {}
    for layer in adapter.layers:
        if layer not in linears:
            raise WeightSyncError(f"the adapter changes {layer}, which is not a linear layer of the engine's model.")
        linear = linears[layer]
        shapes = ((adapter.rank, linear.in_features), (linear.out_features, adapter.rank))
        for name, shape in zip(adapter_names(layer), shapes, strict=True):
            layout[name] = torch.empty(shape, dtype=linear.weight.dtype, device="meta")
    return layout
