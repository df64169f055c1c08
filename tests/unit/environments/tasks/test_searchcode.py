from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_train.environments.base import StepOutput
from skyrl_train.environments.tasks.searchcode import CALL, SearchCodeEnv
from skyrl_train.errors import ConfigError, EnvironmentFailure
from tests.support.web_server import Request, Response, WebServer, web_server

ROW = {"reward_spec": {"method": "rule", "ground_truth": "42"}}


def search_reply(request: Request) -> Response:
    return Response(json.dumps({"result": [[{"document": {"contents": "6 rows of 7"}, "score": 1.0}]]}).encode())


@pytest.fixture
def retriever() -> Iterator[WebServer]:
    with web_server(search_reply) as server:
        yield server


def run_episode(url: str, *texts: str, max_turns: int = 5, **settings: Any) -> list[StepOutput]:
    environment = SearchCodeEnv({"search_url": url, "sandbox": {}, **settings}, {**ROW, "max_turns": max_turns})
    try:
        return [environment.step(text) for text in texts]
    finally:
        environment.close()


def call(tool: str, text: str) -> str:
    return f"I will <tool><{tool}>{text}</{tool}></tool>"


def test_question_is_answered_with_search_and_program(retriever: WebServer):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")
    searched, computed, lost, solved = run_episode(
        retriever.url,
        call("search", "how many?"),
        call("python", "print(6 * 7)"),
        "hm <tool>7</tool>",
        "<solution>#### 42</solution>",
    )
    calls = [{"name": "search", "arguments": '{"query": "how many?"}'}]
    assert searched == StepOutput([{"role": "user", "content": "Doc 1: 6 rows of 7"}], 0.0, False, tool_calls=calls)
    assert computed.tool_calls == [{"name": "python", "arguments": '{"code": "print(6 * 7)"}'}]
    assert computed.observations[0]["content"].strip() == "42"
    assert "Write <tool><search>" in lost.observations[0]["content"]
    assert solved == StepOutput([], 1.0, True, {"search": 1, "python": 1, "answered": True})


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<solution>#### 42</solution>", 1.0),
        ("<solution>so #### 42.0</solution>", 1.0),
        ("<solution>#### 41</solution><solution>#### 42</solution>", 0.0),
        ("<solution>#### 41 or 42</solution>", 0.0),
        ("#### 42 <solution>#### 41</solution>", 0.0),
        ("<solution>42</solution>", 0.0),
        ("<think><solution>#### 41</solution></think><solution>#### 42</solution>", 1.0),
        ("<solution></solution>", 0.0),
    ],
)
def test_only_one_solution_is_scored(text: str, reward: float):
    (output,) = run_episode("http://127.0.0.1:1/", text)
    assert (output.reward, output.done) == (reward, True)


def test_last_turn_without_solution_gets_0(retriever: WebServer):
    (output,) = run_episode(retriever.url, call("search", "x") + "#### 42", max_turns=1)
    assert (output.reward, output.done, retriever.requests) == (0.0, True, [])


def test_failed_search_fails_the_episode():
    with pytest.raises(EnvironmentFailure, match="search_failed"):
        run_episode("http://127.0.0.1:1/", call("search", "x"), timeout=0.2)
    (output,) = run_episode("http://127.0.0.1:1/", call("search", " "))
    assert "The query is empty." in output.observations[0]["content"]


@pytest.mark.fault("F14")
@pytest.mark.parametrize("unit", ["<tool>", "<tool><python>", "</python>", "<tool> ", "<tool><search></search> "])
def test_tags_are_parsed_in_linear_time(unit: str):
    CALL.search(unit * (2**20 // len(unit)))


def test_unusable_settings_are_rejected_early():
    with pytest.raises(ConfigError, match="search_url='nowhere'"):
        SearchCodeEnv.check({"search_url": "nowhere"})
    with pytest.raises(ValueError, match="reward_spec"):
        SearchCodeEnv({}, {})
