"""Overrides of SkyRL's trainer on batches of the loop; an override without changes gives the loop's results."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.advantages import AdvantageCalculator, KLInReward
from skyrl_train.algorithms.kl import FixedKLController, k1
from skyrl_train.config.hydra import load_preset
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.algorithm import build_advantage_step
from skyrl_train.metrics import Metrics
from skyrl_train.skyrl.batches import PaddedLayout, TrainingInputBatch, to_training_input
from skyrl_train.skyrl.trainer import FullyAsyncRayPPOTrainer, RayPPOTrainer, StepMetricsTracker
from tests.support.edge_case_batches import SHAPES, edge_case_batch

ESTIMATORS = ["grpo", "rloo", "reinforce++", "maxrl"]
CFG = SimpleNamespace(
    trainer=SimpleNamespace(placement=SimpleNamespace(colocate_all=False), fully_async=SimpleNamespace(enabled=False))
)


class Same(RayPPOTrainer):
    """A trainer whose overrides change nothing."""

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        return super().compute_advantages_and_returns(data)

    def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
        return super().apply_reward_kl_penalty(data)


def connect_trainer(kind: type[RayPPOTrainer], step: Any) -> tuple[RayPPOTrainer, Any]:
    tokenizer = SimpleNamespace(pad_token_id=0)
    trainer = kind(CFG, None, tokenizer, None, None, None)
    loop = SimpleNamespace(
        step=4,
        trajectory_transforms=[],
        batch_transforms=[step, "correction"],
        evaluator=None,
        learner=None,
        checkpoint_manager=None,
        batch_dump=None,
        metrics=Metrics(),
        sample_ids=[],
        schedule=SimpleNamespace(total_steps=9),
    )
    trainer.connect(loop)  # type: ignore[arg-type]
    return trainer, loop


def samples_of(batch: TrainBatch) -> list[tuple[str, int]]:
    return [(f"row-{group}", row) for row, group in enumerate(batch.group_ids.tolist())]


def batch_of(shape: str) -> TrainBatch:
    return edge_case_batch(shape).with_tokens(advantages=None, returns=None, values=None)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("kl", [False, True])
def test_unchanged_overrides_give_advantages_of_loop(shape: str, name: str, kl: bool):
    batch = batch_of(shape)
    step = build_advantage_step(load_preset([f"trainer.algorithm.advantage_estimator={name}"]).trainer.algorithm)
    step = replace(step, advantage_batch_normalize=True, kl=KLInReward(k1, FixedKLController(0.1)) if kl else None)
    expected = step(batch, Metrics())
    _, loop = connect_trainer(Same, step)
    metrics = Metrics()
    loop.sample_ids = samples_of(batch)
    actual = loop.batch_transforms[0](batch, metrics)
    assert loop.batch_transforms[1] == "correction"
    torch.testing.assert_close(actual.token_advantages, expected.token_advantages, atol=1e-9, rtol=1e-9)
    assert ("advantages/mean" in metrics.flush()) == bool(batch.loss_mask.any())


def test_trainer_without_overrides_leaves_loop_unchanged():
    step = AdvantageCalculator(lambda *args: None)  # type: ignore[arg-type, return-value]
    _, loop = connect_trainer(RayPPOTrainer, step)
    assert loop.batch_transforms[0] is step


def test_padded_layout_round_trip():
    batch = batch_of("failed rows")
    layout = PaddedLayout(batch)
    data = to_training_input(batch, layout, samples_of(batch), 99)
    assert data.metadata["trajectory_ids"][0] == "row-0_0"
    prompts = int(batch.prompt_lengths.max())
    for row in range(len(batch)):
        start, stop = batch.offsets[row], batch.offsets[row + 1]
        length, response = int(batch.prompt_lengths[row]), int(stop - start - batch.prompt_lengths[row])
        sequence = data["sequences"][row]
        assert sequence[prompts - length : prompts + response].tolist() == batch.input_ids[start:stop].tolist()
        assert (sequence[: prompts - length] == 99).all() and (sequence[prompts + response :] == 99).all()
        assert data["attention_mask"][row].sum() == stop - start
        assert data["response_mask"][row].tolist()[:response] == [1] * response
    for name, flat in (("action_log_probs", batch.old_logprobs), ("loss_mask", batch.loss_mask.long())):
        assert flat is not None
        is_response = batch.position_ids >= batch.prompt_lengths[batch.sequence_ids]
        assert torch.equal(layout.to_ragged(data[name]), torch.where(is_response, flat, torch.zeros_like(flat)))
    with pytest.raises(ValueError, match="as in the batch of the step"):
        layout.to_ragged(torch.zeros(1, 1))
    with pytest.raises(ValueError, match="rewards: must be a tensor of"):
        data["rewards"] = torch.zeros(len(batch) + 1, 2)


def test_estimator_gets_changed_rewards():
    class Constant(RayPPOTrainer):
        def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
            data["rewards"] = torch.arange(len(data["rewards"]))[:, None] * data["loss_mask"].float()
            self.all_metrics["mine"] = self.global_step
            return data

    def sums(rewards: Any, group_ids: Any, valid: Any) -> Any:
        return rewards

    batch = batch_of("failed rows")
    _, loop = connect_trainer(Constant, AdvantageCalculator(sums, kl=KLInReward(k1, FixedKLController(0.1))))
    metrics = Metrics()
    loop.sample_ids = samples_of(batch)
    computed = loop.batch_transforms[0](batch, metrics)
    counts = batch.sum_per_sequence(batch.loss_mask.float())
    expected = (torch.arange(len(batch)) * counts)[batch.sequence_ids] * batch.loss_mask
    torch.testing.assert_close(computed.token_advantages, expected.double())
    assert metrics.flush()["mine"] == 5


def test_rewards_of_multi_sequence_episodes_count_once():
    """Check that masked tokens and episodes neither lose nor repeat the reward of an episode."""
    batch = TrainBatch(
        input_ids=torch.arange(10),
        loss_mask=torch.tensor([0, 0, 0, 0, 0, 1, 0, 0, 0, 1]).bool(),
        offsets=torch.tensor([0, 2, 4, 6, 8, 10]),
        prompt_lengths=torch.ones(5, dtype=torch.int64),
        group_ids=torch.zeros(5, dtype=torch.int64),
        rewards=torch.tensor([3.0, 3.0, 2.0, 2.0, 1.0]),
        temperature=torch.ones(5),
        status=torch.ones(5, dtype=torch.bool),
        min_versions=torch.zeros(5, dtype=torch.int64),
        max_versions=torch.zeros(5, dtype=torch.int64),
        token_rewards=torch.tensor([0.0, 0, 0, 0, 0, 2.0, 0, 0, 0, 1.0]),
        episode_ids=torch.tensor([0, 0, 1, 1, 2]),
    )
    step = build_advantage_step(load_preset(["trainer.algorithm.advantage_estimator=grpo"]).trainer.algorithm)
    _, loop = connect_trainer(Same, step)
    loop.sample_ids = samples_of(batch)
    expected, actual = (
        step(batch, Metrics()).token_advantages,
        loop.batch_transforms[0](batch, Metrics()).token_advantages,
    )
    torch.testing.assert_close(actual, expected)
    assert actual[9] < 0 < -actual[9]


class TrainOverride(RayPPOTrainer):
    calls_super = True

    def train(self) -> None:
        self.all_metrics["begun"] = 1
        if self.calls_super:
            super().train()


class AsyncTrainOverride(RayPPOTrainer):
    calls_super = True

    async def train(self) -> None:
        if self.calls_super:
            await super().train()


class FullyAsyncTrainOverride(AsyncTrainOverride, FullyAsyncRayPPOTrainer):
    pass


@pytest.mark.parametrize(
    "kind", [RayPPOTrainer, TrainOverride, AsyncTrainOverride, FullyAsyncRayPPOTrainer, FullyAsyncTrainOverride]
)
def test_train_override_runs_around_training(kind: type[RayPPOTrainer], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CFG.trainer.fully_async, "enabled", True)
    trainer, loop = connect_trainer(kind, None)
    steps = []

    async def fit() -> None:
        steps.append(trainer.global_step)

    loop.fit = fit
    asyncio.run(trainer.run())
    assert steps == [5]
    if hasattr(kind, "calls_super"):
        monkeypatch.setattr(kind, "calls_super", False)
        trainer, loop = connect_trainer(kind, None)
        with pytest.raises(ConfigError, match="ended without a training step"):
            asyncio.run(trainer.run())


def test_cancelled_run_does_not_start_training():
    started, may_continue = threading.Event(), threading.Event()

    class Prepares(RayPPOTrainer):
        def train(self) -> None:
            started.set()
            may_continue.wait(10)
            super().train()

    trainer, loop = connect_trainer(Prepares, None)

    async def fit() -> None:
        raise AssertionError

    async def run() -> None:
        loop.fit = fit
        running = asyncio.ensure_future(trainer.run())
        await asyncio.to_thread(started.wait)
        running.cancel()
        await asyncio.sleep(0)
        may_continue.set()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())


def test_tracker_logs_numbers_once():
    trainer, loop = connect_trainer(RayPPOTrainer, None)
    tracker = StepMetricsTracker()
    tracker.trainer = trainer
    tracker.log({"mine": 3, "text": "x", "tensor": torch.tensor(2.0)}, step=5, commit=True)
    metrics = Metrics()
    loop.trajectory_transforms[0]([], metrics)
    assert metrics.flush() == {"mine": 3.0, "tensor": 2.0}
    loop.trajectory_transforms[0]([], metrics)
    assert metrics.flush() == {}


def test_training_input_batch_rows_match_skyrl(tmp_path: Path):
    data = TrainingInputBatch(one=torch.arange(6).reshape(3, 2), two=None)
    assert len(data) == data.batch_size == 3 and len(data[1:]) == 2
    assert data[0]["one"].tolist() == [[0, 1]] and data[-1]["one"].tolist() == [[4, 5]]
    data.metadata["uids"] = ["a", "b", "c"]
    first, second = data.chunk(2)
    assert (len(first), len(second)) == (2, 1) and second["two"] is None
    assert first.metadata is data.metadata and data.slice(0, 3, 2)["one"].tolist() == [[0, 1], [4, 5]]
    assert data.repeat(2)["one"].tolist() == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5]]
    assert first.repeat_interleave(2)["one"].tolist() == [[0, 1], [0, 1], [2, 3], [2, 3]]
    data.save(tmp_path / "batch.pkl")
    for restored in (TrainingInputBatch.cat(data.chunk(2)), TrainingInputBatch().load(tmp_path / "batch.pkl")):
        assert torch.equal(restored["one"], data["one"]) and restored.metadata == data.metadata


def test_unconnected_or_synchronous_trainer_raises_error():
    trainer = RayPPOTrainer(CFG, None, None, None, None, None)
    assert trainer.global_step == 0
    with pytest.raises(ConfigError, match="not connected to a run yet"):
        _ = trainer.total_training_steps
    with pytest.raises(ConfigError, match="the run has not started"):
        trainer.train()
    with pytest.raises(ConfigError, match=r"trainer\.fully_async\.enabled=false"):
        FullyAsyncRayPPOTrainer(CFG, None, None, None, None, None)
