"""The protocol every inference engine speaks: token ids in, token ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from skyrl_train.weight_sync.wire import Bucket, Manifest


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to sample, after normalisation: one meaning for every engine (see engines/sampling.py).

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


SAMPLING = frozenset(field.name for field in fields(SamplingParams))
"""All that an engine may honour."""
PAUSE_MODES = frozenset({"keep", "abort", "wait", "retract"})


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One continuation to sample.

    The result depends on token_ids, sampling and seed only: not on what else is in the batch (up to the rounding of
    differently shaped matrix products), nor on request order.
    """

    request_id: str
    token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int
    """64 bits; see `engines.sampling.request_seed`."""
    session: str = ""
    """Requests of one session go to one engine (its prefix cache holds their history)."""
    group: str = ""
    """Requests of one group have a prompt in common and go to one engine, which prefills it once."""
    deadline_s: float | None = None
    adapter: str | None = None
    """One of `load_adapter`. None: what the last weight sync brought, the model and the adapter that came with it."""


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, stop) of a completion were sampled with weights of this version."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True, slots=True)
class Completion:
    """What an engine sampled; all lists are [L], L sampled tokens, including an end-of-sequence token."""

    request_id: str
    token_ids: list[int]
    logprobs: list[float]
    """nats, of the distribution really sampled from: after temperature, top-p, top-k, min-p (0.0 where greedy)."""
    full_logprobs: list[float]
    """nats, temperature-scaled but before truncation (at temperature 1 where greedy): what importance ratios use."""
    stop_reason: str
    """stop (end of sequence, stop token or string) | length | abort"""
    versions: list[VersionSpan]
    stop_text: str | None = None
    """The stop string or token that ended it, where one did."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; asked before use, so that a refusal names engine and feature."""

    name: str
    sampling: frozenset[str] = frozenset()
    """Names of SamplingParams fields it honours when they are not off."""
    weight_routes: frozenset[str] = frozenset()
    weight_ranks: int = 1
    """Members that it has in the `broadcast` group."""
    lora: bool = False
    synced_adapter_rank: int = 0
    """Largest rank of an adapter that a weight sync may bring apart from the model; 0: adapters must be merged."""
    pause_modes: frozenset[str] = frozenset()
    partial_weights: bool = True
    """Whether a sync may leave out tensors that did not change."""
    keeps_fingerprints: bool = False
    """Whether the tensors it holds can be summed after loading (not when fused or repacked)."""
    seeds: bool = True
    """Whether a request's seed decides its tokens."""
    score_temperature: bool = True
    """Whether `score` takes temperatures other than 1."""
    refusals: Mapping[str, str] = field(default_factory=dict)
    """What it cannot do, by the name of the parameter or feature, and why: engine, version, reason."""


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
    """A weight transfer began and did not commit: serves nothing until a complete sync."""
    generated_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that did not need a prefill because another request of the group or session had paid for it."""
    extra: dict[str, float] = field(default_factory=dict)


class InferenceEngine(Protocol):
    """Asynchronous; every method may be called while others are running."""

    capabilities: Capabilities

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Completions in request order; an aborted request returns what it had, stop_reason "abort".

        Raises UnsupportedParameter for what the engine cannot honour, EngineError when torn, asleep or closed, and for
        requests that met logits which are not finite.
        """

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Log-probs (nats) of every given token after its first, at `temperature`, before truncation.

        Where the model's logits are not finite, neither are these, or EngineError is raised by a server whose answers
        have no such numbers: what a probe of weights reports is that they are broken.
        """

    async def abort(self, request_ids: Sequence[str]) -> None: ...

    async def pause(self, mode: str = "keep") -> None:
        """keep: running requests stop where they are; abort: they return what they have; wait: they finish first;
        retract: they go back to the queue, and what they have so far is read again after `resume`.

        Raises UnsupportedParameter for a mode that is not in capabilities.pause_modes.
        """

    async def resume(self) -> None: ...

    async def sleep(self, level: int = 1) -> int:
        """Pause and give memory back (1: the cache, 2: the weights too); returns the bytes freed, 0 on CPU."""

    async def wake_up(self, tags: Sequence[str] | None = None) -> None: ...

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join the trainer's transfer group of the `broadcast` route; a no-op for routes without one."""

    async def begin_weights(self, manifest: Manifest) -> None:
        """Check names, shapes, dtypes, finiteness and that the version is newer, before a byte is loaded.

        Raises WeightSyncError naming the tensor; either way the old weights go on serving.
        """

    async def receive_weights(self, bucket: Bucket) -> None:
        """Take one bucket from the route, verify each tensor's fingerprint, load it. Raises WeightSyncError.

        From the first tensor loaded to `commit_weights` the engine is torn. Blocking work belongs in a thread: with the
        `broadcast` route the trainer sends while this call waits.
        """

    async def commit_weights(self, version: int) -> None:
        """Everything in the manifest arrived: verify the tensors held, drop prefix caches, serve `version`."""

    async def reset_prefix_cache(self) -> None: ...

    async def load_adapter(self, name: str, path: str) -> None:
        """Serve requests with `adapter=name` through the LoRA adapter in a peft folder, in place of an earlier `name`.

        It acts on the model itself: an adapter that weight syncs bring does not act on these requests.

        Raises UnsupportedParameter where capabilities.lora is False, EngineError for a folder that does not fit.
        """

    async def unload_adapter(self, name: str) -> None: ...

    async def health(self) -> EngineHealth: ...

    async def close(self) -> None: ...
