"""Compares the fused kernels with the eager passes in Triton's interpreter: see tests/support/triton_interpreter.py."""

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
def run_interpreter() -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.support.triton_interpreter"],
        cwd=Path(__file__).resolve().parents[3],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    deviations: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return deviations


@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_eager_passes(case: str) -> None:
    deviation = run_interpreter()[case]
    assert set(deviation) == {"logprobs", "entropy", "d_hidden", "d_weight"}
    assert all(largest < 3e-5 for largest in deviation.values()), deviation


def test_half_precision_kernels_are_as_accurate() -> None:
    assert run_interpreter()["half"]["worst"] < 2


def test_extreme_logits() -> None:
    assert run_interpreter()["extremes"] == {"large": True, "equal": True}


def test_backward_uses_cached_chunks() -> None:
    assert run_interpreter()["saved"]["logits"] == [[3, 11], [3, 11]]


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_to_vectorized_loads(
    capability: int, capped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compile for Ampere, Hopper and Blackwell; ptxas comes with Triton and needs no GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for name, types in {
        "_logprob_kernel": "*fp32 *i64 *fp32 *fp32 *fp32 *fp32 i32 fp32 fp32 constexpr constexpr",
        "_gradient_kernel": "*fp32 *i64 *fp32 *fp32 *fp32 *fp32 *fp32 *bf16 i32 fp32 fp32 constexpr constexpr",
    }.items():
        code = compile_kernel(name, types.split(), capability, capped)
        assert len(code["cubin"]) > 0
        assert re.search(r"ld\.global\.v4\.b32", code["ptx"]), name


def compile_kernel(name: str, types: list[str], capability: int, capped: bool) -> dict[str, Any]:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from skyrl_train.models import fused_logprobs as module

    kernel: Any = getattr(module, name)
    signature = dict(zip(kernel.arg_names, types, strict=True))
    # A launch detects this: rows of most vocabularies begin at multiples of 16 elements.
    aligned = {(i,): [["tt.divisibility", 16]] for i, kind in enumerate(types) if kind.startswith("*") or kind == "i32"}
    constants = {"CAPPED": capped, "BLOCK": module.BLOCK_SIZE}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    target = GPUTarget("cuda", capability, 32)
    code: dict[str, Any] = triton.compile(source, target=target, options={"num_warps": module.NUM_WARPS}).asm
    return code
