"""A probe of a real run: its report, that it leaves no files, and that the run then takes the estimated time."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, median

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import Config
from skyrl_train.config.validate import validate
from skyrl_train.entrypoints import cli, probe as probing
from skyrl_train.entrypoints.probe import LIMIT, probe
from skyrl_train.entrypoints.probe_estimate import PHASES
from skyrl_train.entrypoints.probe_report import estimated_step
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.doc_pages import find_commands

from .conftest import Run

ATTEMPTS, STEADY = 3, 0.1
"""Number of attempts on a machine whose speed changes by more than this fraction during one."""
APART = ["trainer.placement.colocate_all=false", "trainer.placement.policy_num_gpus_per_node=1"]
AHEAD = ["trainer.fully_async.enabled=true", "trainer.fully_async.max_staleness_steps=1"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config(overrides: list[str]) -> Config:
    return prepare_config(overrides).config


def quickly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Shorten the probe to this many seconds for steps and for timings."""
    monkeypatch.setattr(probing, "STEPS_S", seconds)
    monkeypatch.setattr(probing, "TIMINGS_S", seconds)


@pytest.mark.slow
@pytest.mark.on_demand
def test_probe_suggests_settings_and_leaves_no_files(
    ray_of_all_runs: None,
    small: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The run's folder, of another run, and the model's stay unchanged, and the temporary one is deleted."""
    quickly(monkeypatch, 2.0)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    cfg = config(small(tmp_path))
    folder, model = Path(cfg.trainer.ckpt_path), Path(cfg.trainer.policy.model.path)
    folder.mkdir()
    (folder / "run.json").write_text('{"run_name": "another run"}')
    before = files(folder), files(model)
    (command,) = find_commands("skyrl-train plan --probe ")
    options = [word for word in command.words[1:] if word not in ("key=value", "...")]
    monkeypatch.setattr(sys, "argv", ["skyrl-train", *options, *small(tmp_path)])
    with pytest.raises(SystemExit) as exit:
        cli.main()
    assert not exit.value.code
    assert (files(folder), files(model)) == before
    assert not Path(cfg.trainer.export_path).exists()
    assert not [path for path in temporary.iterdir() if path.name.startswith("skyrl-probe-")]
    text = capsys.readouterr().out
    for part in (
        "generate",
        "score",
        "update",
        "weight sync",
        "step",
        "the run:",
        "evaluations",
        LIMIT,
        "µs per token",
    ):
        assert part in text
    assert "no other split, because there is one slot" in text
    assert "DOES NOT FIT" not in text
    for line in text.splitlines():
        if line.startswith("set "):
            key, _, value = line.removeprefix("set ").partition(":")[0].partition("=")
            assert key == LIMIT
            assert validate(config([*small(tmp_path), f"{key}={value}"])) == []


@pytest.mark.on_demand
def test_partial_steps_include_scoring(
    ray_of_all_runs: None, small: Callable[[Path], list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A partial step is a single mini-batch, and complete steps do not fit the time."""
    quickly(monkeypatch, 0.01)
    result = probe(config([*small(tmp_path), "trainer.policy_mini_batch_size=2"]))
    assert [step.prompts for step in result.steps] == [1, 2]
    assert all(step.row["timing/score_s"] > 0 for step in result.steps)


def colocated(folder: Path) -> list[str]:
    """16 of 24 prompts per step: every other step is half as large."""
    return ["trainer.train_batch_size=16", "trainer.policy_mini_batch_size=16"]


def with_reference(folder: Path) -> list[str]:
    """Return overrides for a larger model, a reference, and three optimizer steps."""
    return [
        f"trainer.policy.model.path={save_tiny_model(folder / 'larger', hidden_size=192, layers=4)}",
        "trainer.train_batch_size=12",
        "trainer.policy_mini_batch_size=4",
        "trainer.algorithm.use_kl_loss=true",
        "generator.sampling_params.max_generate_length=48",
    ]


def ahead(folder: Path) -> list[str]:
    """Return overrides for an engine and a trainer that work at the same time."""
    return [*APART, *AHEAD, "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8"]


@pytest.mark.on_demand
@pytest.mark.parametrize("change", [colocated, with_reference, ahead])
def test_run_takes_estimated_time(
    change: Callable[[Path], list[str]], run: Run, small: Callable[[Path], list[str]], tmp_path: Path
):
    """The time of complete steps is within 20 % of the estimate, while the machine keeps its speed."""
    overrides = [*small(tmp_path), *change(tmp_path), "trainer.epochs=100", "trainer.ckpt_interval=0"]
    overrides += ["trainer.eval_before_train=false", "trainer.eval_interval=0", "trainer.resume_mode=none"]
    cfg = config(overrides)
    average = fmean if cfg.trainer.fully_async.enabled else median
    for attempt in range(ATTEMPTS):
        estimate = estimated_step(cfg, probe(cfg))
        steps, folder = max(6, min(40, round(20 / estimate.step_s))), tmp_path / f"run_{attempt}"
        run("main_base", *overrides, f"trainer.max_steps={steps}", f"trainer.ckpt_path={folder}")
        rows = [row for row in read_jsonl(folder / METRICS_FILE) if "timing/step_s" in row]
        answers = estimate.prompts * cfg.generator.n_samples_per_prompt
        rows = [row for row in rows if row["rollouts/trajectories"] == answers]  # the last of an epoch may be smaller
        took_s = average([row["timing/step_s"] for row in rows[1:]])
        second = estimated_step(cfg, probe(cfg))
        error = estimate.step_s / took_s - 1
        print(f"{change.__name__}: estimated {estimate.step_s:.3f} s, took {took_s:.3f} s: {error:+.1%}")
        print(f"  the machine: {second.step_s / estimate.step_s - 1:+.1%} by a second probe")
        for name in PHASES:
            measured_s = average([row[f"timing/{name}_s"] for row in rows[1:]])
            print(f"  {name}: {estimate.seconds[name]:.3f} s, {measured_s:.3f} s")
        if second.step_s == pytest.approx(estimate.step_s, rel=STEADY):
            break
    assert estimate.step_s == pytest.approx(took_s, rel=0.2)
