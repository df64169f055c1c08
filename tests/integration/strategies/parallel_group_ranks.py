"""One rank of the checks in test_parallel_groups.py.

Rank 0 writes findings.
"""

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
    "whole": {},
    "shared": {"share": True},
    "micro_2": {"size": 2},
    "shared_micro_3": {"size": 3, "share": True},
    "checkpointed": {"share": True, "checkpointing": {"use_reentrant": False}, "kinds": ["qwen2", "gemma"]},
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
"""A loss that looks at whole sequences, of which every rank has a part."""
OPTIMIZER = OptimizerConfig(lr=1e-2, max_grad_norm=10.0)
STEPPED = ("qwen2", "three_experts", "adapted")
LIMITS = MicroBatchLimits(sequences=2, max_tokens_per_microbatch=None, attention_tokens=6144, share_prompt=False)


def make_model(kind: str) -> PreTrainedModel:
    """In double precision; with windows and capped scores for gemma2, and trained adapters for "adapted"."""
    if kind.startswith("adapted"):
        return adapted(kind)[0]
    if kind in ("qwen3_moe", "three_experts", "gpt_oss", "deepseek_v3"):
        model = tiny_model("qwen3_moe" if kind == "three_experts" else kind, dtype=torch.float64)
        if kind == "three_experts":  # which two ranks cannot share out evenly
            config = type(model.config)(**{**model.config.to_dict(), "num_local_experts": 3})
            torch.manual_seed(0)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        model.set_experts_implementation("eager")  # the default has no kernel for float64
        return model
    changed = {"one_kv_head": {"num_key_value_heads": 1}, "gemma2": {"sliding_window": 3}}.get(kind)
    model = tiny_model("qwen2" if kind == "one_kv_head" else kind, dtype=torch.float64)
    if changed is None:
        return model
    torch.manual_seed(0)
    config = type(model.config)(**{**model.config.to_dict(), **changed})
    return AutoModelForCausalLM.from_config(config, dtype=torch.float64)


def adapted(kind: str) -> tuple[PreTrainedModel, LoraAdapters]:
    model = make_model("qwen3_moe" if kind == "adapted_moe" else "qwen2")
    adapters = LoraAdapters(model, LoraConfig(rank=4, alpha=8), "lora")
    fill_adapters(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    return model, adapters


def merged(strategy: Any, kind: str = "adapted") -> dict[str, Tensor]:
    """The weights that engines get, and adapters as peft saves them."""
    of_peft: dict[str, Tensor] = {}
    whole = {
        name: one.full_tensor() for name, one in adapted(kind)[1].iter_merged(strategy.sharded_parameters(), of_peft)
    }
    return {name: tensor.contiguous() for name, tensor in (whole | of_peft).items()}


def make_batch(case: str) -> TrainBatch:
    """77 tokens, of which 49 are computed with shared prompts: odd, as are parts of them."""
    if case == "few_tokens":  # than ranks, or just as many
        return ragged_batch((2, 3, 2, 5))
    if case == "few_shared_tokens":
        return grouped_batch([(1, [1, 1])])
    return grouped_batch([(6, [4, 9, 4, 1]), (3, [2]), (10, [5, 5])])


def loss_of(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> Tensor:
    """A weight that follows the token, and a term that needs a sequence whole."""
    by_token = ((logprobs + 0.1 * entropy) * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()
    return by_token + 0.01 * batch.sum_per_sequence(logprobs).square().sum()


def strategy_of(model: RaggedModel, world: int, fsdp: dict[str, Any]) -> FSDP2Strategy:
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
    strategy: FSDP2Strategy, batch: TrainBatch, parts: int, part: int, size: int, loss: Callable[..., Tensor]
) -> None:
    """This part's rows in micro-batches of `size`, and a filler more than the largest part needs: one token."""
    shards = batch.partition(parts)
    count = -(-max(len(rows) for rows in shards) // size) + 1
    mine = batch.select(shards[part]).split_micro_batches(max_sequences=size)
    for index in range(count):
        micro = mine[index] if index < len(mine) else filler_batch()
        strategy.backward(loss(strategy.module, micro), is_last_micro_batch=index == count - 1)


def gradients(strategy: FSDP2Strategy) -> dict[str, Tensor]:
    model: Any = strategy.module
    strategy._reduce_replicated_grads()
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        gradient = parameter.grad
        assert gradient is not None, name
        full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        found[model.hf_name(name)] = strategy._full_tensor(model.hf_name(name), full).contiguous()
    return found


def run(model: Any, batch: TrainBatch, share: bool, compute_entropy: bool) -> Any:
    repeated = batch.shared_prompt_lengths() if share else None
    tensors = (batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    return model(*tensors, compute_entropy, repeated)


def check_gradients(parallel_group: ParallelGroup, kinds: list[str], folder: Path) -> None:
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Tensor] = {}
    for kind in kinds:
        for case, options in CASES.items():
            if kind not in options.get("kinds", kinds):
                continue
            if "balance" in options and isinstance(parallel_group, SequenceParallel):  # which has parts of sequences
                continue
            model = make_model(kind)
            if "checkpointing" in options:
                model.gradient_checkpointing_enable(options["checkpointing"])
            logprob_model = LogprobModel(model, parallel_group=parallel_group)
            logprob_model.router_aux_loss_weight = options.get("balance", 0.0) / int(make_batch(case).loss_mask.sum())
            strategy = strategy_of(logprob_model, world, options.get("fsdp", {}))
            share = options.get("share", False)

            def loss(model: Any, batch: TrainBatch, share: bool = share) -> Tensor:
                scores = run(model, batch, share, compute_entropy=True)
                return loss_of(scores.logprobs, scores.entropy, batch)

            parts = world // parallel_group.size
            accumulate(strategy, make_batch(case), parts, rank // parallel_group.size, options.get("size", 100), loss)
            found |= {f"{kind}/{case}/{name}": gradient for name, gradient in gradients(strategy).items()}
    if rank == 0:
        save_file(found, folder / "gradients.safetensors")


def check_critic(parallel_group: ParallelGroup, folder: Path) -> None:
    model = ValueModel(make_model("qwen2"), parallel_group=parallel_group)
    torch.nn.init.ones_(model.value_head.weight)
    world, rank = dist.get_world_size(), dist.get_rank()
    strategy = strategy_of(model, world, {})

    def loss(model: Any, batch: TrainBatch) -> Tensor:
        values, _ = run(model, batch, True, compute_entropy=False)
        return loss_of(values, torch.zeros(()), batch)

    accumulate(strategy, make_batch("shared"), world // parallel_group.size, rank // parallel_group.size, 100, loss)
    found = gradients(strategy)
    if rank == 0:
        save_file(found, folder / "critic.safetensors")


def check_worker(worker: RecordingWorker, folder: Path) -> dict[str, Any]:
    """An update and a pass of scores as `Learner` asks for them, of an objective that looks at whole sequences."""
    size = worker.spec.parallel_size
    batch = policy_batch()
    shards = split_into_micro_batches(batch, worker.world_size // size, LIMITS, share_prompts=False)
    count = max(len(rows) for rows in shards)
    mine = [batch.select(rows) for rows in shards[worker.rank // size]]
    scores = worker.forward(mine, count)
    state = worker.update(MiniBatch(mine, count, int(batch.loss_mask.sum())))
    everything: list[Any] = [None] * worker.world_size
    dist.all_gather_object(everything, {"state": state, "scores": scores.tolist()})
    if worker.rank == 0:
        save_file(worker.gradients(), folder / "worker.safetensors")
    return {"shards": shards, "ranks": everything}


def differ_in_parts(module: nn.Module, dim: int, size: int) -> None:
    """Add 1 to a module's output if it has `size` elements along `dim`, as on a rank that computes a part of it."""
    module.register_forward_hook(lambda _, inputs, output: output + (output.shape[dim] == size))


def check_refusals(parallel_group: ParallelGroup) -> dict[str, str]:
    config = make_model("qwen2").config
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 66}
    three, features = (type(config)(**{**config.to_dict(), **change}) for change in (heads, {"intermediate_size": 63}))
    tokens, columns, unplanned, other, whole = (make_model("qwen2") for _ in range(5))
    layers: list[Any] = [model.model.layers[0] for model in (tokens, columns)]  # type: ignore[union-attr]
    differ_in_parts(layers[0].mlp, 1, 20 // parallel_group.size)  # of the 20 tokens that a new model is checked with
    values = layers[1].self_attn.v_proj
    differ_in_parts(values, 2, values.out_features // parallel_group.size)
    unplanned._tp_plan = {}
    other._tp_plan = {**other._tp_plan, "model.layers.*.mlp.up_proj": "grouped_gemm"}  # type: ignore[dict-item]
    whole._tp_plan = {name: style for name, style in whole.tp_plan.items() if "mlp" not in name}
    whole.model._tp_plan = {}  # type: ignore[union-attr]
    models = {
        "heads": AutoModelForCausalLM.from_config(three),
        "features": AutoModelForCausalLM.from_config(features),
        "tokens": tokens,
        "columns": columns,
        "unplanned": unplanned,
        "unknown": other,
        "whole": whole,
    }
    said = {}
    for name, model in models.items():
        try:
            LogprobModel(model, parallel_group=parallel_group)
        except ConfigError as error:
            said[name] = str(error)
    return said


def check_half_precision(parallel_group: ParallelGroup) -> float:
    """Largest difference (nats) of log-probs in bfloat16 to those of one process."""
    batch = make_batch("whole")
    with torch.no_grad():
        found = [
            run(LogprobModel(tiny_model(dtype=torch.bfloat16), parallel_group=one), batch, True, False).logprobs
            for one in (parallel_group, None)
        ]
    return float((found[0] - found[1]).abs().max())


def train(strategy: Any, updates: int, parts: int = 1, part: int = 0) -> list[float]:
    """Norms of gradients; the first one is clipped, and a loss that is not finite comes before the last."""
    norms = []
    for index in range(updates):
        bad = float("nan") if index == updates - 2 else 1.0

        def loss(model: Any, batch: TrainBatch, factor: float = bad) -> Tensor:
            scores = run(model, batch, share=False, compute_entropy=True)
            return loss_of(scores.logprobs, scores.entropy, batch) * factor

        accumulate(strategy, make_batch("whole"), parts, part, 2, loss)
        norms.append(strategy.step()["grad_norm"])
    return norms


def check_steps(parallel_group: ParallelGroup, folder: Path) -> dict[str, Any]:
    """Updates, a checkpoint, and updates from one of a single process."""
    world, rank = dist.get_world_size(), dist.get_rank()
    found: dict[str, Any] = {}
    for kind, fsdp in (*((kind, {}) for kind in STEPPED), ("qwen2_replicas", {"fsdp_size": 1})):
        model = kind.removesuffix("_replicas")
        strategies = [
            strategy_of(LogprobModel(make_model(model), parallel_group=parallel_group), world, fsdp) for _ in range(2)
        ]
        first, again = strategies
        place = world // parallel_group.size, rank // parallel_group.size
        found[kind] = train(first, 3, *place)
        first.save(folder / f"{kind}_parallel_group")
        again.load(folder / f"{model}_single")
        train(again, 1, *place)
        for name, strategy in (("stepped", first), ("resumed", again)):
            full = {key: value.contiguous() for key, value in strategy.full_parameters()}
            whole = torch.stack([value.sum() for value in full.values()])
            everywhere = [torch.zeros_like(whole) for _ in range(world)]
            dist.all_gather(everywhere, whole)
            assert all(torch.equal(one, whole) for one in everywhere), "ranks gather different weights"
            if rank == 0:
                save_file(full, folder / f"{kind}_{name}.safetensors")
        if kind == "adapted":
            weights = merged(first)
            if rank == 0:
                save_file(weights, folder / "merged.safetensors")
    return found


def main(rank: int, world: int, kind: str, size: int, port: int, folder: Path) -> None:
    recording = "tests.support.recording_strategies:RecordingFSDP2"
    sizes: dict[str, Any] = {f"{kind}_parallel_size": size}
    worker = RecordingWorker(tiny_spec(str(folder / "model"), strategy=recording, **sizes, **SPEC), rank, world)
    worker.setup("127.0.0.1", port)
    parallel_group = worker.parallel_group
    assert parallel_group is not None
    found: dict[str, Any] = check_worker(worker, folder)
    found |= {"refused": check_refusals(parallel_group), "half_precision": check_half_precision(parallel_group)}
    found["sync"] = {wire: count_synced_bytes(worker.sharded_parameters, wire) for wire in ("float32", "bfloat16")}
    with double_precision():
        check_gradients(parallel_group, json.loads((folder / "kinds.json").read_text()), folder)
        check_critic(parallel_group, folder)
        found["norms"] = check_steps(parallel_group, folder)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    close_process_group()
