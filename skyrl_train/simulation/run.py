"""One simulated run: the real loop, queue, samplers, client and supervisor, in virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from skyrl_train.assembly.collector import build_samplers
from skyrl_train.assembly.publisher import PAUSES, send_whole_version, supervised_publish
from skyrl_train.clock import now
from skyrl_train.config.schema import Config
from skyrl_train.data.trajectory import Prompt
from skyrl_train.engines.base import SampleRequest
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.scaling import EngineScaler
from skyrl_train.engines.supervisor import EngineSupervisor
from skyrl_train.rollouts.collector import RolloutCollector
from skyrl_train.simulation import virtual_time
from skyrl_train.simulation.engine import SimulatedEngine
from skyrl_train.simulation.parts import (
    Rows,
    SimulatedConversations,
    SimulatedLearner,
    SimulatedPublisher,
    SimulatedState,
)
from skyrl_train.simulation.timings import Timings
from skyrl_train.trainer.loop import Intervals
from skyrl_train.trainer.residency import AlwaysResident
from skyrl_train.trainer.schedule import StepSchedule
from skyrl_train.trainer.trainer import Trainer

UNITS_PER_ANSWER = 16
"""A mean answer is simulated as so many tokens, each of which stands for several."""
LOOKS_EVERY_S = 60.0
"""How often the client asks whether an engine gets on: simulated ones do not hang."""
_ANY = 10**9
"""Restarts of engines that a simulated run may take."""


@dataclass(frozen=True)
class Split:
    """How many slots engines and trainers have, and how far rollouts run ahead."""

    engines: int
    trainers: int
    staleness: int = 0
    """0: synchronous."""
    over_provisioning: float = 0.0
    colocated: bool = False
    """Engines and trainers take turns on the same slots."""


@dataclass(frozen=True)
class Moment:
    """The end of a step."""

    seconds: float
    """Since the run began."""
    busy_s: float
    """Seconds in which engines had requests, added up over engines."""
    row: Mapping[str, float]
    """The step's metrics, in which tokens are units."""


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
    moments: list[Moment]


def build_run(
    cfg: Config, timings: Timings, split: Split, steps: int, saved: tuple[int, Any] | None = None
) -> SimulatedRun:
    """A run of `steps` steps with this configuration's samplers; it needs a running loop.

    `saved`: the checkpoint of an earlier run to go on from.
    """
    trainer_config, unit = cfg.trainer, unit_of(timings)
    engines: list[SimulatedEngine] = []
    engine = _engines(cfg, timings, unit, engines)
    client = EngineClient(
        [engine(f"engine {index}") for index in range(split.engines)],
        deadline_s=trainer_config.timeouts.rollout_s,
        looks_every_s=LOOKS_EVERY_S,
    )
    learner: Any = SimulatedLearner(timings, split.trainers, unit, engines)
    conversations = SimulatedConversations(
        client, timings, cfg.generator.n_samples_per_prompt, _longest(cfg, unit), unit, trainer_config.seed
    )
    schedule = StepSchedule(trainer_config.train_batch_size * steps, trainer_config.train_batch_size, 1)
    collector = RolloutCollector(
        conversations.rollout,
        prompt_at=lambda position: Prompt(str(position), [], "simulated"),
        prompts_of_step=schedule.prompts_of_step,
        max_staleness=split.staleness,
        max_failed_fraction=1.0,
        samplers=replace(build_samplers(cfg, ahead=split.staleness > 0), over_provisioning=split.over_provisioning),
        max_in_flight=trainer_config.fully_async.num_parallel_generation_workers if split.staleness else None,
    )
    publisher: Any = SimulatedPublisher(client, timings.sync_s + (timings.swap_s if split.colocated else 0.0))
    moments: list[Moment] = []
    begun = asyncio.get_running_loop().time()
    trackers: Any = Rows(lambda row: moments.append(Moment(now() - begun, client.busy_s, row)))
    state: Any = SimulatedState(learner, {"collector": collector}, saved)
    publish, scaler = _publish(cfg, timings, split, client, learner, publisher, engine)
    trainer = Trainer(
        schedule=schedule,
        intervals=Intervals(0, 0, 0, False, schedule.total_steps),
        collector=collector,
        learner=learner,
        batch_steps=[],
        publish=publish,
        residency=AlwaysResident(),
        evaluator=None,
        state=state,
        trackers=trackers,
    )
    return SimulatedRun(trainer, collector, client, scaler, publisher, state, learner, engines, moments)


def _publish(
    cfg: Config,
    timings: Timings,
    split: Split,
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

    supervisor = EngineSupervisor(client, start=start, sync=sync, stop=SimulatedEngine.close, budget=_ANY)
    scaler = EngineScaler(
        client, supervisor, start=start, stop=stop, drain_s=cfg.trainer.timeouts.drain_s, tell=lambda line: None
    )
    mode = PAUSES[cfg.trainer.fully_async.on_sync] if split.staleness else None
    return supervised_publish(learner, client, publisher, supervisor, mode=mode), scaler


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


@dataclass(frozen=True)
class Outcome:
    """What a simulated run did, without the first and last steps, in which the pipeline fills and empties."""

    split: Split
    steps_per_hour: float
    engines_busy: float
    """Share of their time in which engines had requests."""
    trainer_busy: float
    """Share of the time in which the trainer scored or updated."""
    staleness: float
    """Mean age of the tokens trained on, in steps."""
    wasted: float
    """Share of the sampled tokens that nothing was trained on."""


def simulate(cfg: Config, timings: Timings, split: Split, steps: int) -> Outcome:
    """Run `steps` steps of this configuration on a split of slots, in virtual time."""

    async def run() -> SimulatedRun:
        built = build_run(cfg, timings, split, steps)
        await built.trainer.fit()
        await built.collector.close()
        await built.client.close()
        return built

    return _outcome(split, virtual_time.run(run()))


def least_steps(staleness: int) -> int:
    """With fewer, what is counted would be of the pipeline as it fills and empties."""
    return 4 * (staleness + 1) + 2 * staleness


def _outcome(split: Split, run: SimulatedRun) -> Outcome:
    moments, ahead = run.moments, split.staleness
    first, last = moments[ahead], moments[-1 - ahead]
    counted = [one.row for one in moments if first.seconds < one.seconds <= last.seconds]
    seconds = last.seconds - first.seconds

    def mean(name: str) -> float:
        return sum(row.get(name, 0.0) for row in counted) / len(counted)

    sampled = sum(engine.sampled for engine in run.engines)
    return Outcome(
        split,
        steps_per_hour=3600.0 * len(counted) / seconds,
        engines_busy=(last.busy_s - first.busy_s) / seconds / split.engines,
        trainer_busy=(mean("timing/score_s") + mean("timing/update_s")) / mean("timing/step_s"),
        staleness=mean("async/staleness_mean"),
        wasted=max(0.0, 1 - run.learner.trained_tokens / sampled) if sampled else 0.0,
    )
