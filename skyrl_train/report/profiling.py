"""What one process needs: peak memory, an accelerator's allocations, and the time of torch's operations."""

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


class MemorySnapshotRecorder:
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


PROFILE_ROWS = 20
"""Of the table."""


class Profiler:
    """Records the operations of the thread that calls `start`, and what its accelerator runs for them, until `stop`.

    Both are to be called on the thread that computes; `write` takes much longer, and may be called on another one. What
    it all costs is in docs/metrics.md.
    """

    def __init__(self, device: str):
        """`device`: "cpu" or "cuda"."""
        self._device = device
        self._profile: Any = None
        """The one that is recorded, or was and is not written yet."""
        self._recording = False

    def start(self) -> None:
        from torch.profiler import ProfilerActivity, profile  # callers have already imported torch

        self.stop()  # of a step that failed
        accelerator = [ProfilerActivity.CUDA] if self._device == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *accelerator])
        self._profile.start()
        self._recording = True

    def stop(self) -> None:
        if self._recording:
            self._recording = False
            self._profile.stop()

    def write(self, file: str) -> str:
        """Write a Chrome trace to `file` (.json.gz); returns the table, those that took longest by themselves first.

        Returns "" and writes nothing if nothing was recorded. Raises OSError for a file that cannot be written.
        """
        profile, self._profile = self._profile, None
        if profile is None:
            return ""
        profile.export_chrome_trace(file)
        column = "self_device_time_total" if self._device == "cuda" else "self_cpu_time_total"
        return str(profile.key_averages().table(sort_by=column, row_limit=PROFILE_ROWS))
