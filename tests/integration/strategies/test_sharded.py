"""FSDP2 and DeepSpeed on one and two gloo ranks against one process. Ranks are started once and checked many times."""

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
class Found:
    strategy: str
    world: int
    folder: Path
    values: dict[str, Any]
    gradients: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.strategy]

    def assert_same_gradients(self, got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
        assert_same_tensors(got, wanted, 1e-9 if self.dtype == torch.float64 else 1e-4)


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
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    strategy, world = request.param
    folder = tmp_path_factory.mktemp(f"{strategy}_{world}")
    with double_precision():
        run_single(3, DTYPES[strategy]).save(folder / "single")
    port = free_address()[1]
    arguments = [(ranks.Ranks(strategy, rank, world, folder), port) for rank in range(world)]
    run_ranks(ranks.main, arguments, folder, DEADLINE_S)
    values = json.loads((folder / "found.json").read_text())
    return Found(strategy, world, folder, values, load_file(folder / "gradients.safetensors"))


def loss_of(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> Tensor:
    return ((logprobs + 0.1 * entropy) * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()


def run_single(updates: int, dtype: torch.dtype, start: int = 0, load: Path | None = None) -> SingleStrategy:
    """The same updates as ranks.py makes, in one process and in one micro-batch."""
    strategy = SingleStrategy(optimizer_config=LINEAR, compute_dtype=dtype)
    model = strategy.prepare(LogprobModel(tiny_model("llama", dtype=dtype, seed=1 if load else 0)), 20)
    if load:
        strategy.load(load)
    for seed in range(start, start + updates):
        batch = ragged_batch((5, 8, 6), seed=seed)
        scores = model(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask, True)
        strategy.backward(loss_of(scores.logprobs, scores.entropy, batch), is_last_micro_batch=True)
        strategy.step()
    return strategy


def padded_gradients(kind: str, case: str, dtype: torch.dtype) -> dict[str, Tensor]:
    batch = make_batch().select([2]) if case == "one_row_too_few" else make_batch()
    model: Any = tiny_model(kind, dtype=dtype)
    model.set_attn_implementation("sdpa")
    if case == "adapters":
        names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=names))
        fill_adapters(model)
    logprobs, entropy = padded_scores(model, batch)
    loss_of(logprobs, entropy, batch).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def critic_gradients(dtype: torch.dtype) -> dict[str, Tensor]:
    """Of a padded batch through the body, with a head of ones."""
    batch = make_batch()
    model = tiny_model(dtype=dtype)
    weight = torch.ones(1, model.config.hidden_size, dtype=dtype, requires_grad=True)
    values = padded_values(model, weight, batch)
    (values * torch.sin(batch.input_ids.double() + batch.position_ids)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**gradients, "value_head.weight": weight.grad}  # type: ignore[dict-item]


def test_the_summed_gradient_is_the_padded_one_for_every_micro_batch_size_order_and_layout(found: Found) -> None:
    for kind in KINDS[found.strategy]:
        cases = {key.split("/")[1] for key in found.gradients if key.startswith(f"{kind}/")}
        assert {"micro_1", "micro_2", "micro_5", "all", "shuffled"} <= cases
        for case in cases:
            prefix = f"{kind}/{case}/"
            got = {key.removeprefix(prefix): g for key, g in found.gradients.items() if key.startswith(prefix)}
            found.assert_same_gradients(got, padded_gradients(kind, case, found.dtype))


def test_the_summed_gradient_of_a_critic_is_that_of_one_process(found: Found) -> None:
    wanted = critic_gradients(found.dtype)
    found.assert_same_gradients(load_file(found.folder / "critic.safetensors"), wanted)
    norm = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    assert found.values["critic"]["norm"] == pytest.approx(float(norm), rel=1e-5)


def test_a_critic_continues_bit_for_bit_although_its_head_lies_on_one_rank(found: Found) -> None:
    assert found.values["critic"]["resumed"]


def test_a_resumed_run_continues_bit_for_bit(found: Found) -> None:
    assert found.values["checkpoints"]["bitwise"]


def test_every_rank_writes_its_own_files(found: Found) -> None:
    kinds = ("json", "safetensors")
    assert found.values["checkpoints"]["files"] == [f"shard_{r}.{k}" for r in range(found.world) for k in kinds]


def test_a_checkpoint_of_one_process_continues_on_the_ranks(found: Found) -> None:
    assert found.values["checkpoints"]["lr_from_single"] == pytest.approx(1e-2 * 17 / 18)
    got = load_file(found.folder / "from_single.safetensors")
    for name, wanted in run_single(4, found.dtype).full_parameters():
        torch.testing.assert_close(got[name], wanted, rtol=0, atol=tolerance(found), msg=name)


def test_a_checkpoint_of_the_ranks_continues_in_one_process(found: Found) -> None:
    resumed = run_single(1, found.dtype, start=3, load=found.folder / "sharded").full_parameters()
    for (name, got), (_, wanted) in zip(resumed, run_single(4, found.dtype).full_parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=tolerance(found), msg=name)


def tolerance(found: Found) -> float:
    """Of weights after four updates that move each of them by up to 0.01."""
    return 1e-8 if found.dtype == torch.float64 else 2e-4


def test_weights_move_between_numbers_of_ranks_bit_for_bit(found: Found) -> None:
    """All shards of the ranks are what one process reads from their shards, and from its own copy of them."""
    held = load_file(found.folder / "whole.safetensors")
    alone = run_single(0, found.dtype, load=found.folder / "sharded")
    alone.save(found.folder / "again")
    for strategy in (alone, run_single(0, found.dtype, load=found.folder / "again")):
        for name, tensor in strategy.full_parameters():
            assert torch.equal(tensor, held[name]), name


def test_a_parameter_without_state_in_a_checkpoint_leaves_the_others_theirs(found: Found) -> None:
    steps = list(found.values["incomplete"]["steps"].values())
    # DeepSpeed has one number of steps for all parameters that lie in one flat tensor: the greatest.
    assert steps == ([3.0, 1.0] if found.strategy == "fsdp2" else [3.0, 3.0])
    assert found.values["incomplete"]["moments"]


@pytest.mark.defect("syncs-gather-twice")
def test_a_sync_announces_and_sends_what_the_ranks_have_and_gathers_it_once(found: Found) -> None:
    """Also where a rank's part ends within a word of the fingerprint; ranks of stage 2 have whole models in float32."""
    for rank in found.values["syncs"]["ranks"]:
        for name, wires in rank.items():
            for wire, sync in wires.items() if name != "non_finite" else ():
                assert (sync["announced"], sync["sent"]) == (True, True), (name, wire)
                if name == "merged":  # A and B are gathered by each look, so that a rank can merge its part
                    assert sync["gathered"] < 2
                elif found.world == 1 or name == "replicas" or found.strategy == "zero2":
                    assert sync["gathered"] == 0, (name, wire)
                else:
                    assert sync["gathered"] == pytest.approx(1.0, abs=0.01), (name, wire)


def test_merged_adapters_are_those_of_one_process(found: Found) -> None:
    model = tiny_model("qwen2")
    adapters = LoraAdapters(model, ranks.LORA, "trainer.policy.model.lora")
    fill_adapters(model)
    alone = SingleStrategy(optimizer_config=LINEAR)
    alone.prepare(LogprobModel(model), 20)
    merged = load_file(found.folder / "merged.safetensors")
    for name, tensor in adapters.iter_merged(alone.sharded_parameters()):
        assert torch.allclose(merged.pop(name), tensor.full_tensor(), atol=1e-6), name
    assert not merged


@pytest.mark.fault("F30")
def test_a_number_that_is_not_finite_on_one_rank_is_in_the_manifest_of_all(found: Found) -> None:
    for rank in found.values["syncs"]["ranks"]:
        assert rank["non_finite"] == [found.values["syncs"]["first"]]


def test_a_torn_checkpoint_of_the_ranks_is_refused(found: Found) -> None:
    torn = found.folder / f"torn_{found.world}"
    torn.mkdir()
    for path in (found.folder / "sharded").iterdir():
        (torn / path.name).write_bytes(path.read_bytes())
    last = torn / f"shard_{found.world - 1}.safetensors"
    last.write_bytes(last.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=f"{last.name} is missing or corrupt"):
        run_single(0, found.dtype, load=torn)


def test_adapters_continue_bit_for_bit_and_nothing_else_is_changed_or_saved(found: Found) -> None:
    adapters = found.values["adapters"]
    assert adapters["bitwise"]
    assert adapters["frozen"]
    assert len(adapters["saved"]) == 2 * 7 * 2
    assert all(".lora_" in name for name in adapters["saved"])


def test_adapters_on_a_model_in_bfloat16_have_gradients_in_float32(found: Found) -> None:
    assert found.values["adapters"]["half"] == {"gradients": ["torch.float32"], "skipped": 0.0}


@pytest.mark.fault("F32")
def test_a_gradient_that_is_not_finite_on_one_rank_makes_all_ranks_skip(found: Found) -> None:
    assert found.values["skips"] == SKIPPED


def test_compute_in_bfloat16_keeps_weights_and_gradients_in_float32(found: Found) -> None:
    mixed = found.values["mixed"]
    assert mixed["products"] == ["torch.bfloat16"]
    assert mixed["scores"] == "torch.float32"
    assert mixed["gradients"] == ["torch.float32"]
    if found.world > 1:
        assert mixed["rounded"] == []
    assert mixed["weights"] == ["torch.float32"]
    assert mixed["skipped"] == 0
    assert mixed["resumed"]


def test_a_frozen_model_is_scored_listed_whole_and_sharded_unless_zero_keeps_parameters_whole(found: Found) -> None:
    frozen = found.values["frozen"]
    assert frozen["error"] < 1e-5
    assert frozen["names"] == [name for name, _ in tiny_model().named_parameters()]
    assert frozen["exact"]
    assert frozen["loaded"]
    share = 1.0 if found.strategy == "zero2" else 1 / found.world
    assert math.isclose(frozen["share"], share, rel_tol=0.01)


def test_replicas_of_fsdp2_step_skip_and_continue_as_shards_do(found: Found) -> None:
    if found.strategy != "fsdp2":
        pytest.skip("fsdp_size is FSDP2's")
    replicas = found.values["replicas"]
    assert replicas["norms"][0] == pytest.approx(replicas["norms"][1], rel=1e-9)
    assert replicas["gap"] < 1e-9
    assert replicas["resumed"]
    assert replicas["skips"] == SKIPPED


def test_deepspeed_leaves_the_device_comes_back_and_trains_from_host_memory(found: Found) -> None:
    if found.strategy == "fsdp2":
        pytest.skip("FSDP2 moves as a module does")
    moves = found.values["moves"]
    for case in ("whole", "adapters", "bfloat16"):
        assert moves[case] == {"moved": True, "away": True, "back": True}, case
    assert moves["frozen"] == {"moved": True, "back": True}
    assert moves["skips"] == moves["half_skips"] == SKIPPED


def test_deepspeed_releases_replaced_models(found: Found) -> None:
    if found.strategy == "fsdp2":
        pytest.skip("modules of FSDP2 are in no global list")
    assert found.values["released"]


def test_deepspeed_adds_no_process_group_without_deadline(found: Found) -> None:
    if found.strategy == "fsdp2":
        pytest.skip("FSDP2 makes a mesh")
    assert found.values["new_groups"] == 0


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fsdp_config\.fsdp_size=3 does not divide the 4 ranks"):
        FSDP2Strategy(optimizer_config=None, fsdp_config=FSDPConfig(fsdp_size=3), device="cpu", rank=0, world_size=4)


def test_without_deepspeed_its_strategy_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    with pytest.raises(ConfigError, match=r"skyrl-train\[deepspeed\]"):
        DeepSpeedStrategy(optimizer_config=None, deepspeed_config=DeepSpeedConfig(), device="cpu", rank=0, world_size=1)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_nobody_joins_gives_up_by_its_deadline(rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="rendezvous of 2 ranks"):
        init_process_group(rank, 2, "127.0.0.1", free_address()[1], "gloo", 1.0)
    assert time.monotonic() - started < 60
