"""What a part of the check tells, written down row by row: a part that is ended keeps what it had found by then."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


class Missing(Exception):
    """What a part needs is not on this machine: its row says so, and that is no failure."""


@dataclass(frozen=True)
class Row:
    """One figure or finding."""

    what: str
    value: str
    wanted: str = ""
    """The bound, for people; empty for a figure that nothing is asked of."""
    ok: bool = True

    def line(self) -> str:
        """For a terminal."""
        wanted = f" (wanted: {self.wanted})" if self.wanted else ""
        return f"  {'ok  ' if self.ok else 'MISS'} {self.what}: {self.value}{wanted}"


@dataclass(frozen=True)
class Setting:
    """Where a part runs."""

    device: str
    """"cuda" or "cpu"."""
    seconds: float
    """Until it is ended."""

    @property
    def toy(self) -> bool:
        """Whether sizes are those of a CPU: the same code, figures that mean nothing."""
        return self.device == "cpu"


class Report:
    """The rows of one part, in a file of JSON lines."""

    def __init__(self, file: Path):
        self._file = file
        self.rows: list[Row] = []

    def note(self, what: str, value: object, wanted: str = "", ok: bool = True) -> None:
        """A finding; `ok` tells whether it is as `wanted`."""
        row = Row(what, figure(value), wanted, bool(ok))
        self.rows.append(row)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def at_most(self, what: str, value: float, bound: float, unit: str = "") -> None:
        """A figure that must not exceed its bound; one that is no number does."""
        self.note(what, f"{figure(value)} {unit}".strip(), f"≤ {figure(bound)} {unit}".strip(), value <= bound)

    def at_least(self, what: str, value: float, bound: float, unit: str = "") -> None:
        self.note(what, f"{figure(value)} {unit}".strip(), f"≥ {figure(bound)} {unit}".strip(), value >= bound)


def read(file: Path) -> list[Row]:
    """The rows that a part has written; a last line that was cut off is left out."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def figure(value: object) -> str:
    """Four digits of a number, anything else as it is."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
