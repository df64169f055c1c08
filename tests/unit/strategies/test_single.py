from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.errors import CheckpointError, CheckpointMismatch, ConfigError, NonFiniteUpdate
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.strategies.optimizers import ParameterKind, classify_parameters
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.padded_reference import ragged_batch

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
EACH_OPTIMIZER = pytest.mark.parametrize(
    "optimizer", ["adamw", "muon", pytest.param("adamw_8bit", marks=needs_bitsandbytes)]
)


def make_strategy(total_steps: int | None = 10, seed: int = 0, kind: str = "qwen2", **settings: Any) -> SingleStrategy:
    strategy = SingleStrategy(optimizer_config=OptimizerConfig(**{"lr": 1e-2, **settings}), fsdp_config=FSDPConfig())
    strategy.prepare(LogprobModel(tiny_model(kind, seed=seed)), total_steps)
    return strategy


def compute_logprobs(strategy: SingleStrategy, seed: int) -> Tensor:
    batch = ragged_batch([5, 8, 6], seed=seed)
    model: Any = strategy.module
    logprobs: Tensor = model(model.lay_out(batch)).logprobs
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
        scores = twin(twin.lay_out(batch))
        (-scores.logprobs.sum()).backward()
        norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert result["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert result["grad_norm"] > 0.5
        assert result["skipped"] == 0
    for (name, expected), actual in zip(twin.model.named_parameters(), get_weights(strategy).values(), strict=True):
        torch.testing.assert_close(actual, expected.detach(), msg=name)


def get_gradients(seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the gradients of a model that is never updated, by Hugging Face name."""
    strategy = make_strategy(kind="llama")
    strategy.backward(-compute_logprobs(strategy, seed).sum(), is_last_micro_batch=True)
    for name, parameter in tiny_model("llama").named_parameters():
        gradient = strategy.module.get_parameter(f"model.{name}").grad
        assert gradient is not None and gradient.shape == parameter.shape
        yield name, gradient


def compare_with_libraries(optimizer: str, make_optimizers: Callable[[dict[str, Any]], list[Any]]) -> None:
    """Compare updates with given gradients with those of the libraries' optimizers, bit for bit."""
    strategy = make_strategy(kind="llama", name=optimizer, max_grad_norm=0, weight_decay=0.1, scheduler="linear")
    weights = get_weights(strategy)
    optimizers = make_optimizers(weights)
    for seed in range(3):
        for name, gradient in get_gradients(seed):
            weights[name].grad = gradient
            strategy.module.get_parameter(f"model.{name}").grad = gradient.clone()
        lr = strategy.step()["lr"]
        assert lr == pytest.approx(1e-2 * (10 - seed) / 10)
        for each in optimizers:
            each.param_groups[0]["lr"] = lr
            each.step()
    assert_equal(get_weights(strategy), weights)


def select(weights: dict[str, Tensor], *parts: str) -> list[Tensor]:
    return [weight for name, weight in weights.items() if any(part in name for part in parts)]


def test_muon_updates_matrices_and_adamw_the_rest() -> None:
    def make_optimizers(weights: dict[str, Any]) -> list[Any]:
        muon = torch.optim.Muon(select(weights, "proj"), weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        others = select(weights, "embed", "norm", "lm_head")
        return [muon, torch.optim.AdamW(others, weight_decay=0.1, fused=True)]

    compare_with_libraries("muon", make_optimizers)


@needs_bitsandbytes
def test_8bit_adamw_keeps_float32_moments_of_embeddings() -> None:
    from bitsandbytes.optim import AdamW8bit

    def make_optimizers(weights: dict[str, Any]) -> list[Any]:
        quantized, others = select(weights, "proj", "lm_head"), select(weights, "embed", "norm")
        return [AdamW8bit(quantized, weight_decay=0.1), torch.optim.AdamW(others, weight_decay=0.1, fused=True)]

    compare_with_libraries("adamw_8bit", make_optimizers)


@pytest.mark.parametrize(
    ("kind", "matrices", "others"),
    [
        (
            "qwen2",
            ["self_attn.q_proj.weight", "mlp.down_proj.weight"],
            ["self_attn.q_proj.bias", "embed_tokens.weight"],
        ),
        ("qwen3_moe", ["mlp.gate.weight"], ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]),
        ("llama", ["mlp.up_proj.weight"], ["lm_head.weight"]),
        ("gpt_oss", ["mlp.router.weight"], ["mlp.experts.down_proj_bias", "self_attn.sinks"]),
        ("lfm2", ["conv.in_proj.weight"], ["conv.conv.weight", "operator_norm.weight"]),
    ],
)
def test_muon_leaves_stacks_and_convolutions_to_adamw(kind: str, matrices: list[str], others: list[str]) -> None:
    model = LogprobModel(tiny_model(kind, tied=kind != "llama"))
    kinds = classify_parameters(model)
    for name, parameter in model.named_parameters():
        is_matrix = kinds[id(parameter)] is ParameterKind.LAYER_MATRIX
        assert is_matrix or not any(name.endswith(f".{end}") for end in matrices), name
        assert not is_matrix or not any(name.endswith(f".{end}") for end in others), name
    names = [name for name, _ in model.named_parameters()]
    assert all(any(name.endswith(f".{end}") for name in names) for end in (*matrices, *others))


def test_checkpoint_of_another_optimizer_is_rejected(tmp_path: Path) -> None:
    make_strategy(name="muon").save(tmp_path)
    resumed = make_strategy(seed=1)
    weights = get_weights(resumed)
    with pytest.raises(CheckpointMismatch, match=r"optimizer_config\.name='muon', and this run has .*='adamw'"):
        resumed.load(tmp_path)
    assert_equal(get_weights(resumed), weights)


def test_missing_bitsandbytes_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(ConfigError, match=r"optimizer_config\.name='adamw_8bit' needs.*skyrl-train\[bitsandbytes\]"):
        make_strategy(name="adamw_8bit")


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
@EACH_OPTIMIZER
@pytest.mark.parametrize("factor", [math.nan, math.inf])
def test_nonfinite_gradient_changes_nothing(factor: float, optimizer: str) -> None:
    strategy, untouched = make_strategy(name=optimizer), make_strategy(name=optimizer)
    for updated in (strategy, untouched):
        update(updated)
    initial = get_weights(strategy)
    assert update(strategy, factor=factor)["skipped"] == 1
    assert_equal(get_weights(strategy), initial)
    update(strategy, seed=1)
    update(untouched, seed=1)
    assert_equal(get_weights(strategy), get_weights(untouched))  # moments were not touched either


@EACH_OPTIMIZER
def test_resumed_run_continues_bitwise(optimizer: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"name": optimizer, "scheduler": "linear", "num_warmup_steps": 2}
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


@EACH_OPTIMIZER
def test_checkpoint_before_the_first_step_loads(optimizer: str, tmp_path: Path) -> None:
    make_strategy(name=optimizer).save(tmp_path)
    resumed = make_strategy(seed=1, name=optimizer)
    update(resumed)
    resumed.load(tmp_path)
    fresh = make_strategy(name=optimizer)
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
