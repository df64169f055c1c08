"""Comparison of a run's output with a stored text, without the parts that differ from run to run."""

from __future__ import annotations

import difflib
import itertools
import os
import re
from pathlib import Path

UPDATE = "UPDATE_SNAPSHOTS"
"""Environment variable. If it is set, the stored texts are rewritten instead of compared."""
_NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?\b%?")
_VARYING: tuple[tuple[str, str], ...] = (
    (r"^.* so far: .*\n", ""),  # progress of long phases, which appears only on slow machines
    (r"\\x1b\[[\d;]*m", ""),
    (r"in steps: .*", "in steps: SHARES"),
    (r" s \((generate|update) [^)]*\)", " s (PHASES)"),  # very short phases are left out
    (r"eta .*", "eta DURATION"),
    (r"^(first rollout) .*(?= \(reward)", r"\1 # s TEXT"),
    (r"/\S+/(?=\w+_plugin\.py)", "PLUGINS/"),
    (r"(?m)^  (prompt|answer)   .*", r"  \1   TEXT"),
    (r"stopped by \w+", "stopped by REASON"),
    (r"process \d+", "process N"),
    (r"died during \w+: .*?(?= Its output is in)", "died during CALL: HOW."),
    (r"[0-9a-f]{16,}", "ID"),
)


def normalize_output(text: str, folder: Path) -> str:
    """Return `text` with # for numbers and FOLDER for the run's folder. Lines that are then equal become one."""
    text = text.replace(str(folder), "FOLDER").replace(str(Path(__file__).parents[2]), "REPOSITORY")
    for pattern, instead in _VARYING:
        text = re.sub(pattern, instead, text, flags=re.MULTILINE)
    text = _NUMBER.sub("#", text)
    text = re.sub(r"# (min|h|d) # (s|min|h)\b", "# s", text)
    lines = [re.sub(r" +", " ", line).rstrip() for line in text.splitlines()]
    return "\n".join(line for line, _ in itertools.groupby(lines)) + "\n"


def assert_matches_snapshot(text: str, folder: Path, kept: Path) -> None:
    """Compare a run's output with the file `kept`, which UPDATE_SNAPSHOTS=1 rewrites."""
    said = normalize_output(text, folder)
    if os.environ.get(UPDATE):
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(said)
    differs = difflib.unified_diff(kept.read_text().splitlines(), said.splitlines(), str(kept.name), "now", lineterm="")
    assert said == kept.read_text(), "\n".join(differs)
