"""Environment hosts in actors of a real Ray cluster: they behave like a WorkerPool, and lost hosts are replaced."""

from __future__ import annotations

import asyncio
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.hydra import load_preset
from skyrl_train.data.messages import Prompt
from skyrl_train.environments.hosts import HEARTBEAT_INTERVAL_S, EnvironmentHost, HostPool
from skyrl_train.environments.pool import EnvironmentPool, Episode, WorkerPool
from skyrl_train.errors import ConfigError, EnvironmentFailure, EnvironmentHostsLost
from skyrl_train.experiment.run_resources import build_host_pool
from tests.support.process_state import wait_for_exit

PLUGINS = str(Path(__file__).parent / "plugins")
QUESTION = [{"role": "user", "content": "6 * 3?"}]
DEADLINE_S = 3.0
"""Deadline of a step that hangs. Other steps take milliseconds."""


@pytest.fixture(scope="module")
def ray_runtime() -> Iterator[Cluster]:
    with Cluster() as cluster:
        yield cluster


@pytest.fixture
def cluster(ray_runtime: Cluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    monkeypatch.syspath_prepend(PLUGINS)
    with Cluster() as running:
        yield running


def host_pool(cluster: Cluster, count: int, log: Path, *overrides: str) -> HostPool:
    hosts = ["trainer.plugins=[misbehaving_envs]", f"environment.hosts={count}", "environment.host_cpus=0.5"]
    deadline = f"trainer.timeouts.environment_step_s={DEADLINE_S}"
    return build_host_pool(load_preset([*hosts, deadline, *overrides]), cluster, log)


def run_with(pool: EnvironmentPool, scenario: Callable[[Any], Awaitable[Any]]) -> Any:
    async def main() -> Any:
        async with pool:
            return await scenario(pool)

    return asyncio.run(asyncio.wait_for(main(), 240))


async def opened(pool: EnvironmentPool, env_class: str, **extras: Any) -> Episode:
    return await pool.start(env_class, Prompt("7", QUESTION, env_class, extras))


async def outcome(pool: EnvironmentPool, env_class: str, text: str) -> str | float:
    """Return the reward of one step, or the kind of failure."""
    try:
        episode = await opened(pool, env_class)
        try:
            return (await episode.step(text)).reward
        finally:
            await episode.close()
    except EnvironmentFailure as failure:
        return failure.kind


async def host_of(pid: int) -> psutil.Process:
    """Return the actor that started the supervisor of an environment's process."""
    supervisor = psutil.Process(pid).parent()
    assert supervisor is not None
    actor = supervisor.parent()
    assert actor is not None and "ray::" in " ".join(actor.cmdline())
    return actor


class HostInThisProcess:
    """A fake ActorProxy whose host runs in this process. It counts the calls."""

    name = "environment host 0"

    def __init__(self) -> None:
        self.host = EnvironmentHost(env_configs={}, max_env_workers=1, plugins=("misbehaving_envs",))
        self.calls: Counter[str] = Counter()

    async def call_with_deadline(self, deadline_s: float, method: str, *args: Any) -> Any:
        self.calls[method] += 1
        await asyncio.sleep(0.01)  # more calls arrive in the meantime
        return await getattr(self.host, method)(*args)

    def kill(self) -> None:
        """Do nothing, because there is no process."""


def pool_in_this_process(monkeypatch: pytest.MonkeyPatch) -> tuple[HostPool, Counter[str]]:
    monkeypatch.syspath_prepend(PLUGINS)
    remote: Any = HostInThisProcess()
    return HostPool(1, lambda index: remote), remote.calls


def test_concurrent_calls_to_host_share_remote_calls(monkeypatch: pytest.MonkeyPatch):
    pool, calls = pool_in_this_process(monkeypatch)

    async def scenario(pool: EnvironmentPool) -> None:
        episodes = [await opened(pool, "Counter") for _ in range(64)]
        calls.clear()
        outputs = await asyncio.gather(*(episode.step("one") for episode in episodes))
        assert all(output.metadata["actions"] == ["one"] for output in outputs)

    run_with(pool, scenario)
    assert calls.total() < 32, calls


def test_warning_of_last_close_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    pool, _ = pool_in_this_process(monkeypatch)

    async def scenario(pool: EnvironmentPool) -> None:
        await (await opened(pool, "BadEnd")).close()

    run_with(pool, scenario)
    assert "environment host 0: closing an environment BadEnd failed: " in caplog.text


def test_hosts_behave_like_local_workers(cluster: Cluster, tmp_path: Path):
    async def scenario(pool: EnvironmentPool) -> list[Any]:
        neighbor = await opened(pool, "Counter", name="Bo")
        assert neighbor.messages[-1]["content"] == "start Bo"
        await neighbor.step("one")
        texts = ["raises", "nan", "list", "text observations", "dies", "hangs", "no \ud800"]
        results: list[Any] = list(await asyncio.gather(*(outcome(pool, "Misbehaving", text) for text in texts)))
        results += [await outcome(pool, "BadStart", ""), await outcome(pool, "Printing", "fine")]
        results.append((await neighbor.step("two")).metadata["actions"])
        await neighbor.close()
        with pytest.raises(EnvironmentFailure, match="closed"):
            await neighbor.step("three")
        with pytest.raises(EnvironmentFailure, match="bad_row"):
            await pool.start("Counter", Prompt("7", QUESTION, "Counter", {"what": {1, 2}}))
        with pytest.raises(ConfigError, match="Unknown environment 'nothing'"):
            await pool.start("nothing", Prompt("7", QUESTION, "nothing", {}))
        return results

    log = tmp_path / "environments.log"
    from_hosts = run_with(host_pool(cluster, 2, log), scenario)
    from_workers = run_with(WorkerPool({}, 2, DEADLINE_S, ("misbehaving_envs",)), scenario)
    assert from_hosts == from_workers
    assert from_hosts == [
        *("LookupError", "bad_reward", "bad_reward", "bad_step_output", "environment_died", "timeout"),
        *("AttributeError", "PermissionError", 1.0, ["one", "two"]),
    ]
    assert "(env " in log.read_text(), "output of environments"


@pytest.mark.parametrize("signal_number", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.on_demand)])
def test_episodes_of_lost_host_are_replayed(cluster: Cluster, tmp_path: Path, signal_number: signal.Signals):
    pool = host_pool(cluster, 2, tmp_path / "environments.log")
    pool.heartbeat_timeout_s = 4 * HEARTBEAT_INTERVAL_S

    async def scenario(pool: EnvironmentPool) -> None:
        episodes = [await opened(pool, "Counter", name=str(number)) for number in range(8)]
        first_outputs = await asyncio.gather(*(episode.step("one") for episode in episodes))
        places = [await host_of(output.metadata["pid"]) for output in first_outputs]
        assert len(set(places)) == 2
        victim = places[0]
        fragile = [await opened(pool, "SideEffects") for _ in range(2)]  # one in each host
        await asyncio.gather(*(episode.step("one") for episode in fragile))
        below = [process.pid for process in victim.children(recursive=True)]
        pending = [asyncio.create_task(episode.step("sleep 0.4")) for episode in episodes]
        await asyncio.sleep(0.2)
        victim.send_signal(signal_number)
        for place, output in zip(places, await asyncio.gather(*pending), strict=True):
            assert output.metadata["actions"] == ["one", "sleep 0.4"]
            assert (await host_of(output.metadata["pid"]) == place) == (place != victim)
        results = await asyncio.gather(*map(reward_or_kind, fragile))
        assert sorted(map(str, results)) == ["1.0", "environment_died"]
        assert all(map(wait_for_exit, below)), "processes of the lost host"
        await wait_for_two_hosts(pool)
        places = [await host_of((await (await opened(pool, "Counter")).step("x")).metadata["pid"]) for _ in range(12)]
        assert len(set(places)) == 2 and victim not in places, "the host was restarted"

    run_with(pool, scenario)


async def reward_or_kind(episode: Episode) -> float | str:
    try:
        return (await episode.step("two")).reward
    except EnvironmentFailure as failure:
        return failure.kind


async def wait_for_two_hosts(pool: Any) -> None:
    deadline = time.monotonic() + 60
    while len(pool.hosts) < 2:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.1)


@pytest.mark.on_demand
def test_episode_that_kills_hosts_fails(cluster: Cluster, tmp_path: Path):
    async def scenario(pool: EnvironmentPool) -> None:
        episode = await opened(pool, "KillsItsHost")
        with pytest.raises(
            EnvironmentFailure, match="environment_died: KillsItsHost in step: its host was lost 3 times"
        ):
            await episode.step("now")
        assert await outcome(pool, "Counter", "fine") == 1.0

    run_with(host_pool(cluster, 1, tmp_path / "environments.log"), scenario)


def test_calls_without_host_fail_after_timeout(cluster: Cluster, tmp_path: Path):
    pool = host_pool(cluster, 1, tmp_path / "environments.log", "trainer.timeouts.environment_hosts_s=20")

    async def scenario(pool: Any) -> None:
        episode = await opened(pool, "Counter")
        host = await host_of((await episode.step("one")).metadata["pid"])
        pool.environment_hosts_s = 0.5  # less than a start takes
        host.kill()
        error = r"all of them are lost.*environment_hosts_s=0.5 s\. The last loss: environment host 0 died"
        with pytest.raises(EnvironmentHostsLost, match=error):
            await episode.step("two")

    run_with(pool, scenario)


def test_hosts_that_do_not_fit_are_rejected(cluster: Cluster, tmp_path: Path):
    log = tmp_path / "environments.log"
    with pytest.raises(ConfigError, match=r"environment\.hosts=2: needs 2 x 64 CPU; the Ray cluster has"):
        host_pool(cluster, 2, log, "environment.host_cpus=64")
    with pytest.raises(ConfigError, match=r"needs 1 x 0\.5 CPU and 1 gpu_free; .* not enough gpu_free"):
        host_pool(cluster, 1, log, "environment.host_resources={gpu_free: 1}")
