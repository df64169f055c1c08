"""One simulated run: the real loop, queue, samplers, client and supervisor, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from skyrl_train.config.schema import Config
from skyrl_train.data.messages import Prompt
from skyrl_train.engines.base import SampleRequest
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.supervisor import EngineScaler, EngineSupervisor
from skyrl_train.experiment.publisher import PAUSES, SupervisedPublisher, send_whole_version
from skyrl_train.experiment.trainer import build_samplers
from skyrl_train.rollouts.collector import RolloutCollector
from skyrl_train.trainer.trainer import Residency, StepSchedule, Trainer
from tests.support.simulation.engine import SimulatedEngine
from tests.support.simulation.parts import (
    NoTracker,
    SimulatedConversations,
    SimulatedLearner,
    SimulatedPublisher,
    SimulatedState,
)
from tests.support.simulation.timings import Timings

UNITS_PER_ANSWER = 16
"""A mean answer is simulated as so many tokens, each of which stands for several."""
LOOKS_EVERY_S = 60.0
"""How often the client asks whether an engine gets on: simulated ones do not hang."""
_ANY = 10**9
"""Restarts of engines that a simulated run may take."""


@dataclass(frozen=True)
class RunShape:
    """The number of engines, and how far rollouts run ahead."""

    engines: int
    staleness: int = 0
    """0 is synchronous."""
    over_provisioning: float = 0.0


@dataclass(frozen=True)
class SimulatedRun:
    """The parts of a run, to be looked at and disturbed; `trainer.fit()` runs it."""

    trainer: Trainer
    collector: RolloutCollector
    client: EngineClient
    scaler: EngineScaler
    publisher: Any
    state: SimulatedState
    learner: SimulatedLearner
    engines: list[SimulatedEngine]
    """All that there were, those that died included."""


def build_run(
    cfg: Config, timings: Timings, shape: RunShape, steps: int, saved: tuple[int, Any] | None = None
) -> SimulatedRun:
    """A run of `steps` steps with this configuration's samplers; it needs a running loop.

    `saved`: the checkpoint of an earlier run to go on from.
    """
    trainer_config, unit = cfg.trainer, unit_of(timings)
    engines: list[SimulatedEngine] = []
    engine = _engines(cfg, timings, unit, engines)
    client = EngineClient(
        [engine(f"engine {index}") for index in range(shape.engines)],
        deadline_s=trainer_config.timeouts.rollout_s,
        looks_every_s=LOOKS_EVERY_S,
    )
    learner: Any = SimulatedLearner(timings, unit)
    conversations = SimulatedConversations(
        client, timings, cfg.generator.n_samples_per_prompt, _longest(cfg, unit), unit, trainer_config.seed
    )
    schedule = StepSchedule(trainer_config.train_batch_size * steps, trainer_config.train_batch_size, 1)
    collector = RolloutCollector(
        conversations.rollout,
        prompt_at=lambda position: Prompt(str(position), [], "simulated"),
        prompts_of_step=schedule.prompts_of_step,
        max_staleness_steps=shape.staleness,
        max_failed_fraction=1.0,
        samplers=replace(build_samplers(cfg), over_provisioning=shape.over_provisioning),
        num_parallel_generation_workers=trainer_config.fully_async.num_parallel_generation_workers
        if shape.staleness
        else None,
    )
    publisher: Any = SimulatedPublisher(client, timings.sync_s)
    trackers: Any = NoTracker()
    state: Any = SimulatedState(learner, {"collector": collector}, saved)
    publish, scaler = _publish(cfg, timings, shape, client, learner, publisher, engine)
    trainer = Trainer(
        schedule=schedule,
        cfg=replace(trainer_config, eval_interval=0, ckpt_interval=0, eval_before_train=False),
        collector=collector,
        learner=learner,
        batch_steps=[],
        publish=publish,
        residency=Residency(),
        evaluator=None,
        state=state,
        trackers=trackers,
    )
    return SimulatedRun(trainer, collector, client, scaler, publisher, state, learner, engines)


def _publish(
    cfg: Config,
    timings: Timings,
    shape: RunShape,
    client: EngineClient,
    learner: Any,
    publisher: Any,
    engine: Callable[[str], SimulatedEngine],
) -> tuple[Callable[[int], Awaitable[dict[str, float]]], EngineScaler]:
    """How weights get to the engines, and what changes their number."""

    async def start(name: str, patient: bool = True) -> SimulatedEngine:
        await asyncio.sleep(timings.engine.start_s)
        return engine(name)

    async def stop(name: str, one: SimulatedEngine) -> None:
        await one.close()

    async def sync(one: SimulatedEngine) -> None:
        await send_whole_version(learner, publisher, one)

    supervisor = EngineSupervisor(client, start=start, sync=sync, stop=SimulatedEngine.close, max_engine_restarts=_ANY)
    scaler = EngineScaler(
        client, supervisor, start=start, stop=stop, drain_s=cfg.trainer.timeouts.drain_s, tell=lambda line: None
    )
    mode = PAUSES[cfg.trainer.fully_async.on_sync] if shape.staleness else None
    return SupervisedPublisher(learner, client, publisher, supervisor, mode=mode).publish, scaler


def _engines(cfg: Config, timings: Timings, unit: int, made: list[SimulatedEngine]) -> Callable[[str], SimulatedEngine]:
    """Makes engines by name, and adds them to `made`."""
    rng, most = random.Random(cfg.trainer.seed), _longest(cfg, unit)

    def length(request: SampleRequest) -> int:
        return max(1, min(most, round(timings.response.draw(request.seed, most * unit) / unit)))

    def make(name: str) -> SimulatedEngine:
        made.append(SimulatedEngine(length, timings.engine, name=name, unit=unit, rng=rng))
        return made[-1]

    return make


def _longest(cfg: Config, unit: int) -> int:
    return max(1, round(cfg.generator.sampling_params.max_generate_length / unit))


def unit_of(timings: Timings) -> int:
    """How many tokens a simulated one stands for."""
    return max(1, round(timings.response.mean / UNITS_PER_ANSWER))
