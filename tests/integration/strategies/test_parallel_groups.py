"""Parallel groups (sequence and tensor parallelism) against one process with padding."""

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

from .parallel_group_ranks import CASES, OPTIMIZER, SPEC, STEPPED, loss_of, main, make_batch, make_model, merged, train

KINDS = ["qwen2", "qwen3", "llama", "gemma", "gemma2", "qwen3_moe", "adapted", "one_kv_head"]
DEADLINE_S = 240.0


@dataclass
class Found:
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
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    shared, world, size, kinds = request.param
    folder = tmp_path_factory.mktemp(f"parallel_group_{shared}_{world}_{size}")
    save_tiny_model(folder / "model")
    (folder / "kinds.json").write_text(json.dumps(kinds))
    with double_precision():
        for kind in STEPPED:
            alone = single(kind)
            train(alone, 3)
            alone.save(folder / f"{kind}_single")
    arguments = [(rank, world, shared, size, free, folder) for free in [free_address()[1]] for rank in range(world)]
    run_ranks(main, arguments, folder, DEADLINE_S)
    values = json.loads((folder / "found.json").read_text())
    return Found(shared, world, size, folder, kinds, values, load_file(folder / "gradients.safetensors"))


def single(kind: str) -> SingleStrategy:
    strategy = SingleStrategy(optimizer_config=OPTIMIZER, compute_dtype=torch.float64)
    strategy.prepare(LogprobModel(make_model(kind)), 20).train()
    return strategy


def padded_gradients(kind: str, case: str) -> dict[str, Tensor]:
    batch, model = make_batch(case), make_model(kind)
    model.set_attn_implementation("eager" if kind == "gemma2" else "sdpa")  # only the first one caps scores
    loss = loss_of(*padded_scores(model, batch), batch)
    if "balance" in CASES[case]:
        loss = loss + explicit_router_aux_loss(model, batch, CASES[case]["balance"])
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_the_summed_gradient_is_the_padded_one_however_tokens_lie_on_the_ranks(found: Found) -> None:
    for kind, case in itertools.product(found.kinds, CASES):
        if kind in CASES[case].get("kinds", found.kinds) and not (found.kind == "sequence" and case == "balanced"):
            start = f"{kind}/{case}/"
            got = {key.removeprefix(start): value for key, value in found.gradients.items() if key.startswith(start)}
            assert_same_tensors(got, padded_gradients(kind, case), 1e-9, start)


def test_the_summed_gradient_of_a_critic_is_the_padded_one(found: Found) -> None:
    batch, model = make_batch("shared"), make_model("qwen2")
    weight = torch.ones(1, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    loss_of(padded_values(model, weight, batch), torch.zeros(()), batch).backward()
    wanted = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert weight.grad is not None
    assert_same_tensors(
        load_file(found.folder / "critic.safetensors"), {**wanted, "value_head.weight": weight.grad}, 1e-9
    )


def one_rank(folder: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Metrics and gradients of the same update in one process."""
    recording = "tests.support.recording_strategies:RecordingSingle"
    worker = RecordingWorker(tiny_spec(str(folder / "model"), strategy=recording, **SPEC), 0, 1)
    learner = Learner(WorkerGroup([LocalWorker(worker)]), None, BatchSizes(100, micro_train_batch_size_per_gpu=2))

    async def run() -> dict[str, float]:
        await learner.setup()
        metrics = await learner.update(policy_batch())
        await learner.close()
        return metrics

    return asyncio.run(run()), worker.gradients()


def test_an_update_has_the_gradient_and_the_metrics_of_one_rank_with_a_loss_over_whole_sequences(found: Found) -> None:
    wanted, gradients = one_rank(found.folder)
    metrics = Metrics()
    for rank in found.values["ranks"]:
        metrics.merge(rank["state"])
    got, wanted = (  # the last of these is the learner's count
        {name: value for name, value in found.items() if not name.startswith(("memory/", "policy/optimizer_steps"))}
        for found in (metrics.flush(), wanted)
    )
    assert got == pytest.approx(wanted, rel=1e-4, abs=1e-6)
    assert_same_tensors(load_file(found.folder / "worker.safetensors"), gradients, 1e-4)


def test_metrics_of_a_parallel_group_are_counted_once(found: Found) -> None:
    weights = [rank["state"]["weight"].get("policy/entropy", 0) for rank in found.values["ranks"]]
    assert sum(weights) == int(policy_batch().loss_mask.sum())
    assert sum(weight > 0 for weight in weights) == found.world // found.size


def test_every_rank_has_the_scores_of_all_tokens_of_its_sequences(found: Found) -> None:
    model = AutoModelForCausalLM.from_pretrained(found.folder / "model").eval()
    for rank, said in enumerate(found.values["ranks"]):
        rows = [row for micro in found.values["shards"][rank // found.size] for row in micro]
        with torch.no_grad():
            wanted, _ = padded_scores(model, policy_batch().select(rows))
        torch.testing.assert_close(torch.tensor(said["scores"], dtype=wanted.dtype), wanted, rtol=0, atol=1e-4)


def test_models_that_cannot_be_divided_are_refused_by_key(found: Found) -> None:
    key = f"trainer.policy.{found.kind}_parallel_size"
    said = {name: text for name, text in found.values["refused"].items() if key in text}
    assert said == found.values["refused"]
    if found.kind == "sequence":
        assert said.keys() == {"heads", "tokens"}
        assert said["heads"].startswith(f"{key}={found.size} does not divide the model's 3 attention heads")
        assert f"set {key} to 1" in said["tokens"]
    else:
        assert said.keys() == {"heads", "features", "columns", "unplanned", "unknown", "whole"}
        assert said["heads"].startswith(f"{key}={found.size} does not divide the model's num_attention_heads, 3")
        assert "does not divide model.layers.0.mlp.gate_proj.weight, which has 63 features" in said["features"]
        assert "'grouped_gemm' for model.layers.0.mlp.up_proj, which is not supported" in said["unknown"]
        assert "computes other hidden states when it is sharded" in said["columns"]
        assert "no tensor-parallel plan for Qwen2ForCausalLM" in said["unplanned"]
        assert "of its layers' weights; every rank would hold the others whole" in said["whole"]


@pytest.mark.parametrize("kind", [*STEPPED, "qwen2_replicas"])
def test_steps_checkpoints_and_weights_are_those_of_one_process(found: Found, kind: str) -> None:
    model = kind.removesuffix("_replicas")
    alone = single(model)
    norms = train(alone, 3)
    assert math.isnan(norms[1])
    assert found.values["norms"][kind] == pytest.approx(norms, rel=1e-9, nan_ok=True)
    assert_same_tensors(load_file(found.folder / f"{kind}_stepped.safetensors"), dict(alone.full_parameters()), 1e-9)
    other = single(model)
    other.load(found.folder / f"{kind}_parallel_group")
    assert_same_tensors(dict(other.full_parameters()), dict(alone.full_parameters()), 1e-9)
    for strategy in (alone, other):
        train(strategy, 1)
        got = load_file(found.folder / f"{kind}_resumed.safetensors")
        assert_same_tensors(got, dict(strategy.full_parameters()), 1e-9)


def test_adapters_are_merged_into_the_part_that_a_rank_has(found: Found) -> None:
    alone = single("adapted")
    train(alone, 3)
    assert_same_tensors(load_file(found.folder / "merged.safetensors"), merged(alone), 1e-9)


def test_a_sync_announces_and_sends_the_whole_of_what_ranks_have_parts_of(found: Found) -> None:
    for sync in found.values["sync"].values():
        assert (sync["announced"], sync["sent"]) == (True, True)


def test_log_probs_in_half_precision_stay_close_to_those_of_one_process(found: Found) -> None:
    assert 0 <= found.values["half_precision"] < 0.25
