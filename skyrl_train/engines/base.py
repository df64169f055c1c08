"""The protocol that every inference engine implements: token ids in, token ids out."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Annotated, Any, Protocol

import numpy as np
from numpy.typing import ArrayLike
from pydantic import AfterValidator

from skyrl_train.data.token_arrays import (
    LogProbs,
    LogProbTable,
    Tokens,
    TokenTable,
    fields_equal,
    to_logprob_array,
    to_token_array,
)
from skyrl_train.errors import UnsupportedParameter
from skyrl_train.weight_sync.protocol import Bucket, Manifest


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Normalized sampling parameters, which mean the same for every engine (see engines/sampling_params.py).

    Temperature 0 is greedy decoding. The values top_p=1, top_k=0, min_p=0 and repetition_penalty=1 turn a parameter
    off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end a response. The tokens that complete a stop string stay in token_ids."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a response, in addition to the model's own end-of-sequence tokens."""
    ignore_eos: bool = False


SAMPLING_PARAM_NAMES = frozenset(field.name for field in fields(SamplingParams))
"""Names of all sampling parameters that an engine may support."""


class PauseMode(StrEnum):
    """The ways in which `InferenceEngine.pause` treats running requests."""

    KEEP = "keep"
    """Running requests keep their state and continue after `resume`."""
    ABORT = "abort"
    """Running requests end and return the tokens sampled so far."""
    WAIT = "wait"
    """Running requests finish before the pause begins."""
    RETRACT = "retract"
    """Running requests return to the queue. After `resume` the engine prefills their tokens again."""


MAX_TOP_LOGPROBS = 20
"""Largest `SampleRequest.top_logprobs` of any engine, as in OpenAI's API."""
PAUSE_MODES = frozenset(mode.value for mode in PauseMode)
"""All modes of `InferenceEngine.pause`."""


class StopReason(StrEnum):
    """The reasons for which a completion ends."""

    STOP = "stop"
    """An end-of-sequence token, a stop token or a stop string."""
    LENGTH = "length"
    """The completion reached max_tokens or the model's context length."""
    ABORT = "abort"
    """The caller, the request's deadline or a pause ended the request early."""


def parse_json_schema(schema: str | Mapping[str, Any]) -> str:
    """Return a JSON Schema as JSON text. The empty schema becomes that of any JSON object.

    Args:
        schema: JSON text or a mapping.

    Raises:
        ValueError: `schema` is not the JSON text of an object, nor a mapping that can be written as JSON. The message
            is the rest of a sentence.
    """
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        parsed = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"must be a JSON object, and is not JSON: {error}.") from error
    if not isinstance(parsed, dict):
        raise ValueError(f"must be a JSON object, got {text[:60]}.")
    return text if parsed else '{"type": "object"}'


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request to sample one continuation of a prompt.

    `token_ids` is [L] and accepts everything that numpy converts to an array. An int32 array is not copied, so do not
    write into it while the request is running.

    In one engine the result depends only on `token_ids`, `sampling` and `seed`. It does not depend on the order of
    requests, nor on the rest of the batch, except for the rounding of matrix products with different shapes.

    Raises:
        UnsupportedParameter: `token_ids` is not a flat list of integers of 32 bits.
    """

    request_id: str
    token_ids: Tokens
    sampling: SamplingParams
    seed: int
    """64-bit seed; see `engines.sampling_params.request_seed`."""
    session: str = ""
    """Requests of the same session go to the same engine, whose prefix cache holds their history."""
    group: str = ""
    """Requests of the same group share a prompt and go to the same engine, which prefills the prompt once."""
    deadline_s: float | None = None
    """Seconds of running after which the engine aborts the request; None for no deadline. Time in the engine's queue
    does not count (see lifecycle.RequestDeadlines), except inside a native server that does not report its queue."""
    adapter: str | None = None
    """Name of an adapter loaded with `load_adapter`. None selects the synced weights and the adapter synced with
    them."""
    top_logprobs: int = 0
    """Number of most likely tokens to return for each position in `Completion.top_logprobs`; 0 for none."""
    json_schema: Annotated[str, AfterValidator(parse_json_schema)] | None = None
    """JSON Schema, as JSON text or a mapping, that the response follows; "{}" for any JSON object, None for any text.
    Tokens that the schema does not allow are dropped before top_k, so `logprobs` are of what remains and
    `full_logprobs` of all tokens. The response is incomplete JSON if its stop_reason is not "stop"."""
    known_routing: int = 0
    """Number of tokens at the start of the prompt that `Completion.routing` leaves out, because the caller has their
    experts from earlier turns."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", parse_token_ids(f"request {self.request_id!r}", self.token_ids))
        if self.json_schema is not None:
            try:
                object.__setattr__(self, "json_schema", parse_json_schema(self.json_schema))
            except ValueError as error:
                raise UnsupportedParameter(f"request {self.request_id!r}: json_schema {error}") from error

    __eq__ = fields_equal


def parse_token_ids(label: str, token_ids: ArrayLike) -> Tokens:
    """Return `token_ids` as an int32 array [L]; an int32 array is not copied.

    Args:
        label: Text that names the request in the error message.
        token_ids: A flat list or array of integers. Their upper bound is checked against 32 bits, not a vocabulary.

    Raises:
        UnsupportedParameter: `token_ids` is not one-dimensional, or holds values that are not 32-bit integers.
    """
    try:
        ids = np.asarray(token_ids)
    except (TypeError, ValueError):
        ids = np.asarray(None)
    is_flat_and_integer = ids.ndim == 1 and (not len(ids) or ids.dtype.kind in "iu")
    if not is_flat_and_integer or (len(ids) and ids.dtype != np.int32 and (ids.min() < -(2**31) or ids.max() >= 2**31)):
        raise UnsupportedParameter(f"{label}: token_ids must be one flat list of integers from 0 to 2^31 - 1.")
    return to_token_array(ids)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """A range of a completion's tokens, [start, stop), that were sampled with weights of one version."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True, slots=True)
class TopLogProbs:
    """The k most likely tokens at each of L positions, [L, k], from the most likely one on."""

    token_ids: TokenTable
    logprobs: LogProbTable
    """Log-probs of the same distribution as `Completion.full_logprobs`."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", to_token_array(self.token_ids))
        object.__setattr__(self, "logprobs", to_logprob_array(self.logprobs))

    __eq__ = fields_equal


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled continuation. Arrays are [L] for L sampled tokens, including a final end-of-sequence token.

    The array fields accept everything that numpy converts to an array.
    """

    request_id: str
    token_ids: Tokens
    logprobs: LogProbs
    """Log-probs in nats under the distribution sampled from: after temperature, top-p, top-k and min-p (0.0 if
    greedy)."""
    full_logprobs: LogProbs
    """Log-probs in nats after temperature and before truncation (at temperature 1 if greedy), for importance ratios."""
    stop_reason: str
    """A value of StopReason."""
    versions: list[VersionSpan]
    stop_text: str | None = None
    """The text of the stop string or token that ended the completion, or None."""
    running_s: float = field(default=0.0, compare=False)
    """Seconds that count toward the request's deadline."""
    routing: Any = field(default=None, compare=False)
    """numpy array of integers or None: the experts of the prompt's and the sampled tokens, [tokens, layers, k], without
    the first `known_routing` tokens. The last token is missing, because the model has not read it. The layers are all
    layers, or only those with experts. None from engines that do not keep the routing, and over HTTP."""
    top_logprobs: TopLogProbs | None = None
    """The most likely tokens at each position, if the request asked for them and has tokens; otherwise None. They are
    of the distribution of `full_logprobs`, before truncation, so they also rank tokens that could not be sampled."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", to_token_array(self.token_ids))
        for name in ("logprobs", "full_logprobs"):
            object.__setattr__(self, name, to_logprob_array(getattr(self, name)))

    __eq__ = fields_equal


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The features that an engine supports. Callers check them first, so that errors name the engine and the
    feature."""

    name: str
    sampling: frozenset[str] = frozenset()
    """Names of the SamplingParams fields that the engine supports with values other than off."""
    weight_routes: frozenset[str] = frozenset()
    """Names of the supported weight sync routes."""
    weight_ranks: int = 1
    """Number of ranks that the engine occupies in the group of the `broadcast` route."""
    max_model_len: int = 0
    """Maximum number of tokens of a prompt plus its completion; 0 if unknown."""
    other_machine: bool = False
    """True if the engine may run on another node than the trainer's ranks, where loopback addresses do not work."""
    lora: bool = False
    """True if the engine supports `load_adapter`."""
    synced_adapter_rank: int = 0
    """Largest rank of an adapter that a weight sync may send separately from the model; 0 if adapters must be
    merged."""
    pause_modes: frozenset[str] = frozenset()
    """The supported modes of `pause`, a subset of PAUSE_MODES."""
    keeps_fingerprints: bool = False
    """True if the engine can compute fingerprints of loaded tensors, which fused or repacked tensors do not allow."""
    seeds: bool = True
    """True if a request's seed determines its tokens."""
    score_temperature: bool = True
    """True if `score` supports temperatures other than 1."""
    partial_tokens: bool = False
    """True if `partial_tokens` returns the tokens of running requests. Otherwise it returns none."""
    max_top_logprobs: int = 0
    """Largest supported `SampleRequest.top_logprobs`."""
    json_schema: bool = False
    """True if the engine supports `SampleRequest.json_schema`."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Reason why a parameter or feature is not supported, by its name: engine, version and cause."""


@dataclass(slots=True)
class EngineHealth:
    """A snapshot of an engine's state and counters, for routing and metrics."""

    name: str
    version: int
    running: int = 0
    queued: int = 0
    paused: bool = False
    asleep: bool = False
    partially_loaded: bool = False
    """True if the model is only partially loaded or was discarded. The engine rejects requests until a full sync."""
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache, so that they needed no prefill."""
    draft_steps: int = 0
    """Steps in which drafts of a request were verified (speculative decoding), summed over requests."""
    accepted_drafts: int = 0
    extra: dict[str, float] = field(default_factory=dict)


class InferenceEngine(Protocol):
    """An inference engine. Every method is asynchronous and may be called while other calls are running."""

    capabilities: Capabilities

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample a completion for each request and return them in request order.

        An aborted request returns the tokens sampled so far with stop_reason "abort".

        Raises:
            UnsupportedParameter: The engine does not support a parameter of a request.
            EngineError: The engine is partially loaded, asleep, broken or closed, or the logits of a request were not
                finite.
        """

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-probs (nats, before truncation) of all tokens but the first of each sequence.

        An engine that sleeps without its cache may allocate the cache for this call and free it again.

        Args:
            token_ids: The sequences to score.
            temperature: Temperature by which the logits are divided.

        Returns:
            One list [L - 1] for each sequence [L]. Log-probs are not finite where the model's logits are not finite;
            a weight probe detects broken weights by that.

        Raises:
            UnsupportedParameter: The engine does not support this temperature, or a sequence is too long or holds
                invalid ids.
            EngineError: The engine cannot score now, or it is behind a server that cannot return log-probs that are
                not finite.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests, whose `generate` call returns the tokens sampled so far. Ignore unknown ids."""

    async def partial_tokens(self, request_ids: Sequence[str]) -> dict[str, Tokens]:
        """Return the tokens that running requests have sampled so far, by request id.

        Callers that stream a response call this periodically. Requests without tokens are left out, and so are unknown
        and finished ones: the completion has their tokens. The tokens of a request only grow, unless a client samples
        it again from the start because its engine died or a pause aborted it.

        Raises:
            EngineError: The engine is broken or closed.
        """

    async def pause(self, mode: str = "keep") -> None:
        """Stop sampling until `resume`. `mode` is a PauseMode and decides what happens to running requests.

        Raises:
            UnsupportedParameter: `mode` is not in capabilities.pause_modes.
        """

    async def resume(self) -> None:
        """Continue sampling after `pause`."""

    async def sleep(self, level: int = 1, keep_weights: bool = False) -> int:
        """Stop sampling and free memory.

        Args:
            level: 1 frees the KV cache; 2 also frees the weights.
            keep_weights: True to free only the KV cache, also in vLLM, which otherwise moves weights at level 1.

        Returns:
            Number of bytes freed on the device; 0 on a CPU.
        """

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory that `sleep` freed.

        The engine is awake once it has all of its memory again. It is then paused if `pause` was called without a later
        `resume`.

        Args:
            tags: Memory to allocate: "weights" or "kv_cache"; None for both.

        Raises:
            UnsupportedParameter: A tag is unknown.
        """

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the trainer's transfer group of the `broadcast` route. Do nothing for routes without a group.

        Args:
            route: Name of the weight sync route.
            address: host:port of the group's root; not used by routes without a group.
            rank: First rank of this engine in the group.
            world_size: Number of ranks in the group.
            timeout_s: Seconds to wait for the other ranks, also in later transfers.

        Raises:
            WeightSyncError: The engine does not support the route, or the group did not form in time.
        """

    async def begin_weights(self, manifest: Manifest) -> None:
        """Start a weight sync and check its manifest before anything is loaded.

        The checks cover names, shapes, dtypes, finite values and that the version is newer. Whether or not they pass,
        the engine continues to serve the old weights.

        Raises:
            WeightSyncError: The manifest does not fit the model; the message names the tensor.
        """

    async def receive_weights(self, bucket: Bucket) -> None:
        """Receive one bucket from the route, verify the fingerprint of each tensor and load the tensors.

        On the `broadcast` route the bytes of a bucket may be verified and loaded in the next call, which then raises
        its errors. The engine is partially loaded from the first loaded tensor until `commit_weights`. Implementations
        must run blocking work in a thread: on the `broadcast` route the trainer sends while this call waits.

        Raises:
            WeightSyncError: The transfer failed or a tensor's fingerprint is wrong.
        """

    async def commit_weights(self, version: int) -> None:
        """Finish a weight sync: verify the loaded tensors, drop caches and serve `version`.

        Raises:
            WeightSyncError: A tensor of the manifest has not arrived, or verification failed.
        """

    async def reset_prefix_cache(self) -> None:
        """Drop the prefix cache."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Load a LoRA adapter, replacing an adapter of the same name. Requests select it with `adapter=name`.

        The engine applies the adapter to the base model, without an adapter that came with a weight sync.

        Args:
            name: Name of the adapter.
            path: Folder written by peft's `save_pretrained`.

        Raises:
            UnsupportedParameter: capabilities.lora is False.
            EngineError: The adapter does not fit the model, or its options are not supported.
        """

    async def unload_adapter(self, name: str) -> None:
        """Remove an adapter that was loaded with `load_adapter`."""

    async def health(self) -> EngineHealth:
        """Return the engine's current state and counters.

        Raises:
            EngineError: The engine is broken or closed.
        """

    async def close(self) -> None:
        """Shut down the engine and free its resources."""
