"""Checks that this machine has the files, packages and resources of a configuration."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.config import local_checks
from skyrl_train.config.local_checks import count_accelerators, find_missing_resources
from skyrl_train.config.predicates import RunComponents, count_run_slots
from skyrl_train.config.prepare import prepare_config
from skyrl_train.entrypoints.main_generate import EvaluationExp
from skyrl_train.entrypoints.main_sft import SFTExp
from skyrl_train.entrypoints.serve import ServingExp
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.base import Experiment, required_components


@pytest.fixture
def valid_overrides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return overrides with which nothing is missing."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    for name in ("train.jsonl", "validation.jsonl"):
        (tmp_path / name).write_text("{}\n")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return [
        f"data.train_data=['{tmp_path}/train.jsonl']",
        f"data.val_data=['{tmp_path}/validation.jsonl']",
        f"trainer.policy.model.path={tmp_path}/model",
    ]


Found = Callable[..., list[str]]


def find_problems(*overrides: str, components: RunComponents = RunComponents(), accelerator: bool = False) -> list[str]:  # noqa: B008
    config = prepare_config(overrides, has_accelerator=accelerator).config
    return [str(problem) for problem in find_missing_resources(config, components)]


def test_existing_and_hub_resources_are_not_missing(valid_overrides: list[str]):
    assert find_problems(*valid_overrides) == []
    assert (
        find_problems(
            *valid_overrides, "data.train_data=[openai/gsm8k:train]", "trainer.policy.model.path=Qwen/Qwen3-4B"
        )
        == []
    )


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "data.train_data=['{0}/trian.jsonl']",
            "trian.jsonl: must be a file that exists. {0} contains model, tr",
        ),
        ("data.train_data=['{0}/none/x.parquet']", "The folder {0}/none does not exist."),
        ("data.train_data=['{0}/none/folder:test']", "must be a file, a folder or a dataset's name on the hub"),
        ("data.val_data=['{0}/x.json']", "data.val_data={0}/x.json: must be a file"),
        ("trainer.policy.model.path={0}/modle", "trainer.policy.model.path={0}/modle: must be a model's folder or"),
        ("trainer.policy.model.path={0}", "The folder has no config.json"),
        ("trainer.policy.model.path='~/model'", "must be a path without ~"),
        ("trainer.ref.model.path={0}/none", "trainer.ref.model.path={0}/none: must be a model's folder"),
        ("trainer.reward.model.path={0}/none", "trainer.reward.model.path={0}/none: must be a model's folder"),
        ("generator.chat_template={{source: file, name_or_path: '{0}/t.jinja'}}", "t.jinja: must be a file"),
    ],
)
def test_missing_path_error_lists_existing_files(
    override: str, expected: str, valid_overrides: list[str], tmp_path: Path
):
    if override.startswith("generator.chat_template"):
        overrides = [f"generator.chat_template.name_or_path={tmp_path}/t.jinja", "generator.chat_template.source=file"]
    else:
        overrides = [override.format(tmp_path)]
    (problem,) = find_problems(*valid_overrides, *overrides)
    assert expected.format(tmp_path) in problem


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_data=['file:///tmp/nowhere.parquet']", "must be a file that exists. /tmp contains"),
        ("trainer.policy.model.path=file:///tmp", "must be a model's folder"),
        (f"data.train_data=['/tmp/{'x' * 300}.jsonl']", "must be a file that exists. /tmp contains"),
        (f"trainer.policy.model.path=/tmp/{'x' * 300}", "must be a model's folder"),
        ("data.train_data=[x.jsonl]", "{here} contains"),
    ],
)
def test_unusual_paths_are_reported(override: str, expected: str, valid_overrides: list[str]):
    (problem,) = find_problems(*valid_overrides, override)
    assert expected.format(here=Path.cwd()) in problem


def test_unreadable_folder_is_a_problem(valid_overrides: list[str], monkeypatch: pytest.MonkeyPatch):
    def refuse(folder: str) -> list[str]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(local_checks.os, "listdir", refuse)
    (problem,) = find_problems(*valid_overrides, "data.train_data=[/secret/x.jsonl]")
    assert "/secret cannot be read: Permission denied." in problem


def test_missing_files_are_reported_with_other_problems(valid_overrides: list[str], tmp_path: Path):
    wrong = ["trainer.epcohs=3", f"data.train_data=['{tmp_path}/trian.jsonl']", "trainer.policy.model.path=/none/model"]
    with pytest.raises(ConfigError) as error:
        prepare_config([*valid_overrides, *wrong], has_accelerator=False, components=RunComponents())
    text = str(error.value)
    assert text.startswith("3 problems")
    assert "Did you mean trainer.epochs?" in text
    assert "trian.jsonl: must be a file" in text
    assert "/none/model: must be a model's folder" in text


def test_resume_path_must_exist(valid_overrides: list[str], tmp_path: Path):
    keys = ["trainer.resume_mode=from_path", f"trainer.resume_path={tmp_path}/global_step_3"]
    assert "trainer.resume_path" in find_problems(*valid_overrides, *keys)[0]
    (tmp_path / "global_step_3").mkdir()
    assert find_problems(*valid_overrides, *keys) == []


def test_unused_models_and_data_may_be_missing(valid_overrides: list[str], tmp_path: Path):
    unread = ["trainer.algorithm.use_kl_loss=false", f"trainer.ref.model.path={tmp_path}/none"]
    unread += [f"trainer.critic.model.path={tmp_path}/none", "trainer.eval_before_train=false"]
    assert (
        find_problems(*valid_overrides, *unread, f"data.val_data=['{tmp_path}/x.json']", "trainer.eval_interval=-1")
        == []
    )


def test_local_engine_must_be_installed(valid_overrides: list[str], monkeypatch: pytest.MonkeyPatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(local_checks.importlib.util, "find_spec", lambda name: None if name == "vllm" else find(name))
    assert (
        "generator.backend=vllm: must be an engine that is installed"
        in find_problems(*valid_overrides, "generator.backend=vllm")[0]
    )
    servers = ["generator.run_engines_locally=false", "generator.backend=vllm"]
    monkeypatch.setenv("SKYRL_API_KEY", "token")
    assert find_problems(*valid_overrides, *servers) == []


def test_tracker_package_must_be_installed(valid_overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "trackio").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "mlflow", None)  # type: ignore[arg-type]
    assert find_problems(*valid_overrides, "trainer.logger=[console,tensorboard,wandb]") == []
    advice = "Install it: `uv run --extra mlflow ...`, or remove it from trainer.logger."
    (problem,) = find_problems(*valid_overrides, "trainer.logger=mlflow")
    assert problem == f"trainer.logger=mlflow: must be a tracker that is installed. {advice}"
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    assert "--extra trackio" in find_problems(*valid_overrides, "trainer.logger=[console,trackio]")[0]


def test_bitsandbytes_must_be_installed(valid_overrides: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    (problem,) = find_problems(*valid_overrides, "trainer.policy.optimizer_config.name=adamw_8bit")
    assert problem.startswith("trainer.policy.optimizer_config.name=adamw_8bit: must be adamw or muon while")
    assert problem.endswith("Install it: `uv run --extra bitsandbytes ...`.")
    assert find_problems(*valid_overrides, "trainer.critic.optimizer_config.name=adamw_8bit") == []  # no critic


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        (["trainer.placement.policy_num_gpus_per_node=3", "generator.num_inference_engines=3"], 3),
        (["generator.num_inference_engines=2", "generator.inference_engine_tensor_parallel_size=2"], 4),
        (["trainer.placement.colocate_all=false", "generator.num_inference_engines=2"], 3),
    ],
)
def test_more_ranks_than_local_gpus_are_rejected(
    overrides: list[str], needed: int, valid_overrides: list[str], monkeypatch: pytest.MonkeyPatch
):
    overrides = [*valid_overrides, *overrides, "generator.backend=transformers"]
    if "parallel" in " ".join(overrides):
        overrides[-1] = "generator.run_engines_locally=true"
        monkeypatch.setattr(local_checks.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=name))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(needed))))
    assert count_accelerators() == needed
    assert find_problems(*overrides, accelerator=True) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(needed - 1))))
    (problem,) = find_problems(*overrides, accelerator=True)
    assert f"The run needs {needed} GPUs" in problem
    assert f"this machine has {needed - 1} GPU" in problem
    monkeypatch.setenv("RAY_ADDRESS", "local")  # a Ray of our own
    assert find_problems(*overrides, accelerator=True) == [problem]
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert find_problems(*overrides, accelerator=True) == []
    monkeypatch.delenv("RAY_ADDRESS")
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(is_initialized=lambda: True))  # type: ignore[arg-type]
    assert find_problems(*overrides, accelerator=True) == []


def test_entrypoint_requires_only_its_components(valid_overrides: list[str], tmp_path: Path):
    config = prepare_config([*valid_overrides, "trainer.placement.colocate_all=false"], has_accelerator=False).config
    totals: dict[Any, int] = {
        experiment: count_run_slots(config, required_components(experiment)).total
        for experiment in (Experiment, EvaluationExp, SFTExp, ServingExp)
    }
    assert totals == {Experiment: 2, EvaluationExp: 1, SFTExp: 1, ServingExp: 1}
    assert required_components(Experiment) == RunComponents()
    assert (required_components(SFTExp).train_data, required_components(SFTExp).val_data) == (True, False)
    assert (required_components(EvaluationExp).train_data, required_components(EvaluationExp).val_data) == (False, True)
    assert (required_components(ServingExp).train_data, required_components(ServingExp).val_data) == (False, False)
    judged = [
        f"trainer.reward.model.path={tmp_path}/none",
        "trainer.resume_mode=from_path",
        "trainer.resume_path=/none/x",
    ]
    assert len(find_problems(*valid_overrides, *judged)) == 2
    assert find_problems(*valid_overrides, *judged, components=required_components(ServingExp)) == []
    taught = ["trainer.algorithm.sft.loss_type=minor_sft", "trainer.algorithm.loss_reduction=sequence_mean"]
    taught += ["trainer.algorithm.use_kl_loss=false", f"trainer.ref.model.path={tmp_path}/none"]
    assert find_problems(*valid_overrides, *taught) == []
    assert (
        "trainer.ref.model.path" in find_problems(*valid_overrides, *taught, components=required_components(SFTExp))[0]
    )


def test_data_of_subclass_needs_no_file(valid_overrides: list[str]):
    class OwnData(Experiment):
        def get_train_dataset(self) -> Any:
            return None

    class OwnDemonstrations(SFTExp):
        def get_train_dataset(self) -> None:  # type: ignore[override]
            return None

    components = required_components(OwnData)
    assert (components.train_data, components.val_data) == (False, True)
    assert not required_components(OwnDemonstrations).train_data
    assert find_problems(*valid_overrides, "data.train_data=[/none/x.parquet]", components=components) == []
