"""The trace of all processes of a run, and profiles of single steps."""

from __future__ import annotations

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from .conftest import Run, metrics_of

PHASES = {"generate", "score", "update", "publish", "evaluate"}


class Slice(NamedTuple):
    name: str
    begin: int
    end: int

    def lies_in(self, other: Slice) -> bool:
        return other.begin <= self.begin and self.end <= other.end


def slices(path: Path) -> dict[tuple[str, str], list[Slice]]:
    """Return the spans of each (process, row) in microseconds, as Perfetto shows them."""
    events: list[dict[str, Any]] = json.loads(path.read_text())
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans: dict[tuple[str, str], list[Slice]] = defaultdict(list)
    begun = {e["id"]: e["ts"] for e in events if e["ph"] == "b"}
    for e in events:
        if e["ph"] in "Xe":
            begin, end = (e["ts"], e["ts"] + e["dur"]) if e["ph"] == "X" else (begun.pop(e["id"]), e["ts"])
            spans[processes[e["pid"]], rows[e["pid"], e["tid"]]].append(Slice(e["name"], begin, end))
    assert not begun, "overlapping spans have a begin and an end"
    return spans


def check_time_line(spans: dict[tuple[str, str], list[Slice]]) -> None:
    """Check that every role has its rows, that spans of a row nest, and that a rank's spans lie within the driver's."""
    calls = {role: spans[role, "calls"] for role in ("learner 0", "reference 0", "engine 0")}
    environments = [row for row in spans if row[0] == "environments"]
    assert len(environments) == 1 and {"hello", "start", "step", "close"} == {s.name for s in spans[environments[0]]}
    steps = spans["driver", "trainer"]
    assert {"start: models", "start: weights", "step 1", "step 2", *PHASES} <= {span.name for span in steps}
    checkpoint_spans = sorted(span.name for span in spans["driver", "checkpoints"])
    assert checkpoint_spans == ["checkpoint", "rollouts kept", "rollouts kept"]

    for row in (steps, calls["learner 0"], calls["reference 0"], spans[environments[0]]):
        for span in row:
            assert all(
                span.lies_in(other) or other.lies_in(span) or span.end <= other.begin or other.end <= span.begin
                for other in row
            ), span
    phase_spans = {name: [span for span in steps if span.name == name] for name in PHASES}
    for role, method, phase, count in (
        ("learner 0", "update", "update", 2),
        ("reference 0", "forward", "score", 2),
        ("engine 0", "commit_weights", "publish", 3),
        ("engine 0", "generate", "generate", 2),
    ):
        calls_in_phase = [
            span for span in calls[role] if span.name == method and any(span.lies_in(p) for p in phase_spans[phase])
        ]
        assert len(calls_in_phase) >= count, (role, method, calls[role])
    updates = [span for span in calls["learner 0"] if span.name == "update"]
    assert len(updates) == 2 and all(any(u.lies_in(p) for p in phase_spans["update"]) for u in updates)
    requests = spans["engine 0", "requests"]
    generated = [span for span in calls["engine 0"] if span.name == "generate"]
    assert len(requests) >= 2 * 4 * 4 and all(any(r.lies_in(g) for g in generated) for r in requests)
    assert len({span.end for span in requests}) > 2, "requests end independently of their call"


def check_profile(folder: Path) -> None:
    """Check that each computing process has a trace of its work in this step, and that the table names all of them."""
    roles = ("learner_0", "reference_0", "engine_0")
    assert {path.name for path in folder.iterdir()} == {*(f"{role}.json.gz" for role in roles), "slowest.txt"}
    for role in roles:
        events = json.loads(gzip.decompress((folder / f"{role}.json.gz").read_bytes()))["traceEvents"]
        names = {event.get("name") for event in events}
        assert names & {"aten::mm", "aten::addmm", "aten::linear"}, role
        assert any("Backward" in str(name) for name in names) == (role == "learner_0"), role
    table = (folder / "slowest.txt").read_text()
    for section in re.split(r"^(?=\w+ \d+$)", table, flags=re.MULTILINE)[1:]:
        assert len(re.findall(r"^ +aten::\w+ ", section, re.MULTILINE)) >= 5, section
    assert re.findall(r"^\w+ \d+$", table, re.MULTILINE) == [role.replace("_", " ") for role in roles]


TWO_STEPS = ["trainer.max_steps=2", "trainer.algorithm.use_kl_loss=true"]
TRACED = ["trainer.trace=true", "trainer.profile_steps=[2]"]


@pytest.mark.on_demand
@pytest.mark.slow
def test_run_writes_trace_and_profile(run: Run, small: Callable[[Path], list[str]], tmp_path: Path):
    run("main_base", *small(tmp_path), *TWO_STEPS, *TRACED)
    check_time_line(slices(tmp_path / "ckpts" / "trace.json"))
    assert [path.name for path in (tmp_path / "ckpts" / "profiles").iterdir()] == ["step_2"]
    check_profile(tmp_path / "ckpts" / "profiles" / "step_2")


@pytest.mark.on_demand
@pytest.mark.slow
def test_tracing_keeps_run_bitwise_equal(run: Run, small: Callable[[Path], list[str]], tmp_path: Path):
    traced, plain = tmp_path / "looked_at", tmp_path / "plain"
    run("main_base", *small(plain), *TWO_STEPS)
    assert not (plain / "ckpts" / "trace.json").exists() and not (plain / "ckpts" / "profiles").exists()
    run("main_base", *small(traced), *TWO_STEPS, *TRACED)
    assert metrics_of(traced) == metrics_of(plain)


def test_profile_steps_beyond_run_are_refused(run: Run, small: Callable[[Path], list[str]], tmp_path: Path):
    failed = run("main_base", *small(tmp_path), "trainer.profile_steps=[3,7]", expect=2)
    assert "trainer.profile_steps=[3, 7]: must be steps of this run, 1 to 6." in failed.stderr
    assert not (tmp_path / "ckpts" / "profiles").exists()
    failed = run("main_base", *small(tmp_path), "trainer.profile_steps=[0]", expect=2)
    assert "trainer.profile_steps=0: must be at least 1." in failed.stderr
