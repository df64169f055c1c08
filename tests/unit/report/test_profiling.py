from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.report.profiling import MemorySnapshotRecorder, peak_memory

SCRIPT = """
from skyrl_train.report.profiling import peak_memory
before = peak_memory("cpu")["peak_rss_gib"]
held = bytearray(b"1" * (256 << 20))
del held
print(peak_memory("cpu")["peak_rss_gib"] - before)
"""


def test_peak_memory_stays_after_release():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=True)
    assert 0.2 < float(done.stdout) < 0.6  # the copy exists twice for a moment


def test_cpu_process_reports_host_memory_only():
    assert peak_memory("cpu").keys() == {"peak_rss_gib"}


class Allocator:
    """A double of torch.cuda.memory that records its calls."""

    def __init__(self) -> None:
        self.enabled: list[Any] = []
        self.writes = 0

    def _record_memory_history(self, enabled: str | None = "all", **options: Any) -> None:
        self.enabled.append(enabled)

    def _dump_snapshot(self, file: str) -> None:
        self.writes += 1
        Path(file).write_text(f"snapshot {self.writes}")


def test_memory_snapshot_replaces_one_file(tmp_path: Path):
    allocator = Allocator()
    record = MemorySnapshotRecorder(tmp_path / "snapshots" / "policy_rank_0.pickle", allocator)
    assert allocator.enabled == ["all"]
    record.write()
    record.write()
    (file,) = (tmp_path / "snapshots").iterdir()
    assert (file.name, file.read_text()) == ("policy_rank_0.pickle", "snapshot 2")


def test_unwritable_snapshot_logs_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "file").touch()
    allocator = Allocator()
    record = MemorySnapshotRecorder(tmp_path / "file" / "policy_rank_0.pickle", allocator)
    record.write()
    record.write()
    assert caplog.text.count("trainer.policy.record_memory") == 1
    assert allocator.enabled == ["all", None]
