"""One rank of the cells in test_parallel.py. Rank 0 writes gradients, and the errors of rejected models."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.tensor_parallel import TensorParallel
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

from .cells import make

WORLD = 2
GROUPS = {
    "TP": (TensorParallel, "trainer.policy.tensor_parallel_size"),
    "SP": (SequenceParallel, "trainer.policy.sequence_parallel_size"),
    "EP": (ExpertParallel, "trainer.policy.expert_parallel_size"),
}


def main(rank: int, port: int, cells: Sequence[tuple[str, str]], folder: Path) -> None:
    """Run one rank for `cells` of (architecture, column)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    ranks: Any = dist.group.WORLD
    all_gradients: dict[str, Tensor] = {}
    errors: dict[str, str] = {}
    with double_precision():
        for name, column in cells:
            kind, key = GROUPS[column]
            group: Any = kind(ranks, key)
            by_rank = {"expert_parallel" if column == "EP" else "parallel_group": group}
            try:
                model = LogprobModel(make(name, torch.float64), **by_rank)
            except ConfigError as error:
                errors[f"{name}-{column}"] = str(error)
                continue
            all_gradients |= {
                f"{name}-{column}/{key}": value for key, value in compute_gradients(model, column, rank).items()
            }
    if rank == 0:
        save_file(all_gradients, folder / "gradients.safetensors")
        (folder / "rejected.json").write_text(json.dumps(errors))
    close_process_group()


def compute_gradients(model: LogprobModel, column: str, rank: int) -> dict[str, Tensor]:
    """Return the full gradient of micro-batches of three sequences with shared prompts."""
    strategy = make_strategy(model, WORLD, {})

    def loss(model: Any, batch: TrainBatch) -> Tensor:
        scores = run(model, batch, share=True, compute_entropy=True)
        return compute_loss(scores.logprobs, scores.entropy, batch)

    num_shards = WORLD if column == "EP" else 1
    accumulate(strategy, make_batch("shared"), num_shards, rank % num_shards, 3, loss)
    return gradients(strategy)
