"""Models with recurrent layers on two real ranks: FSDP2, gradient checkpointing, expert parallelism."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from skyrl_train.cluster.addresses import free_address
from tests.integration.strategies.parallel_group_ranks import compute_loss, make_batch
from tests.support.double_precision import double_precision
from tests.support.padded_reference import assert_same_tensors, padded_scores
from tests.support.rank_processes import run_ranks
from tests.support.recurrences import reference_recurrences

from .recurrent_ranks import WORLD, main, make

DEADLINE_S = 240.0
CASES = [
    pytest.param(kind, by_expert, marks=[] if in_ci else pytest.mark.on_demand)
    for kind, by_expert, in_ci in (
        ("qwen3_5_moe_text", True, True),
        ("qwen3_5_text", False, False),
        ("qwen3_next", False, False),
        ("qwen3_next", True, False),
        ("kimi_linear", True, False),
        ("nemotron_h", False, False),
        ("granitemoehybrid", False, False),
        ("falcon_h1", False, False),
        ("lfm2", False, False),
        ("lfm2_moe", True, False),
    )
]


@pytest.fixture(scope="module")
def rank_gradients(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Run the selected cases on real ranks, and return the full gradients."""
    folder: Path = tmp_path_factory.mktemp("recurrent")
    selected = [item.callspec.params for item in request.session.items if item.path == request.path]  # type: ignore[attr-defined]
    cases = [(parameters["kind"], parameters["by_expert"]) for parameters in selected]
    port = free_address()[1]
    run_ranks(main, [(rank, port, cases, folder) for rank in range(WORLD)], folder, DEADLINE_S)
    return load_file(folder / "gradients.safetensors")


@pytest.mark.parametrize(("kind", "by_expert"), CASES)
def test_ranks_sum_to_gradient_of_definition(kind: str, by_expert: bool, rank_gradients: dict[str, Tensor]) -> None:
    batch = make_batch("shared")
    with double_precision():
        model = make(kind)
        with reference_recurrences(model):
            compute_loss(*padded_scores(model, batch), batch).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    prefix = f"{kind}-{by_expert}/"
    actual = {name.removeprefix(prefix): value for name, value in rank_gradients.items() if name.startswith(prefix)}
    assert_same_tensors(actual, expected)
