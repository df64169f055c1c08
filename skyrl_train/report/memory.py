"""How much memory this process needed: what a run compares with its plan."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

MAX_ALLOCATIONS = 100_000
"""Allocations and releases that a record keeps, the latest ones: some steps of a large model, tens of megabytes."""
_log = logging.getLogger(__name__)


def peak_memory(device: str) -> dict[str, float]:
    """GiB at the peak since the process began, its start included.

    `peak_rss_gib` of the machine's memory, libraries and the interpreter too; on "cuda" also `peak_gib`, which torch
    had allocated on the accelerator.
    """
    peaks = {"peak_rss_gib": _peak_rss() / 2**30}
    if device == "cuda":
        import torch  # whoever asks has it

        peaks["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return peaks


def _peak_rss() -> int:
    """Bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # On Linux it would begin with the memory of the process that started this one. Elsewhere it counts bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class AllocationRecord:
    """What an accelerator's allocator did lately, and from which lines of code: a file for pytorch.org/memory_viz."""

    def __init__(self, file: Path, memory: Any):
        """Starts recording. `memory`: torch.cuda.memory, whose file is a pickle: open only your own ones."""
        self._file = Path(file)
        self._memory: Any = memory
        memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def write(self) -> None:
        """Replace the file. Where that fails there is one warning, and recording ends: the run is worth more."""
        if self._memory is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._memory._dump_snapshot(str(self._file))
        except (OSError, RuntimeError) as error:
            _log.warning("trainer.policy.record_memory: %s cannot be written; recording ends (%r).", self._file, error)
            self._memory._record_memory_history(enabled=None)
            self._memory = None
