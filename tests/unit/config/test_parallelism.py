from __future__ import annotations

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.errors import ConfigError

RECIPE = [
    "data.train_data=[x]",
    "trainer.strategy=megatron",
    "trainer.placement.policy_num_gpus_per_node=4",
    "trainer.policy.megatron_config.tensor_model_parallel_size=2",
    "trainer.ref.megatron_config.tensor_model_parallel_size=4",
]


def test_megatron_tensor_parallelism_maps_to_fsdp2():
    prepared = prepare_config(RECIPE, has_accelerator=True)
    trainer = prepared.config.trainer
    assert (trainer.strategy, trainer.policy.tensor_parallel_size, trainer.ref.tensor_parallel_size) == ("fsdp2", 2, 4)
    assert trainer.policy.megatron_config.tensor_model_parallel_size == 1
    notes = [note for note in prepared.notes if "megatron" in note]
    assert "trainer.strategy=megatron -> fsdp2" in notes[0]
    assert notes[1:] == [
        "trainer.policy.megatron_config.tensor_model_parallel_size=2 -> trainer.policy.tensor_parallel_size=2.",
        "trainer.ref.megatron_config.tensor_model_parallel_size=4 -> trainer.ref.tensor_parallel_size=4.",
    ]
    assert not any("tensor_model_parallel_size" in warning for warning in map(str, prepared.warnings))


def test_megatron_expert_parallelism_replaces_tensor_parallelism():
    key = "trainer.policy.megatron_config.expert_model_parallel_size"
    prepared = prepare_config([*RECIPE, f"{key}=4"], has_accelerator=True)
    policy = prepared.config.trainer.policy
    assert (policy.expert_parallel_size, policy.tensor_parallel_size) == (4, 1)
    assert f"{key}=4 -> trainer.policy.expert_parallel_size=4." in prepared.notes
    megatron_key = "trainer.policy.megatron_config.tensor_model_parallel_size=2"
    assert (
        f"{megatron_key} -> FSDP2 over those ranks, because experts are distributed over the ranks already."
        in prepared.notes
    )


@pytest.mark.parametrize("kind", ["pipeline_model", "expert_tensor"])
def test_other_megatron_ranks_become_fsdp2_ranks(kind: str):
    key = f"trainer.policy.megatron_config.{kind}_parallel_size"
    prepared = prepare_config([*RECIPE, f"{key}=2"], has_accelerator=True)
    assert f"{key}=2 -> FSDP2 over those ranks." in prepared.notes
    assert prepared.config == prepare_config(RECIPE, has_accelerator=True).config
    assert not any(kind in warning for warning in prepared.warnings)


def test_megatron_context_parallelism_becomes_sequence_parallelism():
    key = "trainer.policy.megatron_config.context_parallel_size"
    prepared = prepare_config([*RECIPE, f"{key}=4"], has_accelerator=True)
    policy, ref = prepared.config.trainer.policy, prepared.config.trainer.ref
    assert (policy.sequence_parallel_size, policy.tensor_parallel_size) == (4, 1)
    assert (ref.sequence_parallel_size, ref.tensor_parallel_size) == (1, 4)
    assert f"{key}=4 -> trainer.policy.sequence_parallel_size=4." in prepared.notes
    megatron_key = "trainer.policy.megatron_config.tensor_model_parallel_size=2"
    assert (
        f"{megatron_key} -> FSDP2 over those ranks, because sequences are split over the ranks already."
        in prepared.notes
    )


def test_compiled_layers_are_sharded_by_fsdp2():
    experts = "trainer.policy.megatron_config.expert_model_parallel_size"
    prepared = prepare_config([*RECIPE, "trainer.policy.use_torch_compile=true", f"{experts}=2"], has_accelerator=True)
    policy = prepared.config.trainer.policy
    assert (policy.tensor_parallel_size, policy.expert_parallel_size) == (1, 1)
    assert f"{experts}=2 -> FSDP2 over those ranks, because trainer.policy.use_torch_compile=true." in prepared.notes
    assert any("tensor_model_parallel_size=2 -> FSDP2 over those ranks, because " in note for note in prepared.notes)


@pytest.mark.parametrize("kind", ["pipeline_model", "context", "expert_model", "expert_tensor", "tensor_model"])
@pytest.mark.parametrize("size", [0, -3])
def test_invalid_megatron_size_names_its_key(kind: str, size: int):
    key = f"trainer.policy.megatron_config.{kind}_parallel_size"
    with pytest.raises(ConfigError, match=rf"{key}={size}: must be at least 1"):
        prepare_config([*RECIPE, f"{key}={size}"], has_accelerator=True)


def test_indivisible_megatron_size_names_translated_key():
    keys = [f"trainer.policy.megatron_config.{kind}_parallel_size=3" for kind in ("context", "tensor_model")]
    with pytest.raises(ConfigError, match=r"trainer\.policy\.sequence_parallel_size=3: must be a divisor .* 4"):
        prepare_config([*RECIPE, *keys], has_accelerator=True)


@pytest.mark.parametrize(("experts", "left"), [(8, 2), (1, 1)])
def test_data_parallel_copies_become_engines(experts: int, left: int):
    sizes = {"tensor": 2, "data": 4, "expert": experts}
    keys = [f"generator.inference_engine_{kind}_parallel_size={size}" for kind, size in sizes.items()]
    prepared = prepare_config([*RECIPE, *keys, "generator.num_inference_engines=3"], has_accelerator=True)
    generator = prepared.config.generator
    assert (generator.num_inference_engines, generator.inference_engine_data_parallel_size) == (12, 1)
    assert generator.inference_engine_expert_parallel_size == left
    assert any("data_parallel_size=4 -> generator.num_inference_engines=12" in note for note in prepared.notes)


def test_fsdp2_sizes_override_megatron_sizes():
    prepared = prepare_config([*RECIPE, "trainer.policy.tensor_parallel_size=4"], has_accelerator=True)
    assert prepared.config.trainer.policy.tensor_parallel_size == 4
    assert any("policy.megatron_config.tensor_model_parallel_size" in str(warning) for warning in prepared.warnings)


def test_megatron_keys_warn_with_other_strategy():
    prepared = prepare_config([*RECIPE, "trainer.strategy=fsdp2"], has_accelerator=True)
    assert prepared.config.trainer.policy.tensor_parallel_size == 1
    assert any("megatron_config.tensor_model_parallel_size" in str(warning) for warning in prepared.warnings)
