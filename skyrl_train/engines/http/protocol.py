"""The token-level HTTP protocol between an HttpEndpoint and a RemoteEngine: calls, limits and errors.

A call is `POST /<path>` with its arguments as one JSON object, and the response is `{"result": ...}`. Calls without
arguments that change nothing are `GET`. An error has OpenAI's form `{"error": {"message", "type", "param", "code"}}`,
where `code` is the name of the exception that the RemoteEngine raises.
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
"""Seconds that a caller waits in addition to the deadline of the work itself."""
REMOTE_WEIGHT_ROUTES = WEIGHT_ROUTES - {"in_process"}
NullableFloats = Annotated[
    NDArray[np.float64], JsonList(core_schema.nullable_schema(core_schema.float_schema()), np.float64)
]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one call. The server rejects larger calls before they reach an engine. A RemoteEngine splits its
    calls."""

    body_bytes: int = 8 << 20
    requests: int = 4096
    """Maximum number of requests of /generate, sequences of /score, ids of /abort and /partial_tokens, and prompts
    times n of a completion."""
    samples: int = 128
    """Maximum `n` of a chat or text completion."""
    max_tokens: int = 1 << 17
    prompt_tokens: int = 1 << 18
    prompt_tokens_in_all: int = 1 << 22
    """Maximum number of prompt tokens times n of a completion, over all prompts: as many as fit into a body of ids."""
    stop_strings: int = 16
    stop_chars: int = 256
    stop_token_ids: int = 256
    name_chars: int = 1024
    """Maximum number of characters of ids, sessions, groups and adapter names."""


SAMPLING_ONLY_LIMITS = Limits(body_bytes=1 << 20)
"""Limits of an endpoint without control routes. In a run it shares the trainer's event loop, which parsing blocks."""


@dataclass(frozen=True, slots=True)
class ServerInfo(Body):
    """The result of /capabilities."""

    model: str
    capabilities: Capabilities
    limits: Limits


class MethodArguments(Body):
    """The base class of bodies of calls. Their fields are the parameters of the engine's method, in order."""

    __slots__ = ()

    def checked(self, limits: Limits) -> MethodArguments:
        """Return the arguments in the form that the engine's method accepts.

        Raises:
            InvalidBodyError: A value is invalid or exceeds the limits.
            WeightSyncError: A weight sync route does not work over HTTP.
        """
        return self

    def values(self) -> list[Any]:
        """Return the positional arguments of the engine's method."""
        return [getattr(self, field.name) for field in fields(self)]  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class NoArguments(MethodArguments):
    """An empty body."""


@dataclass(frozen=True, slots=True)
class Generate(MethodArguments):
    """The arguments of `InferenceEngine.generate`."""

    requests: Annotated[list[SampleRequest], FEW]

    def checked(self, limits: Limits) -> Generate:
        """Return the call with checked requests.

        Raises:
            InvalidBodyError: There are more requests than `limits` allows, a request_id occurs twice, or a request is
                invalid.
        """
        count = check_range(len(self.requests), limits.requests, "requests", "requests in one call", min_value=0)
        if len({request.request_id for request in self.requests}) != count:
            raise InvalidBodyError("requests", "hold a request_id twice.")
        return Generate([self._checked(r, f"requests[{i}]", limits) for i, r in enumerate(self.requests)])

    def _checked(self, request: SampleRequest, path: str, limits: Limits) -> SampleRequest:
        for name in ("request_id", "session", "group", "adapter"):
            check_range(
                len(getattr(request, name) or ""), limits.name_chars, f"{path}.{name}", "characters", min_value=0
            )
        check_ids(request.token_ids, f"{path}.token_ids", limits)
        check_range(request.seed, 2**64 - 1, f"{path}.seed", "as a 64-bit seed", min_value=0)
        if request.deadline_s is not None and request.deadline_s <= 0:
            raise InvalidBodyError(f"{path}.deadline_s", f"must be more than 0 seconds, got {request.deadline_s:g}.")
        return replace(request, sampling=parse_sampling(request.sampling, f"{path}.sampling", limits))


@dataclass(frozen=True, slots=True)
class Score(MethodArguments):
    """The arguments of `InferenceEngine.score`."""

    token_ids: Annotated[list[list[int]], FEW]
    temperature: Annotated[float, Field(gt=0)] = 1.0

    def checked(self, limits: Limits) -> Score:
        check_range(len(self.token_ids), limits.requests, "token_ids", "sequences in one call", min_value=0)
        for index, ids in enumerate(self.token_ids):
            check_ids(ids, f"token_ids[{index}]", limits)
        return self


@dataclass(frozen=True, slots=True)
class Abort(MethodArguments):
    """The arguments of `InferenceEngine.abort`."""

    request_ids: list[str]

    def checked(self, limits: Limits) -> Abort:
        check_range(len(self.request_ids), limits.requests, "request_ids", "ids in one call", min_value=0)
        return self


@dataclass(frozen=True, slots=True)
class PartialTokens(MethodArguments):
    """The arguments of `InferenceEngine.partial_tokens`."""

    request_ids: list[str]

    def checked(self, limits: Limits) -> PartialTokens:
        check_range(len(self.request_ids), limits.requests, "request_ids", "ids in one call", min_value=0)
        return self


@dataclass(frozen=True, slots=True)
class Pause(MethodArguments):
    """The arguments of `InferenceEngine.pause`."""

    mode: str = "keep"


@dataclass(frozen=True, slots=True)
class Sleep(MethodArguments):
    """The arguments of `InferenceEngine.sleep`."""

    level: Annotated[int, Field(ge=1, le=2)] = 1
    keep_weights: bool = False


@dataclass(frozen=True, slots=True)
class WakeUp(MethodArguments):
    """The arguments of `InferenceEngine.wake_up`."""

    tags: list[str] | None = None


@dataclass(frozen=True, slots=True)
class LoadAdapter(MethodArguments):
    """The arguments of `InferenceEngine.load_adapter`."""

    name: str
    path: str

    def checked(self, limits: Limits) -> LoadAdapter:
        check_range(len(self.name), limits.name_chars, "name", "characters")
        return self


@dataclass(frozen=True, slots=True)
class UnloadAdapter(MethodArguments):
    """The arguments of `InferenceEngine.unload_adapter`."""

    name: str


@dataclass(frozen=True, slots=True)
class ConnectWeights(MethodArguments):
    """The arguments of `InferenceEngine.connect_weights`."""

    route: str
    address: str
    rank: Annotated[int, Field(ge=1)]
    world_size: Annotated[int, Field(ge=2, le=1 << 20)]
    timeout_s: Annotated[float, Field(gt=0, le=86_400)]

    def checked(self, limits: Limits) -> ConnectWeights:
        """Return the call if its route, rank and address are valid.

        Raises:
            WeightSyncError: The route does not work over HTTP.
            InvalidBodyError: The rank is not below the world size, or the address of the `broadcast` route is not
                host:port.
        """
        check_route(self.route)
        check_range(self.rank, self.world_size - 1, "rank", "as a rank of an engine")
        if self.route == "broadcast" and not re.fullmatch(r"[^\s/@]+:[0-9]{1,5}", self.address):
            raise InvalidBodyError("address", "must be host:port.")
        return self


@dataclass(frozen=True, slots=True)
class BeginWeights(MethodArguments):
    """The arguments of `InferenceEngine.begin_weights`."""

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
    """The arguments of `InferenceEngine.receive_weights`."""

    bucket: Bucket

    def checked(self, limits: Limits) -> ReceiveWeights:
        """Return the call if its bucket can be received over HTTP.

        Raises:
            InvalidBodyError: A number is out of range, names and fingerprints differ in number, a handle refers to
                memory of an accelerator or to a path outside /proc, or the file is not an absolute path of a
                .safetensors file.
        """
        bucket = self.bucket
        check_range(bucket.index, 1 << 31, "bucket.index", "as an index", min_value=0)
        if len(bucket.names) != len(bucket.fingerprints):
            raise InvalidBodyError("bucket.fingerprints", "must have as many items as bucket.names.")
        for index, handle in enumerate(bucket.handles):
            # Mapping a file creates or grows it, so only a path of another process's memory is accepted.
            if handle.cuda is not None:
                raise InvalidBodyError(f"bucket.handles[{index}].cuda", "cannot be sent over HTTP; leave it out.")
            if handle.file is None or not re.fullmatch(r"/proc/[0-9]+/fd/[0-9]+", handle.file):
                raise InvalidBodyError(
                    f"bucket.handles[{index}].file", "must be the memory of a process: /proc/<pid>/fd/<number>."
                )
            check_range(handle.size, 1 << 40, f"bucket.handles[{index}].size", "bytes")
            check_range(handle.place, 1, f"bucket.handles[{index}].place", "as the index of a buffer", min_value=0)
        if bucket.file is not None and not re.fullmatch(r"/[^\0]*\.safetensors", bucket.file):
            raise InvalidBodyError("bucket.file", "must be the absolute path of a .safetensors file.")
        return self


@dataclass(frozen=True, slots=True)
class CommitWeights(MethodArguments):
    """The arguments of `InferenceEngine.commit_weights`."""

    version: int


@dataclass(frozen=True, slots=True)
class Result(Body, Generic[T]):
    """The response to a call."""

    result: T


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """An HTTP route that calls one method of an InferenceEngine."""

    method: str
    arguments: type[MethodArguments] = NoArguments
    result: Any = None
    """Type of the method's result; None if it returns nothing."""
    repeatable: bool = True
    """True if the call is idempotent, so that it may be sent again if the connection breaks."""
    verb: str = "POST"
    path: str = field(default="", kw_only=True)
    """Path of the route; the method's name if empty."""
    control: bool = field(default=True, kw_only=True)
    """True if the call affects other callers of the engine. Endpoints without control routes do not offer it."""

    @property
    def route(self) -> str:
        """The path of the URL, such as "/generate"."""
        return f"/{self.path or self.method}"

    @property
    def response_type(self) -> Any:
        """The type of the response: a Result of the method's result type."""
        generic: Any = Result
        return generic[self.result]


REMOTE_METHODS = {
    call.method: call
    for call in (
        RemoteMethod("generate", Generate, list[Completion], control=False),
        RemoteMethod("score", Score, list[NullableFloats], control=False),
        RemoteMethod("abort", Abort),
        RemoteMethod("partial_tokens", PartialTokens, dict[str, Tokens]),
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
"""The remote methods by name: those of InferenceEngine, and its attribute `capabilities` as a method."""


# -- checks ----------------------------------------------------------------------------------------------------------


def check_range(value: int, max_value: int, param: str, unit: str, min_value: int = 1) -> int:
    """Return `value` if it is between `min_value` and `max_value`, both included.

    Args:
        value: The value to check.
        max_value: Largest allowed value.
        param: Path of the member, for the error.
        unit: Text that follows the range in the message, such as "tokens".
        min_value: Smallest allowed value.

    Raises:
        InvalidBodyError: The value is out of range.
    """
    if not min_value <= value <= max_value:
        shown = value if abs(value) < 10**30 else "a number of more than 30 digits"
        raise InvalidBodyError(param, f"must be from {min_value} to {max_value} {unit}, got {shown}.")
    return value


def check_ids(ids: Sequence[int] | Tokens, param: str, limits: Limits) -> None:
    """Check the length of a sequence and that its token ids are 31-bit integers.

    Raises:
        InvalidBodyError: The sequence is empty, longer than `limits.prompt_tokens`, or holds other values. The error
            names
            `param`.
    """
    check_range(len(ids), limits.prompt_tokens, param, "tokens")
    array = np.asarray(ids)
    if array.min() < 0 or array.max() >= 2**31:
        raise InvalidBodyError(param, "must be token ids: integers from 0 to 2^31 - 1.")


def parse_sampling(sampling: SamplingParams | dict[str, Any], path: str, limits: Limits) -> SamplingParams:
    """Normalize sampling parameters (see engines/sampling_params.py) and check them against the limits.

    Args:
        sampling: Received parameters.
        path: Path of the parameters in the body; empty if they are members of the body itself.
        limits: Limits of the call.

    Raises:
        InvalidBodyError: A parameter is unknown, its value is not allowed, or it exceeds the limits.
    """
    key = path or "request"
    try:
        params = parse_sampling_params(sampling, key)
    except ConfigError as error:
        problem = str(error).partition("\n")[0]
        match = re.match(re.escape(key) + r"\.(\w+)", problem)
        raise InvalidBodyError(join_path(path, match[1]) if match else path, "", message=problem) from error
    check_range(params.max_tokens, limits.max_tokens, join_path(path, "max_tokens"), "tokens")
    check_range(params.min_tokens, limits.max_tokens, join_path(path, "min_tokens"), "tokens", min_value=0)
    check_range(params.top_k, 2**31 - 1, join_path(path, "top_k"), "tokens", min_value=0)
    check_range(len(params.stop), limits.stop_strings, join_path(path, "stop"), "strings", min_value=0)
    for text in params.stop:
        check_range(len(text), limits.stop_chars, join_path(path, "stop"), "characters")
    check_range(
        len(params.stop_token_ids), limits.stop_token_ids, join_path(path, "stop_token_ids"), "ids", min_value=0
    )
    if max(params.stop_token_ids, default=0) >= 2**31:
        raise InvalidBodyError(join_path(path, "stop_token_ids"), "must be token ids: integers from 0 to 2^31 - 1.")
    return params


def check_route(route: str) -> None:
    """Check that a weight sync route works over HTTP.

    Raises:
        WeightSyncError: It does not.
    """
    if route not in REMOTE_WEIGHT_ROUTES:
        raise WeightSyncError(
            f"the weight route {route!r} does not reach an engine behind HTTP; "
            f"use one of {', '.join(sorted(REMOTE_WEIGHT_ROUTES))}."
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
"""HTTP status of each class of error. The first class that an error is an instance of applies."""
_RAISED = {kind.__name__: kind for kind in (UnsupportedParameter, WeightSyncError, EngineError, WorkerDied)}


def encode_error(error: SkyRLError) -> tuple[int, dict[str, Any]]:
    """Return the HTTP status and the body for an engine's exception."""
    kind, status = next(((kind, s) for kind, s in _STATUS.items() if isinstance(error, kind)), (SkyRLError, 500))
    detail = [error.waited_for, error.seconds] if isinstance(error, DeadlineExceeded) else None
    return status, error_body(status, str(error), kind.__name__, detail=detail)


def decode_error(status: int, body: Any, engine: str) -> SkyRLError:
    """Return the exception for a response with an error status.

    Args:
        status: HTTP status.
        body: Parsed body; any value if it is not a body of `encode_error`.
        engine: Name of the engine, for messages.

    Returns:
        The exception that `encode_error` encoded. Otherwise UnsupportedParameter for statuses 400, 413 and 501, and
        EngineError for all others.
    """
    if status == 401:
        return EngineError(
            f"Engine {engine!r} does not accept this token (HTTP status 401): set {API_KEY_ENV} to the server's token."
        )
    error = body.get("error") if isinstance(body, dict) else None
    if not isinstance(error, dict) or not isinstance(error.get("message"), str):
        return EngineError(
            f"Engine {engine!r} responded with HTTP status {status} and no reason; see the server's log."
        )
    message, code = error["message"], error.get("code")
    match error.get("detail"):
        case [str(waited_for), float() | int() as seconds] if code == "DeadlineExceeded":
            return DeadlineExceeded(waited_for, seconds)
    if code in _RAISED:
        return _RAISED[code](message)
    if status in (400, 413, 501):
        return UnsupportedParameter(f"Engine {engine!r} rejected the call: {message}")
    return EngineError(f"Engine {engine!r} responded with HTTP status {status}: {message}")
