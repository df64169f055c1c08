"""Ranks that load their rows of a model hold the bits of the full model, and together use its memory once."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from skyrl_train.cluster.addresses import free_address
from skyrl_train.config.choices import STRATEGIES
from skyrl_train.config.schema import DeepSpeedConfig, FSDPConfig, LoraConfig
from skyrl_train.learner.worker import LearnerSpec, LearnerWorker
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.learner_specs import tiny_spec
from tests.support.loading_memory import RANKS, peak_of_loading
from tests.support.rank_processes import run_ranks

FROZEN = {"optimizer_config": None, "total_steps": None, "objective": None, "dtype": "bfloat16"}
LORA = LoraConfig(rank=4, alpha=8)
Variants = dict[str, tuple[str, dict[str, Any]]]
VARIANTS: Variants = {
    "tied": ("qwen2", {}),
    "saved in bfloat16": ("llama-bfloat16", {}),
    "compute in bfloat16": ("qwen2", {"dtype": "bfloat16"}),
    "tied, but saved twice": ("saved-twice", {}),
    "experts": ("qwen3_moe", {}),
    "configuration overrides": (
        "qwen2",
        {"model_config_kwargs": {"num_hidden_layers": 1}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "a critic": ("llama", {"value_head_prefix": "value_head"}),
    "a frozen reference": ("qwen3_moe", FROZEN),
    "adapters": ("qwen2", {"lora": LORA, "dtype": "bfloat16"}),
    "adapters of a critic": ("llama", {"lora": LORA, "value_head_prefix": "value_head"}),
}
GROUPS: Variants = {
    "replicas": ("qwen3_moe", {"fsdp_config": FSDPConfig(fsdp_size=2)}),
    "sharded layers": ("llama", {"tensor_parallel_size": 2}),
    "sharded experts": ("qwen3_moe", {"tensor_parallel_size": 2}),
    "split sequences": ("qwen2", {"sequence_parallel_size": 2}),
}
ZERO: Variants = {
    "ZeRO 2": ("qwen2", {"strategy": STRATEGIES["deepspeed"], "deepspeed_config": DeepSpeedConfig(zero_stage=2)}),
    "ZeRO 3": ("qwen3_moe", {"strategy": STRATEGIES["deepspeed"]}),
    "ZeRO 3, frozen": ("qwen2", {"strategy": STRATEGIES["deepspeed"], **FROZEN}),
}
needs_deepspeed = pytest.mark.skipif(importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed")


def load_full_model(spec: LearnerSpec, path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return parameters by name and buffers of the model, loaded in one process."""
    model = load_causal_lm(
        path,
        dtype=torch.float32 if spec.optimizer_config and not spec.lora else getattr(torch, spec.dtype),
        model_config_kwargs=spec.model_config_kwargs,
        rope_scaling=spec.rope_scaling,
        rope_theta=spec.rope_theta,
    )
    if spec.lora:
        torch.manual_seed(spec.seed)
        LoraAdapters(model, spec.lora, "lora")
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    if spec.value_head_prefix is not None:
        parameters = {
            name: parameter for name, parameter in parameters.items() if name.startswith(model.base_model_prefix)
        }
        parameters[f"{spec.value_head_prefix}.weight"] = torch.zeros(1, model.config.hidden_size)
    return parameters, dict(model.named_buffers())


def assert_bitwise_equal(worker: LearnerWorker, path: str) -> None:
    """Check that this rank's parameters, gathered, are bitwise what one process loads."""
    expected, buffers = load_full_model(worker.spec, path)
    actual = {name: tensor.clone() for name, tensor in worker.strategy.full_parameters()}
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(actual[name], tensor.to(actual[name].dtype)), name
        is_adapter = "lora_" in name
        assert actual[name].dtype == (torch.float32 if is_adapter else tensor.dtype), name
    model: nn.Module = worker.module
    actual_buffers = {name.rpartition("model.")[2]: tensor for name, tensor in model.named_buffers()}
    expected_buffers = {name.rpartition("model.")[2]: tensor for name, tensor in buffers.items()}
    assert actual_buffers.keys() == expected_buffers.keys()
    assert all(torch.equal(actual_buffers[name], tensor) for name, tensor in expected_buffers.items())


def load_every_variant(rank: int, world: int, variants: Variants, folders: dict[str, str], ports: list[int]) -> None:
    for (variant, (folder, changes)), port in zip(variants.items(), ports, strict=True):
        spec = tiny_spec(folders[folder], **{"strategy": STRATEGIES["fsdp2"], **changes})
        worker = LearnerWorker(spec, rank, world)
        worker.setup("127.0.0.1", port)
        try:
            assert_bitwise_equal(worker, folders[folder])
            if spec.optimizer_config is None:
                worker.reload(folders["another"])
                assert_bitwise_equal(worker, folders["another"])
        except AssertionError as error:
            raise AssertionError(f"{variant}: {error}") from error
        worker.close()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    make: Callable[[str], Path] = tmp_path_factory.mktemp
    twice = make("twice")
    paths = {kind: save_tiny_model(make(kind), kind, tied=kind == "qwen2") for kind in ("qwen2", "llama", "qwen3_moe")}
    paths["llama-bfloat16"] = save_tiny_model(make("half"), "llama", dtype=torch.bfloat16)
    paths["another"] = save_tiny_model(make("another"), "qwen2", seed=5)
    paths["saved-twice"] = save_tiny_model(twice, "qwen2")
    tensors = load_file(twice / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, twice / "model.safetensors", metadata={"format": "pt"})
    return paths


@pytest.mark.parametrize(
    ("world", "variants"),
    [
        pytest.param(1, {name: VARIANTS[name] for name in ("tied", "experts")}, id="one rank"),
        pytest.param(3, VARIANTS, id="uneven rows"),
        pytest.param(4, GROUPS, id="groups of ranks"),
        pytest.param(2, ZERO, id="deepspeed", marks=needs_deepspeed),
    ],
)
def test_ranks_load_the_bits_of_the_full_model(
    world: int, variants: Variants, folders: dict[str, str], tmp_path: Path
) -> None:
    ports = [free_address()[1] for _ in variants]
    run_ranks(load_every_variant, [(rank, world, variants, folders, ports) for rank in range(world)], tmp_path)


@pytest.mark.defect("every-rank-loads-full-model")
def test_loading_uses_the_memory_of_one_model(tmp_path: Path) -> None:
    """Like published models, this mixture of experts is saved per expert in bfloat16 and trained in float32."""
    folder = tmp_path / "model"
    path = save_tiny_model(folder, "qwen3_moe", hidden_size=512, layers=12, vocab_size=8192, dtype=torch.bfloat16)
    model_bytes = 2 * (folder / "model.safetensors").stat().st_size
    assert model_bytes > 100 << 20
    assert peak_of_loading(path, tmp_path, RANKS) < 1.3 * model_bytes
