"""A probe of a real run: what it says, that it leaves nothing, and that the run then takes what it said."""

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
"""How often it is tried on a machine that changes its speed by more than so much meanwhile."""
APART = ["trainer.placement.colocate_all=false", "trainer.placement.policy_num_gpus_per_node=1"]
AHEAD = ["trainer.fully_async.enabled=true", "trainer.fully_async.max_staleness_steps=1"]


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def config(overrides: list[str]) -> Config:
    return prepare_config(overrides).config


def quickly(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Probe for this long."""
    monkeypatch.setattr(probing, "STEPS_S", seconds)
    monkeypatch.setattr(probing, "TIMINGS_S", seconds)


@pytest.mark.slow
def test_probe_suggests_settings_and_leaves_no_files(
    ray_of_all_runs: None,
    small: Callable[[Path], list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """Neither in the run's folder, which belongs to another run, nor in the temporary one, nor in the model's."""
    quickly(monkeypatch, 2.0)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    cfg = config(small(tmp_path))
    folder, model = Path(cfg.trainer.ckpt_path), Path(cfg.trainer.policy.model.path)
    folder.mkdir()
    (folder / "run.json").write_text('{"run_name": "somebody else\'s"}')
    before = files(folder), files(model)
    (command,) = find_commands("skyrl-train plan --probe ")
    options = [word for word in command.words[1:] if word not in ("key=value", "...")]
    monkeypatch.setattr(sys, "argv", ["skyrl-train", *options, *small(tmp_path)])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert not left.value.code
    assert (files(folder), files(model)) == before
    assert not Path(cfg.trainer.export_path).exists()
    assert not [path for path in temporary.iterdir() if path.name.startswith("skyrl-probe-")]
    text = capsys.readouterr().out
    for part in ("generate", "score", "update", "weight sync", "step", "the run:", "evaluations", LIMIT, "µs per token"):
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
    """A part is a single mini-batch, and whole steps do not fit the time."""
    quickly(monkeypatch, 0.01)
    found = probe(config([*small(tmp_path), "trainer.policy_mini_batch_size=2"]))
    assert [one.prompts for one in found.steps] == [1, 2]
    assert all(one.row["timing/score_s"] > 0 for one in found.steps)


def colocated(folder: Path) -> list[str]:
    """16 of 24 prompts a step: every other step is half as large."""
    return ["trainer.train_batch_size=16", "trainer.policy_mini_batch_size=16"]


def with_reference(folder: Path) -> list[str]:
    """A larger model, a reference, and three optimizer steps."""
    return [
        f"trainer.policy.model.path={save_tiny_model(folder / 'larger', hidden_size=192, layers=4)}",
        "trainer.train_batch_size=12",
        "trainer.policy_mini_batch_size=4",
        "trainer.algorithm.use_kl_loss=true",
        "generator.sampling_params.max_generate_length=48",
    ]


def ahead(folder: Path) -> list[str]:
    """An engine and a trainer, at the same time."""
    return [*APART, *AHEAD, "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8"]


@pytest.mark.on_demand
@pytest.mark.parametrize("change", [colocated, with_reference, ahead])
def test_run_takes_estimated_time(
    change: Callable[[Path], list[str]], run: Run, small: Callable[[Path], list[str]], tmp_path: Path
):
    """Within 20 %: what its whole steps take, while the machine keeps its speed."""
    overrides = [*small(tmp_path), *change(tmp_path), "trainer.epochs=100", "trainer.ckpt_interval=0"]
    overrides += ["trainer.eval_before_train=false", "trainer.eval_interval=0", "trainer.resume_mode=none"]
    cfg = config(overrides)
    usual = fmean if cfg.trainer.fully_async.enabled else median
    for attempt in range(ATTEMPTS):
        said = estimated_step(cfg, probe(cfg))
        steps, folder = max(6, min(40, round(20 / said.step_s))), tmp_path / f"run_{attempt}"
        run("main_base", *overrides, f"trainer.max_steps={steps}", f"trainer.ckpt_path={folder}")
        rows = [row for row in read_jsonl(folder / METRICS_FILE) if "timing/step_s" in row]
        answers = said.prompts * cfg.generator.n_samples_per_prompt
        rows = [row for row in rows if row["rollouts/trajectories"] == answers]  # the last of an epoch may be smaller
        took = usual([row["timing/step_s"] for row in rows[1:]])
        again = estimated_step(cfg, probe(cfg))
        print(f"{change.__name__}: said {said.step_s:.3f} s, took {took:.3f} s: {said.step_s / took - 1:+.1%}")
        print(f"  the machine: {again.step_s / said.step_s - 1:+.1%} by what a probe says afterwards")
        for name in PHASES:
            print(f"  {name}: {said.seconds[name]:.3f} s, {usual([row[f'timing/{name}_s'] for row in rows[1:]]):.3f} s")
        if again.step_s == pytest.approx(said.step_s, rel=STEADY):
            break
    assert said.step_s == pytest.approx(took, rel=0.2)
