"""Measurements of one process: peak memory, allocations of an accelerator, and the time of torch operations."""

from __future__ import annotations

import logging
import resource
from pathlib import Path
from typing import Any

MAX_ALLOCATIONS = 100_000
"""Number of latest allocations and releases in a snapshot: several steps of a large model, tens of megabytes."""
_log = logging.getLogger(__name__)


def peak_memory(device: str) -> dict[str, float]:
    """Return the peak memory in GiB since the process started.

    Args:
        device: "cpu" or "cuda". "cuda" needs torch.

    Returns:
        `peak_rss_gib`: host memory of the whole process. On "cuda" also `peak_gib`: memory that torch allocated on the
        current accelerator.
    """
    peaks = {"peak_rss_gib": _peak_rss() / 2**30}
    if device == "cuda":
        import torch  # callers have already imported it

        peaks["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    return peaks


def _peak_rss() -> int:
    status = Path("/proc/self/status")
    if status.is_file():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # Not on Linux, where the value is in KiB and includes the memory of the parent process.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


class MemorySnapshotRecorder:
    """A recorder of an accelerator's latest allocations with their stack traces, for pytorch.org/memory_viz."""

    def __init__(self, file: Path, memory: Any):
        """Start recording.

        Args:
            file: File that `write` creates. It is a pickle, so open only your own files.
            memory: The module torch.cuda.memory.
        """
        self._file = Path(file)
        self._memory: Any = memory
        memory._record_memory_history(max_entries=MAX_ALLOCATIONS)

    def write(self) -> None:
        """Write the file, replacing the last one. If that fails, log a warning, stop recording and do not raise."""
        if self._memory is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            self._memory._dump_snapshot(str(self._file))
        except (OSError, RuntimeError) as error:
            _log.warning("trainer.policy.record_memory: %s cannot be written (%r). Recording stops.", self._file, error)
            self._memory._record_memory_history(enabled=None)
            self._memory = None


PROFILE_ROWS = 20
"""Number of operations in the table of a profile."""


class Profiler:
    """A recorder of torch operations and of the accelerator kernels that they launch.

    Call `start` and `stop` in the thread that computes: only its operations are recorded. `write` takes much longer
    than both, and any thread may call it. docs/reference/traces_and_profiles.md has the costs.
    """

    def __init__(self, device: str):
        """Create a profiler that is not recording. `device` is "cpu" or "cuda"."""
        self._device = device
        self._profile: Any = None
        """The profile that is being recorded, or is recorded and not written yet."""
        self._recording = False

    def start(self) -> None:
        """Start recording. A profile that was not written is discarded."""
        from torch.profiler import ProfilerActivity, profile  # callers have already imported torch

        self.stop()  # a step that failed may have left it recording
        accelerator = [ProfilerActivity.CUDA] if self._device == "cuda" else []
        self._profile = profile(activities=[ProfilerActivity.CPU, *accelerator])
        self._profile.start()
        self._recording = True

    def stop(self) -> None:
        """Stop recording. Do nothing if the profiler is not recording."""
        if self._recording:
            self._recording = False
            self._profile.stop()

    def write(self, file: str) -> str:
        """Write a Chrome trace to `file` (.json.gz), and return a table of the slowest operations as text.

        The table has PROFILE_ROWS operations, sorted by their own time without that of operations they call. If nothing
        was recorded since the last call, write no file and return "". Raises OSError if the file cannot be written.
        """
        profile, self._profile = self._profile, None
        if profile is None:
            return ""
        profile.export_chrome_trace(file)
        column = "self_device_time_total" if self._device == "cuda" else "self_cpu_time_total"
        return str(profile.key_averages().table(sort_by=column, row_limit=PROFILE_ROWS))
