"""Overrides that the run never calls raise an error with their replacement when the class is defined."""

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


def trainer(kind: type[RayPPOTrainer] = RayPPOTrainer, **kwargs: Any) -> RayPPOTrainer:
    return kind(CFG, None, None, None, None, None, **kwargs)


def test_ineffective_overrides_raise_error_with_replacement():
    for base, table in (*BASES, (SkyRLGymGenerator, GENERATOR_REPLACEMENTS)):
        for name, advice in table.items():
            with pytest.raises(ConfigError) as error:
                type("Mine", (base,), {name: lambda self: None})
            assert str(error.value).startswith(f"Mine.{name}: the run does not call this method"), name
            assert f"Instead: {advice} (docs/guides/from_skyrl.md#programs)" in str(error.value)


def test_ineffective_overrides_in_mixin_raise_error():
    class Mixin:
        def build_models(self) -> None: ...

    with pytest.raises(ConfigError, match=r"Mine\.build_models: the run does not call this method"):
        type("Mine", (Mixin, RayPPOTrainer), {})


def test_unsupported_attributes_raise_error_with_replacement():
    for name, advice in TRAINER_REPLACEMENTS.items():
        with pytest.raises(AttributeError) as error:
            getattr(trainer(), name)
        assert f"no {name!r}. Instead: {advice}" in str(error.value)
    for name in (*TRAINER_REPLACEMENTS, *READ_ONLY_ATTRIBUTES):
        with pytest.raises(AttributeError, match=f"no {name!r}. Instead: "):
            setattr(trainer(), name, None)
    for name in EXPERIMENT_REPLACEMENTS:
        with pytest.raises(AttributeError, match=f"no {name!r}. Instead: "):
            getattr(BasePPOExp.__new__(BasePPOExp), name)
    for name in CLIENT_REPLACEMENTS:
        with pytest.raises(AttributeError, match=f"no {name!r}. Instead: "):
            getattr(InferenceEngineClient.__new__(InferenceEngineClient), name)
    with pytest.raises(
        AttributeError,
        match=r"no 'nonsense'\. docs/guides/from_skyrl.md#programs lists the attributes that RayPPOTrainer has",
    ):
        trainer().nonsense  # noqa: B018


def test_replacements_name_existing_keys_and_methods():
    keys, methods = set(all_keys()), re.compile(r"override (\w+)")
    sections = {name.rpartition(".")[0] for name in keys}
    hooks = {*dir(RayPPOTrainer), *dir(BasePPOExp), *dir(SkyRLGymGenerator)}
    for advice in (advice for table in TABLES.values() for advice in table.values()):
        for name in re.findall(r"\b(?:trainer|generator)\.\w+(?:\.\w+)*", advice):
            assert name in keys or name in sections or name == "trainer.placement", (name, advice)
        assert set(methods.findall(advice)) <= hooks, advice


def test_training_loop_without_super_raises_error():
    class Parent(RayPPOTrainer):
        def prepare(self) -> None: ...

        def train(self) -> None:
            self.prepare()
            super().train()

    class Child(Parent): ...

    assert isinstance(trainer(Child), Parent)
    with pytest.raises(ConfigError, match=r"Mine\.train never calls super\(\)\.train\(\)"):

        class Mine(RayPPOTrainer):
            async def train(self) -> None:
                for _ in range(self.cfg.trainer.num_dummy_steps):
                    self.all_metrics.clear()


def test_coroutine_overrides_raise_error():
    with pytest.raises(ConfigError, match=r"Mine\.save_checkpoints is a coroutine"):

        class Mine(RayPPOTrainer):
            async def save_checkpoints(self) -> str:  # type: ignore[override]
                return super().save_checkpoints()

    class Mixin:
        async def dump_data(self, data: Any, file_name: str) -> None: ...

    with pytest.raises(ConfigError, match=r"Mine\.dump_data is a coroutine"):
        type("Mine", (Mixin, RayPPOTrainer), {})


def test_misspelled_methods_raise_error():
    for name in ("compute_advantage_and_returns", "convert_to_train_input", "save_checkpoint"):
        with pytest.raises(ConfigError, match=rf"Mine\.{name}: the run does not call this method\. Did you mean \w+\?"):
            type("Mine", (RayPPOTrainer,), {name: lambda self: None})

    class Helper(RayPPOTrainer):
        def save_checkpoint(self, path: str) -> str:
            return path

        def save_checkpoints(self) -> str:
            return self.save_checkpoint(super().save_checkpoints())

    assert isinstance(trainer(Helper), RayPPOTrainer)


def test_generator_that_calls_its_own_methods_is_allowed():
    class Subclass(SkyRLGymGenerator):
        async def agent_loop(self, prompt: Any) -> Any:
            return prompt

        async def generate(self, input_batch: Any, disable_tqdm: bool = True) -> Any:
            return [await self.agent_loop(prompt) for prompt in input_batch["prompts"]]

    assert Subclass.generate is not SkyRLGymGenerator.generate
    with pytest.raises(ConfigError, match=r"Mine\._setup_env_extras: the run does not call this method"):

        class Mine(Subclass):
            def _setup_env_extras(self, env_extras: Any) -> Any: ...


def test_callbacks_raise_error():
    with pytest.raises(ConfigError, match=r"callbacks must be empty\. Instead: override train_critic_and_policy"):
        trainer(callbacks=[object()])
    assert trainer(callbacks=[]).all_metrics == {}
