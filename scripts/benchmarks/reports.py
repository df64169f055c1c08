"""What a run's reports cost: the CPU-seconds of a step that are spent in them.

    python scripts/benchmarks/reports.py [--steps 9] [--json FILE] [key=value ...]

The work is that of grpo_step.py. Counted in the driver, by the clock of the thread that does it: trackers
(metrics.jsonl, samples.jsonl, the console's lines, the diagnosis), lines about what a step waits for and the threads
that watch it, and all that is written to the driver's log. Their share is of the CPU-seconds of all processes of the
run. Medians. Wanted: at most 1 %.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measure import Gate, Side, about, in_turns, line
from workload import SMALL, Work, assert_did, prompt_texts, run_command, save_model, write_prompts

from skyrl_train.experiments.base import Experiment, run_experiment
from skyrl_train.report import phases
from skyrl_train.report.trackers import Trackers

WARM_UP = 2
RUN = "BENCHMARK_RUN"
SPENT = "reports/cpu_s"
"""In what a step is told: seconds since the step before."""


class Spent:
    """CPU-seconds of threads while they are inside; one that is inside already counts once."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._inside = False

    @contextmanager
    def counted(self) -> Iterator[None]:
        if self._inside:
            yield
            return
        self._inside, begun = True, time.thread_time()
        try:
            yield
        finally:
            self._inside = False
            self._seconds += time.thread_time() - begun

    def wrapped(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.counted():
                return function(*args, **kwargs)

        return call

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Of a function that is a thread's own."""

        def call(*args: Any) -> None:
            function(*args)
            self._seconds += time.thread_time()

        return call

    def take(self) -> float:
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class GatedReports:
    """Tells what was spent since the step before."""

    def __init__(self, reports: Trackers, spent: Spent):
        self._gate, self._reports, self._spent = Gate(), reports, spent

    def begin(self, step: int, total_steps: int) -> None:
        self._reports.begin(step, total_steps)
        self._gate.wait()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self._spent.counted():
            self._reports.log(metrics, step)
        if step:
            self._gate.wait({**metrics, SPENT: self._spent.take()})

    def samples(self, rows: Any, step: int) -> None:
        with self._spent.counted():
            self._reports.samples(rows, step)

    def table(self, rows: Any, step: int) -> None:
        with self._spent.counted():
            self._reports.table(rows, step)

    def close(self) -> None:
        self._reports.close()


class ReportsExp(Experiment):
    def build_tracker(self, directory: Path) -> Any:
        spent = Spent()
        logging.Handler.handle = spent.wrapped(logging.Handler.handle)  # type: ignore[method-assign]
        phases._watch = spent.watched(phases._watch)
        return Trackers({"run": GatedReports(super().build_tracker(directory), spent)})


def measure(options: argparse.Namespace) -> dict[str, Any]:
    work, total = Work(), WARM_UP + options.steps
    with tempfile.TemporaryDirectory(prefix="reports-") as name:
        folder = Path(name)
        save_model(folder / "model", SMALL)
        write_prompts(folder / "prompts.jsonl", prompt_texts(work.prompts * total, work.prompt_tokens))
        command = run_command(folder, folder / "model", work, total, "fsdp2", options.overrides)
        with Side("run", [sys.executable, __file__, *command[2:]], folder, {RUN: "1"}) as side:
            steps = in_turns([side], WARM_UP, options.steps)["run"]
    assert_did(work, steps)
    spent = statistics.median(step.told[SPENT] for step in steps)
    whole = statistics.median(step.total_cpu_s for step in steps)
    return {"reports_cpu_s": spent, "step_cpu_s": whole, "share": spent / whole}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the results here")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="more configuration of the run")
    options = parser.parse_args()
    machine = about("torch", "ray")
    found = measure(options)
    print(line(machine))
    print("| CPU-s of a step | of these in reports | share |\n| --- | --- | --- |")
    print("| {step_cpu_s:.2f} | {reports_cpu_s:.4f} | {share:.2%} |".format(**found))
    if options.json:
        options.json.write_text(json.dumps({"about": machine, **found}, indent=1) + "\n")


if __name__ == "__main__":
    if RUN in os.environ:
        run_experiment(ReportsExp)
    else:
        main()
