"""Cells of the learner on several ranks: one pair of real processes runs all cells."""

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
from tests.integration.strategies.parallel_group_ranks import compute_loss, make_batch
from tests.support.double_precision import double_precision
from tests.support.padded_reference import assert_same_tensors, padded_scores
from tests.support.rank_processes import run_ranks

from .cells import make, reference_attention, rejected_cells, supported_cells
from .ranks import GROUPS, WORLD, main
from .table import column as column_of
from .test_learner import trained_gradients

DEADLINE_S = 240.0


@dataclass
class RankResults:
    gradients: dict[str, Tensor]
    rejected: dict[str, str]


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    """Run the selected cells on real ranks."""
    folder: Path = tmp_path_factory.mktemp("models")
    selected = [item.callspec.params for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    cells = [(parameters["name"], parameters["column"]) for parameters in selected]
    run_ranks(
        main, [(rank, port, cells, folder) for port in [free_address()[1]] for rank in range(WORLD)], folder, DEADLINE_S
    )
    return RankResults(load_file(folder / "gradients.safetensors"), json.loads((folder / "rejected.json").read_text()))


@pytest.mark.parametrize(("name", "column"), supported_cells(*GROUPS))
def test_summed_gradient_equals_padded_one(name: str, column: str, results: RankResults):
    model, batch = make(name, torch.float64), make_batch("shared")
    model.set_attn_implementation(reference_attention(name))
    compute_loss(*padded_scores(model, batch), batch).backward()
    prefix = f"{name}-{column}/"
    actual = {key.removeprefix(prefix): value for key, value in results.gradients.items() if key.startswith(prefix)}
    assert_same_tensors(actual, trained_gradients(model))


@pytest.mark.parametrize(("name", "column"), rejected_cells(*GROUPS))
def test_unsupported_model_is_rejected(name: str, column: str, results: RankResults):
    assert re.search(column_of(column).refused[name].message, results.rejected[f"{name}-{column}"])
