"""All engines sample the same tokens from the same logits. Each package runs in a separate process."""

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
def script_outputs() -> dict[str, Any]:
    """The JSON that each package's process printed, by package."""
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
    outputs = {}
    try:
        for package, process in processes.items():
            out, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors
            outputs[package] = json.loads(out.splitlines()[-1])
    finally:
        for process in processes.values():
            process.kill()
            process.communicate()
    return outputs


def output_of(outputs: dict[str, Any], package: str) -> Any:
    if package not in outputs:
        pytest.skip(f"{package} is not installed; see scripts/cpu_engines")
    return outputs[package]


@pytest.mark.slow
@pytest.mark.parametrize("package", ["vllm", "sglang"])
def test_seed_and_logits_determine_sample_in_every_engine(script_outputs: Any, package: str):
    for plan, expected in sampled_by_rows().items():
        samples = output_of(script_outputs, package)["samples"][plan]
        assert samples.keys() == expected.keys()
        for request, tokens in expected.items():
            assert [tuple(token) for token in samples[request]] == tokens, (plan, request)


def test_seed_and_logits_determine_tokens_in_any_batch():
    ids = {
        plan: {request: [token for token, *_ in tokens] for request, tokens in samples.items()}
        for plan, samples in sampled_by_rows().items()
    }
    assert ids["together"].keys() == ids["staggered"].keys() == {request.request_id for request in REQUESTS}
    for plan in ("alone", "staggered"):
        for request, tokens in ids[plan].items():
            assert len(tokens) == STEPS
            assert tokens == ids["together"][request], (plan, request)


@pytest.mark.slow
@pytest.mark.defect("generator-per-seeded-request")
def test_vllm_step_operations_are_independent_of_requests(script_outputs: Any):
    counts = output_of(script_outputs, "vllm")
    few, many = counts["vLLM's own"]
    assert all(b - a >= 252 for a, b in zip(few, many, strict=True)), "the count detects one operation per request"
    for rows in ("plain", "mixed"):
        few, many = counts[rows]
        assert few == many, rows
