"""Compares expert parallelism with one process with padding."""

from __future__ import annotations

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
from skyrl_train.metrics import Metrics
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.double_precision import double_precision
from tests.support.learner_specs import policy_batch
from tests.support.padded_reference import assert_same_tensors, padded_scores
from tests.support.rank_processes import run_ranks
from tests.support.routing_reference import explicit_router_aux_loss

from .expert_parallel_ranks import CASES, STEPPED, main, main_without_expert_parallel
from .parallel_group_ranks import compute_loss, get_merged_weights, make_batch, make_model, train
from .test_parallel_groups import DEADLINE_S, make_single_strategy, update_on_one_rank

KINDS = ["qwen3_moe", "adapted_moe", "gpt_oss", "deepseek_v3"]


@dataclass
class RankResults:
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
        (2, 2, KINDS),
        pytest.param((4, 2, KINDS[:2]), marks=[pytest.mark.slow, pytest.mark.on_demand]),
        pytest.param((4, 4, KINDS[:2]), marks=[pytest.mark.slow, pytest.mark.on_demand]),
        pytest.param((8, 4, KINDS[:2]), marks=[pytest.mark.slow, pytest.mark.on_demand]),
    ],
    ids=["2_of_2", "2_of_4", "4_of_4", "4_of_8"],
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    world, size, kinds = request.param
    folder = tmp_path_factory.mktemp(f"expert_parallel_{world}_{size}")
    save_tiny_model(folder / "model", "qwen3_moe")
    (folder / "kinds.json").write_text(json.dumps(kinds))
    with double_precision():
        for kind in STEPPED:
            strategy = make_single_strategy(kind)
            train(strategy, 3)
            strategy.save(folder / f"{kind}_single")
    run_ranks(
        main,
        [(rank, world, size, port, folder) for port in [free_address()[1]] for rank in range(world)],
        folder,
        DEADLINE_S,
    )
    values = json.loads((folder / "results.json").read_text())
    return RankResults(world, size, folder, kinds, values, load_file(folder / "gradients.safetensors"))


def padded_gradients(kind: str, case: str) -> dict[str, Tensor]:
    batch, model = make_batch(CASES[case].get("batch", "whole")), make_model(kind)
    model.set_attn_implementation("eager" if kind == "gpt_oss" else "sdpa")
    loss = compute_loss(*padded_scores(model, batch), batch)
    if "balance" in CASES[case]:
        loss = loss + explicit_router_aux_loss(model, batch, CASES[case]["balance"])
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_padded_gradients(kinds: list[str], gradients: dict[str, Tensor], excluded: str = "") -> None:
    for kind, case in itertools.product(kinds, CASES):
        if kind in CASES[case].get("kinds", kinds) and case != excluded:
            prefix = f"{kind}/{case}/"
            actual = {key.removeprefix(prefix): value for key, value in gradients.items() if key.startswith(prefix)}
            assert_same_tensors(actual, padded_gradients(kind, case), 1e-9, prefix)


def test_summed_gradient_equals_padded_one(results: RankResults) -> None:
    assert_padded_gradients(results.kinds, results.gradients)


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("world", [1, 2])
def test_summed_gradient_without_expert_parallel(world: int, tmp_path: Path) -> None:
    (tmp_path / "kinds.json").write_text(json.dumps(KINDS))
    port = free_address()[1]
    run_ranks(
        main_without_expert_parallel, [(rank, world, port, tmp_path) for rank in range(world)], tmp_path, DEADLINE_S
    )
    assert_padded_gradients(KINDS, load_file(tmp_path / "gradients.safetensors"), excluded="divided_sequences")


def test_rank_holds_only_its_experts(results: RankResults) -> None:
    assert len(results.values["experts_shapes"]) == 2
    assert {shape[0] for shape in results.values["experts_shapes"].values()} == {4 // results.size}


def test_update_equals_that_of_one_rank(results: RankResults) -> None:
    expected, gradients = update_on_one_rank(results.folder)
    metrics = Metrics()
    for rank in results.values["ranks"]:
        metrics.merge(rank["state"])
    actual, expected = (
        {name: value for name, value in values.items() if not name.startswith(("memory/", "policy/optimizer_steps"))}
        for values in (metrics.flush(), expected)
    )
    assert actual == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert_same_tensors(load_file(results.folder / "worker.safetensors"), gradients, 1e-4)


def test_every_rank_computes_its_own_sequences(results: RankResults) -> None:
    model = AutoModelForCausalLM.from_pretrained(results.folder / "model").eval()
    for rank_result, shard in zip(results.values["ranks"], results.values["shards"], strict=True):
        rows = [row for micro in shard for row in micro]
        with torch.no_grad():
            expected, _ = padded_scores(model, policy_batch().select(rows))
        torch.testing.assert_close(
            torch.tensor(rank_result["scores"], dtype=expected.dtype), expected, rtol=0, atol=1e-4
        )


def test_rejection_names_the_key(results: RankResults) -> None:
    key, messages = "trainer.policy.expert_parallel_size", results.values["rejected"]
    assert messages.keys() == {"old", "none", "three", "unknown"}
    assert "has no expert-parallel plans, which version 5.19 has" in messages["old"]
    assert f"no expert-parallel plan for Qwen2ForCausalLM: set {key} to 1" in messages["none"]
    assert (
        f"{key}={results.size} does not divide model.layers.0.mlp.experts.gate_up_proj, which has 3 exp"
        in messages["three"]
    )
    assert "'ep_router' for model.layers.0.mlp.gate, which is not supported" in messages["unknown"]


@pytest.mark.parametrize("name", [*STEPPED, "replicas"])
def test_steps_and_checkpoints_equal_one_process(results: RankResults, name: str) -> None:
    if name == "replicas" and results.world == results.size:
        assert name not in results.values["norms"], "a group is all ranks: there are no replicas"
        return
    kind = STEPPED[0] if name == "replicas" else name
    strategy = make_single_strategy(kind)
    norms = train(strategy, 3)
    assert math.isnan(norms[1])
    assert results.values["norms"][name] == pytest.approx(norms, rel=1e-9, nan_ok=True)
    assert_same_tensors(
        load_file(results.folder / f"{name}_stepped.safetensors"), dict(strategy.full_parameters()), 1e-9
    )
    if kind == "adapted_moe":
        assert_same_tensors(
            load_file(results.folder / f"{name}_merged.safetensors"), get_merged_weights(strategy, kind), 1e-9
        )
    resumed = make_single_strategy(kind)
    resumed.load(results.folder / f"{name}_divided")
    assert_same_tensors(dict(resumed.full_parameters()), dict(strategy.full_parameters()), 1e-9)
    train(strategy, 1)
    assert_same_tensors(
        load_file(results.folder / f"{name}_resumed.safetensors"), dict(strategy.full_parameters()), 1e-9
    )


def test_sync_announces_and_sends_all_experts(results: RankResults) -> None:
    for sync in results.values["sync"].values():
        assert (sync["announced"], sync["sent"], sync["changes"]) == (True, True, True)
