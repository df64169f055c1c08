from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.entrypoints import doctor
from skyrl_train.entrypoints.doctor import NOTE, OK, PROBLEM, CheckResult, report, run_checks


def named(check: doctor.Check) -> dict[str, CheckResult]:
    return {finding.what: finding for finding in check()}


def test_doctor_answers_in_time_as_json():
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "skyrl_train.entrypoints.cli", "doctor", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert time.monotonic() - start < 15  # the checks take up to 10
    results: list[dict[str, Any]] = json.loads(done.stdout)
    assert {"python", "torch", "versions", "Ray", "ports", "shared memory", "sandbox", "browser", "hub"} <= {
        result["what"] for result in results
    }
    assert {result["state"] for result in results} <= {OK, NOTE, PROBLEM}
    assert all(result["advice"] for result in results if result["state"] == PROBLEM)


def test_failing_and_hanging_checks_become_notes():
    finish = threading.Event()

    def broken() -> Iterator[CheckResult]:
        yield CheckResult("half", OK, "said")
        raise OSError("no such thing")

    def hanging() -> Iterator[CheckResult]:
        finish.wait(30)
        yield CheckResult("late", OK, "said")

    def fine() -> Iterator[CheckResult]:
        yield CheckResult("fine", OK, "said")

    try:
        results = run_checks([broken, hanging, fine], timeout_s=0.5)
    finally:
        finish.set()
    assert [(result.what, result.state) for result in results] == [("broken", NOTE), ("hanging", NOTE), ("fine", OK)]
    assert "OSError: no such thing" in results[0].found
    assert "did not finish within 0.5 s" in results[1].found


def test_report_escapes_and_ends_with_problems():
    lines = list(
        report([CheckResult("disk", PROBLEM, "0 GiB \x1b[31m", "Free some."), CheckResult("hub", OK, "answers", "No.")])
    )
    assert lines == [
        r"problem disk  0 GiB \x1b[31m",
        "              -> Free some.",
        "ok      hub   answers",
        "1 problem: disk",
    ]
    assert list(report([CheckResult("hub", OK, "answers")]))[-1] == "0 problems"


def test_unsatisfied_package_versions_are_named(monkeypatch: pytest.MonkeyPatch):
    version = doctor.importlib.metadata.version
    monkeypatch.setattr(doctor.importlib.metadata, "version", lambda name: "0.1" if name == "torch" else version(name))
    found = named(doctor.packages)["versions"]
    assert found.state == PROBLEM
    assert "torch 0.1 does not satisfy ==2.13.0" in found.found
    monkeypatch.setattr(doctor.importlib.metadata, "version", version)
    assert named(doctor.packages)["versions"].state == OK


def test_accelerators_invisible_to_torch_are_a_problem(monkeypatch: pytest.MonkeyPatch):
    def check(board: str, torch: dict[str, Any] | None) -> dict[str, CheckResult]:
        outputs = {"nvidia-smi": board or None, sys.executable: None if torch is None else json.dumps(torch)}

        def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
            if (output := outputs[command[0]]) is None:
                raise FileNotFoundError(command[0])
            return subprocess.CompletedProcess(command, 0, output)

        monkeypatch.setattr(doctor.subprocess, "run", run)
        return named(doctor.accelerators)

    cuda = {"version": "2.13.0", "cuda": "13.0", "available": True, "nccl": "2.29.7"}
    assert [result.state for result in check("H100, 81559 MiB, 580.1", cuda).values()] == [OK, OK, OK]
    hidden = check("H100, 81559 MiB, 580.1", cuda | {"available": False})["CUDA"]
    assert (hidden.state, "driver is older" in hidden.advice) == (PROBLEM, True)
    on_cpu = check("H100, 81559 MiB, 580.1", {"version": "2.13.0+cpu", "cuda": None, "available": False, "nccl": ""})
    assert "CPU build" in on_cpu["CUDA"].advice
    assert check("", cuda)["accelerators"].state == NOTE
    assert check("", None)["torch"].state == PROBLEM


def test_doctor_names_the_attention_kernel(monkeypatch: pytest.MonkeyPatch):
    found = named(doctor.attention)["attention"]
    has_gpu = torch.cuda.is_available()
    assert has_gpu or (found.state, found.found) == (OK, "scaled dot product attention")

    def on_hopper(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        gpu = "torch.cuda.is_available = lambda: True; torch.cuda.get_device_capability = lambda: (9, 0)"
        source = command[2].replace("import json, torch", f"import json, torch; {gpu}")
        return run([*command[:2], source], capture_output=True, text=True, check=True)

    run = subprocess.run
    monkeypatch.setattr(doctor.subprocess, "run", on_hopper)
    found = named(doctor.attention)["attention"]
    if importlib.util.find_spec("flash_attn") or importlib.util.find_spec("flash_attn_interface"):
        assert (found.state, "FlashAttention-" in found.found) == (OK, True)
    else:
        assert (found.state, found.found) == (NOTE, "torch's variable-length flash attention")
        assert "--extra flash-attn" in found.advice


def test_unresolvable_host_name_is_a_problem(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(doctor.socket, "gethostname", lambda: "nowhere.invalid")
    found = named(doctor.ports)["ports"]
    assert (found.state, "/etc/hosts" in found.advice) == (PROBLEM, True)


def test_missing_or_denied_sandbox_is_a_note(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    program = tmp_path / "bwrap"
    program.write_text("#!/bin/sh\necho 'bwrap: No permissions' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = named(doctor.sandbox)["sandbox"]
    assert (found.state, found.found) == (NOTE, "bwrap: No permissions")
    program.unlink()
    assert "not installed" in named(doctor.sandbox)["sandbox"].found


def test_unreachable_and_offline_hub_are_notes(monkeypatch: pytest.MonkeyPatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    found = named(doctor.hub)["hub"]
    assert (found.state, "HF_ENDPOINT" in found.advice) == (NOTE, True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE" in named(doctor.hub)["hub"].found


def test_other_arguments_are_refused(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        doctor.main(["--yaml"])
    assert left.value.code == 2
    assert "--json" in capsys.readouterr().err
