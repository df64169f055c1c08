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


def make_strategy(total_steps: int | None = 10, seed: int = 0, kind: str = "qwen2", **settings: Any) -> SingleStrategy:
    strategy = SingleStrategy(optimizer_config=OptimizerConfig(**{"lr": 1e-2, **settings}), fsdp_config=FSDPConfig())
    strategy.prepare(LogprobModel(tiny_model(kind, seed=seed)), total_steps)
    return strategy


def compute_logprobs(strategy: SingleStrategy, seed: int) -> Tensor:
    batch = ragged_batch([5, 8, 6], seed=seed)
    scores = strategy.module(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    logprobs: Tensor = scores.logprobs
    return logprobs


def update(strategy: SingleStrategy, seed: int = 0, factor: float = 1.0) -> dict[str, float]:
    strategy.backward(-compute_logprobs(strategy, seed).sum() * factor, is_last_micro_batch=True)
    return strategy.step()


def get_weights(strategy: SingleStrategy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in strategy.full_parameters()}


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


def test_step_is_adamw_on_the_clipped_gradient() -> None:
    kind = "llama"  # has no key biases: their true gradient is 0, and Adam would amplify the rounding errors
    strategy = make_strategy(kind=kind, max_grad_norm=0.5, weight_decay=0.1, adam_betas=[0.8, 0.95])
    twin = LogprobModel(tiny_model(kind))
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, betas=(0.8, 0.95), weight_decay=0.1)
    for seed in range(3):
        result = update(strategy, seed)
        batch = ragged_batch([5, 8, 6], seed=seed)
        scores = twin(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
        (-scores.logprobs.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert result["grad_norm"] > 0.5
        assert result["skipped"] == 0
    for (name, expected), actual in zip(twin.model.named_parameters(), get_weights(strategy).values(), strict=True):
        torch.testing.assert_close(actual, expected.detach(), msg=name)


def test_micro_batches_accumulate_until_the_step() -> None:
    strategy = make_strategy(max_grad_norm=0)
    for _ in range(2):
        strategy.backward(-compute_logprobs(strategy, 0).sum(), is_last_micro_batch=False)
    twice = strategy.step()["grad_norm"]
    assert twice == pytest.approx(2 * update(make_strategy(max_grad_norm=0))["grad_norm"], rel=1e-5)
    assert strategy.step()["grad_norm"] == 0


def test_max_grad_norm_zero_does_not_clip() -> None:
    results = [update(make_strategy(max_grad_norm=0), factor=factor) for factor in (1.0, 1e3)]
    assert results[1]["grad_norm"] == pytest.approx(1e3 * results[0]["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
    ("scheduler", "expected"),
    [
        ("constant", [1.0, 1.0, 1.0, 1.0]),
        ("constant_with_warmup", [0.0, 0.5, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.5]),
        ("cosine", [0.0, 0.5, 1.0, 0.5]),
    ],
)
def test_schedules_warm_up_and_decay(scheduler: str, expected: list[float]) -> None:
    strategy = make_strategy(total_steps=4, num_warmup_steps=2, scheduler=scheduler)
    assert [update(strategy)["lr"] for _ in range(4)] == pytest.approx([1e-2 * factor for factor in expected])


def test_unknown_schedule_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"optimizer_config\.scheduler='reduce_lr_on_plateau'"):
        make_strategy(scheduler="reduce_lr_on_plateau")


@pytest.mark.fault("F32")
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_nonfinite_gradient_changes_nothing(factor: float) -> None:
    strategy, untouched = make_strategy(), make_strategy()
    for updated in (strategy, untouched):
        update(updated)
    initial = get_weights(strategy)
    assert update(strategy, factor=factor)["skipped"] == 1
    assert_equal(get_weights(strategy), initial)
    update(strategy, seed=1)
    update(untouched, seed=1)
    assert_equal(get_weights(strategy), get_weights(untouched))  # moments were not touched either


def test_resumed_run_continues_bitwise(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"scheduler": "linear", "num_warmup_steps": 2}
    uninterrupted = make_strategy(**settings)
    for seed in range(3):
        update(uninterrupted, seed)
    uninterrupted.save(tmp_path)
    resumed = make_strategy(seed=1, **settings)
    update(resumed)  # loading must replace its moments, too
    resumed.load(tmp_path)
    assert_equal(get_weights(resumed), get_weights(uninterrupted))
    for seed in range(3, 6):
        assert update(resumed, seed) == update(uninterrupted, seed)
    assert_equal(get_weights(resumed), get_weights(uninterrupted))


def test_checkpoint_before_the_first_step_loads(tmp_path: Path) -> None:
    make_strategy().save(tmp_path)
    resumed = make_strategy(seed=1)
    update(resumed)
    resumed.load(tmp_path)
    fresh = make_strategy()
    assert update(resumed) == update(fresh)
    assert_equal(get_weights(resumed), get_weights(fresh))


def test_frozen_model_has_no_optimizer(tmp_path: Path) -> None:
    strategy = SingleStrategy(optimizer_config=None)
    strategy.prepare(LogprobModel(tiny_model()), None)
    assert not compute_logprobs(strategy, 0).requires_grad
    strategy.save(tmp_path)
    strategy.load(tmp_path)
    with pytest.raises(CheckpointError, match="frozen"):
        make_strategy().load(tmp_path)


def test_tied_weights_are_listed_once() -> None:
    assert list(get_weights(make_strategy())) == [name for name, _ in tiny_model().named_parameters()]


def test_bfloat16_compute_keeps_float32_parameters() -> None:
    strategy = SingleStrategy(optimizer_config=OptimizerConfig(lr=1e-3), compute_dtype=torch.bfloat16)
    model: Any = strategy.prepare(LogprobModel(tiny_model()), 10)
    products: list[torch.dtype] = []
    model.model.model.layers[0].mlp.up_proj.register_forward_hook(lambda m, i, output: products.append(output.dtype))
    strategy.backward(-compute_logprobs(strategy, 0).sum(), is_last_micro_batch=True)
    assert products == [torch.bfloat16]
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert strategy.step()["skipped"] == 0


def test_cpu_offload_does_nothing_on_cpus() -> None:
    strategy = make_strategy()
    assert strategy.offload() == 0
    strategy.onload()
    assert update(strategy)["skipped"] == 0


def test_two_ranks_are_rejected() -> None:
    with pytest.raises(ConfigError, match=r"strategy='single' runs one rank, got 2.*fsdp2"):
        SingleStrategy(optimizer_config=None, world_size=2)


@pytest.mark.fault("F32")
def test_repeated_nonfinite_gradients_stop_the_run(tmp_path: Path):
    def poisoned_step(strategy: SingleStrategy) -> dict[str, float]:
        strategy.backward(compute_logprobs(strategy, 0).sum() * math.nan, is_last_micro_batch=True)
        return strategy.step()

    first, resumed = make_strategy(total_steps=100), make_strategy(total_steps=100)
    assert [poisoned_step(first)["skipped"] for _ in range(4)] == [1.0] * 4
    first.save(tmp_path)
    resumed.load(tmp_path)
    for strategy in (first, resumed):
        with pytest.raises(NonFiniteUpdate, match="5 consecutive updates"):
            poisoned_step(strategy)
