"""Adapters: the layers that get one, frozen parameters, merged weights and exported folders."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from skyrl_train.config.schema import LoraConfig, OptimizerConfig
from skyrl_train.config.section import freeze
from skyrl_train.data.batch import TrainBatch
from skyrl_train.engines.peft_adapter import read_adapter
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.learner.worker import LearnerWorker, MiniBatch
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters, get_adaptable_linears
from skyrl_train.models.value_model import ValueModel
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import save_tiny_model, tiny_model
from tests.support.double_precision import double_precision
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.padded_reference import assert_same_tensors, padded_scores, padded_values, ragged_batch
from tests.support.tiny_adapters import fill_adapters

ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
DENSE = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]
KINDS = {"qwen2": DENSE, "qwen3": DENSE, "llama": DENSE, "gemma": DENSE, "mistral": DENSE, "qwen3_moe": ATTENTION}
"""Model -> its linear layers. Experts of a mixture are fused parameters."""
KEY = "trainer.policy.model.lora"


def lora(**changes: Any) -> LoraConfig:
    return freeze(LoraConfig(**{"rank": 4, "alpha": 8, **changes}))


def make_model(kind: str, dtype: torch.dtype) -> Any:
    model = tiny_model(kind, dtype=dtype)
    model.set_experts_implementation("eager")  # the others do not support float64
    return model


def make_adapted_model(
    kind: str = "qwen2", dtype: torch.dtype = torch.float32, **changes: Any
) -> tuple[Any, LoraAdapters]:
    model = make_model(kind, dtype)
    return model, LoraAdapters(model, lora(**changes), KEY)


def make_peft_model(kind: str, dtype: torch.dtype) -> Any:
    """Return a model with the same adapters by peft alone, and with its own attention."""
    model = make_model(kind, dtype)
    model.set_attn_implementation("sdpa")
    peft_model = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, target_modules=KINDS[kind]))
    fill_adapters(peft_model)
    return peft_model


def compute_loss(logprobs: Tensor, entropy: Tensor, batch: TrainBatch) -> Tensor:
    return ((logprobs + 0.1 * entropy) * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()


def trained_gradients(model: Any, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-4)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 3, 100])
def test_adapter_gradients_equal_padded_peft_model(kind: str, size: int, dtype: torch.dtype, tolerance: float):
    batch = ragged_batch((9, 4, 12, 9, 2, 7, 9), temperatures=(1.0, 0.7, 1.0, 1.3, 1.0, 0.5, 2.0))
    with double_precision():
        model, _ = make_adapted_model(kind, dtype)
        fill_adapters(model)
        logprob_model = LogprobModel(model)
        for micro_batch in batch.split_micro_batches(max_sequences=size):
            scores = logprob_model(logprob_model.lay_out(micro_batch), True)
            compute_loss(scores.logprobs, scores.entropy, micro_batch).backward()
        peft_model = make_peft_model(kind, dtype)
        compute_loss(*padded_scores(peft_model, batch), batch).backward()
    assert_same_tensors(
        trained_gradients(logprob_model, "model."), trained_gradients(peft_model, "base_model.model."), tolerance
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_keeps_adapter_gradients(tmp_path: Path, reentrant: bool):
    path, gradients = save_tiny_model(tmp_path), []
    for changes in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_use_reentrant": reentrant}):
        worker = make_worker(path, strategy="tests.support.recording_strategies:RecordingSingle", **changes)
        worker.update(to_mini_batch(policy_batch()))
        gradients.append(worker.strategy.recorded)
    assert len(gradients[0]) == 2 * 7 * 2
    assert_same_tensors(gradients[1], gradients[0], 1e-5)


def test_critic_trains_adapters_and_head():
    batch = ragged_batch((9, 4, 12))
    with double_precision():
        model, _ = make_adapted_model(dtype=torch.float64)
        fill_adapters(model)
        value_model = ValueModel(model)
        torch.nn.init.ones_(value_model.value_head.weight)
        values, _ = value_model(value_model.lay_out(batch))
        (values * torch.sin(batch.input_ids.double())).sum().backward()
        peft_model = make_peft_model("qwen2", torch.float64)
        head = torch.ones(1, model.config.hidden_size, dtype=torch.float64, requires_grad=True)
        (padded_values(peft_model.base_model.model, head, batch) * torch.sin(batch.input_ids.double())).sum().backward()
    gradients = {value_model.hf_name(name): p.grad for name, p in value_model.named_parameters() if p.grad is not None}
    assert head.grad is not None
    expected = {**trained_gradients(peft_model, "base_model.model."), "value_head.weight": head.grad}
    assert_same_tensors(gradients, expected, 1e-9)


def make_spec(path: str, **changes: Any) -> Any:
    return tiny_spec(path, **{"lora": lora(), **changes})


def make_worker(path: str, **changes: Any) -> Any:
    """Return a worker without other ranks, whose adapters are not 0."""
    worker = LearnerWorker(make_spec(path, **changes), 0, 1)
    worker.build(path)
    fill_adapters(worker.module)
    return worker


def to_mini_batch(batch: TrainBatch) -> MiniBatch:
    return MiniBatch([batch], 1, int(batch.loss_mask.sum()))


def test_update_changes_only_adapters(tmp_path: Path):
    worker = make_worker(save_tiny_model(tmp_path))
    initial = {name: p.detach().clone() for name, p in worker.module.named_parameters()}
    worker.update(to_mini_batch(policy_batch()))
    changed = {name for name, p in worker.module.named_parameters() if not torch.equal(p, initial[name])}
    assert changed == {name for name in initial if ".lora_" in name}
    state = [key for key in worker.strategy.get_checkpoint_shard().tensors if key.startswith("exp_avg/")]
    assert len(state) == len(changed)


def test_initial_adapters_are_zero_and_seeded(tmp_path: Path):
    path = save_tiny_model(tmp_path)
    workers = [LearnerWorker(make_spec(path, seed=seed), 0, 1) for seed in (0, 0, 1)]
    for worker in workers:
        worker.build(path)
    base = dict(tiny_model().named_parameters())
    for name, tensor in workers[0].full_parameters():
        assert torch.equal(tensor, base[name]), name
    first, same_seed, other_seed = ([p for n, p in w.module.named_parameters() if ".lora_A." in n] for w in workers)
    assert all(torch.equal(a, b) for a, b in zip(first, same_seed, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other_seed, strict=True))


def test_merged_weights_equal_the_adapted_model(tmp_path: Path):
    worker = make_worker(save_tiny_model(tmp_path))
    initial = {name: p.detach().clone() for name, p in worker.module.named_parameters()}
    merged = tiny_model(seed=1)
    tensors = {name: tensor.clone() for name, tensor in worker.full_parameters()}
    assert tensors.keys() == dict(merged.named_parameters()).keys()
    merged.load_state_dict(tensors, strict=False)
    batch = policy_batch()
    torch.testing.assert_close(worker.forward([batch], 1), padded_scores(merged, batch)[0].detach(), rtol=0, atol=1e-5)
    assert all(torch.equal(p, initial[name]) for name, p in worker.module.named_parameters())


def test_adapter_checkpoint_resumes_bitwise(tmp_path: Path):
    path = save_tiny_model(tmp_path / "model")
    uninterrupted, resumed = make_worker(path), make_worker(path)
    uninterrupted.update(to_mini_batch(policy_batch(seed=1)))
    uninterrupted.save(str(tmp_path / "saved"))
    size = (tmp_path / "saved" / "shard_0.safetensors").stat().st_size
    assert size < 0.5 * (Path(path) / "model.safetensors").stat().st_size
    resumed.load(str(tmp_path / "saved"))
    for worker in (uninterrupted, resumed):
        worker.update(to_mini_batch(policy_batch(seed=2)))
    for (name, expected), (_, actual) in zip(uninterrupted.full_parameters(), resumed.full_parameters(), strict=True):
        assert torch.equal(expected, actual), name


def test_checkpoint_with_other_shapes_is_rejected(tmp_path: Path):
    path = save_tiny_model(tmp_path / "model")
    make_worker(path).save(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match=r"lora_A.* \[4, 128\] in the checkpoint and float32 \[2, 128\] in"):
        make_worker(path, lora=lora(rank=2)).load(str(tmp_path / "saved"))
    with pytest.raises(CheckpointError, match="absent"):
        make_worker(path, lora=None).load(str(tmp_path / "saved"))


@pytest.mark.parametrize("exclude", [None, ["down_proj"]])
def test_export_has_merged_model_and_peft_adapter(tmp_path: Path, exclude: list[str] | None):
    path = save_tiny_model(tmp_path / "model", tied=False)
    worker = make_worker(path, lora=lora(exclude_modules=exclude))
    worker.export(str(tmp_path / "export"))
    batch = policy_batch()
    expected = worker.forward([batch], 1)
    merged = load_causal_lm(str(tmp_path / "export"), dtype=torch.float32)
    base = load_causal_lm(path, dtype=torch.float32)
    loaded: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    for model in (merged, loaded):
        with torch.no_grad():
            torch.testing.assert_close(expected, padded_scores(model, batch)[0], rtol=0, atol=1e-5)
    assert any("down_proj.lora_A" in name for name, _ in loaded.named_parameters()) == (exclude is None)
    linears = get_adaptable_linears(merged)
    adapter = read_adapter(str(tmp_path / "export" / "adapter"), linears, adapter="mine", engine="one")
    assert len(adapter.layers) == (len(linears) if exclude is None else len(linears) - 2)


@pytest.mark.parametrize("value_head", [None, "value_head"])
def test_frozen_weights_have_the_compute_dtype(tmp_path: Path, value_head: str | None):
    worker = make_worker(save_tiny_model(tmp_path), dtype="bfloat16", value_head_prefix=value_head)
    for name, parameter in worker.module.named_parameters():
        assert parameter.dtype == (torch.float32 if parameter.requires_grad else torch.bfloat16), name
    products: list[torch.dtype] = []
    for name, module in worker.module.named_modules():
        if name.endswith("0.mlp.up_proj.lora_A.default"):
            module.register_forward_hook(lambda m, i, o: products.append(o.dtype))
    worker.forward([policy_batch()], 1)
    assert products == [torch.bfloat16]
    merged = {name: tensor.dtype for name, tensor in worker.full_parameters()}
    assert merged["model.layers.0.mlp.up_proj.weight"] == torch.float32, "rounded only when it is sent"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_modules": ["q_proj", "v_prj"]},
            r"target_modules='v_prj': no linear layer of Qwen2.* q_proj, up_proj,",
        ),
        ({"target_modules": "q_proj"}, r"target_modules='q_proj': no linear layer"),
        ({"target_modules": ["lm_head"]}, r"target_modules='lm_head': no linear layer"),
        ({"target_modules": r".*\.mlp.*"}, r"target_modules matches model\.layers\.0\.mlp, a Qwen2MLP"),
        ({"target_modules": "*_proj"}, r"target_modules='\*_proj' is not a valid regular expression"),
        ({"exclude_modules": ["head"]}, r"exclude_modules='head': no linear layer"),
        ({"exclude_modules": r".*_proj"}, r"exclude_modules='\.\*_proj' leaves no layer"),
    ],
)
def test_unknown_modules_are_rejected(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=rf"trainer\.policy\.model\.lora\.{message}"):
        make_adapted_model(**changes)


def test_pattern_matches_full_names():
    model, adapters = make_adapted_model(target_modules=r"model\.layers\.1\..*[qv]_proj")
    assert adapters.layers == [f"model.layers.1.self_attn.{name}_proj" for name in "qv"]
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        f"{layer}.lora_{end}.default.weight" for layer in adapters.layers for end in "AB"
    }


def test_frozen_experts_are_reported(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        make_adapted_model("qwen3_moe")
    assert "Experts are fused into parameters such as model.layers.0.mlp.experts.gate_up_proj" in caplog.text
    with pytest.raises(ConfigError, match=r"target_modules='gate_proj': .* Experts are fused"):
        make_adapted_model("qwen3_moe", target_modules=["q_proj", "gate_proj"])


def test_frozen_model_is_saved_in_full(tmp_path: Path):
    strategy = SingleStrategy(optimizer_config=OptimizerConfig())
    strategy.prepare(LogprobModel(tiny_model()), None)
    strategy.save(tmp_path)
    assert len(strategy.get_checkpoint_shard().slices) == len(list(tiny_model().parameters()))
