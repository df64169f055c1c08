"""`python gated_run.py key=value ...`: the training entrypoint, with a gate before every step."""

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
"""In a run's environment: the steps after which it stands still, separated by commas; unset: after each."""
THREADS = "BENCHMARK_THREADS"
"""In a run's environment: of each rank and engine; unset: as a run has it, all that the others leave."""
LENGTHS = "BENCHMARK_LENGTHS"
"""In a run's environment: "mean,sigma" of answers' log-normal lengths in tokens; unset: as long as they may be."""


class BarrierTracker:
    """Stands still between steps. A step lasts from one call of `log` to the next: whatever a run does is in it."""

    def __init__(self) -> None:
        self._gate = StepBarrier()
        self._steps = {int(step) for step in os.environ.get(GATED, "").split(",") if step}

    def begin(self, step: int, total_steps: int) -> None:
        self._gate.wait()

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        if step and (not self._steps or step in self._steps):  # before the first step weights are published
            self._gate.wait(metrics)

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        pass

    def close(self) -> None:
        pass


class BarrierExperiment(Experiment):
    """Its trackers first, so that what they do with a step's numbers is counted to the step."""

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
