"""Compares optimizers on gloo ranks with one process, which runs torch's own Muon and bitsandbytes' AdamW8bit."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_train.cluster.addresses import free_address
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.strategies.single import SingleStrategy
from tests.support.rank_processes import run_ranks

from .optimizer_ranks import CASES, LR, RESUMED, SAVED, WORLD, main, make_model, optimizer_settings, train

HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None
needs_bitsandbytes = pytest.mark.skipif(not HAS_BITSANDBYTES, reason="bitsandbytes is not installed")


def make_single(case: str, seed: int = 0) -> SingleStrategy:
    strategy = SingleStrategy(optimizer_config=optimizer_settings(case))
    strategy.prepare(LogprobModel(make_model(case, seed)), 10)
    return strategy


def resume_single(case: str, folder: Path) -> dict[str, Tensor]:
    strategy = make_single(case, seed=1)
    strategy.load(folder)
    train(strategy, RESUMED)
    return dict(strategy.full_parameters())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with checkpoints of one process and of ranks, and weights of ranks."""
    folder = tmp_path_factory.mktemp("optimizers")
    cases = [case for case in CASES if HAS_BITSANDBYTES or not case.startswith("adamw_8bit")]
    for case in cases:
        strategy = make_single(case)
        train(strategy, SAVED)
        strategy.save(folder / f"{case}_single")
    port = free_address()[1]
    run_ranks(main, [(rank, cases, port, folder) for rank in range(WORLD)], folder)
    return folder


def get_gaps(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> Tensor:
    """Return the absolute differences of all weights."""
    assert actual.keys() == expected.keys()
    return torch.cat([(tensor - expected[name]).abs().flatten() for name, tensor in actual.items()])


def assert_bitwise(folder: Path, case: str) -> None:
    """Check uninterrupted and resumed ranks, ranks from one process's checkpoint, and one process from theirs."""
    expected = resume_single(case, folder / f"{case}_single")
    for name in ("ranks", "resumed", "from_single"):
        assert get_gaps(load_file(folder / f"{case}_{name}.safetensors"), expected).max() == 0, name
    assert get_gaps(resume_single(case, folder / case), expected).max() == 0


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("muon")])
def test_sharded_muon_equals_one_process(case: str, folder: Path) -> None:
    assert_bitwise(folder, case)


@needs_bitsandbytes
def test_8bit_moments_of_aligned_rows_equal_one_process(folder: Path) -> None:
    assert_bitwise(folder, "adamw_8bit")


@needs_bitsandbytes
def test_8bit_moments_resume_bitwise_on_equal_ranks(folder: Path) -> None:
    weights = [load_file(folder / f"adamw_8bit_uneven_{name}.safetensors") for name in ("ranks", "resumed")]
    assert get_gaps(*weights).max() == 0


@needs_bitsandbytes
def test_8bit_moments_are_quantized_again_for_other_blocks(folder: Path) -> None:
    """Without the moments, weights would differ by a large part of the learning rate."""
    case = "adamw_8bit_uneven"
    expected = resume_single(case, folder / f"{case}_single")
    for actual in (load_file(folder / f"{case}_from_single.safetensors"), resume_single(case, folder / case)):
        gap = float(get_gaps(actual, expected).mean())
        assert 0 < gap < 1e-2 * LR
