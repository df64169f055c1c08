"""Cells of the learner in one process: gradients in float64 equal the Hugging Face model's on a padded batch."""

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
from skyrl_train.models.expert_adapters import adapter_names, find_fused_experts, get_expert_parameters
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from tests.support.double_precision import double_precision
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.padded_reference import assert_same_tensors, grouped_batch, padded_scores, ragged_batch
from tests.support.tiny_adapters import fill_adapters

from .cells import make, reference_attention, save, supported_cells

Gradients = dict[str, Tensor]
LENGTHS = (9, 4, 12, 9, 2, 7, 9)


@pytest.fixture(autouse=True)
def _exact_double() -> Iterator[None]:
    with double_precision():
        yield


def compute_loss(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> Tensor:
    """Return a weighted sum, whose weights follow the tokens wherever they are in a batch."""
    return ((logprobs + 0.1 * entropy) * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()


def padded_gradients(name: str, batch: TrainBatch) -> Gradients:
    model = make(name, torch.float64)
    model.set_attn_implementation(reference_attention(name))
    compute_loss(*padded_scores(model, batch), batch).backward()
    return trained_gradients(model)


def ragged_gradients(model: LogprobModel, batch: TrainBatch, share: bool = False) -> Gradients:
    """Return the gradients of micro-batches of three sequences."""
    for micro_batch in batch.split_micro_batches(max_sequences=3):
        shared_prompt_lengths = micro_batch.shared_prompt_lengths() if share else None
        scores = model(model.lay_out(micro_batch, shared_prompt_lengths), True)
        assert scores.entropy is not None
        compute_loss(scores.logprobs, scores.entropy, micro_batch).backward()
    return trained_gradients(model.model)


def trained_gradients(model: torch.nn.Module) -> Gradients:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("name", "column"), supported_cells("padding-free"))
def test_gradient_without_padding_equals_padded_one(name: str, column: str):
    batch = ragged_batch(LENGTHS)
    assert_same_tensors(ragged_gradients(LogprobModel(make(name, torch.float64)), batch), padded_gradients(name, batch))


@pytest.mark.parametrize(("name", "column"), supported_cells("shared prompts"))
def test_gradient_with_shared_prompts_equals_padded_one(name: str, column: str):
    batch = grouped_batch([(6, [4, 9, 4, 1]), (3, [2]), (11, [5, 5])])
    model = LogprobModel(make(name, torch.float64))
    assert_same_tensors(ragged_gradients(model, batch, share=True), padded_gradients(name, batch))


@pytest.mark.parametrize(("name", "column"), supported_cells("LoRA"))
def test_adapter_gradient_equals_merged_padded_one(name: str, column: str):
    batch, model = ragged_batch(LENGTHS), make(name, torch.float64)
    experts = sorted({path.rpartition(".")[2] for path in get_expert_parameters(model)}) or None
    adapters = LoraAdapters(model, LoraConfig(rank=4, alpha=8, target_parameters=experts), "trainer.policy.model.lora")
    assert bool(adapters.experts) == (find_fused_experts(model) is not None)
    fill_adapters(model)
    for parameter in model.parameters():
        parameter.data = parameter.data.double()
    adapter_parameters = {
        key: p.detach().clone().requires_grad_() for key, p in model.named_parameters() if ".lora_" in key
    }
    base_model = make(name, torch.float64).requires_grad_(False)
    base_model.set_attn_implementation(reference_attention(name))
    weights: dict[str, Tensor] = dict(base_model.named_parameters())
    for layer in adapters.layers:
        lora_a, lora_b = (adapter_parameters[f"{layer}.lora_{letter}.default.weight"] for letter in "AB")
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"] + 2 * lora_b @ lora_a
    for path in adapters.experts:
        lora_a, lora_b = (adapter_parameters[matrix] for matrix in adapter_names(path))
        change = 2 * lora_b @ lora_a
        weights[path] = weights[path] + (change.mT if name == "gpt-oss" else change)

    def with_adapters(**arguments: Any) -> Any:
        return functional_call(base_model, weights, kwargs=arguments)

    compute_loss(*padded_scores(with_adapters, batch), batch).backward()  # type: ignore[arg-type]
    expected = {key: p.grad for key, p in adapter_parameters.items() if p.grad is not None}
    assert len(expected) == len(adapter_parameters) == 2 * len(adapters.layers + adapters.experts) >= 16
    assert_same_tensors(ragged_gradients(LogprobModel(model), batch), expected)


@pytest.mark.defect("export-lacks-router-bias")
@pytest.mark.defect("gpt-oss-fails-to-load")
@pytest.mark.parametrize("name", ["DeepSeek-V3", "gpt-oss"])
def test_exported_checkpoint_keeps_logprobs(name: str, tmp_path: Path):
    """These models have attention that transformers does not fuse, and tensors that are not parameters."""
    path, batch = save(name, tmp_path / "model"), policy_batch()
    worker = LearnerWorker(tiny_spec(path), 0, 1)
    worker.build(path)
    scores = worker.forward([batch], 1)
    worker.export(str(tmp_path / "export"))
    with torch.no_grad():
        for model in (make(name), load_causal_lm(str(tmp_path / "export"), dtype=torch.float32)):
            torch.testing.assert_close(scores, padded_scores(model, batch)[0], rtol=0, atol=1e-5)
