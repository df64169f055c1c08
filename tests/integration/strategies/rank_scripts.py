"""Scripts that are run as the ranks of one group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(script: Path, arguments: Sequence[Sequence[object]], folder: Path, deadline_s: float) -> None:
    """`python script *arguments[rank]`, all at once; fails with what they said unless all exit with 0 in time.

    What they say goes to files: nobody reads a pipe of one rank while waiting for another, which then waits in turn.
    """
    logs = [folder / f"rank_{rank}.log" for rank in range(len(arguments))]
    with ExitStack() as stack:
        ranks = [
            subprocess.Popen(
                [sys.executable, str(script), *map(str, own)],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},  # tests.support too
                stdout=stack.enter_context(log.open("w")),
                stderr=subprocess.STDOUT,
            )
            for log, own in zip(logs, arguments, strict=True)
        ]
        deadline = time.monotonic() + deadline_s
        try:
            for rank in ranks:
                rank.wait(timeout=max(1.0, deadline - time.monotonic()))
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
    said = "\n".join(log.read_text()[-4000:] for log in logs)
    assert [rank.returncode for rank in ranks] == [0] * len(ranks), said
