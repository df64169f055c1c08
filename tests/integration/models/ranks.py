"""One rank of the cells in test_parallel.py. Rank 0 writes gradients, and what models were refused with."""

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
    gradients,
    loss_of,
    make_batch,
    run,
    strategy_of,
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
    """`cells`: (architecture, column)."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=WORLD)
    ranks: Any = dist.group.WORLD
    found: dict[str, Tensor] = {}
    refused: dict[str, str] = {}
    with double_precision():
        for name, column in cells:
            kind, key = GROUPS[column]
            group: Any = kind(ranks, key)
            by_rank = {"expert_parallel" if column == "EP" else "parallel_group": group}
            try:
                model = LogprobModel(make(name, torch.float64), **by_rank)
            except ConfigError as error:
                refused[f"{name}-{column}"] = str(error)
                continue
            found |= {f"{name}-{column}/{key}": value for key, value in gradients_of(model, column, rank).items()}
    if rank == 0:
        save_file(found, folder / "gradients.safetensors")
        (folder / "refused.json").write_text(json.dumps(refused))
    close_process_group()


def gradients_of(model: LogprobModel, column: str, rank: int) -> dict[str, Tensor]:
    """The whole gradient, of micro-batches of three sequences with shared prompts."""
    strategy = strategy_of(model, WORLD, {})

    def loss(model: Any, batch: TrainBatch) -> Tensor:
        scores = run(model, batch, share=True, compute_entropy=True)
        return loss_of(scores.logprobs, scores.entropy, batch)

    parts = WORLD if column == "EP" else 1
    accumulate(strategy, make_batch("shared"), parts, rank % parts, 3, loss)
    return gradients(strategy)
