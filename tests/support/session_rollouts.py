"""Rollouts with sessions, made by programs that call a scripted model, and the files of a step with them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from skyrl_train.agents.call_tree import answer_to_message
from skyrl_train.agents.server import SessionServer
from skyrl_train.agents.session import Session
from skyrl_train.data.batch import collate
from skyrl_train.data.trajectory import Trajectory, TrajectoryGroup
from skyrl_train.engines.http.chat_request import ChatRequest
from skyrl_train.report.rollout_files import write_rollouts, write_vocabulary
from skyrl_train.trainer.rollout_writer import rollout_tables
from tests.support.family_templates import TOOL
from tests.support.sessions import PROMPT, TOKENIZER, call_text, run_session

ADVANTAGE = 0.5
REASONING = "The tool adds."
ANSWERS = {
    "Go on": "It is **seven**.",
    "Summary": "<tool_call>\n{not JSON}\n</tool_call>",
    "left": "The left one.",
    "right": "The right one.",
    "<tool_response>": call_text("add", '{"a": 3, "b": [4]}'),
    "": f"<think>\n{REASONING}\n</think>\n\n{call_text()}",
}
"""Text in the prompt -> the answer. The first one that occurs decides."""


def session_group(result: str = "3") -> TrajectoryGroup:
    """Return a prompt with three samples: six calls, one call of a program that crashed, and no call.

    Calls 3 and 4 are made in parallel after call 2. Call 5 begins with a summary, and call 6 continues it.

    Args:
        result: Result of the first tool call.
    """

    async def play(session: Session, server: SessionServer) -> None:
        history = [*PROMPT.messages, await _ask(session, PROMPT.messages)]
        history.append(_result(history[-1], result))
        history += [await _ask(session, history)]
        history.append(_result(history[-1], "7"))
        await asyncio.gather(*(_ask(session, [*history, _user(text)]) for text in ("left?", "right?")))
        summary = [_user("Summary: 7.")]
        await _ask(session, [*summary, await _ask(session, summary), _user("Go on.")])

    async def call_once(session: Session, server: SessionServer) -> None:
        await _ask(session, PROMPT.messages)

    async def do_nothing(session: Session, server: SessionServer) -> None:
        pass

    complete, crashed, silent = (_rollout(play, sample) for sample, play in enumerate((play, call_once, do_nothing)))
    crashed.fail("agent_crashed", 'Exit code 1. stderr:\nTraceback:\n  File "<agent>", line 1\n\x1b[31mKeyError\x1b[0m')
    silent.fail("no_call", "The program ended without a call.")
    return TrajectoryGroup(PROMPT, [complete, crashed, silent])


def write_session_rollouts(run: Path, step: int, groups: Sequence[TrajectoryGroup]) -> None:
    """Write the rollouts and the vocabulary of a step in which every sampled token has the same advantage."""
    batch = collate(groups)
    batch = batch.with_tokens(
        old_logprobs=batch.rollout_logprobs, advantages=torch.where(batch.loss_mask, ADVANTAGE, 0.0)
    )
    vocabulary = [str(TOKENIZER.decode([token])) for token in range(len(TOKENIZER))]
    write_rollouts(run, step, rollout_tables(step, groups, batch, lambda: dict(enumerate(vocabulary))))
    write_vocabulary(run, vocabulary)


def _rollout(play: Any, sample: int) -> Trajectory:
    def answer(prompt: str) -> str:
        return next(text for part, text in ANSWERS.items() if part in prompt)

    trajectory = run_session(play, answer)[1]
    trajectory.sample = sample
    return trajectory


async def _ask(session: Session, messages: Sequence[dict[str, Any]]) -> dict[str, Any]:
    (answer,) = await session.sample(ChatRequest(messages=list(messages), tools=[TOOL]))
    return answer_to_message(answer.answer)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _result(message: dict[str, Any], text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}
