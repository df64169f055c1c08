"""skyrl-train engines: the target number that it writes, and refusals."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_train.config.hydra import save_resolved
from skyrl_train.config.schema import Config
from skyrl_train.engines.target_count import ENGINES_FILE, read_target, target_file_version, write_target
from skyrl_train.entrypoints.engines import main
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.engines import init_target_file
from skyrl_train.trainer.run_folder import RunFolder
from tests.support.doc_pages import Command, find_commands


@contextmanager
def running_run(folder: Path, *, apart: bool = True, engines: int = 2, local: bool = True) -> Iterator[None]:
    cfg = Config()
    cfg.trainer.placement.colocate_all = not apart
    cfg.generator.num_inference_engines = engines
    cfg.generator.run_engines_locally = local
    with RunFolder(folder, {}, allow_resume=True):
        save_resolved(cfg, folder / "config.yaml")
        init_target_file(cfg, folder)
        yield


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    return capsys.readouterr().err


def test_target_count_is_written_to_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with running_run(tmp_path):
        before = target_file_version(tmp_path)
        main(["add", "3", str(tmp_path)])
        assert read_target(tmp_path) == 5
        assert target_file_version(tmp_path) != before
        main(["remove", "1", str(tmp_path)])
    assert read_target(tmp_path) == 4
    assert capsys.readouterr().out.splitlines()[1].startswith("Target number of engines: 5 -> 4.")
    with running_run(tmp_path):
        assert read_target(tmp_path) == 2, "a resumed run has the number of its configuration"


def test_concurrent_changes_add_up(tmp_path: Path):
    command = [sys.executable, "-m", "skyrl_train.entrypoints.cli", "engines", "add", "1", str(tmp_path)]
    with running_run(tmp_path):
        processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for _ in range(4)]
        assert [process.wait(60) for process in processes] == [0] * 4
    assert read_target(tmp_path) == 6


def test_last_engine_cannot_be_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with running_run(tmp_path):
        error = refused(capsys, "remove", "2", str(tmp_path))
    assert "remove 2: the target is 2 engines, and a run needs at least one. Remove at most 1." in error
    assert read_target(tmp_path) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"apart": False}, "(trainer.placement.colocate_all=true). Stop the run and start it again"),
        (
            {"local": False},
            "(generator.run_engines_locally=false), which the run neither starts nor stops. Stop the run, change",
        ),
    ],
)
def test_fixed_engine_count_is_explained(
    options: dict[str, bool], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    write_target(tmp_path, 7)  # of an earlier attempt
    with running_run(tmp_path, **options):  # type: ignore[arg-type]
        assert not (tmp_path / ENGINES_FILE).exists()
        assert message in refused(capsys, "add", "1", str(tmp_path))


def test_folders_without_running_run_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert "is not a run's folder: it has no config.yaml" in refused(capsys, "add", "1", str(tmp_path))
    with running_run(tmp_path):
        pass
    assert "no run is running in" in refused(capsys, "add", "1", str(tmp_path))
    with running_run(tmp_path):
        (tmp_path / ENGINES_FILE).unlink()
        assert f"has no {ENGINES_FILE}: it is still starting" in refused(capsys, "add", "1", str(tmp_path))


@pytest.mark.parametrize(
    "arguments", [(), ("add", "0", "f"), ("add", "-1", "f"), ("add", "two", "f"), ("set", "2", "f")]
)
def test_invalid_arguments_are_refused(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]):
    assert "Give 'add N FOLDER' or 'remove N FOLDER'" in refused(capsys, *arguments)


@pytest.mark.parametrize(
    "text", ["", "3", "[]", "{", '{"num_inference_engines": 0}', '{"num_inference_engines": true}']
)
def test_invalid_target_file_is_refused(text: str, tmp_path: Path):
    (tmp_path / ENGINES_FILE).write_text(text)
    message = r'Write \{"num_inference_engines": N\}, where N is an integer of at least 1\.'
    with pytest.raises(ConfigError, match=message):
        read_target(tmp_path)


@pytest.fixture
def by_hand() -> Callable[[Path, int], None]:
    def write(folder: Path, number: int) -> None:
        (folder / ENGINES_FILE).write_text(json.dumps({"num_inference_engines": number}))

    return write


def test_target_file_may_be_edited_by_hand(by_hand: Callable[[Path, int], None], tmp_path: Path):
    by_hand(tmp_path, 3)
    assert read_target(tmp_path) == 3


@pytest.mark.parametrize("command", find_commands("skyrl-train engines "), ids=str)
def test_documented_engine_commands_work(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    run = tmp_path / "ckpts" / "my_run"
    run.mkdir(parents=True)
    action, number = command.words[2:4]
    with running_run(run):
        main([os.path.expanduser(word) for word in command.words[2:]])
    assert read_target(run) == 2 + (int(number) if action == "add" else -int(number))
