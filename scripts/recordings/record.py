"""Record the runs in tests/unit/report/recorded again: tiny real runs, healthy and with each problem.

    python scripts/recordings/record.py [NAME ...] [--work FOLDER] [--output FOLDER]

A recording keeps those rows of a run's metrics.jsonl that the rules of skyrl_train/report/diagnosis.py read. With --work,
the warm-up of the quickstart runs only once, and the folder keeps the runs for inspection.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import runs
from workspace import RecordingWorkspace

from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.experiment.base import launch_experiment
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl

RECORDED = Path(__file__).parents[2] / "tests" / "unit" / "report" / "recorded"
READ = (
    "step",
    "timing/step_s",
    "reward/mean",
    "reward/zero_variance_groups",
    "response/truncated_fraction",
    "environment/no_answer",
    "policy/entropy",
    "policy/kl",
    "policy/grad_norm",
    "mismatch/ratio_mean",
    "mismatch/kl",
    "async/trainer_idle",
    "async/engines_idle",
    "memory/learner_peak_rss_gib",
    "rollouts/max_staleness",
    "rollouts/trajectories",
    "rollouts/failed",
    "rollouts/failed/",
)
"""Names of recorded metrics; a name that ends in a slash is a prefix."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"runs to record, by default all: {' '.join(runs.RUNS)}"
    )
    parser.add_argument("--work", type=Path, help="working folder to keep; by default a temporary one")
    parser.add_argument(
        "--output", type=Path, default=RECORDED, help="folder for the recordings; by default that of the tests"
    )
    arguments = parser.parse_args()
    names = arguments.names or list(runs.RUNS)
    if unknown := sorted(set(names) - set(runs.RUNS)):
        parser.error(f"unknown runs: {' '.join(unknown)}. Choose from: {' '.join(runs.RUNS)}")
    # Ranks and environment processes import the modules of trainer.plugins from here.
    folders = [str(Path(__file__).resolve().parent), str(runs.PRESETS)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = folders
    with tempfile.TemporaryDirectory(prefix="recordings-") as temporary:
        workspace = RecordingWorkspace(arguments.work.resolve() if arguments.work else Path(temporary))
        with Cluster():  # one Ray for all
            for name in names:
                record(workspace, name, arguments.output)


def record(workspace: RecordingWorkspace, name: str, folder: Path) -> None:
    """Execute a run and write its recording to a folder."""
    start, teacher = time.monotonic(), runs.RUNS[name].teacher_run
    if teacher and not workspace.trained(teacher):
        make(workspace, teacher)
    make(workspace, name)
    rows = [json.dumps(dict(recorded_metrics(row))) for row in read_jsonl(workspace.output(name) / METRICS_FILE)]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"recorded {name}: {len(rows)} rows in {time.monotonic() - start:.0f} s", flush=True)


def make(workspace: RecordingWorkspace, name: str) -> None:
    run = runs.RUNS[name]
    overrides = workspace.overrides(name, run)
    shutil.rmtree(workspace.output(name), ignore_errors=True)
    launch_experiment(run.experiment, overrides, has_user_code=True)


def recorded_metrics(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the metrics that rules read, rounded to five digits; null stands for a value that is not finite."""
    for name, value in row.items():
        if name in READ or _begins(name, (prefix for prefix in READ if prefix.endswith("/"))) or _is_score(name):
            yield name, float(f"{value:.5g}") if isinstance(value, float) else value


def _begins(name: str, prefixes: Iterable[str]) -> bool:
    return name.startswith(tuple(prefixes))


def _is_score(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/avg_score")


if __name__ == "__main__":
    main()
