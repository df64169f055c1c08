"""What torch runs in one process, operation by operation: a trace for Perfetto and a table of the slowest."""

from __future__ import annotations

from typing import Any

ROWS = 20
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
        return str(profile.key_averages().table(sort_by=column, row_limit=ROWS))
