"""Command lines started as a user does: with only PATH and HOME in the environment."""

from __future__ import annotations

import resource
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skyrl_train.cluster.addresses import free_address
from tests.support.machine_speed import slowness
from tests.support.wheel import build_wheel

from .conftest import metrics_of
from .front_door import REPOSITORY, clean_environment, installing_environment, run_watched

ONE_STEP = ["trainer.max_steps=1", "trainer.ckpt_interval=0", "trainer.eval_before_train=false"]

PREFIX_PROBE = """
import os, sys
from pathlib import Path
(Path({folder!r}) / str(os.getpid())).write_text(sys.prefix)
"""
"""A plugin that records the virtual environment of each process that imports it."""

NO_SUCH_PYTHON = """
import sys
from skyrl_train.cluster import ray_cluster
ray_cluster.START_TIMEOUT_S = 3.0
sys.executable = "/no/such/python"
ray_cluster.Cluster().connect()
"""
"""A driver whose Python does not exist on the cluster."""

OWN_PROGRAM = """
import skyrl_train as sk
from skyrl_train.algorithms.reductions import token_mean
from skyrl_train.experiment.base import Experiment, run_experiment

import ray  # before the experiment starts


@sk.register.reduction("my_mean")
def my_mean(mask, sequence_ids, group_ids, *, max_seq_len):
    return token_mean(mask, sequence_ids, group_ids, max_seq_len=max_seq_len)


class Tenfold(Experiment):
    def build_generator(self, client, environments, *, evaluation):
        generator = super().build_generator(client, environments, evaluation=evaluation)
        rollout = generator.rollout

        async def with_my_reward(prompt, position):
            group = await rollout(prompt, position)
            for trajectory in group.trajectories:
                trajectory.reward = self.config.generator.my_reward * self.config.environment.my_factor
            return group

        generator.rollout = with_my_reward
        return generator


if __name__ == "__main__":
    run_experiment(Tenfold)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    return folder


@pytest.mark.on_demand
@pytest.mark.slow
def test_all_processes_use_isolated_uv_environment(small: Callable[[Path], list[str]], home: Path, tmp_path: Path):
    command = ["uv", "run", "--isolated", "-m", "skyrl_train.entrypoints.main_base", *small(tmp_path), *ONE_STEP]
    done = run_watched(command, installing_environment(home), REPOSITORY)
    assert metrics_of(tmp_path)[1]["rollouts/failed"] == 0
    (prefix,) = done.site_prefixes  # the same one in the driver and all other processes
    assert prefix != sys.prefix
    assert len(done.workers) >= 2
    assert "virtual environment" not in done.output


@contextmanager
def ray_started_by_hand(env: dict[str, str]) -> Iterator[str]:
    """Start a cluster by hand with the Python of the tests; yield its RAY_ADDRESS."""
    address = "{}:{}".format(*free_address())
    start = ["start", "--head", "--block", f"--port={address.partition(':')[2]}", "--num-cpus=2"]
    command = [str(Path(sys.executable).with_name("ray")), *start, "--include-dashboard=false"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as head:
        assert head.stdout is not None
        assert any("Ray runtime started" in line for line in head.stdout), "Ray did not start"
        try:
            yield address
        finally:
            head.terminate()
            head.communicate(timeout=60)


@pytest.fixture
def installed_wheel(tmp_path: Path) -> Path:
    """The Python of an environment with the wheel, which gets everything else from the environment of the tests."""
    folder = tmp_path / "installed"
    venv.create(folder, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(build_wheel(tmp_path)) as archive:
        archive.extractall(site)
    (test_packages,) = Path(sys.prefix, "lib").glob("python*/site-packages")
    (site / "test_packages.pth").write_text(f"{test_packages}\n")
    return folder / "bin" / "python"


@pytest.mark.on_demand
@pytest.mark.slow
def test_joined_cluster_runs_python_of_driver(
    small: Callable[[Path], list[str]], installed_wheel: Path, home: Path, tmp_path: Path
):
    folder = tmp_path / "prefixes"
    folder.mkdir()
    (tmp_path / "probe.py").write_text(PREFIX_PROBE.format(folder=str(folder)))
    command = [str(installed_wheel), "-m", "skyrl_train.entrypoints.main_base", *small(tmp_path), *ONE_STEP]
    with ray_started_by_hand(clean_environment(home)) as address:
        env = clean_environment(home) | {"RAY_ADDRESS": address}
        run_watched([*command, "trainer.plugins=[probe]"], env, tmp_path)
        missing_python = subprocess.run(
            [str(installed_wheel), "-c", NO_SUCH_PYTHON],
            env=env,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    assert "ConfigError: RAY_ADDRESS=" in missing_python.stderr
    assert "workers run the driver's Python, /no/such/python, which must exist on every node" in missing_python.stderr
    assert metrics_of(tmp_path)[1]["rollouts/failed"] == 0
    prefixes = [file.read_text() for file in folder.iterdir()]
    assert len(prefixes) >= 4, "driver, rank, engine and processes of environments"
    assert set(prefixes) == {str(installed_wheel.parents[1])}


@pytest.mark.on_demand
@pytest.mark.slow
def test_own_program_has_own_keys_and_names(small: Callable[[Path], list[str]], home: Path, tmp_path: Path):
    (tmp_path / "main_tenfold.py").write_text(OWN_PROGRAM)
    own = ["+generator.my_reward=0.5", "+environment.my_factor=10", "trainer.algorithm.loss_reduction=my_mean"]
    command = ["uv", "run", "--project", str(REPOSITORY), "--no-sync", "main_tenfold.py", *small(tmp_path), *ONE_STEP]
    done = run_watched([*command, *own], clean_environment(home), tmp_path)
    assert metrics_of(tmp_path)[1]["reward/mean"] == 5.0
    assert done.site_prefixes == {sys.prefix}
    assert "note: generator.my_reward=0.5 is a custom key. Only your code reads it." in done.output


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def refusal(home: Path, cwd: Path, entrypoint: str, *arguments: str) -> tuple[str, float]:
    """Run an entrypoint that exits with 2. Return its stderr and CPU-seconds, which a busy machine cannot stretch."""
    command = [sys.executable, "-m", f"skyrl_train.entrypoints.{entrypoint}", *arguments]
    before = _children_cpu_s()
    done = subprocess.run(
        command, env=clean_environment(home), cwd=cwd, capture_output=True, text=True, timeout=60, check=False
    )
    seconds = _children_cpu_s() - before
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr, seconds


MISSING = {
    "data": (["data.train_data=['{folder}/trian.jsonl']"], "data.train_data={folder}/trian.jsonl: must be a file"),
    "evaluation data": (["data.val_data=[/none/x.parquet]"], "data.val_data=/none/x.parquet: must be a file"),
    "model": (["trainer.policy.model.path=/none/model"], "trainer.policy.model.path=/none/model: must be a model's"),
    "plugin": (["trainer.plugins=[no_such_plugin]"], "trainer.plugins: 'no_such_plugin' cannot be imported"),
    "plugin with a mistake": (
        ["trainer.plugins=[broken]"],
        "ZeroDivisionError: division by zero, in {folder}/broken.py, line 2",
    ),
    "ranks": (["trainer.placement.policy_num_gpus_per_node=5000"], "this machine has"),
}


@pytest.mark.parametrize("entrypoint", ["check_config", "main_base"])
@pytest.mark.parametrize("what", MISSING)
def test_missing_inputs_are_reported_before_ray_starts(
    what: str, entrypoint: str, small: Callable[[Path], list[str]], home: Path, tmp_path: Path
):
    (tmp_path / "broken.py").write_text("x = 1\n1 / 0\n")
    arguments, message = ([text.format(folder=tmp_path) for text in MISSING[what][0]], MISSING[what][1])
    text, seconds = refusal(home, tmp_path, entrypoint, *small(tmp_path), *arguments)
    assert message.format(folder=tmp_path) in text
    assert seconds < 2 * slowness(), "importing torch and Ray takes longer"
    assert not (tmp_path / "ckpts").exists()
