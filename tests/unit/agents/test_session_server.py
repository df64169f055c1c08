"""The session server over HTTP, with the official SDKs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import openai
import pytest

from skyrl_train.agents.server import SessionServer
from skyrl_train.agents.session import Session
from skyrl_train.errors import EngineError
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.family_templates import TOOL
from tests.support.sessions import END, PROMPT, ScriptedModel, call_text, run_session, sequences, session_settings

USER: Any = {"role": "user", "content": "1 + 2?"}
TOOLS: Any = [TOOL]


def openai_client(session: Session) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=session.base_url, api_key="ignored", max_retries=0, _strict_response_validation=True
    )


def anthropic_client(session: Session) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(
        base_url=session.anthropic_base_url, api_key="ignored", max_retries=0, _strict_response_validation=True
    )


async def play_chat_completions(session: Session, server: SessionServer) -> None:
    async with openai_client(session) as client:
        first = await client.chat.completions.create(model="any", messages=[USER], tools=TOOLS)
        call = first.choices[0].message
        assert first.choices[0].finish_reason == "tool_calls" and call.tool_calls is not None
        result: Any = {"role": "tool", "tool_call_id": call.tool_calls[0].id, "content": "3"}
        history: Any = [USER, call.model_dump(exclude_none=True), result]
        second = await client.chat.completions.create(model="any", messages=history, tools=TOOLS)
        assert second.choices[0].message.content == "three"
        assert second.usage is not None and second.usage.completion_tokens == 6


async def play_streams(session: Session, server: SessionServer) -> None:
    async with openai_client(session) as client:
        messages: Any = [USER]
        for _ in range(2):
            async with client.chat.completions.stream(model="any", messages=messages, tools=TOOLS) as stream:
                message = (await stream.get_final_completion()).choices[0].message
            messages.append(message.model_dump(exclude_none=True))
            for call in message.tool_calls or []:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "3"})


async def play_responses(session: Session, server: SessionServer) -> None:
    tool: Any = {"type": "function", "strict": False, **TOOL["function"]}
    async with openai_client(session) as client:
        first = await client.responses.create(model="any", input=[USER], tools=[tool])
        (call,) = [item for item in first.output if item.type == "function_call"]
        result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "3"}
        history: Any = [USER, *(item.model_dump(exclude_none=True) for item in first.output), result]
        second = await client.responses.create(model="any", input=history, tools=[tool])
        assert second.output_text == "three"


async def play_messages(session: Session, server: SessionServer) -> None:
    function = TOOL["function"]
    tool: Any = {
        "name": function["name"],
        "description": function["description"],
        "input_schema": function["parameters"],
    }
    async with anthropic_client(session) as client:
        first = await client.messages.create(model="any", max_tokens=200, messages=[USER], tools=[tool])
        (call,) = [block for block in first.content if block.type == "tool_use"]
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "3"}
        answer: Any = {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]}
        history: Any = [USER, answer, {"role": "user", "content": [result]}]
        second = await client.messages.create(model="any", max_tokens=200, messages=history, tools=[tool])
        assert second.content[0].type == "text" and second.content[0].text == "three"


PROGRAMS: dict[str, Callable[[Session, SessionServer], Awaitable[None]]] = {
    "chat completions": play_chat_completions,
    "streams": play_streams,
    "responses": play_responses,
    "messages": play_messages,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_dialect_reuses_sampled_tokens(name: str):
    session, item = run_session(PROGRAMS[name], [call_text(), "three"])
    statistics = session.statistics
    assert (statistics.calls, statistics.branches, statistics.retokenized_messages) == (2, 0, 0)
    ((prompt, sampled),) = sequences(item)
    assert sampled == [call_text() + END, "three" + END] and prompt.endswith("<|im_start|>assistant\n")
    assert (
        item.loss_mask.sum()
        == statistics.sampled_tokens
        == len(item.response_ids) - statistics.read_tokens + len(item.prompt_ids)
    )


def test_reasoning_is_returned_or_dropped():
    async def play(session: Session, server: SessionServer) -> None:
        async with openai_client(session) as client:
            first = await client.chat.completions.create(model="any", messages=[USER])
            message = first.choices[0].message.model_dump(exclude_none=True)
            assert message["content"] == "three" and "well" in str(message)
            for answer in (message, {"role": "assistant", "content": "three"}):
                history: Any = [USER, answer, {"role": "user", "content": "sure?"}]
                await client.chat.completions.create(model="any", messages=history)

    session, item = run_session(play, ["<think>\nwell\n</think>\n\nthree", "yes", "yes!"])
    assert (session.statistics.branches, session.statistics.retokenized_messages) == (0, 0)
    assert "well" in item.text or "well" in str(sequences(item))


async def call_openai(session: Session) -> None:
    async with openai_client(session) as client:
        await client.chat.completions.create(model="any", messages=[USER])


async def call_anthropic(session: Session) -> None:
    async with anthropic_client(session) as client:
        await client.messages.create(model="any", max_tokens=9, messages=[USER])


@pytest.mark.parametrize("call", [call_openai, call_anthropic])
def test_closed_and_unknown_sessions(call: Callable[[Session], Awaitable[None]]):
    async def play(session: Session, server: SessionServer) -> None:
        await call(session)
        await server.close(session)
        with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="This session is closed") as error:
            await call(session)
        assert getattr(error.value, "status_code") == 410  # noqa: B009
        session.base_url = session.base_url.replace(session.id, "x" * 32)
        session.anthropic_base_url = session.anthropic_base_url.replace(session.id, "x" * 32)
        with pytest.raises((openai.NotFoundError, anthropic.NotFoundError), match="no session with this id"):
            await call(session)

    run_session(play, ["three"])


def test_running_call_of_closed_session_gets_410():
    async def play(session: Session, server: SessionServer) -> None:
        async with openai_client(session) as client:
            call = asyncio.ensure_future(client.chat.completions.create(model="any", messages=[USER]))
            await asyncio.sleep(0.2)
            await server.close(session)
            with pytest.raises(openai.APIStatusError) as error:
                await call
            assert error.value.status_code == 410

    run_session(play, None, engine=ScriptedEngine(ScriptedModel(["three"]), delay_s=30.0))


def test_disconnected_client_leaves_no_call():
    engine = ScriptedEngine(ScriptedModel(["three"]), delay_s=30.0)

    async def play(session: Session, server: SessionServer) -> None:
        async with openai_client(session) as client:
            with pytest.raises(openai.APITimeoutError):
                await client.chat.completions.create(model="any", messages=[USER], timeout=0.3)
        for _ in range(100):
            if not (await engine.health()).running:
                break
            await asyncio.sleep(0.02)
        assert not (await engine.health()).running

    session, item = run_session(play, None, engine=engine)
    assert session.statistics.calls == 0 and not item.turns and session.failure is None


def test_engine_failure_is_status_503():
    async def play(session: Session, server: SessionServer) -> None:
        async with openai_client(session) as client:
            with pytest.raises(openai.InternalServerError) as error:
                await client.chat.completions.create(model="any", messages=[USER])
            assert error.value.status_code == 503

    engine = ScriptedEngine(failures={"generate": EngineError("Engine 'scripted' broke.")})
    session, item = run_session(play, None, engine=engine)
    assert session.failure is not None and item.error == "engine"


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"n": 0}, {"n": -1}])
def test_invalid_call_is_not_over_limit(options: dict[str, Any]):
    async def play(session: Session, server: SessionServer) -> None:
        async with openai_client(session) as client:
            with pytest.raises(openai.BadRequestError, match="must be from 1") as error:
                await client.chat.completions.create(model="any", messages=[USER], **options)
            assert error.value.param == next(iter(options))

    session, _ = run_session(play, [], max_sampled_tokens=100, max_calls=5)
    assert not session.is_over_limit


def test_deeply_nested_body_is_rejected():
    async def play(session: Session, server: SessionServer) -> None:
        parameters: Any = {}
        for _ in range(600):
            parameters = {"not": parameters}
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        async with aiohttp.ClientSession() as client:
            body = {"model": "any", "messages": [USER], "tools": [tool]}
            async with client.post(f"{session.base_url}/chat/completions", json=body) as response:
                assert response.status == 400 and "nested too deeply" in await response.text()

    run_session(play, [])


def test_reward_is_reported_over_http():
    async def play(session: Session, server: SessionServer) -> None:
        async with aiohttp.ClientSession() as client:
            url = f"{session.anthropic_base_url}/reward"
            for body, status in (({"reward": 0.5}, 200), ({"reward": "x"}, 400), ({}, 400), ({"reward": 1}, 200)):
                async with client.post(url, json=body) as response:
                    assert response.status == status, await response.text()
            async with client.get(f"{session.base_url}/models") as response:
                assert (await response.json())["data"][0]["id"] == "m"
            async with client.get(f"{server.url}/metrics") as response:
                assert response.status == 404

    session, _ = run_session(play, [])
    assert session.reward == 1.0


def test_session_id_is_not_logged(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    async def play(session: Session, server: SessionServer) -> None:
        async with aiohttp.ClientSession() as client:
            body = {"model": "any", "messages": [USER], "some_new_parameter": 1}
            for status in (200, 500):
                async with client.post(f"{session.base_url}/chat/completions", json=body) as response:
                    assert response.status == status
                monkeypatch.setattr(session, "sample", None)
        assert "some_new_parameter" in caplog.text and "TypeError" in caplog.text and session.id not in caplog.text

    run_session(play, ["three"])


def test_session_ids_cannot_be_guessed():
    async def play(session: Session, server: SessionServer) -> None:
        others = [server.open(PROMPT, sample=0, position=0, settings=session_settings()) for _ in range(50)]
        assert len({other.id for other in others}) == 50 and all(len(other.id) == 32 for other in others)

    run_session(play, [])
