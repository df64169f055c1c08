"""Part 13: the quickstart as a user starts it, colocated, through both entrypoints, with probes at every sync."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl
from tests.gpu_check.report import Report, Setting

SCRIPT = Path(__file__).parents[2] / "examples" / "quickstart" / "quickstart.py"
LAST_LINE = re.compile(r"eval accuracy ([\d.]+) -> ([\d.]+) in (\d+) s")
MIN_RISE = 0.2


def run(setting: Setting, report: Report) -> None:
    """Run the complete quickstart on CUDA. A CPU runs two steps of easier problems, without a minimum rise.

    Raises:
        RuntimeError: The quickstart failed or printed no accuracies.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [sys.executable, str(SCRIPT), "--output", str(folder)]
        if setting.toy:
            command += ["--warm-up-steps", "2", "--operations", "2", "trainer.max_steps=2", "trainer.eval_interval=2"]
        else:
            installed = (name for name in ("vllm", "sglang") if importlib.util.find_spec(name) is not None)
            engine = next(installed, "transformers")
            command.append(f"generator.backend={engine}")
            report.note("engine", engine)
        command += [f"device={setting.device}", "trainer.placement.colocate_all=true"]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
        match = LAST_LINE.search(done.stdout)
        if done.returncode or match is None:
            print(done.stdout, file=sys.stderr)
            raise RuntimeError(f"the quickstart ended with status {done.returncode}: {done.stdout.strip()[-300:]}")
        before, after, seconds = map(float, match.groups())
        report.note("duration, s", seconds)
        report.note("accuracy before", before)
        report.note(
            "accuracy after",
            after,
            "" if setting.toy else f"≥ before + {MIN_RISE}",
            setting.toy or after - before >= MIN_RISE,
        )
        rows = list(read_jsonl(folder / "grpo" / METRICS_FILE))
    last = next(row for row in reversed(rows) if any(key.startswith("timing/") for key in row))
    for key, value in sorted(last.items()):
        if key.startswith(("timing/", "memory/", "mismatch/")) and isinstance(value, float):
            report.note(f"last step: {key}", value)
