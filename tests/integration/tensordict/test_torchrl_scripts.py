"""Scripts written for TorchRL run after a change of their import lines only."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import skyrl_train.tensordict

SCRIPTS = sorted((Path(__file__).parent / "scripts").glob("*.py"))
OURS = dir(skyrl_train.tensordict)
IMPORT = re.compile(r"^from torchrl[\w.]* import (.+)$", re.MULTILINE)
ENDS = {"conversation": "conversation held", "grpo": "two steps of GRPO"}


def ported(code: str) -> str:
    """Return the script with imports from this package where it has the name. Other imports stay TorchRL's."""

    def replaced(line: re.Match[str]) -> str:
        names = [name.strip() for name in line[1].split(",")]
        ours = [name for name in names if name in OURS]
        theirs = [name for name in names if name not in ours]
        source = line[0].partition(" import ")[0]
        new = [f"from skyrl_train.tensordict import {', '.join(ours)}"] if ours else []
        return "\n".join([*new, *([f"{source} import {', '.join(theirs)}"] if theirs else [])])

    return IMPORT.sub(replaced, code)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_it_runs_with_other_imports(script: Path, tiny_model_path: str, tmp_path: Path):
    file = tmp_path / script.name
    file.write_text(ported(script.read_text()))
    changed = [
        (old, new)
        for old, new in zip(script.read_text().splitlines(), file.read_text().splitlines(), strict=False)
        if old != new
    ]
    assert changed and "from skyrl_train.tensordict import" in file.read_text()
    done = subprocess.run([sys.executable, str(file), tiny_model_path], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert ENDS[script.stem] in done.stdout
