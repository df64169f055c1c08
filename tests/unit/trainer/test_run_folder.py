from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import CheckpointMismatch, RunFolderError
from skyrl_train.trainer.checkpoints import CheckpointStore
from skyrl_train.trainer.run_folder import RunFolder, check_same_run

IDENTITY: dict[str, Any] = {"run_name": "a", "model": "tiny", "train_data": "f00d"}


def save_one(path: Path, step: int) -> None:
    checkpoints = CheckpointStore(path)
    checkpoints.begin(step)
    checkpoints.commit(step, {})


@contextmanager
def unprivileged() -> Iterator[None]:
    """Run the body without root's permission to write everywhere."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_same_run_may_enter_its_folder_again(tmp_path: Path):
    for allow_resume in (False, True):
        with RunFolder(tmp_path / "runs" / "a", IDENTITY, allow_resume) as run:
            assert (run.path / "run.json").is_file()


@pytest.mark.fault("F06")
def test_lock_is_released_when_its_holder_is_killed(tmp_path: Path):
    code = (
        "import sys, time; from pathlib import Path; from skyrl_train.trainer.run_folder import RunFolder\n"
        f"with RunFolder(Path(sys.argv[1]), {IDENTITY!r}, True): print('held', flush=True); time.sleep(60)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(RunFolderError, match=rf"in use by process {holder.pid} on "):
            RunFolder(tmp_path, IDENTITY, True).__enter__()
    finally:
        holder.kill()
        holder.communicate()
    with RunFolder(tmp_path, IDENTITY, True):
        pass


@pytest.mark.fault("F06")
def test_unwritable_folder_is_rejected(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir(mode=0o555)
    with unprivileged(), pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder(folder, IDENTITY, False).__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(RunFolderError, match="cannot be written"):
        RunFolder(tmp_path / "file" / "run", IDENTITY, False).__enter__()


@pytest.mark.fault("F06")
@pytest.mark.parametrize("allow_resume", [True, False])
def test_other_run_is_rejected_with_its_differences(tmp_path: Path, allow_resume: bool):
    with RunFolder(tmp_path, IDENTITY, False):
        pass
    with pytest.raises(
        RunFolderError, match=r"another run: trainer\.run_name was .a., is .b.; data\.train_data had other rows"
    ):
        RunFolder(tmp_path, {**IDENTITY, "train_data": "beef", "run_name": "b"}, allow_resume).__enter__()
    with RunFolder(tmp_path, IDENTITY, False):
        pass


@pytest.mark.fault("F06")
def test_other_run_is_rejected_before_anything_starts(tmp_path: Path):
    adapted = {**IDENTITY, "adapters": {"rank": 8, "alpha": 16}}
    known = {key: value for key, value in IDENTITY.items() if key != "train_data"}
    check_same_run(tmp_path, known)
    with RunFolder(tmp_path, IDENTITY, False):
        pass
    check_same_run(tmp_path, known)
    check_same_run(tmp_path, known | {"model": "large"})  # the model may have moved
    with pytest.raises(RunFolderError, match=r"trainer\.policy\.model\.lora was None, is \{'rank': 8"):
        check_same_run(tmp_path, adapted)
    with RunFolder(tmp_path / "adapted", adapted, False):
        pass
    with pytest.raises(RunFolderError, match=r"trainer\.policy\.model\.lora\.rank was 8, is 4\. "):
        check_same_run(tmp_path / "adapted", known | {"adapters": {"rank": 4, "alpha": 16}})
    with pytest.raises(RunFolderError, match=r"trainer\.policy\.model\.lora was \{"):
        check_same_run(tmp_path / "adapted", known)


@pytest.mark.fault("F06")
def test_checkpoints_are_only_continued_when_resuming(tmp_path: Path):
    with RunFolder(tmp_path, IDENTITY, False):
        save_one(tmp_path, 3)
    with pytest.raises(RunFolderError, match=r"steps \[3\].*resume_mode"):
        RunFolder(tmp_path, IDENTITY, False).__enter__()
    with RunFolder(tmp_path, IDENTITY, True):
        pass


@pytest.mark.fault("F06")
def test_model_may_move_once_there_are_checkpoints(tmp_path: Path):
    with RunFolder(tmp_path, IDENTITY, True):
        pass
    with pytest.raises(RunFolderError, match=r"trainer\.policy\.model\.path was 'tiny', is 'large'"):
        RunFolder(tmp_path, IDENTITY | {"model": "large"}, True).__enter__()
    save_one(tmp_path, 3)
    with RunFolder(tmp_path, IDENTITY | {"model": "large"}, True):
        pass


@pytest.mark.parametrize("before", [None, b"right", b"damaged \xff\x00"])
def test_rejected_checkpoint_restores_the_folder(before: bytes | None, tmp_path: Path):
    if before is not None:
        with RunFolder(tmp_path, IDENTITY, True):
            (tmp_path / "config.yaml").write_bytes(before)
            save_one(tmp_path, 3)

    def resume_other_run() -> None:
        with RunFolder(tmp_path, IDENTITY | {"model": "large"}, True) as run, run.restored_on_mismatch():
            (tmp_path / "config.yaml").write_text("wrong")
            raise CheckpointMismatch("from another model")

    with pytest.raises(CheckpointMismatch):
        resume_other_run()
    assert (tmp_path / "config.yaml").exists() == (before is not None)
    if before is not None:
        assert (tmp_path / "config.yaml").read_bytes() == before
        assert json.loads((tmp_path / "run.json").read_text())["model"] == "tiny"
    with RunFolder(tmp_path, IDENTITY, True):
        pass


@pytest.mark.fault("F06")
@pytest.mark.parametrize("allow_resume", [True, False])
def test_checkpoints_without_identity_are_rejected(tmp_path: Path, allow_resume: bool):
    save_one(tmp_path, 3)
    with pytest.raises(RunFolderError, match=r"no run\.json"):
        RunFolder(tmp_path, IDENTITY, allow_resume).__enter__()


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_unreadable_identity_is_rejected(tmp_path: Path, text: str):
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(RunFolderError, match=r"run\.json"):
        RunFolder(tmp_path, IDENTITY, True).__enter__()
