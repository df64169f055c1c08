"""The memory that this process needed, which a run compares with its plan."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

MAX_ALLOCATIONS = 100_000
"""Number of latest allocations and releases in a record: some steps of a large model, tens of megabytes."""
_log = logging.getLogger(__name__)


def peak_memory(device: str) -> dict[str, float]:
    """Peak memory in GiB since the process began, including its start.

    `peak_rss_gib` is host memory, including libraries and the interpreter; on "cuda" there is also `peak_gib`, the
    memory that torch had allocated on the accelerator.
    """
    peaks = {"peak_rss_gib": _peak_rss() / 2**30}
    if device == "cuda":
        import torch  # callers have already imported it

        peaks["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return peaks


def _peak_rss() -> int:
    """Peak resident memory in bytes."""
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # On Linux it would include the memory of the parent process. Elsewhere it is in bytes.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class AllocationRecord:
    """Records an accelerator's latest allocations and their lines of code, in a file for pytorch.org/memory_viz."""

    def __init__(self, file: Path, memory: Any):
        """Start recording. `memory` is torch.cuda.memory; its file is a pickle, so open only your own files."""
        self._file = Path(file)
        self._memory: Any = memory
        memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def write(self) -> None:
        """Replace the file. If that fails, log one warning and stop recording: the run matters more."""
        if self._memory is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._memory._dump_snapshot(str(self._file))
        except (OSError, RuntimeError) as error:
            _log.warning("trainer.policy.record_memory: %s cannot be written; recording ends (%r).", self._file, error)
            self._memory._record_memory_history(enabled=None)
            self._memory = None
