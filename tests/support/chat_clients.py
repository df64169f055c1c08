"""An endpoint in a thread for clients of chat APIs, whose scripted model says what the user asks it to say."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import BaseModel

from skyrl_train.engines.base import Completion, SampleRequest
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.errors import EngineError
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.tool_templates import FAMILIES

TOKEN = "a-secret-of-this-test"
TOKENIZER = FAMILIES["hermes"].tokenizer()
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string", "default": None}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
OTHER_CALL = CALL.replace("Bern", "Oslo")
CALLED = ("weather", {"city": "Bern"})
_WISH = re.compile(r"say: (.*?)<\|im_end\|>", re.DOTALL)
SLOWLY = "slowly, "
"""Beginning of a wish whose answer takes long enough to arrive in several parts."""


def wish(text: str) -> str:
    """Return a user's message for which the model answers with a text."""
    return f"say: {text}"


class ObedientEngine(ScriptedEngine):
    """An engine that samples the text after the last "say: " of the prompt, and ends at stop strings."""

    def __init__(self) -> None:
        super().__init__(self._say, name="obedient", delay_s=lambda request: 0.4 if self._wish(request)[1] else 0.0)

    def _wish(self, request: SampleRequest) -> tuple[str, bool]:
        text = _WISH.findall(str(TOKENIZER.decode(request.token_ids.tolist())))[-1]
        return text.removeprefix(SLOWLY), text.startswith(SLOWLY)

    def _say(self, request: SampleRequest) -> list[int]:
        ids: list[int] = TOKENIZER(self._wish(request)[0], add_special_tokens=False)["input_ids"]
        return [*ids, TOKENIZER.eos_token_id]

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        completions = await super().generate(requests)
        return [self._stop(request, done) for request, done in zip(requests, completions, strict=True)]

    def _stop(self, request: SampleRequest, done: Completion) -> Completion:
        for end in range(1, len(done.token_ids) + 1):
            text = str(TOKENIZER.decode(done.token_ids[:end].tolist()))
            for stop in request.sampling.stop:
                if text.endswith(stop):
                    names = ("token_ids", "logprobs", "full_logprobs")
                    arrays = {name: getattr(done, name)[:end] for name in names}
                    return replace(done, **arrays, stop_reason="stop", stop_text=stop, versions=[])
        return done


class LateFailingEngine(ObedientEngine):
    """An engine that fails when it has sampled an answer."""

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        await super().generate(requests)
        raise EngineError("the engine was killed")


@contextmanager
def endpoint_in_thread(engine: Any, tokenizer: Any = TOKENIZER, **options: Any) -> Iterator[str]:
    """Serve model "m" on an event loop in another thread, and yield the URL."""
    started, url = threading.Event(), ""
    loop = asyncio.new_event_loop()
    done = asyncio.Event()

    async def serve() -> None:
        nonlocal url
        async with HttpEndpoint(engine, tokenizer, model_name="m", token=TOKEN, **options) as endpoint:
            url = endpoint.url
            started.set()
            await done.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        assert started.wait(60)
        yield url
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(60)
        loop.close()


def find_unknown_members(value: Any, known: frozenset[str] = frozenset(), path: str = "") -> list[str]:
    """Return the members of a parsed response that the types of its SDK do not have.

    Args:
        value: A response, or a part of one.
        known: Names of members that are documented extensions.
        path: Path of the value.
    """
    if isinstance(value, BaseModel):
        extra = value.model_extra or {}
        found = [f"{path}.{name}" for name in extra if name not in known]
        fields = [(name, getattr(value, name)) for name in type(value).model_fields]
    elif isinstance(value, list):
        found, fields = [], [(str(index), item) for index, item in enumerate(value)]
    else:
        return []
    return found + [item for name, part in fields for item in find_unknown_members(part, known, f"{path}.{name}")]
