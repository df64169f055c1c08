"""A run whose engines and trainer share an accelerator that only records what is moved, mapped and freed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from skyrl_train.config.predicates import OffloadMode
from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.engines.base import EngineHealth, SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import EngineError
from skyrl_train.learner.learner import BatchSizes, Learner
from skyrl_train.strategies.base import Strategy
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.trainer.offload_manager import ColocatedOffloadManager
from skyrl_train.trainer.publisher import WeightPublisher
from skyrl_train.weight_sync.buckets import plan_buckets
from skyrl_train.weight_sync.protocol import Bucket, Manifest, TensorSpec
from skyrl_train.weight_sync.sync import Probe, WeightSync
from tests.support.fake_trainer_parts import FakeTrainerParts, trainer_of

PARAMETERS, MOMENTS, CACHED, REFERENCE, WEIGHTS, CACHE = 4, 8, 3, 2, 6, 16
"""GiB of what each side holds. `CACHED` is what the allocator of the policy's rank keeps after an update."""
CAPACITIES = {OffloadMode.NONE: 39, OffloadMode.KV_CACHE: 36, OffloadMode.ALL: 22}
"""GiB of the smallest accelerator for each mode."""


class Accelerator:
    """Records what is held and what happens, and runs out of memory above its capacity."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.held: dict[str, int] = {}
        self.events: list[str] = []

    def hold(self, **sizes: int) -> None:
        self.held |= sizes
        total = sum(self.held.values())
        if total > self.capacity:
            raise torch.OutOfMemoryError(f"{total} GiB of {self.capacity}: {self.held}")

    def free(self, *names: str) -> None:
        for name in names:
            self.held.pop(name, None)

    def counts(self) -> dict[str, int]:
        """Return how often each event happened since the last call."""
        counts, self.events = dict(Counter(self.events)), []
        return counts


class RecordedStrategy(Strategy):
    """The package's strategy, whose moves between host and accelerator are recorded instead."""

    def __init__(self, accelerator: Accelerator, role: str):
        super().__init__(None, "cuda", 0, 1)
        self.accelerator, self.role = accelerator, role

    def prepare(self, model: nn.Module, total_steps: int | None) -> nn.Module:
        return model

    def _place(self, what: str, size: int, device: torch.device | str) -> None:
        name = f"{self.role} {what}"
        if torch.device(device).type == "cpu":
            self.accelerator.free(name)
        else:
            self.accelerator.hold(**{name: size})

    def _move(self, device: torch.device | str) -> None:
        self.accelerator.events.append(f"move {self.role}")
        self._place("parameters", PARAMETERS if self.role == "policy" else REFERENCE, device)

    def _move_state(self, device: torch.device | str) -> None:
        if self.role == "policy":
            self._place("moments", MOMENTS, device)


class RecordedRanks:
    """The one rank of a role."""

    def __init__(self, accelerator: Accelerator, role: str):
        self.accelerator, self.strategy = accelerator, RecordedStrategy(accelerator, role)
        self.strategy.onload()

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        target = self.strategy if hasattr(self.strategy, method) else self
        return [getattr(target, method, lambda *_: None)(*args)]

    def address(self, others: bool) -> tuple[str, int]:
        return "127.0.0.1", 1

    def prepare_manifest(self, version: int, perturbed: bool) -> Manifest:
        assert "policy parameters" in self.accelerator.held
        self.manifest = Manifest(version, (TensorSpec("w", (1,), "float32"),), is_self_test=perturbed)
        return self.manifest

    def send_weights(self, index: int) -> Bucket:
        assert "policy parameters" in self.accelerator.held
        return plan_buckets(self.manifest)[index]


class RecordedEngine(ScriptedEngine):
    """An engine whose memory is that of the accelerator.

    Args of the constructor: `backend` is "vllm", whose weights sleep at level 1 too, or "sglang", whose weights do not.
    Perturbed weights score differently.
    """

    def __init__(self, accelerator: Accelerator, name: str, backend: str = "vllm"):
        super().__init__(name=name)
        self.accelerator, self.backend = accelerator, backend
        accelerator.hold(**self._sizes)

    @property
    def _sizes(self) -> dict[str, int]:
        return {f"{self.name} weights": WEIGHTS, f"{self.name} kv_cache": CACHE}

    def holds(self, tag: str) -> bool:
        return f"{self.name} {tag}" in self.accelerator.held

    def _change(self, action: str, tags: Collection[str]) -> None:
        changed = [tag for tag in sorted(tags) if self.holds(tag) == (action == "unmap")]
        for tag in changed:
            name = f"{self.name} {tag}"
            self.accelerator.events.append(f"{action} {tag}")
            if action == "map":
                self.accelerator.hold(**{name: self._sizes[name]})
            else:
                self.accelerator.free(name)

    async def sleep(self, level: int = 1, keep_weights: bool = False) -> int:
        frees_weights = not keep_weights and (level == 2 or self.backend == "vllm")
        self._change("unmap", ["kv_cache", "weights"] if frees_weights else ["kv_cache"])
        return await super().sleep(level, keep_weights)

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        self._change("map", tags or ["kv_cache", "weights"])
        await super().wake_up(tags)

    async def generate(self, requests: Any) -> Any:
        assert self.holds("weights") and self.holds("kv_cache")
        return await super().generate(requests)

    async def receive_weights(self, bucket: Bucket) -> None:
        assert self.holds("weights")
        await super().receive_weights(bucket)

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        self._note("score")
        assert self.holds("weights")
        slept = not self.holds("kv_cache")
        self._change("map", ["kv_cache"])
        if slept:
            self._change("unmap", ["kv_cache"])
        return [[-2.0 if self._is_self_test else -1.0] * (len(ids) - 1) for ids in token_ids]

    async def health(self) -> EngineHealth:
        if "health" in self.failures:
            raise self.failures["health"]
        return EngineHealth(name=self.name, version=self.version, asleep=self.asleep)

    def kill(self) -> None:
        self.accelerator.free(*self._sizes)

    def die(self) -> None:
        error = EngineError("gone")
        self.failures = dict.fromkeys(("generate", "health", "begin_weights", "sleep", "wake_up", "score"), error)


class RecordedRun(FakeTrainerParts):
    """A training loop with the package's offload manager, publisher, weight sync, learner, client and strategies."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        mode: OffloadMode,
        *,
        probe: bool = False,
        num_engines: int = 1,
        backend: str = "vllm",
        sleep_level: int = 2,
        capacity: int | None = None,
    ):
        super().__init__()
        extra = (num_engines - 1) * (WEIGHTS + CACHE)  # of engines on other accelerators, which this one counts too
        self.accelerator = Accelerator((CAPACITIES[mode] if capacity is None else capacity) + extra)
        self.fatal_phase = ""
        """Phase of the second step in which the first engine dies: "generating", "publishing" or none."""
        self.steps: list[dict[str, int]] = []
        """Counts of events in each step, without start-up."""
        self.engines = [RecordedEngine(self.accelerator, f"engine {index}", backend) for index in range(num_engines)]
        self.client = EngineClient(self.engines, deadline_s=5)
        if mode is not OffloadMode.NONE:
            asyncio.run(self.client.sleep(sleep_level, mode is OffloadMode.KV_CACHE))
        monkeypatch.setattr(torch.cuda, "empty_cache", self._empty_cache)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
        policy, reference = (RecordedRanks(self.accelerator, role) for role in ("policy", "reference"))
        self.learner = Learner(policy, reference, BatchSizes(1))  # type: ignore[arg-type]
        self.manager = ColocatedOffloadManager(self.client, self.learner, mode, sleep_level)
        self.accelerator.counts()
        weight_sync = WeightSync(
            policy,
            lambda: self.client.engines,
            route="in_process",
            deadline_s=5,
            probe=Probe([[1, 2, 3]], self._score, every_sync=True, self_test=True) if probe else None,
            memory=self.manager,
        )
        self.publisher = WeightPublisher(
            self.learner, self.client, weight_sync, self._restart, max_engine_restarts=9, offload_manager=self.manager
        )
        self.trainer = trainer_of(self, residency=self.manager)
        self.trainer.publisher = self.publisher

    def fit(self, **settings: Any) -> None:
        """Train to the last step with these settings of the section `trainer`."""
        self.trainer.cfg = replace(self.trainer.cfg, **settings)
        asyncio.run(self.trainer.fit())

    def _kill_engine_in(self, phase: str) -> None:
        if phase == self.fatal_phase and self.trainer.step == 1:
            self.fatal_phase = ""
            self.engines[0].die()

    def _empty_cache(self) -> None:
        self.accelerator.events.append("empty_cache")
        self.accelerator.free("cached")

    async def _score(self, token_ids: Any) -> list[list[float]]:
        assert "policy parameters" in self.accelerator.held
        return [[-1.0] * (len(ids) - 1) for ids in token_ids]

    async def _restart(self, name: str, wait_for_node: bool) -> RecordedEngine:
        engine = RecordedEngine(self.accelerator, name, self.engines[0].backend)
        self.engines = [engine if other.name == name else other for other in self.engines]
        return engine

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        self._kill_engine_in("generating")
        request = SampleRequest(f"{position}", to_token_array([1, 2]), SamplingParams(max_tokens=2), 0)
        await self.client.generate([request])
        return await super().rollout(prompt, position)

    async def run(self, step: int) -> dict[str, float]:
        assert all(engine.holds("kv_cache") for engine in self.engines)
        return await super().run(step)

    async def update(self, batch: Any) -> dict[str, float]:
        held = self.accelerator.held
        assert {"policy parameters", "policy moments"} <= held.keys()
        self.accelerator.hold(cached=CACHED)
        self._kill_engine_in("publishing")
        return await super().update(batch)

    def begin(self, step: int, total: int) -> None:
        super().begin(step, total)
        self.accelerator.counts()

    def log(self, metrics: dict[str, float], step: int) -> None:
        super().log(metrics, step)
        self.steps.append(self.accelerator.counts())
