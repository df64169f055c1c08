"""vLLM with recurrent layers on a CPU: its log-probs equal the learner's, and weight syncs are exact."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch

from skyrl_train.models.logprob_model import LogprobModel
from tests.support.engine_harness import TOLERANCE, BackgroundLoop, EngineHarness

from .agreement import PROMPTS, learners_logprobs
from .cells import make_hybrid, save_hybrid
from .table import hybrid, hybrid_cells
from .test_conformance_models import start_engine, uninitialized_memory_is_nan

IN_CI = ("Falcon-H1", "bfloat16")
"""In bfloat16 vLLM packs more weights than in float32."""
MAX_MEAN = {"float32": TOLERANCE, "bfloat16": 0.1}
"""Data type -> largest mean difference in nats. In bfloat16 vLLM rounds activations, too; the learner here does not."""


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def bench(
    name: str, dtype: str, loop: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHarness]:
    folder, row = tmp_path_factory.mktemp("model"), hybrid(name)
    if row.kind.startswith("qwen3_5"):
        pytest.importorskip("torchvision", reason="vLLM's classes of Qwen3.5 import it")
    torch_dtype = getattr(torch, dtype)
    engine = start_engine("vllm", save_hybrid(row, folder / "model", torch_dtype), dtype)
    yield EngineHarness(engine, make_hybrid(row, torch_dtype), loop, folder)
    loop.run(engine.close())


def sample(bench: EngineHarness) -> list[list[float]]:
    """Return the log-probs of samples, which must agree with those of a learner in float32 with `bench.model`."""
    requests = [bench.request(prompt, seed=seed, max_tokens=24) for seed, prompt in enumerate(PROMPTS)]
    model = LogprobModel(copy.deepcopy(bench.model).float())
    samples = []
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        samples.append(completion.full_logprobs.tolist())
        expected = torch.tensor(learners_logprobs(model, request, completion))
        differences = (torch.tensor(samples[-1]) - expected).abs()
        assert differences.mean() <= MAX_MEAN[str(bench.model.dtype).removeprefix("torch.")]
        assert bench.model.dtype != torch.float32 or differences.max() <= TOLERANCE
    return samples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*cell, id="-".join(cell), marks=[] if cell == IN_CI else [pytest.mark.on_demand])
        for cell in hybrid_cells()
    ],
    scope="module",
)
def test_vllm_serves_recurrent_layers_exactly(name: str, dtype: str, bench: EngineHarness):
    first = sample(bench)
    with uninitialized_memory_is_nan():
        bench.run(bench.publish(make_hybrid(hybrid(name), bench.model.dtype, seed=5)))
    assert sample(bench) != first
    with uninitialized_memory_is_nan():
        bench.run(bench.publish(make_hybrid(hybrid(name), bench.model.dtype)))
    assert sample(bench) == first  # a sync leaves exactly the weights that the engine loads from a checkpoint
