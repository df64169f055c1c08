"""What subclasses of SkyRL's trainer override, on batches of the loop: unchanged, it computes what the loop does."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from skyrl_train.algorithms.advantage_step import AdvantageStep, KLInReward
from skyrl_train.algorithms.kl import FixedKLController, k1
from skyrl_train.assembly.algorithm import build_advantage_step
from skyrl_train.config.hydra import load
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.metrics import Metrics
from skyrl_train.skyrl.batches import Rectangles, TrainingInputBatch, training_input
from skyrl_train.skyrl.trainer import FullyAsyncRayPPOTrainer, RayPPOTrainer
from tests.support.hard_batches import SHAPES, hard_batch

ESTIMATORS = ["grpo", "rloo", "reinforce++", "maxrl"]
CFG = SimpleNamespace(
    trainer=SimpleNamespace(placement=SimpleNamespace(colocate_all=False), fully_async=SimpleNamespace(enabled=False))
)


class Same(RayPPOTrainer):
    """Overrides without a change."""

    def compute_advantages_and_returns(self, data: TrainingInputBatch) -> TrainingInputBatch:
        return super().compute_advantages_and_returns(data)

    def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
        return super().apply_reward_kl_penalty(data)


def made(kind: type[RayPPOTrainer], step: Any) -> tuple[RayPPOTrainer, Any]:
    tokenizer = SimpleNamespace(pad_token_id=0)
    one = kind(CFG, None, tokenizer, None, None, None)
    loop = SimpleNamespace(
        step=4,
        group_steps=[],
        batch_steps=[step, "correction"],
        evaluator=None,
        uids_of_groups=[f"row-{number}" for number in range(100)],
        schedule=SimpleNamespace(total_steps=9),
    )
    one.connect(loop)  # type: ignore[arg-type]
    return one, loop


def batch_of(shape: str) -> TrainBatch:
    return hard_batch(shape).with_tokens(advantages=None, returns=None, values=None)


@pytest.mark.parametrize("shape", sorted(SHAPES))
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("kl", [False, True])
def test_without_a_change_advantages_are_those_of_the_loop(shape: str, name: str, kl: bool):
    batch = batch_of(shape)
    step = build_advantage_step(load([f"trainer.algorithm.advantage_estimator={name}"]).trainer.algorithm)
    step = replace(step, normalise_batch=True, kl=KLInReward(k1, FixedKLController(0.1)) if kl else None)
    expected = step(batch, Metrics())
    _, loop = made(Same, step)
    metrics = Metrics()
    found = loop.batch_steps[0](batch, metrics)
    assert loop.batch_steps[1] == "correction"
    torch.testing.assert_close(found.advantages, expected.advantages, atol=1e-9, rtol=1e-9)
    assert ("advantages/mean" in metrics.flush()) == bool(batch.loss_mask.any())


def test_what_nobody_overrides_leaves_the_loop_as_it_was():
    step = AdvantageStep(lambda *args: None)  # type: ignore[arg-type, return-value]
    _, loop = made(RayPPOTrainer, step)
    assert loop.batch_steps[0] is step and loop.group_steps == []


def test_rectangles_are_padded_as_skyrl_pads_and_come_back():
    batch = batch_of("failed rows")
    rectangles = Rectangles(batch)
    data = training_input(batch, rectangles, [f"{row}" for row in range(len(batch))], 99)
    prompts = int(batch.prompt_lengths.max())
    for row in range(len(batch)):
        start, stop = batch.offsets[row], batch.offsets[row + 1]
        length, response = int(batch.prompt_lengths[row]), int(stop - start - batch.prompt_lengths[row])
        whole = data["sequences"][row]
        assert whole[prompts - length : prompts + response].tolist() == batch.input_ids[start:stop].tolist()
        assert (whole[: prompts - length] == 99).all() and (whole[prompts + response :] == 99).all()
        assert data["attention_mask"][row].sum() == stop - start
        assert data["response_mask"][row].tolist()[:response] == [1] * response
    for name, flat in (("action_log_probs", batch.old_logprobs), ("loss_mask", batch.loss_mask.long())):
        assert flat is not None
        of_response = batch.position_ids >= batch.prompt_lengths[batch.sequence_ids]
        assert torch.equal(rectangles.flat(data[name]), torch.where(of_response, flat, torch.zeros_like(flat)))
    with pytest.raises(ValueError, match="as it was given"):
        rectangles.flat(torch.zeros(1, 1))
    with pytest.raises(ValueError, match="rewards: must be a tensor of"):
        data["rewards"] = torch.zeros(len(batch) + 1, 2)


def test_a_changed_reward_is_what_the_estimator_sees():
    class Constant(RayPPOTrainer):
        def apply_reward_kl_penalty(self, data: TrainingInputBatch) -> TrainingInputBatch:
            data["rewards"] = torch.arange(len(data["rewards"]))[:, None] * data["loss_mask"].float()
            self.all_metrics["mine"] = self.global_step
            return data

    def sums(rewards: Any, group_ids: Any, valid: Any) -> Any:
        return rewards

    batch = batch_of("failed rows")
    _, loop = made(Constant, AdvantageStep(sums, kl=KLInReward(k1, FixedKLController(0.1))))
    metrics = Metrics()
    done = loop.batch_steps[0](batch, metrics)
    counts = batch.per_sequence_sum(batch.loss_mask.float())
    expected = (torch.arange(len(batch)) * counts)[batch.sequence_ids] * batch.loss_mask
    torch.testing.assert_close(done.advantages, expected.double())
    assert metrics.flush()["mine"] == 5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("policy_model", "learner"),
        ("train_dataloader", "trainer.seed"),
        ("sync_policy_weights_to_inference_engines", "by the run itself"),
        ("nonsense", "docs/from_skyrl.md"),
    ],
)
def test_what_has_no_counterpart_says_what_has(name: str, said: str):
    one, _ = made(RayPPOTrainer, None)
    with pytest.raises(AttributeError, match=f"no '{name}'.*{said}"):
        getattr(one, name)


def test_a_trainer_that_is_not_connected_or_not_asynchronous_says_so():
    one = RayPPOTrainer(CFG, None, None, None, None, None)
    with pytest.raises(ConfigError, match="part of a run once"):
        _ = one.global_step
    with pytest.raises(ConfigError, match="called by `run"):
        one.train()
    with pytest.raises(ConfigError, match=r"trainer\.fully_async\.enabled=false"):
        FullyAsyncRayPPOTrainer(CFG, None, None, None, None, None)
