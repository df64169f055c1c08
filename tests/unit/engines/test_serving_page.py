"""The commands and snippets of serving.md, http_api.md and chat_apis.md work with an endpoint on a free port."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.doc_pages import fenced_blocks, snippets
from tests.support.http_endpoint import TOKEN, TOKENIZER, answers_with

PAGES = ("docs/guides/serving.md", "docs/reference/http_api.md", "docs/reference/chat_apis.md")
OPENAI, ENDPOINT, REMOTE = (snippet for page in PAGES for snippet in snippets(page))
CURL = [text for page, text in fenced_blocks("bash") if page in PAGES and text.startswith("curl")]


def run_with_endpoint(work: Callable[[int], Any]) -> Any:
    """Run `work(port)` in a thread while an endpoint serves the page's model, and return its result."""

    async def run() -> Any:
        engine = ScriptedEngine(answers_with("42"))
        async with HttpEndpoint(engine, TOKENIZER, model_name="policy", token=TOKEN) as endpoint:
            return await asyncio.to_thread(work, int(endpoint.url.rpartition(":")[2]))

    return asyncio.run(run())


@pytest.fixture(autouse=True)
def api_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKYRL_API_KEY", TOKEN)


@pytest.mark.parametrize("command", CURL)
def test_curl_gets_response(command: str):
    def call(port: int) -> Any:
        quiet = command.replace("curl ", "curl --silent --fail-with-body ").replace(":8000/", f":{port}/")
        done = subprocess.run(["bash", "-c", quiet], capture_output=True, text=True, timeout=60, env=dict(os.environ))
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    response = run_with_endpoint(call)
    if "chat" in command:
        assert response["choices"][0]["message"]["content"] == "42"
    elif "completions" in command:
        (choice,) = response["choices"]
        assert choice["text"] == "".join(choice["logprobs"]["tokens"]) == "6 times 7 is42"
    else:
        assert [completion["request_id"] for completion in response["result"]] == ["a"]


def test_openai_client_gets_response():
    def complete_chat(port: int) -> Any:
        names: dict[str, Any] = {}
        exec(OPENAI.replace(":8000/", f":{port}/"), names)
        names["client"].close()
        return names["answer"]

    response = run_with_endpoint(complete_chat)
    assert [choice.message.content for choice in response.choices] == ["42"] * 4
    assert all(choice.logprobs.content for choice in response.choices)


def test_endpoint_in_program_prints_its_url(capsys: pytest.CaptureFixture[str]):
    names: dict[str, Any] = {}
    exec(ENDPOINT, names)
    asyncio.run(names["serve"](ScriptedEngine(), TOKENIZER))
    assert capsys.readouterr().out.startswith("http://127.0.0.1:")


def test_remote_engine_is_an_engine():
    def use(port: int) -> Any:
        names: dict[str, Any] = {}
        code = REMOTE.replace("10.0.0.7:8001", f"127.0.0.1:{port}")
        exec(code.replace("await engine.close()", "await engine.close()\n    return completions"), names)
        request = SampleRequest("a", to_token_array((5, 6)), SamplingParams(max_tokens=4), seed=1)
        return asyncio.run(names["use"](TOKEN, [request]))

    (completion,) = run_with_endpoint(use)
    assert np.asarray(completion.token_ids).size > 0
