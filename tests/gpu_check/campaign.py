"""A campaign runs each part in a separate process group and stores the results in one JSON file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.gpu_check.parts import PARTS, Part
from tests.gpu_check.report import Missing, Report, Row, Setting, read_rows

MAX_PART_S = 480.0
"""Maximum duration of a part in seconds. GPU machines are often available only for minutes."""
MISSING = 3
"""Exit status of a part's process if a requirement is missing."""
DONE = ("passed", "failed", "missing")
"""States of parts that run again only on request. A part that exceeded its deadline ("cut off") runs again."""


class Campaign:
    """A sequence of parts whose results are saved to a JSON file after each part."""

    def __init__(self, file: Path, device: str):
        self._file = file
        self._device = device
        self._results: dict[str, Any] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
        file.parent.mkdir(parents=True, exist_ok=True)

    def run_parts(self, chosen: Sequence[int], minutes: float, again: bool = False) -> bool:
        """Run the chosen parts until the time is up, and print their results.

        Args:
            chosen: Numbers of parts, from 1.
            minutes: Time limit of this call.
            again: Run parts that already have a result on this device, too.

        Returns:
            True if no part that ran failed or exceeded its deadline.
        """
        deadline = time.monotonic() + 60 * minutes
        success = True
        for number, part in enumerate(PARTS, 1):
            if number not in chosen or (not again and self.state(part) in DONE):
                continue
            remaining_s = min(MAX_PART_S, deadline - time.monotonic())
            if remaining_s < 1:
                print(f"{number} {part.name}: no time left; run the same command again to continue here")
                continue
            print(f"{number} {part.name}: {part.what}", flush=True)
            result = self._run(part, remaining_s)
            self._results[self._key(part)] = result
            self._write()
            print("\n".join(Row(**row).line() for row in result["rows"]))
            success = success and result["state"] in ("passed", "missing")
            print(f"{number} {part.name}: {result['state']} in {result['seconds']:.0f} s {result['said']}", flush=True)
        return success

    def state(self, part: Part) -> str:
        """Return "passed", "failed", "missing", "cut off" or "not run": the state of a part on this device."""
        return str(self._results.get(self._key(part), {}).get("state", "not run"))

    def table(self) -> str:
        """Return a Markdown table with a row per figure."""
        lines = ["| part | what | value | required | |", "| --- | --- | --- | --- | --- |"]
        for number, part in enumerate(PARTS, 1):
            result = self._results.get(self._key(part))
            name = f"{number} {part.name}"
            if result is None:
                lines.append(f"| {name} | {part.what} | not run | | |")
                continue
            for row in result["rows"]:
                cells = [name, row["what"], row["value"], row["wanted"], "" if row["ok"] else "MISS"]
                lines.append("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |")
            reason = result["said"].replace("|", "/").replace("\n", " ")
            lines.append(f"| {name} | **{result['state']}** in {result['seconds']:.0f} s | {reason} | | |")
        return "\n".join(lines)

    def _key(self, part: Part) -> str:
        return f"{self._device}/{part.name}"

    def _run(self, part: Part, seconds: float) -> dict[str, Any]:
        rows = self._file.with_suffix(f".{part.name}.rows")
        log = self._file.with_suffix(f".{part.name}.log")
        rows.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.gpu_check", "--child", part.name, "--device", self._device]
        start = time.monotonic()
        with log.open("wb") as output:
            child = subprocess.Popen(
                [*command, "--seconds", str(seconds), "--rows", str(rows)],
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                kill_process_group(child)
        results = read_rows(rows)
        rows.unlink(missing_ok=True)
        state, reason = judge_result(status, results, log, seconds)
        return {
            "state": state,
            "seconds": time.monotonic() - start,
            "said": reason,
            "rows": [asdict(row) for row in results],
        }

    def _write(self) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(self._results, indent=1, ensure_ascii=False), encoding="utf-8")
        temporary.replace(self._file)
        self._file.with_suffix(".md").write_text(self.table() + "\n", encoding="utf-8")


def judge_result(status: int | None, rows: Sequence[Row], log: Path, seconds: float) -> tuple[str, str]:
    """Return the state of a part that has ended, and the reason (empty if it passed).

    Args:
        status: Exit status of the part's process; None if the process exceeded its deadline and was killed.
        rows: Results that the part has written.
        log: Output of the process.
        seconds: Time limit of the part.
    """
    if status is None:
        return "cut off", f"after {seconds:.0f} s; see {log.name} for stack traces and output"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if status == MISSING:
        return "missing", lines[-1]
    if status != 0:
        return "failed", f"{lines[-1][:300] if lines else f'exit status {status}'}; see {log.name}"
    misses = sum(not row.ok for row in rows)
    return ("failed", f"{misses} of {len(rows)} results do not meet their requirement") if misses else ("passed", "")


def kill_process_group(child: subprocess.Popen[bytes]) -> None:
    """Kill and reap the remaining processes of a part, including engines and ranks."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def run_child(name: str, setting: Setting, rows: Path) -> int:
    """Run a part in this process, write its results to the file `rows`, and return the exit status."""
    part = next(part for part in PARTS if part.name == name)
    try:
        part.load()(setting, Report(rows))
    except Missing as missing:
        print(missing, file=sys.stderr)
        return MISSING
    return 0
