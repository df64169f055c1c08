"""Learners with a critic or a reference."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.value_objective import ValueObjective, explained_variance
from skyrl_train.config.schema import OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.learner.learner import BatchSizes, Learner, LocalWorker, WorkerGroup
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.metrics import Metrics
from skyrl_train.models.loading import load_causal_lm
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.padded_reference import padded_values
from tests.support.recording_strategies import RecordingWorker

RECORDING = "tests.support.recording_strategies:RecordingSingle"
OBJECTIVE = ValueObjective(value_clip=0.2)


def critic_worker(model_path: str, kind: type[LearnerWorker] = LearnerWorker, **changes: Any) -> LearnerWorker:
    return kind(tiny_spec(model_path, objective=OBJECTIVE, value_head_prefix="value_head", **changes), 0, 1)


def learner_of(model_path: str, critic: LearnerWorker | None, sizes: BatchSizes, **changes: Any) -> Learner:
    policy = WorkerGroup([LocalWorker(LearnerWorker(tiny_spec(model_path, **changes), 0, 1))])
    return Learner(policy, None, sizes, critic=None if critic is None else WorkerGroup([LocalWorker(critic)]))


async def setup(learner: Learner) -> None:
    """Set up all models. A process has one process group, which the policy creates and the other models share."""
    await learner.policy.setup()
    for group in (learner.critic, learner.reference):
        for worker in group.workers if group else ():
            worker.worker.build(worker.worker.spec.model_path)


def valued_batch() -> TrainBatch:
    batch = policy_batch()
    generator = torch.Generator().manual_seed(1)
    returns = torch.randn(len(batch.input_ids), generator=generator) * batch.loss_mask
    return batch.with_tokens(returns=returns, values=torch.zeros_like(returns))


def random_head(hidden_size: int) -> Tensor:
    """Return a value head that is not 0, so that the other layers have gradients, too."""
    return 0.01 * torch.randn(1, hidden_size, generator=torch.Generator().manual_seed(2))


def set_head(worker: LearnerWorker) -> None:
    weight: Tensor = worker.module.value_head.weight.data
    weight.copy_(random_head(weight.shape[1]))


@pytest.mark.parametrize(("sequences", "max_tokens"), [(1, None), (3, None), (100, None), (None, 20)])
def test_critic_gradient_equals_padded_batch(
    tiny_model_path: str, sequences: int | None, max_tokens: int | None
) -> None:
    batch = valued_batch()
    worker = critic_worker(tiny_model_path, RecordingWorker, strategy=RECORDING)
    sizes = BatchSizes(100, 100, micro_train_batch_size_per_gpu=sequences, max_tokens_per_microbatch=max_tokens)
    learner = learner_of(tiny_model_path, worker, sizes)

    async def run() -> None:
        await setup(learner)
        set_head(worker)
        await learner.update(batch)
        await learner.close()

    asyncio.run(run())
    model = load_causal_lm(tiny_model_path, dtype=torch.float32)
    head = random_head(model.config.hidden_size).requires_grad_()
    OBJECTIVE(batch, padded_values(model, head, batch), None, int(batch.loss_mask.sum()), Metrics()).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert head.grad is not None
    expected["value_head.weight"] = head.grad
    assert isinstance(worker, RecordingWorker)
    actual = worker.gradients()
    total_norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        tolerance = 1e-4 * max(float(gradient.norm()), 1e-3 * float(total_norm))
        assert float((actual[name] - gradient).norm()) <= tolerance, name


def test_critic_has_its_own_mini_batches(tiny_model_path: str) -> None:
    batch = policy_batch().with_tokens(old_logprobs=None, ref_logprobs=policy_batch().ref_logprobs)  # 4 prompts
    worker = critic_worker(tiny_model_path, optimizer_config=OptimizerConfig(lr=1e-2, scheduler="linear"))
    learner = learner_of(
        tiny_model_path, worker, BatchSizes(4, 3, update_epochs_per_batch=2, micro_forward_batch_size_per_gpu=3)
    )

    async def run() -> tuple[TrainBatch, dict[str, float], Tensor]:
        await setup(learner)
        try:
            set_head(worker)
            scored = await learner.add_logprobs_and_values(batch)
            assert scored.values is not None
            metrics = await learner.update(scored.with_tokens(returns=scored.values + batch.loss_mask))
            updated = (await learner.add_logprobs_and_values(batch)).values
            assert updated is not None
            return scored, metrics, updated
        finally:
            await learner.close()

    scored, metrics, after = asyncio.run(run())
    model = load_causal_lm(tiny_model_path, dtype=torch.float32)
    assert scored.values is not None
    expected = padded_values(model, random_head(model.config.hidden_size), batch).detach()
    torch.testing.assert_close(scored.values, expected, atol=1e-4, rtol=0)
    # Two mini-batches and two epochs make four updates of a schedule of ten, with factors 1, 0.9, 0.8 and 0.7.
    assert metrics["critic/lr"] == pytest.approx(1e-2 * 0.85)
    assert metrics["policy/lr"] == 1e-3
    assert metrics["critic/loss"] > 0
    assert metrics["critic/grad_norm"] > 0
    assert metrics["critic/explained_variance"] <= 1
    mask = batch.loss_mask
    assert float((scored.values + 1 - after)[mask].square().mean()) < 1


def test_update_processes_tokens_in_threads(tiny_model_path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch, on_main_thread = valued_batch(), []

    def record_thread(compute: Callable[..., Any]) -> Callable[..., Any]:
        def record_and_call(*args: Any) -> Any:
            on_main_thread.append(threading.current_thread() is threading.main_thread())
            return compute(*args)

        return record_and_call

    monkeypatch.setattr("skyrl_train.learner.learner.explained_variance", record_thread(explained_variance))
    monkeypatch.setattr(
        TrainBatch, "num_loss_tokens", property(record_thread(vars(TrainBatch)["num_loss_tokens"].fget))
    )
    learner = learner_of(tiny_model_path, critic_worker(tiny_model_path), BatchSizes(100, 100))

    async def run() -> None:
        await setup(learner)
        await learner.update(batch)
        await learner.close()

    asyncio.run(run())
    assert len(on_main_thread) >= 5, "explained variance once, and loss tokens twice per model"
    assert not any(on_main_thread)


def test_critic_does_not_change_the_policy_update(tiny_model_path: str) -> None:
    weights = []
    for with_critic in (False, True):
        critic = critic_worker(tiny_model_path) if with_critic else None
        learner = learner_of(tiny_model_path, critic, BatchSizes(100, 1))

        async def run(learner: Learner = learner) -> list[Tensor]:
            await setup(learner)
            await learner.update(valued_batch())
            worker = learner.policy.workers[0].worker
            await learner.close()
            return [p.detach().clone() for p in worker.module.parameters()]

        weights.append(asyncio.run(run()))
    assert all(torch.equal(without, with_critic) for without, with_critic in zip(*weights, strict=True))


def test_reloaded_reference_computes_as_the_new_model(tiny_model_path: str, tmp_path: Any) -> None:
    worker = LearnerWorker(tiny_spec(tiny_model_path, optimizer_config=None, total_steps=None, objective=None), 0, 1)
    policy = LearnerWorker(tiny_spec(tiny_model_path, optimizer_config=OptimizerConfig(lr=1e-2)), 0, 1)
    batch = policy_batch()

    async def run() -> list[Tensor]:
        learner = Learner(WorkerGroup([LocalWorker(policy)]), WorkerGroup([LocalWorker(worker)]), BatchSizes(100))
        await setup(learner)
        assert learner.reference is not None
        before = await learner.compute_logprobs_or_values(learner.reference, batch)
        await learner.update(batch)
        await learner.policy.call_all("export", str(tmp_path))
        await learner.reference.call_all("reload", str(tmp_path))
        reloaded = [
            await learner.compute_logprobs_or_values(group, batch) for group in (learner.reference, learner.policy)
        ]
        await learner.close()
        return [before, *reloaded]

    before, reference, policy_logprobs = asyncio.run(run())
    assert torch.equal(reference, policy_logprobs)
    assert not torch.allclose(before, reference, atol=1e-3)
