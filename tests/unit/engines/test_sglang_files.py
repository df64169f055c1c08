"""What SGLang engines leave in folders that every user may write to. Needs no SGLang."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from skyrl_train.engines.sglang import host


def test_folders_of_other_users_choose_no_files_to_delete(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    removed: list[Path] = []
    monkeypatch.setattr(host, "_remove", removed.append)
    folder = tmp_path / f"{host.FOLDER_PREFIX}evil"
    folder.mkdir()
    (folder / host.LOCK_FILE).write_text("/../../home/me/")
    monkeypatch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
    host._remove_stale_files()
    assert removed == []
    monkeypatch.undo()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(host, "_remove", removed.append)
    host._remove_stale_files()
    assert removed == [folder]
