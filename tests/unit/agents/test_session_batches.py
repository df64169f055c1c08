"""Trajectories of sessions in batches: log-probs fit their contexts, and each sampled token is trained on once."""

from __future__ import annotations

import asyncio

import numpy as np

from skyrl_train.agents.call_tree import answer_to_message
from skyrl_train.agents.server import SessionServer
from skyrl_train.agents.session import Session
from skyrl_train.data.batch import collate
from skyrl_train.data.messages import Message
from skyrl_train.data.trajectory import Trajectory, TrajectoryGroup
from skyrl_train.engines.base import SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.chat_request import ChatRequest
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.metrics import Metrics
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from skyrl_train.trainer.rollout_metrics import add_rollout_metrics
from tests.support.sessions import PROMPT, session_settings

USER: Message = {"role": "user", "content": "1 + 2?"}


async def ask(session: Session, *messages: Message) -> Message:
    (answer,) = await session.sample(ChatRequest(messages=list(messages)))
    return answer_to_message(answer.answer)


async def branch(session: Session) -> None:
    """Continue an answer in two ways, and call a sub-agent meanwhile."""
    first = await ask(session, USER)
    await asyncio.gather(
        ask(session, USER, first, {"role": "user", "content": "Sure?"}),
        ask(session, USER, first, {"role": "user", "content": "Really?"}),
        ask(session, {"role": "system", "content": "You are a sub-agent."}, USER),
    )
    await ask(session, {"role": "user", "content": "Summary."}, first, {"role": "user", "content": "Go on."})


async def sample_group() -> tuple[list[Trajectory], list[list[list[float]]]]:
    """Return two branching episodes of a real model, and its log-probs of each of their sequences."""
    tokenizer = byte_tokenizer()
    engine = TransformersEngine(tiny_model(), tokenizer)
    client = EngineClient([engine], deadline_s=60.0)
    settings = session_settings(sampling_params=SamplingParams(max_tokens=6))
    try:
        async with SessionServer(client, tokenizer, model_name="m") as server:
            sessions = [server.open(PROMPT, sample=sample, position=0, settings=settings) for sample in range(2)]
            await asyncio.gather(*map(branch, sessions))
            for session in sessions:
                await server.close(session)
        items = [session.trajectory(PROMPT, sample, 1.0) for sample, session in enumerate(sessions)]
        scores = [
            await engine.score(
                [np.concatenate((ids, item.response_ids[start:stop])).tolist() for ids, start, stop in item.sequences()]
            )
            for item in items
        ]
    finally:
        await engine.close()
    return items, scores


def test_branching_sessions_train_each_sampled_token_once():
    items, scores = asyncio.run(sample_group())
    for item, sequence_scores in zip(items, scores, strict=True):
        assert len(item.restarts) == 3 and len(item.turns) == 5
        for (prompt_ids, start, stop), logprobs in zip(item.sequences(), sequence_scores, strict=True):
            for first, last in [span for span in item.loss_spans if start <= span[0] < stop]:
                offset = len(prompt_ids) - start - 1
                expected = logprobs[first + offset : last + offset]
                np.testing.assert_allclose(item.logprobs[first:last], expected, atol=1e-4)
    items[0].reward = 1.0
    sampled = sum(item.sampled_tokens for item in items)
    group, metrics = TrajectoryGroup(PROMPT, items), Metrics()
    add_rollout_metrics([group], 0, metrics)
    batch = collate([group])
    assert int(batch.loss_mask.sum()) == sampled == sum(len(span) for item in items for span in spans_of(item))
    assert batch.episode_ids is not None and batch.episode_ids.tolist() == [0] * 4 + [1] * 4
    assert batch.rewards.tolist() == [1.0] * 4 + [0.0] * 4
    row = metrics.flush()
    assert (row["agent/branches"], row["agent/retokenized_messages"], row["episode/sequences"]) == (2.0, 0.0, 4.0)


def spans_of(item: Trajectory) -> list[range]:
    """Return the response tokens that the calls of a session sampled, from its record."""
    assert item.session is not None
    return [range(call["start"], call["stop"]) for call in item.session["calls"]]
