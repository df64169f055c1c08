"""Adapters on the experts of mixtures: exact gradients, merged weights, and files that peft loads."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.func import functional_call
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

from skyrl_train.config.schema import LoraConfig
from skyrl_train.config.section import freeze
from skyrl_train.engines.peft_adapter import read_adapter
from skyrl_train.errors import CheckpointError, ConfigError, EngineError
from skyrl_train.learner.worker import LearnerWorker, MiniBatch
from skyrl_train.models.expert_adapters import _project, adapter_names, add_expert_adapters, to_factors
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters, get_adaptable_linears
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_config, tiny_model
from tests.support.double_precision import double_precision
from tests.support.learner_specs import policy_batch, tiny_spec
from tests.support.padded_reference import assert_same_tensors, padded_scores, ragged_batch
from tests.support.tiny_adapters import fill_adapters

KINDS = ["qwen3_moe", "qwen2_moe", "mixtral", "deepseek_v3", "gpt_oss"]
"""Mixtures without and with shared experts, with a dense layer, and with transposed and biased experts."""
BOTH = ["gate_up_proj", "down_proj"]
KEY = "trainer.policy.model.lora"


def make_model(kind: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    config = tiny_config(kind)
    if kind == "mixtral":
        config = type(config)(**{**config.to_dict(), "num_local_experts": 4, "head_dim": 16})
    if kind == "qwen2_moe":
        config = type(config)(**{**config.to_dict(), "shared_expert_intermediate_size": 32, "head_dim": 16})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    if dtype == torch.float64:
        model.set_experts_implementation("eager")  # the default does not support float64
    return model


def save_model(kind: str, folder: Path) -> str:
    make_model(kind).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return str(folder)


def lora(**changes: Any) -> LoraConfig:
    return freeze(LoraConfig(**{"rank": 3, "alpha": 6, "target_parameters": BOTH, **changes}))


def make_worker(path: str, **changes: Any) -> Any:
    """Return a worker without other ranks, whose adapters are not 0."""
    worker = LearnerWorker(tiny_spec(path, **{"lora": lora(), **changes}), 0, 1)
    worker.build(path)
    fill_adapters(worker.module)
    return worker


def to_mini_batch(batch: Any) -> MiniBatch:
    return MiniBatch([batch], 1, int(batch.loss_mask.sum()))


def compute_loss(logprobs: Tensor, entropy: Tensor, batch: Any) -> Tensor:
    return ((logprobs + 0.1 * entropy) * torch.sin(batch.input_ids.double() + batch.position_ids)).sum()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 100])
def test_expert_adapter_gradients_equal_dense_reference(kind: str, size: int):
    batch = ragged_batch((9, 4, 12, 9))
    with double_precision():
        model = make_model(kind, torch.float64)
        adapters = LoraAdapters(model, lora(target_modules=[]), KEY)
        fill_adapters(model)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert trained == {matrix for name in adapters.experts for matrix in adapter_names(name)}
        leaves = {name: model.get_parameter(name).detach().clone().requires_grad_() for name in trained}
        weights: dict[str, Tensor] = {}
        for name in adapters.experts:
            is_transposed = model.get_submodule(name.rpartition(".")[0]).is_transposed
            name_a, name_b = adapter_names(name)
            left, right = to_factors(leaves[name_a], leaves[name_b], bool(is_transposed))
            weights[name] = model.get_parameter(name).detach() + 2 * left @ right
        reference = make_model(kind, torch.float64).requires_grad_(False)
        reference.set_attn_implementation("eager" if kind == "gpt_oss" else "sdpa")

        def merged(**arguments: Any) -> Any:
            return functional_call(reference, weights, kwargs=arguments)

        compute_loss(*padded_scores(merged, batch), batch).backward()  # type: ignore[arg-type]
        logprob_model = LogprobModel(model)
        for micro_batch in batch.split_micro_batches(max_sequences=size):
            scores = logprob_model(logprob_model.lay_out(micro_batch), True)
            compute_loss(scores.logprobs, scores.entropy, micro_batch).backward()
    expected = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}
    got: dict[str, Any] = {name: model.get_parameter(name).grad for name in expected}
    assert len(expected) == len(trained) and all(float(grad.abs().max()) > 0 for grad in expected.values())
    assert_same_tensors(got, expected, 1e-9)


def test_experts_without_gate_equal_dense_reference():
    config = AutoConfig.for_model("nemotron_h", n_routed_experts=4, hidden_size=16, moe_intermediate_size=24)
    experts: Any = NemotronHExperts(config).double()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    merged = copy.deepcopy(experts)
    merged.config._experts_implementation = "eager"
    generator = torch.Generator().manual_seed(0)
    for name in ("up_proj", "down_proj"):
        add_expert_adapters(experts, name, 2, 0.5, "gaussian")
        name_a, name_b = adapter_names(name)
        torch.nn.init.normal_(getattr(experts, name_b), generator=generator)
        change = 0.5 * getattr(experts, name_b) @ getattr(experts, name_a)
        setattr(merged, name, torch.nn.Parameter((getattr(experts, name) + change).detach()))
    states = torch.randn(7, 16, dtype=torch.float64, generator=generator)
    routed = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, dtype=torch.float64, generator=generator)
    torch.testing.assert_close(experts(states, routed, weights), merged(states, routed, weights), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        *((kind, {}) for kind in KINDS),
        ("qwen3_moe", {"target_modules": [], "target_parameters": ["down_proj"]}),
        ("qwen3_moe", {"exclude_modules": ["0.mlp.experts", "1.self_attn.o_proj"]}),
    ],
)
def test_peft_loads_exported_expert_adapters(kind: str, changes: dict[str, Any], tmp_path: Path):
    path = save_model(kind, tmp_path / "model")
    worker = make_worker(path, lora=lora(**changes))
    worker.export(str(tmp_path / "export"))
    batch = policy_batch()
    expected = worker.forward([batch], 1)
    base, merged = (load_causal_lm(folder, dtype=torch.float32) for folder in (path, str(tmp_path / "export")))
    loaded: Any = peft.PeftModel.from_pretrained(base, str(tmp_path / "export" / "adapter"))
    for model in (merged, loaded):
        with torch.no_grad():
            torch.testing.assert_close(expected, padded_scores(model, batch)[0], rtol=0, atol=1e-5)
    saved = load_file(tmp_path / "export" / "adapter" / "adapter_model.safetensors")
    assert saved.keys() == peft.get_peft_model_state_dict(loaded).keys()


@pytest.mark.parametrize("kind", ["qwen2_moe", "deepseek_v3"])
def test_peft_and_engines_load_shared_expert_adapters(kind: str, tmp_path: Path):
    path = save_model(kind, tmp_path / "model")
    worker = make_worker(path, lora=lora(target_parameters=None))
    worker.export(str(tmp_path / "export"))
    batch, folder = policy_batch(), str(tmp_path / "export" / "adapter")
    loaded: Any = peft.PeftModel.from_pretrained(load_causal_lm(path, dtype=torch.float32), folder)
    with torch.no_grad():
        torch.testing.assert_close(worker.forward([batch], 1), padded_scores(loaded, batch)[0], rtol=0, atol=1e-5)
    linears = get_adaptable_linears(load_causal_lm(path, dtype=torch.float32))
    assert read_adapter(folder, linears, adapter="mine", engine="one").layers.keys() == linears.keys()


def test_engines_reject_files_with_expert_adapters(tmp_path: Path):
    path = save_model("qwen3_moe", tmp_path / "model")
    make_worker(path).export(str(tmp_path / "export"))
    linears = get_adaptable_linears(load_causal_lm(path, dtype=torch.float32))
    with pytest.raises(EngineError, match=r"target_parameters names 'gate_up_proj', .* merged"):
        read_adapter(str(tmp_path / "export" / "adapter"), linears, adapter="mine", engine="one")


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_keeps_expert_gradients(tmp_path: Path, reentrant: bool):
    path, gradients = save_model("qwen3_moe", tmp_path), []
    for changes in ({}, {"gradient_checkpointing": True, "gradient_checkpointing_use_reentrant": reentrant}):
        worker = make_worker(path, strategy="tests.support.recording_strategies:RecordingSingle", **changes)
        worker.update(to_mini_batch(policy_batch()))
        gradients.append(worker.strategy.recorded)
    assert sum("experts.lora_" in name for name in gradients[0]) == 2 * 2 * 2
    assert_same_tensors(gradients[1], gradients[0], 1e-5)


def test_expert_checkpoint_resumes_bitwise(tmp_path: Path):
    path = save_model("qwen3_moe", tmp_path / "model")
    uninterrupted, resumed = make_worker(path), make_worker(path)
    uninterrupted.update(to_mini_batch(policy_batch(seed=1)))
    uninterrupted.save(str(tmp_path / "saved"))
    resumed.load(str(tmp_path / "saved"))
    for worker in (uninterrupted, resumed):
        worker.update(to_mini_batch(policy_batch(seed=2)))
    for (name, expected), (_, actual) in zip(uninterrupted.full_parameters(), resumed.full_parameters(), strict=True):
        assert torch.equal(expected, actual), name
    with pytest.raises(CheckpointError, match="absent"):
        make_worker(path, lora=lora(target_parameters=["down_proj"])).load(str(tmp_path / "saved"))


def test_zero_expert_adapters_keep_the_model(tmp_path: Path):
    path, batch = save_model("gpt_oss", tmp_path), policy_batch()
    workers = [LearnerWorker(tiny_spec(path, lora=lora(target_parameters=names)), 0, 1) for names in (None, BOTH)]
    for worker in workers:
        worker.build(path)
    plain, adapted = (worker.forward([batch], 1) for worker in workers)
    assert torch.equal(plain, adapted)


def test_bfloat16_products_keep_small_changes():
    """W + s B A would round to W = 1, whose product with these states is 0."""
    model: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    LoraAdapters(model, lora(target_modules=[]), KEY)
    experts = model.model.layers[0].mlp.experts
    torch.nn.init.ones_(experts.down_proj)
    torch.nn.init.constant_(experts.lora_B_down_proj, 1e-5)
    states = torch.tensor([1.0, -1.0]).repeat(2, 32).bfloat16()
    ids = torch.tensor([1, 3])
    products = _project(experts, "down_proj", 2.0, states, ids, torch.tensor([0, 1, 1, 2], dtype=torch.int32))
    expected = 2e-5 * (experts.lora_A_down_proj[ids].double() @ states.double().unsqueeze(2)).sum(1)
    assert (expected.abs() > 1e-6).all()
    torch.testing.assert_close(products.double(), expected.expand(-1, 64), rtol=0.02, atol=0)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3_moe", {"target_parameters": ["up_proj"]}, r"'up_proj': no .* The names are gate_up_proj, down_proj\."),
        ("qwen3_moe", {"target_parameters": ["q_proj.weight"]}, r"'q_proj\.weight': no parameter of the experts"),
        ("qwen2", {}, r"'gate_up_proj': .* of Qwen2ForCausalLM .* set the key to null"),
    ],
)
def test_unknown_expert_parameters_are_rejected(kind: str, changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=rf"trainer\.policy\.model\.lora\.target_parameters={message}"):
        LoraAdapters(tiny_model(kind), lora(**changes), KEY)


@pytest.mark.parametrize("excluded", [["layers.0.mlp.experts"], r".*layers\.0\..*"])
@pytest.mark.parametrize("targets", ["all-linear", []])
def test_excluded_experts_stay_frozen(excluded: Any, targets: Any):
    adapters = LoraAdapters(tiny_model("qwen3_moe"), lora(target_modules=targets, exclude_modules=excluded), KEY)
    names = [f"model.layers.1.mlp.experts.{name}" for name in BOTH]
    assert adapters.experts == names
    assert set(names) <= set(adapters.config.target_parameters), "peft would adapt others, too"


def test_excluding_all_targeted_experts_is_rejected():
    message = r"exclude_modules=\['mlp\.experts'\] leaves no experts for .*target_parameters=\['down_proj'\]"
    with pytest.raises(ConfigError, match=message):
        LoraAdapters(
            tiny_model("qwen3_moe"), lora(target_parameters=["down_proj"], exclude_modules=["mlp.experts"]), KEY
        )


def test_single_expert_parameter_is_adapted():
    model = tiny_model("qwen3_moe")
    adapters = LoraAdapters(model, lora(target_modules=[], target_parameters=["1.mlp.experts.down_proj"]), KEY)
    assert adapters.experts == ["model.layers.1.mlp.experts.down_proj"]
    name, tensor = adapters.to_peft(
        "model.layers.1.mlp.experts.lora_B_down_proj", torch.arange(4.0)[:, None, None].expand(4, 5, 3)
    )
    assert name == "base_model.model.model.layers.1.mlp.experts.lora_B.weight"
    assert torch.equal(tensor, torch.arange(4.0).repeat(5, 3))
