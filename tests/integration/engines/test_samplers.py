"""All engines sample the same tokens from the same logits; each package runs in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.native_servers import STUBS
from tests.support.sampler_runs import REQUESTS, STEPS, sampled_by_rows


@pytest.fixture(scope="module")
def said() -> dict[str, Any]:
    """By package: what its process printed."""
    paths = os.pathsep.join([*sys.path, str(STUBS)])
    environment = os.environ | {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1", "PYTHONWARNINGS": "ignore"}
    processes = {
        package: subprocess.Popen(
            [sys.executable, "-m", "tests.support.sampler_runs", package],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for package in ("vllm", "sglang")
        if importlib.util.find_spec(package) is not None
    }
    found = {}
    try:
        for package, process in processes.items():
            out, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            found[package] = json.loads(out.splitlines()[-1])
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return found


def of(said: dict[str, Any], package: str) -> Any:
    return said[package] if package in said else pytest.skip(f"{package} is not installed; see scripts/cpu_engines")


@pytest.mark.slow
@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_seed_and_logits_determine_sample_in_every_engine(said: Any, package: str):
    for plan, ours in sampled_by_rows().items():
        theirs = of(said, package)["said"][plan]
        assert theirs.keys() == ours.keys()
        for request, tokens in ours.items():
            assert [tuple(token) for token in theirs[request]] == tokens, (plan, request)


def test_seed_and_logits_determine_tokens_in_any_batch():
    ids = {
        plan: {request: [token for token, *_ in tokens] for request, tokens in said.items()}
        for plan, said in sampled_by_rows().items()
    }
    assert ids["together"].keys() == ids["staggered"].keys() == {one.request_id for one in REQUESTS}
    for plan in ("alone", "staggered"):
        for request, tokens in ids[plan].items():
            assert len(tokens) == STEPS
            assert tokens == ids["together"][request], (plan, request)


@pytest.mark.slow
@pytest.mark.defect("a-generator-for-every-request")
def test_vllm_step_operations_are_independent_of_requests(said: Any):
    counted = of(said, "vllm")
    few, many = counted["vLLM's own"]
    assert all(b - a >= 252 for a, b in zip(few, many, strict=True)), "one that does is noticed"
    for rows in ("plain", "mixed"):
        few, many = counted[rows]
        assert few == many, rows
