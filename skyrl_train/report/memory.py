"""How much memory this process needed: what a run compares with its plan."""

from __future__ import annotations

import resource
from pathlib import Path


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
