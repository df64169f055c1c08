"""One rank of the checks in test_optimizers.py. Gradients are given, so that those of all ranks and runs are equal."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.strategies.base import Strategy
from skyrl_train.strategies.fsdp2 import FSDP2Strategy
from skyrl_train.strategies.process_group import close_process_group, init_process_group, make_subgroups
from skyrl_train.testing.tiny_models import tiny_model

CASES: dict[str, dict[str, Any]] = {
    "muon_replicas": {"fsdp_size": 1},
    "muon_tensor": {"parallel_group": TensorParallel},
    "muon_experts": {"expert_parallel": ExpertParallel, "kind": "qwen3_moe"},
    "muon_uneven": {"uneven": True},
    "adamw_8bit": {},
    "adamw_8bit_uneven": {"uneven": True},
}
WORLD = 2
SAVED, RESUMED = range(3), range(3, 5)
LR = 1e-2


def optimizer_settings(case: str) -> OptimizerConfig:
    """Return settings without clipping: the order of sums in the norm depends on the number of ranks."""
    name = "adamw_8bit" if case.startswith("adamw_8bit") else "muon"
    return OptimizerConfig(name=name, lr=LR, weight_decay=0.1, max_grad_norm=0.0, scheduler="linear")


def make_model(case: str, seed: int = 0) -> PreTrainedModel:
    """Return a model; "uneven" has an odd number of matrices, some with an odd number of rows or columns.

    Two ranks quantize its moments in other blocks than one process.
    """
    model = tiny_model(CASES[case].get("kind", "llama"), seed=seed)
    if "uneven" in CASES[case]:
        config = type(model.config)(**{**model.config.to_dict(), "num_hidden_layers": 1, "intermediate_size": 97})
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    return model


def full_gradient(name: str, seed: int, shape: Iterable[int]) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(name.encode()))
    return torch.randn(tuple(shape), generator=generator)


def train(strategy: Strategy, seeds: Iterable[int]) -> None:
    model: Any = strategy.module
    for seed in seeds:
        for module_name, parameter in model.named_parameters():
            parameter.grad = _local_gradient(strategy, model.hf_name(module_name), parameter, seed)
        strategy.step()


def _local_gradient(strategy: Strategy, name: str, parameter: Any, seed: int) -> Tensor:
    if not isinstance(strategy, FSDP2Strategy):
        return full_gradient(name, seed, parameter.shape)
    shape, shard = list(parameter.shape), strategy.parameter_shards.get(name)
    if shard is not None:
        shape[shard.dim] *= shard.size
    full = full_gradient(name, seed, shape)
    if shard is not None:
        full = shard.extract(full)
    elif strategy.tensor_parallel is not None and name in strategy._replicated:
        full /= strategy.tensor_parallel.size  # the step sums over these ranks
    saved, row = strategy._slices()[name], full[0].numel()
    first = (saved.start // row) % len(full) if shard is None or shard.dim == 0 else saved.start // (row * shard.size)
    local = full[first : first + len(parameter.to_local())]
    stride = parameter.stride()
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=stride
    )


def make_strategy(case: str, seed: int = 0) -> FSDP2Strategy:
    options = CASES[case]
    groups = {
        key: options[key](make_subgroups(WORLD, 60.0), f"trainer.policy.{key}_size")
        for key in ("parallel_group", "expert_parallel")
        if key in options
    }
    strategy = FSDP2Strategy(
        optimizer_config=optimizer_settings(case),
        fsdp_config=FSDPConfig(fsdp_size=options.get("fsdp_size", -1)),
        device="cpu",
        rank=dist.get_rank(),
        world_size=WORLD,
    )
    strategy.prepare(LogprobModel(make_model(case, seed), **groups), 10)
    return strategy


def main(rank: int, cases: list[str], port: int, folder: Path) -> None:
    torch.set_num_threads(1)
    init_process_group(rank, WORLD, "127.0.0.1", port, "gloo", 60.0)
    for case in cases:
        strategy, resumed, from_single = (make_strategy(case, seed) for seed in (0, 1, 1))
        train(strategy, SAVED)
        strategy.save(folder / case)
        dist.barrier()
        train(resumed, SAVED)  # loading must replace its state
        resumed.load(folder / case)
        from_single.load(folder / f"{case}_single")
        for name, each in {"ranks": strategy, "resumed": resumed, "from_single": from_single}.items():
            train(each, RESUMED)
            weights = {key: tensor.contiguous() for key, tensor in each.full_parameters()}
            if rank == 0:
                save_file(weights, folder / f"{case}_{name}.safetensors")
    close_process_group()
