"""Stale files of SGLang engines in folders that every user can write to. These tests need no SGLang."""

from __future__ import annotations

import os
import tempfile
import uuid
from pathlib import Path

import pytest

from skyrl_train.engines.sglang.processes import FOLDER_PREFIX, LOCK_FILE, remove_stale_files


def test_files_named_by_other_users_are_not_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    instance = uuid.uuid4().hex
    folder, shared = tmp_path / f"{FOLDER_PREFIX}evil", Path(f"/dev/shm/sglang_loads_{instance}")
    folder.mkdir()
    (folder / LOCK_FILE).write_text(instance)
    shared.touch()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "getuid", lambda: folder.stat().st_uid + 1)
            remove_stale_files()
        assert folder.exists() and shared.exists()
        remove_stale_files()
        assert not folder.exists() and not shared.exists()
    finally:
        shared.unlink(missing_ok=True)
