"""Moves, maps and frees on accelerators that engines and trainer share, in every mode."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_train.config.predicates import OffloadMode
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.lifecycle import EngineState
from skyrl_train.engines.sglang.engine import SGLangEngine
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.errors import EngineError
from skyrl_train.trainer import offload_manager
from skyrl_train.trainer.checkpoint_manager import PendingActions, StepAction
from skyrl_train.trainer.offload_manager import ColocatedOffloadManager
from tests.support.fake_trainer_parts import FakeTrainerParts, trainer_of
from tests.support.shared_accelerator import CAPACITIES, RecordedRun
from tests.unit.engines.test_sglang_memory import RecordingManager

NONE, KV_CACHE, ALL = OffloadMode
EVERYTHING_MOVES = {
    "move policy": 3,  # to the accelerator, its weights for the sync, to the host
    "move reference": 3,
    "empty_cache": 4,  # two for each of the two models
    "map weights": 1,
    "map kv_cache": 1,
    "unmap weights": 1,
    "unmap kv_cache": 1,
}
"""Counts of a step with mode "all"."""
COUNTS = {NONE: {}, KV_CACHE: {"map kv_cache": 1, "unmap kv_cache": 1, "empty_cache": 2}, ALL: EVERYTHING_MOVES}
"""Mode -> counts of a step."""


@pytest.mark.defect("engines-wake-beside-optimizer")
@pytest.mark.defect("probe-allocates-cache-beside-learner")
@pytest.mark.parametrize("probe", [False, True])
@pytest.mark.parametrize("mode", OffloadMode)
def test_events_of_a_step(mode: OffloadMode, probe: bool, monkeypatch: pytest.MonkeyPatch):
    run = RecordedRun(monkeypatch, mode, probe=probe)
    run.fit(eval_interval=0, ckpt_interval=0, eval_before_train=False)
    assert run.steps[1:] == [COUNTS[mode]] * 3
    if probe:
        assert run.logged[0]["weights/self_test_gap"] == 1 and run.logged[3]["weights/probe_gap"] == 0


@pytest.mark.parametrize("mode", OffloadMode)
def test_evaluation_moves_nothing_more(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch):
    run = RecordedRun(monkeypatch, mode, probe=True)
    run.fit(eval_interval=1, ckpt_interval=0)
    assert run.steps[1:] == [COUNTS[mode]] * 3
    assert run.events.count("evaluate 3") == 1


@pytest.mark.parametrize("mode", OffloadMode)
def test_save_frees_only_caches(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch):
    run = RecordedRun(monkeypatch, mode, probe=True)
    held_at_save: list[dict[str, int]] = []
    save = run.save

    async def record(step: int, unfinished: Any = None) -> None:
        held_at_save.append(dict(run.accelerator.held))
        await save(step, unfinished)

    run.save = record  # type: ignore[method-assign]
    run.fit(eval_interval=1, ckpt_interval=2)
    assert len(held_at_save) == 2
    assert all(("engine 0 kv_cache" in held) is (mode is NONE) for held in held_at_save)
    assert all("engine 0 weights" in held for held in held_at_save)


@pytest.mark.parametrize("mode", OffloadMode)
def test_pending_reference_copy_fits(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch):
    """The copy is loaded while the learner computes, not beside an engine's cache."""
    run = RecordedRun(monkeypatch, mode, probe=True)
    run.resumed_at, run.unfinished = 2, PendingActions((StepAction.REFERENCE,), {})
    held: list[dict[str, int]] = []

    async def copy() -> None:
        held.append(dict(run.accelerator.held))

    run.update_reference = copy  # type: ignore[method-assign]
    run.fit(eval_interval=0, ckpt_interval=0)
    assert len(held) == 2, "when the run resumes, and at the end of its epoch"
    assert all("reference parameters" in names for names in held)
    assert all(("engine 0 kv_cache" in names) is (mode is NONE) for names in held)


@pytest.mark.parametrize(("backend", "level", "weights"), [("vllm", 1, 1), ("sglang", 1, 0), ("sglang", 2, 1)])
def test_weights_stay_where_the_engine_keeps_them(
    backend: str, level: int, weights: int, monkeypatch: pytest.MonkeyPatch
):
    """At level 1 SGLang keeps its weights, so nothing maps them."""
    run = RecordedRun(monkeypatch, ALL, backend=backend, sleep_level=level, capacity=CAPACITIES[ALL] + 6)
    run.fit(eval_interval=0, ckpt_interval=0, eval_before_train=False)
    assert [step.get("map weights", 0) for step in run.steps[1:]] == [weights] * 3
    assert [step["map kv_cache"] for step in run.steps[1:]] == [1] * 3


@pytest.mark.parametrize("mode", OffloadMode)
def test_each_engine_is_mapped_once(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch):
    run = RecordedRun(monkeypatch, mode, probe=True, num_engines=3)
    run.fit(eval_interval=0, ckpt_interval=0)
    per_engine = {name: 3 * count if "map" in name else count for name, count in COUNTS[mode].items()}
    assert run.steps[1:] == [per_engine] * 3


@pytest.mark.parametrize("mode", OffloadMode)
def test_less_memory_than_the_mode_needs_fails(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises((torch.OutOfMemoryError, EngineError), match=f"of {CAPACITIES[mode] - 1}"):
        RecordedRun(monkeypatch, mode, probe=True, capacity=CAPACITIES[mode] - 1).fit()


@pytest.mark.parametrize("num_engines", [1, 2])
@pytest.mark.parametrize("phase", ["generating", "publishing"])
@pytest.mark.parametrize("mode", OffloadMode)
def test_restarted_engine_fits(mode: OffloadMode, phase: str, num_engines: int, monkeypatch: pytest.MonkeyPatch):
    run = RecordedRun(monkeypatch, mode, probe=True, num_engines=num_engines)
    run.fatal_phase = phase
    run.fit(eval_interval=1, ckpt_interval=0)
    assert run.publisher.restarts == 1
    assert {engine.version for engine in run.engines} == {3}
    per_engine = {name: num_engines * count if "map" in name else count for name, count in COUNTS[mode].items()}
    assert run.steps[-1] == per_engine


@pytest.mark.parametrize("mode", [KV_CACHE, ALL])
def test_dead_engine_holds_nothing_during_update(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch):
    """A dead engine may be a process that hangs, and it is restarted only after the update."""
    run = RecordedRun(monkeypatch, mode, num_engines=2)
    run.fatal_phase = "generating"
    held_in_update: list[dict[str, int]] = []
    update = run.update

    async def record(batch: Any) -> dict[str, float]:
        held_in_update.append(dict(run.accelerator.held))
        return await update(batch)

    monkeypatch.setattr(run, "update", record)
    run.fit(eval_interval=0, ckpt_interval=0, eval_before_train=False)
    assert run.publisher.restarts == 1
    in_fatal_step = {name for name in held_in_update[1] if name.startswith("engine")}
    assert in_fatal_step == (set() if mode is ALL else {"engine 1 weights"})


@pytest.mark.parametrize("mode", OffloadMode)
def test_engines_sleep_after_a_rollout_exception(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch):
    run = RecordedRun(monkeypatch, mode)

    async def fail() -> None:
        async with run.manager.generating():
            raise ValueError("an episode")

    with pytest.raises(ValueError, match="an episode"):
        asyncio.run(fail())
    assert run.engines[0].holds("kv_cache") is (mode is NONE)


@pytest.mark.parametrize("mode", [KV_CACHE, ALL])
def test_hung_engine_does_not_delay_the_exit(mode: OffloadMode, monkeypatch: pytest.MonkeyPatch):
    run = RecordedRun(monkeypatch, mode)
    monkeypatch.setattr(offload_manager, "_SLEEP_ON_EXIT_TIMEOUT_S", 0.01)

    async def hang(*args: Any) -> int:
        await asyncio.sleep(60)
        return 0

    async def fail() -> None:
        async with run.manager.generating():
            monkeypatch.setattr(run.engines[0], "sleep", hang)
            raise ValueError("an episode")

    with pytest.raises(ValueError, match="an episode"):
        asyncio.run(asyncio.wait_for(fail(), 5))


def test_failed_probe_keeps_weights_loaded(monkeypatch: pytest.MonkeyPatch):
    run = RecordedRun(monkeypatch, ALL, probe=True)
    run.engines[0].failures = {"score": EngineError("gone")}
    with pytest.raises(EngineError, match="gone"):
        run.fit()
    assert "policy moments" not in run.accelerator.held
    assert run.events[-1:] != ["save 0"]


def test_asynchronous_training_moves_nothing(monkeypatch: pytest.MonkeyPatch):
    """Engines and learner have dedicated accelerators, so their run has the manager that moves nothing."""
    run = RecordedRun(monkeypatch, NONE)
    run.trainer = trainer_of(run, max_staleness=4)
    run.trainer.publisher = run.publisher
    run.fit(eval_interval=1, ckpt_interval=2)
    assert run.steps[1:] == [{}] * 3


@pytest.mark.parametrize(("mode", "expected"), [(NONE, []), (KV_CACHE, ["cache"]), (ALL, ["weights", "onload"])])
def test_transformers_engine_moves_weights_only_in_all(
    mode: OffloadMode, expected: list[str], tiny_model_path: str, monkeypatch: pytest.MonkeyPatch
):
    engine = TransformersEngine(tiny_model_path, device="cpu", name="local")
    events: list[str] = []
    monkeypatch.setattr(engine.served, "onload_weights", lambda: events.append("onload"))

    def free_memory(weights: bool) -> int:
        events.append("weights" if weights else "cache")
        return 0

    monkeypatch.setattr(engine.served, "free_memory", free_memory)
    learner: Any = FakeTrainerParts()

    async def run() -> None:
        client = EngineClient([engine], deadline_s=60)
        if mode is not NONE:
            await client.sleep(2, mode is KV_CACHE)
        manager = ColocatedOffloadManager(client, learner, mode, level=2)
        for step in range(2):
            async with manager.training():
                await manager.prepare_sync()
            async with manager.generating():
                await engine.score([[1, 2, 3]])
            assert events == expected
            events.clear()
            assert step or mode is NONE or engine.lifecycle.state is EngineState.RUNNING
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (NONE, []),
        (KV_CACHE, ["release kv_cache", "resume kv_cache"]),
        (ALL, ["release kv_cache weights", "resume weights", "resume kv_cache"]),
    ],
)
def test_sglang_frees_by_tag(mode: OffloadMode, expected: list[str], monkeypatch: pytest.MonkeyPatch):
    manager_of_requests = RecordingManager()
    manager_of_requests.may_score.set()
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))
    learner: Any = FakeTrainerParts()

    class Client:
        async def sleep(self, level: int, keep_weights: bool = False) -> None:
            await SGLangEngine.sleep(engine, level, keep_weights)

        async def wake_up(self, tags: Any = None) -> None:
            await manager_of_requests.wake_up(tags)

    async def run_on_loop(work: Any, shielded: bool) -> Any:
        return await work

    engine: Any = SimpleNamespace(_requests=manager_of_requests, _run_on_loop=run_on_loop)
    client: Any = Client()

    async def run() -> None:
        if mode is not NONE:
            await client.sleep(2, mode is KV_CACHE)
        manager = ColocatedOffloadManager(client, learner, mode, level=2)
        for _ in range(2):
            async with manager.training():
                await manager.prepare_sync()
                manager_of_requests._lifecycle.mark_weights_loaded()
                await manager.prepare_scoring()
                await manager_of_requests.score([[1]])
            async with manager.generating():
                pass
        assert [event for event in manager_of_requests.events if event != "score"][-len(expected) or 1 :] == expected

    asyncio.run(run())
    assert manager_of_requests.events.count("resume kv_cache") == (0 if mode is NONE else 2)
