"""vLLM's V2 model runner, in processes where Triton's interpreter runs its kernels on a CPU."""

from __future__ import annotations

import copy
import importlib.util
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.engines.base import SamplingParams
from skyrl_train.experiment.memory_plan import model_shape, sampler_item
from skyrl_train.models.routing import Routers
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.engine_harness import TOKENIZER, TOLERANCE, largest_difference, save_as_base_model
from tests.support.reference_sampler import Reference
from tests.support.vllm_v2 import DRAFTS, ENVIRONMENT
from tests.support.vllm_v2_runs import DISTURBED, OPTIONS, PROMPT, ROWS, SETTINGS, TOP, logits_of_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("vllm") is None, reason="vLLM is not installed; see scripts/cpu_engines"
    ),
    pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("v2") / "model"
    save_as_base_model(tiny_model("qwen3"), folder)
    return folder


def run(name: str, folder: Path) -> Any:
    """Return what a run of tests/support/vllm_v2_runs.py prints."""
    command = [sys.executable, "-m", "tests.support.vllm_v2_runs", name, str(folder)]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def samples(model: Path) -> Any:
    return run("sample", model)


@pytest.fixture(scope="module")
def reference() -> Reference:
    """The model in double precision."""
    exact = Reference(tiny_model("qwen3"))
    exact.model = copy.deepcopy(exact.model).double()
    return exact


def test_v2_logprobs_equal_scores_and_reference(samples: Any, reference: Reference):
    assert samples["uses V2"]
    for (name, options), sample, scores in zip(OPTIONS.items(), samples["together"], samples["scores"], strict=True):
        sampling = SamplingParams(max_tokens=8, **options)
        truncated, full = reference.logprobs(PROMPT, sample["token_ids"], sampling)
        assert largest_difference(sample["logprobs"], truncated) <= TOLERANCE, name
        assert largest_difference(sample["full_logprobs"], full) <= TOLERANCE, name
        at_temperature_1 = [
            row[token]
            for row, token in zip(
                reference.distributions(PROMPT, sample["token_ids"], 1.0), sample["token_ids"], strict=True
            )
        ]
        assert largest_difference(scores, at_temperature_1) <= TOLERANCE, name
        if sampling.temperature in (0, 1):
            assert largest_difference(sample["full_logprobs"], scores) <= TOLERANCE, name


def test_v2_seed_determines_tokens_in_any_batch(samples: Any):
    tokens = dict(zip(OPTIONS, (sample["token_ids"] for sample in samples["together"]), strict=True))
    assert [sample["token_ids"] for sample in samples["alone"]] == [tokens["plain"], tokens["truncated"]]
    assert samples["other seed"]["token_ids"] != tokens["plain"]


def test_v2_returns_most_likely_tokens(samples: Any, reference: Reference):
    sample = samples["together"][list(OPTIONS).index("temperature")]
    ids, logprobs = map(np.array, sample["top"])
    expected = reference.distributions(PROMPT, sample["token_ids"], OPTIONS["temperature"]["temperature"])
    assert ids.shape == (len(sample["token_ids"]), TOP)
    assert (ids == np.argsort(-expected, axis=1)[:, :TOP]).all()
    assert largest_difference(logprobs, np.take_along_axis(expected, ids, axis=1)) <= TOLERANCE


def test_v2_schema_truncates_distribution(samples: Any, reference: Reference):
    sample = samples["schema"]
    assert TOKENIZER.decode(sample["token_ids"], skip_special_tokens=True) in ('"ab"', '"ac"', "12", "true")
    _, full = reference.logprobs(PROMPT, sample["token_ids"], SamplingParams(max_tokens=8))
    assert largest_difference(sample["full_logprobs"], full) <= TOLERANCE
    first = reference.distributions(PROMPT, sample["token_ids"], 1.0)[0]
    allowed = [token for token in range(len(first)) if TOKENIZER.decode([token]) in ('"', "1", "t", '"a', "12")]
    assert len(allowed) == 3
    expected = first[sample["token_ids"][0]] - np.logaddexp.reduce(first[allowed])
    assert abs(sample["logprobs"][0] - expected) <= TOLERANCE


def test_drafts_change_no_token_or_logprob(samples: Any):
    drafted = samples["drafted"]
    assert drafted["together"] == [*samples["together"], samples["schema"]]
    # 3 requests of 13 tokens: the first token, and 3 steps with 3 accepted drafts and one more token each.
    assert (drafted["draft_steps"], drafted["accepted_drafts"]) == (9, 27)


@pytest.mark.on_demand
@pytest.mark.parametrize("method", ["ngram", "eagle", "eagle3"])
def test_other_drafts_change_no_token(method: str, samples: Any, model: Path):
    drafted = run(method, model)
    assert drafted["together"] == [*samples["together"], samples["schema"]]
    steps, accepted = drafted["draft_steps"], drafted["accepted_drafts"]
    assert 0 < accepted < 3 * steps, "both accepted and rejected drafts occur"
    generator = GeneratorConfig(max_num_seqs=8, engine_init_kwargs={"max_model_len": 256})
    generator = replace(generator, speculative=replace(generator.speculative, method=method))
    planned = sampler_item(generator, model_shape(str(model), key="generator.model_name")).size
    assert drafted["sampler bytes"] == planned


@pytest.mark.on_demand
def test_mtp_drafts_change_no_token(tmp_path: Path):
    outcome = run("mtp", tmp_path / "unused")
    plain, drafted = outcome["batches"]
    for expected, actual in zip(plain, drafted, strict=True):
        assert actual["token_ids"] == expected["token_ids"]
        for name in ("logprobs", "full_logprobs"):  # The kernel of experts rounds by the shape of the batch.
            assert largest_difference(actual[name], expected[name]) <= 1e-5
    assert 0 < outcome["accepted_drafts"] < 3 * outcome["draft_steps"]


@pytest.mark.on_demand
@pytest.mark.parametrize("name", ["disturbed", "disturbed_overlapped"])
def test_interrupted_drafts_change_no_token(name: str, model: Path):
    outcome = run(name, model)
    assert outcome["drafts"].pop("accepted") > outcome["plain"].pop("accepted") == 0
    assert outcome["drafts"] == outcome["plain"]
    stopped = outcome["plain"]["completions"][2]["token_ids"]
    assert DISTURBED[2]["min_tokens"] < len(stopped) < 60


@pytest.mark.on_demand
@pytest.mark.parametrize("name", ["broken", "failing"])
def test_broken_v2_sampler_falls_back_to_v1(name: str, model: Path, reference: Reference):
    outcome = run(name, model)
    assert not outcome["uses V2"]
    completion = outcome["completion"]
    _, full = reference.logprobs(PROMPT, completion["token_ids"], SamplingParams(max_tokens=8))
    assert largest_difference(completion["full_logprobs"], full) <= TOLERANCE


@pytest.mark.on_demand
@pytest.mark.parametrize("name", ["routing", "routing_drafts"])
def test_v2_returns_experts_of_every_token(name: str, tmp_path: Path):
    model = tiny_model("qwen3_moe")
    save_as_base_model(model, tmp_path / "model")
    outcome = run(name, tmp_path / "model")
    assert outcome["cached"] >= 3 * 32, "later turns find the first one in the prefix cache"
    assert len(outcome["sequences"]) == 8
    routers = Routers(model.eval())
    routers.record_routed_experts = True
    for sequence in outcome["sequences"]:
        with torch.no_grad(), routers.forward_pass():
            model(torch.tensor([sequence["tokens"][:-1]]))
        expected = routers.routed_experts().sort(-1).values
        assert torch.equal(torch.tensor(sequence["routing"], dtype=torch.int16).sort(-1).values, expected)


@pytest.mark.on_demand
def test_v2_samples_exact_distribution(model: Path):
    """A sampler with another temperature (10 %) or repeated noise fails, as one with another truncation does."""
    logits, deviations = logits_of_rows().double(), []
    for setting, row in zip(SETTINGS, run("rows", model), strict=True):
        scaled = logits / setting.get("temperature", 1.0)
        kept = truncated(scaled, setting).log_softmax(-1)
        ids = torch.tensor(row["ids"])
        assert len(ids) == ROWS
        counts = ids.bincount(minlength=len(logits))
        assert not counts[kept == -math.inf].any(), setting
        probs = kept.exp()
        likely = probs * ROWS >= 5
        expected = probs[likely] * ROWS
        statistic = float(((counts[likely] - expected) ** 2 / expected).sum())
        freedom = int(likely.sum()) - 1
        assert statistic <= freedom + 4.5 * math.sqrt(2 * freedom), setting
        nats = kept.nan_to_num(neginf=0.0)
        mean = float((probs * nats).sum())
        deviations.append(
            (float(nats[ids].mean()) - mean) / math.sqrt(float((probs * (nats - mean) ** 2).sum()) / ROWS)
        )
        same = float((probs**2).sum())
        repeated = float((ids[1:] == ids[:-1]).double().mean())
        assert abs(repeated - same) <= 5 * math.sqrt(same * (1 - same) / ROWS), setting
        for token, (behavior, full) in row["logprobs"].items():
            assert abs(behavior - kept[int(token)]) <= TOLERANCE, setting
            assert abs(full - scaled.log_softmax(-1)[int(token)]) <= TOLERANCE, setting
    assert abs(sum(deviations)) / math.sqrt(len(deviations)) <= 4, deviations


def truncated(scaled: torch.Tensor, setting: dict[str, Any]) -> torch.Tensor:
    """Return logits [V] with -inf for dropped tokens; tokens that are tied with the last kept one are kept."""
    order = scaled.argsort(descending=True)
    kept = torch.zeros_like(scaled, dtype=torch.bool)
    best = order[: setting.get("top_k") or len(order)]
    above = scaled[best].softmax(-1).cumsum(-1) - scaled[best].softmax(-1)
    kept[best[above < setting.get("top_p", 1.0)]] = True
    kept &= scaled >= scaled.max() + math.log(setting.get("min_p") or 1e-300)
    return scaled.masked_fill(scaled < scaled[kept].min(), -math.inf)


@pytest.mark.on_demand
@pytest.mark.parametrize("drafts", ["", "ngram"])
@pytest.mark.parametrize("part", ["sampling", "pauses", "traffic", "adapters", "weights"])
def test_conformance_suite_passes_on_v2(part: str, drafts: str):
    suite = Path(__file__).parent / f"test_conformance_{part}.py"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(suite)]
    done = subprocess.run(
        command,
        env=os.environ | ENVIRONMENT | {DRAFTS: drafts},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
