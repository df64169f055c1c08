"""One rank of the checks in test_recurrent.py. Rank 0 writes the gradients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl_train.data.batch import TrainBatch
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.strategies.process_group import close_process_group
from tests.integration.strategies.parallel_group_ranks import (
    accumulate,
    compute_loss,
    gradients,
    make_batch,
    make_strategy,
    run,
)
from tests.support.double_precision import double_precision
from tests.support.tiny_families import tiny_family

WORLD = 2


def make(kind: str) -> Any:
    model: Any = tiny_family(kind, AutoModelForCausalLM).double()
    model.set_experts_implementation("eager")  # the default has no kernel for float64
    model.set_attn_implementation("eager")
    return model


def main(rank: int, port: int, cases: Sequence[tuple[str, bool]], folder: Path) -> None:
    """Run one rank for `cases` of (model type, with expert parallelism)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    ranks: Any = dist.group.WORLD
    results: dict[str, Tensor] = {}
    with double_precision():
        for kind, by_expert in cases:
            model = make(kind)
            model.gradient_checkpointing_enable({"use_reentrant": False})
            experts = ExpertParallel(ranks, "trainer.policy.expert_parallel_size") if by_expert else None
            strategy = make_strategy(LogprobModel(model, expert_parallel=experts), WORLD, {})
            # The ranks have different numbers of sequences, and each a micro-batch of one token at the end.
            accumulate(strategy, make_batch("shared"), WORLD, rank, 3, shared_loss)
            results |= {f"{kind}-{by_expert}/{name}": value for name, value in gradients(strategy).items()}
    if rank == 0:
        save_file(results, folder / "gradients.safetensors")
    close_process_group()


def shared_loss(model: Any, batch: TrainBatch) -> Tensor:
    scores = run(model, batch, share=True, compute_entropy=True)
    return compute_loss(scores.logprobs, scores.entropy, batch)
