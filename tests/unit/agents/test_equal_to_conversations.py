"""A linear conversation in a session equals the same conversation with an environment: tokens, log-probs and loss."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skyrl_train.agents.call_tree import answer_to_message
from skyrl_train.agents.server import SessionServer
from skyrl_train.data.batch import collate
from skyrl_train.data.control_tokens import find_end_of_turn_token
from skyrl_train.data.messages import Message, Prompt
from skyrl_train.data.trajectory import OK, Trajectory, TrajectoryGroup
from skyrl_train.engines.base import SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.chat_request import ChatRequest
from skyrl_train.engines.sampling_params import with_stop_token
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.environments.base import StepOutput
from skyrl_train.rollouts.conversation import ConversationGenerator, RolloutSettings
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.family_templates import FAMILIES, tool_tokenizer
from tests.support.sessions import session_settings

PROMPT = Prompt("3", [{"role": "user", "content": "1 + 2?"}], "toy")
TURNS: list[list[Message]] = [
    [{"role": "user", "content": "Sure?"}],
    [{"role": "user", "content": "Really?\n"}],
]


class ScriptedEpisode:
    """Sends the messages of TURNS after the answers."""

    def __init__(self) -> None:
        self.messages = PROMPT.messages
        self.turns = iter(TURNS)

    async def step(self, text: str) -> StepOutput:
        messages = next(self.turns, None)
        return StepOutput(messages or [], 0.0, messages is None)

    async def close(self) -> None:
        pass


class ScriptedEnvironments:
    async def start(self, env_class: str, prompt: Prompt) -> ScriptedEpisode:
        return ScriptedEpisode()


async def play_both(client: EngineClient, tokenizer: Any, params: SamplingParams) -> tuple[Trajectory, Trajectory]:
    params = with_stop_token(params, find_end_of_turn_token(tokenizer))
    settings = RolloutSettings(
        sampling_params=params, n_samples_per_prompt=1, seed=3, max_input_length=4096, rollout_s=60.0, max_turns=3
    )
    environments: Any = ScriptedEnvironments()
    group = await ConversationGenerator(client, environments, tokenizer, settings).rollout(PROMPT, position=2)
    async with SessionServer(client, tokenizer, model_name="m") as server:
        session = server.open(PROMPT, sample=0, position=2, settings=session_settings(sampling_params=params))
        history = list(PROMPT.messages)
        for turn in [*TURNS, []]:
            (answer,) = await session.sample(ChatRequest(messages=list(history)))
            history += [answer_to_message(answer.answer), *turn]
        await server.close(session)
    assert session.statistics.retokenized_messages == 0
    return group.trajectories[0], session.trajectory(PROMPT, 0, params.temperature)


def assert_equal(expected: Trajectory, item: Trajectory) -> None:
    assert expected.status == item.status == OK
    for name in ("prompt_ids", "response_ids", "logprobs"):
        np.testing.assert_array_equal(getattr(item, name), getattr(expected, name))
    assert item.loss_spans == expected.loss_spans and not item.restarts
    assert item.turns == expected.turns and item.stop_reason == expected.stop_reason
    batches = [collate([TrajectoryGroup(PROMPT, [replace(one)])]) for one in (expected, item)]
    assert all((getattr(batches[0], name) == getattr(batches[1], name)).all() for name in ("input_ids", "loss_mask"))


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "harmony"])
@pytest.mark.parametrize("ends", [True, False])
def test_scripted_conversations_are_equal(family: str, ends: bool):
    tokenizer = tool_tokenizer(family)
    end = find_end_of_turn_token(tokenizer)

    def answer(request: Any) -> list[int]:
        text = f"It is {len(request.token_ids)}."
        return [*tokenizer(text, add_special_tokens=False)["input_ids"], *([end] if ends else [])]

    client = EngineClient([ScriptedEngine(answer)], deadline_s=60.0)
    assert_equal(*asyncio.run(play_both(client, tokenizer, SamplingParams(max_tokens=64 if ends else 5))))


def test_conversations_of_a_real_model_are_equal():
    async def run() -> tuple[Trajectory, Trajectory]:
        tokenizer = byte_tokenizer()
        engine = TransformersEngine(tiny_model(), tokenizer)
        try:
            client = EngineClient([engine], deadline_s=60.0)
            return await play_both(client, tokenizer, SamplingParams(max_tokens=8, temperature=0.0))
        finally:
            await engine.close()

    assert_equal(*asyncio.run(run()))
