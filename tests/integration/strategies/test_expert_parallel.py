"""Expert parallelism against one process with padding."""

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

from .expert_parallel_ranks import CASES, STEPPED, main, main_without
from .parallel_group_ranks import loss_of, make_batch, make_model, merged, train
from .test_parallel_groups import DEADLINE_S, one_rank, single

KINDS = ["qwen3_moe", "adapted_moe", "gpt_oss", "deepseek_v3"]


@dataclass
class Found:
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
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    world, size, kinds = request.param
    folder = tmp_path_factory.mktemp(f"expert_parallel_{world}_{size}")
    save_tiny_model(folder / "model", "qwen3_moe")
    (folder / "kinds.json").write_text(json.dumps(kinds))
    with double_precision():
        for kind in STEPPED:
            alone = single(kind)
            train(alone, 3)
            alone.save(folder / f"{kind}_single")
    run_ranks(
        main,
        [(rank, world, size, port, folder) for port in [free_address()[1]] for rank in range(world)],
        folder,
        DEADLINE_S,
    )
    values = json.loads((folder / "found.json").read_text())
    return Found(world, size, folder, kinds, values, load_file(folder / "gradients.safetensors"))


def padded_gradients(kind: str, case: str) -> dict[str, Tensor]:
    batch, model = make_batch(CASES[case].get("batch", "whole")), make_model(kind)
    model.set_attn_implementation("eager" if kind == "gpt_oss" else "sdpa")
    loss = loss_of(*padded_scores(model, batch), batch)
    if "balance" in CASES[case]:
        loss = loss + explicit_router_aux_loss(model, batch, CASES[case]["balance"])
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_padded_gradients(kinds: list[str], gradients: dict[str, Tensor], leaves_out: str = "") -> None:
    for kind, case in itertools.product(kinds, CASES):
        if kind in CASES[case].get("kinds", kinds) and case != leaves_out:
            start = f"{kind}/{case}/"
            got = {key.removeprefix(start): value for key, value in gradients.items() if key.startswith(start)}
            assert_same_tensors(got, padded_gradients(kind, case), 1e-9, start)


def test_the_summed_gradient_is_the_padded_one_wherever_experts_are(found: Found) -> None:
    assert_padded_gradients(found.kinds, found.gradients)


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("world", [1, 2])
def test_so_it_is_where_experts_are_sharded_as_all_else(world: int, tmp_path: Path) -> None:
    (tmp_path / "kinds.json").write_text(json.dumps(KINDS))
    port = free_address()[1]
    run_ranks(main_without, [(rank, world, port, tmp_path) for rank in range(world)], tmp_path, DEADLINE_S)
    assert_padded_gradients(KINDS, load_file(tmp_path / "gradients.safetensors"), leaves_out="divided_sequences")


def test_a_rank_holds_its_experts_only(found: Found) -> None:
    assert len(found.values["held"]) == 2
    assert {shape[0] for shape in found.values["held"].values()} == {4 // found.size}


def test_an_update_has_the_gradient_and_the_metrics_of_one_rank(found: Found) -> None:
    wanted, gradients = one_rank(found.folder)
    metrics = Metrics()
    for rank in found.values["ranks"]:
        metrics.merge(rank["state"])
    got, wanted = (
        {name: value for name, value in values.items() if not name.startswith(("memory/", "policy/optimizer_steps"))}
        for values in (metrics.flush(), wanted)
    )
    assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert_same_tensors(load_file(found.folder / "worker.safetensors"), gradients, 1e-4)


def test_every_rank_scores_its_own_sequences(found: Found) -> None:
    model = AutoModelForCausalLM.from_pretrained(found.folder / "model").eval()
    for said, shard in zip(found.values["ranks"], found.values["shards"], strict=True):
        rows = [row for micro in shard for row in micro]
        with torch.no_grad():
            wanted, _ = padded_scores(model, policy_batch().select(rows))
        torch.testing.assert_close(torch.tensor(said["scores"], dtype=wanted.dtype), wanted, rtol=0, atol=1e-4)


def test_models_whose_experts_cannot_be_shared_out_are_refused_by_key(found: Found) -> None:
    key, said = "trainer.policy.expert_parallel_size", found.values["refused"]
    assert said.keys() == {"old", "none", "three", "unknown"}
    assert "has no expert-parallel plans, which version 5.19 has" in said["old"]
    assert f"no expert-parallel plan for Qwen2ForCausalLM: set {key} to 1" in said["none"]
    assert (
        f"{key}={found.size} does not divide model.layers.0.mlp.experts.gate_up_proj, which has 3 exp" in said["three"]
    )
    assert "'ep_router' for model.layers.0.mlp.gate, which is not supported" in said["unknown"]


@pytest.mark.parametrize("name", [*STEPPED, "copies"])
def test_steps_checkpoints_and_weights_are_those_of_one_process(found: Found, name: str) -> None:
    if name == "copies" and found.world == found.size:
        assert name not in found.values["norms"], "a group is all ranks: there are no copies"
        return
    kind = STEPPED[0] if name == "copies" else name
    alone = single(kind)
    norms = train(alone, 3)
    assert math.isnan(norms[1])
    assert found.values["norms"][name] == pytest.approx(norms, rel=1e-9, nan_ok=True)
    assert_same_tensors(load_file(found.folder / f"{name}_stepped.safetensors"), dict(alone.full_parameters()), 1e-9)
    if kind == "adapted_moe":
        assert_same_tensors(load_file(found.folder / f"{name}_merged.safetensors"), merged(alone, kind), 1e-9)
    other = single(kind)
    other.load(found.folder / f"{name}_divided")
    assert_same_tensors(dict(other.full_parameters()), dict(alone.full_parameters()), 1e-9)
    train(alone, 1)
    assert_same_tensors(load_file(found.folder / f"{name}_resumed.safetensors"), dict(alone.full_parameters()), 1e-9)


def test_a_sync_announces_and_sends_all_experts(found: Found) -> None:
    for sync in found.values["sync"].values():
        assert (sync["announced"], sync["sent"]) == (True, True)
