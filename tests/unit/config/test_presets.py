from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.config.hydra import load_preset, presets_folder, save_resolved, to_dict
from skyrl_train.config.prepare import prepare_config
from skyrl_train.errors import ConfigError

BASE = "defaults: [ppo_base_config, _self_]\n"


def write_preset(folder: Path, text: str, *argv: str) -> list[str]:
    (folder / "mine.yaml").write_text(text)
    return ["--config-dir", str(folder), "--config-name", "mine", *argv]


def prepare_error(arguments: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        prepare_config(arguments, has_accelerator=False)
    return str(caught.value)


def test_policy_path_alone_changes_reference_and_engine():
    config = load_preset(["trainer.policy.model.path=my/model"])
    assert config.trainer.ref.model.path == "my/model"
    assert config.generator.model_name == "my/model"


def test_other_followers_follow_until_they_are_set():
    config = load_preset(
        ["trainer.max_prompt_length=7", "generator.sampling_params.max_generate_length=9", "trainer.rope_theta=5"]
    )
    assert config.generator.max_input_length == 7
    assert config.generator.eval_sampling_params.max_generate_length == 9
    assert config.generator.rope_theta == 5.0
    assert load_preset(["trainer.max_prompt_length=7", "generator.max_input_length=8"]).generator.max_input_length == 8


def test_home_is_interpolated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert load_preset().trainer.ckpt_path == "/somewhere/ckpts/"
    assert load_preset().data.train_data == ("/somewhere/data/gsm8k/train.parquet",)


def test_missing_home_names_affected_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("HOME")
    message = prepare_error([])
    assert "trainer.ckpt_path" in message
    assert "data.train_data" in message
    rest = ["trainer.ckpt_path=/a", "trainer.export_path=/b", "data.train_data=c", "data.val_data=d"]
    assert prepare_config(rest, has_accelerator=False).config.trainer.ckpt_path == "/a"


def test_command_line_overrides_user_preset(tmp_path: Path):
    text = BASE + "trainer: {epochs: 3, seed: 5, policy: {model: {path: m}}}\n"
    config = prepare_config(write_preset(tmp_path, text, "trainer.seed=6"), has_accelerator=False).config
    assert (config.trainer.epochs, config.trainer.seed, config.trainer.ref.model.path) == (3, 6, "m")
    assert config.trainer.train_batch_size == 1024


def test_preset_without_the_base_still_has_all_defaults(tmp_path: Path):
    config = prepare_config(write_preset(tmp_path, "trainer: {epochs: 3}\n"), has_accelerator=False).config
    assert (config.trainer.epochs, config.trainer.train_batch_size) == (3, 1024)


def test_preset_may_choose_files_of_its_own_groups(tmp_path: Path):
    (tmp_path / "size").mkdir()
    (tmp_path / "size" / "tiny.yaml").write_text("# @package _global_\ntrainer: {epochs: 9}\n")
    config = prepare_config(write_preset(tmp_path, BASE, "+size=tiny"), has_accelerator=False).config
    assert config.trainer.epochs == 9


@pytest.mark.fault("F01")
def test_all_unknown_yaml_keys_are_reported(tmp_path: Path):
    message = prepare_error(
        write_preset(tmp_path, BASE + "trainer: {epcohs: 3, policy: {optimiser: 1}}\nbogus: {x: 1}\n", "trainer.sed=1")
    )
    assert "4 problems" in message
    assert "trainer.epcohs=3: unknown key. Did you mean trainer.epochs?" in message
    assert "trainer.policy.optimiser=1: unknown key." in message
    assert "bogus={'x': 1}: unknown key." in message
    assert "trainer.sed=1: unknown key. Did you mean trainer.seed?" in message


@pytest.mark.fault("F02")
def test_wrong_types_of_yaml_are_all_named(tmp_path: Path):
    text = BASE + "trainer: {epochs: '3', policy: {optimizer_config: {lr: .nan}}, placement: 3, plugins: [[]]}\n"
    message = prepare_error(write_preset(tmp_path, text))
    for part in (
        "trainer.epochs=3: must be an integer. Write the number without quotes.",
        "trainer.policy.optimizer_config.lr=nan: must be a finite number.",
        "trainer.placement=3: must be a section.",
        "trainer.plugins=[[]]: must be a list (text each).",
    ):
        assert part in message


@pytest.mark.fault("F02")
def test_invalid_interpolations_are_reported(tmp_path: Path):
    text = (
        BASE
        + "trainer: {run_name: '${nokey}', seed: '${trainer.project_name}', project_name: x, log_path: '${data}'}\n"
    )
    message = prepare_error(write_preset(tmp_path, text, "generator.max_turns=${generator.max_turns}"))
    assert "trainer.run_name=${nokey}: must be resolvable." in message
    assert "trainer.seed=x: must be an integer." in message
    assert "trainer.log_path={'train_data': " in message
    assert "generator.max_turns=${generator.max_turns}: must be resolvable." in message


def test_section_may_follow_another(tmp_path: Path):
    text = BASE + "trainer: {ref: {fsdp_config: '${trainer.policy.fsdp_config}'}}\n"
    config = prepare_config(
        write_preset(tmp_path, text, "trainer.policy.fsdp_config.fsdp_size=2"), has_accelerator=False
    ).config
    assert config.trainer.ref.fsdp_config.fsdp_size == 2


def test_aliases_and_contradictions_in_yaml(tmp_path: Path):
    text = BASE + "generator: {sampling_params: {max_new_tokens: 17}}\n"
    assert (
        prepare_config(
            write_preset(tmp_path, text), has_accelerator=False
        ).config.generator.sampling_params.max_generate_length
        == 17
    )
    message = prepare_error(write_preset(tmp_path, text, "generator.sampling_params.max_generate_length=18"))
    assert "These are two names of one setting" in message


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--config-name", "nothing"], "Cannot find primary config 'nothing'"),
        (["--config-dir", "/no/such/folder"], "--config-dir=/no/such/folder: must be a folder that exists."),
    ],
)
def test_missing_preset_is_one_of_the_problems(arguments: list[str], part: str):
    message = prepare_error([*arguments, "trainer.sed=1"])
    assert part in message
    assert "trainer.sed=1" in message


def test_invalid_yaml_is_a_config_error(tmp_path: Path):
    message = prepare_error(write_preset(tmp_path, "trainer: {epochs: 3\n"))
    assert "The configuration mine cannot be composed: while parsing" in message and 'mine.yaml", line 1' in message


def test_saved_configuration_starts_the_same_run_again(tmp_path: Path):
    first = prepare_config(["trainer.epochs=3", "+generator.engine_init_kwargs.a=[1,2]"], has_accelerator=False).config
    save_resolved(first, tmp_path / "config.yaml")
    again = prepare_config(["--config-dir", str(tmp_path), "--config-name", "config"], has_accelerator=False)
    assert again.config == first
    assert to_dict(again.config) == to_dict(first)
    assert again.notes == ["all keys are kept; trainer.placement counts shares of CPUs instead of GPUs."]


def test_base_preset_equals_dataclass_defaults():
    assert (presets_folder() / "ppo_base_config.yaml").is_file()
    lines = (presets_folder() / "ppo_base_config.yaml").read_text().splitlines()
    assert [line for line in lines if line and not line.startswith(("#", " "))] == ["defaults:", "hydra:"]
