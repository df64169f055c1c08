"""Episodes of agents: real programs, real sessions, scripted answers."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.agents import runner
from skyrl_train.agents.generator import EnvironmentDispatcher
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup
from skyrl_train.engines.base import SampleRequest
from skyrl_train.errors import EngineError, EnginesLost
from skyrl_train.rollouts.conversation import EpisodeLimiter
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.agents import PROGRAM, agent_generator, agent_prompt, command
from tests.support.async_tests import async_test
from tests.support.process_state import is_running
from tests.support.sessions import ScriptedModel, sequences

ASK = {"run": "tests.support.coroutine_agents:ask"}
PASS = {"grader": ["grep", "-q", "#### 3", "answer.txt"]}


async def rollout(settings: dict[str, Any], prompt: Prompt | None = None, **options: Any) -> Trajectory:
    async with agent_generator(settings, **options) as generator:
        group = await generator.rollout(prompt or agent_prompt(), 5)
    return group.trajectories[0]


def outcome(item: Trajectory) -> Any:
    """Return the reward of an episode, or the kind of its failure."""
    return item.reward if item.status == OK else item.error


@async_test
async def test_command_becomes_a_trajectory():
    item = await rollout(command(2) | PASS)
    assert outcome(item) == 1.0
    assert [turn.reward for turn in item.turns] == [0.0, 1.0]
    ((_, texts),) = sequences(item)
    assert texts == ["#### 3<|im_end|>"] * 2
    assert item.session is not None
    statistics = item.session["statistics"]
    assert (statistics["calls"], statistics["branches"], statistics["retokenized_messages"]) == (2, 0, 0)
    assert [message["role"] for message in item.messages] == ["user", "assistant", "user", "assistant"]


@async_test
async def test_samples_of_a_group_run_concurrently():
    async with agent_generator(ASK, samples=8) as generator:
        group = await generator.rollout(agent_prompt(calls=2, returned={"reward": 0.5, "words": 4}), 5)
    assert [item.sample for item in group.trajectories] == list(range(8))
    assert [(outcome(item), item.env_metrics["words"]) for item in group.trajectories] == [(0.5, 4.0)] * 8


@async_test
async def test_data_source_has_its_own_samples():
    async with agent_generator(ASK, samples=1, samples_by_source={"toy": 3}) as generator:
        prompts = [replace(agent_prompt(returned=1.0), data_source=source) for source in ("toy", "other")]
        groups = [await generator.rollout(prompt, 5) for prompt in prompts]
    assert [len(group.trajectories) for group in groups] == [3, 1]


@pytest.mark.parametrize(
    ("settings", "row", "expected"),
    [
        (command(1) | PASS, {}, 1.0),
        (command(1) | {"grader": ["grep", "-q", "nothing", "answer.txt"]}, {}, 0.0),
        (command(1) | {"grader": ["echo", '{"reward": 0.5}']}, {}, 0.5),
        (
            command(1) | {"grader": ["sh", "check.sh"]},
            {"grader_files": {"check.sh": "cat answer.txt; echo; echo 2"}},
            2.0,
        ),
        (command(1) | {"grader": ["sh", "-c", "exit 2"]}, {}, "grader_crashed"),
        (command(1) | {"grader": ["sleep", "60"], "grader_timeout_s": 0.5}, {}, "grader_timeout"),
        (command(1) | {"grader": ["echo", '{"score": 1}']}, {}, "bad_reward"),
        (command(1) | {"reward": "gsm8k"}, {}, 1.0),
        (command(1, "report"), {}, 0.25),
        (command(1), {}, "agent_no_reward"),
        (command(0) | PASS, {}, "agent_no_call"),
        (command(1, "crash") | PASS, {}, "agent_crashed"),
        (command(3) | PASS | {"max_calls": 2}, {}, "agent_too_many_tokens"),
        (command(3) | PASS | {"max_tokens": 10}, {}, "agent_too_many_tokens"),
        (command(1) | {"command": ["no-such-program"]}, {}, "agent_crashed"),
        (command(1) | {"sandbox": {"kind": "docker", "image": "{row.missing}"}}, {}, "bad_row"),
        (ASK, {"returned": 0.75}, 0.75),
        (ASK, {"returned": None}, "agent_no_reward"),
        (ASK | {"reward": "gsm8k"}, {"returned": None}, 1.0),
        (ASK | {"reward": "gsm8k"}, {"returned": 0.5}, 0.5),
        (ASK, {"returned": "much"}, "bad_reward"),
        (ASK, {"calls": 0, "returned": 1.0}, "agent_no_call"),
        (ASK | {"max_calls": 1}, {"calls": 2}, "agent_too_many_tokens"),
    ],
    ids=str,
)
@async_test
async def test_every_end_is_a_reward_or_a_failure(settings: dict[str, Any], row: dict[str, Any], expected: Any):
    item = await rollout(settings, agent_prompt(**row))
    assert outcome(item) == expected, item.detail
    assert item.status == OK or item.reward == 0.0


@async_test
async def test_crash_shows_exit_code_and_stderr():
    item = await rollout(command(1, "crash"))
    assert item.detail == "exit code 1; stderr: the agent is broken"
    assert item.text  # what the model said is still shown


@pytest.mark.parametrize(
    ("script", "changes", "detail"),
    [
        ("echo no key >&2; exit 3", {}, "exit code 3; stderr: no key"),
        ("echo no key; exit 3", {}, "exit code 3; stdout: no key"),
        ("echo no key >&2", {}, "it ended without a call of the model at its base URL; stderr: no key"),
        ("echo waiting; sleep 60", {"timeout_s": 1.0}, "it did not end within 1 s; stdout: waiting"),
        (
            f"{sys.executable} -S {PROGRAM} m 1; echo no reward >&2",
            {},
            "neither the agent nor a grader gave a reward; stderr: no reward",
        ),
    ],
    ids=str,
)
@async_test
async def test_failed_command_shows_its_output(script: str, changes: dict[str, Any], detail: str):
    item = await rollout({"command": ["sh", "-c", script], "sandbox": {"kind": "none"}, **changes})
    assert item.detail == detail


@async_test
async def test_grader_timeout_shows_its_output():
    grader = {"grader": ["sh", "-c", "echo test 1 >&2; sleep 60"], "grader_timeout_s": 1.0}
    assert (await rollout(command(1) | grader)).detail == "it did not end within 1 s; stderr: test 1"


@async_test
async def test_timeout_kills_grandchildren_and_closes_session(tmp_path: Path):
    settings = command(1, "hang") | {"timeout_s": 2.0, "env": {"PID_FILE": f"{tmp_path}/pid"}}
    item = await rollout(settings)
    assert (outcome(item), item.detail) == ("agent_timeout", "it did not end within 2 s; it printed nothing")
    assert not is_running(int((tmp_path / "pid").read_text()))


@async_test
async def test_cancellation_leaves_no_process_and_no_session(tmp_path: Path):
    settings = command(1, "hang") | {"env": {"PID_FILE": f"{tmp_path}/pid", "URL_FILE": "{base_url}"}}
    async with agent_generator(settings) as generator:
        task = asyncio.create_task(generator.rollout(agent_prompt(), 5))
        while not (tmp_path / "pid").is_file() or not (tmp_path / "pid").read_text().strip():
            await asyncio.sleep(0.02)
        (session,) = generator._runner.server._sessions.values()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert session.is_closed
        assert not is_running(int((tmp_path / "pid").read_text()))


@async_test
async def test_late_calls_are_refused():
    seen: list[str] = []
    async with agent_generator(command(1) | PASS | {"command": command(1)["command"]}) as generator:
        opened = generator._runner.server.open
        generator._runner.server.open = lambda *args, **kwargs: _noted(opened(*args, **kwargs), seen)  # type: ignore[method-assign]
        await generator.rollout(agent_prompt(), 5)
        body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "?"}]}).encode()
        request = urllib.request.Request(f"{seen[0]}/chat/completions", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError, match="410"):
            await asyncio.to_thread(urllib.request.urlopen, request)


def _noted(session: Any, seen: list[str]) -> Any:
    seen.append(session.base_url)
    return session


@async_test
async def test_seeds_repeat_and_differ_between_samples():
    async def seeds(position: int) -> list[int]:
        model = ScriptedModel(lambda prompt: "#### 3")
        async with agent_generator(ASK, engine=ScriptedEngine(model), samples=2) as generator:
            await generator.rollout(agent_prompt(calls=2, returned=1.0), position)
        return sorted(request.seed or 0 for request in model.requests)

    first, second, other = await seeds(5), await seeds(5), await seeds(6)
    assert first == second
    assert len(set(first)) == 4
    assert set(first).isdisjoint(other)


class HangingSandbox:
    """A user's class that loses its connection."""

    async def start(self) -> None:
        pass

    async def exec(self, argv: list[str], **options: Any) -> None:
        await asyncio.Event().wait()

    async def stop(self) -> None:
        await asyncio.Event().wait()


@async_test
async def test_sandbox_that_hangs_is_a_failure(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(runner, "SANDBOX_GRACE_S", 0.1)
    monkeypatch.setattr(runner, "COPY_TIMEOUT_S", 0.1)
    item = await rollout(command(1) | {"sandbox": {"kind": f"{__name__}:HangingSandbox"}, "timeout_s": 0.1})
    assert (outcome(item), item.detail) == ("agent_sandbox", "its method exec did not end within 0.2 s")


@async_test
async def test_grader_that_raises_is_shown_once(caplog: pytest.LogCaptureFixture):
    grader = [sys.executable, "-S", "-c", "open('missing')"]
    async with agent_generator(command(1) | {"grader": grader}, samples=2) as generator:
        group = await generator.rollout(agent_prompt(), 5)
    assert [outcome(item) for item in group.trajectories] == [0.0, 0.0]
    assert caplog.text.count("FileNotFoundError") == 1


@async_test
async def test_unclear_grader_line_is_shown_once(caplog: pytest.LogCaptureFixture):
    grader = ["echo", "score: 0.3"]
    async with agent_generator(command(1) | {"grader": grader}, samples=2) as generator:
        group = await generator.rollout(agent_prompt(), 5)
    assert [outcome(item) for item in group.trajectories] == [1.0, 1.0]
    assert caplog.text.count("score: 0.3") == 1


@async_test
async def test_text_beside_reward_is_shown_once(caplog: pytest.LogCaptureFixture):
    async with agent_generator(ASK, samples=2) as generator:
        group = await generator.rollout(agent_prompt(returned={"reward": 0.5, "words": 4, "note": "good"}), 5)
    assert [item.env_metrics for item in group.trajectories] == [{"words": 4.0}] * 2
    assert caplog.text.count("has the value 'good' for note beside its reward") == 1


@async_test
async def test_engine_failure_is_the_cause_of_a_crash():
    engine = ScriptedEngine(failures={"generate": EngineError("the engine broke")})
    item = await rollout(command(1) | PASS, engine=engine)
    assert outcome(item) == "engine"
    assert "the engine broke" in item.detail


@async_test
async def test_lost_engines_end_the_rollout():
    async def restart() -> None:
        raise EnginesLost("no engine is left")

    engine = ScriptedEngine(failures={"generate": EngineError("broken"), "health": EngineError("broken")})
    async with agent_generator(command(1) | PASS, engine=engine) as generator:
        generator._client.restart_dead_engines = restart
        with pytest.raises(EnginesLost, match="no engine is left"):
            await generator.rollout(agent_prompt(), 5)


@async_test
async def test_limiter_admits_groups():
    running = 0
    most = 0

    def answer(request: SampleRequest) -> list[int]:
        nonlocal most
        most = max(most, running)
        return ScriptedModel(lambda prompt: "#### 3")(request)

    async def counted(generator: Any, position: int) -> TrajectoryGroup:
        nonlocal running
        group = await generator.rollout(agent_prompt(returned=1.0), position)
        running -= 1
        return group

    limiter = EpisodeLimiter(max_concurrency=2)
    admit = limiter.admit

    async def admit_and_count(episodes: int) -> None:
        nonlocal running
        await admit(episodes)
        running += 1

    limiter.admit = admit_and_count  # type: ignore[method-assign]
    engine = ScriptedEngine(answer, delay_s=0.05)
    async with agent_generator(ASK, engine=engine, samples=2, limiter=limiter) as generator:
        groups = await asyncio.gather(*(counted(generator, position) for position in range(3)))
    assert [len(group.trajectories) for group in groups] == [2, 2, 2]
    assert most == 1


@async_test
async def test_dispatcher_chooses_by_environment():
    class Named:
        def __init__(self, name: str):
            self.name = name

        async def rollout(self, prompt: Prompt, position: int) -> Any:
            return self.name, prompt.uid, position

    dispatcher = EnvironmentDispatcher(Named("other"), {"agent": Named("agent")})
    assert await dispatcher.rollout(Prompt("1", [], "agent"), 3) == ("agent", "1", 3)
    assert await dispatcher.rollout(Prompt("2", [], "gsm8k"), 4) == ("other", "2", 4)
