from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.errors import CheckpointError, ConfigError, NonFiniteUpdate
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.padded_reference import ragged_batch


def make(total_steps: int | None = 10, seed: int = 0, kind: str = "qwen2", **settings: Any) -> SingleStrategy:
    strategy = SingleStrategy(optimizer_config=OptimizerConfig(**{"lr": 1e-2, **settings}), fsdp_config=FSDPConfig())
    strategy.prepare(LogprobModel(tiny_model(kind, seed=seed)), total_steps)
    return strategy


def logprobs_of(strategy: SingleStrategy, seed: int) -> Tensor:
    batch = ragged_batch([5, 8, 6], seed=seed)
    scores = strategy.module(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    logprobs: Tensor = scores.logprobs
    return logprobs


def update(strategy: SingleStrategy, seed: int = 0, factor: float = 1.0) -> dict[str, float]:
    strategy.backward(-logprobs_of(strategy, seed).sum() * factor, is_last_micro_batch=True)
    return strategy.step()


def weights(strategy: SingleStrategy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in strategy.full_parameters()}


def assert_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_a_step_is_adamw_on_the_clipped_gradient() -> None:
    kind = "llama"  # without key biases: their true gradient is 0, and Adam blows their rounding errors up
    strategy = make(kind=kind, max_grad_norm=0.5, weight_decay=0.1, adam_betas=[0.8, 0.95])
    twin = LogprobModel(tiny_model(kind))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    for seed in range(3):
        got = update(strategy, seed)
        batch = ragged_batch([5, 8, 6], seed=seed)
        scores = twin(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
        (-scores.logprobs.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert got["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert got["grad_norm"] > 0.5
        assert got["skipped"] == 0
    for (name, wanted), got_tensor in zip(twin.model.named_parameters(), weights(strategy).values(), strict=True):
        torch.testing.assert_close(got_tensor, wanted.detach(), msg=name)


def test_micro_batches_add_up_and_a_step_forgets_them() -> None:
    strategy = make(max_grad_norm=0)
    for _ in range(2):
        strategy.backward(-logprobs_of(strategy, 0).sum(), is_last_micro_batch=False)
    twice = strategy.step()["grad_norm"]
    assert twice == pytest.approx(2 * update(make(max_grad_norm=0))["grad_norm"], rel=1e-5)
    assert strategy.step()["grad_norm"] == 0


def test_max_grad_norm_zero_does_not_clip() -> None:
    before = [update(make(max_grad_norm=0), factor=factor) for factor in (1.0, 1e3)]
    assert before[1]["grad_norm"] == pytest.approx(1e3 * before[0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("constant_with_warmup", [0.0, 0.5, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.5]),
        ("cosine", [0.0, 0.5, 1.0, 0.5]),
    ],
)
def test_schedules_warm_up_and_decay_over_the_run(scheduler: str, expected: list[float]) -> None:
    strategy = make(total_steps=4, num_warmup_steps=2, scheduler=scheduler)
    assert [update(strategy)["lr"] for _ in range(4)] == pytest.approx([1e-2 * factor for factor in expected])


def test_an_unknown_schedule_is_refused_by_key() -> None:
    with pytest.raises(ConfigError, match=r"optimizer_config\.scheduler='reduce_lr_on_plateau'"):
        make(scheduler="reduce_lr_on_plateau")


@pytest.mark.fault("F32")
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_changes_nothing(factor: float) -> None:
    strategy, untouched = make(), make()
    for one in (strategy, untouched):
        update(one)
    before = weights(strategy)
    assert update(strategy, factor=factor)["skipped"] == 1
    assert_equal(weights(strategy), before)
    update(strategy, seed=1)
    update(untouched, seed=1)
    assert_equal(weights(strategy), weights(untouched))  # moments were not touched either


def test_a_resumed_run_continues_bit_for_bit(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"scheduler": "linear", "num_warmup_steps": 2}
    straight = make(**settings)
    for seed in range(3):
        update(straight, seed)
    straight.save(tmp_path)
    resumed = make(seed=1, **settings)
    update(resumed)  # its moments must be replaced too
    resumed.load(tmp_path)
    assert_equal(weights(resumed), weights(straight))
    for seed in range(3, 6):
        assert update(resumed, seed) == update(straight, seed)
    assert_equal(weights(resumed), weights(straight))


def test_a_checkpoint_before_the_first_step_has_no_moments_and_loads(tmp_path: Path) -> None:
    make().save(tmp_path)
    resumed = make(seed=1)
    update(resumed)
    resumed.load(tmp_path)
    fresh = make()
    assert update(resumed) == update(fresh)
    assert_equal(weights(resumed), weights(fresh))


def test_a_frozen_model_has_no_gradient_and_no_optimizer(tmp_path: Path) -> None:
    strategy = SingleStrategy(optimizer_config=None)
    strategy.prepare(LogprobModel(tiny_model()), None)
    assert not logprobs_of(strategy, 0).requires_grad
    strategy.save(tmp_path)
    strategy.load(tmp_path)
    with pytest.raises(CheckpointError, match="frozen"):
        make().load(tmp_path)


def test_tied_weights_are_listed_once_under_the_name_the_hub_uses() -> None:
    assert list(weights(make())) == [name for name, _ in tiny_model().named_parameters()]


def test_compute_in_bfloat16_keeps_parameters_and_gradients_in_float32() -> None:
    strategy = SingleStrategy(optimizer_config=OptimizerConfig(lr=1e-3), compute_dtype=torch.bfloat16)
    model: Any = strategy.prepare(LogprobModel(tiny_model()), 10)
    products: list[torch.dtype] = []
    model.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, output: products.append(output.dtype))
    strategy.backward(-logprobs_of(strategy, 0).sum(), is_last_micro_batch=True)
    assert products == [torch.bfloat16]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert strategy.step()["skipped"] == 0


def test_on_the_cpu_offload_moves_nothing() -> None:
    strategy = make()
    assert strategy.offload() == 0
    strategy.onload()
    assert update(strategy)["skipped"] == 0


def test_two_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"strategy='single' runs one rank, got 2.*fsdp2"):
        SingleStrategy(optimizer_config=None, world_size=2)


@pytest.mark.fault("F32")
def test_gradients_that_stay_not_finite_stop_the_run_also_one_that_was_resumed(tmp_path: Path):
    def poisoned_step(strategy: SingleStrategy) -> dict[str, float]:
        strategy.backward(logprobs_of(strategy, 0).sum() * math.nan, is_last_micro_batch=True)
        return strategy.step()

    first, resumed = make(total_steps=100), make(total_steps=100)
    assert [poisoned_step(first)["skipped"] for _ in range(4)] == [1.0] * 4
    first.save(tmp_path)
    resumed.load(tmp_path)
    for strategy in (first, resumed):
        with pytest.raises(NonFiniteUpdate, match="5 updates in a row"):
            poisoned_step(strategy)
