"""The page is what viewer/ makes of itself, or the last that it made."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.report import page_files


@pytest.mark.parametrize("script", ["#!/bin/sh\necho no network\nexit 1\n", "#!/nowhere/sh\n"])
def test_a_page_that_cannot_be_built_again_is_shown_as_it_is(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    folder = tmp_path / "page"
    for name, value in {
        "CHECKOUT": tmp_path,
        "FOLDER": folder,
        "SCRIPT": folder / "page.js",
        "STYLE": folder / "page.css",
    }.items():
        monkeypatch.setattr(page_files, name, value)
    for path in ("scripts/viewer", "bin/npm"):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_text(script)
        (tmp_path / path).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    with pytest.raises(ConfigError, match=r"is not built; .*scripts/viewer"):
        page_files.page()
    page_files.SCRIPT.write_text("an_older_one()")
    page_files.STYLE.write_text("")
    (tmp_path / "viewer" / "src").mkdir(parents=True)
    newer = tmp_path / "viewer" / "src" / "main.tsx"
    newer.write_text("")
    os.utime(newer, (2e9, 2e9))
    with caplog.at_level(logging.WARNING):
        assert page_files._old() and "an_older_one()" in page_files.page()
    assert "is an older one than viewer/" in caplog.text
