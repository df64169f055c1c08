"""A run's timeline as a file of Chrome trace events, which Perfetto opens.

A process records spans only inside `write_trace` or after `start_buffering`; otherwise `span` and `add_span` do
nothing. Times are Unix times of the node where something happened. Times of one node are comparable to the
microsecond, those of several nodes as well as their clocks agree.
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
"""Number of spans that a process buffers until `drain_spans`. Then the oldest are dropped."""
DRIVER = "driver"
_log = logging.getLogger(__name__)
_json = json.JSONEncoder(separators=(",", ":")).encode


class Span(NamedTuple):
    """A named interval of time on a track of a process."""

    name: str
    begin: float
    """Unix time, in seconds."""
    end: float
    track: str
    """Row of the timeline in which the span is shown."""
    process: str
    """Name of the process to which the track belongs."""
    overlaps: bool
    """True if spans of the track may overlap without being nested."""
    details: dict[str, Any]
    """Values that are shown with the span."""


_record: Callable[[Iterable[Span]], None] | None = None
"""Function that stores the spans of this process, or None if it is not traced."""
_buffer: deque[Span] = deque(maxlen=MAX_BUFFERED_SPANS)


def is_enabled() -> bool:
    """Return True if spans of this process are recorded."""
    return _record is not None


def add_span(
    name: str,
    begin: float,
    *,
    track: str,
    end: float | None = None,
    process: str = DRIVER,
    overlaps: bool = False,
    **details: Any,
) -> None:
    """Record a span from `begin` until `end` or now, if spans of this process are recorded.

    Args:
        name: Name of the span.
        begin: Unix time in seconds.
        track: Row of the timeline.
        end: Unix time in seconds; None for now.
        process: Name of the process.
        overlaps: True if spans of the track may overlap without being nested.
        **details: Values that are shown with the span; they must be serializable as JSON.
    """
    if _record is not None:
        _record([Span(name, begin, time.time() if end is None else end, track, process, overlaps, details)])


@contextmanager
def span(name: str, *, track: str = "trainer", overlaps: bool = False) -> Iterator[None]:
    """Record the time of the body as a span, also if the body raises; does nothing if spans are not recorded.

    Args:
        name: Name of the span.
        track: Row of the timeline.
        overlaps: True if spans of the track may overlap without being nested.
    """
    begin = time.time()
    try:
        yield
    finally:
        add_span(name, begin, track=track, overlaps=overlaps)


def to_unix_time(moment: float) -> float:
    """Return the Unix time of a value of time.monotonic()."""
    return time.time() - (time.monotonic() - moment)


def start_buffering() -> None:
    """Record the spans of this process in a buffer from now on, for another process that asks for them."""
    global _record
    _record = _buffer.extend


def drain_spans() -> list[Span]:
    """Return the spans of the buffer, oldest first, and empty it."""
    return [_buffer.popleft() for _ in range(len(_buffer))]


def ingest_spans(spans: Iterable[Span], process: str) -> None:
    """Record the spans of another process, named `process`, if spans of this process are recorded."""
    if _record is not None:
        _record(span._replace(process=process) for span in spans)


@contextmanager
def write_trace(path: Path) -> Iterator[None]:
    """Append the spans of this process, and those that it ingests, to a new file during the block.

    If the file exists or cannot be written, a warning is logged and there is no timeline; nothing is raised. The same
    applies if another `write_trace` of this process is active.
    """
    global _record
    file = _open_trace_file(path)
    if file is None:
        yield
        return
    previous, _record = _record, file.add
    try:
        yield
    finally:
        _record = previous
        file.close()


def _open_trace_file(path: Path) -> TraceFile | None:
    if isinstance(getattr(_record, "__self__", None), TraceFile):
        _log.warning("trainer.trace: another run of this process writes its timeline, so %s is not written.", path)
        return None
    try:
        return TraceFile(path)
    except OSError as error:
        _log.warning("trainer.trace: %s cannot be written (%s), so the run has no timeline.", path, error.strerror)
        return None


class TraceFile:
    """A JSON array of events, one per line. Perfetto also reads it without its closing bracket, as after kill -9.

    Thread-safe.
    """

    def __init__(self, path: Path):
        """Create the file and write its first event.

        Raises:
            OSError: The file exists, or cannot be created.
        """
        self._path = path
        self._file = path.open("xb", buffering=0)
        self._size = 0
        self._lock = threading.Lock()
        self._processes: dict[str, int] = {}
        self._rows: dict[tuple[str, str], tuple[int, int]] = {}
        self._overlapping = 0
        self._write([_metadata_event("process_name", DRIVER, pid=self._pid(DRIVER))])

    def add(self, spans: Iterable[Span]) -> None:
        """Append spans in one write. A failed write or the size limit ends the file with a warning."""
        with self._lock:
            if not self._file.closed:
                self._write(event for span in spans for event in self._events(span))

    def close(self) -> None:
        """Close the array and the file."""
        with self._lock:
            self._end()

    def _pid(self, process: str) -> int:
        return self._processes.setdefault(process, len(self._processes) + 1)

    def _events(self, span: Span) -> Iterator[dict[str, Any]]:
        if (track_ids := self._rows.get((span.process, span.track))) is None:
            if span.process not in self._processes:
                yield _metadata_event("process_name", span.process, pid=self._pid(span.process))
            track_ids = self._rows[span.process, span.track] = self._pid(span.process), len(self._rows) + 1
            yield _metadata_event("thread_name", span.track, pid=track_ids[0], tid=track_ids[1])
        begin, end = round(span.begin * 1e6), round(span.end * 1e6)
        event = {"name": span.name, "cat": span.track, "pid": track_ids[0], "tid": track_ids[1], "ts": begin}
        details = {"args": span.details} if span.details else {}
        if not span.overlaps:
            yield {"ph": "X", **event, "dur": end - begin, **details}
            return
        self._overlapping += 1
        yield {"ph": "b", **event, "id": self._overlapping, **details}
        yield {"ph": "e", **event, "id": self._overlapping, "ts": end}

    def _write(self, events: Iterable[dict[str, Any]]) -> None:
        """Append all of the events or none. The first failure and the size limit end the file."""
        text = "".join(f",\n{_json(event)}" for event in events)
        data = (text if self._size else f"[{text[1:]}").encode("ascii")
        if self._size + len(data) > MAX_TRACE_BYTES:
            _log.warning(
                "%s has %d MiB and ends here, because Perfetto cannot open larger files.", self._path, self._size >> 20
            )
            self._end()
            return
        try:
            if self._file.write(data) != len(data):
                raise OSError("no space is left")
            self._size += len(data)
        except OSError as error:
            _log.warning("%s can no longer be written and ends here (%s).", self._path, error)
            self._end()

    def _end(self) -> None:
        """Close the array after its last complete line, if the disk allows it."""
        if self._file.closed:
            return
        try:
            self._file.seek(self._size)
            self._file.truncate()
            self._file.write(b"\n]\n")
        except OSError as error:
            _log.debug("%s is not closed (%s).", self._path, error)
        self._file.close()


def _metadata_event(kind: str, name: str, **ids: int) -> dict[str, Any]:
    return {"ph": "M", "name": kind, **ids, "args": {"name": name}}
