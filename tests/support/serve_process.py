"""Engines that a process of its own serves."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def serving(command: Sequence[str], **env: str) -> Iterator[None]:
    """Inside, the command (`python -m skyrl_train.entrypoints.serve ...`) serves; it is ended on leaving."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | env)
    try:
        assert process.stdout is not None
        assert any(line.startswith("Serving ") for line in process.stdout), "it ended before it served"
        yield
    finally:
        process.terminate()
        process.communicate(timeout=60)
