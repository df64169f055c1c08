from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyrl_train import trace
from skyrl_train.data.messages import Prompt
from skyrl_train.environments.base import StepOutput
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.errors import ConfigError, EnvironmentFailure
from tests.support.process_state import wait_for_exit

PLUGINS = Path(__file__).parent / "plugins"
QUESTION = [{"role": "user", "content": "6 * 3?"}]
DEADLINE_S = 3.0
"""Deadline of steps in tests in which some steps exceed it. The others take milliseconds."""
GSM8K = Prompt("0", QUESTION, "gsm8k", {"reward_spec": {"method": "rule", "ground_truth": "18"}})


@pytest.fixture(autouse=True)
def plugins_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PLUGINS))


def prompt(env_class: str, **extras: Any) -> Prompt:
    return Prompt("7", QUESTION, env_class, extras)


def run_with_pool(
    scenario: Callable[[WorkerPool], Awaitable[Any]],
    *,
    max_workers: int = 1,
    deadline_s: float = 30.0,
    plugins: tuple[str, ...] = ("misbehaving_envs",),
    env_configs: dict[str, Any] | None = None,
) -> Any:
    async def main() -> Any:
        async with WorkerPool(env_configs or {}, max_workers, deadline_s, plugins) as pool:
            return await scenario(pool)

    return asyncio.run(asyncio.wait_for(main(), 240))


async def outcome(pool: WorkerPool, env_class: str, text: str, **extras: Any) -> str | float:
    """Return the reward of one step, or the kind of failure."""
    try:
        episode = await pool.start(env_class, prompt(env_class, **extras))
        try:
            return (await episode.step(text)).reward
        finally:
            await episode.close()
    except EnvironmentFailure as failure:
        return failure.kind


async def start_hanging_step(pool: WorkerPool) -> asyncio.Task[StepOutput]:
    """Start a step that never returns, ahead of the calls that are submitted next."""
    episode = await pool.start("Misbehaving", prompt("Misbehaving"))
    step = asyncio.create_task(episode.step("hangs"))
    await asyncio.sleep(0)
    return step


def test_episode_starts_steps_and_closes():
    async def scenario(pool: WorkerPool) -> None:
        episode = await pool.start("gsm8k", GSM8K)
        assert episode.messages == QUESTION
        output = await episode.step("6 * 3 = 18\n#### 18")
        assert (output.reward, output.done, output.observations) == (1.0, True, [])
        await episode.close()
        await episode.close()
        with pytest.raises(EnvironmentFailure, match="closed"):
            await episode.step("again")

    run_with_pool(scenario, plugins=())


@pytest.mark.fault("F11")
@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("raises", "LookupError"),
        ("none", "bad_reward"),
        ("nan", "bad_reward"),
        ("infinite", "bad_reward"),
        ("huge", "bad_reward"),
        ("string", "bad_reward"),
        ("list", "bad_reward"),
        ("missing reward", "bad_reward"),
        ("nothing", "bad_step_output"),
        ("text observations", "bad_step_output"),
        ("writes a lot", "too_large"),
        ("exits", "SystemExit"),
        ("dies", "environment_died"),
        ("hangs", "timeout"),
    ],
)
def test_failure_has_kind_and_affects_one_episode(text: str, kind: str):
    async def scenario(pool: WorkerPool) -> None:
        neighbor = await pool.start("Counter", prompt("Counter"))
        await neighbor.step("one")
        pending = [asyncio.create_task(outcome(pool, "Misbehaving", text))]
        pending += [asyncio.create_task(outcome(pool, "Counter", "fine")) for _ in range(3)]
        assert await asyncio.gather(*pending) == [kind, 1.0, 1.0, 1.0]
        assert (await neighbor.step("two")).metadata["actions"] == ["one", "two"]

    run_with_pool(scenario, deadline_s=DEADLINE_S if kind == "timeout" else 30.0)


def test_failure_reports_exception_and_source_line():
    async def scenario(pool: WorkerPool) -> None:
        episode = await pool.start("Misbehaving", prompt("Misbehaving"))
        with pytest.raises(EnvironmentFailure, match=r"not in the book.*misbehaving_envs\.py:\d+ in raises"):
            await episode.step("raises")
        with pytest.raises(EnvironmentFailure, match="not in the book"):
            await episode.step("none")  # a failed episode stays failed
        assert await outcome(pool, "BadStart", "") == "PermissionError"
        assert await outcome(pool, "gsm8k", "#### 1") == "ValueError"  # the row has no ground truth

    run_with_pool(scenario)


@pytest.mark.fault("F14")
def test_step_that_hangs_in_c_is_killed():
    async def scenario(pool: WorkerPool) -> float:
        assert await outcome(pool, "Counter", "warm") == 1.0
        start = time.monotonic()
        assert await outcome(pool, "Misbehaving", "hangs in c") == "timeout"
        return time.monotonic() - start

    assert run_with_pool(scenario, deadline_s=DEADLINE_S) < 15


def test_trace_has_calls_of_each_process(tmp_path: Path):
    async def scenario(pool: WorkerPool) -> None:
        assert await outcome(pool, "Counter", "fine") == 1.0
        assert await outcome(pool, "Misbehaving", "hangs") == "timeout"
        assert await outcome(pool, "Counter", "fine") == 1.0

    with trace.write_trace(tmp_path / "trace.json"):
        run_with_pool(scenario, deadline_s=DEADLINE_S)
    events = json.loads((tmp_path / "trace.json").read_text())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    calls = [event for event in events if event["ph"] == "X"]
    expected = ["hello", "start", "step", "close", "start", "step: timeout", "hello", "start", "step", "close"]
    assert [event["name"] for event in calls] == expected
    assert len(rows) == 2 and all(name.startswith("process ") for name in rows.values())
    assert len({event["tid"] for event in calls[:6]}) == 1
    assert calls[5]["dur"] >= DEADLINE_S * 1e6 > calls[2]["dur"]


def test_episodes_of_killed_process_are_replayed():
    async def scenario(pool: WorkerPool) -> None:
        episodes = [await pool.start("Counter", prompt("Counter", name=name)) for name in "ab"]
        for episode in episodes:
            await episode.step("first")
        hung = await start_hanging_step(pool)
        waiting = await episodes[0].step("second")  # queued behind the hung call
        later = await episodes[1].step("second")  # submitted after the kill
        with pytest.raises(EnvironmentFailure, match="timeout"):
            await hung
        for episode, output in zip(episodes, (waiting, later), strict=True):
            assert output.metadata["actions"] == ["first", "second"]
            assert output.metadata["pid"] != episode.metadata["pid"]
        assert episodes[1].messages[-1]["content"] == "start b"

    run_with_pool(scenario, deadline_s=DEADLINE_S)


def test_non_replayable_episodes_fail_with_their_process():
    async def scenario(pool: WorkerPool) -> None:
        asleep, waiting = [await pool.start("SideEffects", prompt("SideEffects")) for _ in range(2)]
        await asleep.step("first")
        hung = await start_hanging_step(pool)
        queued = asyncio.create_task(waiting.step("queued behind the hung call"))
        not_begun = asyncio.create_task(outcome(pool, "SideEffects", "fine"))
        with pytest.raises(EnvironmentFailure, match="timeout"):
            await hung
        for call in (queued, asleep.step("second")):
            with pytest.raises(EnvironmentFailure, match="environment_died: SideEffects is not replayable"):
                await call
        assert await not_begun == 1.0

    run_with_pool(scenario, deadline_s=DEADLINE_S)


def test_unusable_settings_raise_config_error():
    async def scenario(pool: WorkerPool) -> None:
        with pytest.raises(ConfigError, match=r"openenv\.base_url=None"):
            await pool.start("openenv", prompt("openenv"))

    run_with_pool(scenario)


def test_deadline_excludes_time_in_queue():
    async def scenario(pool: WorkerPool) -> list[str | float]:
        return await asyncio.gather(*(outcome(pool, "Counter", "sleep 0.6") for _ in range(6)))

    assert run_with_pool(scenario, deadline_s=3.0) == [1.0] * 6


@pytest.mark.parametrize("text", ["sleep 0.1", "x" * 2**22], ids=["short", "more than the pipe holds"])
def test_busy_driver_does_not_cause_timeouts(text: str):
    async def scenario(pool: WorkerPool) -> float:
        episode = await pool.start("Counter", prompt("Counter"))
        step = asyncio.create_task(episode.step(text))
        await asyncio.sleep(0)
        await asyncio.sleep(0)  # the call is sent
        time.sleep(DEADLINE_S + 1)
        return (await step).reward

    assert run_with_pool(scenario, deadline_s=DEADLINE_S) == 1.0


def test_cancelled_step_does_not_affect_others():
    async def scenario(pool: WorkerPool) -> None:
        episode = await pool.start("Counter", prompt("Counter"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(episode.step("sleep 2"), 0.05)
        await episode.close()
        assert await outcome(pool, "Counter", "fine") == 1.0

    run_with_pool(scenario)


def test_cancelled_start_leaves_no_environment():
    async def scenario(pool: WorkerPool) -> None:
        start = asyncio.create_task(pool.start("Counter", prompt("Counter")))
        await asyncio.sleep(0)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert not any(worker.episodes for worker in pool.workers)
        assert await outcome(pool, "Counter", "x") == 1.0

    run_with_pool(scenario)


def test_environment_that_cannot_start_is_dropped():
    async def scenario(pool: WorkerPool) -> None:
        for _ in range(3):
            with pytest.raises(EnvironmentFailure):
                await pool.start("BadStart", prompt("BadStart"))
        assert not any(worker.episodes for worker in pool.workers)
        assert await outcome(pool, "Counter", "x") == 1.0

    run_with_pool(scenario)


@pytest.mark.fault("F24")
def test_output_of_environments_does_not_disturb_the_wire():
    text = "NUL \x00, escape \x1b[31m, lone surrogate \ud800, separator \u2028, <script>, [bold]"

    async def scenario(pool: WorkerPool) -> None:
        episode = await pool.start("Chatty", prompt("Chatty"))
        for _ in range(2):
            output = await episode.step(text)
            assert output.observations == [{"role": "tool", "content": text}]
            assert output.metadata == {"heard": "end of file", "odd": "{1, 2}", "length": len(text)}

    run_with_pool(scenario)


def test_skyrl_gym_environment_runs_unchanged():
    async def scenario(pool: WorkerPool) -> None:
        row = prompt("SkyRLGymStyle", reward_spec={"ground_truth": "18"})
        episode = await pool.start("SkyRLGymStyle", row)
        first, second = await episode.step("is it 17?"), await episode.step("18!")
        assert (first.reward, first.done, first.observations[0]["content"]) == (0.0, False, "go on")
        assert (second.reward, second.done, second.metadata) == (1.0, True, {"topk": 3})

    run_with_pool(scenario, env_configs={"SkyRLGymStyle": {"search": {"topk": 3}}, "max_env_workers": 32})


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("broken_plugin", "this plugin is broken"),
        ("dying_plugin", "dying_plugin"),
        ("no_such_plugin", "no_such_plugin"),
    ],
)
def test_plugin_that_cannot_be_imported_raises_config_error(plugin: str, message: str):
    async def scenario(pool: WorkerPool) -> None:
        results = await asyncio.gather(*(pool.start("gsm8k", GSM8K) for _ in range(5)), return_exceptions=True)
        assert all(isinstance(result, ConfigError) and message in str(result) for result in results), results
        with pytest.raises(ConfigError, match=message):
            await pool.start("gsm8k", GSM8K)

    run_with_pool(scenario, plugins=(plugin,))


def test_unknown_environment_raises_config_error():
    async def scenario(pool: WorkerPool) -> None:
        with pytest.raises(ConfigError, match=r"'gsm8'.*Did you mean 'gsm8k'"):
            await pool.start("gsm8", GSM8K)
        assert (await (await pool.start("gsm8k", GSM8K)).step("#### 18")).reward == 1.0

    run_with_pool(scenario)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


@pytest.mark.defect("bad-rows-found-late")
@pytest.mark.parametrize(
    "value", [b"\x89PNG", nested(2000), 10**5000, {(1, 2): 3}], ids=["bytes", "deep", "long", "key"]
)
def test_row_that_is_not_json_fails_its_episode(value: Any):
    async def scenario(pool: WorkerPool) -> None:
        assert await outcome(pool, "Counter", "x", image=value) == "bad_row"
        assert await outcome(pool, "Counter", "x") == 1.0

    run_with_pool(scenario)


@pytest.mark.defect("deeply-nested-observation-ends-run")
@pytest.mark.parametrize("depth", [101, 940, 5000])
@pytest.mark.parametrize("part", ["opening", "observation", "metadata"])
def test_deeply_nested_answer_fails_its_episode(part: str, depth: int):
    async def scenario(pool: WorkerPool) -> None:
        neighbor = await pool.start("SideEffects", prompt("SideEffects"))  # fails if its process is lost
        assert await outcome(pool, "Nests", part, part=part, depth=depth) in ("bad_step_output", "RecursionError")
        assert await outcome(pool, "Nests", part, part=part, depth=20) == 1.0
        assert (await neighbor.step("fine")).reward == 1.0

    run_with_pool(scenario)


@pytest.mark.defect("failure-without-kind-ends-run")
def test_failure_without_kind_fails_its_episode():
    async def scenario(pool: WorkerPool) -> None:
        assert await outcome(pool, "NoKind", "x") == "None"

    run_with_pool(scenario)


@pytest.fixture
def started_processes() -> Callable[[], set[psutil.Process]]:
    """Return a function that returns the children of this process that started after the test began."""
    before = set(psutil.Process().children())
    return lambda: set(psutil.Process().children()) - before


def test_workers_start_as_needed_up_to_limit(started_processes: Callable[[], set[psutil.Process]]):
    async def scenario(pool: WorkerPool) -> None:
        for _ in range(3):
            assert await outcome(pool, "Counter", "alone") == 1.0
        assert len(started_processes()) == 1
        await asyncio.gather(*(outcome(pool, "Counter", "sleep 0.05") for _ in range(12)))
        assert len(started_processes()) == 2

    run_with_pool(scenario, max_workers=2)


def test_close_kills_environments_after_timeout(started_processes: Callable[[], set[psutil.Process]]):
    async def scenario(pool: WorkerPool) -> None:
        assert await outcome(pool, "NeverCloses", "") == 1.0

    start = time.monotonic()
    run_with_pool(scenario, deadline_s=DEADLINE_S)
    assert time.monotonic() - start < 60, "its thread sleeps for longer than this"
    assert started_processes() == set()


def test_close_fails_pending_calls():
    async def scenario() -> None:
        async with WorkerPool({}, 1, 3.0, ("misbehaving_envs",)) as pool:
            tasks = [asyncio.create_task(outcome(pool, "Misbehaving", "hangs")) for _ in range(3)]
            await asyncio.sleep(0.2)
        assert await asyncio.gather(*tasks) == ["host_closed"] * 3

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_step_after_close_fails():
    async def scenario() -> None:
        async with WorkerPool({}, 1, 3.0, ("misbehaving_envs",)) as pool:
            episode = await pool.start("Misbehaving", prompt("Misbehaving"))
        with pytest.raises(EnvironmentFailure) as caught:
            await episode.step("hangs")
        assert caught.value.kind == "host_closed"

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_children_of_killed_environment_are_killed(tmp_path: Path):
    pid_file = tmp_path / "pid"

    async def scenario(pool: WorkerPool) -> None:
        kind = await outcome(pool, "Misbehaving", "starts a child and hangs", pid_file=str(pid_file))
        assert kind == "timeout"

    run_with_pool(scenario, deadline_s=5.0)
    assert wait_for_exit(int(pid_file.read_text()))


def test_workers_end_with_killed_driver():
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PLUGINS / "hanging_driver.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as driver:
        assert driver.stdout is not None
        pids = [int(pid) for pid in driver.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(psutil.pid_exists, pids))
        time.sleep(0.2)  # one of them is now in its endless step
        driver.send_signal(signal.SIGKILL)
    assert all(map(wait_for_exit, pids))
