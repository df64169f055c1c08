"""The fused kernels against the eager passes, in Triton's interpreter: see tests/support/interpreted_kernels.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.interpreted_kernels import CASES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@cache
def interpreted() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.interpreted_kernels"],
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    found: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES)
def test_kernels_give_the_values_and_gradients_of_the_eager_passes(case: str) -> None:
    deviation = interpreted()[case]
    assert set(deviation) == {"logprobs", "entropy", "d_hidden", "d_weight"}
    assert all(largest < 3e-5 for largest in deviation.values()), deviation


def test_in_half_precision_kernels_are_about_as_exact_as_the_eager_passes() -> None:
    assert interpreted()["half"]["worst"] < 2


def test_logits_of_any_size_are_finite_and_equal_ones_give_the_uniform_distribution() -> None:
    assert interpreted()["extremes"] == {"large": True, "equal": True}


def test_backward_finds_as_many_chunks_of_logits_as_are_kept() -> None:
    assert interpreted()["saved"]["logits"] == [[3, 11], [3, 11]]
