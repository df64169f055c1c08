"""Calls of environments a CPU-second of the driver: beside it, and in 1 and 2 hosts with one process each.

    python scripts/benchmarks/environment_hosts.py

4,096 episodes of gsm8k_multi_turn at once, each with a start and 3 steps of 200 characters. What hosts and environment
processes take is not in it.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

from skyrl_train.assembly.environment_hosts import environments_of_run
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.hydra import load
from skyrl_train.data.trajectory import Prompt
from skyrl_train.environments.pool import EnvironmentPool

EPISODES, TURNS = 4096, 3


async def measured(hosts: int, cluster: Cluster, folder: Path) -> str:
    one_process = ["environment.host_cpus=0.5", "environment.skyrl_gym.max_env_workers=1"]
    async with environments_of_run(load([f"environment.hosts={hosts}", *one_process]), cluster, folder) as pool:
        await asyncio.gather(*(play(pool, number) for number in range(64)))  # starts processes
        spent, start = time.process_time(), time.perf_counter()
        await asyncio.gather(*(play(pool, number) for number in range(EPISODES)))
        spent, wall = time.process_time() - spent, time.perf_counter() - start
    calls = EPISODES * (TURNS + 1)
    return f"hosts={hosts}: {calls / spent:,.0f} calls a CPU-s of the driver; {spent:.2f} CPU-s, {wall:.2f} s"


async def play(pool: EnvironmentPool, number: int) -> None:
    row = {"reward_spec": {"method": "rule", "ground_truth": "5"}, "max_turns": TURNS}
    messages = [{"role": "user", "content": "2 + 3 = ?"}]
    episode = await pool.start("gsm8k_multi_turn", Prompt(str(number), messages, "gsm8k_multi_turn", row))
    for _ in range(TURNS):
        await episode.step("a" * 200)
    await episode.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, Cluster() as cluster:
        (Path(folder) / "logs").mkdir()
        for hosts in (0, 1, 2):
            print(asyncio.run(measured(hosts, cluster, Path(folder))), flush=True)
