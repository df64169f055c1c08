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
from skyrl_train.weight_sync.handover import BucketFolder, SharedBuffers
from skyrl_train.weight_sync.protocol import (
    AdapterSpec,
    Bucket,
    Manifest,
    TensorSpec,
    adapter_names,
    dtype_name,
    dtype_of,
)

PERTURB_FACTOR = 1.5
"""Factor of the weights in a self-test: far enough from 1 for a probe of any model to notice."""
PERTURB_ADAPTER_BY = 0.1
"""Added to A and B of an adapter in a self-test: B may be 0, which no factor changes."""
MAX_CPU_BUCKET_BYTES = 1 << 25
"""Bytes. This is the fastest size on CPUs: buckets are processed within the cache, and the stages overlap."""


@dataclass
class _Sync:
    """The state of one sync. A send that still hangs in an abandoned group has its own, and disturbs no later sync."""

    manifest: Manifest
    buckets: list[Bucket]
    specs: dict[str, TensorSpec]
    parameter_stream: Iterator[tuple[str, ShardedTensor]]
    buffers: DoubleBuffer
    largest: int
    """Bytes of the largest bucket."""
    next: int = 0
    gathered: Tensor | None = None
    """The next bucket, packed in advance (broadcast)."""


@dataclass(frozen=True)
class LoraModel:
    """A frozen model and its trained adapter, to be synced separately."""

    adapter: AdapterSpec
    parameters: Callable[[bool], Iterator[tuple[str, Tensor | ShardedTensor]]]
    """Like a WeightSender's `parameters`, but not merged: with A and B by `adapter_names`; given True, only those."""


class WeightSender:
    """Sends weights. Every trainer rank has one, as gathering full tensors is a collective; only rank 0 sends them.

    A sync is `manifest(version)`, then `send(0)`, `send(1)`, ... in order, on all ranks. For the manifest each rank
    inspects its own part of every tensor, in the dtype that is sent: fingerprints of parts add up to that of the whole.
    So a tensor is gathered once, for its bucket, after the cast, and the receiver verifies that what came is what the
    ranks have. While a broadcast bucket is being sent, the next one is gathered. Memory: two buckets and one tensor.
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
        all_reduce_sum: Callable[[Tensor], Tensor] = lambda values: values,
    ):
        """`parameters` yields (Hugging Face name, this rank's part or a whole tensor) in an order common to all ranks.

        Floating-point tensors are sent as `wire_dtype` ("bfloat16", "float32"), others in their own dtype. With
        `weight_sync_only_changed` a sync after a complete one leaves out tensors with unchanged bits. `adapted` is read
        instead of `parameters` if `connect` gets `adapter_only`: first the model once, then only the adapter. `updates`
        counts the optimizer steps that made the parameters. `device` ("cpu", "cuda"): of the buffers. `sum_over_ranks`
        adds up int64 CPU tensors of all ranks.
        """
        self._parameters = parameters
        self._wire_dtype = dtype_of(wire_dtype)
        self._bucket_bytes = bucket_bytes
        self._rank = rank
        self._num_optimizer_steps = num_optimizer_steps
        self._all_reduce_sum = all_reduce_sum
        self._weight_sync_only_changed = weight_sync_only_changed
        self._route = "in_process"
        self._device = device
        self._group: BroadcastGroup | None = None
        self._shared_buffers: SharedBuffers | None = None
        self._folder: BucketFolder | None = None
        self._sync: _Sync | None = None
        self._buffers = DoubleBuffer()
        self._perturbed = False
        self._lora_model = lora_model
        self._adapter_source: LoraModel | None = None
        """`adapted`, if engines take its adapter separately."""
        self._delivered: tuple[int, dict[str, int]] | None = None
        """The version that all engines have confirmed, and its fingerprints."""

    def connect(self, route: str, address: str, world_size: int, timeout_s: float, adapter_only: bool = False) -> None:
        """Prepare a route. For `broadcast` rank 0 is the root of the group, and engines are ranks 1 to world_size - 1.

        `address`: "host:port" with a free port of rank 0's machine (broadcast), or a shared folder (checkpoint).
        With `adapter_only` engines get the adapter separately instead of merged into the model. Raises WeightSyncError
        if not all ranks join within `timeout_s`.
        """
        self.disconnect()
        if adapter_only and self._lora_model is None:
            raise WeightSyncError("there is no adapter to send apart: trainer.policy.model.lora.rank is 0.")
        self._adapter_source = self._lora_model if adapter_only else None
        self._route = route
        if route == "ipc" and self._shared_buffers is None and (self._rank == ROOT_RANK or self._device != "cpu"):
            self._shared_buffers = SharedBuffers(self._device, self._rank)
        if self._rank != ROOT_RANK:
            return
        if route == "broadcast":
            self._group = BroadcastGroup(address, ROOT_RANK, world_size, self._device, timeout_s)
        elif route == "checkpoint":
            self._folder = BucketFolder(address)

    def prepare_manifest(self, version: int, perturbed: bool = False) -> Manifest:
        """Begin a sync: names, shapes, wire dtypes, fingerprints and non-finite tensors. Ends an earlier sync.

        With `altered`, for a self-test, every weight is sent multiplied by ALTERED_FACTOR; with a separate adapter only
        its tensors are altered, as the probe must notice changes of the trained weights.
        """
        self._perturbed = perturbed
        follows = (
            self._delivered if (self._weight_sync_only_changed or self._adapter_source) and not perturbed else None
        )
        specs, non_finite = self._build_specs(self._iterate_parameters(follows is not None))
        base = None
        if follows is not None:
            base, known = follows
            if self._weight_sync_only_changed:
                specs = [spec for spec in specs if known.get(spec.name) != spec.fingerprint]
        on_cpu = self._device == "cpu" and self._route in ("broadcast", "ipc")
        bucket_bytes = min(self._bucket_bytes, MAX_CPU_BUCKET_BYTES) if on_cpu else self._bucket_bytes
        adapter = self._adapter_source.adapter if self._adapter_source is not None else None
        manifest = Manifest(
            version, tuple(specs), non_finite, bucket_bytes, base, perturbed, adapter, self._num_optimizer_steps()
        )
        by_name = {spec.name: spec for spec in specs}
        stream, planned = self._iterate_parameters(follows is not None), plan_buckets(manifest)
        largest = max((buffer_bytes([by_name[name] for name in bucket.names]) for bucket in planned), default=0)
        self._sync = _Sync(manifest, planned, by_name, stream, self._buffers, largest)
        return manifest

    def mark_delivered(self, version: int) -> None:
        """Note that every engine has all tensors of the last manifest."""
        manifest = self._sync.manifest if self._sync is not None else None
        if manifest is None or manifest.version != version:
            raise WeightSyncError(f"version {version} was not the one that was sent.")
        known = {} if self._delivered is None else self._delivered[1]
        known = known | {spec.name: spec.fingerprint for spec in manifest.tensors}
        self._delivered = None if manifest.rehearsal else (version, known)
        if self._folder is not None:
            self._folder.close()

    def send(self, index: int) -> Bucket | None:
        """Send bucket `index` to the group, or return it; None on ranks that have nothing to hand to the engines."""
        sync = self._sync
        if sync is None or index != sync.next:
            expected = "no manifest" if sync is None else f"bucket {sync.next} of a manifest"
            raise WeightSyncError(f"bucket {index} was asked for, but {expected} comes next.")
        sync.next += 1
        bucket = sync.buckets[index]
        if self._route == "broadcast":
            return self._broadcast(sync, bucket)
        buffer = self._gather(sync, bucket)
        return None if buffer is None else self._attach_payload(sync, bucket, buffer)

    def disconnect(self) -> None:
        """Leave the transfer group, e.g. after a failed sync; connect again before the next one.

        Pages stay: on CUDA torch keeps memory that was shared until who mapped it has let it go, which an engine that
        was killed never does.
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
        """Disconnect, and free what was shared."""
        self.disconnect()
        pages, self._shared_buffers = self._shared_buffers, None
        if pages is not None:
            pages.close()

    def _build_specs(self, stream: Iterator[tuple[str, ShardedTensor]]) -> tuple[list[TensorSpec], tuple[str, ...]]:
        """What every tensor is on the wire, and the names of those that hold NaN or infinity."""
        announced: list[tuple[str, tuple[int, ...], str]] = []

        def parts() -> Iterator[tuple[Tensor, int]]:
            for name, tensor in stream:
                on_wire = self._to_wire(name, tensor)
                local = on_wire.local
                announced.append((name, tuple(on_wire.shape), dtype_name(local.dtype)))
                yield (
                    on_wire.elements if on_wire.is_first_replica else local.new_empty(0),
                    on_wire.start * local.itemsize,
                )

        bits, non_finite = torch.tensor(scan_shards(parts()), dtype=torch.int64).view(-1, 2).unbind(1)
        # In halves, as sums of whole words over ranks could overflow.
        sums = self._all_reduce_sum(torch.stack((bits >> 32, bits & 0xFFFF_FFFF, non_finite)))
        totals = ((sums[0] << 32) + sums[1]).tolist()
        wrong = sums[2].tolist()
        specs = [TensorSpec(*what, total) for what, total in zip(announced, totals, strict=True)]
        return specs, tuple(spec.name for spec, count in zip(specs, wrong, strict=True) if count)

    def _gather(self, sync: _Sync, bucket: Bucket) -> Tensor | None:
        """Take the bucket's tensors from the stream of parameters and pack them; None on ranks that do not send them.

        A broadcast of a single tensor reads it in place.
        """
        specs = [sync.specs[name] for name in bucket.names]
        wholes = self._full_tensors(sync, specs)
        try:
            return self._pack_bucket(sync, bucket.index, specs, wholes)
        finally:
            for _ in wholes:  # those not taken: the other ranks wait for this one, even if it has no memory left
                pass
            if bucket.index == len(sync.buckets) - 1:
                sync.parameter_stream = iter(
                    ()
                )  # it would hold the last parameter's memory, also while the model is offloaded

    def _pack_bucket(
        self, sync: _Sync, index: int, specs: Sequence[TensorSpec], wholes: Iterator[Tensor]
    ) -> Tensor | None:
        buffer = self._buffer(sync, index, specs)
        if buffer is None:
            return None
        if self._route == "broadcast" and len(specs) == 1:
            whole = next(wholes)
            if _same_bytes(whole, buffer):
                return whole.view(-1).view(torch.uint8)
            wholes = iter([whole])
        pack(buffer, specs, wholes)
        return buffer

    def _full_tensors(self, sync: _Sync, specs: Sequence[TensorSpec]) -> Iterator[Tensor]:
        """The next tensors of the stream of parameters, as they are sent; a collective."""
        for spec in specs:
            name, tensor = next(sync.parameter_stream, ("nothing", None))
            while sync.manifest.base_version is not None and tensor is not None and name != spec.name:
                name, tensor = next(sync.parameter_stream, ("nothing", None))  # skips unchanged tensors
            if name != spec.name or tensor is None or tuple(tensor.shape) != spec.shape:
                raise WeightSyncError(f"{spec.name} was announced, {name} came: the parameters changed during a sync.")
            yield self._to_wire(name, tensor).full_tensor()

    def _buffer(self, sync: _Sync, index: int, specs: Sequence[TensorSpec]) -> Tensor | None:
        if self._route == "ipc" and self._shared_buffers is not None:
            return self._shared_buffers.buffer(index, buffer_bytes(specs), sync.largest)
        if self._rank != ROOT_RANK:
            return None
        device = self._group.device if self._group else "cpu"
        if self._route == "in_process":  # engines may still read it while the next one is made
            return zeroed_buffer(specs, device)
        return sync.buffers.take(index, buffer_bytes(specs), device)

    def _broadcast(self, sync: _Sync, bucket: Bucket) -> Bucket | None:
        """Rank 0 sends the bucket; meanwhile all ranks gather the next one."""
        group, version = self._group, sync.manifest.version
        buffer = sync.gathered if bucket.index else self._gather(sync, bucket)
        following = sync.buckets[bucket.index + 1 : bucket.index + 2]

        def gather_next() -> None:
            sync.gathered = self._gather(sync, following.pop()) if following else sync.gathered

        try:
            if buffer is None:
                return None
            if group is None:
                raise WeightSyncError(f"version {version}: no transfer group is connected; connect before a sync.")
            group.send_bucket(version, bucket.index, buffer, gather_next)
            return bucket
        finally:
            gather_next()  # even if sending failed: the other ranks are in it, and would wait for this one

    def _attach_payload(self, sync: _Sync, bucket: Bucket, buffer: Tensor) -> Bucket:
        if self._route == "ipc":
            assert self._shared_buffers is not None
            return replace(bucket, handles=(self._shared_buffers.handle(bucket.index, buffer.numel()),))
        if self._route == "checkpoint":
            assert self._folder is not None
            named = zip(bucket.names, tensor_views(buffer, [sync.specs[name] for name in bucket.names]), strict=True)
            return replace(bucket, file=self._folder.write(sync.manifest.version, bucket.index, list(named)))
        return replace(bucket, payload=buffer)

    def _iterate_parameters(self, incremental: bool) -> Iterator[tuple[str, ShardedTensor]]:
        """The parameters that a sync reads; `follows`: it follows a complete sync."""
        stream = self._parameters() if self._adapter_source is None else self._adapter_source.parameters(incremental)
        # A plain tensor is that of a trainer with one rank.
        return ((name, replicated(one.detach(), 0) if isinstance(one, Tensor) else one) for name, one in stream)

    def _to_wire(self, name: str, tensor: ShardedTensor) -> ShardedTensor:
        def cast(held: Tensor) -> Tensor:
            return (self._perturb(name, held) if self._perturbed else held).to(self._wire_dtype)

        as_it_is = not self._perturbed and tensor.local.dtype == self._wire_dtype
        return tensor if as_it_is or not tensor.local.is_floating_point() else tensor.map(cast)

    def _perturb(self, name: str, tensor: Tensor) -> Tensor:
        if self._adapter_source is None:
            return tensor * PERTURB_FACTOR
        return tensor + PERTURB_ADAPTER_BY if name.endswith(adapter_names("")) else tensor


class WeightSenderMixin:
    """The calls that `WeightSync` makes on a trainer rank, in this order, each answered by the rank's `sender`."""

    sender: WeightSender

    def connect_weights(
        self, route: str, address: str, world_size: int, timeout_s: float, adapter_only: bool = False
    ) -> None:
        """Join the engines' transfer group: see WeightSender.connect."""
        self.sender.connect(route, address, world_size, timeout_s, adapter_only)

    def prepare_manifest(self, version: int, perturbed: bool = False) -> Manifest:
        """Return what a sync of `version` will send."""
        return self.sender.prepare_manifest(version, perturbed)

    def send_weights(self, index: int) -> Bucket | None:
        """Send bucket `index` of the manifest, or return it; None on ranks that have nothing to hand to the engines."""
        return self.sender.send(index)

    def mark_weights_delivered(self, version: int) -> None:
        """Note that every engine has confirmed that version."""
        self.sender.mark_delivered(version)

    def disconnect_weights(self) -> None:
        """Leave the transfer group after a failure."""
        self.sender.disconnect()


def _same_bytes(on_wire: Tensor, buffer: Tensor) -> bool:
    """Whether a tensor's memory is the same as its packed bytes in a buffer, without padding."""
    size = on_wire.nbytes
    return on_wire.device == buffer.device and on_wire.is_contiguous() and size > 0 and size % ALIGNMENT == 0
