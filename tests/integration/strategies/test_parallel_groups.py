"""Compares parallel groups (sequence and tensor parallelism) with one process with padding."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from skyrl_train.cluster.addresses import free_address
from skyrl_train.learner.learner import BatchSizes, Learner, LocalWorker, WorkerGroup
from skyrl_train.metrics import Metrics
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.double_precision import double_precision
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.padded_reference import assert_same_tensors, padded_scores, padded_values
from tests.support.rank_processes import run_ranks
from tests.support.recording_strategies import RecordingWorker
from tests.support.routing_reference import explicit_router_aux_loss

from .parallel_group_ranks import (
    CASES,
    OPTIMIZER,
    SPEC,
    STEPPED,
    compute_loss,
    get_merged_weights,
    main,
    make_batch,
    make_model,
    train,
)

KINDS = ["qwen2", "qwen3", "gemma2", "qwen3_moe", "adapted", "one_kv_head"]
DEADLINE_S = 240.0


@dataclass
class RankResults:
    kind: str
    world: int
    size: int
    folder: Path
    kinds: list[str]
    values: dict[str, Any]
    gradients: dict[str, Tensor]


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


@pytest.fixture(
    scope="module",
    params=[
        ("sequence", 2, 2, KINDS),
        pytest.param(("sequence", 4, 2, ["qwen2"]), marks=[pytest.mark.slow, pytest.mark.on_demand]),
        pytest.param(("sequence", 4, 4, ["qwen2", "one_kv_head"]), marks=[pytest.mark.slow, pytest.mark.on_demand]),
        ("tensor", 2, 2, KINDS[:-1]),
        pytest.param(
            ("tensor", 4, 2, ["qwen2", "qwen3_moe", "adapted"]), marks=[pytest.mark.slow, pytest.mark.on_demand]
        ),
    ],
    ids=["tokens_2_of_2", "tokens_2_of_4", "tokens_4_of_4", "layers_2_of_2", "layers_2_of_4"],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    parallelism, world, size, kinds = request.param
    folder = tmp_path_factory.mktemp(f"parallel_group_{parallelism}_{world}_{size}")
    save_tiny_model(folder / "model")
    (folder / "kinds.json").write_text(json.dumps(kinds))
    with double_precision():
        for kind in STEPPED:
            strategy = make_single_strategy(kind)
            train(strategy, 3)
            strategy.save(folder / f"{kind}_single")
    arguments = [
        (rank, world, parallelism, size, port, folder) for port in [free_address()[1]] for rank in range(world)
    ]
    run_ranks(main, arguments, folder, DEADLINE_S)
    values = json.loads((folder / "results.json").read_text())
    return RankResults(parallelism, world, size, folder, kinds, values, load_file(folder / "gradients.safetensors"))


def make_single_strategy(kind: str) -> SingleStrategy:
    strategy = SingleStrategy(optimizer_config=OPTIMIZER, compute_dtype=torch.float64)
    strategy.prepare(LogprobModel(make_model(kind)), 20).train()
    return strategy


def padded_gradients(kind: str, case: str) -> dict[str, Tensor]:
    batch, model = make_batch(case), make_model(kind)
    model.set_attn_implementation("eager" if kind == "gemma2" else "sdpa")  # only eager attention caps scores
    loss = compute_loss(*padded_scores(model, batch), batch)
    if "balance" in CASES[case]:
        loss = loss + explicit_router_aux_loss(model, batch, CASES[case]["balance"])
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_summed_gradient_equals_padded_one(results: RankResults) -> None:
    for kind, case in itertools.product(results.kinds, CASES):
        if kind in CASES[case].get("kinds", results.kinds) and not (results.kind == "sequence" and case == "balanced"):
            prefix = f"{kind}/{case}/"
            actual = {
                key.removeprefix(prefix): value for key, value in results.gradients.items() if key.startswith(prefix)
            }
            assert_same_tensors(actual, padded_gradients(kind, case), 1e-9, prefix)


def test_summed_critic_gradient_equals_padded_one(results: RankResults) -> None:
    batch, model = make_batch("shared"), make_model("qwen2")
    weight = torch.ones(1, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    compute_loss(padded_values(model, weight, batch), torch.zeros(()), batch).backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert weight.grad is not None
    assert_same_tensors(
        load_file(results.folder / "critic.safetensors"), {**expected, "value_head.weight": weight.grad}, 1e-9
    )


def update_on_one_rank(folder: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Return metrics and gradients of the same update in one process."""
    recording = "tests.support.recording_strategies:RecordingSingle"
    worker = RecordingWorker(tiny_spec(str(folder / "model"), strategy=recording, **SPEC), 0, 1)
    learner = Learner(WorkerGroup([LocalWorker(worker)]), None, BatchSizes(100, micro_train_batch_size_per_gpu=2))

    async def run() -> dict[str, float]:
        await learner.setup()
        metrics = await learner.update(policy_batch())
        await learner.close()
        return metrics

    return asyncio.run(run()), worker.gradients()


def test_update_equals_that_of_one_rank(results: RankResults) -> None:
    expected, gradients = update_on_one_rank(results.folder)
    metrics = Metrics()
    for rank in results.values["ranks"]:
        metrics.merge(rank["state"])
    actual, expected = (  # the learner counts policy/optimizer_steps
        {name: value for name, value in values.items() if not name.startswith(("memory/", "policy/optimizer_steps"))}
        for values in (metrics.flush(), expected)
    )
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_same_tensors(load_file(results.folder / "worker.safetensors"), gradients, 1e-4)


def test_group_metrics_are_counted_once(results: RankResults) -> None:
    weights = [rank["state"]["weight"].get("policy/entropy", 0) for rank in results.values["ranks"]]
    assert sum(weights) == int(policy_batch().loss_mask.sum())
    assert sum(weight > 0 for weight in weights) == results.world // results.size


def test_every_rank_has_all_logprobs_of_its_sequences(results: RankResults) -> None:
    model = AutoModelForCausalLM.from_pretrained(results.folder / "model").eval()
    for rank, rank_result in enumerate(results.values["ranks"]):
        rows = [row for micro in results.values["shards"][rank // results.size] for row in micro]
        with torch.no_grad():
            expected, _ = padded_scores(model, policy_batch().select(rows))
        torch.testing.assert_close(
            torch.tensor(rank_result["scores"], dtype=expected.dtype), expected, rtol=0, atol=1e-4
        )


def test_rejection_names_the_key(results: RankResults) -> None:
    key = f"trainer.policy.{results.kind}_parallel_size"
    messages = {name: text for name, text in results.values["rejected"].items() if key in text}
    assert messages == results.values["rejected"]
    if results.kind == "sequence":
        assert messages.keys() == {"heads", "tokens"}
        assert messages["heads"].startswith(f"{key}={results.size} does not divide the model's 3 attention heads")
        assert f"Set {key} to 1" in messages["tokens"]
    else:
        assert messages.keys() == {"heads", "features", "columns", "unplanned", "unknown", "whole"}
        assert messages["heads"].startswith(f"{key}={results.size} does not divide the model's num_attention_heads, 3")
        assert "does not divide model.layers.0.mlp.gate_proj.weight, which has 63 features" in messages["features"]
        assert "'grouped_gemm' for model.layers.0.mlp.up_proj, which is not supported" in messages["unknown"]
        assert "computes other hidden states when it is sharded" in messages["columns"]
        assert "no tensor-parallel plan for Qwen2ForCausalLM" in messages["unplanned"]
        assert "of its layers' weights; every rank would hold the others in full" in messages["whole"]


@pytest.mark.parametrize("kind", [*STEPPED, "qwen2_replicas"])
def test_steps_and_checkpoints_equal_one_process(results: RankResults, kind: str) -> None:
    model = kind.removesuffix("_replicas")
    strategy = make_single_strategy(model)
    norms = train(strategy, 3)
    assert math.isnan(norms[1])
    assert results.values["norms"][kind] == pytest.approx(norms, rel=1e-9, nan_ok=True)
    assert_same_tensors(
        load_file(results.folder / f"{kind}_stepped.safetensors"), dict(strategy.full_parameters()), 1e-9
    )
    resumed = make_single_strategy(model)
    resumed.load(results.folder / f"{kind}_parallel_group")
    assert_same_tensors(dict(resumed.full_parameters()), dict(strategy.full_parameters()), 1e-9)
    for trained in (strategy, resumed):
        train(trained, 1)
        actual = load_file(results.folder / f"{kind}_resumed.safetensors")
        assert_same_tensors(actual, dict(trained.full_parameters()), 1e-9)


def test_adapters_are_merged_into_shards(results: RankResults) -> None:
    strategy = make_single_strategy("adapted")
    train(strategy, 3)
    assert_same_tensors(load_file(results.folder / "merged.safetensors"), get_merged_weights(strategy), 1e-9)


def test_sync_announces_and_sends_full_parameters(results: RankResults) -> None:
    for sync in results.values["sync"].values():
        assert (sync["announced"], sync["sent"], sync["changes"]) == (True, True, True)


def test_experts_are_recorded_and_replayed_across_ranks(results: RankResults) -> None:
    routing = results.values["routing"]
    assert routing["same experts"]
    assert routing["replay gap"] <= 1e-9 < 1e-3 < routing["replay changes"]


def test_half_precision_logprobs_are_close_to_one_process(results: RankResults) -> None:
    assert 0 <= results.values["half_precision"] < 0.25
