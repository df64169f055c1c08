"""A simulated run: the real training loop, queue, group filters, client and engine scaler, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_train.config.schema import Config
from skyrl_train.data.messages import Prompt
from skyrl_train.engines.base import SampleRequest
from skyrl_train.engines.client import EngineClient
from skyrl_train.experiment.publisher import PAUSE_MODES
from skyrl_train.experiment.trainer import build_group_filter_settings
from skyrl_train.rollouts.collector import RolloutCollector
from skyrl_train.trainer.engine_scaler import EngineScaler
from skyrl_train.trainer.publisher import WeightPublisher
from skyrl_train.trainer.trainer import OffloadManager, StepSchedule, Trainer
from tests.support.simulation.engine import SimulatedEngine
from tests.support.simulation.parts import (
    NoTracker,
    SimulatedCheckpointManager,
    SimulatedConversations,
    SimulatedLearner,
    SimulatedWeightSync,
)
from tests.support.simulation.timings import Timings

UNITS_PER_RESPONSE = 16
"""Number of simulated tokens of a mean response, each of which stands for several tokens."""
CHECK_INTERVAL_S = 60.0
"""Interval of the client's health checks, which is long because simulated engines do not hang."""
_UNLIMITED = 10**9
"""Maximum number of engine restarts in a simulated run."""


@dataclass(frozen=True)
class RunShape:
    """The number of engines, and the staleness of rollouts."""

    engines: int
    staleness: int = 0
    """Maximum staleness in steps; 0 is synchronous."""
    over_provisioning: float = 0.0


@dataclass(frozen=True)
class SimulatedRun:
    """The parts of a run, for tests to inspect and disturb. `trainer.fit()` runs it."""

    trainer: Trainer
    collector: RolloutCollector
    client: EngineClient
    scaler: EngineScaler
    weight_sync: Any
    state: SimulatedCheckpointManager
    learner: SimulatedLearner
    engines: list[SimulatedEngine]
    """All engines that were ever started, including dead ones."""


def build_run(
    cfg: Config, timings: Timings, shape: RunShape, steps: int, saved: tuple[int, Any] | None = None
) -> SimulatedRun:
    """Build a run of `steps` steps. Requires a running event loop.

    Args:
        cfg: The run's configuration.
        timings: Durations and response lengths.
        shape: Number of engines and staleness.
        steps: Number of steps.
        saved: The checkpoint of an earlier run to resume from; None for a new run.
    """
    trainer_config, unit = cfg.trainer, unit_of(timings)
    engines: list[SimulatedEngine] = []
    engine = _engines(cfg, timings, unit, engines)
    first_engines: Any = [engine(f"engine {index}") for index in range(shape.engines)]
    client = EngineClient(
        first_engines,
        deadline_s=trainer_config.timeouts.rollout_s,
        health_check_interval_s=CHECK_INTERVAL_S,
    )
    learner: Any = SimulatedLearner(timings, unit)
    conversations = SimulatedConversations(
        client, timings, cfg.generator.n_samples_per_prompt, _max_units(cfg, unit), unit, trainer_config.seed
    )
    schedule = StepSchedule(trainer_config.train_batch_size * steps, trainer_config.train_batch_size, 1)
    collector = RolloutCollector(
        conversations.rollout,
        prompt_at=lambda position: Prompt(str(position), [], "simulated"),
        num_prompts_in_step=schedule.num_prompts_in_step,
        max_staleness_steps=shape.staleness,
        max_failed_fraction=1.0,
        group_filters=replace(build_group_filter_settings(cfg), over_provisioning=shape.over_provisioning),
        num_parallel_generation_workers=trainer_config.fully_async.num_parallel_generation_workers
        if shape.staleness
        else None,
    )
    weight_sync: Any = SimulatedWeightSync(client, timings.sync_s)
    trackers: Any = NoTracker()
    state: Any = SimulatedCheckpointManager(learner, {"collector": collector}, saved)
    launcher = SimulatedEngineLauncher(timings.engine.start_s, engine)
    publisher = WeightPublisher(
        learner,
        client,
        weight_sync,
        launcher.restart,
        max_engine_restarts=_UNLIMITED,
        pause_mode=PAUSE_MODES[trainer_config.fully_async.on_sync] if shape.staleness else None,
    )
    scaler = EngineScaler(
        client,
        publisher,
        start=launcher.start,
        stop=launcher.stop,
        folder=Path(),
        drain_s=trainer_config.timeouts.drain_s,
        report=lambda line: None,
    )
    trainer = Trainer(
        schedule=schedule,
        cfg=replace(trainer_config, eval_interval=0, ckpt_interval=0, eval_before_train=False),
        collector=collector,
        learner=learner,
        batch_transforms=[],
        publisher=publisher,
        offload_manager=OffloadManager(),
        evaluator=None,
        checkpoint_manager=state,
        trackers=trackers,
    )
    return SimulatedRun(trainer, collector, client, scaler, weight_sync, state, learner, engines)


class SimulatedEngineLauncher:
    """A launcher whose engines take time to start."""

    def __init__(self, start_s: float, engine: Callable[[str], SimulatedEngine]):
        self._start_s, self._engine = start_s, engine

    async def restart(self, name: str, wait_for_node: bool) -> SimulatedEngine:
        return await self.start(name)

    async def start(self, name: str) -> SimulatedEngine:
        await asyncio.sleep(self._start_s)
        return self._engine(name)

    async def stop(self, name: str, engine: SimulatedEngine) -> None:
        await engine.close()


def _engines(
    cfg: Config, timings: Timings, unit: int, engines: list[SimulatedEngine]
) -> Callable[[str], SimulatedEngine]:
    """Return a function that creates an engine by name and adds it to `engines`."""
    rng, max_units = random.Random(cfg.trainer.seed), _max_units(cfg, unit)

    def length(request: SampleRequest) -> int:
        return max(1, min(max_units, round(timings.response.draw(request.seed, max_units * unit) / unit)))

    def make(name: str) -> SimulatedEngine:
        engines.append(SimulatedEngine(length, timings.engine, name=name, unit=unit, rng=rng))
        return engines[-1]

    return make


def _max_units(cfg: Config, unit: int) -> int:
    return max(1, round(cfg.generator.sampling_params.max_generate_length / unit))


def unit_of(timings: Timings) -> int:
    """Return the number of tokens that one simulated token stands for."""
    return max(1, round(timings.response.mean / UNITS_PER_RESPONSE))
