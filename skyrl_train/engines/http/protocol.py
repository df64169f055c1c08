"""The token-level wire between an HttpEndpoint and a RemoteEngine: calls, limits and errors. Both ends read this file.

A call is `POST /<path>` with its arguments as one JSON object, answered by `{"result": ...}`; calls without arguments
that change nothing are `GET`. An error is OpenAI's `{"error": {"message", "type", "param", "code"}}`, where `code` is
the name of the exception to raise at the other end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
from pydantic_core import core_schema

from skyrl_train.data.token_arrays import JsonList, Tokens
from skyrl_train.engines.base import Capabilities, Completion, EngineHealth, SampleRequest, SamplingParams
from skyrl_train.engines.http.json_body import FEW, Body, InvalidBodyError, join_path
from skyrl_train.engines.sampling_params import parse_sampling_params
from skyrl_train.errors import (
    ConfigError,
    DeadlineExceeded,
    EngineError,
    SkyRLError,
    UnsupportedParameter,
    WeightSyncError,
    WorkerDied,
)
from skyrl_train.http_server import error_body
from skyrl_train.listeners import API_KEY_ENV
from skyrl_train.weight_sync.protocol import WEIGHT_ROUTES, Bucket, Manifest

DEADLINE_MARGIN_S = 30.0
"""Seconds that a caller waits beyond the deadline of the work itself."""
REMOTE_WEIGHT_ROUTES = WEIGHT_ROUTES - {"in_process"}
NullableFloats = Annotated[
    NDArray[np.float64], JsonList(core_schema.nullable_schema(core_schema.float_schema()), np.float64)
]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one call. Larger calls are refused before they reach an engine; a RemoteEngine splits its calls."""

    body_bytes: int = 8 << 20
    requests: int = 4096
    """Requests of a /generate, sequences of a /score, ids of an /abort, prompts times n of a completion."""
    samples: int = 128
    """n of a chat or completion."""
    max_tokens: int = 1 << 17
    prompt_tokens: int = 1 << 18
    prompt_tokens_in_all: int = 1 << 22
    """Prompt tokens times n of a completion, over all prompts: as many as a body of token ids can contain."""
    stop_strings: int = 16
    stop_chars: int = 256
    stop_token_ids: int = 256
    name_chars: int = 1024
    """Characters of ids, sessions, groups and adapters."""


SAMPLING_ONLY_LIMITS = Limits(body_bytes=1 << 20)
"""The limits of an endpoint without control: in a run it shares the trainer's event loop, which parsing JSON blocks."""


@dataclass(frozen=True, slots=True)
class ServerInfo(Body):
    """The result of /capabilities."""

    model: str
    capabilities: Capabilities
    limits: Limits


class MethodArguments(Body):
    """The body of a call. Its fields are the parameters of the engine's method, in order."""

    __slots__ = ()

    def checked(self, limits: Limits) -> MethodArguments:
        """Return the arguments in the form that the engine takes. Raises Malformed for values out of bounds."""
        return self

    def values(self) -> list[Any]:
        """Return the arguments to call the engine's method with."""
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class NoArguments(MethodArguments):
    pass


@dataclass(frozen=True, slots=True)
class Generate(MethodArguments):
    requests: Annotated[list[SampleRequest], FEW]

    def checked(self, limits: Limits) -> Generate:
        count = check_range(len(self.requests), limits.requests, "requests", "requests in one call", min_value=0)
        if len({request.request_id for request in self.requests}) != count:
            raise InvalidBodyError("requests", "hold a request_id twice.")
        return Generate([self._checked(r, f"requests[{i}]", limits) for i, r in enumerate(self.requests)])

    def _checked(self, request: SampleRequest, where: str, limits: Limits) -> SampleRequest:
        for name in ("request_id", "session", "group", "adapter"):
            check_range(
                len(getattr(request, name) or ""), limits.name_chars, f"{where}.{name}", "characters", min_value=0
            )
        check_ids(request.token_ids, f"{where}.token_ids", limits)
        check_range(request.seed, 2**64 - 1, f"{where}.seed", "as a seed of 64 bits", min_value=0)
        if request.deadline_s is not None and request.deadline_s <= 0:
            raise InvalidBodyError(f"{where}.deadline_s", f"must be more than 0 seconds, got {request.deadline_s:g}.")
        return replace(request, sampling=parse_sampling(request.sampling, f"{where}.sampling", limits))


@dataclass(frozen=True, slots=True)
class Score(MethodArguments):
    token_ids: Annotated[list[list[int]], FEW]
    temperature: Annotated[float, Field(gt=0)] = 1.0

    def checked(self, limits: Limits) -> Score:
        check_range(len(self.token_ids), limits.requests, "token_ids", "sequences in one call", min_value=0)
        for index, ids in enumerate(self.token_ids):
            check_ids(ids, f"token_ids[{index}]", limits)
        return self


@dataclass(frozen=True, slots=True)
class Abort(MethodArguments):
    request_ids: list[str]

    def checked(self, limits: Limits) -> Abort:
        check_range(len(self.request_ids), limits.requests, "request_ids", "ids in one call", min_value=0)
        return self


@dataclass(frozen=True, slots=True)
class Pause(MethodArguments):
    mode: str = "keep"


@dataclass(frozen=True, slots=True)
class Sleep(MethodArguments):
    level: Annotated[int, Field(ge=1, le=2)] = 1


@dataclass(frozen=True, slots=True)
class WakeUp(MethodArguments):
    tags: list[str] | None = None


@dataclass(frozen=True, slots=True)
class LoadAdapter(MethodArguments):
    name: str
    path: str

    def checked(self, limits: Limits) -> LoadAdapter:
        check_range(len(self.name), limits.name_chars, "name", "characters")
        return self


@dataclass(frozen=True, slots=True)
class UnloadAdapter(MethodArguments):
    name: str


@dataclass(frozen=True, slots=True)
class ConnectWeights(MethodArguments):
    route: str
    address: str
    rank: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2, le=1 << 20)]
    timeout_s: Annotated[float, Field(gt=0, le=86_400)]

    def checked(self, limits: Limits) -> ConnectWeights:
        check_route(self.route)
        check_range(self.rank, self.world_size - 1, "rank", "as a rank of an engine")
        if self.route == "broadcast" and not re.fullmatch(r"[^\s/@]+:[0-9]{1,5}", self.address):
            raise InvalidBodyError("address", "must be host:port.")
        return self


@dataclass(frozen=True, slots=True)
class BeginWeights(MethodArguments):
    manifest: Manifest

    def checked(self, limits: Limits) -> BeginWeights:
        manifest = self.manifest
        check_range(manifest.version, 2**63 - 1, "manifest.version", "as a version", min_value=0)
        check_range(manifest.bucket_bytes, 1 << 40, "manifest.bucket_bytes", "bytes in a bucket")
        if manifest.adapter is not None:
            check_range(manifest.adapter.rank, 1 << 16, "manifest.adapter.rank", "as a rank")
        return self


@dataclass(frozen=True, slots=True)
class ReceiveWeights(MethodArguments):
    bucket: Bucket

    def checked(self, limits: Limits) -> ReceiveWeights:
        bucket = self.bucket
        check_range(bucket.index, 1 << 31, "bucket.index", "as an index", min_value=0)
        if len(bucket.names) != len(bucket.fingerprints):
            raise InvalidBodyError("bucket.fingerprints", "must be as many as bucket.names.")
        for index, handle in enumerate(bucket.handles):
            # Mapping a file creates or grows it, so only a path of another process's memory is accepted.
            if handle.cuda is not None:
                raise InvalidBodyError(f"bucket.handles[{index}].cuda", "does not travel over HTTP.")
            if handle.file is None or not re.fullmatch(r"/proc/[0-9]+/fd/[0-9]+", handle.file):
                raise InvalidBodyError(
                    f"bucket.handles[{index}].file", "must be /proc/<pid>/fd/<number>: a process's memory."
                )
            check_range(handle.size, 1 << 40, f"bucket.handles[{index}].size", "bytes")
            check_range(handle.place, 1, f"bucket.handles[{index}].place", "as the place of a page", min_value=0)
        if bucket.file is not None and not re.fullmatch(r"/[^\0]*\.safetensors", bucket.file):
            raise InvalidBodyError("bucket.file", "must be the absolute path of a .safetensors file.")
        return self


@dataclass(frozen=True, slots=True)
class CommitWeights(MethodArguments):
    version: int


@dataclass(frozen=True, slots=True)
class Result(Body, Generic[T]):
    """The answer of a call."""

    result: T


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """A route that calls one method of an InferenceEngine."""

    method: str
    arguments: type[MethodArguments] = NoArguments
    result: Any = None
    """Its type; None if there is none."""
    repeatable: bool = True
    """Whether it is idempotent, so that it may be sent again if the connection breaks."""
    verb: str = "POST"
    path: str = field(default="", kw_only=True)
    control: bool = field(default=True, kw_only=True)
    """Whether it affects other callers of the engine."""

    @property
    def route(self) -> str:
        return f"/{self.path or self.method}"

    @property
    def answer(self) -> Any:
        """The type of its answers."""
        generic: Any = Result
        return generic[self.result]


REMOTE_METHODS = {
    call.method: call
    for call in (
        RemoteMethod("generate", Generate, list[Completion], control=False),
        RemoteMethod("score", Score, list[NullableFloats], control=False),
        RemoteMethod("abort", Abort),
        RemoteMethod("pause", Pause),
        RemoteMethod("resume"),
        RemoteMethod("sleep", Sleep, int),
        RemoteMethod("wake_up", WakeUp),
        RemoteMethod("reset_prefix_cache"),
        RemoteMethod("load_adapter", LoadAdapter),
        RemoteMethod("unload_adapter", UnloadAdapter, repeatable=False),
        RemoteMethod("connect_weights", ConnectWeights, repeatable=False),
        RemoteMethod("begin_weights", BeginWeights, repeatable=False),
        RemoteMethod("receive_weights", ReceiveWeights, repeatable=False),
        RemoteMethod("commit_weights", CommitWeights, repeatable=False),
        RemoteMethod("health", result=EngineHealth, verb="GET", path="engine_health", control=False),
        RemoteMethod("capabilities", result=ServerInfo, verb="GET", control=False),
    )
}
"""The methods of an InferenceEngine by name; `capabilities`, an attribute there, is one of them."""


# -- checks ----------------------------------------------------------------------------------------------------------


def check_range(value: int, max_value: int, param: str, what: str, min_value: int = 1) -> int:
    """`value` itself if it is in `least`..`most`. Raises Malformed naming `param`."""
    if not min_value <= value <= max_value:
        shown = value if abs(value) < 10**30 else "far more"
        raise InvalidBodyError(param, f"must be from {min_value} to {max_value} {what}, got {shown}.")
    return value


def check_ids(ids: Sequence[int] | Tokens, param: str, limits: Limits) -> None:
    check_range(len(ids), limits.prompt_tokens, param, "tokens")
    array = np.asarray(ids)
    if array.min() < 0 or array.max() >= 2**31:
        raise InvalidBodyError(param, "must be token ids: whole numbers from 0, below 2^31.")


def parse_sampling(given: SamplingParams | dict[str, Any], where: str, limits: Limits) -> SamplingParams:
    """Normalise sampling parameters (see engines/sampling_params.py). Raises Malformed naming the parameter."""
    key = where or "request"
    try:
        sampling = parse_sampling_params(given, key)
    except ConfigError as error:
        problem = str(error).partition("\n")[0]
        found = re.match(re.escape(key) + r"\.(\w+)", problem)
        raise InvalidBodyError(join_path(where, found[1]) if found else where, "", message=problem) from error
    check_range(sampling.max_tokens, limits.max_tokens, join_path(where, "max_tokens"), "tokens")
    check_range(sampling.min_tokens, limits.max_tokens, join_path(where, "min_tokens"), "tokens", min_value=0)
    check_range(sampling.top_k, 2**31 - 1, join_path(where, "top_k"), "tokens", min_value=0)
    check_range(len(sampling.stop), limits.stop_strings, join_path(where, "stop"), "strings", min_value=0)
    for text in sampling.stop:
        check_range(len(text), limits.stop_chars, join_path(where, "stop"), "characters")
    check_range(
        len(sampling.stop_token_ids), limits.stop_token_ids, join_path(where, "stop_token_ids"), "ids", min_value=0
    )
    if max(sampling.stop_token_ids, default=0) >= 2**31:
        raise InvalidBodyError(join_path(where, "stop_token_ids"), "must be token ids, below 2^31.")
    return sampling


def check_route(route: str) -> None:
    """Raises WeightSyncError for a route that does not work over HTTP."""
    if route not in REMOTE_WEIGHT_ROUTES:
        raise WeightSyncError(
            f"the weight route {route!r} does not lead to an engine behind HTTP; "
            f"use {', '.join(sorted(REMOTE_WEIGHT_ROUTES))}."
        )


# -- errors ----------------------------------------------------------------------------------------------------------

_STATUS: dict[type[SkyRLError], int] = {
    UnsupportedParameter: 400,
    ConfigError: 400,
    WeightSyncError: 409,
    EngineError: 503,
    WorkerDied: 503,
    DeadlineExceeded: 504,
}
"""Of these classes, the first one that an error is an instance of applies."""
_RAISED = {kind.__name__: kind for kind in (UnsupportedParameter, WeightSyncError, EngineError, WorkerDied)}


def encode_error(error: SkyRLError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body for an engine's exception."""
    kind, status = next(((kind, s) for kind, s in _STATUS.items() if isinstance(error, kind)), (SkyRLError, 500))
    detail = [error.waited_for, error.seconds] if isinstance(error, DeadlineExceeded) else None
    return status, error_body(status, str(error), kind.__name__, detail=detail)


def decode_error(status: int, answer: Any, engine: str) -> SkyRLError:
    """The exception that was encoded by `failure`; EngineError naming `engine` for any other body."""
    if status == 401:
        return EngineError(
            f"Engine {engine!r} does not accept this token (HTTP status 401): set {API_KEY_ENV} to the server's."
        )
    error = answer.get("error") if isinstance(answer, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return EngineError(f"Engine {engine!r} answered with HTTP status {status} and no reason.")
    message, code = error["message"], error.get("code")
    match error.get("detail"):
        case [str(waited_for), float() | int() as seconds] if code == "DeadlineExceeded":
            return DeadlineExceeded(waited_for, seconds)
    if code in _RAISED:
        return _RAISED[code](message)
    if status in (400, 413, 501):
        return UnsupportedParameter(f"Engine {engine!r} refused the call: {message}")
    return EngineError(f"Engine {engine!r} answered with HTTP status {status}: {message}")
