"""Copies of dataclasses of tensors on a device: all tensors travel in one buffer, without blocking the host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import Field, fields, is_dataclass, replace
from functools import cache
from itertools import accumulate
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
STAYS_ON_HOST = {"stays_on_host": True}
"""Metadata of a dataclass field whose tensors are not copied to a device."""
_ALIGNMENT = 256
"""Alignment of each tensor in the buffer in bytes: that of the CUDA allocator, for kernels with wide loads."""


def copy_to_device(value: T, device: torch.device | str) -> T:
    """Return a copy of a dataclass with its tensors on a device, views of one buffer.

    On a GPU the copy is asynchronous: it runs on a stream of its own while the device computes, and the current stream
    waits for it. Tensors in nested dataclasses and tuples are copied, too, except those of fields with STAYS_ON_HOST.

    Args:
        value: A dataclass, or a tuple of them, with tensors on the CPU. They may be in read-only memory.
        device: The device of the copy. On the CPU the buffer is the copy.
    """
    device = torch.device(device)
    tensors: list[Tensor] = []
    _map_tensors(value, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    starts = [0, *accumulate(sizes)]
    # The allocator of pinned memory reuses the buffer only after the copy that reads it.
    host_buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for tensor, view in zip(tensors, _views(host_buffer, tensors, starts), strict=True):
        view.copy_(tensor)
    views = iter(_views(_copy_buffer(host_buffer, device), tensors, starts))
    return _map_tensors(value, lambda _: next(views))


def _copy_buffer(buffer: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return buffer.to(device)
    stream, current = _copy_stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        copied = buffer.to(device, non_blocking=True)
    current.wait_stream(stream)  # the device waits, not the host
    copied.record_stream(current)
    return copied


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _views(buffer: Tensor, tensors: list[Tensor], starts: list[int]) -> list[Tensor]:
    """Return a view of the buffer for each tensor, with its dtype and shape."""
    return [
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for tensor, start in zip(tensors, starts, strict=False)
    ]


def _map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with the results of a function in place of its tensors, in a fixed order."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, tuple):
        return tuple(_map_tensors(item, function) for item in value) if _may_hold_tensors(value) else value
    if is_dataclass(value) and not isinstance(value, type):
        names = [item.name for item in fields(value) if _is_copied(item, getattr(value, item.name))]
        return replace(value, **{name: _map_tensors(getattr(value, name), function) for name in names})
    return value


def _is_copied(item: Field[Any], value: Any) -> bool:
    return not item.metadata.get("stays_on_host") and (isinstance(value, Tensor | tuple) or is_dataclass(value))


def _may_hold_tensors(items: tuple[Any, ...]) -> bool:
    return bool(items) and not isinstance(items[0], int)  # lengths of sequences are long tuples
