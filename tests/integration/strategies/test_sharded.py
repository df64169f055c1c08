"""Compares FSDP2 and DeepSpeed on one and two gloo ranks with one process.

Ranks start once and are checked many times.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_train.cluster.addresses import free_address
from skyrl_train.config.schema import DeepSpeedConfig, FSDPConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import CheckpointError, ConfigError, DeadlineExceeded
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.strategies.deepspeed import DeepSpeedStrategy
from skyrl_train.strategies.fsdp2 import FSDP2Strategy
from skyrl_train.strategies.process_group import init_process_group
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.padded_reference import assert_same_tensors, padded_scores, padded_values, ragged_batch
from tests.support.rank_processes import run_ranks
from tests.support.tiny_adapters import fill_adapters

from . import ranks
from .ranks import DTYPES, KINDS, LINEAR, make_batch

DEADLINE_S = 240.0
SKIPPED = {"skipped": 1.0, "unchanged": True, "next": 0.0}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")
ZERO = (pytest.mark.slow, needs_deepspeed)


@dataclass
class RankResults:
    strategy: str
    world: int
    folder: Path
    values: dict[str, Any]
    gradients: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.strategy]

    def assert_same_gradients(self, actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
        assert_same_tensors(actual, expected, 1e-9 if self.dtype == torch.float64 else 1e-4)


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("fsdp2", 1), marks=pytest.mark.on_demand),
        ("fsdp2", 2),
        pytest.param(("zero2", 2), marks=[*ZERO, pytest.mark.on_demand]),
        pytest.param(("zero3", 2), marks=ZERO),
    ],
    ids=lambda param: "-".join(map(str, param)),
)
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> RankResults:
    strategy, world = request.param
    folder = tmp_path_factory.mktemp(f"{strategy}_{world}")
    with double_precision():
        run_single(3, DTYPES[strategy]).save(folder / "single")
    port = free_address()[1]
    arguments = [(ranks.RankContext(strategy, rank, world, folder), port) for rank in range(world)]
    run_ranks(ranks.main, arguments, folder, DEADLINE_S)
    values = json.loads((folder / "results.json").read_text())
    return RankResults(strategy, world, folder, values, load_file(folder / "gradients.safetensors"))


def compute_loss(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> Tensor:
    return ((logprobs + 0.1 * entropy) * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()


def run_single(updates: int, dtype: torch.dtype, start: int = 0, load: Path | None = None) -> SingleStrategy:
    """Make the same updates as ranks.py, in one process and in one micro-batch."""
    strategy = SingleStrategy(optimizer_config=LINEAR, compute_dtype=dtype)
    model: Any = strategy.prepare(LogprobModel(tiny_model("llama", dtype=dtype, seed=1 if load else 0)), 20)
    if load:
        strategy.load(load)
    for seed in range(start, start + updates):
        batch = ragged_batch((5, 8, 6), seed=seed)
        scores = model(model.lay_out(batch), True)
        strategy.backward(compute_loss(scores.logprobs, scores.entropy, batch), is_last_micro_batch=True)
        strategy.step()
    return strategy


def padded_gradients(kind: str, case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    batch = make_batch().select([2]) if case == "fewer_rows_than_ranks" else make_batch()
    model: Any = tiny_model(kind, dtype=dtype)
    model.set_attn_implementation("sdpa")
    if case == "adapters":
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=names))
        fill_adapters(model)
    logprobs, entropy = padded_scores(model, batch)
    compute_loss(logprobs, entropy, batch).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def critic_gradients(dtype: torch.dtype) -> dict[str, Tensor]:
    """Return gradients of a padded batch through the body, with a head of ones."""
    batch = make_batch()
    model = tiny_model(dtype=dtype)
    weight = torch.ones(1, model.config.hidden_size, dtype=dtype, requires_grad=True)
    values = padded_values(model, weight, batch)
    (values * torch.sin(batch.input_ids.double() + batch.position_ids)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**gradients, "value_head.weight": weight.grad}  # type: ignore[dict-item]


def test_summed_gradients_equal_padded_ones(results: RankResults) -> None:
    for kind in KINDS[results.strategy]:
        cases = {key.split("/")[1] for key in results.gradients if key.startswith(f"{kind}/")}
        assert ({"micro_1", "micro_2", "micro_5", "all", "shuffled"} if kind == "qwen2" else {"micro_2"}) <= cases
        for case in cases:
            prefix = f"{kind}/{case}/"
            actual = {key.removeprefix(prefix): g for key, g in results.gradients.items() if key.startswith(prefix)}
            results.assert_same_gradients(actual, padded_gradients(kind, case, results.dtype))


def test_summed_critic_gradient_equals_one_process(results: RankResults) -> None:
    expected = critic_gradients(results.dtype)
    results.assert_same_gradients(load_file(results.folder / "critic.safetensors"), expected)
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert results.values["critic"]["norm"] == pytest.approx(float(norm), rel=1e-5)


def test_critic_resumes_bitwise(results: RankResults) -> None:
    assert results.values["critic"]["resumed"]


def test_resumed_run_continues_bitwise(results: RankResults) -> None:
    assert results.values["checkpoints"]["bitwise"]


def test_every_rank_writes_separate_files(results: RankResults) -> None:
    kinds = ("json", "safetensors")
    assert results.values["checkpoints"]["files"] == [f"shard_{r}.{k}" for r in range(results.world) for k in kinds]


def test_checkpoint_of_one_process_resumes_on_ranks(results: RankResults) -> None:
    assert results.values["checkpoints"]["lr_from_single"] == pytest.approx(1e-2 * 17 / 18)
    actual = load_file(results.folder / "from_single.safetensors")
    for name, expected in run_single(4, results.dtype).full_parameters():
        torch.testing.assert_close(actual[name], expected, rtol=0, atol=weight_tolerance(results), msg=name)


def test_checkpoint_of_ranks_resumes_in_one_process(results: RankResults) -> None:
    resumed = run_single(1, results.dtype, start=3, load=results.folder / "sharded").full_parameters()
    for (name, actual), (_, expected) in zip(resumed, run_single(4, results.dtype).full_parameters(), strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=weight_tolerance(results), msg=name)


def weight_tolerance(results: RankResults) -> float:
    """Return the tolerance of weights after four updates that change each of them by up to 0.01."""
    return 1e-8 if results.dtype == torch.float64 else 2e-4


def test_checkpoints_are_bitwise_equal_across_rank_counts(results: RankResults) -> None:
    """One process reads the same weights from the shards of the ranks, and from its own copy of them."""
    full_weights = load_file(results.folder / "whole.safetensors")
    single = run_single(0, results.dtype, load=results.folder / "sharded")
    single.save(results.folder / "again")
    for strategy in (single, run_single(0, results.dtype, load=results.folder / "again")):
        for name, tensor in strategy.full_parameters():
            assert torch.equal(tensor, full_weights[name]), name


def test_missing_state_does_not_affect_other_parameters(results: RankResults) -> None:
    steps = list(results.values["incomplete"]["steps"].values())
    # DeepSpeed has one number of steps for all parameters of a flat tensor: the largest.
    assert steps == ([3.0, 1.0] if results.strategy == "fsdp2" else [3.0, 3.0])
    assert results.values["incomplete"]["moments"]


@pytest.mark.defect("sync-gathers-model-twice")
def test_sync_gathers_once_and_sends_all(results: RankResults) -> None:
    """Shards may end within a word of the fingerprint. Ranks of stage 2 hold full models in float32."""
    for rank in results.values["syncs"]["ranks"]:
        for name, wires in rank.items():
            for wire, sync in wires.items() if name != "non_finite" else ():
                assert (sync["announced"], sync["sent"], sync["changes"]) == (True, True, True), (name, wire)
                if name == "merged":  # each pass gathers A and B, so that a rank can merge its shard
                    assert sync["gathered"] < 2
                elif results.world == 1 or name == "replicas" or results.strategy == "zero2":
                    assert sync["gathered"] == 0, (name, wire)
                else:
                    assert sync["gathered"] == pytest.approx(1.0, abs=0.01), (name, wire)


def test_merged_adapters_equal_one_process(results: RankResults) -> None:
    model = tiny_model("qwen2")
    adapters = LoraAdapters(model, ranks.LORA, "trainer.policy.model.lora")
    fill_adapters(model)
    strategy = SingleStrategy(optimizer_config=LINEAR)
    strategy.prepare(LogprobModel(model), 20)
    merged = load_file(results.folder / "merged.safetensors")
    for name, tensor in adapters.iter_merged(strategy.sharded_parameters()):
        assert torch.allclose(merged.pop(name), tensor.full_tensor(), atol=1e-6), name
    assert not merged


@pytest.mark.fault("F30")
def test_nonfinite_weight_is_reported_by_all_ranks(results: RankResults) -> None:
    for rank in results.values["syncs"]["ranks"]:
        assert rank["non_finite"] == [results.values["syncs"]["first"]]


def test_corrupt_checkpoint_is_rejected(results: RankResults) -> None:
    corrupt = results.folder / f"corrupt_{results.world}"
    corrupt.mkdir()
    for path in (results.folder / "sharded").iterdir():
        (corrupt / path.name).write_bytes(path.read_bytes())
    last = corrupt / f"shard_{results.world - 1}.safetensors"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=f"{last.name} is missing or corrupt"):
        run_single(0, results.dtype, load=corrupt)


def test_only_adapters_are_trained_and_saved(results: RankResults) -> None:
    adapters = results.values["adapters"]
    assert adapters["bitwise"]
    assert adapters["frozen"]
    assert len(adapters["saved"]) == 2 * 7 * 2
    assert all(".lora_" in name for name in adapters["saved"])


def test_adapters_of_bfloat16_model_have_float32_gradients(results: RankResults) -> None:
    assert results.values["adapters"]["half"] == {"gradients": ["torch.float32"], "skipped": 0.0}


@pytest.mark.fault("F32")
def test_nonfinite_gradient_on_one_rank_skips_all(results: RankResults) -> None:
    assert results.values["skips"] == SKIPPED


def test_bfloat16_compute_keeps_float32_weights_and_gradients(results: RankResults) -> None:
    mixed = results.values["mixed"]
    assert mixed["products"] == ["torch.bfloat16"]
    assert mixed["scores"] == "torch.float32"
    assert mixed["gradients"] == ["torch.float32"]
    if results.world > 1:
        assert mixed["rounded"] == []
    assert mixed["weights"] == ["torch.float32"]
    assert mixed["skipped"] == 0
    assert mixed["resumed"]


def test_frozen_model_is_exact_and_sharded(results: RankResults) -> None:
    frozen = results.values["frozen"]
    assert frozen["error"] < 1e-5
    assert frozen["names"] == [name for name, _ in tiny_model().named_parameters()]
    assert frozen["exact"]
    assert frozen["loaded"]
    share = 1.0 if results.strategy == "zero2" else 1 / results.world
    assert math.isclose(frozen["share"], share, rel_tol=0.01)


def test_fsdp2_replicas_train_like_shards(results: RankResults) -> None:
    if results.strategy != "fsdp2":
        pytest.skip("fsdp_size is FSDP2's")
    replicas = results.values["replicas"]
    assert replicas["norms"][0] == pytest.approx(replicas["norms"][1], rel=1e-9)
    assert replicas["gap"] < 1e-9
    assert replicas["resumed"]
    assert replicas["skips"] == SKIPPED


def test_deepspeed_offloads_and_trains_from_host_memory(results: RankResults) -> None:
    if results.strategy == "fsdp2":
        pytest.skip("FSDP2 moves like any module")
    moves = results.values["moves"]
    for case in ("whole", "adapters", "bfloat16"):
        assert moves[case] == {"moved": True, "away": True, "back": True}, case
    assert moves["frozen"] == {"moved": True, "back": True}
    assert moves["skips"] == moves["half_skips"] == SKIPPED


def test_deepspeed_releases_replaced_models(results: RankResults) -> None:
    if results.strategy == "fsdp2":
        pytest.skip("FSDP2 keeps no global list of modules")
    assert results.values["released"]


def test_deepspeed_adds_no_process_group_without_deadline(results: RankResults) -> None:
    if results.strategy == "fsdp2":
        pytest.skip("FSDP2 makes a mesh")
    assert results.values["new_groups"] == 0


def test_indivisible_fsdp_size_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"fsdp_config\.fsdp_size=3 does not divide the 4 ranks"):
        FSDP2Strategy(optimizer_config=None, fsdp_config=FSDPConfig(fsdp_size=3), device="cpu", rank=0, world_size=4)


def test_missing_deepspeed_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError, match=r"skyrl-train\[deepspeed\]"):
        DeepSpeedStrategy(optimizer_config=None, deepspeed_config=DeepSpeedConfig(), device="cpu", rank=0, world_size=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_rendezvous_ends_by_its_deadline(rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="rendezvous of 2 ranks"):
        init_process_group(rank, 2, "127.0.0.1", free_address()[1], "gloo", 1.0)
    assert time.monotonic() - started < 60
