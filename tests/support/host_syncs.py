"""The meta device in place of a GPU: it has no values, so that code that reads one is found on a CPU.

Meta tensors run through the same code as CUDA tensors, except where it asks for CUDA itself. A transfer between the CPU
and the meta device is one between host and GPU. An operation whose result on a GPU needs the host, such as a selection
by a mask, is listed here.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skyrl_train.models.padding_free import operation_name

OPTIMIZER_STEP = "_fused_adamw"
_READS = {"_local_scalar_dense", "equal", "is_nonzero", "item"}
"""Operations that return a value to the host."""
_SIZED_BY_VALUES = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "bincount"}
"""Operations whose result has a size that depends on values."""
_MASKED = {"index", "index_put", "_index_put_impl", "_unsafe_index"}
_FROM_HOST = {torch.tensor, torch.as_tensor, Tensor.new_tensor}
_SUBSCRIPTS = {Tensor.__getitem__, Tensor.__setitem__}


class HostSyncError(RuntimeError):
    """The host would wait for a result whose size depends on values, which the meta device does not have."""


@dataclass
class DeviceEvents:
    """Events of the device, in the order in which the host caused them."""

    names: list[str] = field(default_factory=list)
    """"kernel: NAME", "copy: WHERE" for a transfer from the host, "sync: WHY, WHERE" for a wait of the host."""

    def add(self, kind: str, why: str) -> None:
        """Append an event with the line of this project, or of a library, that caused it."""
        frames = [f for f in traceback.extract_stack() if "/torch/" not in f.filename and __file__ != f.filename]
        self.names.append(f"{kind}: {why}, {frames[-1].filename}:{frames[-1].lineno} {frames[-1].line}")

    def until_step(self, kind: str) -> list[str]:
        """Return the events of a kind from the first one to the last optimizer step."""
        end = max(index for index, name in enumerate(self.names) if name == f"kernel: {OPTIMIZER_STEP}")
        return [name for name in self.names[:end] if name.startswith(kind)]


class _Operations(TorchDispatchMode):
    def __init__(self, events: DeviceEvents):
        super().__init__()
        self._events = events

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, tensors = operation_name(function), [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [tensor for tensor in tensors if tensor.is_meta]
        if not on_device:
            result = function(*args, **kwargs)
            if isinstance(result, Tensor) and result.is_meta:
                if tensors:
                    self._events.add("copy", name)
                else:
                    self._events.names.append(f"kernel: {name}")
            return result
        if name == "_to_copy" and kwargs.get("device") == torch.device("cpu"):
            self._events.add("sync", "copy to the host")
            return torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
        if name in _READS:
            self._events.add("sync", name)
            return torch.zeros((), dtype=tensors[0].dtype).item() if name == "_local_scalar_dense" else False
        is_masked = name in _MASKED and any(x is not None and x.dtype == torch.bool for x in args[1])
        is_sized = name in _SIZED_BY_VALUES or (name == "repeat_interleave" and kwargs.get("output_size") is None)
        if is_masked or is_sized:
            self._events.add("sync", name)
            raise HostSyncError(self._events.names[-1])
        if any(not tensor.is_meta and tensor.ndim for tensor in tensors):
            self._events.add("copy", f"an operand of {name} on the host")
        self._events.names.append(f"kernel: {name}")
        if name == "_grouped_mm":  # on the meta device it takes only bfloat16
            narrow = [x.bfloat16() if isinstance(x, Tensor) and x.is_floating_point() else x for x in args]
            return function(*narrow, **kwargs).to(args[0].dtype)
        return function(*args, **kwargs)


class _Functions(TorchFunctionMode):
    """Finds transfers of Python numbers, which torch hides from dispatch modes."""

    def __init__(self, events: DeviceEvents):
        super().__init__()
        self._events = events

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        is_on_device = isinstance(result, Tensor) and result.is_meta
        if is_on_device and function in _FROM_HOST and not (args and _is_meta(args[0]) and function is torch.as_tensor):
            self._events.add("copy", function.__name__)
        if function in _SUBSCRIPTS and _is_meta(args[0]) and any(isinstance(x, list) for x in _items(args[1])):
            self._events.add("copy", "a list as an index")
        return result


def _is_meta(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_meta


def _items(index: Any) -> tuple[Any, ...]:
    return index if isinstance(index, tuple) else (index,)


@contextmanager
def record_device_events() -> Iterator[DeviceEvents]:
    """Record what happens on the meta device while the context is active. Values that the host reads are 0."""
    events = DeviceEvents()
    with _Functions(events), _Operations(events):
        yield events
