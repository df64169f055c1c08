"""Run the training entrypoint, and print the seconds of each phase up to the first step as JSON on the last line.

`startup.py` runs this program. Times count from the start of the process.
"""

from __future__ import annotations

import json
import time
from typing import Any

import psutil

from skyrl_train.config.schema import Config
from skyrl_train.experiment.base import Experiment, run_experiment

STARTED = psutil.Process().create_time()
_ended: dict[str, float] = {}


def mark_phase_end(phase: str) -> None:
    """Record the end of a phase; only the first call for a phase counts."""
    _ended.setdefault(phase, time.time() - STARTED)


class Timed(Experiment):
    """An experiment that records when its parts are ready."""

    def __init__(self, cfg: Config):
        mark_phase_end("python, configuration")
        import ray

        connect = ray.init

        def init(*args: Any, **kwargs: Any) -> Any:
            mark_phase_end("import of ray")
            context = connect(*args, **kwargs)
            mark_phase_end("ray.init")
            return context

        ray.init = init
        super().__init__(cfg)
        mark_phase_end("imports, tokenizer, data")

    def build_trainer(self, running: Any, schedule: Any = None) -> Any:
        """Build the trainer, and record the ends of its start and its first step."""
        mark_phase_end("ranks and engines")
        trainer = super().build_trainer(running, schedule)
        start, step = trainer._start, trainer._step

        async def started() -> None:
            await start()
            mark_phase_end("weights")

        async def stepped() -> None:
            await step()
            mark_phase_end("first step")

        trainer._start, trainer._step = started, stepped  # type: ignore[method-assign]
        return trainer


def main() -> None:
    run_experiment(Timed)
    times = [0.0, *_ended.values()]
    print(json.dumps({phase: times[i + 1] - times[i] for i, phase in enumerate(_ended)}))


if __name__ == "__main__":
    main()
