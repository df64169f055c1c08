"""Replaced files: behavior on full disks and with links of other users."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from skyrl_train.atomic_files import atomic_write, atomic_write_text, open_lock
from skyrl_train.config.hydra import load_preset, save_resolved
from skyrl_train.errors import StorageError
from skyrl_train.log_rotation import rotate
from skyrl_train.report.jsonl import JsonlTracker
from skyrl_train.storage.remote_folder import RemoteFolder
from tests.support.disk_limits import limit_file_size


def test_replaced_file_is_old_or_complete(tmp_path: Path):
    file = tmp_path / "run.json"
    atomic_write_text(file, "old")
    with suppress(KeyError), atomic_write(file) as handle:
        handle.write(b"half of the n")
        assert file.read_text() == "old"
        raise KeyError
    assert file.read_text() == "old"
    atomic_write_text(file, "new")
    assert file.read_text() == "new" and [*tmp_path.iterdir()] == [file]


def test_leftover_of_killed_process_is_replaced(tmp_path: Path):
    (tmp_path / ".run.json.new").write_text("what a killed process left, and longer than what comes")
    atomic_write_text(tmp_path / "run.json", "new")
    assert (tmp_path / "run.json").read_text() == "new" and len([*tmp_path.iterdir()]) == 1


def test_full_disk_leaves_no_temporary_file(tmp_path: Path):
    stored = RemoteFolder(f"file://{tmp_path}/there")
    stored.write("small", b"old")
    (tmp_path / "source").write_bytes(b"x" * 10_000)
    stored.put("large", tmp_path / "source")
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)))
    before = sorted(tmp_path.rglob("*"))
    with limit_file_size(None, 100):
        for write in (
            lambda: atomic_write_text(tmp_path / "text", "x" * 1000),
            lambda: save_resolved(load_preset(), tmp_path / "config.yaml"),
            lambda: stored.write("small", b"x" * 1000),
            lambda: stored.write_if_version("new", b"x" * 1000, None),
            lambda: stored.put("other", tmp_path / "source"),
            lambda: stored.get("large", tmp_path / "copy"),
            lambda: JsonlTracker(tmp_path).begin(500, 1000),
        ):
            with suppress(OSError, StorageError):  # JSONL files keep their lines, with a warning
                write()
            assert sorted(tmp_path.rglob("*")) == before
    assert stored.read("small") == b"old"


def test_temporary_file_is_never_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    victim, folder = tmp_path / "victim", tmp_path / "run"
    victim.write_text("precious")
    folder.mkdir()
    monkeypatch.setattr("skyrl_train.log_rotation.MAX_LOG_BYTES", 1)
    (folder / "driver.log").write_text("lines")
    (tmp_path / "source").write_text("source")
    stored = RemoteFolder(f"file://{folder}")
    for name in (".a.new", ".config.yaml.new", ".driver.log.1.new", "driver.log.new", ".b.new"):
        (folder / name).symlink_to(victim)
    atomic_write_text(folder / "a", "text")
    save_resolved(load_preset(), folder / "config.yaml")
    rotate(folder / "driver.log")
    stored.write("b", b"text")
    stored.put("b", tmp_path / "source")
    assert victim.read_text() == "precious"
    assert not (folder / "a").is_symlink() and (folder / "driver.log.1").read_text() == "lines"
    (folder / ".lock").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic links"):
        open_lock(folder / ".lock")
    assert victim.read_text() == "precious"
