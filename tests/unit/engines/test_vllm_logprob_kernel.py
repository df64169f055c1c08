"""The log-prob kernel of vLLM's V2 sampler compiles; test_vllm_v2.py runs it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest


@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
def test_logprob_kernel_compiles_for_hopper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from skyrl_train.engines.vllm import logprob_kernel as module

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = module._token_logprob_kernel
    types = ["*bf16", "i32", "*i64", "i32", "*fp32", "*i32", "*fp32", "i32", "constexpr"]
    aligned = {(index,): [["tt.divisibility", 16]] for index in (0, 1, 2, 4, 5, 6, 7)}
    source = ASTSource(
        fn=kernel,
        signature=dict(zip(kernel.arg_names, types, strict=True)),
        constexprs={"BLOCK": module.BLOCK_SIZE},
        attrs=aligned,
    )
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": module.NUM_WARPS}).asm
    assert len(code["cubin"]) > 0
    assert re.search(r"ld\.global\.v4\.b32", code["ptx"])
