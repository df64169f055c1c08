"""The client of vLLM's own server, with a server that returns prepared responses."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.http.native_servers import VLLMServer
from skyrl_train.errors import EngineError


class ScriptedVLLMServer(VLLMServer):
    """A client that gets prepared responses.

    Attributes:
        scales_logprobs: True if the server returns log-probs at the sampling temperature.
        worker_methods: Methods of the server's workers that the client has called, in order.
    """

    def __init__(self, *, scales_logprobs: bool = True) -> None:
        super().__init__(Connection("http://127.0.0.1:1", "token", name="scripted"), 10.0)
        self.scales_logprobs = scales_logprobs
        self.worker_methods: list[str] = []

    async def _version(self) -> str | None:
        return "vLLM 1.2.3"

    async def request_json(self, verb: str, route: str, payload: Any = None, **options: Any) -> Any:
        if route == "/v1/models":
            return {"data": [{"id": "tiny", "max_model_len": 64}]}
        if route == "/is_paused":
            return {"is_paused": False}
        if route == "/collective_rpc":
            self.worker_methods.append(payload["method"])
            if payload["method"] == "reload_folder":
                raise EngineError("'Worker' object has no attribute 'reload_folder'")
            return None
        logprob = -2.0 / payload["temperature"] if self.scales_logprobs and payload["temperature"] else -2.0
        choice = {
            "token_ids": [9],
            "finish_reason": "length",
            "logprobs": {"token_logprobs": [logprob]},
            "prompt_logprobs": [None, *({str(token): {"logprob": -2.0}} for token in payload["prompt"][1:])],
        }
        return {"choices": [choice], "usage": {}}


@pytest.mark.parametrize("scales_logprobs", [True, False])
def test_temperature_requires_processed_logprobs(scales_logprobs: bool):
    server = ScriptedVLLMServer(scales_logprobs=scales_logprobs)
    asyncio.run(server.discover(10.0))
    assert (server.kind, server.max_model_len) == ("vLLM 1.2.3", 64)
    assert ("temperature" in server.sampling) == scales_logprobs
    advice = server.refusals.get("temperature", "")
    assert ("start it with --logprobs-mode processed_logprobs" in advice) != scales_logprobs


def test_server_without_extension_reloads_with_vllm_itself():
    server = ScriptedVLLMServer()

    async def load_twice() -> None:
        await server.load_weights("/weights/1")
        await server.load_weights("/weights/2")

    asyncio.run(load_twice())
    assert server.worker_methods == ["reload_folder", "reload_weights", "reload_weights"]
