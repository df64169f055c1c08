"""Results of a part, written row by row: a part that is killed keeps the rows it has written."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


class Missing(Exception):
    """Error raised if a requirement of a part is missing on this machine. The part is reported, and does not fail."""


@dataclass(frozen=True)
class Row:
    """One figure or finding."""

    what: str
    value: str
    wanted: str = ""
    """The bound as text; empty for a figure without one."""
    ok: bool = True

    def line(self) -> str:
        """Return a line for a terminal."""
        wanted = f" (wanted: {self.wanted})" if self.wanted else ""
        return f"  {'ok  ' if self.ok else 'MISS'} {self.what}: {self.value}{wanted}"


@dataclass(frozen=True)
class Setting:
    """The device and the time limit of a part."""

    device: str
    """"cuda" or "cpu"."""
    seconds: float
    """Time limit in seconds."""

    @property
    def toy(self) -> bool:
        """True if sizes are those of a CPU: the same code, with meaningless figures."""
        return self.device == "cpu"


class Report:
    """The rows of one part, in a file of JSON lines."""

    def __init__(self, file: Path):
        self._file = file
        self.rows: list[Row] = []

    def note(self, what: str, value: object, wanted: str = "", ok: bool = True) -> None:
        """Add a finding. `ok` is True if it is as `wanted`."""
        row = Row(what, figure(value), wanted, bool(ok))
        self.rows.append(row)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def at_most(self, what: str, value: float, bound: float, unit: str = "") -> None:
        """Add a figure that must not exceed its bound. NaN fails."""
        self.note(what, f"{figure(value)} {unit}".strip(), f"≤ {figure(bound)} {unit}".strip(), value <= bound)

    def at_least(self, what: str, value: float, bound: float, unit: str = "") -> None:
        self.note(what, f"{figure(value)} {unit}".strip(), f"≥ {figure(bound)} {unit}".strip(), value >= bound)


def read(file: Path) -> list[Row]:
    """Return the rows that a part has written, without an incomplete last line."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def figure(value: object) -> str:
    """Return a number with four digits, and other values as they are."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
