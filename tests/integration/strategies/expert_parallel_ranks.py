"""One rank of the checks in test_expert_parallel.py. Rank 0 writes the results."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers.distributed.mixin import DistributedMixin

from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.strategies.process_group import close_process_group, init_process_group
from tests.support.double_precision import double_precision
from tests.support.learner_specs import tiny_spec
from tests.support.recording_strategies import RecordingWorker
from tests.support.weight_sync_counters import count_synced_bytes

from .parallel_group_ranks import (
    SPEC,
    accumulate,
    check_worker,
    compute_loss,
    get_merged_weights,
    gradients,
    make_batch,
    make_model,
    make_strategy,
    run,
    train,
)

CASES: dict[str, dict[str, Any]] = {
    "whole": {},
    "shared_micro_3": {"size": 3, "share": True},
    "checkpointed": {"share": True, "checkpointing": {"use_reentrant": False}, "kinds": ["qwen3_moe"]},
    "balanced": {"size": 2, "share": True, "balance": 0.5, "kinds": ["qwen3_moe", "deepseek_v3"]},
    "few_tokens": {"batch": "few_tokens", "size": 1, "kinds": ["qwen3_moe"]},
    "divided_sequences": {"size": 3, "share": True, "divided": True, "kinds": ["qwen3_moe"]},
    "one_sequence": {"batch": "few_shared_tokens", "kinds": ["qwen3_moe"]},
}
"""`divided`: the same ranks also split sequences.

In the last case, and in the last micro-batch of every case, most ranks have one token.
"""
STEPPED = ("qwen3_moe", "adapted_moe")


def check_gradients(experts: ExpertParallel | None, kinds: list[str], folder: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    all_gradients: dict[str, Tensor] = {}
    for kind in kinds:
        for case, options in CASES.items():
            if kind not in options.get("kinds", kinds) or ("divided" in options and experts is None):
                continue
            model = make_model(kind)
            if "checkpointing" in options:
                model.gradient_checkpointing_enable(options["checkpointing"])
            sequence_parallel = (
                SequenceParallel(experts.group, "sequence") if experts and "divided" in options else None
            )
            logprob_model = LogprobModel(model, parallel_group=sequence_parallel, expert_parallel=experts)
            batch = make_batch(options.get("batch", "whole"))
            logprob_model.router_aux_loss_weight = options.get("balance", 0.0) / int(batch.loss_mask.sum())
            strategy = make_strategy(logprob_model, world, {})
            share = options.get("share", False)

            def loss(model: Any, batch: TrainBatch, share: bool = share) -> Tensor:
                scores = run(model, batch, share, compute_entropy=True)
                return compute_loss(scores.logprobs, scores.entropy, batch)

            ranks = 1 if sequence_parallel is None else sequence_parallel.size
            accumulate(strategy, batch, world // ranks, rank // ranks, options.get("size", 100), loss)
            all_gradients |= {f"{kind}/{case}/{name}": gradient for name, gradient in gradients(strategy).items()}
    if rank == 0:
        save_file(all_gradients, folder / "gradients.safetensors")


def check_steps(experts: ExpertParallel, folder: Path) -> dict[str, Any]:
    """Check updates, a checkpoint, and updates from a checkpoint of one process; also with replicas of the model."""
    world, rank = dist.get_world_size(), dist.get_rank()
    norms: dict[str, Any] = {}
    layouts: list[tuple[str, str, dict[str, Any]]] = [(kind, kind, {}) for kind in STEPPED]
    if world > experts.size:
        layouts.append(("replicas", STEPPED[0], {"fsdp_size": experts.size}))
    for name, kind, fsdp in layouts:
        strategy, resumed = (
            make_strategy(LogprobModel(make_model(kind), expert_parallel=experts), world, fsdp) for _ in range(2)
        )
        norms[name] = train(strategy, 3, world, rank)
        strategy.save(folder / f"{name}_divided")
        resumed.load(folder / f"{kind}_single")
        train(resumed, 1, world, rank)
        tensors = {"stepped": dict(strategy.full_parameters()), "resumed": dict(resumed.full_parameters())}
        if kind == "adapted_moe":
            tensors["merged"] = get_merged_weights(strategy, kind)
        for weights_name, weights in tensors.items() if rank == 0 else ():
            save_file(
                {key: value.contiguous() for key, value in weights.items()},
                folder / f"{name}_{weights_name}.safetensors",
            )
    return norms


def check_rejections(experts: ExpertParallel) -> dict[str, str]:
    unknown = make_model("qwen3_moe")
    unknown._ep_plan = {**unknown._ep_plan, "model.layers.*.mlp.gate": "ep_router"}  # type: ignore[dict-item]
    messages = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(DistributedMixin, "ep_plan")  # as in versions before transformers 5.19
        with pytest.raises(ConfigError) as caught:
            LogprobModel(make_model("qwen3_moe"), expert_parallel=experts)
    messages["old"] = str(caught.value)
    for name, model in (
        ("none", make_model("qwen2")),
        ("three", make_model("three_experts")),
        ("unknown", unknown),
    ):
        try:
            LogprobModel(model, expert_parallel=experts)
        except ConfigError as error:
            messages[name] = str(error)
    return messages


def main_without_expert_parallel(rank: int, world: int, port: int, folder: Path) -> None:
    """Run one rank of a model whose experts are sharded like all other parameters."""
    init_process_group(rank, world, "127.0.0.1", port, "gloo", 60.0)
    with double_precision():
        check_gradients(None, json.loads((folder / "kinds.json").read_text()), folder)
    close_process_group()


def main(rank: int, world: int, size: int, port: int, folder: Path) -> None:
    recording = "tests.support.recording_strategies:RecordingFSDP2"
    spec = tiny_spec(str(folder / "model"), strategy=recording, expert_parallel_size=size, **SPEC)
    worker = RecordingWorker(spec, rank, world)
    worker.setup("127.0.0.1", port)
    experts = worker.expert_parallel
    assert experts is not None
    experts_shapes = {
        name: tuple(p.shape) for name, p in worker.module.named_parameters() if name.endswith("gate_up_proj")
    }
    results: dict[str, Any] = {
        "experts_shapes": experts_shapes,
        **check_worker(worker, folder),
        "rejected": check_rejections(experts),
    }
    results["sync"] = {wire: count_synced_bytes(worker.sharded_parameters, wire) for wire in ("float32", "bfloat16")}
    with double_precision():
        check_gradients(experts, json.loads((folder / "kinds.json").read_text()), folder)
        results["norms"] = check_steps(experts, folder)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    close_process_group()
