"""Overrides that nothing would call are refused when the class is defined, with what replaces them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.config.keys import all_keys
from skyrl_train.errors import ConfigError
from skyrl_train.skyrl.client import InferenceEngineClient
from skyrl_train.skyrl.experiment import BasePPOExp
from skyrl_train.skyrl.gym_generator import SkyRLGymGenerator
from skyrl_train.skyrl.trainer import FullyAsyncRayPPOTrainer, RayPPOTrainer
from skyrl_train.skyrl.unsupported import (
    CLIENT_REPLACEMENTS,
    EXPERIMENT_REPLACEMENTS,
    GENERATOR_REPLACEMENTS,
    READ_ONLY_ATTRIBUTES,
    TRAINER_REPLACEMENTS,
)

CFG = SimpleNamespace(trainer=SimpleNamespace(placement=SimpleNamespace(colocate_all=False)))
TABLES = {
    "trainer": TRAINER_REPLACEMENTS,
    "experiment": EXPERIMENT_REPLACEMENTS,
    "generator": GENERATOR_REPLACEMENTS,
    "client": CLIENT_REPLACEMENTS,
    "steps": READ_ONLY_ATTRIBUTES,
}
BASES = (
    (RayPPOTrainer, TRAINER_REPLACEMENTS),
    (FullyAsyncRayPPOTrainer, TRAINER_REPLACEMENTS),
    (BasePPOExp, EXPERIMENT_REPLACEMENTS),
)


def trainer(kind: type[RayPPOTrainer] = RayPPOTrainer, **more: Any) -> RayPPOTrainer:
    return kind(CFG, None, None, None, None, None, **more)


def test_overrides_without_effect_are_refused_with_their_replacement():
    for base, table in (*BASES, (SkyRLGymGenerator, GENERATOR_REPLACEMENTS)):
        for name, advice in table.items():
            with pytest.raises(ConfigError) as refused:
                type("Mine", (base,), {name: lambda self: None})
            assert str(refused.value).startswith(f"Mine.{name}: the run does not call it"), name
            assert f"Instead: {advice} (docs/from_skyrl.md#programs)" in str(refused.value)


def test_overrides_of_a_mixin_are_refused():
    class Mixin:
        def build_models(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Mine\.build_models: the run does not call it"):
        type("Mine", (Mixin, RayPPOTrainer), {})


def test_names_without_counterpart_say_what_replaces_them():
    for name, advice in TRAINER_REPLACEMENTS.items():
        with pytest.raises(AttributeError) as refused:
            getattr(trainer(), name)
        assert f"no {name!r}. Instead: {advice}" in str(refused.value)
    for name in (*TRAINER_REPLACEMENTS, *READ_ONLY_ATTRIBUTES):
        with pytest.raises(AttributeError, match=f"no {name!r}. Instead: "):
            setattr(trainer(), name, None)
    for name in EXPERIMENT_REPLACEMENTS:
        with pytest.raises(AttributeError, match=f"no {name!r}. Instead: "):
            getattr(BasePPOExp.__new__(BasePPOExp), name)
    for name in CLIENT_REPLACEMENTS:
        with pytest.raises(AttributeError, match=f"no {name!r}. Instead: "):
            getattr(InferenceEngineClient.__new__(InferenceEngineClient), name)
    with pytest.raises(AttributeError, match=r"no 'nonsense'\. docs/from_skyrl.md#programs lists what it has"):
        trainer().nonsense  # noqa: B018


def test_replacements_name_keys_and_methods_that_exist():
    keys, methods = set(all_keys()), re.compile(r"override (\w+)")
    sections = {name.rpartition(".")[0] for name in keys}
    hooks = {*dir(RayPPOTrainer), *dir(BasePPOExp), *dir(SkyRLGymGenerator)}
    for advice in (advice for table in TABLES.values() for advice in table.values()):
        for name in re.findall(r"\b(?:trainer|generator)\.\w+(?:\.\w+)*", advice):
            assert name in keys or name in sections or name == "trainer.placement", (name, advice)
        assert set(methods.findall(advice)) <= hooks, advice


def test_training_loop_without_super_is_refused():
    class Around(RayPPOTrainer):
        def prepare(self) -> None: ...

        def train(self) -> None:
            self.prepare()
            super().train()

    class Further(Around): ...

    assert isinstance(trainer(Further), Around)
    with pytest.raises(ConfigError, match=r"Mine\.train has a training loop of its own"):

        class Mine(RayPPOTrainer):
            async def train(self) -> None:
                for _ in range(self.cfg.trainer.num_dummy_steps):
                    self.all_metrics.clear()


def test_coroutines_in_place_of_methods_are_refused():
    with pytest.raises(ConfigError, match=r"Mine\.save_checkpoints is a coroutine"):

        class Mine(RayPPOTrainer):
            async def save_checkpoints(self) -> str:  # type: ignore[override]
                return super().save_checkpoints()

    class Mixin:
        async def dump_data(self, data: Any, file_name: str) -> None: ...

    with pytest.raises(ConfigError, match=r"Mine\.dump_data is a coroutine"):
        type("Mine", (Mixin, RayPPOTrainer), {})


def test_misspelt_methods_are_refused():
    for name in ("compute_advantage_and_returns", "convert_to_train_input", "save_checkpoint"):
        with pytest.raises(ConfigError, match=rf"Mine\.{name}: the run does not call it\. Did you mean \w+\?"):
            type("Mine", (RayPPOTrainer,), {name: lambda self: None})

    class Helper(RayPPOTrainer):
        def save_checkpoint(self, path: str) -> str:
            return path

        def save_checkpoints(self) -> str:
            return self.save_checkpoint(super().save_checkpoints())

    assert isinstance(trainer(Helper), RayPPOTrainer)


def test_generator_that_calls_its_own_methods_is_allowed():
    class Own(SkyRLGymGenerator):
        async def agent_loop(self, prompt: Any) -> Any:
            return prompt

        async def generate(self, input_batch: Any, disable_tqdm: bool = True) -> Any:
            return [await self.agent_loop(one) for one in input_batch["prompts"]]

    assert Own.generate is not SkyRLGymGenerator.generate
    with pytest.raises(ConfigError, match=r"Mine\._setup_env_extras: the run does not call it"):

        class Mine(Own):
            def _setup_env_extras(self, env_extras: Any) -> Any: ...


def test_callbacks_are_refused():
    with pytest.raises(ConfigError, match=r"callbacks must be empty\. Instead: override train_critic_and_policy"):
        trainer(callbacks=[object()])
    assert trainer(callbacks=[]).all_metrics == {}
