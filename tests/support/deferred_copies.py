"""A CPU whose copies are as late as an accelerator's may be, seen from its host."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

T = TypeVar("T")
_COPY, _CLONE = torch.ops.aten.copy_.default, torch.ops.aten.clone.default
_FOREACH_COPY, _CAT = torch.ops.aten._foreach_copy_.default, torch.ops.aten.cat.out


class DeferredCopyMode(TorchDispatchMode):
    """A mode that queues copies, in order, until an operation inside needs them or a call synchronizes.

    Another stream, or a memory access that is not a torch operation, sees the earlier contents.
    """

    entered: ClassVar[list[DeferredCopyMode]] = []

    def __init__(self) -> None:
        super().__init__()
        self._queue: list[Callable[[], Any]] = []

    def __enter__(self) -> Self:
        self.entered.append(self)
        return super().__enter__()  # type: ignore[no-any-return]

    def __exit__(self, *error: Any) -> None:
        self.entered.pop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (_COPY, _FOREACH_COPY, _CAT):
            self._queue.append(partial(func, *args, **(kwargs or {})))
            return {_COPY: args[0], _CAT: (kwargs or {}).get("out")}.get(func)
        if func is _CLONE:
            copied = torch.empty_like(args[0])
            self._queue.append(partial(_COPY, copied, args[0]))
            return copied
        if not func.is_view:
            self.synchronize()
        return func(*args, **(kwargs or {}))

    def inside(self, call: Callable[..., T]) -> Callable[..., T]:
        """Return `call`, run inside the mode."""

        def made(*args: Any) -> T:
            with self:
                return call(*args)

        return made

    def synchronize(self) -> None:
        """Run all queued copies."""
        queue, self._queue = self._queue, []
        with _disable_current_modes():  # or they would be queued again
            for copy in queue:
                copy()


def wait_for_copies(device: torch.device) -> None:
    """Replace the function of weight_sync/ipc.py in tests."""
    assert device.type == "cpu"
    DeferredCopyMode.entered[-1].synchronize()
