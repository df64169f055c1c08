"""Sessions: what a program sends back is recognized, and what was sampled is trained on exactly once."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest

from skyrl_train.agents.call_tree import answer_to_message
from skyrl_train.agents.server import SessionServer
from skyrl_train.agents.session import Session
from skyrl_train.data.trajectory import FAILED, OK
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.chat_request import ChatAnswer, ChatRequest
from skyrl_train.engines.http.exchange import ApiError
from skyrl_train.engines.http.json_body import InvalidBodyError
from skyrl_train.errors import DataError, EngineError
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.family_templates import TOOL, tool_tokenizer
from tests.support.sessions import (
    END,
    PROMPT,
    TOKENIZER,
    ScriptedModel,
    call_text,
    contexts,
    encode,
    rewrite_json,
    run_session,
    sequences,
    session_settings,
)

USER: dict[str, Any] = {"role": "user", "content": "1 + 2?"}


async def ask(session: Session, *messages: dict[str, Any], tools: Any = (TOOL,), **options: Any) -> dict[str, Any]:
    """Return the answer as a client sends it back."""
    (answer,) = await session.sample(ChatRequest(messages=list(messages), tools=list(tools), **options))
    return answer_to_message(answer.answer)


def result_of(message: dict[str, Any], text: str = "3") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def counts(session: Session) -> tuple[int, int, int]:
    return session.statistics.calls, session.statistics.branches, session.statistics.retokenized_messages


def test_tool_loop_is_one_sequence():
    async def play(session: Session, server: SessionServer) -> None:
        history = [USER]
        for _ in range(2):
            history.append(rewrite_json(await ask(session, *history)))
            history.append(result_of(history[-1]))
        await ask(session, *history)

    session, item = run_session(play, [call_text(), call_text(arguments='{ "a": 1e0}'), "three"])
    assert counts(session) == (3, 0, 0)
    ((prompt, sampled),) = sequences(item)
    assert sampled == [call_text() + END, call_text(arguments='{ "a": 1e0}') + END, "three" + END]
    assert prompt.endswith("1 + 2?<|im_end|>\n<|im_start|>assistant\n") and item.status == OK
    assert [(turn.stop_reason, turn.min_version) for turn in item.turns] == [("stop", 0)] * 3
    assert item.text.startswith("assistant: ") and item.messages[-1]["content"] == "three"
    assert item.turns[0].tool_calls == ({"name": "add", "arguments": '{"a": 1, "b": 2.0}'},)


RETURNED = {
    "as it was": lambda message: message,
    "without reasoning": lambda message: {**message, "reasoning_content": None},
    "with null content": lambda message: {**message, "content": None},
    "with JSON written anew": rewrite_json,
    "without ids": lambda message: {
        **message,
        "tool_calls": [{"type": "function", "function": call["function"]} for call in message["tool_calls"]],
    },
}


@pytest.mark.parametrize("name", RETURNED)
def test_returned_calls_are_recognized(name: str):
    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, USER)
        await ask(session, USER, RETURNED[name](message), result_of(message))

    session, item = run_session(play, ["<think>\nwell\n</think>\n\n" + call_text(), "three"])
    assert counts(session) == (2, 0, 0) and not item.restarts


CHANGED = {
    "reasoning": lambda message: {**message, "reasoning_content": "no"},
    "arguments": lambda message: {
        **message,
        "tool_calls": [
            {**call, "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}} for call in message["tool_calls"]
        ],
    },
    "id": lambda message: {**message, "tool_calls": [{**call, "id": "another01"} for call in message["tool_calls"]]},
    "text": lambda message: {"role": "assistant", "content": "I call add."},
}


@pytest.mark.parametrize("name", CHANGED)
def test_changed_answers_are_counted(name: str, caplog: pytest.LogCaptureFixture):
    async def play(session: Session, server: SessionServer) -> None:
        message = CHANGED[name](await ask(session, USER))
        with caplog.at_level(logging.WARNING):
            await ask(session, USER, message, {"role": "user", "content": "go\x1b[2J on"})

    session, item = run_session(play, ["<think>\nwell\n</think>\n\n" + call_text(), "three"])
    assert counts(session) == (2, 1, 1) and len(item.restarts) == 1
    assert [texts for _, texts in sequences(item)][1] == ["three" + END]
    assert "messages[1] of a call is an answer that is tokenized from its text" in caplog.text


def test_opened_reasoning_stays_in_one_sequence():
    tokenizer = tool_tokenizer("qwen")
    header = "<|im_start|>assistant\n"
    tokenizer.chat_template = tokenizer.chat_template.replace(" and loop.last %}{{ '<think>\n\n</think>\n\n", "%}{{ '")
    tokenizer.chat_template = tokenizer.chat_template.replace(header, header + "<think>\n")
    texts = ["well\n</think>\n\n" + call_text(), "yes\n</think>\n\nthree"]

    async def play(session: Session, server: SessionServer) -> None:
        first = await ask(session, USER)
        assert first["reasoning_content"] == "well"
        await ask(session, USER, first, result_of(first))

    session, item = run_session(play, texts, tokenizer=tokenizer)
    ((prompt, sampled),) = sequences(item)
    assert counts(session) == (2, 0, 0) and prompt.endswith(header + "<think>\n")
    assert sampled == [text + END for text in texts]


def test_compaction_starts_a_sequence():
    async def play(session: Session, server: SessionServer) -> None:
        first = await ask(session, USER)
        second = await ask(session, USER, first, result_of(first))
        await ask(session, {"role": "user", "content": "Summary: 1 + 2."}, second, result_of(second))

    session, item = run_session(play, [call_text(), call_text("sub", "{}"), "three"])
    assert counts(session) == (3, 1, 0)
    (_, first_texts), (prompt, texts) = sequences(item)
    assert first_texts == [call_text() + END, call_text("sub", "{}") + END] and texts == ["three" + END]
    assert "Summary" in prompt and call_text("sub", "{}") + END in prompt and call_text() not in prompt


def test_rejected_request_leaves_answers_unchanged():
    tokenizer = tool_tokenizer("harmony")

    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, USER)
        with pytest.raises(DataError, match="a result needs a call"):
            await ask(session, USER, result_of(message), message)
        await ask(session, USER, message, result_of(message))

    call = '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a":1}<|call|>'
    answers = iter((call.removeprefix("<|start|>assistant"), "<|channel|>final<|message|>three<|return|>"))
    engine = ScriptedEngine(lambda request: tokenizer(next(answers), add_special_tokens=False)["input_ids"])
    session, item = run_session(play, None, tokenizer=tokenizer, engine=engine)
    assert counts(session) == (2, 0, 0) and not item.restarts


def test_branches_hold_shared_answers_in_prompt():
    async def play(session: Session, server: SessionServer) -> None:
        first = await ask(session, USER)
        await ask(session, USER, first, result_of(first, "3"))
        await ask(session, USER, first, result_of(first, "4"))

    session, item = run_session(play, [call_text(), "three", "four"])
    assert counts(session) == (3, 0, 0)
    (_, one), (prompt, other) = sequences(item)
    assert (one, other) == ([call_text() + END, "three" + END], ["four" + END])
    assert call_text() + END in prompt and "\n4\n" in prompt
    assert (
        sum(stop - start for start, stop in item.loss_spans) == item.sampled_tokens == session.statistics.sampled_tokens
    )


@pytest.mark.parametrize("change", ["tools", "template variables"])
def test_other_options_start_a_branch(change: str):
    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, USER)
        other = {**TOOL, "function": {**TOOL["function"], "name": "sub"}}
        options: Any = {"tools": [TOOL, other]} if change == "tools" else {"chat_template_kwargs": {"x": 1}}
        await ask(session, USER, message, result_of(message), **options)

    session, item = run_session(play, [call_text(), "three"])
    assert counts(session) == (2, 1, 0) and len(item.restarts) == (change == "tools")


def test_parallel_calls_are_ordered_by_content():
    """Sub-agents answer in any order; seeds and the trajectory do not depend on it."""

    def play_with(delays: dict[str, float]) -> Any:
        def answer(prompt: str) -> str:
            return "a" if "sub A" in prompt else "b" if "sub B" in prompt else "main"

        async def play(session: Session, server: SessionServer) -> None:
            message = await ask(session, USER)
            await asyncio.gather(*(ask(session, {"role": "user", "content": f"sub {name}"}) for name in delays))
            await ask(session, USER, message, {"role": "user", "content": "done"})

        model = ScriptedModel(answer)
        engine = ScriptedEngine(
            model,
            delay_s=lambda request: next(
                (delay for name, delay in delays.items() if f"sub {name}" in TOKENIZER.decode(request.token_ids)), 0.0
            ),
        )
        session, item = run_session(play, None, engine=engine)
        seeds = sorted((request.token_ids.tolist(), request.seed) for request in model.requests)
        return counts(session), item, seeds

    first, second = play_with({"A": 0.05, "B": 0.0}), play_with({"B": 0.05, "A": 0.0})
    assert first[0] == (4, 2, 0) and first[1] == second[1] and first[2] == second[2]
    assert [texts for _, texts in sequences(first[1])][2] == ["main" + END] * 2
    assert len({seed for _, seed in first[2]}) == 4


def test_seeds_depend_on_context_and_repetition():
    def seeds_of(position: int, times: int) -> list[int]:
        model = ScriptedModel(["a"] * times)

        async def run() -> None:
            client = EngineClient([ScriptedEngine(model)], deadline_s=60.0)
            async with SessionServer(client, TOKENIZER, model_name="m") as server:
                session = server.open(PROMPT, sample=0, position=position, settings=session_settings())
                for _ in range(times):
                    await ask(session, USER, seed=42)

        asyncio.run(run())
        return [request.seed for request in model.requests]

    first = seeds_of(0, 3)
    assert len(set(first)) == 3 and first[:1] == seeds_of(0, 1) != seeds_of(1, 1)


def test_seeds_depend_on_options_not_on_arrival():
    def seeds_of(*stops: str) -> dict[tuple[str, ...], int]:
        model = ScriptedModel(["a", "a"])

        async def play(session: Session, server: SessionServer) -> None:
            await asyncio.gather(*(ask(session, USER, sampling={"stop": stop}) for stop in stops))

        run_session(play, None, engine=ScriptedEngine(model))
        return {request.sampling.stop: request.seed for request in model.requests}

    assert seeds_of("x", "y") == seeds_of("y", "x")


def test_several_answers_are_siblings():
    async def play(session: Session, server: SessionServer) -> None:
        request = ChatRequest(messages=[USER], tools=[TOOL], n=3)
        answers: list[ChatAnswer] = await session.sample(request)
        second = answer_to_message(answers[1].answer)
        await ask(session, USER, second, {"role": "user", "content": "go on"})

    session, item = run_session(play, ["a", "b", "c", "d"])
    assert counts(session) == (4, 0, 0)
    assert sorted(texts for _, texts in sequences(item)) == [["a" + END], ["b" + END, "d" + END], ["c" + END]]
    assert len({tuple(prompt) for prompt, _ in contexts(item)}) == 2


def test_repeated_messages_are_recognized():
    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, USER)
        await ask(session, USER, message, USER, message, USER)

    session, item = run_session(play, ["ok", "ok"])
    ((_, sampled),) = sequences(item)
    assert counts(session) == (2, 0, 0) and sampled == ["ok" + END] * 2


def test_changed_text_beside_calls_is_read():
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}

    def shots(text: str) -> list[dict[str, Any]]:
        result = {"role": "tool", "tool_call_id": "a", "content": "3"}
        return [USER, {"role": "assistant", "content": text, "tool_calls": [call]}, result]

    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, *shots("One moment."))
        await ask(session, *shots("Let me see."), message, {"role": "user", "content": "sure?"})

    _, item = run_session(play, ["three", "yes"])
    (first, _), (second, _) = sequences(item)
    assert "One moment." in first and "Let me see." in second and "One moment." not in second


def test_equal_texts_match_the_same_answer():
    """Two concurrent calls get answers that differ only in their reasoning, which the client drops."""

    def play_with(slow: int) -> Any:
        def answer(request: SampleRequest) -> list[int]:
            is_last = "ok<|im_end|>" in str(TOKENIZER.decode(request.token_ids))
            return encode(("yes" if is_last else f"<think>\n{request.seed}\n</think>\n\nok") + END)

        numbers = iter(range(3))
        engine = ScriptedEngine(answer, delay_s=lambda request: 0.1 if next(numbers) == slow else 0.0)

        async def play(session: Session, server: SessionServer) -> None:
            await asyncio.gather(ask(session, USER), ask(session, USER))
            await ask(session, USER, {"role": "assistant", "content": "ok"}, USER)

        return run_session(play, None, engine=engine)[1]

    first, second = play_with(0), play_with(1)
    assert first == second and len(first.turns) == 3 and len(first.restarts) == 1


def test_examples_before_first_answer_are_not_counted():
    async def play(session: Session, server: SessionServer) -> None:
        shots = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}, USER]
        message = await ask(session, *shots)
        await ask(session, *shots, message, {"role": "user", "content": "sure?"})

    session, item = run_session(play, ["three", "yes"])
    assert counts(session) == (2, 0, 0) and not item.restarts


def test_continued_message_is_recognized():
    async def play(session: Session, server: SessionServer) -> None:
        await ask(session, USER, {"role": "assistant", "content": "th"}, continue_final_message=True)
        await ask(session, USER, {"role": "assistant", "content": "three"}, {"role": "user", "content": "sure?"})

    session, item = run_session(play, ["ree", "yes"])
    ((prompt, sampled),) = sequences(item)
    assert counts(session) == (2, 0, 0) and prompt.endswith("assistant\nth") and sampled == ["ree" + END, "yes" + END]


def test_truncated_answer_is_continued_exactly():
    first, second = encode("\u00e9")
    answers = iter(([first], [second, *encode("t" + END)], encode("yes" + END)))
    engine = ScriptedEngine(lambda request: next(answers))

    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, USER, sampling={"max_tokens": 1})
        assert message["content"] == "\ufffd"
        rest = await ask(session, USER, message, continue_final_message=True)
        whole = {**message, "content": message["content"] + rest["content"]}
        await ask(session, USER, whole, {"role": "user", "content": "sure?"})

    session, item = run_session(play, None, engine=engine)
    assert counts(session) == (3, 0, 0) and not item.restarts
    assert str(TOKENIZER.decode(item.response_ids)).startswith("\u00e9t<|im_end|>\n<|im_start|>user\nsure?")
    assert [turn.sampled_tokens for turn in item.turns] == [1, 3, 4]


def test_sampling_parameters_of_the_run_win():
    model = ScriptedModel(["three", "three"])

    async def play(session: Session, server: SessionServer) -> None:
        sampling = {"temperature": 0.1, "top_p": 0.9, "max_tokens": 5, "stop": "x"}
        await ask(session, USER, sampling=sampling)
        await ask(session, USER, sampling={"max_tokens": 10**6, "temperature": 0.7})

    run = SamplingParams(max_tokens=9, temperature=0.7, stop=("y",))
    session, _ = run_session(play, None, engine=ScriptedEngine(model), sampling_params=run)
    first, second = (request.sampling for request in model.requests)
    assert (first.temperature, first.top_p, first.max_tokens, first.stop) == (0.7, 1.0, 5, ("y", "x"))
    assert (second.max_tokens, second.temperature) == (9, 0.7) and session.statistics.overridden_parameters == 2


@pytest.mark.parametrize(
    ("limits", "problem"),
    [
        ({"max_calls": 1}, "limit of 1 calls"),
        ({"max_sampled_tokens": 6}, "limit of 6 sampled tokens"),
        ({"max_input_length": 180}, "maximum context length is 180 tokens"),
    ],
)
def test_limits_refuse_calls(limits: dict[str, Any], problem: str):
    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, USER)
        with pytest.raises(ApiError, match=problem) as error:
            await ask(session, USER, message, {"role": "user", "content": "sure?"})
        assert (error.value.status, error.value.code) == (400, "context_length_exceeded")

    session, item = run_session(play, ["three!!", "yes"], **limits)
    assert session.is_over_limit and (item.status, item.stop_reason) == (OK, "length")


def test_concurrent_calls_count_for_the_limit():
    async def play(session: Session, server: SessionServer) -> None:
        calls = (ask(session, {"role": "user", "content": str(number)}) for number in range(5))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(result, ApiError) for result in results) == 2

    session, _ = run_session(play, ["three"] * 5, max_calls=3)
    assert session.is_over_limit and session.statistics.calls == 3


@pytest.mark.parametrize(("too_long", "is_over_limit"), [(1, False), (2, True)])
def test_shortened_history_is_not_over_limit(too_long: int, is_over_limit: bool):
    """The first call that is too long is followed by a shorter one; the last one is not."""

    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, USER)
        for number in range(too_long):
            with pytest.raises(ApiError, match="the prompt is too long"):
                await ask(session, USER, message, {"role": "user", "content": "sure?" * 20})
            if number == 0:
                await ask(session, {"role": "user", "content": "Summary: 3. Sure?"})

    session, item = run_session(play, ["three", "yes"], max_input_length=200)
    assert session.is_over_limit is is_over_limit
    assert (counts(session), item.stop_reason) == ((2, 1, 0), "length" if is_over_limit else "stop")


def test_answer_to_an_earlier_call_does_not_shorten():
    async def play(session: Session, server: SessionServer) -> None:
        earlier = asyncio.ensure_future(ask(session, USER))
        await asyncio.sleep(0.05)
        with pytest.raises(ApiError, match="the prompt is too long"):
            await ask(session, {"role": "user", "content": "sure?" * 40})
        await earlier

    engine = ScriptedEngine(ScriptedModel(["three"]), delay_s=0.2)
    session, _ = run_session(play, None, engine=engine, max_input_length=200)
    assert session.is_over_limit and session.statistics.calls == 1


def test_concurrent_calls_share_the_token_budget():
    """Each answer has 6 tokens and may have 12, so the third call gets what the others left, and the fourth nothing."""
    model = ScriptedModel(["three"] * 4)

    async def play(session: Session, server: SessionServer) -> None:
        calls = (ask(session, {"role": "user", "content": str(number)}) for number in range(4))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [str(result) for result in results if isinstance(result, ApiError)] == [
            "This session has reached its limit of 18 sampled tokens."
        ]

    engine = ScriptedEngine(model, delay_s=0.05)
    sampling = SamplingParams(max_tokens=12)
    session, _ = run_session(play, None, engine=engine, max_sampled_tokens=18, sampling_params=sampling)
    assert [request.sampling.max_tokens for request in model.requests] == [12, 12, 6]
    assert session.is_over_limit and session.statistics.sampled_tokens == 18


def test_call_that_waits_for_the_budget_sees_a_failure():
    started: list[SampleRequest] = []

    def delay_s(request: SampleRequest) -> float:
        started.append(request)
        return 30.0

    async def play(session: Session, server: SessionServer) -> None:
        results = await asyncio.gather(ask(session, USER), ask(session, USER), return_exceptions=True)
        assert [isinstance(result, ApiError) and result.status for result in results] == [503, 503]

    engine = ScriptedEngine(ScriptedModel(["three"] * 2), delay_s=delay_s)
    session, item = run_session(play, None, engine=engine, max_sampled_tokens=100, rollout_s=0.2)
    assert (item.error, session.is_over_limit, len(started)) == ("deadline", False, 1)


@pytest.mark.parametrize("options", [{"sampling": {"max_tokens": 0}}, {"n": 0}])
def test_invalid_values_are_not_limits(options: dict[str, Any]):
    async def play(session: Session, server: SessionServer) -> None:
        with pytest.raises(InvalidBodyError, match=r"must be|is not allowed"):
            await ask(session, USER, **options)
        await ask(session, USER)

    session, item = run_session(play, ["three"], max_sampled_tokens=100)
    assert not session.is_over_limit and item.stop_reason == "stop"


def test_engine_failure_masks_the_session():
    engine = ScriptedEngine(ScriptedModel(["three"]))

    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, USER)
        engine.failures["generate"] = EngineError("Engine 'scripted' broke.")
        for _ in range(2):
            with pytest.raises(ApiError, match="This session has failed: ") as error:
                await ask(session, USER, message, USER)
            assert error.value.status == 503

    session, item = run_session(play, None, engine=engine)
    assert session.failure is not None and (item.status, item.error) == (FAILED, "engine")
    assert len(item.turns) == 1


def test_deadline_masks_the_session():
    async def play(session: Session, server: SessionServer) -> None:
        with pytest.raises(ApiError, match=r"did not finish within 0\.05 s"):
            await ask(session, USER)

    engine = ScriptedEngine(ScriptedModel(["three"]), delay_s=30.0)
    _, item = run_session(play, None, engine=engine, rollout_s=0.05)
    assert (item.status, item.error) == (FAILED, "deadline")


def test_closing_ends_running_calls():
    engine = ScriptedEngine(ScriptedModel(["three"]), delay_s=30.0)

    async def play(session: Session, server: SessionServer) -> None:
        call = asyncio.ensure_future(ask(session, USER))
        await asyncio.sleep(0.05)
        await server.close(session)
        for later in (call, ask(session, USER)):
            with pytest.raises(ApiError, match="closed") as error:
                await later
            assert error.value.status == 410

    session, item = run_session(play, None, engine=engine)
    assert counts(session) == (0, 0, 0) and not item.turns and session.failure is None


def test_record_describes_calls():
    async def play(session: Session, server: SessionServer) -> None:
        message = await ask(session, USER)
        await ask(session, USER, rewrite_json(message), result_of(message))
        await ask(session, {"role": "user", "content": "other"})

    session, item = run_session(play, ["<think>\nwell\n</think>\n\n" + call_text(), "<tool_call>\n{", "other"])
    assert item.session is not None
    first, second, third = item.session["calls"]
    assert (first["parent"], second["parent"], third["parent"]) == (None, 0, None)
    assert first["answer"]["reasoning"] == "well" and first["answer"]["tool_calls"][0]["arguments"] == {"a": 1, "b": 2}
    assert [message["role"] for message in second["messages"]] == ["tool"]
    assert [TOKENIZER.decode(item.response_ids[call["start"] : call["stop"]]) for call in (second, third)] == [
        "<tool_call>\n{" + END,
        "other" + END,
    ]
    assert [call["sequence"] for call in item.session["calls"]] == [0, 0, 1]
    assert item.session["statistics"]["read_tokens"] == session.statistics.read_tokens > 0
