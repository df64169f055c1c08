"""The amount of memory available, found without touching an accelerator."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path


def capacity_of(device: str) -> int | None:
    """Bytes of this machine's smallest accelerator, or for "cpu" of its main memory (of the cgroup's limit if lower).

    None if it cannot be found out. Touches no accelerator: a driver must not allocate memory there.
    """
    if device == "cuda":
        sizes = _accelerators()
        return min(sizes) << 20 if sizes else None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdigit() else total


def _accelerators() -> list[int]:
    """MiB of every accelerator; empty if nvidia-smi does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in listed.split() if line.isdigit()]
