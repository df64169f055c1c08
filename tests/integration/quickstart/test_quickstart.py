"""The first command of the README works unchanged."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from skyrl_train.environments.tasks.arithmetic import generate
from skyrl_train.report.jsonl import METRICS_FILE, read_jsonl
from tests.integration.runs.front_door import installing_environment
from tests.support.doc_pages import REPOSITORY, find_commands

SCRIPT = Path(__file__).parents[3] / "examples" / "quickstart" / "quickstart.py"
LANES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
"""Number of pytest workers that share the cores."""
ACCURACY = "eval/arithmetic/avg_score"
MAX_LINES = 120
LIBRARY = re.compile(r"site-packages|\bpid=|\d(it/s|s/it)\b|\w+Warning\b|\[(rank|INFO|WARNING)|^\d{4}-\d\d-\d\d ")
"""Typical words in output of libraries: files, processes, progress bars, warnings, times."""
LAST_LINE = re.compile(r"quickstart: eval accuracy ([\d.]+) -> ([\d.]+) in (\d+) s, run at (.+)")


class Outcome(NamedTuple):
    before: float
    after: float
    seconds: int
    run: Path


def output_of(command: list[str]) -> str:
    """Return the output of a successful command. Fail if it is long or contains output of libraries."""
    # Alone it gets the threads that a person's machine gives it, not the tests' single one.
    environment = {key: value for key, value in os.environ.items() if LANES > 1 or key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, env=environment, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    said = (done.stdout + done.stderr).splitlines()
    assert len(said) <= MAX_LINES, done.stdout + done.stderr
    theirs = [line for line in said if LIBRARY.search(line)]
    assert not theirs, theirs
    return done.stdout


def quickstart(folder: Path, *arguments: str) -> Outcome:
    stdout = output_of([sys.executable, str(SCRIPT), "--output", str(folder / "run"), *arguments])
    found = LAST_LINE.fullmatch(stdout.splitlines()[-1])
    assert found, stdout[-500:]
    return Outcome(float(found[1]), float(found[2]), int(found[3]), Path(found[4]))


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Run the quickstart unchanged and return its outcome."""
    return quickstart(tmp_path_factory.mktemp("quickstart"))


@pytest.fixture
def train_again(first: Outcome, tmp_path: Path) -> Callable[..., list[float]]:
    """Return a function that runs GRPO with other settings from the first quickstart's warm-up.

    The function returns the accuracies on 1,000 problems, in the order of evaluation.
    """
    problems = tmp_path / "validation.jsonl"
    problems.write_text("".join(json.dumps(row) + "\n" for row in generate(1_000, 4, 4, 2, "validation")))
    (warm,) = (first.run / "sft" / "export").glob("global_step_*/policy")

    def train(*overrides: str) -> list[float]:
        run = tmp_path / "run"
        entrypoint = [sys.executable, "-m", "skyrl_train.entrypoints.main_base", "--config-name", "grpo"]
        given = [
            f"data.train_data=['{first.run / 'data' / 'train.jsonl'}']",
            f"data.val_data=['{problems}']",
            f"trainer.policy.model.path={warm}",
            f"trainer.ckpt_path={run}",
            f"trainer.export_path={run / 'export'}",
            "trainer.eval_interval=40",
        ]
        output_of([*entrypoint, "--config-dir", str(SCRIPT.parent), *given, *overrides])
        lines = read_jsonl(run / METRICS_FILE)
        return [line[ACCURACY] for line in lines if ACCURACY in line]

    return train


def assert_files(run: Path) -> None:
    assert (run / "reward.png").stat().st_size > 1000
    assert (run / "grpo" / "samples.jsonl").is_file()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_script_runs_from_nothing_to_a_curve(tmp_path: Path):
    """Run a few small steps, too few to improve. The full run is on demand, and other tests cover runs that improve."""
    small = ["trainer.max_steps=2", "trainer.train_batch_size=4", "trainer.policy_mini_batch_size=4"]
    outcome = quickstart(tmp_path, "--warm-up-steps", "2", *small)
    assert 0 <= outcome.before < 0.65 and 0 <= outcome.after < 0.65
    assert_files(outcome.run)
    folder, steps, model = documented_copy()
    path = Path(model.removeprefix(f"{folder}/").replace(f"_{steps}/", "_2/"))
    assert (outcome.run / path / "config.json").is_file(), "docs/guides/your_environment.md copies this model"


def documented_copy() -> tuple[str, str, str]:
    """Return the quickstart's folder, its warm-up steps and the copied model in docs/guides/your_environment.md."""
    page = "docs/guides/your_environment.md"
    (first,) = (one for one in find_commands("scripts/quickstart ") if one.page == page)
    (copy,) = find_commands("cp -r ")
    return (
        first.words[first.words.index("--output") + 1],
        first.words[first.words.index("--warm-up-steps") + 1],
        copy.words[2],
    )


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_a_bare_clone_it_makes_its_environment_first(tmp_path: Path):
    """Run `scripts/quickstart` as your_environment.md does, with fewer steps, where nothing is installed."""
    (found,) = (one for one in find_commands("scripts/quickstart ") if one.page == "docs/guides/your_environment.md")
    folder, steps, _ = documented_copy()
    ours = {folder: str(tmp_path / "run"), steps: "2"}
    words = [ours.get(word, word) for word in found.words]
    words += ["trainer.max_steps=1", "trainer.eval_interval=1"]
    own = {"UV_PROJECT_ENVIRONMENT": str(tmp_path / "venv"), "UV_COMPILE_BYTECODE": "0", "HF_HUB_OFFLINE": "1"}
    env = installing_environment(tmp_path) | own
    done = subprocess.run(words, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    assert LAST_LINE.fullmatch(done.stdout.splitlines()[-1])
    assert_files(tmp_path / "run")


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_easier_problems_need_half_the_time(tmp_path: Path):
    """Use the easier settings of the example's page."""
    easier = ["--operations", "3", "--warm-up-steps", "240"]
    outcome = quickstart(tmp_path, *easier, "trainer.max_steps=8", "trainer.eval_interval=8")
    assert outcome.before <= 0.5
    assert outcome.after - outcome.before >= 0.25


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_quickstart_raises_it_further_and_in_minutes(first: Outcome):
    assert first.before <= 0.65
    assert first.after >= 0.80
    assert first.after - first.before >= 0.3
    assert LANES > 1 or first.seconds <= 420  # a promise for a machine of its own
    assert_files(first.run)


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_hybrid_model_learns_the_same_task(tmp_path: Path):
    outcome = quickstart(tmp_path, "--model-type", "qwen3_5_text")
    assert outcome.before <= 0.65
    assert outcome.after >= 0.80


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_without_a_learning_rate_nothing_is_learnt(train_again: Callable[..., list[float]]):
    before, after = train_again("trainer.policy.optimizer_config.lr=0", "trainer.max_steps=6")
    assert abs(after - before) <= 0.05


ADAPTERS = ["trainer.policy.model.lora.rank=32", "trainer.policy.model.lora.alpha=64"]


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "overrides",
    [[*ADAPTERS, "trainer.policy.optimizer_config.lr=1e-3"], ["trainer.strategy=deepspeed"]],
    ids=["adapters", "deepspeed"],
)
def test_adapters_alone_and_deepspeed_raise_it_as_well(train_again: Callable[..., list[float]], overrides: list[str]):
    before, *_, after = train_again(*overrides)
    assert before <= 0.65
    assert after >= 0.80
    assert after - before >= 0.2
