"""The protocol of all inference engines: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike

from skyrl_train.data.token_arrays import LogProbs, Tokens, fields_equal, to_logprob_array, to_token_array
from skyrl_train.errors import UnsupportedParameter
from skyrl_train.weight_sync.protocol import Bucket, Manifest


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample, normalised so that it means the same for every engine (see engines/sampling_params.py).

    temperature 0 is greedy. top_p 1, top_k 0, min_p 0 and repetition_penalty 1 are off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    """Strings that end a response; the tokens that complete one stay in token_ids."""
    stop_token_ids: tuple[int, ...] = ()
    """In addition to the model's own end-of-sequence tokens."""
    ignore_eos: bool = False


SAMPLING_PARAM_NAMES = frozenset(field.name for field in fields(SamplingParams))
"""Names of all sampling parameters that an engine may support."""
PAUSE_MODES = frozenset({"keep", "abort", "wait", "retract"})
"""See InferenceEngine.pause."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One continuation to sample.

    `token_ids` is [L]. Whatever numpy makes an array of may be given for it; an array of int32 is not copied: do not
    write into it while the request is under way.

    The result depends only on token_ids, sampling and seed: not on the order of requests, nor (up to the rounding of
    differently shaped matrix products) on the rest of the batch.
    """

    request_id: str
    token_ids: Tokens
    sampling: SamplingParams
    seed: int
    """64 bits; see `engines.sampling.request_seed`."""
    session: str = ""
    """Requests of one session go to one engine (its prefix cache holds their history)."""
    group: str = ""
    """Requests of one group share a prompt and go to one engine, which prefills it once."""
    deadline_s: float | None = None
    """Seconds of running after which the engine aborts the request; None for no deadline. Waiting until the engine has
    room for it does not count (see lifecycle.RunClock), unless a server of another project does not tell."""
    adapter: str | None = None
    """A name given to `load_adapter`. None: the weights of the last sync, including the adapter that came with it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", parse_token_ids(f"request {self.request_id!r}", self.token_ids))

    __eq__ = fields_equal


def parse_token_ids(what: str, given: ArrayLike) -> Tokens:
    """[L] the `token_ids` of a request. Raises UnsupportedParameter for what is no token id of any model."""
    try:
        ids = np.asarray(given)
    except (TypeError, ValueError):
        ids = np.asarray(None)
    fits = ids.ndim == 1 and (not len(ids) or ids.dtype.kind in "iu")
    if not fits or (len(ids) and ids.dtype != np.int32 and (ids.min() < -(2**31) or ids.max() >= 2**31)):
        raise UnsupportedParameter(f"{what}: token_ids must be one list of whole numbers from 0, below 2^31.")
    return to_token_array(ids)


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, stop) of a completion were sampled with weights of this version."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True, slots=True)
class Completion:
    """A sampled continuation. Arrays are [L] for L sampled tokens, a final end-of-sequence token included.

    Whatever numpy makes arrays of may be given for them.
    """

    request_id: str
    token_ids: Tokens
    logprobs: LogProbs
    """nats, of the distribution sampled from: after temperature, top-p, top-k, min-p (0.0 if greedy)."""
    full_logprobs: LogProbs
    """nats, temperature-scaled but before truncation (at temperature 1 if greedy); for importance ratios."""
    stop_reason: str
    """stop (end of sequence, stop token or string) | length | abort"""
    versions: list[VersionSpan]
    stop_text: str | None = None
    """The text of the stop string or token that ended it, if one did."""
    running_s: float = field(default=0.0, compare=False)
    """Seconds that it ran, of those that its deadline allows."""
    routing: Any = field(default=None, compare=False)
    """numpy [tokens, layers, k]: the experts that prompt and sampled tokens went to; not the last token, which has not
    been read. Layers are those with experts, or all. None from engines that do not keep it, and over HTTP."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "token_ids", to_token_array(self.token_ids))
        for name in ("logprobs", "full_logprobs"):
            object.__setattr__(self, name, to_logprob_array(getattr(self, name)))

    __eq__ = fields_equal


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine supports; checked before use, so that a refusal can name engine and feature."""

    name: str
    sampling: frozenset[str] = frozenset()
    """Names of the SamplingParams fields that it supports with values other than off."""
    weight_routes: frozenset[str] = frozenset()
    """Names of the weight-sync routes that it supports."""
    weight_ranks: int = 1
    """How many ranks of the `broadcast` group it occupies."""
    max_model_len: int = 0
    """The most tokens of a prompt and its completion together; 0: not known."""
    other_machine: bool = False
    """Whether it may run on another machine than the trainer's ranks, to which loopback does not lead."""
    lora: bool = False
    """Whether it supports `load_adapter`."""
    synced_adapter_rank: int = 0
    """Largest rank of an adapter that a weight sync may send separately from the model; 0: adapters must be merged."""
    pause_modes: frozenset[str] = frozenset()
    partial_weights: bool = True
    """Whether a sync may leave out unchanged tensors."""
    keeps_fingerprints: bool = False
    """Whether fingerprints of its tensors can be computed after loading (not if they are fused or repacked)."""
    seeds: bool = True
    """Whether a request's seed determines its tokens."""
    score_temperature: bool = True
    """Whether `score` supports temperatures other than 1."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """Name of an unsupported parameter or feature -> why: engine, version, reason."""


@dataclass(slots=True)
class EngineHealth:
    """A snapshot for routing and metrics."""

    name: str
    version: int
    running: int = 0
    queued: int = 0
    paused: bool = False
    asleep: bool = False
    torn: bool = False
    """A weight transfer began but was not committed: it serves no requests until a complete sync."""
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that needed no prefill, as an earlier request of the group or session had them prefilled."""
    extra: dict[str, float] = field(default_factory=dict)


class InferenceEngine(Protocol):
    """An engine. Every method is asynchronous and may be called while other calls are running."""

    capabilities: Capabilities

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Completions in request order; an aborted request returns its tokens so far, with stop_reason "abort".

        Raises UnsupportedParameter for requests that the engine does not support, EngineError if it is torn, asleep or
        closed, and for requests whose logits were not finite.
        """

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probs (nats) of all tokens but the first of each sequence, at `temperature`, before truncation.

        If the model's logits are not finite, these are not either; a server that cannot return such numbers raises
        EngineError. Either way a weight probe finds the weights broken.

        An engine that sleeps without its cache may wake it for that, and frees it again.
        """

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests: their `generate` returns the tokens so far. Unknown ids are ignored."""

    async def pause(self, mode: str = "keep") -> None:
        """Stop sampling until `resume`; the mode decides what happens to running requests.

        keep: they stay where they are. abort: they return their tokens so far. wait: they finish first. retract: they
        go back to the queue, and their tokens so far are prefilled again after `resume`. Raises UnsupportedParameter
        for a mode that is not in capabilities.pause_modes.
        """

    async def resume(self) -> None:
        """Continue after `pause`."""

    async def sleep(self, level: int = 1) -> int:
        """Pause and free memory (level 1: the cache; 2: the weights too); returns the bytes freed, 0 on CPU."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate what `sleep` freed: tags "weights" and "kv_cache", None for both.

        The engine is awake once it has all, and then paused if `pause` was called without a later `resume`.
        """

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the trainer's transfer group of the `broadcast` route; a no-op for routes without one."""

    async def begin_weights(self, manifest: Manifest) -> None:
        """Check names, shapes, dtypes, finiteness and that the version is newer, before anything is loaded.

        Raises WeightSyncError naming the tensor. Whether or not it raises, the old weights are still served.
        """

    async def receive_weights(self, bucket: Bucket) -> None:
        """Take one bucket from the route, verify each tensor's fingerprint, load it. Raises WeightSyncError.

        The engine is torn from the first tensor loaded until `commit_weights`. Implementations must do blocking work in
        a thread: on the `broadcast` route the trainer sends while this call waits.
        """

    async def commit_weights(self, version: int) -> None:
        """Once everything in the manifest has arrived: verify the loaded tensors, drop caches, serve `version`."""

    async def reset_prefix_cache(self) -> None:
        """Forget cached prompts."""

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve requests with `adapter=name` through the LoRA adapter in a peft folder; replaces an earlier `name`.

        It is applied to the base model: an adapter from weight syncs is not applied to these requests.

        Raises UnsupportedParameter if capabilities.lora is False, EngineError for a folder that does not fit.
        """

    async def unload_adapter(self, name: str) -> None:
        """Forget the adapter of `load_adapter`."""

    async def health(self) -> EngineHealth:
        """The engine's current state and counters."""

    async def close(self) -> None:
        """End the engine and free everything."""
