"""Log files: archived attempts, rotation of open files, and failures that must not end a run."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import BinaryIO

import pytest

from skyrl_train import log_rotation
from skyrl_train.log_rotation import LogRotator, archive_previous_attempt, rotate
from skyrl_train.report.logs import run_logs


def test_attempts_are_kept_in_their_order(tmp_path: Path):
    folder = tmp_path / "logs"
    for attempt in range(3):
        archive_previous_attempt(folder)
        (folder / "driver.log").write_text(str(attempt))
    archive_previous_attempt(folder)
    archive_previous_attempt(folder)
    files = {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.log")}
    assert files == {f"attempt_{number + 1}/driver.log": str(number) for number in range(3)}


def test_open_file_is_rotated_with_backups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_rotation, "MAX_LOG_BYTES", 100)
    path = tmp_path / "engine_0.log"
    with path.open("ab", buffering=0) as file:
        for letter in b"abcd":
            file.write(bytes([letter]) * 99)
            rotate(path)
            file.write(bytes([letter]))
            rotate(path)
        file.write(b"on")
    assert path.read_bytes() == b"on"
    assert {part.name: part.read_bytes()[:1] for part in tmp_path.glob("*.log.*")} == {
        "engine_0.log.1": b"d", "engine_0.log.2": b"c",
    }  # fmt: skip


def test_files_are_watched_until_the_block_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_rotation, "MAX_LOG_BYTES", 100)
    monkeypatch.setattr(log_rotation, "POLL_INTERVAL_S", 0.01)
    path = tmp_path / "a.log"
    with LogRotator(path, tmp_path / "never.log"):
        path.write_bytes(b"x" * 100)
        deadline = time.monotonic() + 20
        while path.stat().st_size:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert (tmp_path / "a.log.1").read_bytes() == b"x" * 100


needs_full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
PRINTER = """
import os, subprocess, sys
from contextlib import suppress
from pathlib import Path
from skyrl_train.cluster.actor_logs import redirect_output

redirect_output(Path(sys.argv[1]), "engine 0")
print("\\udc80 by Python", os.environ["A_TOKEN"])
with suppress(OSError):
    os.write(1, b"by C\\n")
subprocess.run(["echo", "by a child"])
print("to stderr \\x1b[2J\\x07 and a\\ttab", file=sys.stderr)
"""


def run_printer(path: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"A_TOKEN": "0123456789abcdef"}
    return subprocess.run(
        [sys.executable, "-c", PRINTER, path],
        capture_output=True,
        text=True,
        errors="replace",
        env=env | {"PYTHONIOENCODING": "utf-8:surrogateescape"},
        timeout=120,
        check=True,
    )


def test_output_of_process_and_children_is_redirected(tmp_path: Path):
    path = tmp_path / "engine_0.log"
    for _ in range(2):
        done = run_printer(str(path))
        assert done.stdout == done.stderr == ""
    lines = path.read_text().splitlines()
    assert lines[0].startswith("--- engine 0, ") and lines[:5][1:] == lines[6:]
    assert lines[1:5] == ["\\udc80 by Python <A_TOKEN>", "by C", "by a child", "to stderr \\x1b[2J\\x07 and a\ttab"]


@needs_full_disk
def test_full_disk_does_not_end_process():
    run_printer("/dev/full")


def test_missing_folder_leaves_output_unchanged(tmp_path: Path):
    assert "by a child" in run_printer(str(tmp_path / "elsewhere" / "engine_0.log")).stdout


def test_unwritable_folder_disables_logs_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "logs").write_text("")
    with run_logs(tmp_path):
        logging.getLogger("skyrl_train").warning("said")
    assert "This run has no logs" in capsys.readouterr().err


def test_logging_setup_is_restored(tmp_path: Path):
    root, ours = logging.getLogger(), logging.getLogger("skyrl_train")
    before = root.handlers[:], ours.level, root.level
    with pytest.raises(ZeroDivisionError) as raised, run_logs(tmp_path):
        root.handlers[len(before[0])].level // 0
    assert (root.handlers, ours.level, root.level) == before
    assert raised.value.__notes__ == [f"The traceback is in {tmp_path / 'logs' / 'driver.log'}."]
    assert "ZeroDivisionError: integer division" in (tmp_path / "logs" / "driver.log").read_text()


LIBRARY_AND_USER = """
import json, logging, sys, warnings
from pathlib import Path
from skyrl_train.report.logs import run_logs

def in_a_library():
    code = compile("import logging; logging.getLogger('urllib3').warning('of a library')", json.__file__, "exec")
    exec(code)

with run_logs(Path(sys.argv[1])):
    in_a_library()
    warnings.warn_explicit("of a library, too", UserWarning, json.__file__, 1)
    warnings.warn("of a person")
    logging.getLogger("my.module").warning("of the user")
    logging.getLogger("skyrl_train.x").warning("of ours")
    logging.getLogger("skyrl_train.x").warning("of a server: %s", "\\x1b[2J")
    logging.getLogger("skyrl_train.x").info("of ours, to be looked up")
"""


def test_library_warnings_go_to_file_only(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", LIBRARY_AND_USER, str(tmp_path)], capture_output=True, text=True, timeout=120, check=True
    )
    assert [line for line in done.stderr.splitlines() if line.strip() and line[0] != " "] == [
        "<string>:13: UserWarning: of a person",
        "of the user",
        "of ours",
        r"of a server: \x1b[2J",
    ]
    text = (tmp_path / "logs" / "driver.log").read_text()
    for message in (
        "of a library",
        "UserWarning: of a library, too",
        "of the user",
        "of ours",
        "of ours, to be looked up",
        r"of a server: \x1b[2J",
    ):
        assert f": {message}\n" in text


@needs_full_disk
def test_full_disk_leaves_errors_without_log_note(tmp_path: Path):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "driver.log").symlink_to("/dev/full")
    with run_logs(tmp_path):
        logging.getLogger("skyrl_train").warning("lost")
    with pytest.raises(ValueError, match="the cause") as raised, run_logs(tmp_path):
        raise ValueError("the cause")
    assert not hasattr(raised.value, "__notes__") and raised.value.__context__ is None


def test_concurrent_runs_restore_logging_setup(tmp_path: Path):
    root, ours, messages = logging.getLogger(), logging.getLogger("skyrl_train"), []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    root.addHandler(handler)
    level = root.level
    root.setLevel(logging.WARNING)  # the default of a program, whatever ran before in this process
    before = root.handlers[:], ours.level
    try:
        first, second = run_logs(tmp_path / "a"), run_logs(tmp_path / "b")
        first.__enter__()
        second.__enter__()
        ours.info("unheard of before")
        first.__exit__(None, None, None)
        ours.info("of the second")
        ours.warning("of both")
        second.__exit__(None, None, None)
        assert (root.handlers, ours.level) == before and messages == ["of both"] and not handler.filters
    finally:
        root.setLevel(level)
        root.removeHandler(handler)
    assert "of the second" not in (tmp_path / "a" / "logs" / "driver.log").read_text()
    assert "of the second" in (tmp_path / "b" / "logs" / "driver.log").read_text()


def test_failed_copy_keeps_earlier_backups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(log_rotation, "MAX_LOG_BYTES", 100)
    path = tmp_path / "a.log"
    for letter in "abc":
        path.write_text(letter * 100)
        rotate(path)
    monkeypatch.setattr(log_rotation.shutil, "copyfileobj", _copy_half)
    path.write_text("d" * 100)
    rotate(path)
    assert {part.name: part.read_text()[0] for part in tmp_path.iterdir()} == {
        "a.log": "d",
        "a.log.1": "c",
        "a.log.2": "b",
    }


def _copy_half(source: BinaryIO, target: BinaryIO) -> None:
    target.write(b"half")
    raise OSError("no space")
