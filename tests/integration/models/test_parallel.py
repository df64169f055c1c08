"""Cells of the learner on several ranks: real processes, one pair for all cells that run."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_train.cluster.addresses import free_address
from tests.integration.strategies.parallel_group_ranks import loss_of, make_batch
from tests.support.double_precision import double_precision
from tests.support.padded_reference import assert_same_tensors, padded_scores
from tests.support.rank_processes import run_ranks

from .cells import attention_of, green, make, red
from .ranks import GROUPS, WORLD, main
from .table import column as column_of
from .test_learner import trained

DEADLINE_S = 240.0


@dataclass
class Found:
    gradients: dict[str, Tensor]
    refused: dict[str, str]


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    """Of the cells that were selected."""
    folder: Path = tmp_path_factory.mktemp("models")
    chosen = [item.callspec.params for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    cells = [(one["name"], one["column"]) for one in chosen]
    run_ranks(
        main, [(rank, port, cells, folder) for port in [free_address()[1]] for rank in range(WORLD)], folder, DEADLINE_S
    )
    return Found(load_file(folder / "gradients.safetensors"), json.loads((folder / "refused.json").read_text()))


@pytest.mark.parametrize(("name", "column"), green(*GROUPS))
def test_the_summed_gradient_of_the_ranks_is_the_padded_one(name: str, column: str, found: Found):
    model, batch = make(name, torch.float64), make_batch("shared")
    model.set_attn_implementation(attention_of(name))
    loss_of(*padded_scores(model, batch), batch).backward()
    start = f"{name}-{column}/"
    got = {key.removeprefix(start): value for key, value in found.gradients.items() if key.startswith(start)}
    assert_same_tensors(got, trained(model))


@pytest.mark.parametrize(("name", "column"), red(*GROUPS))
def test_a_model_that_cannot_be_divided_is_refused(name: str, column: str, found: Found):
    assert re.search(column_of(column).refused[name].message, found.refused[f"{name}-{column}"])
