"""Reading runs from their files: metrics, diagnosis, status, and differences between configurations."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.errors import ConfigError
from skyrl_train.report.attempts import ATTEMPTS_FILE
from skyrl_train.report.diagnosis import DIAGNOSIS_FILE
from skyrl_train.report.jsonl import METRICS_FILE
from skyrl_train.report.metric_catalog import metric_of
from skyrl_train.report.run_reader import RunReader, differing_keys, open_runs, overview
from skyrl_train.trainer.run_folder import RunFolder
from tests.support.synthetic_run_folders import synthetic_metrics, write_metrics, write_synthetic_run

OTHERS_LOCK = "process 1 on another-machine\n"


def active_run(folder: Path) -> RunFolder:
    return RunFolder(folder, {"project_name": "a project", "run_name": "a run"}, allow_resume=True)


def state_of(folder: Path) -> str:
    state: str = RunReader(folder).summary()["state"]
    return state


def test_summary_has_name_and_progress(tmp_path: Path):
    run = RunReader(write_synthetic_run(tmp_path, 3, total=8, name="first"))
    summary = run.summary()
    summary.pop("details")
    assert summary == {
        "name": "first",
        "folder": str(tmp_path),
        "project": "a project",
        "step": 3,
        "total_steps": 8,
        "state": "failed",
        "has_rollouts": True,
    }


def test_details_have_attempts_best_score_and_markers(tmp_path: Path):
    rows = [synthetic_metrics(step, **({f"eval/{name}/avg_score": score} if score else {})) for step, name, score in (
        (1, "a", 0.25), (2, "a", 0.75), (3, "a", 0.5), (4, "b", 0.0),
    )]  # fmt: skip
    write_metrics(tmp_path, rows, 9)
    lines = [json.loads(line) | {"time": 100.0 * step} for step, line in enumerate(read_lines(tmp_path), 1)]
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"trainer": {"algorithm": {"advantage_estimator": "grpo"}}, "data": {"train_data": ["/a/b.jsonl"]}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "run.json").write_text('{"model": "org/model"}')
    (tmp_path / "global_step_2").mkdir()
    (tmp_path / "global_step_x").mkdir()
    events: list[dict[str, Any]] = [
        {"event": "start", "time": 50},
        {"event": "start", "time": 250},  # the first attempt was killed after step 2
        {"event": "hardware", "time": 260, "device": "cpu", "slots": 2, "nodes": 1, "accelerators": []},
        {"event": "end", "time": 450, "error": "WorkerDied: rank 1"},
    ]
    (tmp_path / ATTEMPTS_FILE).write_text("".join(json.dumps(event) + "\n" for event in events))
    (tmp_path / ".lock").write_text(OTHERS_LOCK)
    summary = RunReader(tmp_path).summary()
    assert summary["state"] == "failed", "its end was recorded, so that fresh metrics do not count"
    details = summary["details"]
    assert details["best"] == {"source": "a", "score": 0.75, "step": 2, "first": 0.25}
    assert (details["started"], details["seconds"], details["attempts"]) == (50.0, 150.0 + 200.0, 2)
    assert details["failure"] == "WorkerDied: rank 1"
    assert (details["checkpoints"], details["resumes"]) == ([2], [2])
    assert details["hardware"] == {"device": "cpu", "slots": 2, "nodes": 1, "accelerators": []}
    assert details["kind"] == "rl"
    assert (details["model"], details["train_data"]) == ("org/model", ["/a/b.jsonl"])
    assert details["settings"] == {"trainer.algorithm.advantage_estimator": "grpo"}


def test_details_of_run_without_attempts(tmp_path: Path):
    write_metrics(tmp_path, [synthetic_metrics(1)], 1)
    details = RunReader(tmp_path).summary()["details"]
    assert (details["attempts"], details["seconds"], details["failure"], details["best"]) == (0, 0.0, "", None)
    assert details["hardware"] == {} and details["started"] > 1e9


def test_supervised_and_evaluation_runs_are_recognized(tmp_path: Path):
    write_metrics(tmp_path / "a", [synthetic_metrics(1, **{"sft/loss": 2.0})], 1)
    write_metrics(tmp_path / "evaluation", [{"eval/all/avg_score": 0.5}], 1)
    kinds = [RunReader(tmp_path / name).summary()["details"]["kind"] for name in ("a", "evaluation")]
    assert kinds == ["sft", "evaluation"]


def test_killed_attempt_is_reported_as_failure(tmp_path: Path):
    write_synthetic_run(tmp_path, 3, total=8, rollouts=0)
    lines = (tmp_path / ATTEMPTS_FILE).read_text().splitlines(keepends=True)
    (tmp_path / ATTEMPTS_FILE).write_text(lines[0])
    summary = RunReader(tmp_path).summary()
    assert summary["state"] == "failed" and "it was killed" in summary["details"]["failure"]


def read_lines(folder: Path) -> list[str]:
    return (folder / METRICS_FILE).read_text().splitlines()


def test_run_is_running_while_process_holds_lock(tmp_path: Path):
    write_synthetic_run(tmp_path, 3, total=8, rollouts=0)
    with active_run(tmp_path):
        assert state_of(tmp_path) == "running"
    assert state_of(tmp_path) == "failed"  # the process lives on without the lock
    write_metrics(tmp_path, [synthetic_metrics(4)], 4, after=3)
    assert state_of(tmp_path) == "finished"


def test_killed_process_holds_no_lock(tmp_path: Path):
    write_synthetic_run(tmp_path, 3, total=8, rollouts=0)
    code = (
        "import sys, time; from pathlib import Path; from skyrl_train.trainer.run_folder import RunFolder\n"
        "run = {'run_name': 'a run', 'project_name': 'a project'}\n"
        "with RunFolder(Path(sys.argv[1]), run, allow_resume=True): print('held', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"held\n"
        assert state_of(tmp_path) == "running"
        holder.kill()
    assert state_of(tmp_path) == "failed"


def test_remote_run_status_follows_metrics_age(tmp_path: Path):
    write_synthetic_run(tmp_path, 3, total=8, rollouts=0)
    (tmp_path / ATTEMPTS_FILE).unlink()  # as an earlier version would leave it
    (tmp_path / ".lock").write_text(OTHERS_LOCK)
    assert state_of(tmp_path) == "running"
    quarter = time.time() - 900
    os.utime(tmp_path / METRICS_FILE, (quarter, quarter))
    assert state_of(tmp_path) == "failed"
    rows = [{"step": step, "time": 400.0 * step} for step in range(1, 4)]  # steps of 400 s
    (tmp_path / METRICS_FILE).write_text("".join(json.dumps(row) + "\n" for row in rows))
    os.utime(tmp_path / METRICS_FILE, (quarter, quarter))
    assert state_of(tmp_path) == "running"
    os.utime(tmp_path / METRICS_FILE, (1.0, 1.0))
    assert state_of(tmp_path) == "failed"
    (tmp_path / DIAGNOSIS_FILE).unlink()  # as an earlier version would leave it
    assert state_of(tmp_path) == "unknown"


def test_reading_does_not_change_run_folder(tmp_path: Path):
    write_synthetic_run(tmp_path, 3)

    def contents() -> dict[str, tuple[int, int]]:
        return {str(file): (file.stat().st_mtime_ns, file.stat().st_size) for file in tmp_path.rglob("*")}

    before = contents()
    run = RunReader(tmp_path)
    assert run.summary() and run.metrics(10) and run.diagnosis() == []
    assert contents() == before


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_are_columns_with_null_for_missing_values(tmp_path: Path):
    rows = [
        synthetic_metrics(1),
        synthetic_metrics(2, **{"eval/all/avg_score": 0.5, "my/own": 7.0}),
        synthetic_metrics(3, **{"policy/kl": math.nan}),
    ]
    write_metrics(tmp_path, rows, 3)
    found = RunReader(tmp_path).metrics(100)
    assert found["steps"] == [1, 2, 3] and found["steps_per_point"] == 1
    assert all(1e9 < time < 1e11 for time in found["times"])
    assert found["columns"]["reward/mean"] == [0.01, 0.02, 0.03]
    assert found["columns"]["eval/all/avg_score"] == [None, 0.5, None]
    assert found["columns"]["policy/kl"] == [None, None, None]
    metric = metric_of("reward/mean")
    assert metric is not None and metric.description in found["described"]["reward/mean"]
    assert found["described"]["my/own"] == "" and found["described"].keys() == found["columns"].keys()


def test_growing_file_is_followed_and_repeated_steps_replaced(tmp_path: Path):
    write_metrics(tmp_path, [synthetic_metrics(step) for step in (1, 2, 3)], 9)
    run = RunReader(tmp_path)
    assert run.metrics(9)["steps"] == [1, 2, 3]
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 4, "reward/mean"')
        file.flush()
        assert run.metrics(9)["steps"] == [1, 2, 3]  # a partial line
        file.write(': 0.75}\n{"step": 4, "reward/mean": 0.5}\n')
    assert run.metrics(9)["columns"]["reward/mean"] == [0.01, 0.02, 0.03, 0.5]
    write_metrics(tmp_path, [synthetic_metrics(3, **{"new/one": 1.0})], 9, after=2)  # a resumed run
    assert run.metrics(9)["columns"] == RunReader(tmp_path).metrics(9)["columns"]
    assert run.metrics(9)["columns"]["new/one"] == [None, None, 1.0]


@pytest.mark.parametrize(("steps", "max_points"), [(10, 3), (7, 7), (8, 7), (1, 1), (100, 9), (0, 5)])
def test_many_steps_are_downsampled_to_means_and_maxima(tmp_path: Path, steps: int, max_points: int):
    rows = [
        {"reward/mean": float(step * step), "policy/ratio_max": float(step % 5), "eval/minimax/pass_at_1": step / 7}
        | ({"eval/all/avg_score": step / 3} if step % 4 == 1 else {})
        for step in range(steps)
    ]
    write_metrics(tmp_path, rows, steps)
    (tmp_path / METRICS_FILE).touch()
    found = RunReader(tmp_path).metrics(max_points)
    width = found["steps_per_point"]
    parts = [rows[begin : begin + width] for begin in range(0, steps, width)]
    assert len(found["steps"]) == len(parts) <= max_points and (width == 1 or -(-steps // (width - 1)) > max_points)
    assert found["steps"] == [min(begin + width, steps) for begin in range(0, steps, width)]
    for name, column in found["columns"].items():
        for part, value in zip(parts, column, strict=True):
            values = [row[name] for row in part if name in row]
            expected = (max(values) if name.endswith("_max") else sum(values) / len(values)) if values else None
            assert value == (None if expected is None else pytest.approx(expected))


def test_numbers_can_be_rounded(tmp_path: Path):
    write_metrics(tmp_path, [{"a": 123456.789, "b": 1.23456789e-7}, {"a": 0.0, "b": -1.0}], 2)
    assert RunReader(tmp_path).metrics(9, digits=4)["columns"] == {"a": [123500.0, 0.0], "b": [1.235e-07, -1.0]}


# -- diagnosis ---------------------------------------------------------------------------------------------------------

TRUNCATED = {"response/truncated_fraction": 0.8}


def test_saved_and_repeated_diagnosis_are_equal(tmp_path: Path):
    rows = [synthetic_metrics(step, **(TRUNCATED if 2 <= step <= 5 or step > 8 else {})) for step in range(1, 13)]
    write_metrics(tmp_path, rows, 12)
    found = RunReader(tmp_path).diagnosis()
    assert [(finding["step"], finding["until"], finding["level"], finding["title"]) for finding in found] == [
        (11, None, "warning", "truncated"),
        (4, 5, "past", "truncated"),
    ]
    assert "80% of the responses were truncated in the last 3 steps" in found[0]["text"]
    assert "generator.sampling_params.max_generate_length" in found[0]["text"]
    assert found[1]["text"].endswith("It held until step 5.")
    (tmp_path / DIAGNOSIS_FILE).unlink()
    assert RunReader(tmp_path).diagnosis() == found


@pytest.mark.parametrize("text", ["{", "[]", '{"findings": 3}', '{"findings": [1, {"rule": 2}]}', ""])
def test_unreadable_diagnosis_is_repeated(tmp_path: Path, text: str):
    write_metrics(tmp_path, [synthetic_metrics(1)], 1)
    (tmp_path / DIAGNOSIS_FILE).write_text(text)
    assert RunReader(tmp_path).diagnosis() == []


# -- several runs ------------------------------------------------------------------------------------------------------


def test_runs_have_unique_ids_and_names(tmp_path: Path):
    names = {"x/one": "same", "y/one": "same", "z": "other"}
    runs = open_runs([write_synthetic_run(tmp_path / path, 1, name=name, rollouts=0) for path, name in names.items()])
    found = overview(runs)["runs"]
    assert [(run["id"], run["name"]) for run in found] == [("0", "same (x/one)"), ("1", "same (y/one)"), ("2", "other")]


def test_differing_keys_are_listed_with_values():
    first: dict[str, Any] = {"trainer": {"seed": 1, "ckpt_path": "a", "logger": ["console"], "same": None}, "data": {}}
    second = {"trainer": {"seed": 2, "ckpt_path": "b", "logger": "console", "same": None}, "new": True}
    assert differing_keys([first, second]) == [
        {"key": "data", "values": ["{}", ""]},
        {"key": "new", "values": ["", "true"]},
        {"key": "trainer.logger", "values": ['["console"]', "console"]},
        {"key": "trainer.seed", "values": ["1", "2"]},
    ]
    assert differing_keys([first]) == []


def test_invalid_and_repeated_folders_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"not the folder of a run: it has neither metrics\.jsonl nor config\.yaml"):
        open_runs([tmp_path])
    write_synthetic_run(tmp_path / "run", 1, rollouts=0)
    with pytest.raises(ConfigError, match="is given twice"):
        open_runs([tmp_path / "run", tmp_path / "." / "run"])
    with pytest.raises(ConfigError, match="at least one run"):
        open_runs([])


STALE = "trainer: {fully_async: {enabled: true, max_staleness_steps: %s}}"


@pytest.mark.parametrize(
    "text",
    [
        *("{", "- 1", "a: &a [*a]", "\xff", "trainer: 3", "trainer: {algorithm: x, fully_async: [1]}"),
        *(STALE % value for value in ("many", "null", "[1]", "-1")),
    ],
)
def test_run_with_unreadable_configuration_is_shown(tmp_path: Path, text: str):
    write_synthetic_run(tmp_path, 1, rollouts=0)
    (tmp_path / "config.yaml").write_bytes(text.encode("latin-1"))
    (tmp_path / "run.json").write_text("[")
    found = overview([RunReader(tmp_path)])
    assert found["runs"][0]["name"] == tmp_path.name
    assert json.dumps(found["differing"]) == "[]"
    (tmp_path / DIAGNOSIS_FILE).unlink()
    assert RunReader(tmp_path).diagnosis() == []


def test_unreadable_run_hides_no_others(tmp_path: Path):
    runs = [RunReader(write_synthetic_run(tmp_path / name, 2, rollouts=0, name=name)) for name in ("a", "b")]
    (tmp_path / "a" / METRICS_FILE).unlink()
    (tmp_path / "a" / METRICS_FILE).mkdir()  # unreadable even for root
    first, second = overview(runs)["runs"]
    assert (first["name"], first["state"], first["step"]) == ("a", "unknown", 0)
    assert (second["name"], second["step"]) == ("b", 2) and first.keys() == second.keys()
