"""Times of the phases in which a rank of vLLM starts. Imports vLLM: see engine.py.

`worker` imports this module, so the rank itself takes the times, in whatever process it runs. vLLM calls its worker
through one class on all platforms, whose methods this module wraps.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple

from vllm.v1.worker.worker_base import WorkerWrapperBase


class RankPhase(NamedTuple):
    """A phase of a rank's start, in Unix times of its node."""

    name: str
    begin: float
    end: float


Measure = Callable[[Any], AbstractContextManager[None]]
"""A context manager that takes vLLM's worker, and adds the phases of its body to `worker.startup_phases`."""


def _wrap(method: str, measure: Measure) -> None:
    """Measure a method of vLLM's worker whenever vLLM calls it."""
    original = vars(WorkerWrapperBase).get(method)

    def measured(self: Any, *args: Any, **kwargs: Any) -> Any:
        vars(self.worker).setdefault("startup_phases", [])
        with measure(self.worker):
            return original(self, *args, **kwargs) if original else getattr(self.worker, method)(*args, **kwargs)

    setattr(WorkerWrapperBase, method, measured)


@contextmanager
def _one_phase(worker: Any, *, name: str) -> Iterator[None]:
    begin = time.time()
    yield
    worker.startup_phases.append(RankPhase(name, begin, time.time()))


@contextmanager
def _compile_and_profile(worker: Any) -> Iterator[None]:
    """Split the measurement of memory, which begins with the compilation. vLLM takes the compilation's time itself."""
    begin = time.time()
    yield
    end = time.time()
    compiled = min(end, begin + worker.vllm_config.compilation_config.compilation_time)
    worker.startup_phases += [RankPhase("compile", begin, compiled), RankPhase("memory profile", compiled, end)]


@contextmanager
def _warm_up_and_capture(worker: Any) -> Iterator[None]:
    """Split the warm-up, in which the model runner captures graphs."""
    runner, begin, captures = worker.model_runner, time.time(), []
    capture = runner.capture_model

    def measured(*args: Any, **kwargs: Any) -> Any:
        capture_begin = time.time()
        result = capture(*args, **kwargs)
        captures.append(RankPhase("CUDA graphs", capture_begin, time.time()))
        return result

    runner.capture_model = measured
    try:
        yield
    finally:
        runner.capture_model = capture
    for phase in captures:
        worker.startup_phases += [RankPhase("warm-up", begin, phase.begin), phase]
        begin = phase.end
    worker.startup_phases.append(RankPhase("warm-up", begin, time.time()))


_wrap("init_device", partial(_one_phase, name="device"))
_wrap("load_model", partial(_one_phase, name="weights"))
_wrap("determine_available_memory", _compile_and_profile)
_wrap("initialize_from_config", partial(_one_phase, name="KV cache"))
_wrap("compile_or_warm_up_model", _warm_up_and_capture)
