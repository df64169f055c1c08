"""Runs whose environments are on hosts of the cluster equal runs in the driver, also if hosts and nodes are lost."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ray_nodes import RayNodes, ray_nodes

from .conftest import command, metrics_of

PLUGIN = """
import time

from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.environments.registry import register


class SlowTwiceEnv(BaseTextEnv):
    def step(self, action):
        time.sleep(0.05)
        self.turns += 1
        reward = sum(c.isascii() and c.islower() for c in action) / max(len(action), 1)
        done = self.turns >= self.extras["max_turns"]
        messages = [] if done else [{"role": "user", "content": "again"}]
        return BaseTextEnvStepOutput(observations=messages, reward=reward, done=done, metadata={"turn": self.turns})


register("slow_twice", "slow_twice_plugin:SlowTwiceEnv")
"""


@pytest.mark.on_demand
@pytest.mark.slow
def test_lost_environment_host_keeps_run_bitwise_equal(small: Callable[[Path], list[str]], tmp_path: Path):
    (tmp_path / "slow_twice_plugin.py").write_text(PLUGIN)
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def overrides(folder: Path, *own: str) -> list[str]:
        return [
            *(override for override in small(folder) if not override.startswith(("environment.", "data."))),
            f"data.train_data=['{tmp_path / 'rows.jsonl'}']",
            f"data.val_data=['{tmp_path / 'rows.jsonl'}']",
            "trainer.plugins=[slow_twice_plugin]",
            "environment.env_class=slow_twice",
            "environment.skyrl_gym.max_env_workers=1",
            "generator.batched=true",
            "generator.max_turns=2",
            "generator.max_input_length=120",
            "trainer.timeouts.placement_s=60",
            "trainer.max_steps=4",
            *own,
        ]

    hosts = ["environment.hosts=2", "environment.host_cpus=0.5", "environment.host_resources={environments: 1}"]
    nodes = [{"trainer": 1.0}, {"environments": 1.0}, {"environments": 1.0}, {"environments": 1.0}]
    with ray_nodes(nodes, cpus=[2, 1, 1, 1]) as cluster:
        environment = os.environ | cluster.environment
        environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path), environment.get("PYTHONPATH", "")])
        for name, own in (("driver", []), ("hosts", hosts)):
            folder = tmp_path / name
            folder.mkdir()
            with (folder / "run.log").open("w") as log:
                run = subprocess.Popen(
                    command("main_base", overrides(folder, *own)), env=environment, stdout=log, stderr=log
                )
            if own:
                victim = node_with_a_host(cluster, folder, run)
                cluster.kill(victim)
            assert run.wait(timeout=400) == 0, (folder / "run.log").read_text()[-4000:]
    assert metrics_of(tmp_path / "driver") == metrics_of(tmp_path / "hosts")
    driver_log = (tmp_path / "hosts" / "ckpts" / "logs" / "driver.log").read_text()
    assert re.search(r"environment host \d is lost, with \d+ episodes", driver_log)


def node_with_a_host(cluster: RayNodes, folder: Path, run: subprocess.Popen[bytes]) -> int:
    """Wait for the first step, and return one of the nodes for environments that has a host."""
    metrics = folder / "ckpts" / "metrics.jsonl"
    deadline = time.monotonic() + 300
    while not (metrics.exists() and '"step": 1,' in metrics.read_text()):
        assert run.poll() is None and time.monotonic() < deadline, (folder / "run.log").read_text()[-4000:]
        time.sleep(0.01)
    indices = range(2, len(cluster.addresses))
    return next(
        index
        for index in indices
        if any("environments.worker" in " ".join(process.cmdline()) for process in cluster.processes(index))
    )
