"""Default folders of runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.run_folder import run_identity, training_settings


def get_run_folders(*overrides: str) -> tuple[Path, Path]:
    trainer = prepare_config(["device=cpu", *overrides]).config.trainer
    return Path(trainer.ckpt_path), Path(trainer.export_path)


@pytest.fixture(autouse=True)
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_default_folders_depend_on_configuration(home: Path):
    saved, exported = get_run_folders("trainer.project_name=math", "trainer.run_name=first try")
    assert saved.parent == home / "ckpts" / "math"
    assert exported == home / "exports" / "math" / saved.name
    assert saved.name.startswith("first_try-") and len(saved.name) == len("first_try-") + 8
    assert get_run_folders("trainer.project_name=math", "trainer.run_name=first try") == (saved, exported)


@pytest.mark.parametrize(
    ("override", "same"),
    [
        ("trainer.max_steps=7", True),
        ("trainer.epochs=3", True),
        ("generator.num_inference_engines=2", True),
        ("trainer.logger=console", True),
        ("trainer.policy.optimizer_config.lr=1e-5", False),
        ("trainer.policy.model.path=mine", False),
        ("generator.n_samples_per_prompt=7", False),
        ("environment.env_class=math", False),
        ("trainer.seed=1", False),
        ("data.train_data=[a.jsonl]", False),
    ],
)
def test_what_decides_what_is_learnt_decides_the_folder(override: str, same: bool):
    assert (get_run_folders(override)[0] == get_run_folders()[0]) == same


def test_digest_covers_only_non_default_settings():
    """A version that adds a key finds the folders of the previous version."""
    plain = training_settings(prepare_config(["device=cpu"]).config)
    changed = training_settings(prepare_config(["device=cpu", "trainer.seed=1", "data.train_data=[a.jsonl]"]).config)
    assert {name for name in changed if changed[name] != plain.get(name)} == {"trainer.seed", "data.train_data"}
    assert not {"trainer.seed", "trainer.train_batch_size", "trainer.policy.model.lora.rank"} & plain.keys()


def test_explicit_default_folder_is_kept(home: Path):
    assert get_run_folders("trainer.ckpt_path=/runs/a")[0] == Path("/runs/a")
    assert get_run_folders(f"trainer.ckpt_path={home}/ckpts/")[0] == home / "ckpts"
    assert get_run_folders("trainer.ckpt_path=/runs/a")[1].parent.parent == home / "exports"


@pytest.mark.parametrize("name", ["../up", "/etc", "..", ".", "a/b"])
def test_run_names_cannot_escape_folder(name: str, home: Path):
    saved = get_run_folders(f"trainer.run_name='{name}'", f"trainer.project_name='{name}'")[0].resolve()
    assert saved.parent.parent == home / "ckpts"


def test_run_identity_contains_no_secret(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_PASSWORD", "hunter2hunter2")
    known = run_identity(prepare_config(["device=cpu", "trainer.run_name=hunter2hunter2"]).config)
    assert known["run_name"] == "<MY_PASSWORD>"
    assert known.keys() == {"project_name", "run_name", "model"}
