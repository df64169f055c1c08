"""What a run is doing while it says nothing else: the start phase by phase, and whatever lasts now and then."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from skyrl_train import trace
from skyrl_train.messages import to_stdout, visible

_log = logging.getLogger(__name__)
NAMED_AFTER_S = 4.0
"""Time after which a phase, a step or an evaluation that has not ended is named."""
OFTEN_FOR_S = SELDOM_S = 60.0
"""So long a wait is named as often as at first, then once in this time: steps of hours leave a log that can be read."""
_LOOKS = 10
"""At what is waited for, until the first line."""
WIDTH = 14
"""Of the column of names."""
WaitsFor = str | Callable[[], str]


@contextmanager
def phase(name: str, waits_for: WaitsFor) -> Iterator[None]:
    """A part of the start. When it has ended, how long it took is said; if it raises, the error says enough."""
    begun = time.monotonic()
    with waiting(name, waits_for), trace.span(f"start: {name}"):
        yield
    say(name, f"{time.monotonic() - begun:6.1f} s")


@contextmanager
def waiting(name: str, waits_for: WaitsFor) -> Iterator[None]:
    """While this lasts, print what it waits for every NAMED_AFTER_S; every minute, when it has lasted for one.

    What comes next ("generate, 3 of 8 groups", then "update") is printed as soon as it takes NAMED_AFTER_S itself.
    """
    ended = threading.Event()
    watch = threading.Thread(target=_watch, args=(name, waits_for, ended), name=f"watch of {name}", daemon=True)
    watch.start()
    try:
        yield
    finally:
        ended.set()
        watch.join()


def _watch(name: str, waits_for: WaitsFor, ended: threading.Event) -> None:
    after_s = NAMED_AFTER_S
    begun, due_s = time.monotonic(), after_s
    said = doing = ""
    since_s = 0.0
    while not ended.wait(after_s / _LOOKS):
        lasts_s, waits = time.monotonic() - begun, waits_for if isinstance(waits_for, str) else waits_for()
        if waits.partition(",")[0] != doing:
            doing, since_s = waits.partition(",")[0], lasts_s
        if lasts_s >= due_s or (said not in ("", doing) and lasts_s - since_s >= after_s):
            say(name, f"{lasts_s:6.0f} s so far: {waits}")
            said, due_s = doing, lasts_s + (after_s if lasts_s < OFTEN_FOR_S else SELDOM_S)


def say(name: str, text: str) -> None:
    """One line on standard output; lost where it cannot be written, which ends nothing."""
    _log.info("%s: %s", name, text)
    to_stdout(visible(f"{name:<{WIDTH}}{text}"))
