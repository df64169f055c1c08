"""The parts of a training loop as one object that only records the calls."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.data.batch import SFTExample
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import TrajectoryGroup, Turn
from skyrl_train.errors import DeadlineExceeded, WeightSyncError
from skyrl_train.report.trackers import Trackers
from skyrl_train.rollouts.collector import RolloutCollector
from skyrl_train.trainer.checkpoint_manager import PendingActions, SkippedUpdates
from skyrl_train.trainer.trainer import OffloadManager, SFTTrainer, StepSchedule, Trainer
from tests.support.trajectories import trajectory_from


class FakeTrainerParts:
    """Learner, engines, state and tracker in one. `events` lists the calls."""

    def __init__(self, resumed_at: int = 0):
        self.events: list[str] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.version = -1
        self.resumed_at = resumed_at
        self.fail_at_version: int | None = None
        self.update_logprobs: Any = None
        self.saved_step = 0
        self.skipped_updates = SkippedUpdates()
        self.marked = 0
        self.unfinished = PendingActions((), {})
        self.saved_with: PendingActions | None = None
        self.async_checkpoint = False
        self.answering = True
        self.asked_within_s: list[float] = []
        """Number of checks whether the ranks respond."""

    async def rollout(self, prompt: Prompt, position: int) -> TrajectoryGroup:
        turn = Turn(0, 1, 1.0, "stop", self.version, self.version)
        rows = [trajectory_from(prompt, n, [1], [2], [1], [-1.0], [turn], float(n), "stop", 1.0) for n in range(2)]
        return TrajectoryGroup(prompt, rows)

    async def add_logprobs_and_values(self, batch: Any) -> Any:
        self.events.append("score")
        return batch

    async def add_reference_logprobs(self, batch: Any) -> Any:
        return batch

    async def update(self, batch: Any) -> dict[str, float]:
        self.events.append(f"update {len(batch)}")
        return {"policy/loss": 0.5}

    async def publish(self, version: int) -> dict[str, float]:
        if version == self.fail_at_version:
            raise WeightSyncError("incomplete")
        self.version = version
        self.events.append(f"publish {version}")
        return {"weights/version": float(version)}

    async def run(self, step: int) -> dict[str, float]:
        self.events.append(f"evaluate {step}")
        return {"eval/x/avg_score": 0.5}

    async def resume(self) -> tuple[int, PendingActions]:
        return self.resumed_at, self.unfinished

    def capture_state(self) -> None:
        self.marked += 1

    async def save(self, step: int, unfinished: PendingActions | None = None) -> None:
        self.events.append(f"save {step}")
        self.saved_step, self.saved_with = step, unfinished

    async def wait_until_written(self) -> None:
        """A save is written when it returns."""

    async def ensure_saved(self, step: int) -> None:
        assert self.saved_step == step

    def latest_before(self, before: int) -> Path | None:
        return Path(f"global_step_{self.saved_step}") if 0 < self.saved_step < before else None

    async def abandon_pending_save(self) -> None:
        self.events.append("give up")

    async def stop_restarts(self) -> None:
        self.events.append("release ranks")

    async def is_responsive(self, timeout_s: float) -> bool:
        self.asked_within_s.append(timeout_s)
        return self.answering

    async def attach_stall_report(self, error: BaseException) -> None:
        if isinstance(error, DeadlineExceeded):
            error.explanation = "policy rank 1 does not respond"

    async def export(self, step: int) -> None:
        self.events.append(f"export {step}")

    async def update_reference(self) -> None:
        """There is none."""

    async def offload(self) -> None:
        self.events.append("offload")

    async def onload(self) -> None:
        self.events.append("onload")

    async def free_transient_memory(self) -> None:
        self.events.append("free transient memory")

    async def onload_weights_only(self) -> None:
        self.events.append("keep")

    async def wake_up(self, tags: Any = None) -> None:
        self.events.append(f"wake {tags[0] if tags else 'all'}")

    async def sleep(self, level: int = 1, keep_weights: bool = False) -> None:
        self.events.append("sleep" if level == 1 else f"sleep {level}")

    def begin(self, step: int, total: int) -> None:
        self.events.append(f"begin {step}/{total}")

    def log(self, metrics: dict[str, float], step: int) -> None:
        self.logged[step] = dict(metrics)

    def samples(self, rows: Any, step: int) -> None:
        """Not looked at here."""

    def table(self, rows: Any, step: int) -> None:
        """Nor this."""

    def close(self) -> None:
        """Nothing to close."""


def trainer_of(
    fakes: Any, max_staleness: int = 0, residency: Any = None, evaluator: Any = "fakes", batch_dump: Any = None
) -> Trainer:
    schedule = StepSchedule(num_prompts=5, train_batch_size=2, epochs=1)
    return Trainer(
        schedule=schedule,
        cfg=TrainerConfig(eval_interval=2, ckpt_interval=2),
        collector=RolloutCollector(
            fakes.rollout, lambda i: Prompt(str(i), [], "x"), schedule.num_prompts_in_step, max_staleness, 0.5
        ),
        learner=fakes,
        batch_transforms=[lambda batch, metrics: batch.with_tokens(advantages=batch.token_rewards)],
        publisher=fakes,
        offload_manager=residency or OffloadManager(),
        evaluator=fakes if evaluator == "fakes" else evaluator,
        checkpoint_manager=fakes,
        trackers=Trackers({"fake": fakes}),
        batch_dump=batch_dump,
    )


def sft_trainer_of(fakes: Any) -> SFTTrainer:
    schedule = StepSchedule(num_prompts=4, train_batch_size=2, epochs=1)
    return SFTTrainer(
        sft_examples=[SFTExample([1, 2], [False, True])] * 4,
        index_at=lambda position: position,
        schedule=schedule,
        cfg=TrainerConfig(ckpt_interval=2),
        learner=fakes,
        checkpoint_manager=fakes,
        trackers=Trackers({"fake": fakes}),
    )


def fails_at(trainer: Any, part: str, method: str, step: int, error: BaseException) -> None:
    """Make a method of a part raise when `step` steps are finished."""
    owner = getattr(trainer, part) if part else trainer
    original = getattr(owner, method)

    async def failing(*args: Any) -> Any:
        if trainer.step == step:
            raise error
        return await original(*args)

    setattr(owner, method, failing)
