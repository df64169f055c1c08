"""Engines receive LoRA adapters merged into the model or separately."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl_train.config.hydra import load_preset
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.engines import engine_generator_config
from skyrl_train.experiment.publisher import sends_adapter
from skyrl_train.experiment.run_resources import build_run_folder
from skyrl_train.testing.scripted_engine import ScriptedEngine

RANK = "trainer.policy.model.lora.rank=24"


def config(*overrides: str) -> Config:
    return load_preset(["device=cpu", *overrides])


def engine(rank: int) -> ScriptedEngine:
    """Return an engine that supports adapters up to a rank."""
    scripted = ScriptedEngine()
    scripted.capabilities = replace(scripted.capabilities, synced_adapter_rank=rank)
    return scripted


@pytest.mark.parametrize(
    ("overrides", "max_ranks", "separate"),
    [
        (["generator.model_dtype=bfloat16"], [64, 64], True),
        (["generator.model_dtype=bfloat16"], [64, 8], False),
        (["generator.model_dtype=bfloat16"], [0], False),
        (["generator.model_dtype=float32"], [64], False),
        (["generator.model_dtype=float32", "trainer.policy.model.lora.sync=adapter"], [64], True),
        (["generator.model_dtype=bfloat16", "trainer.policy.model.lora.sync=merged"], [64], False),
    ],
)
def test_auto_sends_adapter_if_merging_would_round(overrides: list[str], max_ranks: list[int], separate: bool):
    engines = [engine(max_rank) for max_rank in max_ranks]
    assert sends_adapter(config(RANK, *overrides), engines) == separate
    assert not sends_adapter(config(*overrides), engines), "a run without LoRA has no adapter"


def test_expert_adapters_are_merged_in_half_precision():
    experts = "trainer.policy.model.lora.target_parameters=[down_proj]"
    assert not sends_adapter(config(RANK, experts, "generator.model_dtype=bfloat16"), [engine(64)])


@pytest.mark.parametrize(("max_rank", "reason"), [(8, "it supports ranks up to 8"), (0, "it supports none")])
def test_engine_without_adapter_support_is_named(max_rank: int, reason: str):
    with pytest.raises(
        ConfigError, match=rf"lora\.sync=adapter: engine 'scripted' .* rank 24 .*: {reason}.*sync=merged"
    ):
        sends_adapter(config(RANK, "trainer.policy.model.lora.sync=adapter"), [engine(64), engine(max_rank)])


def test_vllm_gets_max_lora_rank_for_adapter_sync():
    vllm = ["generator.backend=vllm", RANK]
    assert engine_generator_config(config(*vllm, "generator.model_dtype=bfloat16")).engine_init_kwargs == {
        "max_lora_rank": 32
    }
    for merged in (
        [*vllm, "generator.model_dtype=float32"],
        ["generator.backend=transformers", RANK, "trainer.policy.model.lora.sync=adapter"],
        ["generator.backend=vllm", "trainer.policy.model.lora.sync=adapter"],
        ["generator.backend=vllm", "trainer.policy.model.lora.sync=adapter", "trainer.policy.model.lora.rank=513"],
    ):
        assert engine_generator_config(config(*merged)).engine_init_kwargs == {}
    configured = config(
        *vllm, "trainer.policy.model.lora.sync=adapter", "+generator.engine_init_kwargs.max_lora_rank=64"
    )
    assert engine_generator_config(configured).engine_init_kwargs == {"max_lora_rank": 64}


def test_adapter_sync_does_not_change_run_identity(tmp_path):
    for sync in ("merged", "adapter"):
        cfg = config(RANK, f"trainer.ckpt_path={tmp_path}", f"trainer.policy.model.lora.sync={sync}")
        with build_run_folder(cfg, {"train_data": "a"}):
            pass
