"""Sessions whose engine samples scripted texts, and checks of their trajectories."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import numpy as np

from skyrl_train.agents.server import SessionServer
from skyrl_train.agents.session import Session, SessionSettings
from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import Trajectory
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.family_templates import tool_tokenizer

TOKENIZER = tool_tokenizer("qwen")
PROMPT = Prompt("7", [{"role": "user", "content": "1 + 2?"}], "agent")
END = "<|im_end|>"


def encode(text: str) -> list[int]:
    ids: list[int] = TOKENIZER(text, add_special_tokens=False)["input_ids"]
    return ids


def call_text(name: str = "add", arguments: str = '{"a":1,"b": 2.0}') -> str:
    """Return a sampled tool call, spelled as no JSON library would."""
    return f'<tool_call>\n{{"arguments":{arguments} , "name":"{name}"}}\n</tool_call>'


class ScriptedModel:
    """Answers requests with texts in order, or with the text that a function returns for the decoded prompt."""

    def __init__(self, texts: Sequence[str] | Callable[[str], str]):
        self.texts, self.number = texts, 0
        self.requests: list[SampleRequest] = []

    def __call__(self, request: SampleRequest) -> list[int]:
        self.requests.append(request)
        if callable(self.texts):
            text = self.texts(str(TOKENIZER.decode(request.token_ids)))
        else:
            text = self.texts[self.number]
            self.number += 1
        return encode(text + END)


def session_settings(**options: Any) -> SessionSettings:
    options = {"seed": 3, "max_input_length": 4096, "rollout_s": 60.0} | options
    return SessionSettings(sampling_params=options.pop("sampling_params", SamplingParams(max_tokens=256)), **options)


def run_session(
    play: Callable[[Session, SessionServer], Awaitable[Any]],
    texts: Any,
    *,
    tokenizer: Any = TOKENIZER,
    engine: ScriptedEngine | None = None,
    **options: Any,
) -> tuple[Session, Trajectory]:
    """Run a program in a session, and return the session with its trajectory."""

    async def run() -> tuple[Session, Trajectory]:
        client = EngineClient([engine or ScriptedEngine(ScriptedModel(texts))], deadline_s=60.0)
        async with SessionServer(client, tokenizer, model_name="m", drain_s=0.1) as server:
            session = server.open(PROMPT, sample=1, position=5, settings=session_settings(**options))
            await asyncio.wait_for(play(session, server), 60)
            await server.close(session)
        return session, session.trajectory(PROMPT, 1, 0.7)

    return asyncio.run(run())


def sequences(item: Trajectory, tokenizer: Any = TOKENIZER) -> list[tuple[str, list[str]]]:
    """Return the decoded prompt and the decoded sampled texts of each sequence."""
    found = []
    for prompt_ids, start, stop in item.sequences():
        spans = [span for span in item.loss_spans if start <= span[0] and span[1] <= stop]
        texts = [str(tokenizer.decode(item.response_ids[first:last])) for first, last in spans]
        found.append((str(tokenizer.decode(prompt_ids)), texts))
    return found


def contexts(item: Trajectory) -> list[tuple[list[int], list[int]]]:
    """Return the tokens before each turn, and the sampled tokens of the turn."""
    found = []
    for prompt_ids, start, stop in item.sequences():
        for turn in item.turns:
            if start <= turn.start and turn.stop <= stop:
                context = np.concatenate((prompt_ids, item.response_ids[start : turn.start]))
                found.append((context.tolist(), item.response_ids[turn.start : turn.stop].tolist()))
    return found


def rewrite_json(message: dict[str, Any]) -> dict[str, Any]:
    """Return a message as a client sends it that parses arguments and writes them anew."""
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", [])
    ]
    return {"role": "assistant", "content": message["content"] or None, **({"tool_calls": calls} if calls else {})}
