"""Commands of the documentation that compose and check a configuration: each runs unchanged and succeeds."""

from __future__ import annotations

import sys
from pathlib import Path

import datasets
import pytest
import yaml

from skyrl_train.entrypoints import check_config, cli, main_base
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.doc_pages import Command, find_commands

MODULES = {"main_base": main_base, "check_config": check_config}
CHECKS = find_commands(r"python -m skyrl_train\.entrypoints\.check_config |skyrl-train (check|plan (?!--probe))")
PRINTS = [
    command
    for command in find_commands(r"python -m skyrl_train|skyrl-train train ")
    if {"--cfg", "--help"} & {*command.words}
]
ROWS = [{"prompt": [{"role": "user", "content": "6 * 3?"}], "reward_spec": {"ground_truth": "18"}}] * 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home folder with a model and with data where the pages have them."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "data" / "gsm8k").mkdir(parents=True)
    for split in ("train", "validation"):
        datasets.Dataset.from_list(ROWS).to_parquet(folder / "data" / "gsm8k" / f"{split}.parquet")
    save_tiny_model(folder / "model")
    return folder


def run_command(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """Run a command that must succeed, and return what it prints."""
    main, arguments = cli.main, words[1:]
    if words[0] == "python":
        main, arguments = MODULES[words[2].rpartition(".")[2]].main, words[3:]  # type: ignore[assignment]
    monkeypatch.setattr(sys, "argv", [words[0], *(word for word in arguments if word not in ("key=value", "..."))])
    code: object = 0
    try:
        main()
    except SystemExit as left:
        code = left.code or 0
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return printed.out


@pytest.mark.parametrize("command", CHECKS, ids=str)
def test_documented_checks_succeed(
    command: Command, home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOME", str(home))
    # Everything that the check needs is here, except for models of the hub.
    own = () if "--elsewhere" in command.words else (f"trainer.policy.model.path={home / 'model'}",)
    out = run_command((*command.words, *own), monkeypatch, capsys)
    assert out.startswith("config ok\n")
    plans = "plan" in command.words or "--plan" in command.words
    assert ("all slots together, on this machine: " in out) == plans


@pytest.mark.parametrize("command", PRINTS, ids=str)
def test_documented_help_and_configuration_are_printed(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    out = run_command(command.words, monkeypatch, capsys)
    if "--cfg" in command.words:
        assert yaml.safe_load(out)["trainer"]["algorithm"]["advantage_estimator"] == "grpo"
    else:
        assert "trainer.algorithm" in out and "eps_clip_low" in out


def test_docs_have_such_commands():
    assert len(CHECKS) >= 4 and len(PRINTS) >= 3
