"""A run's time line: who did what when, as a file of Chrome trace events, which Perfetto opens.

A process notes spans only inside `to_file` or after `collect`; otherwise `span` and `add` do nothing. Times are Unix
times of the machine where something happened: those of one machine can be compared to the microsecond, those of several
as well as their clocks agree.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

TRACE_FILE = "trace.json"
MAX_TRACE_BYTES = 256 * 2**20
"""Size at which the file ends: about two million spans, which Perfetto still opens in a browser."""
MAX_BUFFERED_SPANS = 1 << 16
"""How many spans a process keeps until they are asked for; after that it forgets the oldest."""
DRIVER = "driver"
_log = logging.getLogger(__name__)
_json = json.JSONEncoder(separators=(",", ":")).encode


class Span(NamedTuple):
    """Something that took time."""

    name: str
    begin: float
    """Unix time, in seconds."""
    end: float
    track: str
    """Where it is shown among what its process does."""
    process: str
    overlaps: bool
    """Whether others of its row may begin before it ends, and not only inside it."""
    details: dict[str, Any]


_note: Callable[[Iterable[Span]], None] | None = None
"""Where spans of this process go; None if it is not traced."""
_collected: deque[Span] = deque(maxlen=MAX_BUFFERED_SPANS)


def is_enabled() -> bool:
    """Whether spans of this process are noted."""
    return _note is not None


def add_span(
    name: str, begin: float, *, track: str, process: str = DRIVER, overlaps: bool = False, **details: Any
) -> None:
    """Note a span from `begin` (Unix time) until now."""
    if _note is not None:
        _note([Span(name, begin, time.time(), track, process, overlaps, details)])


@contextmanager
def span(name: str, *, track: str = "trainer", overlaps: bool = False) -> Iterator[None]:
    """Note how long a block takes, also if it raises."""
    begin = time.time()
    try:
        yield
    finally:
        add_span(name, begin, track=track, overlaps=overlaps)


def to_unix_time(moment: float) -> float:
    """The Unix time of a moment of time.monotonic()."""
    return time.time() - (time.monotonic() - moment)


def start_buffering() -> None:
    """Note spans of this process from now on, for a process that asks for them."""
    global _note
    _note = _collected.extend


def drain_spans() -> list[Span]:
    """What was collected since the last call."""
    return [_collected.popleft() for _ in range(len(_collected))]


def ingest_spans(spans: Iterable[Span], process: str) -> None:
    """Note what another process handed over, under the name `process`."""
    if _note is not None:
        _note(one._replace(process=process) for one in spans)


@contextmanager
def write_trace(path: Path) -> Iterator[None]:
    """Inside, spans of this process and those that it takes over are appended to `path`, which must not exist.

    A file that cannot be written costs the time line, and is said; the run goes on.
    """
    global _note
    file = _opened(path)
    if file is None:
        yield
        return
    before, _note = _note, file.add
    try:
        yield
    finally:
        _note = before
        file.close()


def _opened(path: Path) -> TraceFile | None:
    if isinstance(getattr(_note, "__self__", None), TraceFile):
        _log.warning("trainer.trace: another run of this process has a time line: %s is not written.", path)
        return None
    try:
        return TraceFile(path)
    except OSError as error:
        _log.warning("trainer.trace: %s cannot be written (%s): the run has no time line.", path, error.strerror)
        return None


class TraceFile:
    """An array of events, a line each. Perfetto also reads it without its closing bracket, as it is after kill -9."""

    def __init__(self, path: Path):
        self._path = path
        self._file = path.open("xb", buffering=0)
        self._size = 0
        self._lock = threading.Lock()
        self._processes: dict[str, int] = {}
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}
        self._overlapping = 0
        self._write([_named("process_name", DRIVER, pid=self._pid(DRIVER))])

    def add(self, spans: Iterable[Span]) -> None:
        """Append spans, in one write."""
        with self._lock:
            if not self._file.closed:
                self._write(event for span in spans for event in self._events(span))

    def close(self) -> None:
        with self._lock:
            self._end()

    def _pid(self, process: str) -> int:
        return self._processes.setdefault(process, len(self._processes) + 1)

    def _events(self, span: Span) -> Iterator[dict[str, Any]]:
        if (place := self._rows.get((span.process, span.track))) is None:
            if span.process not in self._processes:
                yield _named("process_name", span.process, pid=self._pid(span.process))
            place = self._rows[span.process, span.track] = self._pid(span.process), len(self._rows) + 1
            yield _named("thread_name", span.track, pid=place[0], tid=place[1])
        begin, end = round(span.begin * 1e6), round(span.end * 1e6)
        event = {"name": span.name, "cat": span.track, "pid": place[0], "tid": place[1], "ts": begin}
        details = {"args": span.details} if span.details else {}
        if not span.overlaps:
            yield {"ph": "X", **event, "dur": end - begin, **details}
            return
        self._overlapping += 1
        yield {"ph": "b", **event, "id": self._overlapping, **details}
        yield {"ph": "e", **event, "id": self._overlapping, "ts": end}

    def _write(self, events: Iterable[dict[str, Any]]) -> None:
        """Append events, all of them or none; the first failure and the limit end the file."""
        text = "".join(f",\n{_json(event)}" for event in events)
        data = (text if self._size else f"[{text[1:]}").encode("ascii")
        if self._size + len(data) > MAX_TRACE_BYTES:
            _log.warning("%s has %d MiB and ends here: Perfetto opens no larger ones.", self._path, self._size >> 20)
            self._end()
            return
        try:
            if self._file.write(data) != len(data):
                raise OSError("no room is left")
            self._size += len(data)
        except OSError as error:
            _log.warning("%s cannot be written any more and ends here (%s).", self._path, error)
            self._end()

    def _end(self) -> None:
        """Close the array behind its last whole line, if the disk takes it."""
        if self._file.closed:
            return
        try:
            self._file.seek(self._size)
            self._file.truncate()
            self._file.write(b"\n]\n")
        except OSError as error:
            _log.debug("%s is not closed (%s).", self._path, error)
        self._file.close()


def _named(what: str, name: str, **where: int) -> dict[str, Any]:
    return {"ph": "M", "name": what, **where, "args": {"name": name}}
