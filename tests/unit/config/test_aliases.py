"""Value aliases, key aliases and custom keys."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.hydra import load_preset, rename_aliases, replace_value_aliases, save_resolved
from skyrl_train.config.keys import all_keys, canonical_key, find_key, get_value, key_aliases, value_keys
from skyrl_train.config.prepare import PreparedConfig, prepare_config
from skyrl_train.config.section import KeyMetadata
from skyrl_train.errors import ConfigError
from tests.support.table_cases import check_each


def prepared(*overrides: str, has_user_code: bool = False) -> PreparedConfig:
    return prepare_config(overrides, has_accelerator=False, has_user_code=has_user_code)


@pytest.mark.parametrize(
    ("written", "key", "expected"),
    [
        ("trainer.resume_mode=null", "trainer.resume_mode", "none"),
        ("trainer.resume_mode=None", "trainer.resume_mode", "none"),
        ("trainer.resume_mode=", "trainer.resume_mode", "none"),
        ("trainer.logger=null", "trainer.logger", ()),
        ("trainer.logger=[]", "trainer.logger", ()),
        ("trainer.eval_interval=null", "trainer.eval_interval", -1),
        ("trainer.ckpt_interval=null", "trainer.ckpt_interval", -1),
        ("trainer.hf_save_interval=null", "trainer.hf_save_interval", -1),
        ("trainer.max_ckpts_to_keep=null", "trainer.max_ckpts_to_keep", -1),
        ("trainer.algorithm.value_clip=null", "trainer.algorithm.value_clip", None),
        ("trainer.algorithm.dynamic_sampling.type=none", "trainer.algorithm.dynamic_sampling.type", None),
        ("trainer.ref.model.path=null", "trainer.ref.model.path", "Qwen/Qwen2.5-1.5B-Instruct"),
        ("trainer.critic.model.path=''", "trainer.critic.model.path", None),
        ("trainer.plugins=null", "trainer.plugins", ()),
        ("data.val_data=null", "data.val_data", ()),
        ("data.val_data=[]", "data.val_data", ()),
        ("data.val_data=''", "data.val_data", ()),
        ("trainer.logger=none", "trainer.logger", ()),
        ("generator.max_input_length=null", "generator.max_input_length", 512),
        ("generator.sampling_params.top_k=null", "generator.sampling_params.top_k", -1),
        ("generator.engine_init_kwargs=null", "generator.engine_init_kwargs", {}),
        ("generator.override_existing_update_group=true", "generator.override_existing_update_group", "enable"),
        ("environment.skyrl_gym.max_env_workers=0", "environment.skyrl_gym.max_env_workers", 0),
    ],
)
def test_value_aliases_match_skyrl(written: str, key: str, expected: Any, tmp_path: Path):
    assert get_value(prepared(written).config, key) == expected
    name, _, value = written.partition("=")
    *sections, last = name.split(".")
    text = "".join(f"{'  ' * depth}{part}:\n" for depth, part in enumerate(sections))
    (tmp_path / "mine.yaml").write_text(f"{text}{'  ' * len(sections)}{last}: {value}\n")
    from_file = prepared("--config-dir", str(tmp_path), "--config-name", "mine").config
    assert get_value(from_file, key) == expected


def nested(name: str, value: Any) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    return value


def check_alias_renamed(alias: str) -> None:
    key = key_aliases()[alias]
    assert alias not in all_keys() and key in value_keys()
    assert canonical_key(alias) == key and find_key(alias) == value_keys()[key]
    content = nested(alias, 7)
    assert list(rename_aliases(content)) == []
    section = content
    for part in key.split("."):
        section = section[part]
    assert section == 7
    (problem,) = rename_aliases(merged(nested(alias, 7), nested(key, 8)))
    assert (
        str(problem)
        == f"{alias}=7: must be the same as {key}=8. These are two names of one setting: set only one of them."
    )


def test_every_alias_is_renamed_to_its_key():
    check_each(key_aliases(), check_alias_renamed)


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    for name, value in other.items():
        one[name] = merged(one[name], value) if isinstance(one.get(name), dict) and isinstance(value, dict) else value
    return one


def test_other_spellings_are_read_as_the_value():
    wrong = []
    for name, key in value_keys().items():
        for written, expected in key.metadata.value_aliases.items():
            content = nested(name, written)
            replace_value_aliases(content)
            wrong += [f"{name}={written} is read as {content}"] if content != nested(name, expected) else []
    assert not wrong, "\n".join(wrong)


def test_sections_have_no_facts():
    assert [key.name for key in all_keys().values() if key.is_section and key.metadata != KeyMetadata()] == []


def test_engine_keys_accept_newer_skyrl_names(tmp_path: Path):
    keys = ["num_engines=3", "tensor_parallel_size=2", "backend=sglang", "+engine_init_kwargs.max_model_len=99"]
    line = [f"{'+' * key.startswith('+')}generator.inference_engine.{key.removeprefix('+')}" for key in keys]
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_base_config, _self_]\n"
        "generator: {inference_engine: {num_engines: 3, tensor_parallel_size: 2, backend: sglang, "
        "engine_init_kwargs: {max_model_len: 99}}}\n"
    )
    for arguments in (line, ["--config-dir", str(tmp_path), "--config-name", "mine"]):
        generator = prepared(*arguments).config.generator
        assert (generator.num_inference_engines, generator.inference_engine_tensor_parallel_size) == (3, 2)
        assert generator.backend == "sglang"
        assert generator.engine_init_kwargs == {"max_model_len": 99}
    with pytest.raises(ConfigError, match="These are two names of one setting"):
        prepared(*line, "generator.num_inference_engines=4")
    with pytest.raises(ConfigError, match=r"generator\.inference_engine\.backnd=x: unknown key"):
        prepared("generator.inference_engine.backnd=x")


CUSTOM_KEYS = ["+generator.my_key=3", "+environment.my_list=[1,2]", "+environment.skyrl_gym.my_env.level=hard"]


@pytest.mark.parametrize("how", ["plugins", "own program"])
def test_plus_keys_are_custom_with_user_code(how: str, tmp_path: Path):
    plugins = ["trainer.plugins=[my_plugin]"] if how == "plugins" else []
    done = prepared(*CUSTOM_KEYS, *plugins, has_user_code=how == "own program")
    config = pickle.loads(pickle.dumps(done.config))
    assert (config.generator.my_key, config.environment.my_list) == (3, (1, 2))
    assert config.environment.skyrl_gym.own == {"my_env": {"level": "hard"}}
    assert "generator.my_key=3 is a custom key. Only your code reads it." in done.notes
    assert len([note for note in done.notes if "custom key" in note]) == 3
    save_resolved(config, tmp_path / "config.yaml")
    again = prepared("--config-dir", str(tmp_path), "--config-name", "config", has_user_code=True).config
    assert again.generator.my_key == 3
    with pytest.raises(AttributeError, match="no key 'other'"):
        _ = config.generator.other


def test_custom_keys_are_unknown_without_user_code():
    with pytest.raises(ConfigError) as error:
        prepared(*CUSTOM_KEYS, "+generator.n_samples_per_promt=2")
    text = str(error.value)
    assert "4 problems" in text
    assert "generator.my_key=3: unknown key." in text
    assert "Custom keys require trainer.plugins or a program of your own that starts the run." in text
    assert "Did you mean generator.n_samples_per_prompt?" in text


@pytest.mark.parametrize(
    "override",
    [
        "+environment.skyrl_gym.search.tpok=3",
        "+environment.skyrl_gym.tpok=3",
        "+generator.inference_engine.foo=2",
        "generator.my_key=3",
        "+trainer.my_key=3",
        "+generator.sampling_params.my_key=3",
        "+my_key=3",
        "~generator.mine",
    ],
)
def test_other_unknown_keys_are_not_custom(override: str):
    with pytest.raises(ConfigError, match="unknown key"):
        prepared(override, has_user_code=True)


def test_misspelled_custom_key_gets_suggestion():
    (note,) = [note for note in prepared("+environment.env_clas=3", has_user_code=True).notes if "custom key" in note]
    assert note == "environment.env_clas=3 is a custom key. Did you mean environment.env_class?"


def test_custom_keys_must_not_run_code():
    for override in ("+generator.mine={_target_: os.system}", "+generator.mine='${oc.env:SECRET_KEY}'"):
        with pytest.raises(ConfigError):
            prepared(override, has_user_code=True)


def test_names_registered_by_program_are_checked_later():
    names = ["trainer.algorithm.policy_loss_type=mine", "environment.env_class=mine"]
    assert prepared(*names, has_user_code=True).config.trainer.algorithm.policy_loss_type == "mine"
    with pytest.raises(ConfigError, match="2 problems"):
        prepared(*names)
    assert load_preset(names).environment.env_class == "mine"
