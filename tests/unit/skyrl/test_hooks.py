"""Overrides around scoring, updates and checkpoints: changes reach the loop, and unchanged batches stay as they are."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.metrics import Metrics
from skyrl_train.skyrl.batches import (
    PaddedLayout,
    TrainingInputBatch,
    apply_changes,
    set_from_output,
    to_training_input,
)
from skyrl_train.skyrl.generator_outputs import PostprocessedOutput
from skyrl_train.skyrl.trainer import RayPPOTrainer
from skyrl_train.trainer.checkpoint_manager import PendingActions
from tests.support.edge_case_batches import SHAPES, edge_case_batch

CFG = SimpleNamespace(
    trainer=SimpleNamespace(
        placement=SimpleNamespace(colocate_all=False),
        ckpt_path="ckpts",
        export_path="exports",
        resume_mode="latest",
        update_ref_every_epoch=True,
    )
)


def samples_of(batch: TrainBatch) -> list[tuple[str, int]]:
    return [(f"row-{group}", row) for row, group in enumerate(batch.group_ids.tolist())]


def data_of(batch: TrainBatch) -> TrainingInputBatch:
    return to_training_input(batch, PaddedLayout(batch), samples_of(batch), 99)


def apply_to_batch(batch: TrainBatch, data: TrainingInputBatch, scored: bool = True) -> TrainBatch:
    return apply_changes(batch, data, "Mine.hook", 99, scored=scored)


class Learner:
    """A learner that adds log-probs to every token and records the batches of updates."""

    def __init__(self) -> None:
        self.trained_batches: list[TrainBatch] = []

    async def add_logprobs_and_values(self, batch: TrainBatch) -> TrainBatch:
        return batch.with_tokens(old_logprobs=torch.full((len(batch.input_ids),), -1.0))

    async def update(self, batch: TrainBatch) -> dict[str, float]:
        self.trained_batches.append(batch)
        return {"policy/loss": 2.0, "critic/loss": 3.0}


class RecordingCheckpointManager:
    """A checkpoint manager that records its calls."""

    resumed_from = Path("ckpts/global_step_4")

    def __init__(self) -> None:
        self.calls: list[Any] = []

    async def save(self, step: int, unfinished: PendingActions | None = None) -> None:
        self.calls.append(("save", step, unfinished))

    async def wait_until_written(self) -> None:
        self.calls.append("written")

    async def resume(self) -> tuple[int, PendingActions]:
        return 4, PendingActions(("evaluate",), {})

    async def export(self, step: int) -> None:
        self.calls.append(("export", step))

    async def update_reference(self) -> None:
        self.calls.append("reference")


def connect_trainer(kind: type[RayPPOTrainer], batch: TrainBatch | None = None) -> tuple[RayPPOTrainer, Any]:
    trainer = kind(CFG, None, SimpleNamespace(pad_token_id=99), None, None, None)
    loop = SimpleNamespace(
        step=4,
        trajectory_transforms=[],
        batch_transforms=[],
        evaluator=None,
        batch_dump=SimpleNamespace(write=None),
        learner=Learner(),
        checkpoint_manager=RecordingCheckpointManager(),
        metrics=Metrics(),
        sample_ids=[] if batch is None else samples_of(batch),
    )
    trainer.connect(loop)  # type: ignore[arg-type]
    return trainer, loop


@pytest.mark.parametrize("shape", sorted(SHAPES))
def test_unchanged_data_leaves_every_tensor_the_same_object(shape: str):
    batch = edge_case_batch(shape)
    same = apply_to_batch(batch, data_of(batch))
    assert all(getattr(same, name) is value for name, value in vars(batch).items())


@pytest.mark.parametrize("shape", sorted(set(SHAPES) - {"nothing counts"}))
def test_changed_tensors_reach_their_tokens(shape: str):
    batch = edge_case_batch(shape)
    data = data_of(batch)
    data["advantages"] = data["advantages"] * 2
    data["base_action_log_probs"] = data["base_action_log_probs"] - 1
    data["loss_mask"][0] = 0
    applied = apply_to_batch(batch, data)
    rows = batch.sequence_ids
    mask = batch.loss_mask & (rows != 0)
    assert torch.equal(applied.loss_mask, mask)
    assert batch.token_advantages is not None and batch.ref_logprobs is not None and applied.ref_logprobs is not None
    advantages = applied.token_advantages
    assert advantages is not None and torch.equal(advantages, torch.where(mask, 2 * batch.token_advantages, 0))
    assert torch.equal(applied.ref_logprobs[mask], batch.ref_logprobs[mask] - 1)
    assert applied.rollout_logprobs is batch.rollout_logprobs and applied.old_logprobs is batch.old_logprobs


def test_failed_samples_stay_masked():
    batch = edge_case_batch("failed rows")
    data = data_of(batch)
    data["loss_mask"] = data["response_mask"].clone()
    mask = apply_to_batch(batch, data, scored=False).loss_mask
    assert not mask[~batch.expand_to_tokens(batch.status)].any() and mask.sum() > batch.loss_mask.sum()


def test_invalid_changes_raise_error():
    batch = edge_case_batch("regular")
    longer = torch.zeros(len(batch), 99)
    for name, value, message in (
        ("sequences", data_of(batch)["sequences"] + 1, r"data\['sequences'\] has changed"),
        ("response_mask", None, r"data\['response_mask'\] has changed"),
        ("loss_mask", data_of(batch)["loss_mask"] * 0.5, r"data\['loss_mask'\] must be 0 or 1"),
        ("loss_mask", data_of(batch)["response_mask"], r"data\['loss_mask'\] has tokens that it did not have"),
        ("advantages", longer, r"data\['advantages'\] has shape"),
    ):
        data = data_of(batch)
        data[name] = value
        with pytest.raises(ConfigError, match=f"Mine.hook: {message}"):
            apply_to_batch(batch, data)


def test_output_is_padded_to_the_rows_of_the_batch():
    batch = edge_case_batch("failed rows")
    rows = [[float(row)] * int(size) for row, size in enumerate(batch.lengths - batch.prompt_lengths)]
    output: Any = {
        "response_ids": rows,
        "rewards": rows,
        "loss_masks": [[1] * len(row) for row in rows],
        "rollout_logprobs": [[-0.5] * len(row) for row in rows],
    }
    data = set_from_output(data_of(batch), output, "Mine.hook")
    for row, values in enumerate(rows):
        assert data["rewards"][row].tolist() == values + [0.0] * (data["rewards"].shape[1] - len(values))
    assert torch.equal(data["loss_mask"], data["response_mask"])
    assert torch.equal(data["rollout_logprobs"], -0.5 * data["response_mask"])
    output["response_ids"] = rows[1:]
    with pytest.raises(ConfigError, match="has 6 entries, but the step has 7"):
        set_from_output(data_of(batch), output, "Mine.hook")


def test_postprocessed_output_is_a_pair_and_an_output():
    output: Any = {"rewards": [1.0], "response_ids": [[5, 6]]}
    trainer, _ = connect_trainer(RayPPOTrainer)
    first, uids = pair = trainer.postprocess_generator_output(output, ["a"])
    assert isinstance(pair, PostprocessedOutput) and uids == ["a"]
    assert pair["rewards"] == first["rewards"] == [[0.0, 1.0]] and pair[1] == ["a"]
    pair["rewards"] = [[2.0, 0.0]]
    assert output["rewards"] == [[2.0, 0.0]]


def test_scores_and_updates_pass_through_their_overrides():
    class Mine(RayPPOTrainer):
        def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
            assert training_input["action_log_probs"] is None
            data = super().fwd_logprobs_values_reward(training_input)
            data["mine"] = torch.arange(len(data))
            data["base_action_log_probs"] = data["action_log_probs"] - 1
            return data

        def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
            assert data["mine"].tolist() == list(range(len(data))) and data.metadata["global_step"] == 5
            data["loss_mask"][0] = 0
            status = super().train_critic_and_policy(data)
            self.all_metrics["mine"] = status["loss"]
            return status

    batch = edge_case_batch("regular").with_tokens(old_logprobs=None, ref_logprobs=None)
    _, loop = connect_trainer(Mine, batch)

    async def step() -> dict[str, float]:
        scored = await loop.learner.add_logprobs_and_values(batch)
        mask = scored.loss_mask
        assert torch.equal(scored.ref_logprobs[mask], scored.old_logprobs[mask] - 1)
        assert scored.input_ids is batch.input_ids and scored.token_rewards is batch.token_rewards
        values: dict[str, float] = await loop.learner.update(scored.with_tokens(token_rewards=None))
        return values

    assert asyncio.run(step()) == {"policy/loss": 2.0, "critic/loss": 3.0}
    (trained,) = loop.learner.trained_batches
    assert torch.equal(trained.loss_mask, batch.loss_mask & (batch.sequence_ids != 0))
    assert loop.metrics.flush() == {"mine": 2.0}


def test_batch_of_a_step_is_forgotten_before_the_next():
    class Mine(RayPPOTrainer):
        def fwd_logprobs_values_reward(self, training_input: TrainingInputBatch) -> TrainingInputBatch:
            assert "mine" not in training_input
            data = super().fwd_logprobs_values_reward(training_input)
            data["mine"] = torch.arange(len(data))
            self.all_metrics["rows"] = len(data.metadata["uids"])
            return data

    _, loop = connect_trainer(Mine)

    async def run() -> None:
        for shape in ("regular", "failed rows"):
            batch = edge_case_batch(shape)
            loop.sample_ids = samples_of(batch)
            loop.trajectory_transforms[0]([], loop.metrics)
            await loop.learner.add_logprobs_and_values(batch)
            assert loop.metrics.flush() == {"rows": len(batch)}

    asyncio.run(run())


@pytest.mark.parametrize("calls", [0, 2])
def test_update_override_must_call_super_once(calls: int):
    class Mine(RayPPOTrainer):
        def train_critic_and_policy(self, data: TrainingInputBatch) -> dict[str, float]:
            status: dict[str, float] = {}
            for _ in range(calls):
                status = super().train_critic_and_policy(data)
            return status

    batch = edge_case_batch("regular")
    _, loop = connect_trainer(Mine, batch)
    with pytest.raises(
        ConfigError, match=r"Mine\.train_critic.* super\(\)\.train_critic_and_policy\(\) (exactly )?once"
    ):
        asyncio.run(loop.learner.update(batch))
    assert len(loop.learner.trained_batches) == min(calls, 1)


def test_checkpoint_overrides_run_around_saves_and_loads():
    class Mine(RayPPOTrainer):
        calls_super = True
        loaded: Any = None

        def save_checkpoints(self) -> str:
            return super().save_checkpoints() if self.calls_super else ""

        def load_checkpoints(self) -> tuple[int, str | None]:
            resumed = super().load_checkpoints()
            return resumed if self.loaded is None else self.loaded

        def save_models(self) -> None:
            self.all_metrics["exported"] = self.global_step

        def update_ref_with_policy(self) -> None:
            super().update_ref_with_policy()

    trainer, loop = connect_trainer(Mine)

    async def run() -> None:
        pending = PendingActions(("export",), {})
        await loop.checkpoint_manager.save(4, pending)
        assert loop.checkpoint_manager.calls == [("save", 4, pending), "written"]
        assert await loop.checkpoint_manager.resume() == (4, PendingActions(("evaluate",), {}))
        await loop.checkpoint_manager.export(4)
        await loop.checkpoint_manager.update_reference()
        assert loop.checkpoint_manager.calls[2:] == ["reference"] and loop.metrics.flush() == {"exported": 4}
        Mine.loaded = 3, None
        with pytest.raises(ConfigError, match=r"load_checkpoints returned \(3, None\).*with the loaded step 4"):
            await loop.checkpoint_manager.resume()
        Mine.calls_super = False
        with pytest.raises(ConfigError, match=r"must call super\(\)\.save_checkpoints\(\) once; set trainer\.ckpt_int"):
            await loop.checkpoint_manager.save(5)

    asyncio.run(run())
    with pytest.raises(ConfigError, match=r"save_checkpoints: only the run calls this method"):
        RayPPOTrainer.save_checkpoints(trainer)
