"""Progress lines of a run on standard output: one for each start-up phase, and some while a step takes long."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl_train import trace
from skyrl_train.terminal import escape_control_chars, print_stdout

_log = logging.getLogger(__name__)
FIRST_REPORT_S = 15.0
"""Time until the first progress line, and between lines at first."""
FREQUENT_REPORTS_S = REPORT_INTERVAL_S = 60.0
"""Time after which lines become less frequent, and the time between them from then on: it keeps logs short."""
_POLLS_PER_REPORT = 10
"""Number of looks at the progress in FIRST_REPORT_S."""
NAME_WIDTH = 14
"""Width of the column of names, in characters."""
ProgressText = str | Callable[[], str]
"""Text that describes the progress, or a function that returns it and is called in another thread."""


@contextmanager
def startup_phase(name: str, progress: ProgressText) -> Iterator[None]:
    """Report a start-up phase: progress while it lasts, its duration when it ends, and a span of the trace.

    Args:
        name: Name of the phase.
        progress: What the phase is doing, as for `report_progress`. If the phase raises, no duration is printed.
    """
    begun = time.monotonic()
    with report_progress(name, progress), trace.span(f"start: {name}"):
        yield
    print_status(name, f"{time.monotonic() - begun:6.1f} s")


@contextmanager
def report_progress(name: str, progress: ProgressText) -> Iterator[None]:
    """Print progress lines from another thread while the context is active, if it lasts for FIRST_REPORT_S or longer.

    Lines come every FIRST_REPORT_S in the first minute and then every minute. A change of activity ("generate, 3 of 8
    groups", then "update") is printed once the new activity has lasted for FIRST_REPORT_S.

    Args:
        name: Name at the start of every line.
        progress: Text, or a function that returns it. The part before the first comma is the activity.
    """
    ended = threading.Event()
    reporter = threading.Thread(target=_report, args=(name, progress, ended), name=f"progress of {name}", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


def _report(name: str, progress: ProgressText, ended: threading.Event) -> None:
    first_report_s = FIRST_REPORT_S
    begun, due_s = time.monotonic(), first_report_s
    reported = activity = ""
    activity_begun_s = 0.0
    while not ended.wait(first_report_s / _POLLS_PER_REPORT):
        elapsed_s, text = time.monotonic() - begun, progress if isinstance(progress, str) else progress()
        if text.partition(",")[0] != activity:
            activity, activity_begun_s = text.partition(",")[0], elapsed_s
        is_new_activity = reported not in ("", activity) and elapsed_s - activity_begun_s >= first_report_s
        if elapsed_s >= due_s or is_new_activity:
            print_status(name, f"{elapsed_s:6.0f} s so far: {text}")
            reported = activity
            due_s = elapsed_s + (first_report_s if elapsed_s < FREQUENT_REPORTS_S else REPORT_INTERVAL_S)


def print_status(name: str, text: str) -> None:
    """Print and log one line: the name in a column of its own, then the text with control characters escaped.

    A line that cannot be written, for example to a closed pipe, is lost; nothing is raised.
    """
    _log.info("%s: %s", name, text)
    print_stdout(escape_control_chars(f"{name:<{NAME_WIDTH}}{text}"))
