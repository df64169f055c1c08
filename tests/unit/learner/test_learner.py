from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.algorithms.losses import clip_cov, kl_cov
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.algorithms.reductions import assign_loss_weights, sequence_mean, token_mean
from skyrl_train.algorithms.token_selection import select_clip_cov_tokens, select_kl_cov_tokens
from skyrl_train.algorithms.value_objective import ValueObjective
from skyrl_train.cluster.addresses import BIND_ADDRESS, NODE_ADDRESS
from skyrl_train.config.schema import OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import WeightSyncError
from skyrl_train.learner.batch_sharding import ForwardPlan, StoredCall
from skyrl_train.learner.learner import BatchSizes, Learner, LocalWorker, WorkerGroup, mini_batch_rows
from skyrl_train.learner.worker import LearnerWorker, MiniBatch
from skyrl_train.metrics import Metrics
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.report.profiling import MemorySnapshotRecorder
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.learner_specs import FULL_OBJECTIVE, policy_batch, tiny_spec
from tests.support.machine_speed import network_address
from tests.support.padded_reference import assert_same_tensors, padded_scores
from tests.support.recording_strategies import RecordingWorker

RECORDING = "tests.support.recording_strategies:RecordingSingle"


TOKEN_MEAN = partial(token_mean, max_seq_len=1)


def gradients(
    model_path: str, batch: TrainBatch, sizes: BatchSizes, objective: PolicyObjective = FULL_OBJECTIVE, **options: Any
) -> dict[str, Tensor]:
    worker = RecordingWorker(tiny_spec(model_path, strategy=RECORDING, objective=objective), 0, 1)
    learner = Learner(WorkerGroup([LocalWorker(worker)]), None, sizes, **options)

    async def run() -> None:
        await learner.setup()
        await learner.update(batch)
        await learner.close()

    asyncio.run(run())
    return worker.gradients()


def padded_gradients(
    model_path: str, batch: TrainBatch, objective: PolicyObjective = FULL_OBJECTIVE, reduction: Any = TOKEN_MEAN
) -> dict[str, Tensor]:
    """Return the reference gradients: those of the padded batch in the model's own forward method."""
    model = load_causal_lm(model_path, dtype=torch.float32)
    logprobs, entropy = padded_scores(model, batch)
    objective(
        assign_loss_weights(batch, reduction), logprobs, entropy, int(batch.loss_mask.sum()), Metrics()
    ).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("critic", [False, True])
def test_memory_is_freed_for_the_next_model_only(tiny_model_path: str, critic: bool):
    """Between the optimizer steps of one model no other model uses the accelerator."""
    calls: list[str] = []
    workers = {}
    for role in ("policy", "critic") if critic else ("policy",):
        changes = {} if role == "policy" else {"objective": ValueObjective(0.2), "value_head_prefix": "value_head"}
        workers[role] = LearnerWorker(tiny_spec(tiny_model_path, shares_accelerator=True, **changes), 0, 1)
    groups = {role: WorkerGroup([LocalWorker(worker)]) for role, worker in workers.items()}
    sizes = BatchSizes(policy_mini_batch_size=1, critic_mini_batch_size=2, update_epochs_per_batch=2)
    learner = Learner(groups["policy"], None, sizes, critic=groups.get("critic"))
    batch = policy_batch()
    zeros = torch.zeros(len(batch.input_ids))
    batch = batch.with_tokens(values=zeros, returns=zeros)

    async def run() -> dict[str, float]:
        for role, worker in workers.items():
            worker.build(tiny_model_path)
            worker.strategy.free_transient_memory = partial(calls.append, role)  # type: ignore[method-assign]
        return await learner.update(batch)

    assert asyncio.run(run())["policy/optimizer_steps"] == 8
    assert calls == (["critic", "policy"] if critic else ["policy"])


@pytest.mark.parametrize(
    ("sequences", "max_tokens"), [(1, None), (2, None), (5, None), (100, None), (None, 20), (None, 1)]
)
def test_gradient_equals_padded_batch_at_any_micro_batch(
    tiny_model_path: str, sequences: int | None, max_tokens: int | None
):
    batch = policy_batch()
    sizes = BatchSizes(
        policy_mini_batch_size=100, micro_train_batch_size_per_gpu=sequences, max_tokens_per_microbatch=max_tokens
    )
    assert_same_tensors(gradients(tiny_model_path, batch, sizes), padded_gradients(tiny_model_path, batch), 1e-4)


@pytest.mark.parametrize("sequences", [1, 3, 100])
def test_reduction_covers_the_whole_mini_batch(tiny_model_path: str, sequences: int):
    batch, reduction = policy_batch(), partial(sequence_mean, max_seq_len=1)
    sizes = BatchSizes(policy_mini_batch_size=100, micro_train_batch_size_per_gpu=sequences)
    actual = gradients(tiny_model_path, batch, sizes, reduction=reduction)
    assert_same_tensors(actual, padded_gradients(tiny_model_path, batch, reduction=reduction), 1e-4)


TOKEN_SELECTING_LOSSES = {
    "clip_cov": (
        partial(clip_cov, eps_clip_low=0.2, eps_clip_high=0.2),
        partial(
            select_clip_cov_tokens,
            eps_clip_low=0.2,
            eps_clip_high=0.2,
            clip_ratio=0.2,
            clip_cov_lb=0.0,
            clip_cov_ub=9.0,
        ),
    ),
    "kl_cov": (partial(kl_cov, ppo_kl_coef=1.0), partial(select_kl_cov_tokens, kl_cov_frac=0.2)),
}


@pytest.mark.parametrize("name", TOKEN_SELECTING_LOSSES)
@pytest.mark.parametrize("sequences", [1, 3])
def test_tokens_are_selected_over_the_mini_batch(tiny_model_path: str, name: str, sequences: int):
    loss, select = TOKEN_SELECTING_LOSSES[name]
    objective, batch = PolicyObjective(loss), policy_batch()
    assert batch.old_logprobs is not None and batch.advantages is not None
    selected = select(batch.old_logprobs, batch.old_logprobs, batch.advantages, batch.loss_mask)
    assert int(selected.sum()) == int(0.2 * int(batch.loss_mask.sum())) > 1
    expected = padded_gradients(tiny_model_path, batch.with_tokens(selected=selected), objective)
    sizes = BatchSizes(policy_mini_batch_size=100, micro_train_batch_size_per_gpu=sequences)
    actual = gradients(tiny_model_path, batch.with_tokens(selected=None), sizes, objective, token_selector=select)
    assert_same_tensors(actual, expected, 1e-4)


def test_later_mini_batch_selects_with_current_policy(tiny_model_path: str):
    calls: list[tuple[Tensor, Tensor]] = []

    def select(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
        calls.append((logprobs, old_logprobs))
        return torch.zeros_like(mask)

    learner = local_learner(
        tiny_model_path,
        BatchSizes(policy_mini_batch_size=2),
        token_selector=select,
        objective=PolicyObjective(TOKEN_SELECTING_LOSSES["kl_cov"][0]),
        optimizer_config=OptimizerConfig(lr=1e-2),
    )
    unscored = policy_batch().with_tokens(old_logprobs=None)

    async def run() -> None:
        await learner.setup()
        batch = await learner.add_logprobs_and_values(unscored)
        await learner.update(batch)
        await learner.close()

    asyncio.run(run())
    changes = [(logprobs - old).abs().max() for logprobs, old in calls]
    assert len(changes) == 2
    assert changes[0] == 0
    assert changes[1] > 1e-3


def test_gradient_does_not_depend_on_row_order(tiny_model_path: str):
    batch = policy_batch()
    shuffled = replace(batch.select([6, 7, 0, 1, 4, 5, 3, 2]))
    sizes = BatchSizes(policy_mini_batch_size=100, micro_train_batch_size_per_gpu=2)
    assert_same_tensors(gradients(tiny_model_path, shuffled, sizes), padded_gradients(tiny_model_path, batch), 1e-4)


def test_failed_sequences_change_no_gradient(tiny_model_path: str):
    batch = policy_batch()
    keep = torch.tensor([True] * 6 + [False] * 2)
    masked = batch.with_tokens(loss_mask=batch.loss_mask & batch.expand_to_tokens(keep))
    sizes = BatchSizes(policy_mini_batch_size=100, micro_train_batch_size_per_gpu=3)
    without = padded_gradients(tiny_model_path, batch.select(range(6)))
    assert_same_tensors(gradients(tiny_model_path, masked, sizes), without, 1e-4)


def local_learner(
    model_path: str,
    sizes: BatchSizes,
    with_reference: bool = False,
    token_selector: Any = None,
    needs_old_logprobs: bool | None = None,
    **changes: Any,
) -> Learner:
    policy = WorkerGroup([LocalWorker(LearnerWorker(tiny_spec(model_path, **changes), 0, 1))])
    reference = None
    if with_reference:
        frozen = tiny_spec(model_path, optimizer_config=None, total_steps=None, objective=None)
        reference = WorkerGroup([LocalWorker(LearnerWorker(frozen, 0, 1))])
    return Learner(policy, reference, sizes, token_selector=token_selector, needs_old_logprobs=needs_old_logprobs)


def scored(model_path: str, sizes: BatchSizes, needs_old_logprobs: bool | None = None) -> TrainBatch:
    learner = local_learner(model_path, sizes, needs_old_logprobs=needs_old_logprobs)
    batch = policy_batch().with_tokens(old_logprobs=None, ref_logprobs=None)

    async def run() -> TrainBatch:
        await learner.setup()
        try:
            return await learner.add_logprobs_and_values(batch)
        finally:
            await learner.close()

    return asyncio.run(run())


def test_old_logprobs_are_computed_for_several_steps(tiny_model_path: str):
    assert scored(tiny_model_path, BatchSizes(policy_mini_batch_size=4)).old_logprobs is None
    several = scored(
        tiny_model_path, BatchSizes(policy_mini_batch_size=3, micro_forward_batch_size_per_gpu=3)
    ).old_logprobs
    two_epochs = scored(
        tiny_model_path, BatchSizes(policy_mini_batch_size=4, update_epochs_per_batch=2, max_tokens_per_microbatch=10)
    ).old_logprobs
    assert several is not None and two_epochs is not None
    torch.testing.assert_close(several, two_epochs)
    batch = policy_batch()
    expected, _ = padded_scores(load_causal_lm(tiny_model_path, dtype=torch.float32), batch)
    torch.testing.assert_close(several, expected.detach(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("needed", [True, False])
def test_old_logprobs_are_computed_if_read(tiny_model_path: str, needed: bool):
    for groups in (3, 4):
        batch = scored(tiny_model_path, BatchSizes(policy_mini_batch_size=groups), needs_old_logprobs=needed)
        assert (batch.old_logprobs is not None) is needed


def test_mini_batches_have_complete_prompts():
    batch = policy_batch()  # 8 sequences, 4 groups of 2
    assert mini_batch_rows(batch, 3) == [[0, 1, 2, 3, 4, 5], [6, 7]]


def test_update_reports_its_progress(tiny_model_path: str):
    learner = local_learner(tiny_model_path, BatchSizes(policy_mini_batch_size=2))
    progress: list[tuple[int, int] | None] = []
    original = learner.policy.call_sharded

    async def record_and_call(method: str, args_per_dp_rank: Sequence[Sequence[Any]]) -> list[Any]:
        progress.append(learner.optimizer_progress)
        return await original(method, args_per_dp_rank)

    async def run() -> None:
        await learner.setup()
        learner.policy.call_sharded = record_and_call  # type: ignore[method-assign, assignment]
        await learner.update(policy_batch())
        learner.policy.call_sharded = original  # type: ignore[method-assign]
        await learner.close()

    asyncio.run(run())
    assert progress == [(0, 2), (1, 2)] and learner.optimizer_progress is None


@pytest.mark.fault("F12")
def test_batch_without_loss_tokens_warns_and_changes_nothing(tiny_model_path: str, caplog: pytest.LogCaptureFixture):
    batch = policy_batch()
    masked = batch.with_tokens(loss_mask=torch.zeros_like(batch.loss_mask))
    learner = local_learner(
        tiny_model_path, BatchSizes(policy_mini_batch_size=2), optimizer_config=OptimizerConfig(lr=1.0)
    )

    async def run() -> tuple[dict[str, float], list[Tensor], list[Tensor]]:
        await learner.setup()
        worker = learner.policy.workers[0].worker
        before = [p.detach().clone() for p in worker.module.parameters()]
        metrics = await learner.update(masked)
        after = [p.detach().clone() for p in worker.module.parameters()]
        await learner.close()
        return metrics, before, after

    metrics, before, after = asyncio.run(run())
    assert metrics == {"policy/optimizer_steps": 0}
    assert "does not change the model" in caplog.text
    assert all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_first_failure_of_a_rank_is_raised():
    class Rank:
        def __init__(self, error: Exception | None):
            self.error = error

        async def work(self) -> int:
            if self.error:
                raise self.error
            await asyncio.sleep(60)
            return 1

    async def run() -> None:
        await WorkerGroup([Rank(None), Rank(ValueError("rank 1"))]).call_all("work")

    with pytest.raises(ValueError, match="rank 1"):
        asyncio.run(asyncio.wait_for(run(), 5))


def test_parallel_group_gets_one_shard_and_answers_once():
    class Rank:
        def __init__(self) -> None:
            self.rows: list[int] = []

        def forward(self, micro_batches: list[TrainBatch], count: int, share: bool) -> Tensor:
            self.rows = [int(row) for batch in micro_batches for row in batch.rewards]
            return torch.cat([batch.input_ids.float() for batch in micro_batches])

    ranks = [Rank() for _ in range(4)]
    group = WorkerGroup([LocalWorker(rank) for rank in ranks], parallel_size=2)  # type: ignore[arg-type]
    batch = policy_batch()
    batch = replace(batch, rewards=torch.arange(len(batch)).float())
    scores = asyncio.run(Learner(group, None, BatchSizes(4)).compute_logprobs_or_values(group, batch))
    assert ranks[0].rows == ranks[1].rows
    assert ranks[2].rows == ranks[3].rows
    assert sorted(ranks[0].rows + ranks[2].rows) == list(range(8))
    assert torch.equal(scores, batch.input_ids.float())


def test_ranks_receive_concurrent_calls_in_one_order():
    """Otherwise the collectives of one call would meet those of the other."""

    class Rank:
        def __init__(self) -> None:
            self.calls: list[str] = []

        async def call_with_refs(self, method: str, plan: Any, stored: Any) -> None:
            self.calls.append(method)
            await asyncio.sleep(0.01)

        async def prepare_manifest(self) -> None:
            self.calls.append("prepare_manifest")

    ranks = [Rank() for _ in range(4)]
    group = WorkerGroup(ranks)

    async def run() -> None:
        await asyncio.gather(
            group.call_sharded("forward", [StoredCall([], ForwardPlan([], 0, False))] * 4),
            group.call_all("prepare_manifest"),
        )

    asyncio.run(run())
    assert [rank.calls for rank in ranks] == [["forward", "prepare_manifest"]] * 4


def test_cpu_rank_sums_gradients_deterministically(tiny_model_path: str) -> None:
    LearnerWorker(tiny_spec(tiny_model_path, threads=2), 0, 1)
    try:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(512, 64, generator=generator, requires_grad=True)
        indices = torch.randint(0, 512, (8192,), generator=generator)  # as experts select tokens
        weights = torch.randn(8192, 64, generator=generator)
        gradients = [torch.autograd.grad((rows[indices] * weights).sum(), rows)[0] for _ in range(20)]
    finally:
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(gradients[0], other) for other in gradients[1:])


def test_failed_update_writes_the_memory_snapshot(tmp_path: Path):
    class Allocator:
        def _record_memory_history(self, **options: Any) -> None:
            """Do nothing."""

        def _dump_snapshot(self, file: str) -> None:
            Path(file).write_text("snapshot")

    worker = LearnerWorker(tiny_spec("no model is loaded"), rank=0, world_size=1)
    worker.memory_recorder = MemorySnapshotRecorder(tmp_path / "policy_rank_0.pickle", Allocator())
    with pytest.raises(AttributeError, match="module"):
        worker.update(MiniBatch([], 0, 0))
    assert (tmp_path / "policy_rank_0.pickle").exists()


@pytest.mark.defect("partially-updated-weights-keep-old-version")
def test_hold_version_waits_for_the_update(tiny_model_path: str):
    worker = LearnerWorker(tiny_spec(tiny_model_path), 0, 1)
    learner = Learner(WorkerGroup([LocalWorker(worker)]), None, BatchSizes(1))  # an optimizer step for every prompt
    versions: list[tuple[int, int]] = []

    async def restart() -> None:
        while not worker.strategy.num_updates:
            await asyncio.sleep(0)
        async with learner.hold_version() as version:
            versions.append((version, worker.strategy.num_updates))

    async def run() -> None:
        await learner.setup()
        async with learner.hold_version() as version:
            assert version == 0
        await asyncio.gather(learner.update(policy_batch()), restart())
        await learner.close()

    asyncio.run(run())
    assert versions == [(1, 4)]


def test_single_step_update_returns_initial_logprobs(tiny_model_path: str):
    """The update returns them for the first sequences in any micro-batch, but not if it has several steps."""
    batch = policy_batch().with_tokens(old_logprobs=None)

    async def run(groups: int, num_sequences: int) -> tuple[Tensor, Tensor | None, dict[str, float]]:
        learner = local_learner(
            tiny_model_path, BatchSizes(groups, micro_train_batch_size_per_gpu=3, micro_forward_batch_size_per_gpu=3)
        )
        await learner.setup()
        learner.num_sequences_with_logprobs = num_sequences
        scores = await learner.compute_logprobs_or_values(learner.policy, batch)
        metrics = await learner.update(batch)
        logprobs = learner.update_logprobs
        await learner.update(batch.with_tokens(old_logprobs=scores))
        assert learner.update_logprobs is None
        await learner.close()
        return scores, logprobs, {name: value for name, value in metrics.items() if not name.startswith("memory/")}

    scores, initial, metrics = asyncio.run(run(4, 5))
    first = int(batch.offsets[5])
    assert initial is not None and torch.equal(initial[:first], scores[:first]) and not initial[first:].any()
    assert scores[:first].any() and scores[first:].any()
    _, no_logprobs, same_metrics = asyncio.run(run(4, 0))
    assert no_logprobs is None and same_metrics == metrics
    assert asyncio.run(run(1, 5))[1] is None


def test_weights_between_versions_are_not_sent(tiny_model_path: str):
    worker = LearnerWorker(tiny_spec(tiny_model_path), 0, 1)
    learner = Learner(WorkerGroup([LocalWorker(worker)]), None, BatchSizes(1))

    def fail(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    async def run() -> None:
        await learner.setup()
        worker.update = fail  # type: ignore[method-assign,assignment]
        with pytest.raises(RuntimeError, match="out of memory"):
            await learner.update(policy_batch())
        with pytest.raises(WeightSyncError, match="between version 0 and 1"):
            async with learner.hold_version():
                pass
        await learner.close()

    asyncio.run(run())


def test_learner_is_responsive_while_ranks_answer(tiny_model_path: str):
    worker = LearnerWorker(tiny_spec(tiny_model_path), 0, 1)
    learner = Learner(WorkerGroup([LocalWorker(worker)]), None, BatchSizes(1))

    def hang() -> None:
        time.sleep(0.3)

    async def run() -> None:
        assert await learner.is_responsive(5)
        worker.ping = hang  # type: ignore[method-assign]
        assert not await learner.is_responsive(0.05)

    asyncio.run(run())


def test_worker_address_is_loopback_by_default(monkeypatch: pytest.MonkeyPatch):
    address = network_address()
    worker = LearnerWorker(tiny_spec("unused"), 0, 2)
    assert worker.address()[0] == worker.address(True)[0] == "127.0.0.1"
    monkeypatch.setenv(NODE_ADDRESS, address)
    monkeypatch.setenv(BIND_ADDRESS, "127.0.0.1")
    assert (worker.address()[0], worker.address(True)[0]) == ("127.0.0.1", address)
    monkeypatch.setenv(BIND_ADDRESS, address)
    assert worker.address()[0] == address


@pytest.mark.defect("busy-ranks-count-as-dead")
def test_busy_ranks_are_not_pinged():
    class Rank:
        """A rank that executes one call at a time."""

        def __init__(self) -> None:
            self.lock = asyncio.Lock()
            self.stopped = False

        async def update(self) -> None:
            async with self.lock:
                await asyncio.sleep(0.3)

        async def ping(self) -> None:
            async with self.lock:
                await asyncio.sleep(60 if self.stopped else 0)

    async def run() -> list[bool]:
        ranks = [Rank(), Rank()]
        learner = Learner(WorkerGroup(ranks), None, BatchSizes(1))
        busy = asyncio.ensure_future(learner.policy.call_all("update"))
        await asyncio.sleep(0.01)
        responsive = [await learner.is_responsive(0.1)]
        await busy
        responsive.append(await learner.is_responsive(0.1))
        ranks[1].stopped = True
        return [*responsive, await learner.is_responsive(0.1)]

    assert asyncio.run(run()) == [True, True, False]


def test_router_loss_counts_tokens_of_all_ranks(tmp_path: Path):
    model, batch = save_tiny_model(tmp_path, "qwen3_moe"), policy_batch()
    tokens = int(batch.loss_mask.sum())
    spec = tiny_spec(model, strategy=RECORDING, router_aux_loss_coef=0.5)

    worker = RecordingWorker(spec, 0, 1)
    worker.setup(*worker.address())

    def gradients_of(part: TrainBatch) -> dict[str, Tensor]:
        worker.update(MiniBatch([part], 1, tokens))
        return worker.gradients()

    whole, first, second = map(gradients_of, (batch, batch.select([0, 1, 2]), batch.select(list(range(3, len(batch))))))
    worker.close()
    routers = [name for name in whole if ".gate." in name]
    assert routers
    for name in routers:
        torch.testing.assert_close(first[name] + second[name], whole[name])
