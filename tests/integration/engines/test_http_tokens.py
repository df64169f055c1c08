"""Token strings, bytes, offsets and log-probs of OpenAI's routes with a real engine, read by `openai`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

import openai
import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.token_texts import get_vocabulary_texts
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.engine_harness import BackgroundLoop
from tests.support.tokenizers import KINDS

NAME = "org/tiny"
TOKEN = "a-secret-of-this-test"
LENGTH = 40
SAMPLING: dict[str, Any] = {"model": NAME, "max_tokens": LENGTH, "seed": 4, "n": 2}
PROMPT = "the cat"
MESSAGES: Any = [{"role": "user", "content": PROMPT}]
ALL_TOKENS = {"ignore_eos": True, "return_token_ids": True}


class CompletionsServer:
    """An engine with one kind of tokenizer, its endpoint, and a client."""

    def __init__(self, kind: str) -> None:
        self.kind, self.tokenizer = kind, KINDS[kind]()
        self.loop = BackgroundLoop()
        model = tiny_model("llama", vocab_size=len(self.tokenizer)).eval()
        self.engine = TransformersEngine(model, self.tokenizer, max_model_len=128)
        self.endpoint = HttpEndpoint(self.engine, self.tokenizer, model_name=NAME, token=TOKEN)
        self.loop.run(self.endpoint.__aenter__())
        self.client = openai.OpenAI(base_url=f"{self.endpoint.url}/v1", api_key=TOKEN, max_retries=0, timeout=60)

    def close(self) -> None:
        self.client.close()
        self.loop.run(self.endpoint.__aexit__(None, None, None))
        self.loop.run(self.engine.close())
        self.loop.close()

    def scores(self, *sequences: list[int]) -> list[list[float]]:
        logprobs: list[list[float]] = self.loop.run(self.engine.score(list(sequences)))
        return logprobs

    def complete(self, stream: bool, **options: Any) -> list[Any]:
        """Return the choices of a completion."""
        options = SAMPLING | {"prompt": PROMPT, "logprobs": 0, "extra_body": ALL_TOKENS} | options
        if not stream:
            return list(self.client.completions.create(**options).choices)
        chunks = [
            choice for chunk in self.client.completions.create(**options, stream=True) for choice in chunk.choices
        ]
        return [choice for choice in chunks if choice.finish_reason is None]


@pytest.fixture(scope="module", params=[*KINDS])
def server(request: pytest.FixtureRequest) -> Iterator[CompletionsServer]:
    completions_server = CompletionsServer(request.param)
    yield completions_server
    completions_server.close()


def check_offsets(choice: Any) -> None:
    logprobs = choice.logprobs
    assert "".join(logprobs.tokens) == choice.text
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset)
    assert logprobs.text_offset == list(accumulate(map(len, logprobs.tokens), initial=0))[:-1]
    assert logprobs.top_logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_chat_tokens_join_to_content(server: CompletionsServer, stream: bool):
    options: Any = SAMPLING | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 0, "extra_body": ALL_TOKENS}
    if stream:
        chunks = server.client.chat.completions.create(**options, stream=True)
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.finish_reason is None]
        answers = [(choice.delta.content, choice) for choice in choices]
    else:
        choices = server.client.chat.completions.create(**options).choices
        answers = [(choice.message.content, choice) for choice in choices]
    assert len(answers) == 2
    for text, choice in answers:
        rows = choice.logprobs.content
        assert len(rows) == len(choice.token_ids) == LENGTH
        assert text and "".join(row.token for row in rows) == text
        assert all(row.top_logprobs == [] for row in rows)
        if server.kind != "byte fallback":  # byte fallback replaces more than the invalid bytes
            data = bytes(byte for row in rows for byte in row.bytes)
            assert data.decode("utf-8", "replace") == text


@pytest.mark.parametrize("stream", [False, True])
def test_completion_tokens_join_to_text(server: CompletionsServer, stream: bool):
    choices = server.complete(stream)
    assert len(choices) == 2
    for choice in choices:
        assert len(choice.logprobs.tokens) == LENGTH and choice.text
        check_offsets(choice)


def test_greedy_logprobs_are_the_models(server: CompletionsServer):
    choice, _ = server.complete(False, temperature=0)
    (scores,) = server.scores(choice.prompt_token_ids + choice.token_ids)
    assert choice.logprobs.token_logprobs == pytest.approx(scores[-LENGTH:], abs=1e-4)
    assert max(choice.logprobs.token_logprobs) < 0
    chat = server.client.chat.completions.create(
        **SAMPLING, messages=MESSAGES, temperature=0, logprobs=True, extra_body=ALL_TOKENS
    )
    (rows,) = server.scores(chat.prompt_token_ids + chat.choices[0].token_ids)  # type: ignore[attr-defined]
    logprobs = chat.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert [row.logprob for row in logprobs.content] == pytest.approx(rows[-LENGTH:], abs=1e-4)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_prepends_prompt_and_its_tokens(server: CompletionsServer, stream: bool):
    prompts = [PROMPT, "a mat and"]
    plain = server.complete(stream, prompt=prompts)
    echoed = server.complete(stream, prompt=prompts, echo=True)
    assert len(echoed) == 4
    for index, (choice, without) in enumerate(zip(echoed, plain, strict=True)):
        prompt = prompts[index // 2]
        assert choice.text == prompt + without.text
        assert choice.token_ids == without.token_ids
        check_offsets(choice)
        count = len(choice.prompt_token_ids)
        (scores,) = server.scores(choice.prompt_token_ids)
        assert choice.logprobs.text_offset[count] == len(prompt)
        assert choice.logprobs.token_logprobs[0] is None
        assert choice.logprobs.token_logprobs[1:count] == pytest.approx(scores, abs=1e-4)
        assert choice.logprobs.token_logprobs[count:] == pytest.approx(without.logprobs.token_logprobs, abs=1e-4)
    (without_logprobs, _) = server.complete(stream, prompt=PROMPT, echo=True, logprobs=None)
    assert without_logprobs.text == PROMPT + server.complete(stream)[0].text and without_logprobs.logprobs is None


def test_tokens_of_text_truncated_at_stop_string(server: CompletionsServer):
    complete, _ = server.complete(False)
    stop = next(character for character in complete.text[6:] if character.isascii() and character.isalnum())
    choice, _ = server.complete(False, stop=stop)
    assert (choice.text, choice.finish_reason) == (complete.text[: complete.text.index(stop)], "stop")
    assert len(choice.logprobs.tokens) == len(choice.token_ids) < LENGTH
    check_offsets(choice)


def test_stop_token_is_decoded_within_text(server: CompletionsServer):
    texts = get_vocabulary_texts(server.tokenizer)
    sampling = SamplingParams(max_tokens=8, stop_token_ids=tuple(range(len(texts))))
    requests = [SampleRequest(str(seed), to_token_array((5,)), sampling, seed) for seed in range(16)]
    completions: list[Completion] = server.loop.run(server.engine.generate(requests))
    assert [completion.stop_text for completion in completions] == [
        texts[completion.token_ids[0]] for completion in completions
    ]


def test_model_is_found_by_name(server: CompletionsServer):
    model = server.client.models.retrieve(NAME)
    assert (model.id, model.object) == (NAME, "model")
    with pytest.raises(openai.NotFoundError, match="model='org/other' is not served here"):
        server.client.models.retrieve("org/other")
