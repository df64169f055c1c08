from __future__ import annotations

import pytest

from skyrl_train.config.prepare import prepare
from skyrl_train.errors import ConfigError

RECIPE = [
    "data.train_data=[x]",
    "trainer.strategy=megatron",
    "trainer.placement.policy_num_gpus_per_node=4",
    "trainer.policy.megatron_config.tensor_model_parallel_size=2",
    "trainer.ref.megatron_config.tensor_model_parallel_size=4",
]


def test_its_tensor_parallelism_is_that_of_fsdp2_and_each_change_is_said():
    prepared = prepare(RECIPE, has_accelerator=True)
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


@pytest.mark.parametrize("kind", ["pipeline_model", "context", "expert_model", "expert_tensor"])
def test_its_other_kinds_of_parallelism_are_refused_by_name(kind: str):
    key = f"trainer.policy.megatron_config.{kind}_parallel_size"
    with pytest.raises(ConfigError, match=f"{key}=2"):
        prepare([*RECIPE, f"{key}=2"], has_accelerator=True)


def test_what_was_written_for_fsdp2_counts_more():
    prepared = prepare([*RECIPE, "trainer.policy.tensor_parallel_size=4"], has_accelerator=True)
    assert prepared.config.trainer.policy.tensor_parallel_size == 4
    assert any("policy.megatron_config.tensor_model_parallel_size" in str(warning) for warning in prepared.warnings)


def test_with_another_strategy_its_keys_have_no_effect_and_that_is_said():
    prepared = prepare([*RECIPE, "trainer.strategy=fsdp2"], has_accelerator=True)
    assert prepared.config.trainer.policy.tensor_parallel_size == 1
    assert any("megatron_config.tensor_model_parallel_size" in str(warning) for warning in prepared.warnings)
