"""Between the first kernel of an update and the optimizer step, the host never waits for the device.

`torch.cuda.set_sync_debug_mode` checks the same on a GPU, in scripts/gpu_check.
"""

from __future__ import annotations

import inspect
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from skyrl_train.algorithms import registry
from skyrl_train.algorithms.losses import cross_entropy
from skyrl_train.algorithms.policy_objective import POLICY_LOSS_TENSORS, PolicyObjective
from skyrl_train.algorithms.reductions import assign_loss_weights, sequence_mean
from skyrl_train.algorithms.sft import SFT_LOSS_TENSORS, SFTObjective
from skyrl_train.algorithms.value_objective import ValueObjective
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.choices import KL_ESTIMATORS, POLICY_LOSSES, SFT_LOSSES
from skyrl_train.config.schema import LoraConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.data.device_copy import copy_to_device
from skyrl_train.experiment.algorithm import algorithm_keywords
from skyrl_train.learner.worker import LearnerWorker, MiniBatch, Objective
from skyrl_train.metrics import Metrics
from skyrl_train.models import logprob_model
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.testing.tiny_models import save_tiny_model, tiny_model
from tests.support.host_syncs import DeviceEvents, HostSyncError, record_device_events
from tests.support.learner_specs import FULL_OBJECTIVE, tiny_spec, with_targets
from tests.support.padded_reference import grouped_batch
from tests.support.table_cases import check_each

CONFIG = AlgorithmConfig()
CONFIG.dppo.tv_threshold, CONFIG.dppo.kl_threshold = 0.02, 0.004
SETTINGS = algorithm_keywords(CONFIG)
GROUPS = [(5, [3, 6, 3]), (2, [4]), (9, [1, 1]), (1, [2, 6])]
NUM_PASSES = 3
"""Number of passes of an update: two micro-batches and a filler."""


@pytest.fixture(autouse=True)
def meta_as_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch's fused AdamW and the head's chunks run on the meta device as on a GPU."""
    module = import_module("torch.optim.optimizer")
    fused = module._get_fused_kernels_supported_devices()
    monkeypatch.setattr(module, "_get_fused_kernels_supported_devices", lambda: [*fused, "meta"])
    for table in (logprob_model.CACHED_CHUNKS, logprob_model.MIN_CHUNK_BYTES):
        monkeypatch.setitem(table, "meta", table["cuda"])


def make_batch(temperature: float = 0.8) -> TrainBatch:
    """Return a batch with everything that an objective may read."""
    batch = with_targets(grouped_batch(GROUPS, temperature=temperature))
    count = len(batch.input_ids)
    is_selected = torch.zeros(count, dtype=torch.bool)
    return batch.with_tokens(values=torch.zeros(count), returns=torch.ones(count), selected=is_selected)


def build_worker(path: str, objective: Objective = FULL_OBJECTIVE, **changes: Any) -> LearnerWorker:
    worker = LearnerWorker(tiny_spec(path, device="meta", objective=objective, **changes), 0, 1)
    worker.build(path)
    return worker


def record_update(
    worker: LearnerWorker, objective: Objective | None = None, batch: TrainBatch | None = None, share: bool = False
) -> DeviceEvents:
    """Record one update of a worker on the meta device."""
    batch = make_batch() if batch is None else batch
    worker.spec = replace(worker.spec, objective=objective or worker.spec.objective)
    parts = batch.split_micro_batches(max_sequences=4)
    assert len(parts) == NUM_PASSES - 1
    with record_device_events() as events:
        worker.update(MiniBatch(parts, NUM_PASSES, int(batch.loss_mask.sum()), share_prompts=share))
    return events


def check(events: DeviceEvents) -> None:
    syncs, copies = events.until_step("sync"), events.until_step("copy")
    assert not syncs, "\n".join(syncs)
    assert len(copies) == NUM_PASSES, "\n".join(copies)
    assert len(events.until_step("kernel")) > 100
    assert any(name.startswith("sync") for name in events.names), "metrics are read after the step"


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3")


def bind_loss(name: str) -> PolicyObjective:
    loss = registry.policy_losses.get(name)
    return PolicyObjective(registry.bind_settings(loss, name, SETTINGS, POLICY_LOSS_TENSORS))


def bind_kl(name: str) -> PolicyObjective:
    estimator = registry.bind_settings(registry.kl_estimators.get(name), name, SETTINGS, POLICY_LOSS_TENSORS)
    return PolicyObjective(cross_entropy, estimator, kl_loss_coef=0.3, entropy_loss_coef=0.05)


def bind_sft_loss(name: str) -> SFTObjective:
    return SFTObjective(registry.bind_settings(registry.sft_losses.get(name), name, SETTINGS, SFT_LOSS_TENSORS))


@pytest.mark.parametrize("share", [False, True], ids=["packed", "shared_prompts"])
@pytest.mark.parametrize("temperature", [1.0, 0.8])
def test_update_never_waits_for_the_device(qwen3: str, share: bool, temperature: float) -> None:
    check(record_update(build_worker(qwen3), batch=make_batch(temperature), share=share))


def test_no_objective_waits_or_copies() -> None:
    objectives: dict[str, Callable[[str], Objective]] = {
        **dict.fromkeys(POLICY_LOSSES, bind_loss),
        **dict.fromkeys(KL_ESTIMATORS, bind_kl),
        **dict.fromkeys(SFT_LOSSES, bind_sft_loss),
    }
    batch = copy_to_device(make_batch(), "meta")
    logprobs = torch.zeros(len(batch.input_ids), device="meta", requires_grad=True)

    def check_objective(name: str) -> None:
        with record_device_events() as events:
            loss: Any = objectives[name](name)(batch, logprobs, logprobs * 2, 5, Metrics())
            loss.backward()
        assert [event for event in events.names if not event.startswith("kernel")] == []

    check_each(objectives, check_objective)


class Owner:
    """Something in memory."""


class OwningIdentity(torch.autograd.Function):
    """An identity function whose part of the graph owns an object."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, owner: Owner) -> Tensor:
        ctx.owner = owner
        return values.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


@pytest.mark.parametrize("objective", [FULL_OBJECTIVE, ValueObjective(0.2), bind_sft_loss("sft")])
def test_unread_metrics_do_not_keep_the_graph(objective: Objective) -> None:
    batch, owner, metrics = make_batch(), Owner(), Metrics()
    reference = weakref.ref(owner)
    logprobs: Any = OwningIdentity.apply(torch.zeros(len(batch.input_ids), requires_grad=True), owner)
    loss: Any = objective(batch, logprobs, logprobs * 2, 5, metrics)
    loss.backward()
    del owner, logprobs, loss
    assert reference() is None
    assert metrics.flush()


def test_values_of_sequences_are_expanded_without_waiting(qwen3: str) -> None:
    batch = assign_loss_weights(make_batch(), partial(sequence_mean, max_seq_len=1))
    batch = replace(batch.with_tokens(advantages=None, loss_weights=None), sequence_advantages=torch.ones(len(batch)))
    assert batch.sequence_weights is not None
    check(record_update(build_worker(qwen3), batch=batch))


def test_critic_update_never_waits(qwen3: str) -> None:
    check(record_update(build_worker(qwen3, ValueObjective(0.2), value_head_prefix="value_head"), share=True))


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_checkpointing": True},
        {"lora": LoraConfig(rank=2)},
        {"optimizer_config": replace(tiny_spec("").optimizer_config, max_grad_norm=0.0)},  # type: ignore[type-var]
    ],
    ids=["gradient_checkpointing", "lora", "no_clipping"],
)
def test_no_setting_makes_an_update_wait(qwen3: str, changes: dict[str, Any]) -> None:
    check(record_update(build_worker(qwen3, **changes), share=True))


@pytest.mark.parametrize("kind", ["gemma2", "gpt_oss", "qwen2_moe", "mistral"])
def test_no_attention_makes_an_update_wait(tmp_path: Path, kind: str) -> None:
    check(record_update(build_worker(save_tiny_model(tmp_path, kind)), share=True))


def test_replayed_experts_and_router_loss_never_wait(tmp_path: Path) -> None:
    path = save_tiny_model(tmp_path, "qwen3_moe")
    worker = build_worker(path, router_aux_loss_coef=0.1, moe_routing_replay="rollout")
    batch, (layers, top_k) = make_batch(), worker.routers.num_layers_and_top_k
    routing = torch.arange(top_k, dtype=torch.int16).expand(len(batch.input_ids), layers, top_k)
    check(record_update(worker, batch=batch.with_tokens(routing=routing), share=True))


@pytest.mark.parametrize("kind", ["qwen3_5_text", "falcon_h1", "lfm2"])
def test_recurrent_layers_never_wait(tmp_path: Path, kind: str) -> None:
    check(record_update(build_worker(save_tiny_model(tmp_path, kind)), share=True))


@pytest.fixture
def pair_of_ranks() -> Iterator[dist.ProcessGroup]:
    """Yield a group of two ranks without processes, which has collectives for the meta device."""
    dist.init_process_group("meta:fake", rank=1, world_size=2, store=FakeStore())
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["sequence", "tensor"])
def test_parallel_groups_never_wait(pair_of_ranks: dist.ProcessGroup, kind: str) -> None:
    model = LogprobModel(tiny_model("qwen3"))
    if kind == "sequence":
        model.parallel_group = model.sequence_parallel = SequenceParallel(pair_of_ranks, "size")
    else:
        model.parallel_group = model.tensor_parallel = TensorParallel(pair_of_ranks, "size")
        model.tensor_parallel.shard_model(model.model)
    model, batch = model.to("meta").train(), make_batch()
    with record_device_events() as events:
        on_device, inputs = copy_to_device((batch, model.lay_out(batch, batch.shared_prompt_lengths())), "meta")
        logprobs, entropy = model(inputs, True)
        FULL_OBJECTIVE(on_device, logprobs, entropy, 1, Metrics()).backward()
    assert any("all_to_all" in name or "allreduce" in name for name in events.names)
    assert [name.partition(":")[0] for name in events.names if not name.startswith("kernel")] == ["copy"]


def item(logprobs: Tensor, mask: Tensor) -> Tensor:
    return logprobs * logprobs.sum().item()


def mask(logprobs: Tensor, mask: Tensor) -> Tensor:
    return torch.zeros_like(logprobs).index_put((mask,), -logprobs[mask])


def branch(logprobs: Tensor, mask: Tensor) -> Tensor:
    return logprobs if mask.any() else -logprobs


def repeat(logprobs: Tensor, mask: Tensor) -> Tensor:
    return logprobs + torch.repeat_interleave(logprobs.new_ones(1), torch.ones_like(mask).sum().unsqueeze(0)).sum()


def constant(logprobs: Tensor, mask: Tensor) -> Tensor:
    return logprobs * torch.tensor([2.0], device=logprobs.device)


def index(logprobs: Tensor, mask: Tensor) -> Tensor:
    return logprobs + logprobs[[0, 1]].sum()


def operand(logprobs: Tensor, mask: Tensor) -> Tensor:
    return logprobs + logprobs[torch.tensor([0, 1])].sum()


def transfer(logprobs: Tensor, mask: Tensor) -> Tensor:
    return logprobs * torch.ones(1).to(logprobs.device)


@pytest.mark.parametrize("function", [item, mask, branch, repeat, constant, index, operand, transfer])
def test_waits_and_copies_in_a_loss_are_found(qwen3: str, function: Any) -> None:
    line = inspect.getsource(function).strip().splitlines()[-1].strip()
    with pytest.raises((AssertionError, HostSyncError), match=re.escape(line)):
        check(record_update(build_worker(qwen3), SFTObjective(function)))
