"""FSDP2 on one and two gloo ranks against one process. Each number of ranks is started once and checked many times."""

from __future__ import annotations

import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError, DeadlineExceeded
from skyrl_train.models.token_scorer import TokenScorer
from skyrl_train.strategies.fsdp2 import FSDP2Strategy
from skyrl_train.strategies.process_group import init_process_group
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.double_precision import double_precision
from skyrl_train.testing.padded_reference import padded_scores, padded_values, ragged_batch
from skyrl_train.testing.tiny_models import tiny_model

RANKS_SCRIPT = Path(__file__).with_name("fsdp2_ranks.py")
KINDS = ("qwen2", "qwen3", "llama", "gemma", "mistral")
DEADLINE_S = 120.0


@dataclass
class Found:
    world: int
    folder: Path
    values: dict[str, Any]
    gradients: dict[str, Tensor]


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


@pytest.fixture(scope="module", params=[1, 2])
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    world: int = request.param
    folder = tmp_path_factory.mktemp(f"fsdp2_{world}")
    with double_precision():
        run_single(3).save(folder / "single")
    port = free_port()
    ranks = [
        subprocess.Popen(
            [sys.executable, str(RANKS_SCRIPT), str(rank), str(world), str(port), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    deadline = time.monotonic() + DEADLINE_S
    try:
        said = [rank.communicate(timeout=max(1.0, deadline - time.monotonic()))[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert [rank.returncode for rank in ranks] == [0] * world, "\n".join(said)[-4000:]
    values = json.loads((folder / "found.json").read_text())
    return Found(world, folder, values, load_file(folder / "gradients.safetensors"))


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def loss_of(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> Tensor:
    return ((logprobs + 0.1 * entropy) * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()


def run_single(updates: int, start: int = 0, load: Path | None = None) -> SingleStrategy:
    """The same updates as fsdp2_ranks.py makes, in one process and in one micro-batch."""
    settings = OptimizerConfig(lr=1e-2, scheduler="linear", num_warmup_steps=2)
    strategy = SingleStrategy(optimizer=settings, compute_dtype=torch.float64)
    scorer = strategy.prepare(TokenScorer(tiny_model(dtype=torch.float64, seed=1 if load else 0)), 20)
    if load:
        strategy.load(load)
    for seed in range(start, start + updates):
        batch = ragged_batch((5, 8, 6), seed=seed)
        scores = scorer(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask, True)
        strategy.backward(loss_of(scores.logprobs, scores.entropy, batch), last=True)
        strategy.step()
    return strategy


def padded_gradients(kind: str, rows: list[int]) -> dict[str, Tensor]:
    batch = ragged_batch((9, 4, 12, 9, 2, 7, 9), temperatures=(1.0, 0.7, 1.0, 1.3, 1.0, 0.5, 2.0)).select(rows)
    model = tiny_model(kind, dtype=torch.float64)
    model.set_attn_implementation("sdpa")
    logprobs, entropy = padded_scores(model, batch)
    loss_of(logprobs, entropy, batch).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def critic_gradients() -> dict[str, Tensor]:
    """Of a padded batch through the body, with a head of ones."""
    batch = ragged_batch((9, 4, 12, 9, 2, 7, 9), temperatures=(1.0, 0.7, 1.0, 1.3, 1.0, 0.5, 2.0))
    model = tiny_model(dtype=torch.float64)
    weight = torch.ones(1, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
    values = padded_values(model, weight, batch)
    (values * torch.sin(batch.input_ids.double() + batch.position_ids)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {**gradients, "value_head.weight": weight.grad}  # type: ignore[dict-item]


@pytest.mark.parametrize("kind", KINDS)
def test_the_summed_gradient_is_the_padded_one_for_every_micro_batch_size_order_and_layout(
    found: Found, kind: str
) -> None:
    cases = {key.split("/")[1] for key in found.gradients if key.startswith(f"{kind}/")}
    assert {"micro_1", "micro_2", "micro_5", "all", "shuffled"} <= cases
    for case in cases:
        wanted = padded_gradients(kind, [2] if case == "one_row_too_few" else list(range(7)))
        whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
        for name, gradient in wanted.items():
            error = float((found.gradients[f"{kind}/{case}/{name}"] - gradient).norm())
            assert error <= 1e-9 * max(float(gradient.norm()), 1e-3 * float(whole)), (case, name, error)


def test_the_summed_gradient_of_a_critic_is_that_of_one_process(found: Found) -> None:
    wanted = critic_gradients()
    got = load_file(found.folder / "critic.safetensors")
    whole = torch.stack([gradient.norm() for gradient in wanted.values()]).norm()
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        error = float((got[name] - gradient).norm())
        assert error <= 1e-9 * max(float(gradient.norm()), 1e-3 * float(whole)), (name, error)


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
    for name, wanted in run_single(4).full_parameters():
        torch.testing.assert_close(got[name], wanted, rtol=0, atol=1e-8, msg=name)


def test_a_checkpoint_of_the_ranks_continues_in_one_process(found: Found) -> None:
    resumed = run_single(1, start=3, load=found.folder / "sharded")
    for (name, got), (_, wanted) in zip(resumed.full_parameters(), run_single(4).full_parameters(), strict=True):
        torch.testing.assert_close(got, wanted, rtol=0, atol=1e-8, msg=name)


def test_weights_move_between_numbers_of_ranks_bit_for_bit(found: Found) -> None:
    """What one process reads from the ranks' shards, another one reads from its copy of them."""
    first = run_single(0, load=found.folder / "sharded")
    first.save(found.folder / "again")
    second = run_single(0, load=found.folder / "again")
    for (name, one), (_, other) in zip(first.full_parameters(), second.full_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.fault("F32")
def test_a_gradient_that_is_not_finite_on_one_rank_makes_all_ranks_skip(found: Found) -> None:
    assert found.values["skips"] == {"skipped": 1.0, "unchanged": True, "next": 0.0}


def test_compute_in_bfloat16_keeps_gradients_in_float32(found: Found) -> None:
    mixed = found.values["mixed"]
    assert mixed["products"] == ["torch.bfloat16"]
    assert mixed["scores"] == "torch.float32"
    assert mixed["gradients"] == ["torch.float32"]


def test_a_frozen_model_is_sharded_scored_and_listed_whole(found: Found) -> None:
    frozen = found.values["frozen"]
    assert frozen["error"] < 1e-5
    assert frozen["names"] == [name for name, _ in tiny_model().named_parameters()]
    assert frozen["exact"]
    assert math.isclose(frozen["share"], 1 / found.world, rel_tol=0.01)


def test_a_size_that_does_not_divide_the_ranks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"fsdp_config\.fsdp_size=3 does not divide the 4 ranks"):
        FSDP2Strategy(optimizer=None, fsdp=FSDPConfig(fsdp_size=3), device="cpu", rank=0, world_size=4)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_nobody_joins_gives_up_by_its_deadline(rank: int) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="meeting of 2 ranks"):
        init_process_group(rank, 2, "127.0.0.1", free_port(), "gloo", 1.0)
    assert time.monotonic() - started < 20
