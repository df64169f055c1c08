from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.tensordict.envs.conversation import messages_of
from skyrl_train.tensordict.envs.mlgym import MLGymWrapper, make_mlgym
from tests.support.web_server import Request, Response, WebServer, web_server


class Counting(TextEnv):
    """Over at the second answer; counts those that are open."""

    open = 0

    def init(self, prompt: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        Counting.open += 1
        self.answers = 0
        return [*prompt, {"role": "user", "content": "begin"}], {}

    def step(self, action: str) -> StepOutput:
        self.answers += 1
        return StepOutput([{"role": "user", "content": f"saw {action}"}], len(action), done=self.answers == 2)

    def close(self) -> None:
        Counting.open -= 1


def test_episodes_of_an_environment_are_conversations_with_rewards_and_are_closed():
    with closing(MLGymWrapper(Counting, batch_size=(2,), system_prompt="s")) as env:
        root = env.reset()
        assert [message["content"] for message in messages_of(root[0]["history"].prompt)] == ["s", "begin"]
        root["text_response"] = ["a", "bcd"]
        following = env.step(root)["next"]
        assert following["reward"].tolist() == [[1.0], [3.0]] and not following["done"].any()
        last = [messages_of(row["history"].prompt)[-1]["content"] for row in following.unbind(0)]
        assert last == ["saw a", "saw bcd"] and Counting.open == 2
        following["text_response"] = ["x", "y"]
        stepped, again = env.step_and_maybe_reset(following)
        assert stepped["next", "done"].all() and len(messages_of(again[1]["history"].prompt)) == 2
        assert Counting.open == 2
    assert Counting.open == 0


def test_an_episode_that_is_over_takes_no_step():
    with closing(MLGymWrapper(Counting)) as env:
        root = env.reset(TensorDict(query=["go"], batch_size=[1]))
        for _ in range(2):
            root["text_response"] = ["a"]
            root = env.step(root)["next"]
        root["text_response"] = ["a"]
        with pytest.raises(RuntimeError, match="Reset its row"):
            env.step(root)


def test_empty_response_ends_the_episode():
    with closing(MLGymWrapper(Counting, batch_size=(2,))) as env:
        root = env.reset()
        root["text_response"] = ["a", ""]
        responses = [torch.ones(1, dtype=torch.int64), torch.empty(0, dtype=torch.int64)]
        root["tokens"] = lazy_stack([TensorDict(response=response) for response in responses])
        following = env.step(root)["next"]
        assert following["done"].tolist() == [[False], [True]] and not following["terminated"].any()
        assert following["reward"].tolist() == [[1.0], [0.0]] and Counting.open == 1


@pytest.fixture
def server() -> Iterator[WebServer]:
    def answer(request: Request) -> Response:
        body = json.loads(request.body)
        if request.path == "/reset":
            return Response(json.dumps({"observation": f"task {body['task']}"}).encode())
        text = body["action"]["message"]
        return Response(json.dumps({"observation": f"ran {text}", "reward": 0.5, "done": text == "submit"}).encode())

    with web_server(answer) as running:
        yield running


def test_tasks_of_a_server_come_in_turn_and_only_a_single_block_of_code_is_run(server: WebServer):
    with closing(make_mlgym(tasks=["one", "two"], base_url=server.url, num_envs=2, reward_wrong_format=-1.0)) as env:
        root = env.reset()
        opening = [messages_of(row["history"].prompt)[-1]["content"] for row in root.unbind(0)]
        assert opening == ["task one", "task two"]
        root["text_response"] = ["Look:\n```bash\nls\n```", "no block"]
        following = env.step(root)["next"]
        said = [messages_of(row["history"].prompt)[-1]["content"] for row in following.unbind(0)]
        assert said[0] == "ran ls" and "exactly one block" in said[1]
        assert following["reward"].tolist() == [[0.5], [-1.0]]
        following["text_response"] = ["```\nsubmit\n```"] * 2
        assert env.step(following)["next", "done"].all()
    assert [request.path for request in server.requests].count("/step") == 3


@pytest.mark.parametrize("settings", [{}, {"task": "a", "tasks": ["b"]}, {"tasks": []}, {"task": "a"}])
def test_settings_that_name_no_task_or_no_server_are_refused(settings: dict[str, Any]):
    with pytest.raises(ValueError, match=r"task|base_url"):
        make_mlgym(**settings)
