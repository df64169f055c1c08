"""The other parts of a simulated run: conversations, a learner, checkpoints, and weight syncs."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import Trajectory, TrajectoryGroup
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.sampling_params import request_seed
from skyrl_train.errors import DeadlineExceeded, EngineError, EnginesLost
from skyrl_train.rollouts.conversation import TrajectoryBuilder
from skyrl_train.trainer.checkpoint_manager import PendingActions, SkippedUpdates
from tests.support.simulation.timings import Timings


def prompt_units(timings: Timings, unit: int) -> int:
    """Return the length of a simulated prompt in units of `unit` tokens, at least 1."""
    return max(1, round(timings.prompt_tokens / unit))


class SimulatedConversations:
    """A replacement of ConversationGenerator, with tools that only take time and random rewards."""

    def __init__(self, client: EngineClient, timings: Timings, samples: int, max_tokens: int, unit: int, seed: int):
        """Create a generator of groups of `samples` episodes.

        Args:
            client: The client of the engines.
            timings: Durations and probabilities.
            samples: Number of episodes per group.
            max_tokens: Maximum length of a response, in units.
            unit: Number of tokens per unit.
            seed: Seed of all random choices.
        """
        self._client, self._timings, self._samples, self._seed = client, timings, samples, seed
        self._sampling = SamplingParams(max_tokens=max_tokens)
        self._prompt = [0] * prompt_units(timings, unit)

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        items = [Trajectory.empty(prompt, n, 1.0) for n in range(self._samples)]
        builders = [TrajectoryBuilder(item) for item in items]
        for builder in builders:
            builder.start_episode(self._prompt)
        first = await self._sample(list(zip(items, builders, strict=True)), position, 0)
        await asyncio.gather(*(self._play(*episode, position) for episode in zip(items, builders, first, strict=True)))
        return TrajectoryGroup(prompt, items)

    async def _play(
        self, item: Trajectory, builder: TrajectoryBuilder, completion: Completion | None, position: int
    ) -> None:
        rng = random.Random(f"{self._seed}.{position}.{item.sample}")
        for turn in range(1, self._timings.turns + 1):
            if completion is None:
                return
            builder.append_sample(completion)
            if turn == self._timings.turns:
                break
            if self._timings.tool_s:
                await asyncio.sleep(rng.expovariate(1 / self._timings.tool_s))
            completion = (await self._sample([(item, builder)], position, turn))[0]
        item.reward = float(rng.random() < self._timings.pass_rate)
        builder.update_last_turn(reward=item.reward)

    async def _sample(
        self, episodes: Sequence[tuple[Trajectory, TrajectoryBuilder]], position: int, turn: int
    ) -> list[Completion | None]:
        requests = [self._request(item, builder, position, turn) for item, builder in episodes]
        try:
            return list(await self._client.generate(requests))
        except EnginesLost:
            raise
        except (EngineError, DeadlineExceeded) as error:
            for item, _ in episodes:
                item.fail("engine", str(error))
            return [None] * len(episodes)

    def _request(self, item: Trajectory, builder: TrajectoryBuilder, position: int, turn: int) -> SampleRequest:
        session, uid = f"{position}.{item.sample}", item.prompt.uid
        return SampleRequest(
            request_id=f"{session}.{turn}",
            token_ids=builder.context,
            sampling=self._sampling,
            seed=request_seed(self._seed, uid, item.sample, turn, position),
            session=session,
            group=str(position),
        )


class SimulatedLearner:
    """A learner that only takes the time of its work, and counts versions like the real one."""

    def __init__(self, timings: Timings, unit: int):
        self._timings, self._unit = timings.learner, unit
        self._changing = asyncio.Lock()
        self._prompt = timings.prompt_tokens - prompt_units(timings, unit) * unit
        """Number of tokens by which a prompt is longer than the simulated prompt."""
        self.version = 0
        self.optimizer_progress = None
        self.updating = False

    async def add_logprobs_and_values(self, batch: TrainBatch) -> TrainBatch:
        await self._work(self._timings.score_s_per_token, batch)
        return batch

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        async with self._changing:
            self.updating = True
            await self._work(self._timings.update_s_per_token, batch)
            await asyncio.sleep(self._timings.step_s)
            self.version += 1
            self.updating = False
        return {}

    async def _work(self, per_token_s: float, batch: TrainBatch) -> None:
        tokens = len(batch.input_ids) * self._unit + len(batch.prompt_lengths) * self._prompt
        await asyncio.sleep(per_token_s * tokens)

    @asynccontextmanager
    async def hold_version(self) -> AsyncIterator[int]:
        async with self._changing:
            yield self.version

    async def attach_stall_report(self, error: BaseException) -> None:
        """Do nothing: there are no ranks that could have stalled."""

    async def is_responsive(self, timeout_s: float) -> bool:
        return True


class SimulatedWeightSync:
    """A weight sync that takes time and then commits on all engines at the same moment."""

    def __init__(self, client: EngineClient, sync_s: float):
        self._client, self._sync_s = client, sync_s
        self.metrics: dict[str, float] = {}

    async def sync_all(self, version: int) -> dict[str, float]:
        await asyncio.sleep(self._sync_s)
        await asyncio.gather(*(engine.commit_weights(version) for engine in self._client.engines))
        return self.metrics

    async def sync_one(self, engine: Any, version: int) -> dict[str, float]:
        await asyncio.sleep(self._sync_s)
        await engine.commit_weights(version)
        return self.metrics


class SimulatedCheckpointManager:
    """A checkpoint manager that keeps the last checkpoint in memory and takes no time."""

    async_checkpoint = False

    def __init__(self, learner: SimulatedLearner, controllers: Mapping[str, Any], saved: tuple[int, Any] | None = None):
        """Create a manager.

        Args:
            learner: The learner.
            controllers: Objects whose state is saved, by name.
            saved: The attribute `saved` of an earlier run's manager to resume from; None for a new run.
        """
        self._learner, self._controllers = learner, controllers
        self._captured_state: dict[str, Any] = {}
        self.saved = saved
        self.skipped_updates = SkippedUpdates()
        self.saved_step = 0 if saved is None else saved[0]

    async def resume(self) -> tuple[int, PendingActions]:
        if self.saved is None:
            return 0, PendingActions((), {})
        step, states = self.saved
        for name, controller in self._controllers.items():
            controller.load_state_dict(states[name])
        self._learner.version = step
        self.capture_state()
        return step, PendingActions((), {})

    def capture_state(self) -> None:
        self._captured_state = {name: controller.state_dict() for name, controller in self._controllers.items()}

    async def save(self, step: int, unfinished: PendingActions | None = None) -> None:
        self.saved, self.saved_step = (step, self._captured_state), step

    async def wait_until_written(self) -> None:
        """Return: a checkpoint in memory is written immediately."""

    ensure_saved = save

    async def export(self, step: int) -> None:
        """Do nothing: there is nothing to export."""

    async def update_reference(self) -> None:
        """Do nothing: there is no reference model."""


class NoTracker:
    """A tracker that discards everything."""

    def begin(self, step: int, total_steps: int) -> None:
        pass

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        pass

    def samples(self, rows: Sequence[Any], step: int) -> None:
        pass

    def table(self, rows: Sequence[Any], step: int) -> None:
        pass
