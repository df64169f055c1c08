"""Engines served by a separate process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


@contextmanager
def serving(command: Sequence[str], **env: str) -> Iterator[None]:
    """Run the command (`python -m skyrl_train.entrypoints.serve ...`) inside the context, and end it on exit."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | env)
    try:
        assert process.stdout is not None
        assert any(line.startswith("Serving ") for line in process.stdout), "the process ended before it served"
        yield
    finally:
        process.terminate()
        process.communicate(timeout=60)
