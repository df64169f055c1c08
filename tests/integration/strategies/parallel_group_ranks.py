"""One rank of the checks in test_parallel_groups.py. Rank 0 writes the results."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.losses import gspo
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.config.schema import FSDPConfig, LoraConfig, OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.learner.batch_sharding import MicroBatchLimits, split_into_micro_batches
from skyrl_train.learner.worker import MiniBatch, filler_batch
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.ragged_model import RaggedModel
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.value_model import ValueModel
from skyrl_train.strategies.fsdp2 import FSDP2Strategy
from skyrl_train.strategies.process_group import close_process_group
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.padded_reference import grouped_batch, ragged_batch
from tests.support.recording_strategies import RecordingWorker
from tests.support.tiny_adapters import fill_adapters
from tests.support.weight_sync_counters import count_synced_bytes

CASES: dict[str, dict[str, Any]] = {
    "whole": {"kinds": ["qwen2", "one_kv_head"]},
    "shared": {"share": True, "kinds": ["qwen2", "gemma2", "one_kv_head"]},
    "micro_2": {"size": 2, "kinds": ["qwen2", "adapted", "qwen3_moe", "one_kv_head"]},
    "shared_micro_3": {"size": 3, "share": True},
    "checkpointed": {"share": True, "checkpointing": {"use_reentrant": False}, "kinds": ["qwen2", "gemma2"]},
    "reentrant": {"checkpointing": {"use_reentrant": True}, "kinds": ["qwen2"]},
    "replicas": {"size": 2, "fsdp": {"fsdp_size": 1}, "kinds": ["qwen2"]},
    "balanced": {"size": 2, "balance": 0.5, "kinds": ["qwen3_moe"]},
    "few_tokens": {"size": 1, "kinds": ["qwen2", "one_kv_head"]},
    "few_shared_tokens": {"share": True, "kinds": ["qwen2"]},
}
SPEC = {
    "objective": PolicyObjective(partial(gspo, eps_clip_low=0.2, eps_clip_high=0.2), k3, 0.1, 0.01),
    "gradient_checkpointing": True,
}
"""A loss that depends on full sequences, of which every rank has a part."""
OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=10.0)
STEPPED = ("qwen2", "three_experts", "adapted")
LIMITS = MicroBatchLimits(sequences=2, max_tokens_per_microbatch=None, attention_tokens=6144, share_prompt=False)


def make_model(kind: str) -> PreTrainedModel:
    """Return a float64 model: gemma2 with windows and capped scores, and "adapted" with trained adapters."""
    if kind.startswith("adapted"):
        return make_adapted_model(kind)[0]
    if kind in ("qwen3_moe", "three_experts", "gpt_oss", "deepseek_v3"):
        model = tiny_model("qwen3_moe" if kind == "three_experts" else kind, dtype=torch.float64)
        if kind == "three_experts":  # not divisible by two ranks
            config = type(model.config)(**{**model.config.to_dict(), "num_local_experts": 3})
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        model.set_experts_implementation("eager")  # the default has no kernel for float64
        return model
    changes = {"one_kv_head": {"num_key_value_heads": 1}, "gemma2": {"sliding_window": 3}}.get(kind)
    model = tiny_model("qwen2" if kind == "one_kv_head" else kind, dtype=torch.float64)
    if changes is None:
        return model
    torch.manual_seed(0)
    config = type(model.config)(**{**model.config.to_dict(), **changes})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def make_adapted_model(kind: str) -> tuple[PreTrainedModel, LoraAdapters]:
    """Return a model with trained adapters; those of "adapted_moe" are also on experts."""
    model = make_model("qwen3_moe" if kind == "adapted_moe" else "qwen2")
    experts = ["gate_up_proj", "down_proj"] if kind == "adapted_moe" else None
    adapters = LoraAdapters(model, LoraConfig(rank=4, alpha=8, target_parameters=experts), "lora")
    fill_adapters(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model, adapters


def get_merged_weights(strategy: Any, kind: str = "adapted") -> dict[str, Tensor]:
    """Return the merged weights that engines get, and adapters as peft saves them."""
    adapters: dict[str, Tensor] = {}
    merged = {
        name: tensor_shard.full_tensor()
        for name, tensor_shard in make_adapted_model(kind)[1].iter_merged(strategy.sharded_parameters(), adapters)
    }
    return {name: tensor.contiguous() for name, tensor in (merged | adapters).items()}


def make_batch(case: str) -> TrainBatch:
    """Return 77 tokens, of which 49 run with shared prompts: odd numbers, also in splits."""
    if case == "few_tokens":  # at most as many as ranks
        return ragged_batch((2, 3, 2, 5))
    if case == "few_shared_tokens":
        return grouped_batch([(1, [1, 1])])
    return grouped_batch([(6, [4, 9, 4, 1]), (3, [2]), (10, [5, 5])])


def compute_loss(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> Tensor:
    """Return a weighted sum, whose weights follow the tokens, plus a term that depends on full sequences."""
    token_loss = ((logprobs + 0.1 * entropy) * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()
    return token_loss + 0.01 * batch.sum_per_sequence(logprobs).square().sum()


def make_strategy(model: RaggedModel, world: int, fsdp: dict[str, Any]) -> FSDP2Strategy:
    strategy = FSDP2Strategy(
        optimizer_config=OPTIMIZER,
        fsdp_config=FSDPConfig(**fsdp),
        device="cpu",
        rank=dist.get_rank(),
        world_size=world,
        compute_dtype=torch.float64,
    )
    strategy.prepare(model, 20).train()
    return strategy


def accumulate(
    strategy: FSDP2Strategy, batch: TrainBatch, num_shards: int, shard: int, size: int, loss: Callable[..., Tensor]
) -> None:
    """Accumulate gradients of this shard's rows in micro-batches of `size`.

    All shards run one micro-batch more than the largest one needs, with a filler of one token.
    """
    shards = batch.partition(num_shards)
    count = -(-max(len(rows) for rows in shards) // size) + 1
    micro_batches = batch.select(shards[shard]).split_micro_batches(max_sequences=size)
    for index in range(count):
        micro_batch = micro_batches[index] if index < len(micro_batches) else filler_batch()
        strategy.backward(loss(strategy.module, micro_batch), is_last_micro_batch=index == count - 1)


def gradients(strategy: FSDP2Strategy) -> dict[str, Tensor]:
    model: Any = strategy.module
    strategy._reduce_replicated_grads()
    result = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        assert gradient is not None, name
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        result[model.hf_name(name)] = strategy._full_tensor(model.hf_name(name), full).contiguous()
    return result


def run(model: Any, batch: TrainBatch, share: bool, compute_entropy: bool) -> Any:
    return model(model.lay_out(batch, batch.shared_prompt_lengths() if share else None), compute_entropy)


def check_gradients(parallel_group: ParallelGroup, kinds: list[str], folder: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    all_gradients: dict[str, Tensor] = {}
    for kind in kinds:
        for case, options in CASES.items():
            if kind not in options.get("kinds", kinds):
                continue
            if "balance" in options and isinstance(parallel_group, SequenceParallel):
                continue  # the ranks have parts of sequences
            model = make_model(kind)
            if "checkpointing" in options:
                model.gradient_checkpointing_enable(options["checkpointing"])
            logprob_model = LogprobModel(model, parallel_group=parallel_group)
            logprob_model.router_aux_loss_weight = options.get("balance", 0.0) / int(make_batch(case).loss_mask.sum())
            strategy = make_strategy(logprob_model, world, options.get("fsdp", {}))
            share = options.get("share", False)

            def loss(model: Any, batch: TrainBatch, share: bool = share) -> Tensor:
                scores = run(model, batch, share, compute_entropy=True)
                return compute_loss(scores.logprobs, scores.entropy, batch)

            num_shards = world // parallel_group.size
            accumulate(
                strategy, make_batch(case), num_shards, rank // parallel_group.size, options.get("size", 100), loss
            )
            all_gradients |= {f"{kind}/{case}/{name}": gradient for name, gradient in gradients(strategy).items()}
    if rank == 0:
        save_file(all_gradients, folder / "gradients.safetensors")


def check_critic(parallel_group: ParallelGroup, folder: Path) -> None:
    model = ValueModel(make_model("qwen2"), parallel_group=parallel_group)
    torch.nn.init.ones_(model.value_head.weight)
    world, rank = dist.get_world_size(), dist.get_rank()
    strategy = make_strategy(model, world, {})

    def loss(model: Any, batch: TrainBatch) -> Tensor:
        values, _ = run(model, batch, True, compute_entropy=False)
        return compute_loss(values, torch.zeros(()), batch)

    accumulate(strategy, make_batch("shared"), world // parallel_group.size, rank // parallel_group.size, 100, loss)
    critic_gradients = gradients(strategy)
    if rank == 0:
        save_file(critic_gradients, folder / "critic.safetensors")


def check_worker(worker: RecordingWorker, folder: Path) -> dict[str, Any]:
    """Check an update and a forward pass as `Learner` calls them, with an objective that depends on full sequences."""
    size = worker.spec.parallel_size
    batch = policy_batch()
    shards = split_into_micro_batches(batch, worker.world_size // size, LIMITS, share_prompts=False)
    count = max(len(rows) for rows in shards)
    micro_batches = [batch.select(rows) for rows in shards[worker.rank // size]]
    scores = worker.forward(micro_batches, count)
    state = worker.update(MiniBatch(micro_batches, count, int(batch.loss_mask.sum())))
    results: list[Any] = [None] * worker.world_size
    dist.all_gather_object(results, {"state": state, "scores": scores.tolist()})
    if worker.rank == 0:
        save_file(worker.gradients(), folder / "worker.safetensors")
    return {"shards": shards, "ranks": results}


def perturb_if_sharded(module: nn.Module, dim: int, size: int) -> None:
    """Add 1 to a module's output if it has `size` elements along `dim`, as on a rank that computes a part of it."""
    module.register_forward_hook(lambda _, inputs, output: output + (output.shape[dim] == size))


def check_rejections(parallel_group: ParallelGroup) -> dict[str, str]:
    config = make_model("qwen2").config
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 66}
    three_heads, features = (
        type(config)(**{**config.to_dict(), **change}) for change in (heads, {"intermediate_size": 63})
    )
    tokens, columns, unplanned, unknown_style, half_planned = (make_model("qwen2") for _ in range(5))
    layers: list[Any] = [model.model.layers[0] for model in (tokens, columns)]  # type: ignore[union-attr]
    perturb_if_sharded(layers[0].mlp, 1, 20 // parallel_group.size)  # a new model is checked with 20 tokens
    values = layers[1].self_attn.v_proj
    perturb_if_sharded(values, 2, values.out_features // parallel_group.size)
    unplanned._tp_plan = {}
    unknown_style._tp_plan = {**unknown_style._tp_plan, "model.layers.*.mlp.up_proj": "grouped_gemm"}  # type: ignore[dict-item]
    half_planned._tp_plan = {name: style for name, style in half_planned.tp_plan.items() if "mlp" not in name}
    half_planned.model._tp_plan = {}  # type: ignore[union-attr]
    models = {
        "heads": AutoModelForCausalLM.from_config(three_heads),
        "features": AutoModelForCausalLM.from_config(features),
        "tokens": tokens,
        "columns": columns,
        "unplanned": unplanned,
        "unknown": unknown_style,
        "whole": half_planned,
    }
    messages = {}
    for name, model in models.items():
        try:
            LogprobModel(model, parallel_group=parallel_group)
        except ConfigError as error:
            messages[name] = str(error)
    return messages


def check_half_precision(parallel_group: ParallelGroup) -> float:
    """Return the largest difference in nats of bfloat16 log-probs to those of one process."""
    batch = make_batch("whole")
    with torch.no_grad():
        logprobs = [
            run(LogprobModel(tiny_model(dtype=torch.bfloat16), parallel_group=group), batch, True, False).logprobs
            for group in (parallel_group, None)
        ]
    return float((logprobs[0] - logprobs[1]).abs().max())


def check_routing(parallel_group: ParallelGroup) -> dict[str, Any]:
    """Compare the recorded experts, and log-probs with other experts that are replayed, with those of one process."""
    batch, share = make_batch("shared"), True
    recorded: list[Any] = []
    logprobs = []
    for group in (parallel_group, None):
        model = LogprobModel(make_model("qwen3_moe"), parallel_group=group)
        with torch.no_grad():
            model.routers.record_routed_experts = True
            run(model, batch, share, False)
            recorded.append(model.routed_experts)
            model.routers.record_routed_experts = False
            replayed = (recorded[0] + 1) % model.model.config.num_experts
            logprobs.append(model(model.lay_out(batch, batch.shared_prompt_lengths(), replayed)).logprobs)
            own = run(model, batch, share, False).logprobs
    return {
        "same experts": torch.equal(*recorded),
        "replay gap": float((logprobs[0] - logprobs[1]).abs().max()),
        "replay changes": float((logprobs[1] - own).abs().max()),
    }


def train(strategy: Any, updates: int, num_shards: int = 1, shard: int = 0) -> list[float]:
    """Return gradient norms of updates. The first is clipped, and the loss of the last but one is not finite."""
    norms = []
    for index in range(updates):
        loss_factor = float("nan") if index == updates - 2 else 1.0

        def loss(model: Any, batch: TrainBatch, factor: float = loss_factor) -> Tensor:
            scores = run(model, batch, share=False, compute_entropy=True)
            return compute_loss(scores.logprobs, scores.entropy, batch) * factor

        accumulate(strategy, make_batch("whole"), num_shards, shard, 2, loss)
        norms.append(strategy.step()["grad_norm"])
    return norms


def check_steps(parallel_group: ParallelGroup, folder: Path) -> dict[str, Any]:
    """Check updates, a checkpoint, and updates from a checkpoint of one process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    norms: dict[str, Any] = {}
    for kind, fsdp in (*((kind, {}) for kind in STEPPED), ("qwen2_replicas", {"fsdp_size": 1})):
        model = kind.removesuffix("_replicas")
        strategies = [
            make_strategy(LogprobModel(make_model(model), parallel_group=parallel_group), world, fsdp) for _ in range(2)
        ]
        uninterrupted, resumed = strategies
        shard = world // parallel_group.size, rank // parallel_group.size
        norms[kind] = train(uninterrupted, 3, *shard)
        uninterrupted.save(folder / f"{kind}_parallel_group")
        resumed.load(folder / f"{model}_single")
        train(resumed, 1, *shard)
        for name, strategy in (("stepped", uninterrupted), ("resumed", resumed)):
            full = {key: value.contiguous() for key, value in strategy.full_parameters()}
            sums = torch.stack([value.sum() for value in full.values()])
            sums_of_ranks = [torch.zeros_like(sums) for _ in range(world)]
            dist.all_gather(sums_of_ranks, sums)
            assert all(torch.equal(other_sums, sums) for other_sums in sums_of_ranks), "ranks gather different weights"
            if rank == 0:
                save_file(full, folder / f"{kind}_{name}.safetensors")
        if kind == "adapted":
            merged = get_merged_weights(uninterrupted)
            if rank == 0:
                save_file(merged, folder / "merged.safetensors")
    return norms


def main(rank: int, world: int, kind: str, size: int, port: int, folder: Path) -> None:
    recording = "tests.support.recording_strategies:RecordingFSDP2"
    sizes: dict[str, Any] = {f"{kind}_parallel_size": size}
    worker = RecordingWorker(tiny_spec(str(folder / "model"), strategy=recording, **sizes, **SPEC), rank, world)
    worker.setup("127.0.0.1", port)
    parallel_group = worker.parallel_group
    assert parallel_group is not None
    results: dict[str, Any] = check_worker(worker, folder)
    results |= {"rejected": check_rejections(parallel_group), "half_precision": check_half_precision(parallel_group)}
    results["sync"] = {wire: count_synced_bytes(worker.sharded_parameters, wire) for wire in ("float32", "bfloat16")}
    with double_precision():
        check_gradients(parallel_group, json.loads((folder / "kinds.json").read_text()), folder)
        check_critic(parallel_group, folder)
        results["routing"] = check_routing(parallel_group)
        results["norms"] = check_steps(parallel_group, folder)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    close_process_group()
