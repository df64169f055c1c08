"""The fused kernels against the eager passes, in Triton's interpreter: see tests/support/triton_interpreter.py."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.triton_interpreter import CASES

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")


@cache
def interpreted() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_interpreter"],
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


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_to_machine_code_that_reads_16_bytes_at_once(
    capability: int, capped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Ampere, Hopper and Blackwell; ptxas comes with Triton and needs no GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, types in {
        "_logprob_kernel": "*fp32 *i64 *fp32 *fp32 *fp32 *fp32 i32 fp32 fp32 constexpr constexpr",
        "_gradient_kernel": "*fp32 *i64 *fp32 *fp32 *fp32 *fp32 *fp32 *bf16 i32 fp32 fp32 constexpr constexpr",
    }.items():
        code = compiled(name, types.split(), capability, capped)
        assert len(code["cubin"]) > 0
        assert re.search(r"ld\.global\.v4\.b32", code["ptx"]), name


def compiled(name: str, types: list[str], capability: int, capped: bool) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from skyrl_train.models import fused_logprobs as module

    kernel: Any = getattr(module, name)
    signature = dict(zip(kernel.arg_names, types, strict=True))
    # As a launch finds out by itself: rows of most vocabularies begin at multiples of 16 elements.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*") or kind == "i32"}
    constants = {"CAPPED": capped, "BLOCK": module.BLOCK_SIZE}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    code: dict[str, Any] = triton.compile(source, target=target, options={"num_warps": module.NUM_WARPS}).asm
    return code
