from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.environments.base import StepOutput
from skyrl_train.environments.tasks.search import SearchEnv, extract_answer, normalize_answer, score
from skyrl_train.errors import ConfigError, EnvironmentFailure
from tests.support.web_server import Request, Response, WebServer, web_server

TARGET = {"reward_spec": {"method": "rule", "ground_truth": {"target": ["The Eiffel Tower", "Tour Eiffel"]}}}


def search_reply(request: Request) -> Response:
    (query,) = json.loads(request.body)["queries"]
    return Response(json.dumps({"result": [[{"document": {"contents": f"about {query}"}, "score": 1.0}]]}).encode())


@pytest.fixture
def retriever() -> Iterator[WebServer]:
    with web_server(search_reply) as server:
        yield server


def run_episode(server: WebServer | None, *texts: str, max_turns: int | None = 4, **settings: Any) -> list[StepOutput]:
    url = server.url if server else "http://127.0.0.1:1/"
    environment = SearchEnv({"search_url": url, "sandbox": {}, **settings}, TARGET | {"max_turns": max_turns})
    environment.init([{"role": "user", "content": "?"}])
    try:
        return [environment.step(text) for text in texts]
    finally:
        environment.close()


def test_question_is_answered_after_searches(retriever: WebServer):
    first, second, third = run_episode(
        retriever, "I think <search> towers\nin Paris </search>", "hm", "It is <answer>eiffel  tower!</answer>"
    )
    assert first == StepOutput(
        [{"role": "user", "content": "\n<information>Doc 1: about towers\nin Paris</information>\n"}], 0.0, False,
        tool_calls=[{"name": "search", "arguments": '{"query": " towers\\nin Paris "}'}],
    )  # fmt: skip
    assert "Write <search>" in second.observations[0]["content"] and not second.done
    assert third == StepOutput([], 1.0, True, {"searches": 1, "answered": True})


def test_last_turn_without_answer_gets_0(retriever: WebServer):
    outputs = run_episode(retriever, "<search>a</search>", "<search>b</search>", max_turns=None)
    assert [(output.reward, output.done) for output in outputs] == [(0.0, False), (0.0, True)]
    assert len(retriever.requests) == 1


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>Tour Eiffel</answer>", 1.0),
        ("<answer>\n the EIFFEL tower. \n</answer>", 1.0),
        ("<answer>Eiffel Tower</answer> or, again, <answer>the Eiffel Tower</answer>", 1.0),
        ("<answer>the Louvre</answer>", 0.0),
        ("<answer>Eiffel Tower or the Louvre</answer>", 0.0),
        ("<answer>not the Eiffel Tower</answer>", 0.0),
        ("<answer></answer>", 0.0),
        ("<think><answer>the Louvre</answer>? No.</think> <answer>Eiffel Tower</answer>", 1.0),
        ("<think><answer>Eiffel Tower</answer>.</think> <answer>the Louvre</answer>", 0.0),
    ],
)
def test_answer_must_match_after_normalization(text: str, reward: float):
    (output,) = run_episode(None, text)
    assert (output.reward, output.done, output.observations) == (reward, True, [])


@pytest.mark.fault("F13")
def test_only_single_answer_of_model_counts(retriever: WebServer):
    assert run_episode(None, "<answer>Louvre</answer><answer>Eiffel Tower</answer>")[0].reward == 0.0
    assert run_episode(None, "<answer>Eiffel Tower</answer>" + "<answer>x</answer>" * 20)[0].reward == 0.0
    # the passage that the search returns repeats the query with its tags
    first, second = run_episode(retriever, "<search>x <answer>Eiffel Tower</search>", "</answer>", max_turns=2)
    assert (first.done, second.reward) == (False, 0.0)


@pytest.mark.fault("F14")
@pytest.mark.parametrize(
    "unit", ["<answer>", "</answer>", "<answer>a</answer>", "<search>", "<answer><search>", "a the "]
)
def test_tags_are_scored_in_linear_time(unit: str):
    score(unit * (2**20 // len(unit)), ["x"])
    assert extract_answer("<answer>" * 1000 + "x</answer>") == "x"


def test_normalization_matches_search_r1():
    assert normalize_answer("  The U.S.A. -- an  answer! ") == "usa answer"


def test_answer_of_only_articles_can_be_right():
    assert score("<answer> A </answer>", ["A"]) == 1.0
    assert score("<answer>+</answer>", ["-"]) == 0.0


def test_tags_in_reasoning_are_ignored(retriever: WebServer):
    hinted, searched = run_episode(
        retriever, "<think><search>a</search></think>", "<think>hm</think><search>b</search>"
    )
    assert (hinted.done, "Write <search>" in hinted.observations[0]["content"]) == (False, True)
    assert "about b" in searched.observations[0]["content"] and len(retriever.requests) == 1


@pytest.mark.parametrize("truth", [None, {}, {"target": []}, {"target": [1]}, 3])
def test_row_without_targets_is_rejected(truth: Any):
    with pytest.raises(ValueError, match="target"):
        SearchEnv({}, {"reward_spec": {"ground_truth": truth}})


def test_failed_search_fails_the_episode():
    with pytest.raises(EnvironmentFailure, match="search_failed"):
        run_episode(None, "<search>a</search>", timeout=0.3)
    over = threading.Event()

    def hang(request: Request) -> Response:
        over.wait(60)
        return Response()

    with web_server(hang) as server:
        with pytest.raises(EnvironmentFailure, match="search_failed"):
            run_episode(server, "<search>a</search>", timeout=0.3)
        over.set()
        (output,) = run_episode(server, "<search> </search>")
        assert "The query is empty." in output.observations[0]["content"]


def test_missing_corpus_and_invalid_url_are_rejected():
    with pytest.raises(ConfigError, match=r"corpus='gone\.jsonl'"):
        SearchEnv.check({"corpus": "gone.jsonl"})
    with pytest.raises(ConfigError, match="search_url='nowhere'"):
        SearchEnv.check({"search_url": "nowhere"})
    SearchEnv.check({"search_url": "http://127.0.0.1:8000/retrieve", "sandbox": {}})


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("search", "search.timeout"),
        ("math", "math.timeout"),
        ("openenv", "openenv.timeout"),
        ("tool_use", "tool_use.tool_settings.python.wall_s"),
        ("searchcode", "searchcode.timeout"),
        ("searchcode", "searchcode.python_timeout"),
        ("llm_as_a_judge", "llm_as_a_judge.timeout"),
    ],
)
def test_timeout_beyond_step_timeout_is_rejected(name: str, key: str):
    overrides = [f"++environment.skyrl_gym.{key}=60", "trainer.timeouts.environment_step_s=60"]
    with pytest.raises(ConfigError, match=rf"skyrl_gym\.{key}=60(\.0)?: must be less than .*environment_step_s"):
        prepare_config([f"environment.env_class={name}", *overrides], has_accelerator=False)
    prepare_config(["environment.env_class=gsm8k", *overrides], has_accelerator=False)
