"""`scripts/gpu_check` on a CPU: every part runs, results survive an interruption, and failures are reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.errors import ConfigError
from skyrl_train.models.flash_attention import AttentionFeatures, FlashKernel
from tests.gpu_check import attention, training
from tests.gpu_check.campaign import judge_result
from tests.gpu_check.parts import PARTS
from tests.gpu_check.report import Report, Row, Setting, read_rows

SCRIPT = Path(__file__).parents[3] / "scripts" / "gpu_check"
CHEAP = ["attention", "ipc"]
"""The other parts take longer, and most start engines or import everything."""


def check(file: Path, *arguments: str, expect: int = 0) -> str:
    command = [str(SCRIPT), "--device", "cpu", "--json", str(file), *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=560, env=os.environ | {"PYTHON": sys.executable}
    )
    assert done.returncode == expect, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


def numbers(names: list[str]) -> list[str]:
    return [str(number) for number, part in enumerate(PARTS, 1) if part.name in names]


def states(file: Path) -> dict[str, str]:
    return {name: result["state"] for name, result in json.loads(file.read_text()).items()}


@pytest.mark.slow
def test_cheap_parts_pass_and_run_only_once(tmp_path: Path):
    file = tmp_path / "results" / "gpu_check.json"
    output = check(file, "--part", *numbers(CHEAP))
    assert states(file) == {f"cpu/{name}": "passed" for name in CHEAP}, output
    results: dict[str, Any] = json.loads(file.read_text())
    assert all(result["rows"] for result in results.values())
    again = check(file, "--minutes", "0")
    assert [part.name for part in PARTS if f" {part.name}: no time left" not in again] == CHEAP
    table = file.with_suffix(".md").read_text()
    assert "| 4 ipc | failed syncs of 200 | 0 | 0 |" in table


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("part", [part.name for part in PARTS if part.name not in CHEAP])
def test_engine_part_passes_or_names_requirement(part: str, tmp_path: Path):
    file = tmp_path / "gpu_check.json"
    output = check(file, "--part", *numbers([part]))
    assert states(file)[f"cpu/{part}"] in ("passed", "missing"), output


@pytest.mark.parametrize(
    ("status", "ok", "state", "reason"),
    [
        (0, True, "passed", ""),
        (0, False, "failed", "1 of 2 results do not meet their requirement"),
        (1, True, "failed", "ValueError: no kernel; see part.log"),
        (3, True, "missing", "ValueError: no kernel"),
        (None, True, "cut off", "after 5 s; see part.log for stack traces and output"),
    ],
)
def test_exit_status_decides_state_and_reason(status: int | None, ok: bool, state: str, reason: str, tmp_path: Path):
    log = tmp_path / "part.log"
    log.write_text("Traceback\nValueError: no kernel\n")
    assert judge_result(status, [Row("a", "1"), Row("b", "2", "1", ok)], log, 5.0) == (state, reason)


def test_rejected_kernel_does_not_end_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: Any) -> Any:
        raise ValueError("no backward pass")

    kernels = [FlashKernel("broken", fail), FlashKernel("PyTorch's", fail, is_verified=True)]
    monkeypatch.setattr(attention, "find_flash_kernels", lambda *_: kernels)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    report = Report(tmp_path / "rows")
    usable = attention.usable_kernels(AttentionFeatures(64), "cpu", torch.bfloat16, report, "sinks")
    assert [kernel.name for kernel in usable] == ["PyTorch's"]
    (row,) = report.rows
    assert row.ok and row.value == "not used: it failed with ValueError: no backward pass"


def test_variant_without_compiler_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def measure(path: str, device: str, variant: training.Variant, *_: Any) -> tuple[float, float]:
        if variant.compiled:
            raise ConfigError("no compiler")
        return 2.0, 1.0

    monkeypatch.setattr(training, "measure", measure)
    report = Report(tmp_path / "rows")
    assert training.measure_variants(Setting("cpu", 60.0), report, 64) == 2.0
    values = {row.what: row.value for row in report.rows}
    assert values["activations kept, compiled"] == "left out: no compiler"
    assert values["activations recomputed"] == "2 tok/s"


def test_bounds_reject_large_values_and_nan(tmp_path: Path):
    report = Report(tmp_path / "rows")
    report.at_most("a", 1.0, 1.0)
    report.at_most("b", float("nan"), 1.0)
    report.at_least("c", 1.0, 2.0)
    report.at_least("d", float("nan"), 2.0)
    assert [row.ok for row in read_rows(tmp_path / "rows")] == [True, False, False, False]
