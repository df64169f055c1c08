"""One rank of the checks in test_sharded.py. Rank 0 writes the results.

Strategies are fsdp2 (checked in float64), or zero2 and zero3: DeepSpeed, which reduces gradients in float32 at most.
"""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from skyrl_train.config.schema import DeepSpeedConfig, FSDPConfig, LoraConfig, OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.models.value_model import ValueModel
from skyrl_train.strategies.deepspeed import DeepSpeedStrategy
from skyrl_train.strategies.fsdp2 import FSDP2Strategy
from skyrl_train.strategies.process_group import close_process_group, init_process_group
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.padded_reference import ragged_batch
from tests.support.tiny_adapters import fill_adapters
from tests.support.weight_sync_counters import count_synced_bytes, with_nan

DTYPES = {"fsdp2": torch.float64, "zero2": torch.float32, "zero3": torch.float32}
KINDS = {
    "fsdp2": ("qwen2", "qwen3", "llama", "gemma", "mistral"),
    "zero2": ("qwen2", "qwen3_5_text"),
    "zero3": ("qwen2", "qwen3_moe", "qwen3_5_text", "falcon_h1", "lfm2"),
}
CASES: dict[str, dict[str, Any]] = {
    "micro_1": {"size": 1, "kinds": ["qwen2"]},
    "micro_2": {"size": 2},
    "micro_5": {"size": 5, "kinds": ["qwen2"]},
    "all": {"size": 100, "kinds": ["qwen2"]},
    "shuffled": {"size": 2, "order": [3, 0, 6, 2, 5, 1, 4], "kinds": ["qwen2"]},
    "adapters": {"size": 2, "lora": True, "kinds": [*KINDS["fsdp2"]]},
    "fewer_rows_than_ranks": {"size": 1, "order": [2], "kinds": ["qwen2", "qwen3_moe"]},
    "checkpointed": {"size": 2, "checkpointing": True, "kinds": ["qwen2", "gemma"]},
}
FSDP2_CASES: dict[str, dict[str, Any]] = {
    "no_reshard": {"size": 2, "fsdp": {"reshard_after_forward": False}, "kinds": ["qwen2"]},
    "reduce_every_time": {"size": 2, "reduce_once": False, "kinds": ["qwen2"]},
    "replicas": {"size": 2, "fsdp": {"fsdp_size": 1}, "kinds": ["qwen2"]},
}
ZERO2_CASES: dict[str, dict[str, Any]] = {
    "offloaded": {"size": 2, "zero": {"offload_optimizer": True}, "kinds": ["qwen2"]},
}
ZERO3_CASES: dict[str, dict[str, Any]] = {
    "offloaded": {"size": 2, "zero": {"offload_optimizer": True, "offload_parameters": True}, "kinds": ["qwen2"]},
    "no_persistence": {"size": 2, "zero": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}},
}
STRATEGY_CASES = {"fsdp2": FSDP2_CASES, "zero2": ZERO2_CASES, "zero3": ZERO3_CASES}
LORA = LoraConfig(rank=3, alpha=6)
"""A LoRA rank that two ranks cannot split evenly."""
LINEAR = OptimizerConfig(lr=1e-2, scheduler="linear", num_warmup_steps=2, adam_betas=[0.8, 0.95], weight_decay=0.5)
CONSTANT = OptimizerConfig(lr=1e-2)
Strategy = FSDP2Strategy | DeepSpeedStrategy


def make_batch() -> TrainBatch:
    return ragged_batch((9, 4, 12, 9, 2, 7, 9), temperatures=(1.0, 0.7, 1.0, 1.3, 1.0, 0.5, 2.0))


def compute_loss(model: Any, batch: TrainBatch) -> Tensor:
    """Return a weighted sum, whose weights follow the tokens, like an advantage over a global denominator."""
    weights = torch.sin(batch.input_ids.double() + batch.position_ids)
    scores = model(model.lay_out(batch), True)
    loss: Tensor = ((scores.logprobs + 0.1 * scores.entropy) * weights).sum()
    return loss


def compute_value_loss(model: Any, batch: TrainBatch) -> Tensor:
    weights = torch.sin(batch.input_ids.double() + batch.position_ids)
    values, _ = model(model.lay_out(batch))
    loss: Tensor = (values * weights).sum()
    return loss


@dataclass(frozen=True)
class RankContext:
    """One rank, the number of ranks, and the strategy to check."""

    name: str
    rank: int
    world: int
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    def make_strategy(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig | None = LINEAR,
        compute_dtype: torch.dtype | None = None,
        fsdp: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
    ) -> Strategy:
        """Return a strategy that is prepared for 20 updates, or frozen without an optimizer."""
        kind = FSDP2Strategy if self.name == "fsdp2" else DeepSpeedStrategy
        stage: dict[str, Any] = {"zero_stage": int(self.name[-1])} if self.name != "fsdp2" else {}
        strategy: Strategy = kind(
            optimizer_config=optimizer,
            fsdp_config=FSDPConfig(**fsdp or {}),
            deepspeed_config=DeepSpeedConfig(**stage, **zero or {}),
            device="cpu",
            rank=self.rank,
            world_size=self.world,
            compute_dtype=compute_dtype or next(model.parameters()).dtype,
        )
        strategy.prepare(model, 20 if optimizer else None).train()
        return strategy

    def make_policy(
        self,
        kind: str = "llama",
        seed: int = 0,
        checkpointing: bool = False,
        lora: bool = False,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Strategy:
        """Return the strategy of a policy.

        Llama has no biases of keys: their true gradient is 0, and Adam would amplify their rounding errors.
        """
        model = tiny_model(kind, dtype=dtype or self.dtype, seed=seed)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            LoraAdapters(model, LORA, "trainer.policy.model.lora")
            fill_adapters(model)
            for parameter in model.parameters():
                if parameter.requires_grad and dtype == torch.bfloat16:
                    parameter.data = parameter.data.float()
        return self.make_strategy(LogprobModel(model), **options)

    def make_critic(self, seed: int = 0) -> Strategy:
        model = ValueModel(tiny_model(dtype=self.dtype, seed=seed))
        nn.init.ones_(model.value_head.weight)
        return self.make_strategy(model, CONSTANT)


def accumulate(
    strategy: Strategy,
    batch: TrainBatch,
    size: int,
    factor: float = 1.0,
    compute_loss: Callable[[Any, TrainBatch], Tensor] = compute_loss,
) -> None:
    """Accumulate this rank's rows in micro-batches of `size`, with fillers up to the number of the busiest rank."""
    shards = batch.partition(strategy.world_size)
    count = -(-max(len(rows) for rows in shards) // size)
    micro_batches = batch.select(shards[strategy.rank]).split_micro_batches(max_sequences=size)
    filler = ragged_batch([1]).with_tokens(loss_mask=torch.zeros(1, dtype=torch.bool))
    for index in range(count):
        loss = compute_loss(strategy.module, micro_batches[index] if index < len(micro_batches) else filler)
        strategy.backward(loss * factor, is_last_micro_batch=index == count - 1)


def get_parameters(strategy: Strategy) -> dict[str, nn.Parameter]:
    """Return this rank's parameters by Hugging Face name."""
    model: Any = getattr(strategy.module, "module", strategy.module)  # DeepSpeed wraps it
    return {model.hf_name(name): parameter for name, parameter in model.named_parameters()}


def gradients(strategy: Strategy) -> dict[str, Tensor]:
    """Return the full summed gradients by Hugging Face name. This is a collective."""
    full_gradients = {}
    for name, parameter in get_parameters(strategy).items():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        if isinstance(strategy, DeepSpeedStrategy):
            gradient = strategy.library.utils.safe_get_full_grad(parameter)
        else:
            gradient = parameter.grad
        assert gradient is not None, name
        full_gradients[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).contiguous()
    return full_gradients


def update(strategy: Strategy, seed: int, factor: float = 1.0) -> dict[str, float]:
    accumulate(strategy, ragged_batch((5, 8, 6), seed=seed), 1, factor)
    return strategy.step()


def get_local_tensors(strategy: Strategy) -> list[Tensor]:
    """Return this rank's slices of the optimized weights, and the full weights that the model then computes with."""
    tensors = strategy.get_checkpoint_shard(copy=True).tensors
    slices = [tensor for key, tensor in tensors.items() if key.startswith("param/")]
    return slices + [tensor.clone() for _, tensor in strategy.full_parameters()]


def all_equal(tensors: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Return True if the tensors are equal on all ranks."""
    is_equal = all(torch.equal(a, b) for a, b in zip(tensors, others, strict=True))
    flag = torch.tensor(float(is_equal))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def check_gradients(ranks: RankContext) -> None:
    all_gradients: dict[str, Tensor] = {}
    for kind in KINDS[ranks.name]:
        for case, options in (CASES | STRATEGY_CASES[ranks.name]).items():
            if kind not in options.get("kinds", KINDS[ranks.name]):
                continue
            policy_options = {key: options[key] for key in ("fsdp", "zero", "checkpointing", "lora") if key in options}
            strategy = ranks.make_policy(kind, **policy_options)
            if isinstance(strategy, FSDP2Strategy):
                strategy.reduce_once = options.get("reduce_once", True)
            accumulate(strategy, make_batch().select(options.get("order", range(7))), options["size"])
            if case == "no_persistence":
                engine: Any = strategy.module
                assert not engine.optimizer.persistent_parameters
            all_gradients |= {f"{kind}/{case}/{name}": gradient for name, gradient in gradients(strategy).items()}
    if ranks.rank == 0:
        save_file(all_gradients, ranks.folder / "gradients.safetensors")


def check_critic(ranks: RankContext) -> dict[str, Any]:
    """Check a critic, whose head has one row, so that only one rank holds any of it."""
    strategy = ranks.make_critic()
    accumulate(strategy, make_batch(), 2, compute_loss=compute_value_loss)
    critic_gradients = gradients(strategy)
    if ranks.rank == 0:
        save_file(critic_gradients, ranks.folder / "critic.safetensors")
    norm = strategy.step()["grad_norm"]
    strategy.save(ranks.folder / "critic")
    dist.barrier()
    resumed = ranks.make_critic(seed=1)
    resumed.load(ranks.folder / "critic")
    for critic in (strategy, resumed):
        accumulate(critic, make_batch(), 2, compute_loss=compute_value_loss)
    is_equal = strategy.step() == resumed.step()
    return {"resumed": all_equal(get_local_tensors(strategy), get_local_tensors(resumed)) and is_equal, "norm": norm}


def check_checkpoints(ranks: RankContext) -> dict[str, Any]:
    """Resume with the same number of ranks, and from a checkpoint of one process in the folder `single`."""
    uninterrupted = ranks.make_policy()
    for seed in range(3):
        update(uninterrupted, seed)
    uninterrupted.save(ranks.folder / "sharded")
    full_weights = {name: tensor.clone() for name, tensor in uninterrupted.full_parameters()}
    if ranks.rank == 0:
        save_file(full_weights, ranks.folder / "whole.safetensors")
    dist.barrier()
    resumed = ranks.make_policy(seed=1)
    for seed in range(4):  # loading must replace its moments and its larger number of steps, too
        update(resumed, seed)
    resumed.load(ranks.folder / "sharded")
    is_equal = all_equal(get_local_tensors(uninterrupted), get_local_tensors(resumed))
    metrics = [(update(uninterrupted, seed), update(resumed, seed)) for seed in range(3, 6)]
    is_equal = is_equal and all_equal(get_local_tensors(uninterrupted), get_local_tensors(resumed))
    from_single = ranks.make_policy(seed=1)
    from_single.load(ranks.folder / "single")
    lr = update(from_single, 3)["lr"]
    after = {name: tensor.clone() for name, tensor in from_single.full_parameters()}
    if ranks.rank == 0:
        save_file(after, ranks.folder / "from_single.safetensors")
    return {
        "bitwise": is_equal and all(metrics_of_run == other for metrics_of_run, other in metrics),
        "lr_from_single": lr,
        "files": sorted(path.name for path in (ranks.folder / "sharded").iterdir()),
    }


def check_incomplete(ranks: RankContext) -> dict[str, Any]:
    """Load a checkpoint without the state of the last parameter, which had no gradient; other states must load.

    All parameters except the first have made fewer steps.
    """
    folder = ranks.folder / "incomplete"
    source = ranks.folder / "single"
    tensors = load_file(source / "shard_0.safetensors")
    table = json.loads((source / "shard_0.json").read_text())
    first, *others, last = table["slices"]
    tensors |= {f"step/{name}": torch.ones(()) for name in others}
    if ranks.rank == 0:
        folder.mkdir()
        kept_tensors = {
            key: value for key, value in tensors.items() if key == f"param/{last}" or not key.endswith(f"/{last}")
        }
        save_file(kept_tensors, folder / "shard_0.safetensors")
        (folder / "shard_0.json").write_text(json.dumps(table))
    dist.barrier()
    strategy = ranks.make_policy()
    update(strategy, 0)
    strategy.load(folder)
    loaded = strategy.get_checkpoint_shard().tensors
    moments = (value for key, value in loaded.items() if key in (f"exp_avg/{last}", f"exp_avg_sq/{last}"))
    return {
        "steps": {
            name: float(loaded[f"step/{name}"]) for name in (first, others[0]) if loaded[f"param/{name}"].numel()
        },
        "moments": not any(bool(value.any()) for value in moments),
    }


def check_adapters(ranks: RankContext) -> dict[str, Any]:
    """Check that adapters step and resume like full models, also in bfloat16, and that frozen weights are not saved."""
    uninterrupted, resumed = (ranks.make_policy("qwen2", lora=True) for _ in range(2))
    initial = frozen_weights(uninterrupted)
    update(uninterrupted, 0)
    uninterrupted.save(ranks.folder / "adapters")
    dist.barrier()
    resumed.load(ranks.folder / "adapters")
    is_equal = update(uninterrupted, 1) == update(resumed, 1)
    half = ranks.make_policy("qwen2", dtype=torch.bfloat16, lora=True)
    accumulate(half, ragged_batch((5, 8, 6)), 1)
    return {
        "bitwise": all_equal(get_local_tensors(uninterrupted), get_local_tensors(resumed)) and is_equal,
        "frozen": all_equal(initial, frozen_weights(uninterrupted)),
        "saved": sorted(uninterrupted.get_checkpoint_shard().slices),
        "half": {
            "gradients": sorted({str(gradient.dtype) for gradient in gradients(half).values()}),
            "skipped": half.step()["skipped"],
        },
    }


def frozen_weights(strategy: Strategy) -> list[Tensor]:
    names = [name for name, parameter in get_parameters(strategy).items() if not parameter.requires_grad]
    full_weights = {name: tensor.clone() for name, tensor in strategy.full_parameters()}
    return [full_weights[name] for name in names]


def check_skips(ranks: RankContext, **options: Any) -> dict[str, Any]:
    strategy = ranks.make_policy(**options)
    update(strategy, 0)
    tensors = get_local_tensors(strategy)
    result = update(strategy, 1, factor=float("nan") if ranks.rank == ranks.world - 1 else 1.0)
    is_unchanged = all_equal(tensors, get_local_tensors(strategy))
    return {"skipped": result["skipped"], "unchanged": is_unchanged, "next": update(strategy, 2)["skipped"]}


def check_replicas(ranks: RankContext) -> dict[str, Any]:
    """Check that full replicas, which only reduce gradients, update like a sharded model, and resume."""
    replicas, sharded = ranks.make_policy(fsdp={"fsdp_size": 1}), ranks.make_policy()
    for seed in range(2):
        metrics = [update(strategy, seed) for strategy in (replicas, sharded)]
    pairs = zip(replicas.full_parameters(), sharded.full_parameters(), strict=True)
    max_difference = max(float((strategy - other).abs().max()) for (_, strategy), (_, other) in pairs)
    replicas.save(ranks.folder / "replicas")
    dist.barrier()
    resumed = ranks.make_policy(seed=1, fsdp={"fsdp_size": 1})
    resumed.load(ranks.folder / "replicas")
    is_equal = update(replicas, 2) == update(resumed, 2)
    return {
        "norms": [metric["grad_norm"] for metric in metrics],
        "gap": max_difference,
        "resumed": all_equal(get_local_tensors(replicas), get_local_tensors(resumed)) and is_equal,
        "skips": check_skips(ranks, fsdp={"fsdp_size": 1}),
    }


class MoveRecorder(TorchFunctionMode):
    """A mode that records the memory of every tensor that is moved to a device: a CPU has no other to move it to."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            self.memory.add(memory_address(args[0]))
        return func(*args, **(kwargs or {}))


def memory_address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def get_device_memory(strategy: DeepSpeedStrategy) -> set[int]:
    """Return the memory of all parameters and of the optimizer's state."""
    tensors = [getattr(parameter, "ds_tensor", parameter) for parameter in get_parameters(strategy).values()]
    # On a CPU the shard shares the memory of the trained tensors, except the numbers of steps.
    shard = strategy.get_checkpoint_shard().tensors
    tensors += [tensor for key, tensor in shard.items() if not key.startswith("step/")]
    if optimizer := getattr(strategy.module, "basic_optimizer", None):
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    return {memory_address(tensor) for tensor in tensors if tensor.numel()}


def moves_everything(strategy: DeepSpeedStrategy, move: Callable[[], None]) -> bool:
    """Return True if `move` moves all tensors of the model and the optimizer."""
    memory = get_device_memory(strategy)
    with MoveRecorder() as recorder:
        move()
    return memory <= recorder.memory


def check_moves(ranks: RankContext) -> dict[str, Any]:
    """Check offloading and onloading, as far as a CPU can show it, and training from host memory."""
    frozen = ranks.make_strategy(LogprobModel(tiny_model()), None)
    assert isinstance(frozen, DeepSpeedStrategy)
    initial = get_local_tensors(frozen)
    moved = moves_everything(frozen, frozen._offload_tensors) and moves_everything(frozen, frozen._onload_tensors)
    zero = STRATEGY_CASES[ranks.name]["offloaded"]["zero"]
    return {
        "whole": check_move(ranks),
        "adapters": check_move(ranks, lora=True),
        "bfloat16": check_move(ranks, lora=True, dtype=torch.bfloat16),
        "frozen": {"moved": moved, "back": all_equal(initial, get_local_tensors(frozen))},
        "skips": check_skips(ranks, zero=zero),
        "half_skips": check_skips(ranks, zero=zero, dtype=torch.float32, compute_dtype=torch.bfloat16),
    }


def check_move(ranks: RankContext, **options: Any) -> dict[str, bool]:
    """Check that a trained model that was offloaded trains like its twin, which was not."""
    strategy, twin = (ranks.make_policy(**options) for _ in range(2))
    assert isinstance(strategy, DeepSpeedStrategy)
    update(strategy, 0)
    update(twin, 0)
    initial = get_local_tensors(strategy)

    def offload() -> None:
        strategy._move("cpu")
        strategy._move_state("cpu")

    def onload() -> None:
        strategy._onload_tensors()
        strategy._move_state(strategy.device)

    offloads = moves_everything(strategy, offload)
    is_unchanged = all_equal(initial, get_local_tensors(strategy))
    strategy._onload_tensors()  # as for a sync, without the optimizer's state
    onloads = moves_everything(strategy, offload) and moves_everything(strategy, onload)
    is_equal = update(strategy, 1) == update(twin, 1)
    return {
        "moved": offloads and onloads,
        "away": is_unchanged,
        "back": all_equal(get_local_tensors(strategy), get_local_tensors(twin)) and is_equal,
    }


def check_mixed_precision(ranks: RankContext) -> dict[str, Any]:
    strategy = ranks.make_strategy(LogprobModel(tiny_model()), compute_dtype=torch.bfloat16)
    model: Any = strategy.module
    products: list[str] = []
    model.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, o: products.append(str(o.dtype)))
    batch = ragged_batch((5, 8), temperatures=(0.7, 0.7), seed=ranks.rank)
    scores = model(model.lay_out(batch))
    strategy.backward(scores.logprobs.sum(), is_last_micro_batch=True)
    summed = gradients(strategy)
    results = {
        "products": list(products),
        "scores": str(scores.logprobs.dtype),
        "gradients": sorted({str(gradient.dtype) for gradient in summed.values()}),
        "rounded": [name for name, gradient in summed.items() if torch.equal(gradient, gradient.bfloat16().float())],
        "skipped": strategy.step()["skipped"],
        "weights": sorted({str(tensor.dtype) for _, tensor in strategy.full_parameters()}),
    }
    strategy.save(ranks.folder / "mixed")
    dist.barrier()
    resumed = ranks.make_strategy(LogprobModel(tiny_model(seed=1)), compute_dtype=torch.bfloat16)
    resumed.load(ranks.folder / "mixed")
    metrics = [update(trained, 1) for trained in (strategy, resumed)]
    return results | {
        "resumed": all_equal(get_local_tensors(strategy), get_local_tensors(resumed)) and metrics[0] == metrics[1]
    }


def check_frozen(ranks: RankContext) -> dict[str, Any]:
    strategy = ranks.make_strategy(LogprobModel(tiny_model()), None)
    model: Any = strategy.module
    model.eval()
    batch = make_batch()
    with torch.no_grad():
        scores = model(model.lay_out(batch))
        twin = LogprobModel(tiny_model())
        expected = twin(twin.lay_out(batch))
        strategy.save(ranks.folder / "frozen")
        dist.barrier()
        other = ranks.make_strategy(LogprobModel(tiny_model(seed=1)), None)
        other.load(ranks.folder / "frozen")
        loaded: Any = other.module
        reloaded = loaded(loaded.lay_out(batch))
    full = dict(strategy.full_parameters())
    slices = strategy.get_checkpoint_shard().slices.values()
    return {
        "error": float((scores.logprobs - expected.logprobs).abs().max()),
        "names": list(full),
        "exact": all_equal(list(full.values()), list(tiny_model().parameters())),
        "share": sum(parameter_slice.stop - parameter_slice.start for parameter_slice in slices)
        / sum(tensor.numel() for tensor in full.values()),
        "loaded": all_equal([scores.logprobs], [reloaded.logprobs]),
    }


def check_release(ranks: RankContext) -> bool:
    """Return True if no reference keeps a replaced model in memory."""
    model = LogprobModel(tiny_model())
    reference = weakref.ref(model)
    strategy = ranks.make_strategy(model, None)
    del model, strategy
    gc.collect()
    return reference() is None


def check_syncs(ranks: RankContext) -> dict[str, Any]:
    """Check syncs of trained and frozen models with updated weights, and of merged adapters."""
    policies = {
        "policy": ranks.make_policy(),
        "half": ranks.make_policy(dtype=torch.float32, compute_dtype=torch.bfloat16),
    }
    if ranks.name == "fsdp2":
        policies["replicas"] = ranks.make_policy(fsdp={"fsdp_size": 1})
    for strategy in policies.values():
        update(strategy, 0)
    policies["frozen"] = ranks.make_strategy(LogprobModel(tiny_model()), None)
    counts = {
        name: {wire: count_synced_bytes(strategy.sharded_parameters, wire) for wire in ("float32", "bfloat16")}
        for name, strategy in policies.items()
    }
    model = tiny_model("qwen2")
    adapters = LoraAdapters(model, LORA, "trainer.policy.model.lora")
    fill_adapters(model)
    adapted = ranks.make_strategy(LogprobModel(model))
    merged = {name: tensor.full_tensor() for name, tensor in adapters.iter_merged(adapted.sharded_parameters())}
    if ranks.rank == 0:
        save_file(merged, ranks.folder / "merged.safetensors")
    counts["merged"] = {
        "float32": count_synced_bytes(lambda: adapters.iter_merged(adapted.sharded_parameters()), "float32")
    }
    counts["non_finite"] = with_nan(policies["policy"].sharded_parameters)  # type: ignore[assignment]
    counts_of_ranks: list[Any] = [None] * ranks.world
    dist.all_gather_object(counts_of_ranks, counts)
    return {"ranks": counts_of_ranks, "first": next(name for name, _ in policies["policy"].sharded_parameters())}


def main(ranks: RankContext, port: int) -> None:
    torch.set_num_threads(1)
    init_process_group(ranks.rank, ranks.world, "127.0.0.1", port, "gloo", 60.0)
    new_group = mock.patch.object(dist, "new_group", wraps=dist.new_group).start()
    with double_precision() if ranks.dtype == torch.float64 else nullcontext():
        check_gradients(ranks)
        results: dict[str, Any] = {"checkpoints": check_checkpoints(ranks), "skips": check_skips(ranks)}
        results["incomplete"] = check_incomplete(ranks)
        results |= {"critic": check_critic(ranks), "adapters": check_adapters(ranks)}
        if ranks.name == "fsdp2":
            results["replicas"] = check_replicas(ranks)
    results |= {"mixed": check_mixed_precision(ranks), "frozen": check_frozen(ranks)}
    results["syncs"] = check_syncs(ranks)
    if ranks.name != "fsdp2":
        results |= {"moves": check_moves(ranks), "released": check_release(ranks), "new_groups": new_group.call_count}
    if ranks.rank == 0:
        (ranks.folder / "results.json").write_text(json.dumps(results))
    close_process_group()
