"""The trainer's end of a weight sync: announces the tensors, then sends them bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skyrl_train.errors import WeightSyncError
from skyrl_train.models.sharded_tensor import ShardedTensor, replicated
from skyrl_train.weight_sync.broadcast import ROOT_RANK, BroadcastGroup
from skyrl_train.weight_sync.buckets import (
    ALIGNMENT,
    DoubleBuffer,
    buffer_bytes,
    pack,
    plan_buckets,
    scan_shards,
    tensor_views,
    zeroed_buffer,
)
from skyrl_train.weight_sync.changes import ChangeTracker, sends_changes, wire_spec
from skyrl_train.weight_sync.checkpoint_route import BucketFolder
from skyrl_train.weight_sync.ipc import SharedBuffers
from skyrl_train.weight_sync.protocol import (
    AdapterSpec,
    Bucket,
    Manifest,
    TensorSpec,
    WeightRoute,
    adapter_names,
    dtype_name,
    dtype_of,
)

PERTURB_FACTOR = 1.5
"""Factor of the weights in a self-test: far enough from 1 for a probe of any model to notice."""
PERTURB_ADAPTER_BY = 0.1
"""Added to A and B of an adapter in a self-test, because a factor does not change a B of 0."""
MAX_CPU_BUCKET_BYTES = 1 << 25
"""Bytes. This size is the fastest on CPUs: buckets are processed within the cache, and the stages overlap."""


@dataclass
class _Sync:
    """State of one sync. A send that still hangs in an abandoned group has its own state, so it cannot disturb a later
    sync.
    """

    manifest: Manifest
    buckets: list[Bucket]
    specs: dict[str, TensorSpec]
    parameter_stream: Iterator[tuple[str, ShardedTensor]]
    buffers: DoubleBuffer
    largest: int
    """Bytes of the largest bucket."""
    next: int = 0
    gathered: Tensor | None = None
    """Route `broadcast`: the next bucket, packed in advance."""


@dataclass(frozen=True)
class LoraModel:
    """A frozen model and its trained adapter, to be synced separately."""

    adapter: AdapterSpec
    parameters: Callable[[bool], Iterator[tuple[str, Tensor | ShardedTensor]]]
    """Like `parameters` of a WeightSender, but not merged and with A and B under their `adapter_names`. If called with
    True, it yields only A and B.
    """


class WeightSender:
    """Sender of weight syncs. Every trainer rank has one, because gathering full tensors is a collective; rank 0 sends.

    A sync is `prepare_manifest(version)`, then `send(0)`, `send(1)`, ... in order, on all ranks. For the manifest each
    rank scans its own shard of every tensor in the dtype that is sent: fingerprints of shards add up to that of the
    tensor. So a tensor is gathered only once, for its bucket after the cast, and the receiver verifies that what
    arrives is what the ranks have. While a broadcast bucket is sent, the next one is gathered. Memory: two buckets and
    one tensor, and with `weight_sync_only_changed` a copy of the rank's shards on the host.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterator[tuple[str, Tensor | ShardedTensor]]],
        *,
        wire_dtype: str,
        bucket_bytes: int,
        rank: int,
        weight_sync_only_changed: bool = False,
        lora_model: LoraModel | None = None,
        num_optimizer_steps: Callable[[], int] = lambda: 0,
        device: str = "cpu",
        world_size: int = 1,
        all_reduce_sum: Callable[[Tensor], Tensor] = lambda values: values,
    ):
        """Create a sender that is not connected.

        Args:
            parameters: Yields Hugging Face names and this rank's shard, or a full tensor, in the same order on all
                ranks.
            wire_dtype: Dtype in which floating-point tensors are sent ("bfloat16", "float32"). Others keep theirs.
            bucket_bytes: Maximum size of a bucket of several tensors.
            rank: Rank of this trainer process.
            weight_sync_only_changed: True to send only elements with changed bits in a sync after a complete one. An
                adapter that is sent separately is always sent in full.
            lora_model: Model and adapter, read instead of `parameters` if `connect` gets `adapter_only`. The model is
                sent once, then only the adapter.
            num_optimizer_steps: Returns the number of optimizer steps that made the parameters.
            device: Device of the buffers ("cpu", "cuda").
            world_size: Number of trainer processes.
            all_reduce_sum: Returns the sum of a tensor over all ranks: int64 on the CPU, or uint8 on their devices.
        """
        self._parameters = parameters
        self._wire_dtype = dtype_of(wire_dtype)
        self._bucket_bytes = bucket_bytes
        self._rank = rank
        self._num_optimizer_steps = num_optimizer_steps
        self._all_reduce_sum = all_reduce_sum
        self._changes = ChangeTracker(rank, world_size, all_reduce_sum) if weight_sync_only_changed else None
        self._route: str = WeightRoute.IN_PROCESS
        self._device = device
        self._group: BroadcastGroup | None = None
        self._shared_buffers: SharedBuffers | None = None
        self._folder: BucketFolder | None = None
        self._sync: _Sync | None = None
        self._buffers = DoubleBuffer()
        self._perturbed = False
        self._lora_model = lora_model
        self._adapter_source: LoraModel | None = None
        """`lora_model`, if engines get its adapter separately."""
        self._delivered: int | None = None
        """Version that all engines have confirmed, if no later one has been sent."""

    def connect(self, route: str, address: str, world_size: int, timeout_s: float, adapter_only: bool = False) -> None:
        """Close the previous connection and prepare a route. For `broadcast`, rank 0 blocks until all engines have
        joined.

        Args:
            route: Name of the route, from `WeightRoute`.
            address: "host:port" with a free port of rank 0's machine (`broadcast`), or a shared folder (`checkpoint`).
            world_size: Number of ranks of the group. The trainer's rank 0 is its root; engines have ranks 1 to
                world_size - 1.
            timeout_s: Seconds for joining, and for each later transfer.
            adapter_only: True to send the adapter separately instead of merged into the model.

        Raises:
            WeightSyncError: There is no adapter, or not all ranks joined in time.
        """
        self.disconnect()
        if adapter_only and self._lora_model is None:
            raise WeightSyncError(
                "There is no adapter to send separately, because trainer.policy.model.lora.rank is 0. Set it above 0, "
                "or send merged weights."
            )
        self._adapter_source = self._lora_model if adapter_only else None
        self._route = route
        if (
            route == WeightRoute.IPC
            and self._shared_buffers is None
            and (self._rank == ROOT_RANK or self._device != "cpu")
        ):
            self._shared_buffers = SharedBuffers(self._device, self._rank)
        if self._rank != ROOT_RANK:
            return
        if route == WeightRoute.BROADCAST:
            self._group = BroadcastGroup(address, ROOT_RANK, world_size, self._device, timeout_s)
        elif route == WeightRoute.CHECKPOINT:
            self._folder = BucketFolder(address)

    def prepare_manifest(self, version: int, perturbed: bool = False) -> Manifest:
        """Begin a sync and return its manifest: names, shapes, dtypes, fingerprints and non-finite tensors.

        A collective of all ranks. It ends an earlier sync.

        Args:
            version: Version of the weights.
            perturbed: True to send perturbed weights for a self-test. Every weight is multiplied by PERTURB_FACTOR.
                With a separate adapter only its tensors are changed, because the probe must notice changes of the
                trained weights.
        """
        self._perturbed = perturbed
        tracker = self._tracker
        can_be_partial = tracker is not None or self._adapter_source is not None
        is_partial = can_be_partial and self._delivered is not None and not perturbed
        specs, non_finite = self._build_specs(self._iterate_parameters(is_partial), tracker if is_partial else None)
        specs = [spec for spec in specs if spec.changed != 0]
        on_cpu = self._device == "cpu" and self._route in (WeightRoute.BROADCAST, WeightRoute.IPC)
        bucket_bytes = min(self._bucket_bytes, MAX_CPU_BUCKET_BYTES) if on_cpu else self._bucket_bytes
        adapter = self._adapter_source.adapter if self._adapter_source is not None else None
        manifest = Manifest(
            version,
            tuple(specs),
            non_finite,
            bucket_bytes,
            self._delivered if is_partial else None,
            perturbed,
            adapter,
            self._num_optimizer_steps(),
            tracker is not None,
        )
        by_name = {spec.name: spec for spec in specs}
        stream, buckets = self._iterate_parameters(is_partial), plan_buckets(manifest)
        wire_specs = ([wire_spec(by_name[name]) for name in bucket.names] for bucket in buckets)
        largest = max(map(buffer_bytes, wire_specs), default=0)
        self._sync = _Sync(manifest, buckets, by_name, stream, self._buffers, largest)
        return manifest

    def mark_delivered(self, version: int) -> None:
        """Record that every engine has all tensors of the last manifest, and delete files of the route `checkpoint`.

        Raises:
            WeightSyncError: The last manifest had another version.
        """
        manifest = self._sync.manifest if self._sync is not None else None
        if manifest is None or manifest.version != version:
            raise WeightSyncError(f"version {version} is not the version that was sent last.")
        self._delivered = None if manifest.is_self_test else version
        if self._folder is not None:
            self._folder.close()

    def send(self, index: int) -> Bucket | None:
        """Send bucket `index` to the group, or return it for the engines. A collective of all ranks.

        Returns:
            The bucket, or None on ranks that have nothing to pass to the engines.

        Raises:
            WeightSyncError: The bucket is not the next one, the parameters changed, or the transfer failed.
        """
        sync = self._sync
        if sync is None or index != sync.next:
            expected = "no manifest" if sync is None else f"bucket {sync.next} of a manifest"
            raise WeightSyncError(f"bucket {index} was requested, but {expected} comes next.")
        sync.next += 1
        self._delivered = None  # from now on the engines and the tracker may have parts of another version
        bucket = sync.buckets[index]
        if self._route == WeightRoute.BROADCAST:
            return self._broadcast(sync, bucket)
        buffer = self._gather(sync, bucket)
        return None if buffer is None else self._attach_payload(sync, bucket, buffer)

    def disconnect(self) -> None:
        """Leave the transfer group, for example after a failed sync. Connect again before the next sync, which sends
        everything.

        Shared buffers stay. On CUDA torch keeps shared memory until every process that mapped it has released it,
        which a killed engine never does.
        """
        group, self._group = self._group, None
        folder, self._folder = self._folder, None
        self._sync = None
        self._buffers = DoubleBuffer()
        self._delivered = None
        for resource in (group, folder):
            if resource is not None:
                resource.close()

    def close(self) -> None:
        """Disconnect, and free the shared buffers."""
        self.disconnect()
        shared_buffers, self._shared_buffers = self._shared_buffers, None
        if shared_buffers is not None:
            shared_buffers.close()

    def _build_specs(
        self, stream: Iterator[tuple[str, ShardedTensor]], tracker: ChangeTracker | None
    ) -> tuple[list[TensorSpec], tuple[str, ...]]:
        """Return the specs of all tensors as they are sent, and the names of those with NaN or infinity."""
        announced: list[tuple[str, tuple[int, ...], str]] = []
        counts: list[Tensor] = []

        def parts() -> Iterator[tuple[Tensor, int]]:
            for name, tensor in stream:
                on_wire = self._to_wire(name, tensor)
                local = on_wire.local
                announced.append((name, tuple(on_wire.shape), dtype_name(local.dtype)))
                if tracker is not None:
                    counts.append(tracker.count(name, on_wire))
                yield (
                    on_wire.elements if on_wire.is_first_replica else local.new_empty(0),
                    on_wire.start * local.itemsize,
                )

        bits, non_finite = torch.tensor(scan_shards(parts()), dtype=torch.int64).view(-1, 2).unbind(1)
        # As two halves, because sums of full words over ranks could overflow.
        sums = self._all_reduce_sum(torch.stack((bits >> 32, bits & 0xFFFF_FFFF, non_finite)))
        totals = ((sums[0] << 32) + sums[1]).tolist()
        non_finite_counts = sums[2].tolist()
        changed: Sequence[int | None] = [None] * len(totals)
        if tracker is not None:
            changed = tracker.sum_counts([name for name, _, _ in announced], counts)
        specs = [TensorSpec(*properties, *rest) for properties, *rest in zip(announced, totals, changed, strict=True)]
        return specs, tuple(spec.name for spec, count in zip(specs, non_finite_counts, strict=True) if count)

    def _gather(self, sync: _Sync, bucket: Bucket) -> Tensor | None:
        """Take the bucket's tensors from the parameter stream and pack them. None on ranks that do not send them.

        A single tensor that is broadcast is read in place.
        """
        specs = [sync.specs[name] for name in bucket.names]
        tensors = self._wire_tensors(sync, specs)
        try:
            return self._pack_bucket(sync, bucket.index, [wire_spec(spec) for spec in specs], tensors)
        finally:
            for _ in tensors:  # the other ranks wait for this one to gather the rest, even if it has no memory left
                pass
            if bucket.index == len(sync.buckets) - 1:
                # The exhausted stream would keep the last parameter's memory, even while the model is offloaded.
                sync.parameter_stream = iter(())

    def _pack_bucket(
        self, sync: _Sync, index: int, specs: Sequence[TensorSpec], tensors: Iterator[Tensor]
    ) -> Tensor | None:
        buffer = self._buffer(sync, index, specs)
        if buffer is None:
            return None
        if self._route == WeightRoute.BROADCAST and len(specs) == 1:
            tensor = next(tensors)
            if _same_bytes(tensor, buffer):
                return tensor.view(-1).view(torch.uint8)
            tensors = iter([tensor])
        pack(buffer, specs, tensors)
        return buffer

    def _wire_tensors(self, sync: _Sync, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
        """Yield the next tensors of the parameter stream, or their changes, as they are sent. A collective."""
        tracker = self._tracker
        for spec in specs:
            name, tensor = next(sync.parameter_stream, ("nothing", None))
            while sync.manifest.base_version is not None and tensor is not None and name != spec.name:
                name, tensor = next(sync.parameter_stream, ("nothing", None))  # skip unchanged tensors
            if name != spec.name or tensor is None or tuple(tensor.shape) != spec.shape:
                raise WeightSyncError(
                    f"{spec.name} was announced, but {name} is next: the parameters changed during a sync."
                )
            on_wire = self._to_wire(name, tensor)
            if tracker is not None and sends_changes(spec):
                yield tracker.gather_changes(spec, on_wire)
            else:
                yield on_wire.full_tensor()
            if tracker is not None:
                tracker.store(name, on_wire)

    def _buffer(self, sync: _Sync, index: int, specs: Sequence[TensorSpec]) -> Tensor | None:
        if self._route == WeightRoute.IPC and self._shared_buffers is not None:
            return self._shared_buffers.buffer(index, buffer_bytes(specs), sync.largest)
        if self._rank != ROOT_RANK:
            return None
        device = self._group.device if self._group else "cpu"
        if self._route == WeightRoute.IN_PROCESS:  # engines may still read it while the next one is packed
            return zeroed_buffer(specs, device)
        return sync.buffers.take(index, buffer_bytes(specs), device)

    def _broadcast(self, sync: _Sync, bucket: Bucket) -> Bucket | None:
        """Send the bucket from rank 0, while all ranks gather the next one."""
        group, version = self._group, sync.manifest.version
        buffer = sync.gathered if bucket.index else self._gather(sync, bucket)
        following = sync.buckets[bucket.index + 1 : bucket.index + 2]

        def gather_next() -> None:
            sync.gathered = self._gather(sync, following.pop()) if following else sync.gathered

        try:
            if buffer is None:
                return None
            if group is None:
                raise WeightSyncError(f"version {version}: no transfer group is connected. Call connect before a sync.")
            group.send_bucket(version, bucket.index, buffer, gather_next)
            return bucket
        finally:
            gather_next()  # even if sending failed, because the other ranks would wait for this one

    def _attach_payload(self, sync: _Sync, bucket: Bucket, buffer: Tensor) -> Bucket:
        if self._route == WeightRoute.IPC:
            assert self._shared_buffers is not None
            return replace(bucket, handles=(self._shared_buffers.handle(bucket.index, buffer.numel()),))
        if self._route == WeightRoute.CHECKPOINT:
            assert self._folder is not None
            specs = [wire_spec(sync.specs[name]) for name in bucket.names]
            tensors = zip(bucket.names, tensor_views(buffer, specs), strict=True)
            return replace(bucket, file=self._folder.write(sync.manifest.version, bucket.index, list(tensors)))
        return replace(bucket, payload=buffer)

    @property
    def _tracker(self) -> ChangeTracker | None:
        return self._changes if self._adapter_source is None else None

    def _iterate_parameters(self, incremental: bool) -> Iterator[tuple[str, ShardedTensor]]:
        """Yield the parameters that a sync reads. `incremental` is True if it follows a complete sync."""
        stream = self._parameters() if self._adapter_source is None else self._adapter_source.parameters(incremental)
        # A trainer with one rank may yield plain tensors.
        return (
            (name, replicated(tensor.detach(), 0) if isinstance(tensor, Tensor) else tensor) for name, tensor in stream
        )

    def _to_wire(self, name: str, tensor: ShardedTensor) -> ShardedTensor:
        def cast(local: Tensor) -> Tensor:
            return (self._perturb(name, local) if self._perturbed else local).to(self._wire_dtype)

        is_unchanged = not self._perturbed and tensor.local.dtype == self._wire_dtype
        return tensor if is_unchanged or not tensor.local.is_floating_point() else tensor.map(cast)

    def _perturb(self, name: str, tensor: Tensor) -> Tensor:
        if self._adapter_source is None:
            return tensor * PERTURB_FACTOR
        return tensor + PERTURB_ADAPTER_BY if name.endswith(adapter_names("")) else tensor


class WeightSenderMixin:
    """Calls that `WeightSync` makes on a trainer rank, in this order. The rank's `sender` handles them."""

    sender: WeightSender

    def connect_weights(
        self, route: str, address: str, world_size: int, timeout_s: float, adapter_only: bool = False
    ) -> None:
        """Close the previous connection, prepare a route and join the engines' transfer group.

        For `broadcast`, rank 0 blocks until all engines have joined.

        Args:
            route: Name of the route, from `WeightRoute`.
            address: "host:port" with a free port of rank 0's machine (`broadcast`), or a shared folder (`checkpoint`).
            world_size: Number of ranks of the group: the trainer's rank 0, and those of all engines.
            timeout_s: Seconds for joining, and for each later transfer.
            adapter_only: True to send the adapter separately instead of merged into the model.

        Raises:
            WeightSyncError: There is no adapter, or not all ranks joined in time.
        """
        self.sender.connect(route, address, world_size, timeout_s, adapter_only)

    def prepare_manifest(self, version: int, perturbed: bool = False) -> Manifest:
        """Begin a sync and return its manifest: names, shapes, dtypes, fingerprints and non-finite tensors.

        This is a collective of all ranks. It ends an earlier sync.

        Args:
            version: Version of the weights.
            perturbed: True to send perturbed weights for a self-test.
        """
        return self.sender.prepare_manifest(version, perturbed)

    def send_weights(self, index: int) -> Bucket | None:
        """Send bucket `index` of the manifest to the group, or return it for the engines.

        This is a collective of all ranks.

        Returns:
            The bucket, or None on ranks that have nothing to pass to the engines.

        Raises:
            WeightSyncError: The bucket is not the next one, the parameters changed, or the transfer failed.
        """
        return self.sender.send(index)

    def mark_weights_delivered(self, version: int) -> None:
        """Record that every engine has all tensors of the last manifest, so that the next sync may send only what
        changed since.

        Raises:
            WeightSyncError: The last manifest had another version.
        """
        self.sender.mark_delivered(version)

    def disconnect_weights(self) -> None:
        """Leave the transfer group after a failure."""
        self.sender.disconnect()


def _same_bytes(on_wire: Tensor, buffer: Tensor) -> bool:
    """Return True if a tensor's memory equals its packed bytes in a buffer, without padding."""
    size = on_wire.nbytes
    return on_wire.device == buffer.device and on_wire.is_contiguous() and size > 0 and size % ALIGNMENT == 0
