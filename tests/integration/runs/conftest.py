"""Fixtures of runs that take seconds. They use the entrypoints' code in this process and share one Ray.

Only tests of a process start an entrypoint in a separate one.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_train.algorithms import registry as algorithms
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.entrypoints.main_generate import EvaluationExp
from skyrl_train.entrypoints.main_sft import SFTExp
from skyrl_train.environments.registry import environments
from skyrl_train.environments.tasks.arithmetic import generate
from skyrl_train.environments.tools.registry import tools
from skyrl_train.experiment.base import Experiment, launch_experiment as start_experiment
from skyrl_train.registry import Registry
from skyrl_train.report.trackers import trackers

REPOSITORY = Path(__file__).parents[3]
PRESETS = REPOSITORY / "examples" / "algorithms"

Run = Callable[..., subprocess.CompletedProcess[str]]
ENTRYPOINTS = {"main_base": Experiment, "main_generate": EvaluationExp, "main_sft": SFTExp}
ONE_PROCESS = "environment.skyrl_gym.max_env_workers=1"
"""One environment process: each costs a second to start, and the default is two per core."""
REGISTRIES = (*vars(algorithms).values(), environments, tools, trackers)


def command(entrypoint: str, overrides: list[str]) -> list[str]:
    """Return the command of an entrypoint in a separate process."""
    return [sys.executable, "-m", f"skyrl_train.entrypoints.{entrypoint}", *overrides]


def kill_in_the_middle_of_step(overrides: list[str], folder: Path, step: int) -> None:
    """Start a run, and kill its driver with SIGKILL when `step` steps are logged, while a later one is running."""
    metrics = folder / "ckpts" / "metrics.jsonl"
    deadline = time.monotonic() + 400
    with (folder / "killed.log").open("w") as log:
        driver = subprocess.Popen(command("main_base", overrides), stdout=log, stderr=log, env=os.environ)
    while not (metrics.exists() and re.search(rf'"step": {step},', metrics.read_text())):
        assert driver.poll() is None and time.monotonic() < deadline, (folder / "killed.log").read_text()[-4000:]
        time.sleep(0.005)
    kill_driver(driver)


def kill_driver(driver: subprocess.Popen[bytes]) -> None:
    """Kill a driver with SIGKILL, and wait until all processes that it started have ended."""
    children = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive, f"a killed driver left {[process.cmdline()[:3] for process in alive]}"


def engines_of(driver: int) -> list[psutil.Process]:
    """Return the worker processes of a driver's Ray that run an engine, which are the asynchronous actors."""
    engines = []
    for process in psutil.Process(driver).children(recursive=True):
        try:
            if "_AsyncWorkerActor" in " ".join(process.cmdline()):
                engines.append(process)
        except psutil.Error:
            continue
    return engines


@pytest.fixture(scope="package")
def plugins(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which this process, Ray's workers and environment processes find modules of `trainer.plugins`.

    Registrations in this process are undone at the end. A module's name stands for one text in all tests.
    """
    folder = tmp_path_factory.mktemp("plugins")
    (folder / "lower_case_plugin.py").write_text(LOWER_CASE)
    with pytest.MonkeyPatch.context() as patch:
        for registry in (value for value in REGISTRIES if isinstance(value, Registry)):
            patch.setattr(registry, "loaded", dict(registry.loaded))
            patch.setattr(registry, "table", dict(registry.table))
        for path in (PRESETS, folder):
            patch.setenv("PYTHONPATH", str(path), prepend=os.pathsep)
            patch.syspath_prepend(path)
        yield folder
        for path in (*folder.glob("*.py"), *PRESETS.glob("*.py")):
            sys.modules.pop(path.stem, None)


@pytest.fixture(scope="package")
def ray_of_all_runs(plugins: Path) -> Iterator[None]:
    """One Ray for all runs of this package. Ranks and engines are separate processes of each run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with Cluster():
            yield


@pytest.fixture
def run(ray_of_all_runs: None, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run an entrypoint's command line in this process. Fails with the output unless it exits with `expect`."""

    def start(entrypoint: str, *overrides: str, expect: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        output, errors, code = io.StringIO(), io.StringIO(), 0
        with monkeypatch.context() as patch, redirect_stdout(output), redirect_stderr(errors):
            for name, value in env.items():
                patch.setenv(name, value)
            try:
                start_experiment(ENTRYPOINTS[entrypoint], list(overrides))
            except SystemExit as exit:
                code = int(exit.code or 0)
        assert code == expect, output.getvalue()[-4000:] + errors.getvalue()[-6000:]
        return subprocess.CompletedProcess(overrides, code, output.getvalue(), errors.getvalue())

    return start


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.jsonl (24 problems) and validation.jsonl (8 problems)."""
    folder = tmp_path_factory.mktemp("arithmetic")
    for split, count in (("train", 24), ("validation", 8)):
        rows = generate(count, 2, 9, 0, split)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def small(arithmetic: Path, tiny_model_path: str) -> Callable[[Path], list[str]]:
    """Overrides of a run of seconds: 4 prompts x 4 samples, 16 tokens, one evaluation before and one after.

    It has no reference model, which would be another process to start. Tests of it set
    `trainer.algorithm.use_kl_loss=true`.
    """

    def overrides(folder: Path) -> list[str]:
        return [
            f"data.train_data=['{arithmetic / 'train.jsonl'}']",
            f"data.val_data=['{arithmetic / 'validation.jsonl'}']",
            f"trainer.policy.model.path={tiny_model_path}",
            f"trainer.ckpt_path={folder / 'ckpts'}",
            f"trainer.export_path={folder / 'exports'}",
            "trainer.logger=console",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=4",
            "trainer.max_tokens_per_microbatch=2048",
            "trainer.policy.optimizer_config.lr=1e-3",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.ckpt_interval=2",
            "trainer.eval_interval=100",
            "generator.n_samples_per_prompt=4",
            "generator.sampling_params.max_generate_length=16",
            "environment.env_class=arithmetic",
            ONE_PROCESS,
        ]

    return overrides


@pytest.fixture
def gsm8k_recipe(gsm8k_jsonl: Path, tmp_path: Path) -> Path:
    """A user's folder with the recipe and 32 problems."""
    folder = tmp_path / "project"
    shutil.copytree(REPOSITORY / "examples" / "gsm8k", folder)
    subprocess.run(
        [sys.executable, folder / "gsm8k_dataset.py", "--input", gsm8k_jsonl, "--output", folder, "--limit", "32"],
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        check=True,
        capture_output=True,
        timeout=120,
    )
    return folder


LOWER_CASE = """
from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.environments.registry import register


class LowerCaseEnv(BaseTextEnv):
    def step(self, action):
        reward = sum(c.isascii() and c.islower() for c in action) / max(len(action), 1)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


register("lower_case", "lower_case_plugin:LowerCaseEnv")
"""


@pytest.fixture
def easy(small: Callable[[Path], list[str]], plugins: Path) -> Callable[[Path], list[str]]:
    """`small` with a task that rewards a random model: the share of lower-case letters in its responses."""

    def overrides(folder: Path) -> list[str]:
        folder.mkdir(exist_ok=True)
        rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [
            *(override for override in small(folder) if not override.startswith(("environment.", "data."))),
            f"data.train_data=['{folder / 'rows.jsonl'}']",
            "data.val_data=[]",
            "environment.env_class=lower_case",
            ONE_PROCESS,
            "trainer.plugins=[lower_case_plugin]",
            "trainer.eval_before_train=false",
            "trainer.eval_interval=0",
        ]

    return overrides


def metrics_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Return metrics.jsonl by step, without values that depend on a clock."""
    rows: dict[int, dict[str, Any]] = {}
    for line in (folder / "ckpts" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert row["step"] not in rows, f"step {row['step']} is recorded twice"
        rows[row["step"]] = {
            k: v
            for k, v in row.items()
            if not k.startswith(("timing/", "throughput/", "engines/tokens_per_s", "time", "memory/"))
        }
    return rows


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a nested mapping by dotted key."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        values |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return values
