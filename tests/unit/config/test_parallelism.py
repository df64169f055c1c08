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


def test_its_tensor_parallelism_is_that_of_fsdp2_and_each_change_is_said():
    prepared = prepare_config(RECIPE, has_accelerator=True)
    trainer = prepared.config.trainer
    assert (trainer.strategy, trainer.policy.tensor_parallel_size, trainer.ref.tensor_parallel_size) == ("fsdp2", 2, 4)
    assert trainer.policy.megatron_config.tensor_model_parallel_size == 1
    said = [note for note in prepared.notes if "megatron" in note]
    assert "trainer.strategy=megatron -> fsdp2" in said[0]
    assert said[1:] == [
        "trainer.policy.megatron_config.tensor_model_parallel_size=2 -> trainer.policy.tensor_parallel_size=2.",
        "trainer.ref.megatron_config.tensor_model_parallel_size=4 -> trainer.ref.tensor_parallel_size=4.",
    ]
    assert not any("tensor_model_parallel_size" in warning for warning in map(str, prepared.warnings))


def test_its_expert_parallelism_shares_experts_out_and_then_tensors_are_whole():
    key = "trainer.policy.megatron_config.expert_model_parallel_size"
    prepared = prepare_config([*RECIPE, f"{key}=4"], has_accelerator=True)
    policy = prepared.config.trainer.policy
    assert (policy.expert_parallel_size, policy.tensor_parallel_size) == (4, 1)
    assert f"{key}=4 -> trainer.policy.expert_parallel_size=4." in prepared.notes
    theirs = "trainer.policy.megatron_config.tensor_model_parallel_size=2"
    assert f"{theirs} -> FSDP2 over those ranks: experts are shared out already." in prepared.notes


@pytest.mark.parametrize("kind", ["pipeline_model", "expert_tensor"])
def test_ranks_of_its_other_kinds_are_those_of_fsdp2(kind: str):
    key = f"trainer.policy.megatron_config.{kind}_parallel_size"
    prepared = prepare_config([*RECIPE, f"{key}=2"], has_accelerator=True)
    assert f"{key}=2 -> FSDP2 over those ranks." in prepared.notes
    assert prepared.config == prepare_config(RECIPE, has_accelerator=True).config
    assert not any(kind in warning for warning in prepared.warnings)


def test_its_context_parallelism_divides_sequences_and_then_tensors_are_whole():
    key = "trainer.policy.megatron_config.context_parallel_size"
    prepared = prepare_config([*RECIPE, f"{key}=4"], has_accelerator=True)
    policy, ref = prepared.config.trainer.policy, prepared.config.trainer.ref
    assert (policy.sequence_parallel_size, policy.tensor_parallel_size) == (4, 1)
    assert (ref.sequence_parallel_size, ref.tensor_parallel_size) == (1, 4)
    assert f"{key}=4 -> trainer.policy.sequence_parallel_size=4." in prepared.notes
    theirs = "trainer.policy.megatron_config.tensor_model_parallel_size=2"
    assert f"{theirs} -> FSDP2 over those ranks: sequences are divided already." in prepared.notes


def test_compiled_layers_are_sharded_and_not_divided():
    experts = "trainer.policy.megatron_config.expert_model_parallel_size"
    prepared = prepare_config([*RECIPE, "trainer.policy.use_torch_compile=true", f"{experts}=2"], has_accelerator=True)
    policy = prepared.config.trainer.policy
    assert (policy.tensor_parallel_size, policy.expert_parallel_size) == (1, 1)
    assert f"{experts}=2 -> FSDP2 over those ranks: layers are compiled." in prepared.notes
    assert any("tensor_model_parallel_size=2 -> FSDP2 over those ranks: " in note for note in prepared.notes)


@pytest.mark.parametrize("kind", ["pipeline_model", "context", "expert_model", "expert_tensor", "tensor_model"])
@pytest.mark.parametrize("size", [0, -3])
def test_a_size_that_is_none_is_refused_under_its_own_key(kind: str, size: int):
    key = f"trainer.policy.megatron_config.{kind}_parallel_size"
    with pytest.raises(ConfigError, match=rf"{key}={size}: must be at least 1"):
        prepare_config([*RECIPE, f"{key}={size}"], has_accelerator=True)


def test_a_size_that_cannot_fit_the_ranks_is_refused_under_the_key_that_it_has_here():
    keys = [f"trainer.policy.megatron_config.{kind}_parallel_size=3" for kind in ("context", "tensor_model")]
    with pytest.raises(ConfigError, match=r"trainer\.policy\.sequence_parallel_size=3: must be a divisor .* 4"):
        prepare_config([*RECIPE, *keys], has_accelerator=True)


@pytest.mark.parametrize(("experts", "left"), [(8, 2), (1, 1)])
def test_copies_inside_an_engine_are_engines_of_their_own(experts: int, left: int):
    sizes = {"tensor": 2, "data": 4, "expert": experts}
    keys = [f"generator.inference_engine_{kind}_parallel_size={size}" for kind, size in sizes.items()]
    prepared = prepare_config([*RECIPE, *keys, "generator.num_inference_engines=3"], has_accelerator=True)
    generator = prepared.config.generator
    assert (generator.num_inference_engines, generator.inference_engine_data_parallel_size) == (12, 1)
    assert generator.inference_engine_expert_parallel_size == left
    assert any("data_parallel_size=4 -> generator.num_inference_engines=12" in note for note in prepared.notes)


def test_what_was_written_for_fsdp2_counts_more():
    prepared = prepare_config([*RECIPE, "trainer.policy.tensor_parallel_size=4"], has_accelerator=True)
    assert prepared.config.trainer.policy.tensor_parallel_size == 4
    assert any("policy.megatron_config.tensor_model_parallel_size" in str(warning) for warning in prepared.warnings)


def test_with_another_strategy_its_keys_have_no_effect_and_that_is_said():
    prepared = prepare_config([*RECIPE, "trainer.strategy=fsdp2"], has_accelerator=True)
    assert prepared.config.trainer.policy.tensor_parallel_size == 1
    assert any("megatron_config.tensor_model_parallel_size" in str(warning) for warning in prepared.warnings)
