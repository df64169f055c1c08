"""The signal handlers of another process."""

from __future__ import annotations

import re
import signal
from pathlib import Path


def handles_signal(pid: int, number: signal.Signals) -> bool:
    """True if the process has a handler of this signal; False once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def default_sighup() -> None:
    """Restore the default action of SIGHUP in a child process, as tests may run under `nohup`: a `preexec_fn`."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
