"""Whether an engine's accelerator still computes.

After some errors (an illegal access, an assertion in a kernel) every later call of the process fails, and only a new
process helps. But such an engine still answers questions about its queue: so its device is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

import torch

from skyrl_train.errors import EngineError, SkyRLError, WeightSyncError

T = TypeVar("T")


def compute(device: torch.device) -> None:
    """Wait for the device, then let it compute a number. Raises its error if it cannot; does nothing on a CPU."""
    if device.type == "cpu":
        return
    torch.cuda.synchronize(device)
    with suppress(torch.OutOfMemoryError):  # a full memory is no broken device
        torch.ones((), device=device).item()


def query(device: torch.device) -> None:
    """Raises the device's error if it is known by now; waits for nothing that the device still has to do."""
    if device.type != "cpu":
        torch.cuda.current_stream(device).query()


class Accelerator:
    """The accelerator of one engine; once it does not compute any more it is lost for good."""

    def __init__(self, engine: str, compute: Callable[[], Any], query: Callable[[], Any] = lambda: None):
        """`compute` and `query` raise if the device of any of the engine's ranks does not compute, as the functions."""
        self._engine = engine
        self._compute = compute
        self._query = query
        self._lost: str | None = None

    def examine(self) -> None:
        """Ask the device; to be called after an exception whose cause it may be, where the engine computes."""
        self._ask(self._compute)

    def _ask(self, question: Callable[[], Any]) -> None:
        if self._lost is not None:
            return
        try:
            question()
        except Exception as error:
            self._lost = f"{type(error).__name__}: {error}"

    def check(self) -> None:
        """Raises EngineError if the accelerator is lost."""
        if self._lost is not None:
            raise self._error()

    def run(self, command: Callable[[], T]) -> T:
        """Run a command; after an exception that is not one of ours the device is asked.

        So it is after a failed weight transfer, which tells of what went wrong before it, too; but then nobody waits:
        a transfer that another rank gave up may still be on the device. Raises EngineError instead of that exception if
        the accelerator is lost.
        """
        try:
            return command()
        except Exception as error:
            if isinstance(error, SkyRLError) and not isinstance(error, WeightSyncError):
                raise
            self._ask(self._query if isinstance(error, WeightSyncError) else self._compute)
            if self._lost is not None:
                raise self._error() from error
            raise

    def _error(self) -> EngineError:
        return EngineError(
            f"Engine {self._engine!r} is dead: its accelerator does not compute any more in this process "
            f"({self._lost}); it must be started again."
        )
