"""Runs that end early: the last complete step is logged once, and saved unless its weights are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.errors import (
    ClusterLost,
    DataError,
    DeadlineExceeded,
    EngineError,
    EnginesLost,
    NonFiniteUpdate,
    NonFiniteWeights,
    RewardModelLost,
    RolloutsFailed,
    WeightSyncError,
    WorkerDied,
)
from skyrl_train.metrics import Metrics
from skyrl_train.trainer.checkpoint_manager import PendingActions
from tests.support.fake_trainer_parts import FakeTrainerParts, fails_at, sft_trainer_of, trainer_of

ENDS = [
    EnginesLost("none"),
    EngineError("one"),
    RewardModelLost("gone"),
    RolloutsFailed("too many"),
    WeightSyncError("incomplete"),
    DataError("row 7"),
    WorkerDied("rank 0"),
    ClusterLost("gcs_server"),
    DeadlineExceeded("it", 3.0),
    KeyError("a bug"),
    OSError(28, "no space"),
    asyncio.CancelledError(),
]


@pytest.mark.defect("most-errors-lose-steps")
@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
def test_failed_rollout_saves_earlier_steps(error: BaseException):
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    fails_at(trainer, "collector", "next_groups", 1, error)
    with pytest.raises(type(error)):
        asyncio.run(trainer.fit())
    assert fakes.events[-1] == "save 1"
    assert fakes.saved_with == PendingActions((), {})
    assert set(fakes.logged) == {0, 1}


@pytest.mark.defect("C1-saved-step-never-logged")
def test_failed_publish_is_completed_on_resume():
    fakes = FakeTrainerParts()
    fakes.fail_at_version = 2
    with pytest.raises(WeightSyncError):
        asyncio.run(trainer_of(fakes).fit())
    assert fakes.events[-1] == "save 2"
    assert fakes.saved_with is not None
    assert fakes.saved_with.actions == ("publish", "evaluate")
    assert fakes.logged[2]["reward/mean"] == 0.5
    assert "weights/version" not in fakes.logged[2]
    resumed = FakeTrainerParts(resumed_at=2)
    resumed.unfinished = fakes.saved_with
    asyncio.run(trainer_of(resumed).fit())
    assert resumed.events[:4] == ["publish 2", "begin 2/3", "evaluate 2", "save 2"]
    assert set(resumed.logged) == {2, 3}
    assert resumed.logged[2].items() >= {"reward/mean": 0.5, "weights/version": 2.0, "eval/x/avg_score": 0.5}.items()
    assert resumed.saved_with is None or resumed.saved_with.actions == ()


@pytest.mark.defect("C1-saved-step-never-logged")
@pytest.mark.parametrize("step", [2, 3])
def test_failed_evaluation_is_repeated_on_resume(step: int):
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    fails_at(trainer, "evaluator", "run", step, EnginesLost("none"))
    with pytest.raises(EnginesLost):
        asyncio.run(trainer.fit())
    assert (fakes.events[-1], set(fakes.logged)) == (f"save {step}", set(range(step + 1)))
    resumed = FakeTrainerParts(resumed_at=step)
    resumed.unfinished = fakes.saved_with or PendingActions((), {})
    assert resumed.unfinished.actions == ("evaluate",)
    asyncio.run(trainer_of(resumed).fit())
    assert resumed.logged[step]["eval/x/avg_score"] == 0.5
    assert resumed.logged[step]["weights/version"] == step
    assert resumed.logged[step].keys() >= fakes.logged[step].keys()


@pytest.mark.parametrize("error", [WorkerDied("rank 1"), NonFiniteUpdate("nan"), RuntimeError("out of memory")])
def test_interrupted_update_is_never_saved(error: Exception):
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    fails_at(trainer, "learner", "update", 1, error)
    with pytest.raises(type(error)):
        asyncio.run(trainer.fit())
    assert not any(event.startswith("save") for event in fakes.events)
    assert set(fakes.logged) == {0, 1}


def test_unresponsive_rank_prevents_the_final_save():
    fakes = FakeTrainerParts()
    fakes.answering = False
    trainer = trainer_of(fakes)
    fails_at(trainer, "learner", "add_logprobs_and_values", 1, DeadlineExceeded("rank 0.add_logprobs_and_values", 3.0))
    with pytest.raises(DeadlineExceeded, match=r"did not finish within 3 s: policy rank 1 does not respond"):
        asyncio.run(trainer.fit())
    assert not any(event.startswith("save") for event in fakes.events)


def test_failed_final_save_keeps_the_original_error(caplog: pytest.LogCaptureFixture):
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    fails_at(trainer, "collector", "next_groups", 1, EnginesLost("engine 0 died"))
    fails_at(trainer, "checkpoint_manager", "save", 1, WorkerDied("rank 0"))
    with pytest.raises(EnginesLost, match="engine 0 died"):
        asyncio.run(trainer.fit())
    assert "could not be saved: rank 0" in caplog.text


def cancel_when(begun: asyncio.Event, work: Coroutine[Any, Any, Any]) -> None:
    """Run `work` and cancel it when `begun` is set."""

    async def run() -> None:
        working = asyncio.ensure_future(work)
        await begun.wait()
        working.cancel()
        with pytest.raises(asyncio.CancelledError):
            await working

    asyncio.run(run())


def cancel_in(
    work: Coroutine[Any, Any, Any], owner: Any, method: str, condition: Callable[[], bool] = lambda: True
) -> None:
    """Run `work` and cancel it during the first call of a method for which `condition()` is True."""
    original, begun = getattr(owner, method), asyncio.Event()

    async def slow(*args: Any) -> Any:
        if condition():
            begun.set()
            await asyncio.sleep(0.05)
        return await original(*args)

    setattr(owner, method, slow)
    cancel_when(begun, work)


def test_cancellation_during_update_completes_and_saves_step():
    fakes = FakeTrainerParts()
    cancel_in(trainer_of(fakes).fit(), fakes, "update")
    assert fakes.events[-3:] == ["update 4", "release ranks", "save 1"]
    assert fakes.saved_with is not None and fakes.saved_with.actions == ("publish",)
    assert set(fakes.logged) == {0, 1}


@pytest.mark.defect("stopped-rank-delays-signal")
def test_cancellation_does_not_wait_for_unresponsive_rank(caplog: pytest.LogCaptureFixture):
    fakes = FakeTrainerParts()
    fakes.answering = False
    trainer = trainer_of(fakes)
    cancel_in(trainer.fit(), trainer.collector, "next_groups", lambda: trainer.step == 1)
    assert fakes.asked_within_s == [30.0]
    assert not any(event.startswith("save") for event in fakes.events)
    assert "Step 1 is not saved because a rank of the trainer does not respond" in caplog.text
    assert set(fakes.logged) == {0, 1}


@pytest.mark.defect("stopped-rank-delays-signal")
def test_background_save_of_unresponsive_rank_is_abandoned():
    fakes = FakeTrainerParts()
    fakes.answering, fakes.async_checkpoint = False, True
    trainer = trainer_of(fakes)
    abandoned = asyncio.Event()

    async def wait_until_abandoned() -> None:
        await abandoned.wait()

    async def abandon() -> None:
        fakes.events.append("abandon")
        abandoned.set()

    def hang() -> bool:
        if trainer.step == 1:
            fakes.wait_until_written = wait_until_abandoned  # type: ignore[method-assign]
        return trainer.step == 1

    fakes.abandon_pending_save = abandon  # type: ignore[method-assign]
    cancel_in(trainer.fit(), trainer.collector, "next_groups", hang)
    assert fakes.events[-2:] == ["release ranks", "abandon"]


def test_restarts_are_canceled_before_ranks_are_pinged():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)

    async def is_responsive(timeout_s: float) -> bool:
        return "release ranks" in fakes.events

    fakes.is_responsive = is_responsive  # type: ignore[method-assign]
    cancel_in(trainer.fit(), trainer.collector, "next_groups", lambda: trainer.step == 1)
    assert fakes.events[-2:] == ["release ranks", "save 1"]


def test_busy_rank_is_pinged_after_its_call():
    fakes, begun, busy = FakeTrainerParts(), asyncio.Event(), False
    trainer = trainer_of(fakes)

    async def compute(batch: Any) -> Any:
        nonlocal busy
        busy = True
        if trainer.step == 1:
            begun.set()
        await asyncio.sleep(0.05)
        busy = False
        return batch

    async def forward(batch: Any) -> Any:
        return await asyncio.shield(compute(batch))  # a rank completes a call although its caller is canceled

    async def is_responsive(timeout_s: float) -> bool:
        return not busy

    fakes.add_logprobs_and_values, fakes.is_responsive = forward, is_responsive  # type: ignore[method-assign]
    cancel_when(begun, trainer.fit())
    assert fakes.events[-1] == "save 1"


@pytest.mark.defect("signal-leaves-partial-export")
def test_canceled_sft_export_is_completed():
    fakes = FakeTrainerParts()
    cancel_in(sft_trainer_of(fakes).fit_and_export(), fakes, "export")
    assert fakes.events[-2:] == ["save 2", "export 2"]


@pytest.mark.defect("signal-leaves-partial-export")
def test_canceled_pending_export_is_completed():
    fakes = FakeTrainerParts(resumed_at=2)
    fakes.unfinished = PendingActions(("export",), {})
    cancel_in(trainer_of(fakes).fit(), fakes, "export")
    assert fakes.events[-1] == "export 2"


@pytest.mark.defect("C9-bad-checkpoint-named-as-good")
def test_nonfinite_update_names_last_good_checkpoint():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    fails_at(trainer, "learner", "update", 2, NonFiniteUpdate("5 in a row"))
    with pytest.raises(NonFiniteUpdate, match="no earlier checkpoint"):  # the update of step 2 started from its weights
        asyncio.run(trainer.fit())
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    fakes.latest_before = lambda before: Path("global_step_1") if before > 1 else None  # type: ignore[method-assign]
    fails_at(trainer, "learner", "update", 2, NonFiniteUpdate("5 in a row"))
    with pytest.raises(NonFiniteUpdate, match="global_step_1"):
        asyncio.run(trainer.fit())


def test_nonfinite_weights_are_not_saved():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    fails_at(trainer, "publisher", "publish", 3, NonFiniteWeights("NaN in lm_head"))
    with pytest.raises(NonFiniteWeights, match=r"NaN in lm_head.*global_step_2"):
        asyncio.run(trainer.fit())
    assert fakes.saved_step == 2
    assert set(fakes.logged) == {0, 1, 2, 3}


@pytest.mark.defect("controllers-saved-one-step-ahead")
def test_controller_state_is_captured_at_step_end():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    captured: list[int] = []
    fakes.capture_state = lambda: captured.append(trainer.collector.consumed)  # type: ignore[method-assign]
    fails_at(trainer, "learner", "add_logprobs_and_values", 1, EnginesLost("none"))
    with pytest.raises(EnginesLost):
        asyncio.run(trainer.fit())
    assert (captured, trainer.collector.consumed) == ([2], 4)


@pytest.mark.defect("first-probe-gap-lost")
def test_first_publish_metrics_are_in_row_0():
    fakes = FakeTrainerParts()
    asyncio.run(trainer_of(fakes, evaluator=None).fit())
    assert fakes.logged[0].items() >= {"weights/version": 0.0}.items()


def test_metrics_of_unfinished_step_are_not_logged():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)

    async def fail_halfway(step: int, metrics: Metrics) -> Any:
        metrics.add("reward/mean", 99.0)
        raise RolloutsFailed("none")

    trainer.collector.next_groups = fail_halfway  # type: ignore[method-assign]
    with pytest.raises(RolloutsFailed):
        asyncio.run(trainer.fit())
    assert fakes.logged.keys() == {0}


def test_cancellation_during_final_save_still_saves():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    fails_at(trainer, "collector", "next_groups", 1, EnginesLost("none"))
    original, begun = fakes.save, asyncio.Event()

    async def slow(step: int, unfinished: PendingActions | None = None) -> None:
        begun.set()
        await asyncio.sleep(0.05)
        await original(step, unfinished)

    fakes.save = slow  # type: ignore[method-assign]

    async def run() -> None:
        fit = asyncio.ensure_future(trainer.fit())
        await begun.wait()
        fit.cancel()
        await asyncio.wait([fit])

    asyncio.run(run())
    assert fakes.events[-1] == "save 1"


def test_failed_reference_copy_is_repeated_on_resume():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)

    async def fail() -> None:
        raise OSError(28, "no space")

    fakes.update_reference = fail  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no space"):
        asyncio.run(trainer.fit())
    assert fakes.saved_with is not None
    assert fakes.saved_with.actions == ("reference", "publish", "evaluate")
    resumed = FakeTrainerParts(resumed_at=3)
    resumed.unfinished = fakes.saved_with

    async def copy() -> None:
        resumed.events.append("reference")

    resumed.update_reference = copy  # type: ignore[method-assign]
    asyncio.run(trainer_of(resumed).fit())
    assert resumed.events == ["reference", "publish 3", "begin 3/3", "evaluate 3", "save 3"]


def test_tensor_metric_is_saved_as_float():
    fakes = FakeTrainerParts()
    trainer = trainer_of(fakes)
    original = fakes.update

    async def update(batch: Any) -> dict[str, Any]:
        return await original(batch) | {"custom": torch.tensor(2.0)}

    fakes.update = update  # type: ignore[method-assign]
    fakes.fail_at_version = 1
    with pytest.raises(WeightSyncError):
        asyncio.run(trainer.fit())
    assert fakes.saved_with is not None
    assert type(fakes.saved_with.row["custom"]) is float


def test_pending_sft_export_is_written_on_resume():
    fakes = FakeTrainerParts(resumed_at=2)
    fakes.unfinished = PendingActions(("export",), {})
    asyncio.run(sft_trainer_of(fakes).fit())
    assert "export 2" in fakes.events
