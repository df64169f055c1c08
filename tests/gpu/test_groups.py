"""NCCL's connections and transfers end by their deadlines. A subprocess is used, as NCCL reads its deadline once."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.gpu_check import groups
from tests.gpu_check.report import Report, Setting

pytestmark = pytest.mark.gpu


def check(rows: Path) -> list[str]:
    report = Report(rows)
    groups.run(Setting("cuda", 120.0), report)
    return [row.line() for row in report.rows if not row.ok]


def test_process_groups_end_by_their_deadlines(tmp_path: Path):
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        assert pool.submit(check, tmp_path / "rows.jsonl").result(timeout=200) == []
