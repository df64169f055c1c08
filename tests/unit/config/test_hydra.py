"""Composition with Hydra in a program that may use Hydra itself."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra

from skyrl_train.config.hydra import compose, load_preset
from skyrl_train.errors import ConfigError


def folder_of(tmp_path: Path, name: str, epochs: int) -> str:
    folder = tmp_path / name
    (folder / "mine").mkdir(parents=True)
    (folder / "own.yaml").write_text(
        f"defaults: [ppo_base_config, mine: lower, _self_]\ntrainer: {{epochs: {epochs}}}\n"
    )
    (folder / "mine" / "lower.yaml").write_text("# @package trainer.algorithm\neps_clip_low: 0.1\n")
    return str(folder)


def test_a_program_in_hydra_keeps_its_own(tmp_path: Path):
    (tmp_path / "app.yaml").write_text("mine: 1\n")
    folder = folder_of(tmp_path, "presets", 7)
    with hydra.initialize_config_dir(str(tmp_path), job_name="outer", version_base="1.2"):
        outer = GlobalHydra.instance().hydra
        assert compose([], "own", folder).trainer.epochs == 7
        with pytest.raises(ConfigError, match="cannot be composed"):
            compose([], "no_such_preset", folder)
        assert GlobalHydra.instance().hydra is outer
        assert hydra.version.getbase() == hydra.version._get_version("1.2")
        assert hydra.compose("app") == {"mine": 1}
        with pytest.raises(hydra.errors.MissingConfigException):
            hydra.compose("own")  # our folder is ours alone
    assert not GlobalHydra.instance().is_initialized()


def test_threads_compose_at_once(tmp_path: Path):
    folders = [folder_of(tmp_path, f"presets{n}", n + 1) for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda folder: compose([], "own", folder), folders))
    assert [one.trainer.epochs for one in found] == [1, 2, 3, 4]
    assert {one.trainer.algorithm.eps_clip_low for one in found} == {0.1}  # into the package that its header names
    assert {one.hydra.job.config_name for one in found} == {"own"}


@pytest.mark.parametrize("entry", ["", "own", "/own", "own.yml", "own@trainer", "mine: own", "/mine: own.yml"])
def test_yml_preset_is_rejected_with_advice(entry: str, tmp_path: Path):
    file = tmp_path / "mine" / "own.yml" if "mine" in entry else tmp_path / "own.yml"
    file.parent.mkdir(exist_ok=True)
    file.write_text("defaults: [ppo_base_config, _self_]\n")
    (tmp_path / "other.yaml").write_text(f"defaults: [ppo_base_config, {entry or '_self_'}]\n")
    for name in ["other"] if entry else ["own", "own.yml", "own.yaml"]:
        with pytest.raises(
            ConfigError, match=rf"^{re.escape(str(file))}: the name of a preset must end in \.yaml\. Rename the file\.$"
        ):
            compose([], name, str(tmp_path))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"a: [1, 2", r"while parsing a flow sequence in .*mine\.yaml"),
        (b"\x80\x04", "'utf-8' codec can't decode byte 0x80"),
        (b"trainer: &t {again: *t}", "a YAML alias refers to itself"),
        (b"trainer: {seed: !!int abc}", "invalid literal for int"),
    ],
)
def test_broken_preset_is_a_configuration_error(content: bytes, reason: str, tmp_path: Path):
    (tmp_path / "mine.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=f"^The configuration mine cannot be composed: .*{reason}"):
        compose([], "mine", str(tmp_path))


def test_presets_that_include_each_other_are_refused(tmp_path: Path):
    (tmp_path / "one.yaml").write_text("defaults: [two]\n")
    (tmp_path / "two.yaml").write_text("defaults: [one]\n")
    with pytest.raises(ConfigError, match="one cannot be composed: presets include each other"):
        compose([], "one", str(tmp_path))


def test_interpolations_of_values_and_parts_resolve():
    config = load_preset(
        [
            "trainer.project_name=p",
            "trainer.policy.model.path=${trainer.project_name}/${trainer.seed}",
            "trainer.policy.model_config_kwargs={a: '${trainer.epochs}', b: 1}",
            "trainer.logger=[console, tensorboard]",
            "trainer.run_name=${trainer.logger.1}-${trainer.policy.model_config_kwargs.b}",
            "trainer.critic.optimizer_config=${trainer.policy.optimizer_config}",
            "trainer.policy.optimizer_config.lr=3e-5",
        ]
    )
    assert config.trainer.policy.model.path == config.trainer.ref.model.path == "p/42"
    assert config.trainer.policy.model_config_kwargs == {"a": 1, "b": 1}
    assert config.trainer.run_name == "tensorboard-1"
    assert config.trainer.critic.optimizer_config.lr == 3e-5


def test_relative_references_are_followed():
    config = load_preset(
        ["trainer.policy.optimizer_config.lr=${.weight_decay}", "trainer.policy.optimizer_config.weight_decay=0.5"]
    )
    assert config.trainer.policy.optimizer_config.lr == 0.5
