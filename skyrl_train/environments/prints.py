"""What an environment's process prints, as lines for the person who started the run: readable and bounded."""

from __future__ import annotations

import time
from collections.abc import Callable

from skyrl_train.config.secrets import redact
from skyrl_train.messages import visible

AT_FIRST = 32 * 2**10
"""Bytes that a process can have shown before anything is left out."""
EACH_WINDOW = 4 * 2**10
"""Bytes that it can have shown in every later WINDOW_S, whatever it has printed before."""
WINDOW_S = 60.0
AT_LAST = 3 * 2**10
"""Bytes that are kept of what was left out, to be shown once the process has ended: they may say why."""
LONGEST_LINE = 400
"""Characters; a longer line is shown as several. One may become ten (`\\U000e0001`): a pipe takes that at once."""
_LONGEST_SECRET = 1000
"""Characters. So much beside a cut is not shown, or not yet: half a secret would not be recognised."""


class BoundedPrints:
    """Shows the lines that a process prints as long as its allowance lasts; the rest is counted, and said each window.

    Example: a process that prints 10 MB in a second and then crashes shows its first 32 KiB, how much was left out, and
    the last lines of that.
    """

    def __init__(
        self, name: str, show: Callable[[bytes], bool], clock: Callable[[], float] = time.monotonic, *, times: int = 1
    ):
        """`show` writes a line and says whether it could; `clock` is in seconds; `times` as much is shown."""
        self._times = times
        self._name = name
        self._show = show
        self._clock = clock
        self._allowed = times * AT_FIRST
        self._window_ends = clock() + WINDOW_S
        self._begun = b""
        """A line whose end has not been printed yet."""
        self._left_out = 0
        """Bytes since the last line that was shown."""
        self._last = b""
        """The last of them, until something is shown again."""

    def feed(self, data: bytes) -> None:
        """Take in what was printed: text, or anything else."""
        self.tick()
        if self._left_out:  # cheap: a process may print as much as a pipe can carry
            self._leave_out(data)
            return
        if self._last[-1:] not in (b"", b"\n"):  # the rest of a line that was left out may begin inside a secret
            rest, newline, data = data.partition(b"\n")
            if not newline:
                self._leave_out(rest)
                return
        self._last = b""
        self._begun += data
        if end := max(self._begun.rfind(b"\n"), self._begun.rfind(b"\r")) + 1:  # bars of progress end with the latter
            lines, self._begun = _text(self._begun[:end]), self._begun[end:]
            self._show_allowed(lines)
        elif len(self._begun) > AT_FIRST:
            text = _text(self._begun)
            self._begun = text[-_LONGEST_SECRET:].encode()
            self._show_allowed(text[:-_LONGEST_SECRET])

    def tick(self) -> None:
        """Begin a new window if it is time, and say what was left out in the one before."""
        now = self._clock()
        if now >= self._window_ends:
            self._window_ends = now + WINDOW_S
            self._allowed = max(self._allowed, self._times * EACH_WINDOW)
            if self._left_out and self._show_line(f"... {self._left_out:,} bytes more were printed"):
                self._left_out = 0

    @property
    def seconds_to_tick(self) -> float | None:
        """When `tick` will have something to say; None if it has nothing."""
        return max(0.0, self._window_ends - self._clock()) if self._left_out else None

    def close(self) -> None:
        """The process has ended: show the line that it did not end, or the last ones of what was left out."""
        if not self._left_out:
            self._show_allowed(_text(self._begun))
        if self._left_out:
            last = _text(self._last)[_LONGEST_SECRET if len(self._last) == AT_LAST else 0 :]
            said = f"... {self._left_out:,} bytes more were printed, the last of them:"
            whole = last.partition("\n")[2] or last
            all(map(self._show_line, [said, *_lines(whole)]))  # until one cannot be shown

    def _show_allowed(self, text: str) -> None:
        lines = _lines(text)
        for number, line in enumerate(lines):
            cost = len(self._shown(line))
            if cost > self._allowed or not self._show_line(line):
                self._leave_out("".join(lines[number:]).encode() + self._begun)
                self._begun = b""
                return
            self._allowed -= cost

    def _show_line(self, line: str) -> bool:
        return self._show(self._shown(line))

    def _shown(self, line: str) -> bytes:
        return f"({self._name}) {visible(line.rstrip().expandtabs())}\n".encode()

    def _leave_out(self, data: bytes) -> None:
        self._left_out += len(data)
        self._last = (self._last + data)[-AT_LAST:]


def _lines(text: str) -> list[str]:
    """With their ends, and in pieces if they are long."""
    return [
        line[start : start + LONGEST_LINE]
        for line in text.splitlines(keepends=True)
        for start in range(0, len(line), LONGEST_LINE)
    ]


def _text(data: bytes) -> str:
    return redact(data.decode(errors="backslashreplace"))
