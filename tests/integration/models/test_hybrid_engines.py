"""vLLM with recurrent layers on a CPU: its log-probs equal the learner's, and weight syncs are exact."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.recurrent_layers import replace_recurrent_functions
from tests.support.engine_harness import TOLERANCE, BackgroundLoop, EngineHarness

from .agreement import PROMPTS, learners_logprobs
from .cells import make_hybrid, save_hybrid
from .table import HYBRIDS, hybrid, hybrid_cells
from .test_conformance_models import start_engine, uninitialized_memory_is_nan

IN_CI = (("Falcon-H1", "float32"), ("Falcon-H1", "bfloat16"))
"""In bfloat16 vLLM packs more weights than in float32. It also rounds activations, which the learner here does not."""
NUM_TOKENS = 24


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


def sample(bench: EngineHarness, largest_mean: float) -> list[list[float]]:
    """Return the log-probs of samples, which must agree with those of a learner in float32 with `bench.model`."""
    requests = [bench.request(prompt, seed=seed, max_tokens=NUM_TOKENS) for seed, prompt in enumerate(PROMPTS)]
    model = LogprobModel(copy.deepcopy(bench.model).float())
    completions = bench.generate(*requests)
    samples = [completion.full_logprobs.tolist() for completion in completions]
    expected = [learners_logprobs(model, *pair) for pair in zip(requests, completions, strict=True)]
    differences = (torch.tensor(samples) - torch.tensor(expected)).abs()
    assert differences.mean() <= largest_mean
    assert bench.model.dtype != torch.float32 or differences.max() <= TOLERANCE
    return samples


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        pytest.param(*cell, id="-".join(cell), marks=[] if cell in IN_CI else [pytest.mark.on_demand])
        for cell in hybrid_cells()
    ],
    scope="module",
)
def test_vllm_serves_recurrent_layers_exactly(name: str, dtype: str, bench: EngineHarness):
    row = hybrid(name)
    first = sample(bench, row.vllm[dtype])
    with uninitialized_memory_is_nan():
        bench.run(bench.publish(make_hybrid(row, bench.model.dtype, seed=5)))
    assert sample(bench, row.vllm[dtype]) != first
    with uninitialized_memory_is_nan():
        bench.run(bench.publish(make_hybrid(row, bench.model.dtype)))
    assert sample(bench, row.vllm[dtype]) == first  # a sync leaves the weights that a checkpoint would leave


@torch.no_grad()
def decode(model: Any, prompt: Sequence[int], tokens: Sequence[int], lost_state: str | None) -> Tensor:
    """Return log-probs of tokens after a prompt. Each token starts with zeros in place of the lost state."""
    cache, inputs, logprobs = DynamicCache(config=model.config), list(prompt), []
    for token in tokens:
        logits = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True).logits[0, -1]
        logprobs.append(logits.log_softmax(-1)[token])
        for layer in cache.layers:
            for state in getattr(layer, lost_state or "", {}).values():
                state.zero_()
        inputs = [token]
    return torch.stack(logprobs)


@pytest.mark.parametrize("lost_state", ["conv_states", "recurrent_states"])
@pytest.mark.parametrize("name", [row.name for row in HYBRIDS if row.vllm])
def test_lost_states_exceed_the_bounds(name: str, lost_state: str):
    row, differences = hybrid(name), []
    model = make_hybrid(row)
    replace_recurrent_functions(model)
    for prompt in PROMPTS:
        tokens = torch.randint(3, 250, (NUM_TOKENS,), generator=torch.Generator().manual_seed(0)).tolist()
        kept, lost = (decode(model, prompt, tokens, state) for state in (None, lost_state))
        differences.append((kept - lost).abs())
    assert torch.cat(differences).mean() > 2 * max(row.vllm.values())
