"""The trainer's end: announces what will be sent, then streams it bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.buckets import (
    ALIGNMENT,
    TurningBuffers,
    buckets,
    buffer_bytes,
    clear_gaps,
    empty_buffer,
    views,
)
from skyrl_train.weight_sync.files import BucketFolder
from skyrl_train.weight_sync.ipc import SharedPages
from skyrl_train.weight_sync.transport import ROOT, BroadcastGroup
from skyrl_train.weight_sync.wire import (
    AdapterSpec,
    Bucket,
    Manifest,
    TensorSpec,
    adapter_names,
    all_finite,
    dtype_name,
    dtype_of,
    fingerprint,
)

REHEARSAL = 1.5
"""Far enough from 1 for a probe of any model to notice."""
ADAPTER_REHEARSAL = 0.1
"""Added to A and B of an adapter: B may be 0, which no factor changes."""
CPU_BUCKET = 1 << 25
"""Bytes: on CPUs a bucket is packed, sent and loaded fastest while it is in the cache, and the stages overlap."""


@dataclass
class _Sync:
    """One sync under way. A send that hangs in a group that was left still has its own, and disturbs no other."""

    manifest: Manifest
    cut: list[Bucket]
    specs: dict[str, TensorSpec]
    stream: Iterator[tuple[str, Tensor]]
    buffers: TurningBuffers
    next: int = 0
    gathered: Tensor | None = None
    """The next bucket, already packed (broadcast)."""


@dataclass(frozen=True)
class AdaptedModel:
    """A frozen model and the adapter that is trained on it, to be synced apart."""

    adapter: AdapterSpec
    parameters: Callable[[bool], Iterator[tuple[str, Tensor]]]
    """Like a WeightSender's, not merged, A and B by `adapter_names`; given True, only those."""


class WeightSender:
    """Lives on every trainer rank, because full tensors come out of collectives; only rank 0 reads and sends them.

    A sync is `manifest(version)`, then `send(0)`, `send(1)`, ... in order, on all ranks. It reads the parameters twice:
    once to look (finite? which bits?), once to send, and the receiver proves that both times were the same. While a
    broadcast bucket is under way the next one is gathered. Memory: two buckets and one tensor.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterator[tuple[str, Tensor]]],
        *,
        wire_dtype: str,
        bucket_bytes: int,
        rank: int,
        only_changed: bool = False,
        adapted: AdaptedModel | None = None,
    ):
        """`parameters` yields (Hugging Face name, full tensor) in a fixed order, on all ranks together.

        Floating-point tensors travel as `wire_dtype` ("bfloat16", "float32"), others as they are. With `only_changed`
        a sync that follows a complete one leaves out the tensors whose bits are the same. `adapted` is what a sync
        reads instead, once `connect` asked for the adapter apart: the model once, then the adapter alone.
        """
        self._parameters = parameters
        self._wire_dtype = dtype_of(wire_dtype)
        self._bucket_bytes = bucket_bytes
        self._rank = rank
        self._only_changed = only_changed
        self._route = "in_process"
        self._device = "cpu"
        self._group: BroadcastGroup | None = None
        self._pages: SharedPages | None = None
        self._folder: BucketFolder | None = None
        self._sync: _Sync | None = None
        self._buffers = TurningBuffers()
        self._rehearsal = False
        self._adapted = adapted
        self._apart: AdaptedModel | None = None
        """`adapted`, where engines take its adapter apart."""
        self._delivered: tuple[int, dict[str, int]] | None = None
        """Version and fingerprints of what the engines confirmed to hold."""

    def connect(
        self, route: str, address: str, world_size: int, timeout_s: float, apart: bool = False, device: str = "cpu"
    ) -> None:
        """`broadcast`: rank 0 becomes root of the group, with engines as ranks 1 to world_size - 1.

        `address` is "host:port" (broadcast: a free port of rank 0's machine) or a shared folder (checkpoint). `device`
        ("cpu", "cuda") is where buffers live. With `apart` engines get the adapter beside the model instead of merged
        into it. Raises WeightSyncError when not all came within `timeout_s`.
        """
        self.disconnect()
        if apart and self._adapted is None:
            raise WeightSyncError("there is no adapter to send apart: trainer.policy.model.lora.rank is 0.")
        self._apart = self._adapted if apart else None
        self._route = route
        self._device = device
        if route == "ipc" and (self._rank == ROOT or device != "cpu"):
            self._pages = SharedPages(device, self._rank)
        if self._rank != ROOT:
            return
        if route == "broadcast":
            self._group = BroadcastGroup(address, ROOT, world_size, device, timeout_s)
        elif route == "checkpoint":
            self._folder = BucketFolder(address)

    def manifest(self, version: int, rehearsal: bool = False) -> Manifest:
        """Names, shapes, wire dtypes, fingerprints and non-finite tensors of a sync; an earlier one is forgotten.

        In a rehearsal every weight is sent as REHEARSAL times what it is; with an adapter apart, only its tensors are
        altered: what is trained must be what is noticed.
        """
        self._rehearsal = rehearsal
        follows = self._delivered if (self._only_changed or self._apart) and not rehearsal else None
        specs, non_finite = [], []
        looks = self._rank == ROOT or self._only_changed
        for name, tensor in self._stream(follows is not None):
            on_wire = self._to_wire(name, tensor) if looks else tensor
            dtype = self._wire_dtype if tensor.is_floating_point() else tensor.dtype
            bits = 0
            if looks:
                bits = fingerprint(on_wire)
                if dtype.is_floating_point and not all_finite(on_wire):
                    non_finite.append(name)
            specs.append(TensorSpec(name, tuple(tensor.shape), dtype_name(dtype), bits))
        base = None
        if follows is not None:
            base, known = follows
            if self._only_changed:
                specs = [spec for spec in specs if known.get(spec.name) != spec.fingerprint]
        on_cpu = self._device == "cpu" and self._route in ("broadcast", "ipc")
        bucket_bytes = min(self._bucket_bytes, CPU_BUCKET) if on_cpu else self._bucket_bytes
        adapter = self._apart.adapter if self._apart is not None else None
        manifest = Manifest(version, tuple(specs), tuple(non_finite), bucket_bytes, base, rehearsal, adapter)
        by_name = {spec.name: spec for spec in specs}
        stream = self._stream(follows is not None)
        self._sync = _Sync(manifest, buckets(manifest), by_name, stream, self._buffers)
        return manifest

    def delivered(self, version: int) -> None:
        """Every engine holds what the last manifest announced."""
        manifest = self._sync.manifest if self._sync is not None else None
        if manifest is None or manifest.version != version:
            raise WeightSyncError(f"version {version} was not the one that was sent.")
        known = {} if self._delivered is None else self._delivered[1]
        known = known | {spec.name: spec.fingerprint for spec in manifest.tensors}
        self._delivered = None if manifest.rehearsal else (version, known)
        if self._folder is not None:
            self._folder.close()

    def send(self, index: int) -> Bucket | None:
        """Bucket `index` of the manifest: to the group, or in the answer; None on ranks that have nothing to say."""
        sync = self._sync
        if sync is None or index != sync.next:
            expected = "no manifest" if sync is None else f"bucket {sync.next} of a manifest"
            raise WeightSyncError(f"bucket {index} was asked for, but {expected} comes next.")
        sync.next += 1
        bucket = sync.cut[index]
        if self._route == "broadcast":
            return self._broadcast(sync, bucket)
        buffer = self._gather(sync, bucket)
        return None if buffer is None else self._hand_over(sync, bucket, buffer)

    def disconnect(self) -> None:
        """Leave the transfer group, e.g. after a failed sync; connect again before the next one."""
        group, self._group = self._group, None
        pages, self._pages = self._pages, None
        folder, self._folder = self._folder, None
        self._sync = None
        self._buffers = TurningBuffers()
        self._delivered = None
        for resource in (group, pages, folder):
            if resource is not None:
                resource.close()

    def close(self) -> None:
        self.disconnect()

    def _gather(self, sync: _Sync, bucket: Bucket) -> Tensor | None:
        """The bucket's tensors out of the stream of parameters, packed; None on ranks that only take part in it.

        A broadcast reads a tensor that stands alone where it lies.
        """
        specs = [sync.specs[name] for name in bucket.names]
        buffer = self._buffer(sync, bucket.index, specs)
        if buffer is not None:
            clear_gaps(buffer, specs)
        places = [None] * len(specs) if buffer is None else list(views(buffer, specs))
        for spec, place in zip(specs, places, strict=True):
            name, tensor = next(sync.stream, ("nothing", None))
            while sync.manifest.base_version is not None and tensor is not None and name != spec.name:
                name, tensor = next(sync.stream, ("nothing", None))  # it did not change
            if name != spec.name or tensor is None or tuple(tensor.shape) != spec.shape:
                raise WeightSyncError(f"{spec.name} was announced, {name} came: the parameters changed during a sync.")
            if place is None:
                continue
            on_wire = self._to_wire(name, tensor)
            if self._route == "broadcast" and len(specs) == 1 and _same_bytes(on_wire, place):
                return on_wire.view(-1).view(torch.uint8)
            place.copy_(on_wire)
        return buffer

    def _buffer(self, sync: _Sync, index: int, specs: Sequence[TensorSpec]) -> Tensor | None:
        if self._pages is not None:
            return self._pages.page(index, buffer_bytes(specs))[0]
        if self._rank != ROOT:
            return None
        device = self._group.device if self._group else "cpu"
        if self._route == "in_process":  # it may still be read when the next one is made
            return empty_buffer(specs, device)
        return sync.buffers.take(index, buffer_bytes(specs), device)

    def _broadcast(self, sync: _Sync, bucket: Bucket) -> Bucket | None:
        """Rank 0 sends; meanwhile all ranks gather the next bucket."""
        group, version = self._group, sync.manifest.version
        if self._rank == ROOT and group is None:
            raise WeightSyncError(f"version {version}: no transfer group is connected; connect before a sync.")
        buffer = sync.gathered if bucket.index else self._gather(sync, bucket)

        def gather_next() -> None:
            following = bucket.index + 1
            sync.gathered = self._gather(sync, sync.cut[following]) if following < len(sync.cut) else None

        if group is None or buffer is None:
            gather_next()
            return None
        group.send_bucket(version, bucket.index, buffer, gather_next)
        return bucket

    def _hand_over(self, sync: _Sync, bucket: Bucket, buffer: Tensor) -> Bucket:
        if self._route == "ipc":
            assert self._pages is not None
            return replace(bucket, handles=(self._pages.page(bucket.index, buffer.numel())[1],))
        if self._route == "checkpoint":
            assert self._folder is not None
            named = zip(bucket.names, views(buffer, [sync.specs[name] for name in bucket.names]), strict=True)
            return replace(bucket, file=self._folder.write(sync.manifest.version, bucket.index, list(named)))
        return replace(bucket, payload=buffer)

    def _stream(self, follows: bool) -> Iterator[tuple[str, Tensor]]:
        """What a sync reads, one that `follows` a complete one or another."""
        return self._parameters() if self._apart is None else self._apart.parameters(follows)

    def _to_wire(self, name: str, tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        if not tensor.is_floating_point():
            return tensor
        return (self._altered(name, tensor) if self._rehearsal else tensor).to(self._wire_dtype)

    def _altered(self, name: str, tensor: Tensor) -> Tensor:
        if self._apart is None:
            return tensor * REHEARSAL
        return tensor + ADAPTER_REHEARSAL if name.endswith(adapter_names("")) else tensor


def _same_bytes(on_wire: Tensor, place: Tensor) -> bool:
    """Whether the tensor's memory is what its place in a buffer would hold, without a gap after it."""
    size = on_wire.nbytes
    return on_wire.device == place.device and on_wire.is_contiguous() and size > 0 and size % ALIGNMENT == 0
