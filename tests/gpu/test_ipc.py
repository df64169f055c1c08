"""The `ipc` route on a device: 200 syncs between two processes that both copy late, and memory that does not grow."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_check import ipc
from tests.gpu_check.report import Report, Setting

pytestmark = pytest.mark.gpu


def test_no_sync_goes_wrong_although_both_ends_copy_late(tmp_path: Path):
    report = Report(tmp_path / "rows.jsonl")
    ipc.run(Setting("cuda", 300.0), report)
    assert [row.line() for row in report.rows if not row.ok] == []
