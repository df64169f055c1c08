"""Whether a change left every number of a run as it was: the quickstart's first steps, beside another commit's.

    python scripts/benchmarks/same_numbers.py --against COMMIT [--warm-up 250] [--steps 5] [key=value ...]

Warm-up, shorter than the quickstart's, and GRPO of examples/quickstart, by the code of both commits (the other one in a
worktree) and with the packages of one environment. Compared, to the last bit, are the numbers of metrics.jsonl that
both have, but for times and memory, and the weights that both runs export. Ends with 1 if any differs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from measure import about
from worktrees import trees

from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

MEASURED = ("time", "timing/", "memory/", "throughput/", "engines/", "trainer/", "async/")
"""Beginnings of names whose numbers are the machine's."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", metavar="COMMIT", required=True)
    parser.add_argument("--warm-up", type=int, default=250, metavar="STEPS", help="until some answers are right")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the GRPO run")
    given = parser.parse_args()
    print(about())
    with trees(given.against) as found, tempfile.TemporaryDirectory(prefix="same-numbers-") as folder:
        runs = [run(tree, Path(folder) / name, given) for name, tree in found.items()]
    different = 0
    for name, before, now in zip(runs[0], *(of_run.values() for of_run in runs), strict=True):
        same = {key for key in before.keys() & now.keys() if before[key] == now[key]}
        differing = sorted(before.keys() & now.keys() - same)
        alone = sorted(before.keys() ^ now.keys())
        print(f"{name}: {len(same)} equal, {len(differing)} different {differing[:20]}, in one alone: {alone}")
        different += len(differing)
    sys.exit(different > 0)


def run(tree: Path, folder: Path, given: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """By part of the quickstart: every number by step and name, and the digest of the weights."""
    script = tree / "examples" / "quickstart" / "quickstart.py"
    ours = [f"trainer.max_steps={given.steps}", f"trainer.hf_save_interval={given.steps}", *given.overrides]
    subprocess.run(
        [sys.executable, str(script), "--output", str(folder), "--warm-up-steps", str(given.warm_up), *ours],
        env=os.environ | {"PYTHONPATH": str(tree)},
        cwd=tree,
        stdout=subprocess.DEVNULL,
        check=True,
    )
    return {name: numbers(folder / name) for name in ("sft", "grpo")}


def numbers(folder: Path) -> dict[str, Any]:
    found = {
        f"step {row['step']}: {name}": value
        for row in read_jsonl(folder / METRICS_FILE)
        for name, value in row.items()
        if not name.startswith(MEASURED)
    }
    for file in folder.glob("export/*/policy/*.safetensors"):
        found[str(file.relative_to(folder))] = hashlib.sha256(file.read_bytes()).hexdigest()
    return found


if __name__ == "__main__":
    main()
