"""Whether engines get adapters merged into the model or separately."""

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
    """With room for an adapter of that rank."""
    made = ScriptedEngine()
    made.capabilities = replace(made.capabilities, synced_adapter_rank=rank)
    return made


@pytest.mark.parametrize(
    ("overrides", "rooms", "separate"),
    [
        (["generator.model_dtype=bfloat16"], [64, 64], True),
        (["generator.model_dtype=bfloat16"], [64, 8], False),
        (["generator.model_dtype=bfloat16"], [0], False),
        (["generator.model_dtype=float32"], [64], False),
        (["generator.model_dtype=float32", "trainer.policy.model.lora.sync=adapter"], [64], True),
        (["generator.model_dtype=bfloat16", "trainer.policy.model.lora.sync=merged"], [64], False),
    ],
)
def test_auto_is_separate_where_merging_would_round_and_every_engine_has_room(
    overrides: list[str], rooms: list[int], separate: bool
):
    engines = [engine(room) for room in rooms]
    assert sends_adapter(config(RANK, *overrides), engines) == separate
    assert not sends_adapter(config(*overrides), engines), "there is no adapter"


@pytest.mark.parametrize(("room", "why"), [(8, "it supports ranks up to 8"), (0, "it supports none")])
def test_an_engine_that_must_take_one_and_cannot_is_named(room: int, why: str):
    with pytest.raises(ConfigError, match=rf"lora\.sync=adapter: engine 'scripted' .* rank 24 .*: {why}.*sync=merged"):
        sends_adapter(config(RANK, "trainer.policy.model.lora.sync=adapter"), [engine(64), engine(room)])


def test_vllm_is_started_with_room_for_the_adapter_only_where_it_comes():
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
    given = config(*vllm, "trainer.policy.model.lora.sync=adapter", "+generator.engine_init_kwargs.max_lora_rank=64")
    assert engine_generator_config(given).engine_init_kwargs == {"max_lora_rank": 64}


def test_how_engines_get_an_adapter_does_not_make_another_run(tmp_path):
    for sync in ("merged", "adapter"):
        cfg = config(RANK, f"trainer.ckpt_path={tmp_path}", f"trainer.policy.model.lora.sync={sync}")
        with build_run_folder(cfg, {"train_data": "a"}):
            pass
