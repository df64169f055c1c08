"""Only the worker answers calls of its environments. An invalid reply fails the episode that it came from."""

from __future__ import annotations

import asyncio
import json
import struct
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.environments.pool import MAX_FAILURE_KINDS, OTHER_FAILURE_KIND, WorkerPool
from skyrl_train.environments.worker import MAX_KIND_CHARS
from skyrl_train.errors import EnvironmentFailure

STEP = 3
"""Number of the first step after two episodes have started. The hello call has the number 0."""
ANSWER = {"observations": [], "reward": 7.0, "done": False, "metadata": {}}


@pytest.fixture(autouse=True)
def plugins_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))


def run_with_pool(scenario: Callable[[WorkerPool], Awaitable[Any]], deadline_s: float = 10.0) -> Any:
    """Run `scenario(pool)` with a single environment process."""

    async def main() -> Any:
        async with WorkerPool({}, 1, deadline_s, ("misbehaving_envs", "wire_envs")) as pool:
            return await scenario(pool)

    return asyncio.run(asyncio.wait_for(main(), 120))


async def outcome(pool: WorkerPool, env_class: str, text: str, **extras: Any) -> str | float:
    """Return the reward of one step, or the kind of failure."""
    try:
        episode = await pool.start(env_class, Prompt("7", [], env_class, extras))
        try:
            return (await episode.step(text)).reward
        finally:
            await episode.close()
    except EnvironmentFailure as failure:
        return failure.kind


def framed(body: bytes, number: int = STEP) -> str:
    return (struct.pack("!IQ", len(body), number) + body).decode("latin-1")


@pytest.mark.defect("forked-child-answers-on-pipe")
@pytest.mark.parametrize("how", ["first", "later", "raises", "exits", "in C", "multiprocessing"])
def test_forked_child_never_answers(how: str):
    async def scenario(pool: WorkerPool) -> None:
        calls = [outcome(pool, "Forks", how), *(outcome(pool, "Counter", "sleep 0.1") for _ in range(6))]
        assert await asyncio.gather(*calls) == [1.0] * 7
        assert await outcome(pool, "Counter", "sleep 0.5") == 1.0

    run_with_pool(scenario)


BAD_BODIES = [
    b"[]",
    b"2",
    b"null",
    b"{}",
    b"nothing",
    b'{"error": 1}',
    b'{"error": "x"}',
    b'{"error": "x", "detail": 3}',
    b'{"observations": [], "reward": NaN, "done": true}',
    b'{"observations": [], "reward": 1e99, "done": true}',
    b'{"observations": [1], "reward": 1, "done": true}',
    b'{"observations": [], "reward": 1, "done": "no"}',
    b'{"observations": [], "reward": 1, "done": true, "metadata": 3}',
    b'{"observations": [], "reward": 1, "done": true, "metadata": {"x": ' + b"[" * 500 + b"]" * 500 + b"}}",
    b"[" * 5000 + b"]" * 5000,
]
FRAMES = {
    **{body[:60].decode(): framed(body) for body in BAD_BODIES},
    "another call's number": framed(json.dumps(ANSWER).encode(), number=99),
    "an earlier call's number": framed(json.dumps(ANSWER).encode(), number=0),
    "no number": "\0\0\0\2[]",
    "too long": struct.pack("!IQ", 2**31, STEP).decode("latin-1"),
    "one byte": "x",
}


@pytest.mark.defect("invalid-reply-accepted")
@pytest.mark.parametrize("frame", FRAMES.values(), ids=list(FRAMES))
def test_invalid_reply_fails_only_its_episode(frame: str):
    async def scenario(pool: WorkerPool) -> None:
        writer = await pool.start("Writes", Prompt("7", [], "Writes", {"frame": frame}))
        neighbor = await pool.start("Counter", Prompt("7", [], "Counter"))
        results = await asyncio.gather(writer.step("now"), neighbor.step("one"), return_exceptions=True)
        assert isinstance(results[0], EnvironmentFailure) and results[0].kind == "environment_died", results[0]
        assert results[1].metadata["actions"] == ["one"]  # type: ignore[union-attr]
        assert await outcome(pool, "Counter", "fine") == 1.0

    run_with_pool(scenario)


@pytest.mark.defect("invalid-reply-accepted")
def test_incomplete_reply_times_out():
    async def scenario(pool: WorkerPool) -> None:
        frame = struct.pack("!IQ", 2**20, 2).decode("latin-1")
        assert await outcome(pool, "Writes", "now", frame=frame) == "timeout"
        assert await outcome(pool, "Counter", "fine") == 1.0

    run_with_pool(scenario, deadline_s=3.0)


@pytest.mark.defect("invalid-reply-accepted")
def test_duplicate_reply_fails_the_episode_that_sent_it():
    async def scenario(pool: WorkerPool) -> None:
        frame = framed(json.dumps(ANSWER).encode())
        writer = await pool.start("Writes", Prompt("7", [], "Writes", {"frame": frame}))
        neighbor = await pool.start("Counter", Prompt("7", [], "Counter"))
        first, other = await asyncio.gather(writer.step("now"), neighbor.step("sleep 0.2"))
        assert (first.reward, other.reward) == (7.0, 1.0), "an environment decides its own reward"
        with pytest.raises(EnvironmentFailure, match="environment_died"):
            await writer.step("nothing")
        assert (await neighbor.step("two")).metadata["actions"] == ["sleep 0.2", "two"]

    run_with_pool(scenario)


@pytest.mark.parametrize("frame", ["x", framed(b"{}", number=99)], ids=["one byte", "a frame"])
def test_unsolicited_output_fails_no_other_episode(frame: str):
    async def scenario(pool: WorkerPool) -> None:
        neighbor = await pool.start("Counter", Prompt("7", [], "Counter"))
        await neighbor.step("one")
        assert await outcome(pool, "Writes", "after its answer", frame=frame) == 1.0
        await asyncio.sleep(0.8)
        assert (await neighbor.step("two")).metadata["actions"] == ["one", "two"]

    run_with_pool(scenario)


@pytest.mark.defect("unbounded-environment-metrics")
def test_failure_kinds_are_limited():
    async def scenario(pool: WorkerPool) -> list[str | float]:
        names = ["x" * (MAX_KIND_CHARS + 1), *(f"Kind{number}" for number in range(MAX_FAILURE_KINDS + 5)), "Kind0"]
        return [await outcome(pool, "OwnKinds", name) for name in names]

    kinds = Counter(run_with_pool(scenario))
    assert kinds[OTHER_FAILURE_KIND] == 6 and kinds["Kind0"] == 2 and len(kinds) == MAX_FAILURE_KINDS + 1


def test_failure_of_other_kind_keeps_its_name():
    async def scenario(pool: WorkerPool) -> None:
        episode = await pool.start("OwnKinds", Prompt("7", [], "OwnKinds"))
        with pytest.raises(EnvironmentFailure, match=rf"other: x{{{MAX_KIND_CHARS}}}: no"):
            await episode.step("x" * 5000)

    run_with_pool(scenario)


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("metadata", "bad_step_output"),
        ("message", "Unreadable"),
        ("long message", "ConfigError"),
        ("long kind", OTHER_FAILURE_KIND),
        ("odd detail", "odd"),
    ],
)
@pytest.mark.defect("unprintable-exception-kills-process")
def test_unreadable_failure_fails_no_other_episode(how: str, kind: str):
    async def scenario(pool: WorkerPool) -> None:
        neighbor = await pool.start("Counter", Prompt("7", [], "Counter"))
        first = await neighbor.step("one")
        assert await outcome(pool, "Unreadable", how, how=how) == kind
        assert (await neighbor.step("two")).metadata["pid"] == first.metadata["pid"]

    run_with_pool(scenario)


def test_output_of_abandoned_worker_is_ignored():
    async def scenario(pool: WorkerPool) -> None:
        episode = await pool.start("Writes", Prompt("7", [], "Writes", {"frame": "x" * 10_000}))
        (worker,) = pool.workers
        with pytest.raises(EnvironmentFailure, match="environment_died"):
            await episode.step("now")
        size = len(worker._inbox)
        worker.pipe_data_received(1, b"x" * 10_000)
        assert len(worker._inbox) == size

    run_with_pool(scenario)
