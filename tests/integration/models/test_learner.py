"""Cells of the learner in one process: gradients in float64 against the Hugging Face model on a padded batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from skyrl_train.config.schema import LoraConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from tests.support.double_precision import double_precision
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.padded_reference import assert_same_tensors, grouped_batch, padded_scores, ragged_batch
from tests.support.tiny_adapters import fill_adapters

from .cells import attention_of, green, make, save

Gradients = dict[str, Tensor]
LENGTHS = (9, 4, 12, 9, 2, 7, 9)


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


def loss_of(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> Tensor:
    """A weight that follows the token wherever it is packed."""
    return ((logprobs + 0.1 * entropy) * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()


def padded_gradients(name: str, batch: TrainBatch) -> Gradients:
    model = make(name, torch.float64)
    model.set_attn_implementation(attention_of(name))
    loss_of(*padded_scores(model, batch), batch).backward()
    return trained(model)


def ragged_gradients(model: LogprobModel, batch: TrainBatch, share: bool = False) -> Gradients:
    """Of micro-batches of three sequences."""
    for part in batch.split_micro_batches(max_sequences=3):
        repeated = part.shared_prompt_lengths() if share else None
        tensors = (part.input_ids, part.position_ids, part.offsets, part.temperature, part.loss_mask)
        scores = model(*tensors, True, repeated)
        assert scores.entropy is not None
        loss_of(scores.logprobs, scores.entropy, part).backward()
    return trained(model.model)


def trained(model: torch.nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "column"), green("padding-free"))
def test_a_gradient_without_padding_is_the_padded_one(name: str, column: str):
    batch = ragged_batch(LENGTHS)
    assert_same_tensors(ragged_gradients(LogprobModel(make(name, torch.float64)), batch), padded_gradients(name, batch))


@pytest.mark.parametrize(("name", "column"), green("shared prompts"))
def test_a_gradient_with_prompts_that_are_run_once_is_the_padded_one(name: str, column: str):
    batch = grouped_batch([(6, [4, 9, 4, 1]), (3, [2]), (11, [5, 5])])
    model = LogprobModel(make(name, torch.float64))
    assert_same_tensors(ragged_gradients(model, batch, share=True), padded_gradients(name, batch))


@pytest.mark.parametrize(("name", "column"), green("LoRA"))
def test_an_adapters_gradient_is_that_of_the_padded_model_with_weights_that_contain_it(name: str, column: str):
    batch, model = ragged_batch(LENGTHS), make(name, torch.float64)
    adapters = LoraAdapters(model, LoraConfig(rank=4, alpha=8), "trainer.policy.model.lora")
    fill_adapters(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    filled = {key: p.detach().clone().requires_grad_() for key, p in model.named_parameters() if ".lora_" in key}
    plain = make(name, torch.float64).requires_grad_(False)
    plain.set_attn_implementation(attention_of(name))
    weights: dict[str, Tensor] = dict(plain.named_parameters())
    for layer in adapters.layers:
        down, up = (filled[f"{layer}.lora_{end}.default.weight"] for end in "AB")
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + 2 * up @ down

    def with_adapters(**arguments: Any) -> Any:
        return functional_call(plain, weights, kwargs=arguments)

    loss_of(*padded_scores(with_adapters, batch), batch).backward()  # type: ignore[arg-type]
    wanted = {key: p.grad for key, p in filled.items() if p.grad is not None}
    assert len(wanted) == len(filled) == 2 * len(adapters.layers) >= 16
    assert_same_tensors(ragged_gradients(LogprobModel(model), batch), wanted)


@pytest.mark.defect("exports-without-the-bias-of-routers")
@pytest.mark.defect("gpt-oss-could-not-be-loaded")
@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss"])
def test_a_learner_reads_a_checkpoint_and_exports_one_with_the_same_log_probs(name: str, tmp_path: Path):
    """Not all attention is fused in transformers, and not all of a checkpoint is parameters."""
    path, batch = save(name, tmp_path / "model"), policy_batch()
    worker = LearnerWorker(tiny_spec(path), 0, 1)
    worker.build(path)
    scores = worker.forward([batch], 1)
    worker.export(str(tmp_path / "export"))
    with torch.no_grad():
        for model in (make(name), load_causal_lm(str(tmp_path / "export"), dtype=torch.float32)):
            torch.testing.assert_close(scores, padded_scores(model, batch)[0], rtol=0, atol=1e-5)
