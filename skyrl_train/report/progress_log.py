"""What a run is doing while it says nothing else: the start phase by phase, and whatever lasts now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl_train import trace
from skyrl_train.terminal import escape_control_chars, print_stdout

_log = logging.getLogger(__name__)
FIRST_REPORT_S = 4.0
"""Time after which a phase, a step or an evaluation that has not ended is named."""
FREQUENT_REPORTS_S = REPORT_INTERVAL_S = 60.0
"""So long a wait is named as often as at first, then once in this time: steps of hours leave a log that can be read."""
_POLLS_PER_REPORT = 10
"""At what is waited for, until the first line."""
NAME_WIDTH = 14
"""Of the column of names."""
ProgressText = str | Callable[[], str]


@contextmanager
def startup_phase(name: str, progress: ProgressText) -> Iterator[None]:
    """A part of the start. When it has ended, how long it took is said; if it raises, the error says enough."""
    begun = time.monotonic()
    with report_progress(name, progress), trace.span(f"start: {name}"):
        yield
    print_status(name, f"{time.monotonic() - begun:6.1f} s")


@contextmanager
def report_progress(name: str, progress: ProgressText) -> Iterator[None]:
    """While this lasts, print what it waits for every NAMED_AFTER_S; every minute, when it has lasted for one.

    What comes next ("generate, 3 of 8 groups", then "update") is printed as soon as it takes NAMED_AFTER_S itself.
    """
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(name, progress, ended), name=f"watch of {name}", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch(name: str, progress: ProgressText, ended: threading.Event) -> None:
    after_s = FIRST_REPORT_S
    begun, due_s = time.monotonic(), after_s
    said = doing = ""
    since_s = 0.0
    while not ended.wait(after_s / _POLLS_PER_REPORT):
        lasts_s, waits = time.monotonic() - begun, progress if isinstance(progress, str) else progress()
        if waits.partition(",")[0] != doing:
            doing, since_s = waits.partition(",")[0], lasts_s
        if lasts_s >= due_s or (said not in ("", doing) and lasts_s - since_s >= after_s):
            print_status(name, f"{lasts_s:6.0f} s so far: {waits}")
            said, due_s = doing, lasts_s + (after_s if lasts_s < FREQUENT_REPORTS_S else REPORT_INTERVAL_S)


def print_status(name: str, text: str) -> None:
    """One line on standard output; lost where it cannot be written, which ends nothing."""
    _log.info("%s: %s", name, text)
    print_stdout(escape_control_chars(f"{name:<{NAME_WIDTH}}{text}"))
