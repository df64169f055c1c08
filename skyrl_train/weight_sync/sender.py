"""The trainer's end: announces what will be sent, then streams it bucket by bucket."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from skyrl_train.errors import WeightSyncError
from skyrl_train.weight_sync.buckets import buckets, empty_buffer, views
from skyrl_train.weight_sync.transport import ROOT, BroadcastGroup
from skyrl_train.weight_sync.wire import Bucket, Manifest, TensorSpec, dtype_name, dtype_of, fingerprint


class WeightSender:
    """Lives on every trainer rank, because full tensors come out of collectives; only rank 0 reads and sends them.

    A sync is `manifest(version)`, then `send(0)`, `send(1)`, ... in order, on all ranks. It reads the parameters twice:
    once to look (finite? which bits?), once to send, and the receiver proves that both times were the same. Memory: one
    bucket and one tensor.
    """

    def __init__(
        self,
        parameters: Callable[[], Iterator[tuple[str, Tensor]]],
        *,
        wire_dtype: str,
        bucket_bytes: int,
        rank: int,
    ):
        """`parameters` yields (Hugging Face name, full tensor) in a fixed order, on all ranks together.

        Floating-point tensors travel as `wire_dtype` ("bfloat16", "float32"), others as they are.
        """
        self._parameters = parameters
        self._wire_dtype = dtype_of(wire_dtype)
        self._bucket_bytes = bucket_bytes
        self._rank = rank
        self._route = "in_process"
        self._group: BroadcastGroup | None = None
        self._manifest: Manifest | None = None
        self._stream: Iterator[tuple[str, Tensor]] | None = None
        self._next = 0

    def connect(self, route: str, address: str, world_size: int, timeout_s: float, device: str = "cpu") -> None:
        """Rank 0 becomes root of the `broadcast` group, with engines as ranks 1 to world_size - 1.

        `address` is "host:port", a free port of rank 0's machine. `device` ("cpu", "cuda") is where buffers live: gloo
        or NCCL. Raises WeightSyncError when not all came within `timeout_s`.
        """
        self.disconnect()
        self._route = route
        if route == "broadcast" and self._rank == ROOT:
            self._group = BroadcastGroup(address, ROOT, world_size, device, timeout_s)

    def manifest(self, version: int) -> Manifest:
        """Names, shapes, wire dtypes, fingerprints and non-finite tensors of a sync; an earlier one is forgotten."""
        specs, non_finite = [], []
        for name, tensor in self._parameters():
            on_wire = self._to_wire(tensor) if self._rank == ROOT else tensor
            dtype = self._wire_dtype if tensor.is_floating_point() else tensor.dtype
            bits = 0
            if self._rank == ROOT:
                bits = fingerprint(on_wire)
                if on_wire.is_floating_point() and not bool(on_wire.isfinite().all()):
                    non_finite.append(name)
            specs.append(TensorSpec(name, tuple(tensor.shape), dtype_name(dtype), bits))
        self._manifest = Manifest(version, tuple(specs), tuple(non_finite), self._bucket_bytes)
        self._stream = None
        self._next = 0
        return self._manifest

    def send(self, index: int) -> Bucket | None:
        """Bucket `index` of the manifest: in the answer (`in_process`), or to the group. None on ranks other than 0."""
        manifest = self._manifest
        if manifest is None or index != self._next:
            raise WeightSyncError(f"bucket {index} was asked for, but bucket {self._next} of a manifest comes next.")
        if self._stream is None:
            self._stream = iter(self._parameters())
        bucket = buckets(manifest)[index]
        wanted = set(bucket.names)
        specs = [spec for spec in manifest.tensors if spec.name in wanted]
        buffer = empty_buffer(specs, self._group.device if self._group else "cpu") if self._rank == ROOT else None
        places = [None] * len(specs) if buffer is None else list(views(buffer, specs))
        for spec, place in zip(specs, places, strict=True):
            name, tensor = next(self._stream, ("nothing", None))
            if name != spec.name or tensor is None or tuple(tensor.shape) != spec.shape:
                raise WeightSyncError(f"{spec.name} was announced, {name} came: the parameters changed during a sync.")
            if place is not None:
                place.copy_(self._to_wire(tensor))
        self._next += 1
        return None if buffer is None else self._hand_over(manifest, bucket, buffer)

    def _hand_over(self, manifest: Manifest, bucket: Bucket, buffer: Tensor) -> Bucket:
        if self._route == "in_process":
            return replace(bucket, payload=buffer)
        if self._group is None:
            raise WeightSyncError(f"version {manifest.version}: no transfer group is connected; connect before a sync.")
        self._group.send_bucket(manifest.version, bucket.index, buffer)
        return bucket

    def disconnect(self) -> None:
        """Leave the transfer group, e.g. after a failed sync; connect again before the next one."""
        group, self._group = self._group, None
        self._stream = None
        self._manifest = None
        if group is not None:
            group.close()

    def close(self) -> None:
        self.disconnect()

    @torch.no_grad()
    def _to_wire(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self._wire_dtype) if tensor.is_floating_point() else tensor.detach()
