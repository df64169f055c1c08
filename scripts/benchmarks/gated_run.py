"""Run the training entrypoint with a barrier before every step: `python gated_run.py key=value ...`."""

from __future__ import annotations

import math
import os
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from measure import StepBarrier

from skyrl_train.engines.base import Completion, SampleRequest
from skyrl_train.experiment import engines, learner
from skyrl_train.experiment.base import Experiment, run_experiment
from skyrl_train.report.protocol import SampleRow
from skyrl_train.report.trackers import Trackers

GATED = "BENCHMARK_GATED_STEPS"
"""The environment variable with the steps after which the run waits, separated by commas; by default after each."""
THREADS = "BENCHMARK_THREADS"
"""The environment variable with the threads of each rank and engine; by default they share all cores, as in a run."""
LENGTHS = "BENCHMARK_LENGTHS"
"""The environment variable with "mean,sigma" of log-normal response lengths in tokens; by default the maximum."""


class BarrierTracker:
    """A tracker that waits at the barrier between steps. A step lasts from one call of `log` to the next."""

    def __init__(self) -> None:
        self._gate = StepBarrier()
        self._steps = {int(step) for step in os.environ.get(GATED, "").split(",") if step}

    def begin(self, step: int, total_steps: int) -> None:
        self._gate.wait()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step and (
            not self._steps or step in self._steps
        ):  # step 0 is the publication of weights before the first step
            self._gate.wait(metrics)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        pass

    def close(self) -> None:
        pass


class BarrierExperiment(Experiment):
    """An experiment with a barrier after its trackers, whose work thereby counts for the step."""

    def build_tracker(self, directory: Path) -> Any:
        return Trackers({"run": super().build_tracker(directory), "gate": BarrierTracker()})

    def build_client(self, engines: Sequence[Any]) -> Any:
        """Return a client that samples past end-of-sequence tokens, so that the length of a response is known."""
        client = super().build_client(engines)
        generate, lengths = client.generate, os.environ.get(LENGTHS)

        def with_length(request: SampleRequest) -> SampleRequest:
            tokens = request.sampling.max_tokens
            if lengths:
                mean, sigma = map(float, lengths.split(","))
                tokens = drawn_length(mean, sigma, request.seed, tokens)
            return replace(request, sampling=replace(request.sampling, max_tokens=tokens, ignore_eos=True))

        async def generate_past_eos(requests: Sequence[SampleRequest], **options: Any) -> list[Completion]:
            return await generate([with_length(request) for request in requests], **options)

        client.generate = generate_past_eos  # type: ignore[method-assign]
        return client


def drawn_length(mean: float, sigma: float, seed: int, longest: int) -> int:
    """Return a log-normal length from 1 to `longest`; the same for the same seed."""
    drawn = random.Random(seed).lognormvariate(math.log(mean) - sigma**2 / 2, sigma)
    return max(1, min(longest, round(drawn)))


def compute_with(threads: int) -> None:
    for module in (engines, learner):
        setattr(module, "threads_per_process", lambda *_: threads)  # noqa: B010


if __name__ == "__main__":
    if THREADS in os.environ:
        compute_with(int(os.environ[THREADS]))
    run_experiment(BarrierExperiment)
