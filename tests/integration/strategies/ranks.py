"""One rank of the checks in test_sharded.py: rank 0 writes findings.

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
    "zero2": ("qwen2",),
    "zero3": ("qwen2", "qwen3_moe"),
}
CASES: dict[str, dict[str, Any]] = {
    "micro_1": {"size": 1},
    "micro_2": {"size": 2},
    "micro_5": {"size": 5},
    "all": {"size": 100},
    "shuffled": {"size": 2, "order": [3, 0, 6, 2, 5, 1, 4]},
    "adapters": {"size": 2, "lora": True, "kinds": [*KINDS["fsdp2"]]},
    "one_row_too_few": {"size": 1, "order": [2], "kinds": ["qwen2", "qwen3_moe"]},
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
    "nothing_kept": {"size": 2, "zero": {"zero_optimization": {"stage3_param_persistence_threshold": 0}}},
}
OWN_CASES = {"fsdp2": FSDP2_CASES, "zero2": ZERO2_CASES, "zero3": ZERO3_CASES}
LORA = LoraConfig(rank=3, alpha=6)
"""A rank that does not divide evenly over two."""
LINEAR = OptimizerConfig(lr=1e-2, scheduler="linear", num_warmup_steps=2, adam_betas=[0.8, 0.95], weight_decay=0.5)
CONSTANT = OptimizerConfig(lr=1e-2)
Strategy = FSDP2Strategy | DeepSpeedStrategy


def make_batch() -> TrainBatch:
    return ragged_batch((9, 4, 12, 9, 2, 7, 9), temperatures=(1.0, 0.7, 1.0, 1.3, 1.0, 0.5, 2.0))


def loss_of(model: Any, batch: TrainBatch) -> Tensor:
    """A weighted sum: the weight follows the token, as an advantage over a global denominator does."""
    weights = torch.sin(batch.input_ids.double() + batch.position_ids)
    scores = model(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask, True)
    loss: Tensor = ((scores.logprobs + 0.1 * scores.entropy) * weights).sum()
    return loss


def value_loss_of(model: Any, batch: TrainBatch) -> Tensor:
    weights = torch.sin(batch.input_ids.double() + batch.position_ids)
    values, _ = model(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    loss: Tensor = (values * weights).sum()
    return loss


@dataclass(frozen=True)
class Ranks:
    """This rank of some number of them, and which strategy they check."""

    name: str
    rank: int
    world: int
    folder: Path

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.name]

    def strategy(
        self,
        model: nn.Module,
        optimizer: OptimizerConfig | None = LINEAR,
        compute_dtype: torch.dtype | None = None,
        fsdp: dict[str, Any] | None = None,
        zero: dict[str, Any] | None = None,
    ) -> Strategy:
        """Prepared for 20 updates, or frozen without an optimizer."""
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

    def policy(
        self,
        kind: str = "llama",
        seed: int = 0,
        checkpointing: bool = False,
        lora: bool = False,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> Strategy:
        """Llama has no biases of keys: their true gradient is 0, and Adam blows their rounding errors up."""
        model = tiny_model(kind, dtype=dtype or self.dtype, seed=seed)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        if lora:
            LoraAdapters(model, LORA, "trainer.policy.model.lora")
            fill_adapters(model)
            for parameter in model.parameters():
                if parameter.requires_grad and dtype == torch.bfloat16:
                    parameter.data = parameter.data.float()
        return self.strategy(LogprobModel(model), **options)

    def critic(self, seed: int = 0) -> Strategy:
        model = ValueModel(tiny_model(dtype=self.dtype, seed=seed))
        nn.init.ones_(model.value_head.weight)
        return self.strategy(model, CONSTANT)


def accumulate(
    strategy: Strategy,
    batch: TrainBatch,
    size: int,
    factor: float = 1.0,
    loss_of: Callable[[Any, TrainBatch], Tensor] = loss_of,
) -> None:
    """This rank's rows in micro-batches of `size`, filled up to as many as the busiest rank has."""
    shards = batch.partition(strategy.world_size)
    count = -(-max(len(rows) for rows in shards) // size)
    mine = batch.select(shards[strategy.rank]).split_micro_batches(max_sequences=size)
    filler = ragged_batch([1]).with_tokens(loss_mask=torch.zeros(1, dtype=torch.bool))
    for index in range(count):
        loss = loss_of(strategy.module, mine[index] if index < len(mine) else filler)
        strategy.backward(loss * factor, is_last_micro_batch=index == count - 1)


def parameters_of(strategy: Strategy) -> dict[str, nn.Parameter]:
    """This rank's parameters by Hugging Face name."""
    scorer: Any = getattr(strategy.module, "module", strategy.module)  # DeepSpeed wraps it
    return {scorer.hf_name(name): parameter for name, parameter in scorer.named_parameters()}


def gradients(strategy: Strategy) -> dict[str, Tensor]:
    """Summed and whole, by Hugging Face name; a collective."""
    found = {}
    for name, parameter in parameters_of(strategy).items():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        if isinstance(strategy, DeepSpeedStrategy):
            gradient = strategy.library.utils.safe_get_full_grad(parameter)
        else:
            gradient = parameter.grad
        assert gradient is not None, name
        found[name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).contiguous()
    return found


def update(strategy: Strategy, seed: int, factor: float = 1.0) -> dict[str, float]:
    accumulate(strategy, ragged_batch((5, 8, 6), seed=seed), 1, factor)
    return strategy.step()


def held(strategy: Strategy) -> list[Tensor]:
    """This rank's slices of what is optimised, and what the model then computes with."""
    tensors = strategy.get_checkpoint_shard(copy=True).tensors
    slices = [tensor for key, tensor in tensors.items() if key.startswith("param/")]
    return slices + [tensor.clone() for _, tensor in strategy.full_parameters()]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """On all ranks."""
    holds = all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    flag = torch.tensor(float(holds))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def check_gradients(ranks: Ranks) -> None:
    found: dict[str, Tensor] = {}
    for kind in KINDS[ranks.name]:
        for case, options in (CASES | OWN_CASES[ranks.name]).items():
            if kind not in options.get("kinds", KINDS[ranks.name]):
                continue
            extra = {key: options[key] for key in ("fsdp", "zero", "checkpointing", "lora") if key in options}
            strategy = ranks.policy(kind, **extra)
            if isinstance(strategy, FSDP2Strategy):
                strategy.reduce_once = options.get("reduce_once", True)
            accumulate(strategy, make_batch().select(options.get("order", range(7))), options["size"])
            if case == "nothing_kept":
                engine: Any = strategy.module
                assert not engine.optimizer.persistent_parameters
            found |= {f"{kind}/{case}/{name}": gradient for name, gradient in gradients(strategy).items()}
    if ranks.rank == 0:
        save_file(found, ranks.folder / "gradients.safetensors")


def check_critic(ranks: Ranks) -> dict[str, Any]:
    """A head of one row: only one rank holds any of it."""
    strategy = ranks.critic()
    accumulate(strategy, make_batch(), 2, loss_of=value_loss_of)
    found = gradients(strategy)
    if ranks.rank == 0:
        save_file(found, ranks.folder / "critic.safetensors")
    norm = strategy.step()["grad_norm"]
    strategy.save(ranks.folder / "critic")
    dist.barrier()
    resumed = ranks.critic(seed=1)
    resumed.load(ranks.folder / "critic")
    for one in (strategy, resumed):
        accumulate(one, make_batch(), 2, loss_of=value_loss_of)
    same = strategy.step() == resumed.step()
    return {"resumed": equal(held(strategy), held(resumed)) and same, "norm": norm}


def check_checkpoints(ranks: Ranks) -> dict[str, Any]:
    """Resume on as many ranks, and from one rank's checkpoint where a `single` lies ready."""
    straight = ranks.policy()
    for seed in range(3):
        update(straight, seed)
    straight.save(ranks.folder / "sharded")
    whole = {name: tensor.clone() for name, tensor in straight.full_parameters()}
    if ranks.rank == 0:
        save_file(whole, ranks.folder / "whole.safetensors")
    dist.barrier()
    resumed = ranks.policy(seed=1)
    for seed in range(4):  # its moments and its greater number of steps must be replaced too
        update(resumed, seed)
    resumed.load(ranks.folder / "sharded")
    same = equal(held(straight), held(resumed))
    metrics = [(update(straight, seed), update(resumed, seed)) for seed in range(3, 6)]
    same = same and equal(held(straight), held(resumed))
    from_single = ranks.policy(seed=1)
    from_single.load(ranks.folder / "single")
    lr = update(from_single, 3)["lr"]
    after = {name: tensor.clone() for name, tensor in from_single.full_parameters()}
    if ranks.rank == 0:
        save_file(after, ranks.folder / "from_single.safetensors")
    return {
        "bitwise": same and all(one == other for one, other in metrics),
        "lr_from_single": lr,
        "files": sorted(path.name for path in (ranks.folder / "sharded").iterdir()),
    }


def check_incomplete(ranks: Ranks) -> dict[str, Any]:
    """A checkpoint without the state of the last parameter, which had no gradient: the others keep theirs.

    All but the first have made fewer steps.
    """
    folder = ranks.folder / "incomplete"
    source = ranks.folder / "single"
    tensors = load_file(source / "shard_0.safetensors")
    table = json.loads((source / "shard_0.json").read_text())
    first, *others, last = table["slices"]
    tensors |= {f"step/{name}": torch.ones(()) for name in others}
    if ranks.rank == 0:
        folder.mkdir()
        kept = {key: value for key, value in tensors.items() if key == f"param/{last}" or not key.endswith(f"/{last}")}
        save_file(kept, folder / "shard_0.safetensors")
        (folder / "shard_0.json").write_text(json.dumps(table))
    dist.barrier()
    strategy = ranks.policy()
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


def check_adapters(ranks: Ranks) -> dict[str, Any]:
    """They step and resume as the whole model does, in bfloat16 too, and frozen weights stay out of checkpoints."""
    straight, resumed = (ranks.policy("qwen2", lora=True) for _ in range(2))
    before = frozen_weights(straight)
    update(straight, 0)
    straight.save(ranks.folder / "adapters")
    dist.barrier()
    resumed.load(ranks.folder / "adapters")
    same = update(straight, 1) == update(resumed, 1)
    half = ranks.policy("qwen2", dtype=torch.bfloat16, lora=True)
    accumulate(half, ragged_batch((5, 8, 6)), 1)
    return {
        "bitwise": equal(held(straight), held(resumed)) and same,
        "frozen": equal(before, frozen_weights(straight)),
        "saved": sorted(straight.get_checkpoint_shard().slices),
        "half": {
            "gradients": sorted({str(gradient.dtype) for gradient in gradients(half).values()}),
            "skipped": half.step()["skipped"],
        },
    }


def frozen_weights(strategy: Strategy) -> list[Tensor]:
    names = [name for name, parameter in parameters_of(strategy).items() if not parameter.requires_grad]
    whole = {name: tensor.clone() for name, tensor in strategy.full_parameters()}
    return [whole[name] for name in names]


def check_skips(ranks: Ranks, **options: Any) -> dict[str, Any]:
    strategy = ranks.policy(**options)
    update(strategy, 0)
    before = held(strategy)
    result = update(strategy, 1, factor=float("nan") if ranks.rank == ranks.world - 1 else 1.0)
    same = equal(before, held(strategy))
    return {"skipped": result["skipped"], "unchanged": same, "next": update(strategy, 2)["skipped"]}


def check_replicas(ranks: Ranks) -> dict[str, Any]:
    """Whole copies that only reduce gradients: their updates are those of a sharded model, and they resume."""
    replicas, sharded = ranks.policy(fsdp={"fsdp_size": 1}), ranks.policy()
    for seed in range(2):
        metrics = [update(one, seed) for one in (replicas, sharded)]
    pairs = zip(replicas.full_parameters(), sharded.full_parameters(), strict=True)
    gap = max(float((one - other).abs().max()) for (_, one), (_, other) in pairs)
    replicas.save(ranks.folder / "replicas")
    dist.barrier()
    resumed = ranks.policy(seed=1, fsdp={"fsdp_size": 1})
    resumed.load(ranks.folder / "replicas")
    same = update(replicas, 2) == update(resumed, 2)
    return {
        "norms": [metric["grad_norm"] for metric in metrics],
        "gap": gap,
        "resumed": equal(held(replicas), held(resumed)) and same,
        "skips": check_skips(ranks, fsdp={"fsdp_size": 1}),
    }


class Asked(TorchFunctionMode):
    """Notes the memory of every tensor that is asked to go to some device: a CPU has no other to see it arrive on."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: set[int] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.to:
            self.memory.add(memory_of(args[0]))
        return func(*args, **(kwargs or {}))


def memory_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def on_device(strategy: DeepSpeedStrategy) -> set[int]:
    """The memory of all parameters and of what the optimizer keeps."""
    tensors = [getattr(parameter, "ds_tensor", parameter) for parameter in parameters_of(strategy).values()]
    shard = (
        strategy.get_checkpoint_shard().tensors
    )  # on a CPU it shares the memory of what is trained, except the counts of steps
    tensors += [tensor for key, tensor in shard.items() if not key.startswith("step/")]
    if optimizer := getattr(strategy.module, "basic_optimizer", None):
        tensors += [value for state in optimizer.state.values() for value in state.values()]
    return {memory_of(tensor) for tensor in tensors if tensor.numel()}


def move(strategy: DeepSpeedStrategy, go: Callable[[], None]) -> bool:
    """Whether all that lies on the device, or does not any more, was asked to move."""
    memory = on_device(strategy)
    with Asked() as asked:
        go()
    return memory <= asked.memory


def check_moves(ranks: Ranks) -> dict[str, Any]:
    """The way to host memory and back, as far as a CPU has one; and training from host memory."""
    frozen = ranks.strategy(LogprobModel(tiny_model()), None)
    assert isinstance(frozen, DeepSpeedStrategy)
    still = held(frozen)
    moved = move(frozen, frozen._leave_device) and move(frozen, frozen._return_to_device)
    zero = OWN_CASES[ranks.name]["offloaded"]["zero"]
    return {
        "whole": check_move(ranks),
        "adapters": check_move(ranks, lora=True),
        "bfloat16": check_move(ranks, lora=True, dtype=torch.bfloat16),
        "frozen": {"moved": moved, "back": equal(still, held(frozen))},
        "skips": check_skips(ranks, zero=zero),
        "half_skips": check_skips(ranks, zero=zero, dtype=torch.float32, compute_dtype=torch.bfloat16),
    }


def check_move(ranks: Ranks, **options: Any) -> dict[str, bool]:
    """Of a model that is trained: it goes on as its twin does, which stayed."""
    strategy, twin = (ranks.policy(**options) for _ in range(2))
    assert isinstance(strategy, DeepSpeedStrategy)
    update(strategy, 0)
    update(twin, 0)
    before = held(strategy)

    def leave() -> None:
        strategy._move("cpu")
        strategy._move_state("cpu")

    def come_back() -> None:
        strategy._return_to_device()
        strategy._move_state(strategy.device)

    left = move(strategy, leave)
    away = equal(before, held(strategy))
    strategy._return_to_device()  # as for a sync, which leaves the optimizer's state away
    returned = move(strategy, leave) and move(strategy, come_back)
    same = update(strategy, 1) == update(twin, 1)
    return {"moved": left and returned, "away": away, "back": equal(held(strategy), held(twin)) and same}


def check_mixed_precision(ranks: Ranks) -> dict[str, Any]:
    strategy = ranks.strategy(LogprobModel(tiny_model()), compute_dtype=torch.bfloat16)
    model: Any = strategy.module
    products: list[str] = []
    model.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, o: products.append(str(o.dtype)))
    batch = ragged_batch((5, 8), temperatures=(0.7, 0.7), seed=ranks.rank)
    scores = model(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    strategy.backward(scores.logprobs.sum(), is_last_micro_batch=True)
    summed = gradients(strategy)
    found = {
        "products": list(products),
        "scores": str(scores.logprobs.dtype),
        "gradients": sorted({str(gradient.dtype) for gradient in summed.values()}),
        "rounded": [name for name, gradient in summed.items() if torch.equal(gradient, gradient.bfloat16().float())],
        "skipped": strategy.step()["skipped"],
        "weights": sorted({str(tensor.dtype) for _, tensor in strategy.full_parameters()}),
    }
    strategy.save(ranks.folder / "mixed")
    dist.barrier()
    resumed = ranks.strategy(LogprobModel(tiny_model(seed=1)), compute_dtype=torch.bfloat16)
    resumed.load(ranks.folder / "mixed")
    same = [update(one, 1) for one in (strategy, resumed)]
    return found | {"resumed": equal(held(strategy), held(resumed)) and same[0] == same[1]}


def check_frozen(ranks: Ranks) -> dict[str, Any]:
    strategy = ranks.strategy(LogprobModel(tiny_model()), None)
    model: Any = strategy.module
    model.eval()
    batch = make_batch()
    arguments = (batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    with torch.no_grad():
        scores = model(*arguments)
        wanted = LogprobModel(tiny_model())(*arguments)
        strategy.save(ranks.folder / "frozen")
        dist.barrier()
        other = ranks.strategy(LogprobModel(tiny_model(seed=1)), None)
        other.load(ranks.folder / "frozen")
        loaded: Any = other.module
        again = loaded(*arguments)
    full = dict(strategy.full_parameters())
    pieces = strategy.get_checkpoint_shard().slices.values()
    return {
        "error": float((scores.logprobs - wanted.logprobs).abs().max()),
        "names": list(full),
        "exact": equal(list(full.values()), list(tiny_model().parameters())),
        "share": sum(piece.stop - piece.start for piece in pieces) / sum(tensor.numel() for tensor in full.values()),
        "loaded": equal([scores.logprobs], [again.logprobs]),
    }


def check_release(ranks: Ranks) -> bool:
    """True if nothing keeps a reference that is replaced in memory."""
    model = LogprobModel(tiny_model())
    kept = weakref.ref(model)
    strategy = ranks.strategy(model, None)
    del model, strategy
    gc.collect()
    return kept() is None


def check_syncs(ranks: Ranks) -> dict[str, Any]:
    """Of trained and frozen models, with weights that were updated; and of merged adapters."""
    policies = {"policy": ranks.policy(), "half": ranks.policy(dtype=torch.float32, compute_dtype=torch.bfloat16)}
    if ranks.name == "fsdp2":
        policies["replicas"] = ranks.policy(fsdp={"fsdp_size": 1})
    for strategy in policies.values():
        update(strategy, 0)
    policies["frozen"] = ranks.strategy(LogprobModel(tiny_model()), None)
    found = {
        name: {wire: count_synced_bytes(strategy.sharded_parameters, wire) for wire in ("float32", "bfloat16")}
        for name, strategy in policies.items()
    }
    model = tiny_model("qwen2")
    adapters = LoraAdapters(model, LORA, "trainer.policy.model.lora")
    fill_adapters(model)
    adapted = ranks.strategy(LogprobModel(model))
    merged = {name: tensor.full_tensor() for name, tensor in adapters.iter_merged(adapted.sharded_parameters())}
    if ranks.rank == 0:
        save_file(merged, ranks.folder / "merged.safetensors")
    found["merged"] = {
        "float32": count_synced_bytes(lambda: adapters.iter_merged(adapted.sharded_parameters()), "float32")
    }
    found["non_finite"] = with_nan(policies["policy"].sharded_parameters)  # type: ignore[assignment]
    everywhere: list[Any] = [None] * ranks.world
    dist.all_gather_object(everywhere, found)
    return {"ranks": everywhere, "first": next(name for name, _ in policies["policy"].sharded_parameters())}


def main(ranks: Ranks, port: int) -> None:
    torch.set_num_threads(1)
    init_process_group(ranks.rank, ranks.world, "127.0.0.1", port, "gloo", 60.0)
    new_group = mock.patch.object(dist, "new_group", wraps=dist.new_group).start()
    with double_precision() if ranks.dtype == torch.float64 else nullcontext():
        check_gradients(ranks)
        found: dict[str, Any] = {"checkpoints": check_checkpoints(ranks), "skips": check_skips(ranks)}
        found["incomplete"] = check_incomplete(ranks)
        found |= {"critic": check_critic(ranks), "adapters": check_adapters(ranks)}
        if ranks.name == "fsdp2":
            found["replicas"] = check_replicas(ranks)
    found |= {"mixed": check_mixed_precision(ranks), "frozen": check_frozen(ranks)}
    found["syncs"] = check_syncs(ranks)
    if ranks.name != "fsdp2":
        found |= {"moves": check_moves(ranks), "released": check_release(ranks), "new_groups": new_group.call_count}
    if ranks.rank == 0:
        (ranks.folder / "found.json").write_text(json.dumps(found))
    close_process_group()
