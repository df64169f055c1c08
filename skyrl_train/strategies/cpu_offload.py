"""Copies tensors to host memory and back, with pinned buffers that are allocated once and a dedicated CUDA stream."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from skyrl_train.data.host_memory import MIN_PINNED_BYTES, empty_host_tensor

Name = TypeVar("Name", bound=Hashable)


class CpuOffloader:
    """Moves named tensors between one accelerator and host memory, at the speed of the bus.

    All copies of a call are queued at once, without waiting in between. A name keeps its pinned buffer, so all tensors
    of a name must have the same shape and dtype. The buffer's content is valid until the tensor is back on the
    accelerator.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._buffers: dict[Hashable, Tensor] = {}

    def move(self, tensors: Mapping[Name, Tensor], device: torch.device | str) -> dict[Name, Tensor]:
        """Copy tensors to host memory or to the accelerator.

        A tensor that is already there is returned unchanged. In host memory the copies are complete at return, so the
        originals may be freed. On the accelerator they are complete for all later work of the current stream.

        Args:
            tensors: Name -> tensor. A name is the key of a pinned buffer.
            device: "cpu", or the accelerator.

        Returns:
            Name -> tensor on `device`.
        """
        target = torch.device(device).type
        to_copy = {name: tensor for name, tensor in tensors.items() if self._device_type(tensor) != target}
        return {**tensors, **(self._copy_to_host(to_copy) if target == "cpu" else self._copy_to_device(to_copy))}

    def _copy_to_host(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        copies = {name: self._buffer(name, tensor) for name, tensor in tensors.items()}
        # Wait for kernels that still write into the tensors.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        self._copy(tensors, copies)
        self._stream.synchronize()
        return copies

    def _copy_to_device(self, tensors: Mapping[Name, Tensor]) -> dict[Name, Tensor]:
        copies = {name: torch.empty_like(tensor, device=self._device) for name, tensor in tensors.items()}
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)  # for kernels that still use the memory of the copies
        self._copy(tensors, copies)
        current.wait_stream(self._stream)
        return copies

    def _copy(self, tensors: Mapping[Name, Tensor], copies: Mapping[Name, Tensor]) -> None:
        with torch.cuda.stream(self._stream):
            for name, tensor in tensors.items():
                copies[name].copy_(tensor, non_blocking=True)

    def _device_type(self, tensor: Tensor) -> str:
        return tensor.device.type

    def _buffer(self, name: Hashable, tensor: Tensor) -> Tensor:
        if tensor.nbytes < MIN_PINNED_BYTES:
            return torch.empty_like(tensor, device="cpu")
        if name not in self._buffers:
            self._buffers[name] = empty_host_tensor(tensor.shape, tensor.dtype, self._device)
        return self._buffers[name]
