"""Results of a part. Each row is written at once, so that the rows of a killed part survive."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path


class Missing(Exception):
    """Error raised if a requirement of a part is missing on this machine. The part is reported, and does not fail."""


@dataclass(frozen=True)
class Row:
    """One result: a measured value, or the outcome of a check."""

    what: str
    value: str
    wanted: str = ""
    """The requirement as text; empty for a value without one."""
    ok: bool = True
    """False if the value does not meet its requirement."""

    def line(self) -> str:
        """Return a line for a terminal."""
        requirement = f" (required: {self.wanted})" if self.wanted else ""
        return f"  {'ok  ' if self.ok else 'MISS'} {self.what}: {self.value}{requirement}"


@dataclass(frozen=True)
class Setting:
    """The device and the time limit of a part."""

    device: str
    """"cuda" or "cpu"."""
    seconds: float
    """Time limit in seconds."""

    @property
    def toy(self) -> bool:
        """True if the part runs the same code at sizes that suit a CPU. Its figures are then meaningless."""
        return self.device == "cpu"


class Report:
    """The rows of one part, in a file of JSON lines."""

    def __init__(self, file: Path):
        self._file = file
        self.rows: list[Row] = []

    def note(self, what: str, value: object, wanted: str = "", ok: bool = True) -> None:
        """Add a result. `ok` is True if it meets the requirement `wanted`."""
        row = Row(what, format_value(value), wanted, bool(ok))
        self.rows.append(row)
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def at_most(self, what: str, value: float, bound: float, unit: str = "") -> None:
        """Add a value that must not exceed its bound. NaN fails."""
        self.note(
            what, f"{format_value(value)} {unit}".strip(), f"≤ {format_value(bound)} {unit}".strip(), value <= bound
        )

    def at_least(self, what: str, value: float, bound: float, unit: str = "") -> None:
        """Add a value that must not be below its bound. NaN fails."""
        self.note(
            what, f"{format_value(value)} {unit}".strip(), f"≥ {format_value(bound)} {unit}".strip(), value >= bound
        )


def read_rows(file: Path) -> list[Row]:
    """Return the rows that a part has written. Skip an incomplete last line."""
    lines = file.read_text(encoding="utf-8").split("\n")[:-1] if file.exists() else []
    return [Row(**json.loads(line)) for line in lines]


def format_value(value: object) -> str:
    """Format a float with four significant digits, an integer with thousands separators, and other values with str."""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1000 <= abs(value) < 1e12 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
