"""Make the recorded runs of tests/unit/report/recorded anew: real tiny runs with and without each illness.

    python scripts/recordings/record.py [NAME ...] [--work FOLDER] [--output FOLDER]

Of a run's metrics.jsonl a recording keeps what the rules of skyrl_train/report/diagnosis.py read. With a folder to work
in, the warm-up of the quickstart is done once, and runs are there to be looked at.
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
"""Names of metrics that are kept; those that end in a slash stand for all that begin so."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {' '.join(runs.RUNS)}; all of them if none is given"
    )
    parser.add_argument("--work", type=Path, help="a folder to keep; without it a temporary one")
    parser.add_argument("--output", type=Path, default=RECORDED, help="where recordings go, instead of to the tests")
    arguments = parser.parse_args()
    names = arguments.names or list(runs.RUNS)
    if unknown := sorted(set(names) - set(runs.RUNS)):
        parser.error(f"no such runs: {' '.join(unknown)}")
    # Where ranks and environment processes find what runs name in trainer.plugins.
    folders = [str(Path(__file__).resolve().parent), str(runs.PRESETS)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")])
    sys.path[:0] = folders
    with tempfile.TemporaryDirectory(prefix="recordings-") as temporary:
        workshop = RecordingWorkspace(arguments.work.resolve() if arguments.work else Path(temporary))
        with Cluster():  # one Ray for all
            for name in names:
                record(workshop, name, arguments.output)


def record(workshop: RecordingWorkspace, name: str, folder: Path) -> None:
    """Make the run and write its recording into a folder."""
    begun, teacher = time.monotonic(), runs.RUNS[name].teacher_run
    if teacher and not workshop.trained(teacher):
        make(workshop, teacher)
    make(workshop, name)
    rows = [json.dumps(dict(kept(row))) for row in read_jsonl(workshop.output(name) / METRICS_FILE)]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.jsonl").write_text("".join(f"{row}\n" for row in rows), encoding="utf-8")
    print(f"recorded {name}: {len(rows)} rows in {time.monotonic() - begun:.0f} s", flush=True)


def make(workshop: RecordingWorkspace, name: str) -> None:
    run = runs.RUNS[name]
    overrides = workshop.overrides(name, run)
    shutil.rmtree(workshop.output(name), ignore_errors=True)
    launch_experiment(run.experiment, overrides, has_user_code=True)


def kept(row: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What rules read, to five digits; null is what was not finite."""
    for name, value in row.items():
        if name in READ or _begins(name, (one for one in READ if one.endswith("/"))) or _is_score(name):
            yield name, float(f"{value:.5g}") if isinstance(value, float) else value


def _begins(name: str, prefixes: Iterable[str]) -> bool:
    return name.startswith(tuple(prefixes))


def _is_score(name: str) -> bool:
    return name.startswith("eval/") and name.endswith("/avg_score")


if __name__ == "__main__":
    main()
