"""Stale files of SGLang engines in folders that every user can write to. These tests need no SGLang."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from skyrl_train.engines.sglang.processes import FOLDER_PREFIX, LOCK_FILE, remove_stale_files


def test_folders_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = tmp_path / f"{FOLDER_PREFIX}stale"
    folder.mkdir()
    (folder / LOCK_FILE).touch()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
        remove_stale_files()
    assert folder.exists()
    remove_stale_files()
    assert not folder.exists()
