from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.models.value_model import ValueModel
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.padded_reference import padded_values, ragged_batch

KINDS = ("qwen2", "qwen3", "llama", "gemma", "gpt_neox")


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


def make_batch() -> TrainBatch:
    return ragged_batch((9, 4, 12, 9, 2, 7, 9), temperatures=(1.0, 0.7, 1.0, 1.3, 1.0, 0.5, 2.0))


def compute_values(model: ValueModel, batch: TrainBatch) -> Tensor:
    values, _ = model(model.lay_out(batch))
    return values  # type: ignore[no-any-return]


def random_head(size: int) -> Tensor:
    return torch.randn(1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def double_critic(kind: str) -> ValueModel:
    """Return a float64 critic whose head is not 0: otherwise only the head has a gradient."""
    model = ValueModel(tiny_model(kind, dtype=torch.float64))
    model.value_head.weight.data = random_head(model.value_head.in_features)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_equal_padded_ones(kind: str) -> None:
    batch, value_model = make_batch(), double_critic(kind)
    model = tiny_model(kind, dtype=torch.float64)
    model.set_attn_implementation("sdpa")
    head = random_head(value_model.value_head.in_features).requires_grad_()
    expected = padded_values(model, head, batch)
    torch.testing.assert_close(compute_values(value_model, batch), expected, rtol=0, atol=1e-9)

    def loss(values: Tensor, batch: TrainBatch) -> Tensor:
        return (values * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()

    loss(expected, batch).backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert head.grad is not None
    gradients["value_head.weight"] = head.grad
    total_norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm()
    for size, rows in ((1, range(7)), (2, range(7)), (7, range(7)), (3, [3, 0, 6, 2, 5, 1, 4])):
        value_model.zero_grad()
        for micro_batch in batch.select(rows).split_micro_batches(max_sequences=size):
            loss(compute_values(value_model, micro_batch), micro_batch).backward()
        actual = {value_model.hf_name(name): p.grad for name, p in value_model.named_parameters()}
        assert actual.keys() == gradients.keys()
        for name, gradient in gradients.items():
            error = float((actual[name] - gradient).norm())  # type: ignore[operator]
            assert error <= 1e-9 * max(float(gradient.norm()), 1e-3 * float(total_norm)), (size, name, error)


def test_critic_has_checkpoint_names_and_no_lm_head() -> None:
    model = tiny_model(tied=False)
    body_names = {name for name, _ in model.named_parameters()} - {"lm_head.weight"}
    value_model = ValueModel(model, "score")
    assert {value_model.hf_name(name) for name, _ in value_model.named_parameters()} == body_names | {"score.weight"}
    assert len(value_model.decoder_layers()) == model.config.num_hidden_layers


def test_untrained_values_are_zero_with_gradient() -> None:
    model = ValueModel(tiny_model())
    values = compute_values(model, make_batch())
    assert not values.any()
    values.sum().backward()
    assert model.value_head.weight.grad is not None
    assert model.value_head.weight.grad.any()


def test_batch_without_targets_has_zero_gradients() -> None:
    model = double_critic("qwen2")
    batch = ragged_batch([1]).with_tokens(loss_mask=torch.zeros(1, dtype=torch.bool))
    values = compute_values(model, batch)
    assert values.tolist() == [0.0]
    values.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_gradient_checkpointing_keeps_the_gradient() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = tiny_model(dtype=torch.float64)
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        value_model = ValueModel(model).train()
        value_model.value_head.weight.data = random_head(value_model.value_head.in_features)
        runs: list[int] = []
        value_model.decoder_layers()[0].register_forward_pre_hook(lambda *_, runs=runs: runs.append(1))
        compute_values(value_model, make_batch()).square().sum().backward()
        gradients.append([p.grad for p in value_model.parameters()])
        assert len(runs) == 1 + checkpointing
    for gradient, expected in zip(*gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12)


def test_bfloat16_model_has_float32_values() -> None:
    model = ValueModel(tiny_model(dtype=torch.bfloat16))
    torch.nn.init.ones_(model.value_head.weight)
    for values in (compute_values(model, make_batch()), _autocast(model)):
        assert values.dtype == torch.float32
        assert not torch.equal(values, values.bfloat16().float())


def _autocast(model: ValueModel) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return compute_values(model, make_batch())


def test_first_token_cannot_be_a_target() -> None:
    batch = ragged_batch([3, 3])
    with pytest.raises(AssertionError, match="first token"):
        compute_values(ValueModel(tiny_model()), batch.with_tokens(loss_mask=batch.position_ids == 0))


def test_model_with_dropout_is_rejected() -> None:
    model = tiny_model()
    model.config.attention_dropout = 0.1
    with pytest.raises(ConfigError, match="drops activations at random"):
        ValueModel(model)
