"""Clients of vLLM's and SGLang's own servers, for NativeEngine (native.py). This module imports neither library."""

from __future__ import annotations

import asyncio
import json
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from skyrl_train.data.token_arrays import Tokens, to_int_tuple, to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.lifecycle import MEMORY_TAGS, MemoryTag
from skyrl_train.errors import EngineError, UnsupportedParameter, WeightSyncError
from skyrl_train.listeners import API_KEY_ENV

_DEV_MODE_HINT = "start the server with VLLM_SERVER_DEV_MODE=1 in its environment; this route exists only then."
_NO_EXTENSION_ERRORS = ("no attribute 'reload_folder'", "'reload_folder' is not implemented")
"""Errors of a server without WorkerExtension: with VLLM_ENABLE_V1_MULTIPROCESSING on, and off."""
_CALIBRATION_TOKENS = (1, 2, 3)
"""Arbitrary tokens."""
_CALIBRATION_TEMPERATURE = 2.0
"""A temperature at which log-probs clearly differ from those at temperature 1. Servers accept no higher one."""
_NOT_SGLANG_HINT = "it is not an SGLang server; check generator.backend."


@dataclass(frozen=True, slots=True)
class ServerCompletion:
    """A server's response to a request. Lists are [L] for L sampled tokens."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probs in nats after temperature and without truncation; at temperature 1 if greedy."""
    stop_reason: str
    """A value of StopReason."""
    cached_tokens: int = 0
    """Prompt tokens that the server found in its prefix cache."""


class NativeServer(ABC):
    """The base class of clients of one kind of server: its routes and parameters.

    A call that fails raises EngineError, its subclass UnsupportedParameter for HTTP status 400, or DeadlineExceeded.
    """

    kind: str
    """Name and version of the server, such as "vLLM 0.32.0". `discover` sets this and the following attributes."""
    max_model_len: int
    """Maximum number of tokens of a prompt plus its completion."""
    SUPPORTED_SAMPLING: ClassVar = frozenset({"temperature", "stop", "stop_token_ids", "ignore_eos"})
    """SamplingParams fields that a server may support: those with which a token's log-probs before and after truncation
    are equal."""
    sampling: frozenset[str]
    """SamplingParams fields that this server supports."""
    seeds: bool
    """True if a request's seed determines its tokens."""
    refusals: Mapping[str, str]
    """Reasons why features are not supported, as in Capabilities."""

    def __init__(self, connection: Connection, deadline_s: float):
        """Create a client; every call may take `deadline_s` seconds."""
        self.connection = connection
        self.deadline_s = deadline_s

    @abstractmethod
    async def discover(self, deadline_s: float) -> None:
        """Wait until the server is ready, and set the attributes that describe what it supports.

        Raises:
            EngineError: The server is of another kind, or was started with wrong options.
            DeadlineExceeded: The server was not ready within `deadline_s`.
        """

    @abstractmethod
    async def sample(self, rid: str, request: SampleRequest) -> ServerCompletion:
        """Sample one request under the id `rid`, or without an id if `rid` is empty.

        With an id the call is sent once, and a broken connection raises aiohttp's error, so that the caller can repeat
        it under another id.
        """

    @abstractmethod
    async def abort(self, rids: Sequence[str]) -> None:
        """End these requests, which return the tokens sampled so far. Ignore unknown ids."""

    @abstractmethod
    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Return the log-probs (nats, temperature 1) of all tokens but the first."""

    @abstractmethod
    async def load_weights(self, folder: str) -> None:
        """Load the weights of a Hugging Face folder, which the server must be able to read.

        Raises:
            WeightSyncError: The server cannot load them.
        """

    @abstractmethod
    async def reset_prefix_cache(self) -> None:
        """Drop the prefix cache. Call this only while no request runs."""

    @abstractmethod
    async def sleep(self, level: int) -> frozenset[str]:
        """Free memory and return the tags of the freed memory; see lifecycle.MemoryTag."""

    @abstractmethod
    async def wake_up(self, tags: Sequence[str]) -> None:
        """Allocate the memory of these tags, which `sleep` freed."""

    @abstractmethod
    async def check_alive(self) -> None:
        """Raise EngineError if the server is not alive."""

    async def request_json(
        self,
        verb: str,
        route: str,
        payload: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        deadline_s: float | None = None,
        hints: Mapping[int, str] | None = None,
        once: bool = False,
    ) -> Any:
        """Call a route and return the parsed JSON of the response, or None if it is not JSON.

        Args:
            verb: HTTP method.
            route: Path of the URL.
            payload: Body to send as JSON; None for no body.
            params: Query parameters; None to send none.
            deadline_s: Limit of the call in seconds; the server's deadline by default.
            hints: Text for the error message by HTTP status; None to add no text.
            once: True to raise aiohttp's error if the connection breaks. By default the call is repeated then.

        Raises:
            EngineError: The response has an error status, or the connection broke in every attempt.
            UnsupportedParameter: The response has status 400.
            DeadlineExceeded: The call took too long.
        """
        body = b"" if payload is None else json.dumps(payload, default=operator.index).encode()

        async def attempt(_: int) -> tuple[int, bytes]:
            return await self.connection.request(verb, route, body, params)

        work = attempt(0) if once else self.connection.retry(route, attempt, repeatable=True)
        status, raw = await self.connection.with_timeout(route, deadline_s or self.deadline_s, work)
        if status != 200:
            raise self.error_from_response(status, route, raw, hints or {})
        try:
            return json.loads(raw) if raw else None
        except ValueError:
            return None

    def error_from_response(self, status: int, route: str, raw: bytes, hints: Mapping[int, str]) -> EngineError:
        """Return the exception for a response with an error status.

        Args:
            status: HTTP status.
            route: Path of the URL, for the message.
            raw: Body of the response, for the message.
            hints: Text that replaces the body in the message, by HTTP status.

        Returns:
            UnsupportedParameter for status 400, EngineError for others.
        """
        name, url = self.connection.name, self.connection.url
        if status == 401:
            hint = f"it does not accept this token: set {API_KEY_ENV} to the server's --api-key."
        else:
            hint = hints.get(status) or raw.decode(errors="replace")[:500]
        kind = UnsupportedParameter if status == 400 else EngineError
        return kind(f"Engine {name!r} at {url} responded to {route} with HTTP status {status}: {hint}")


class VLLMServer(NativeServer):
    """A client of vLLM's server: `VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server`.

    The server's routes for pausing, weights and aborts exist only in development mode, and need no token.
    """

    seeds = True
    _has_extension = True
    """False if the server's workers lack WorkerExtension (engines/vllm/worker.py), which the first load detects."""

    async def discover(self, deadline_s: float) -> None:
        self.kind = "vLLM"
        self.kind = await self.connection.wait_until_ready(self._version, deadline_s)
        (model, *_) = (await self.request_json("GET", "/v1/models"))["data"]
        self._served_name: str = model["id"]
        self.max_model_len = model["max_model_len"]
        if (await self.request_json("GET", "/is_paused", hints={404: _DEV_MODE_HINT}))["is_paused"]:
            await self.request_json("POST", "/wake_up")
        self.sampling, self.refusals = self.SUPPORTED_SAMPLING, {}
        if not await self._scales_logprobs():
            self.sampling -= {"temperature"}
            self.refusals = {
                "temperature": f"this server of {self.kind} returns log-probs at temperature 1 for all temperatures; "
                "start it with --logprobs-mode processed_logprobs."
            }

    async def _version(self) -> str | None:
        status, raw = await self.connection.request("GET", "/version")
        if status != 200 or b'"version"' not in raw:
            raise self.error_from_response(
                status, "/version", raw, {status: "it is not a vLLM server; check generator.backend."}
            )
        ready, _ = await self.connection.request("GET", "/health")
        return f"vLLM {(await self.request_json('GET', '/version'))['version']}" if ready == 200 else None

    async def _scales_logprobs(self) -> bool:
        """True if the server returns log-probs at the sampling temperature, and not at temperature 1."""
        params = SamplingParams(max_tokens=1, temperature=_CALIBRATION_TEMPERATURE)
        sampled = await self.sample("", SampleRequest("", to_token_array(_CALIBRATION_TOKENS), params, 0))
        (logprob_at_1,) = (await self.score((*_CALIBRATION_TOKENS, *sampled.token_ids)))[-1:]
        return abs(sampled.logprobs[0] - logprob_at_1) > 1e-3

    async def sample(self, rid: str, request: SampleRequest) -> ServerCompletion:
        """Sample a completion at the server, with vLLM's names of the sampling parameters.

        Raises:
            EngineError: The server rejects the request, cannot be reached, or ends it with an unknown finish_reason.
        """
        sampling = request.sampling
        choice, usage = await self._complete(
            rid,
            request.token_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            seed=request.seed % 2**63,
            logprobs=0,
        )
        if choice["finish_reason"] not in ("stop", "length", "abort"):
            raise EngineError(
                f"Engine {self.connection.name!r}: {self.kind} ended a request with the unknown finish_reason "
                f"{choice['finish_reason']!r}; see the server's log."
            )
        logprobs = (choice["logprobs"] or {}).get("token_logprobs", [])
        return ServerCompletion(
            token_ids=choice["token_ids"],
            logprobs=[-9999.0 if logprob is None else logprob for logprob in logprobs],
            stop_reason=choice["finish_reason"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        if len(token_ids) < 2:
            return []
        choice, _ = await self._complete("", token_ids, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        rows = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
        return [row[str(token)]["logprob"] for token, row in rows]

    async def _complete(self, rid: str, token_ids: Sequence[int] | Tokens, **options: Any) -> tuple[Any, Any]:
        """Return the only choice and the usage of a completion.

        Send every parameter for which a model's generation config may have a default.
        """
        body = {
            "model": self._served_name,
            "prompt": to_int_tuple(token_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            **({"request_id": rid} if rid else {}),
            **options,
        }
        response = await self.request_json("POST", "/v1/completions", body, once=bool(rid))
        return response["choices"][0], response["usage"]

    async def abort(self, rids: Sequence[str]) -> None:
        ids = [f"cmpl-{rid}-0" for rid in rids]
        await self.request_json("POST", "/abort_requests", {"request_ids": ids}, hints={404: _DEV_MODE_HINT})

    async def load_weights(self, folder: str) -> None:
        """Let the server load the checkpoint in `folder`, through this package's worker extension if it has one.

        Raises:
            WeightSyncError: The server did not load it, for example because it cannot read the folder.
        """
        try:
            if self._has_extension:
                try:
                    await self._call_workers("reload_folder", args=[folder])
                    return
                except EngineError as error:
                    if not any(text in str(error) for text in _NO_EXTENSION_ERRORS):
                        raise
                    self._has_extension = False
            await self._call_workers("reload_weights", kwargs={"weights_path": folder})
        except EngineError as error:
            raise WeightSyncError(f"{error} (the weights are in {folder}: can the server read that?)") from error

    async def _call_workers(self, method: str, **options: Any) -> None:
        await self.request_json("POST", "/collective_rpc", {"method": method, **options}, hints={404: _DEV_MODE_HINT})

    async def reset_prefix_cache(self) -> None:
        """Drop the server's prefix cache, with up to 50 attempts until blocks of aborted requests are free.

        Raises:
            EngineError: The server still refuses, because requests of other clients are running, or it is not in
                developer mode.
        """
        for _ in range(50):  # blocks of aborted requests are freed one step later
            if (await self.request_json("POST", "/reset_prefix_cache", hints={404: _DEV_MODE_HINT}))["success"]:
                return
        raise EngineError(
            f"Engine {self.connection.name!r}: {self.kind} did not reset its prefix cache. Other clients of this "
            "server may have running requests. Stop them, and give the run a server of its own."
        )

    async def sleep(self, level: int) -> frozenset[str]:
        await self.request_json("POST", "/sleep", params={"level": str(level)}, hints={404: _DEV_MODE_HINT})
        return MEMORY_TAGS  # at level 1 the weights move to the host

    async def wake_up(self, tags: Sequence[str]) -> None:
        await self.request_json(
            "POST", "/wake_up?" + "&".join(f"tags={tag}" for tag in tags), hints={404: _DEV_MODE_HINT}
        )

    async def check_alive(self) -> None:
        await self.request_json("GET", "/health", deadline_s=30.0)


class SGLangServer(NativeServer):
    """A client of SGLang's server: `python -m sglang.launch_server`.

    The server returns log-probs after temperature and without truncation. It does not support seeds.
    """

    seeds = False

    async def discover(self, deadline_s: float) -> None:
        self.kind = "SGLang"
        info = await self.connection.wait_until_ready(self._info, deadline_s)
        self.kind = f"SGLang {info['version']}"
        self.max_model_len = info["max_req_input_len"]
        self._frees_memory = bool(info.get("enable_memory_saver"))
        self.sampling = self.SUPPORTED_SAMPLING
        self.refusals = {"seed": f"{self.kind} samples all requests of a batch with one stream of random numbers."}

    async def _info(self) -> Any:
        status, raw = await self.connection.request("GET", "/server_info")
        if status == 503:  # starting
            return None
        if status != 200:
            raise self.error_from_response(status, "/server_info", raw, {status: _NOT_SGLANG_HINT})
        info = await self.request_json("GET", "/server_info")
        if not isinstance(info, dict) or not {"version", "max_req_input_len"} <= info.keys():
            raise EngineError(f"Engine {self.connection.name!r} at {self.connection.url}: {_NOT_SGLANG_HINT}")
        ready, _ = await self.connection.request("GET", "/ready")
        return info if ready == 200 else None

    async def sample(self, rid: str, request: SampleRequest) -> ServerCompletion:
        sampling = request.sampling
        response = await self._generate(
            rid,
            request.token_ids,
            {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
            },
            logprob_start_len=-1,
        )
        meta = response["meta_info"]
        logprobs = [logprob for logprob, *_ in meta.get("output_token_logprobs") or ()]
        return ServerCompletion(
            token_ids=list(response["output_ids"]),
            logprobs=[-9999.0 if logprob is None else logprob for logprob in logprobs],
            stop_reason=meta["finish_reason"]["type"],
            cached_tokens=meta.get("cached_tokens") or 0,
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        response = await self._generate("", token_ids, {"max_new_tokens": 0, "temperature": 0.0}, logprob_start_len=0)
        logprobs = [logprob for logprob, *_ in response["meta_info"]["input_token_logprobs"][1:]]
        return [math.nan if logprob is None else logprob for logprob in logprobs]

    async def _generate(self, rid: str, token_ids: Sequence[int] | Tokens, sampling: Any, **options: Any) -> Any:
        """Send every parameter for which a model's generation config may have a default."""
        off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False}
        body = {
            "input_ids": to_int_tuple(token_ids),
            "sampling_params": off | sampling,
            "return_logprob": True,
            **options,
        }
        if rid:
            body["rid"] = rid
        return await self.request_json("POST", "/generate", body, once=bool(rid))

    async def abort(self, rids: Sequence[str]) -> None:
        await asyncio.gather(*(self.request_json("POST", "/abort_request", {"rid": rid}) for rid in rids if rid))

    async def load_weights(self, folder: str) -> None:
        """Let the server load the checkpoint in `folder` and drop its prefix cache.

        Raises:
            WeightSyncError: The server did not load it, for example because it cannot read the folder.
        """
        try:
            await self.request_json("POST", "/update_weights_from_disk", {"model_path": folder, "flush_cache": True})
        except EngineError as error:
            raise WeightSyncError(f"{error} (the weights are in {folder}: can the server read that?)") from error

    async def reset_prefix_cache(self) -> None:
        await self.request_json("POST", "/flush_cache", params={"timeout": "10"})

    async def sleep(self, level: int) -> frozenset[str]:
        tags = MEMORY_TAGS if level >= 2 else MEMORY_TAGS - {MemoryTag.WEIGHTS}
        if self._frees_memory:
            await self.request_json("POST", "/release_memory_occupation", {"tags": sorted(tags)})
        return tags

    async def wake_up(self, tags: Sequence[str]) -> None:
        if self._frees_memory:
            await self.request_json("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def check_alive(self) -> None:
        await self.request_json("GET", "/ready", deadline_s=30.0)
