"""One rank of the checks in test_fsdp2.py: `python fsdp2_ranks.py RANK WORLD PORT FOLDER`; rank 0 writes findings."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.models.token_scorer import TokenScorer
from skyrl_train.models.value_scorer import ValueScorer
from skyrl_train.strategies.fsdp2 import FSDP2Strategy
from skyrl_train.strategies.process_group import close_process_group, init_process_group
from skyrl_train.strategies.shards import local
from skyrl_train.testing.double_precision import double_precision
from skyrl_train.testing.padded_reference import ragged_batch
from skyrl_train.testing.tiny_models import tiny_model

KINDS = ("qwen2", "qwen3", "llama", "gemma", "mistral")
CASES: dict[str, dict[str, Any]] = {
    "micro_1": {"size": 1},
    "micro_2": {"size": 2},
    "micro_5": {"size": 5},
    "all": {"size": 100},
    "shuffled": {"size": 2, "order": [3, 0, 6, 2, 5, 1, 4]},
    "one_row_too_few": {"size": 1, "order": [2], "kinds": ["qwen2"]},
    "no_reshard": {"size": 2, "fsdp": {"reshard_after_forward": False}, "kinds": ["qwen2"]},
    "reduce_every_time": {"size": 2, "reduce_once": False, "kinds": ["qwen2"]},
    "replicas": {"size": 2, "fsdp": {"fsdp_size": 1}, "kinds": ["qwen2"]},
    "checkpointed": {"size": 2, "checkpointing": True, "kinds": ["qwen2", "gemma"]},
}


def make_batch() -> TrainBatch:
    return ragged_batch((9, 4, 12, 9, 2, 7, 9), temperatures=(1.0, 0.7, 1.0, 1.3, 1.0, 0.5, 2.0))


def loss_of(scorer: Any, batch: TrainBatch) -> Tensor:
    """A weighted sum: the weight follows the token, as an advantage over a global denominator does."""
    weights = torch.sin(batch.input_ids.double() + batch.position_ids)
    scores = scorer(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask, True)
    loss: Tensor = ((scores.logprobs + 0.1 * scores.entropy) * weights).sum()
    return loss


def make(
    rank: int, world: int, kind: str = "qwen2", dtype: torch.dtype = torch.float64, **options: Any
) -> FSDP2Strategy:
    model = tiny_model(kind, dtype=dtype, seed=options.pop("seed", 0))
    if options.pop("checkpointing", False):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    strategy = FSDP2Strategy(
        optimizer=OptimizerConfig(lr=1e-2, scheduler="linear", num_warmup_steps=2),
        fsdp=FSDPConfig(**options.pop("fsdp", {})),
        device="cpu",
        rank=rank,
        world_size=world,
        compute_dtype=options.pop("compute_dtype", dtype),
    )
    strategy.prepare(TokenScorer(model), 20).train()
    assert not options
    return strategy


def value_loss_of(scorer: Any, batch: TrainBatch) -> Tensor:
    weights = torch.sin(batch.input_ids.double() + batch.position_ids)
    values, _ = scorer(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    loss: Tensor = (values * weights).sum()
    return loss


def make_critic(rank: int, world: int, seed: int = 0) -> FSDP2Strategy:
    scorer = ValueScorer(tiny_model(dtype=torch.float64, seed=seed))
    torch.nn.init.ones_(scorer.value_head.weight)
    strategy = FSDP2Strategy(
        optimizer=OptimizerConfig(lr=1e-2),
        fsdp=FSDPConfig(),
        device="cpu",
        rank=rank,
        world_size=world,
        compute_dtype=torch.float64,
    )
    strategy.prepare(scorer, 20).train()
    return strategy


def accumulate(
    strategy: FSDP2Strategy,
    batch: TrainBatch,
    size: int,
    factor: float = 1.0,
    loss_of: Callable[[Any, TrainBatch], Tensor] = loss_of,
) -> None:
    """This rank's rows in micro-batches of `size`, filled up to as many as the busiest rank has."""
    shards = batch.shard(strategy.world_size)
    count = -(-max(len(rows) for rows in shards) // size)
    mine = batch.select(shards[strategy.rank]).split(max_sequences=size)
    filler = ragged_batch([1]).with_tokens(loss_mask=torch.zeros(1, dtype=torch.bool))
    for index in range(count):
        loss = loss_of(strategy.scorer, mine[index] if index < len(mine) else filler)
        strategy.backward(loss * factor, last=index == count - 1)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def update(strategy: FSDP2Strategy, seed: int, factor: float = 1.0) -> dict[str, float]:
    accumulate(strategy, ragged_batch((5, 8, 6), seed=seed), 1, factor)
    return strategy.step()


def shards_of(strategy: FSDP2Strategy) -> list[Tensor]:
    return [local(parameter.detach()).clone() for parameter in strategy.scorer.parameters()]


def everywhere(holds: bool) -> bool:
    flag = torch.tensor(float(holds))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN)
    return bool(flag)


def check_gradients(rank: int, world: int, folder: Path) -> None:
    found = {}
    for kind in KINDS:
        for case, options in CASES.items():
            if kind not in options.get("kinds", KINDS):
                continue
            extra = {key: options[key] for key in ("fsdp", "checkpointing") if key in options}
            strategy = make(rank, world, kind, **extra)
            strategy.reduce_once = options.get("reduce_once", True)
            batch = make_batch().select(options.get("order", range(7)))
            accumulate(strategy, batch, options["size"])
            for name, parameter in strategy.scorer.named_parameters():
                assert parameter.grad is not None, name
                found[f"{kind}/{case}/{name.removeprefix('model.')}"] = full(parameter.grad).contiguous()
    if rank == 0:
        save_file(found, folder / "gradients.safetensors")


def check_critic(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """A head of one row: only one rank holds any of it."""
    strategy = make_critic(rank, world)
    accumulate(strategy, make_batch(), 2, loss_of=value_loss_of)
    parameters: Any = strategy.scorer
    found = {parameters.hf_name(name): full(p.grad).contiguous() for name, p in parameters.named_parameters()}
    if rank == 0:
        save_file(found, folder / "critic.safetensors")
    strategy.step()
    strategy.save(folder / "critic")
    dist.barrier()
    resumed = make_critic(rank, world, seed=1)
    resumed.load(folder / "critic")
    for one in (strategy, resumed):
        accumulate(one, make_batch(), 2, loss_of=value_loss_of)
    same = strategy.step() == resumed.step()
    pairs = zip(shards_of(strategy), shards_of(resumed), strict=True)
    return {"resumed": everywhere(same and all(torch.equal(a, b) for a, b in pairs))}


def check_checkpoints(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Resume on as many ranks, and from one rank's checkpoint where a `from_single` lies ready."""
    straight = make(rank, world)
    for seed in range(3):
        update(straight, seed)
    straight.save(folder / "sharded")
    dist.barrier()
    resumed = make(rank, world, seed=1)
    resumed.load(folder / "sharded")
    metrics = [(update(straight, seed), update(resumed, seed)) for seed in range(3, 6)]
    same = all(torch.equal(a, b) for a, b in zip(shards_of(straight), shards_of(resumed), strict=True))
    from_single = make(rank, world, seed=1)
    from_single.load(folder / "single")
    lr = update(from_single, 3)["lr"]
    after = {name: tensor.clone() for name, tensor in from_single.full_parameters()}
    if rank == 0:
        save_file(after, folder / "from_single.safetensors")
    return {
        "bitwise": everywhere(same and all(one == other for one, other in metrics)),
        "lr_from_single": lr,
        "files": sorted(path.name for path in (folder / "sharded").iterdir()),
    }


def check_skips(rank: int, world: int) -> dict[str, Any]:
    strategy = make(rank, world)
    update(strategy, 0)
    before = shards_of(strategy)
    result = update(strategy, 1, factor=float("nan") if rank == world - 1 else 1.0)
    same = all(torch.equal(a, b) for a, b in zip(before, shards_of(strategy), strict=True))
    return {"skipped": result["skipped"], "unchanged": everywhere(same), "next": update(strategy, 2)["skipped"]}


def check_mixed_precision(rank: int, world: int) -> dict[str, Any]:
    strategy = make(rank, world, dtype=torch.float32, compute_dtype=torch.bfloat16)
    scorer: Any = strategy.scorer
    products: list[str] = []
    scorer.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, o: products.append(str(o.dtype)))
    batch = ragged_batch((5, 8), temperatures=(0.7, 0.7))
    scores = scorer(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    strategy.backward(scores.logprobs.sum(), last=True)
    gradients = sorted({str(parameter.grad.dtype) for parameter in scorer.parameters()})
    return {"products": products, "scores": str(scores.logprobs.dtype), "gradients": gradients}


def check_frozen(rank: int, world: int) -> dict[str, Any]:
    strategy = FSDP2Strategy(optimizer=None, fsdp=FSDPConfig(), device="cpu", rank=rank, world_size=world)
    scorer = strategy.prepare(TokenScorer(tiny_model()), None)
    batch = make_batch()
    with torch.no_grad():
        scores = scorer(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
        scorer.eval()
        plain = TokenScorer(tiny_model())
        wanted = plain(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    names = [name for name, _ in strategy.full_parameters()]
    exact = all(
        torch.equal(tensor, own)
        for (_, tensor), own in zip(strategy.full_parameters(), tiny_model().parameters(), strict=True)
    )
    held = sum(local(parameter).numel() for parameter in scorer.parameters())
    return {
        "error": float((scores.logprobs - wanted.logprobs).abs().max()),
        "names": names,
        "exact": everywhere(exact),
        "share": held / sum(parameter.numel() for parameter in scorer.parameters()),
    }


def main(rank: int, world: int, port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, world, "127.0.0.1", port, "gloo", 60.0)
    with double_precision():
        check_gradients(rank, world, folder)
        found = {"checkpoints": check_checkpoints(rank, world, folder), "skips": check_skips(rank, world)}
        found["critic"] = check_critic(rank, world, folder)
    found |= {"mixed": check_mixed_precision(rank, world), "frozen": check_frozen(rank, world)}
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    close_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
    # Past the interpreter's own teardown, which gloo's threads outlive: one that then asks for the interpreter's lock
    # ends the process with SIGABRT, once in some hundred times, after everything was checked.
    sys.stdout.flush()
    os._exit(0)
