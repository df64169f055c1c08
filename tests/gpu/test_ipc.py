"""The `ipc` route on a device: 200 syncs between two processes that both copy late, with constant memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.gpu_check import ipc
from tests.gpu_check.report import Report, Setting

pytestmark = pytest.mark.gpu


def test_syncs_are_correct_with_late_copies(tmp_path: Path):
    report = Report(tmp_path / "rows.jsonl")
    ipc.run(Setting("cuda", 300.0), report)
    assert [row.line() for row in report.rows if not row.ok] == []
