"""A harness that tests engines of any kind against the engine protocol; see tests/integration/engines."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike
from transformers import PreTrainedModel

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, InferenceEngine, SampleRequest, SamplingParams, VersionSpan
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from skyrl_train.weight_sync.sync import Probe, WeightSync
from tests.support import vllm_v2
from tests.support.reference_sampler import Reference
from tests.support.weight_targets import AdaptedTrainer, LocalTrainer

T = TypeVar("T")
TOLERANCE = 1e-4
"""Maximum difference of log-probs, in nats, between an engine in float32 and the reference."""
MAX_MODEL_LEN = 1024
"""max_model_len of the suite's engines."""
MAX_NUM_SEQS = 16
PROMPT = (50, 60, 70, 80, 90)
LONG_PROMPT = tuple(3 + (7 * n) % 250 for n in range(300))
LONGEST = 60 if vllm_v2.is_requested() else 500
"""Response length of a request that must still be running when a test disturbs it."""
PROBE_IDS = [[5, 9, 77, 30, 12, 44], [8, 8, 8, 250], list(range(20, 60))]
TOKENIZER = byte_tokenizer()
_CHEAPEST_FIRST = ("in_process", "ipc", "checkpoint", "broadcast")
END_OF_SEQUENCE, END_OF_TURN = "<|endoftext|>", "<|im_end|>"


def save_as_base_model(model: PreTrainedModel, folder: Path) -> None:
    """Save a model whose configurations and tokenizer have another end token than the turns of its chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = END_OF_SEQUENCE
    assert model.generation_config is not None
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class BackgroundLoop:
    """An event loop on a thread, for engines that outlive a test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-bench", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 240.0) -> T:
        """Run a coroutine on the loop and wait. It is cancelled with a TimeoutError after `timeout_s`."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        finally:
            future.cancel()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class EngineHarness:
    """An engine, a model with the weights that it serves, and the loop on which both run."""

    _names = itertools.count()

    def __init__(
        self,
        engine: InferenceEngine,
        model: PreTrainedModel,
        loop: BackgroundLoop,
        folder: Path,
        head_start_s: float = 0.05,
    ):
        """Create a harness.

        Args:
            engine: The engine.
            model: A model with the architecture of the engine's.
            loop: The loop on which the engine is used.
            folder: Folder for the `checkpoint` route.
            head_start_s: Time from when the engine counts a request as running until the request has some tokens.
        """
        self._head_start_s = head_start_s
        self.engine = engine
        self.capabilities = engine.capabilities
        self._model = model
        self.tied = bool(model.config.tie_word_embeddings)
        self.run = loop.run
        self.folder = folder
        self._served: object = None
        """Name of the weights that the engine serves; None if unknown."""

    # -- requests ----------------------------------------------------------------------------------------------------

    def request(
        self,
        prompt: Sequence[int],
        *,
        name: str = "",
        seed: int = 0,
        group: str = "",
        deadline_s: float | None = None,
        adapter: str | None = None,
        top_logprobs: int = 0,
        json_schema: str | None = None,
        **sampling: Any,
    ) -> SampleRequest:
        """Return a request with a unique id, by default for 16 tokens and with ignore_eos."""
        params = SamplingParams(**({"max_tokens": 16, "ignore_eos": True} | sampling))
        request_id = f"{name or 'request'}-{next(self._names)}"
        return SampleRequest(
            request_id, to_token_array(prompt), params, seed, "", group, deadline_s, adapter, top_logprobs, json_schema
        )

    def generate(self, *requests: SampleRequest) -> list[Completion]:
        return self.run(self.engine.generate(requests))

    def start(self, *requests: SampleRequest) -> asyncio.Task[list[Completion]]:
        """Start each request in a separate call, and return a task of all completions. Runs on the harness's loop."""

        async def generate_all() -> list[Completion]:
            results = await asyncio.gather(*(self.engine.generate([request]) for request in requests))
            return [completion for (completion,) in results]

        return asyncio.ensure_future(generate_all())

    async def wait_until_running(self, count: int = 1) -> None:
        """Wait until `count` requests are running and have had time for some tokens."""
        async with asyncio.timeout(60):
            while (await self.engine.health()).running < count:
                await asyncio.sleep(0.002)
        await asyncio.sleep(self._head_start_s)

    @property
    def pause_mode(self) -> str:
        """A supported pause mode after which requests continue: "keep" if possible."""
        return "keep" if "keep" in self.capabilities.pause_modes else "retract"

    def refusal_reason(self, feature: str) -> str:
        """Return the reason why the engine does not support `feature`; fail if its capabilities give none."""
        reasons = [reason for name, reason in self.capabilities.refusals.items() if feature in name]
        assert reasons, f"{self.capabilities.name} lacks {feature}, but its capabilities.refusals give no reason"
        return reasons[0]

    @property
    def model(self) -> PreTrainedModel:
        """The trainer's model, whose weights the engine serves after a sync."""
        return self._model

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self._model, self._served = model, None

    # -- weights -----------------------------------------------------------------------------------------------------

    def random_model(self, seed: int) -> PreTrainedModel:
        return tiny_model(self.model.config.model_type, tied=self.tied, seed=seed)

    def spelling_model(self, text: str) -> PreTrainedModel:
        """Return a model that almost surely repeats the characters of `text` in a cycle."""
        kind = "qwen3_5_text" if self.model.config.model_type == "qwen3_5_text" else "qwen3"
        return spelling_model([*TOKENIZER.encode(text, add_special_tokens=False)], tied=self.tied, kind=kind)

    def serve(self, model: PreTrainedModel, name: object = None) -> Reference:
        """Sync these weights, unless the engine already serves weights of this name; return their reference."""
        if name is None or name != self._served:
            self.run(self.publish(model))
            self._served = name
        return Reference(self.model)

    async def publish(self, model: PreTrainedModel, route: str = "", *, probed: bool = False) -> dict[str, float]:
        """Sync a model as the version after the served one, and return the sync's metrics."""
        self.model = model
        async with self.syncing(route, probed=probed) as weight_sync:
            return await weight_sync.sync_all(await self.next_version())

    async def next_version(self) -> int:
        return (await self.engine.health()).version + 1

    @asynccontextmanager
    async def syncing(
        self,
        route: str = "",
        *,
        trainer: LocalTrainer | None = None,
        engine: Any = None,
        probed: bool = True,
        deadline_s: float = 60.0,
    ) -> AsyncIterator[WeightSync]:
        """Yield a WeightSync of `self.model`, and close its connections afterwards.

        Args:
            route: The weight route; empty for the cheapest one.
            trainer: Replacement of the trainer.
            engine: Replacement of the engine.
            probed: True to verify each sync with a probe.
            deadline_s: Deadline of a sync, in seconds.
        """
        trainer = trainer or LocalTrainer(self.model, bucket_bytes=1 << 14)

        async def trainer_score(token_ids: Sequence[Sequence[int]]) -> list[list[float]]:
            return Reference(trainer.full_weights()).score(token_ids)

        weight_sync = WeightSync(
            trainer,
            lambda: [engine or self.engine],
            route=route or self.cheapest_route,
            deadline_s=deadline_s,
            probe=Probe(PROBE_IDS, trainer_score, TOLERANCE) if probed else None,
            folder=str(self.folder),
            adapter_only=isinstance(trainer, AdaptedTrainer),
        )
        try:
            yield weight_sync
        finally:
            trainer.sender.close()
            await self.engine.connect_weights(self.cheapest_route, str(self.folder), 1, 2, 10.0)

    @property
    def cheapest_route(self) -> str:
        return next(route for route in _CHEAPEST_FIRST if route in self.capabilities.weight_routes)

    async def restore(self) -> None:
        """Wake the engine, complete its weights and resume it, whatever a test did to it."""
        health = await self.engine.health()
        if health.asleep:
            await self.engine.wake_up()
        if health.partially_loaded:
            await self.publish(self.model)
        await self.engine.resume()


def long_requests(bench: EngineHarness, count: int = 4, **options: Any) -> list[SampleRequest]:
    return [bench.request((*PROMPT, n), seed=n, max_tokens=LONGEST, **options) for n in range(count)]


def spelling_model(tokens: Sequence[int], *, tied: bool, kind: str = "qwen3") -> PreTrainedModel:
    """Return a model that repeats `tokens` in a cycle: its first feed-forward layer maps each code to the next one."""
    model: Any = tiny_model(kind, tied=tied)
    hidden = model.config.hidden_size
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
        codes = torch.randn(model.config.vocab_size, hidden, generator=torch.Generator().manual_seed(0))
        model.get_input_embeddings().weight.copy_(codes)
        model.get_output_embeddings().weight.copy_(codes)
        feed_forward = model.model.layers[0].mlp
        feed_forward.gate_proj.weight[: len(tokens)] = 10 * codes[list(tokens)] / hidden
        feed_forward.up_proj.weight[: len(tokens)] = codes[list(tokens)] / hidden
        successors = [*tokens[1:], tokens[0]]
        feed_forward.down_proj.weight[:, : len(tokens)] = codes[successors].T
    return model  # type: ignore[no-any-return]


def assert_spans(completion: Completion, allowed: Sequence[int]) -> list[VersionSpan]:
    """Check that the spans cover all tokens without a gap, with versions in the order of `allowed`; return them."""
    spans = completion.versions
    edges = [0, *(span.stop for span in spans)]
    assert [span.start for span in spans] == edges[:-1], spans
    assert edges[-1] == len(completion.token_ids), spans
    versions = [span.version for span in spans]
    assert versions == [version for version in allowed if version in versions], (versions, allowed)
    return spans


def largest_difference(actual: ArrayLike, expected: ArrayLike) -> float:
    """Return the largest absolute difference of two arrays of the same shape; 0 if they are empty."""
    actual_array, expected_array = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual_array.shape == expected_array.shape
    return float(np.abs(actual_array - expected_array).max(initial=0.0))


def assert_logprobs(
    reference: Reference, request: SampleRequest, completion: Completion, *, tolerance: float = TOLERANCE
) -> None:
    """Check both log-probs of every token against the reference."""
    prompt, sampled, sampling = request.token_ids, completion.token_ids.tolist(), request.sampling
    truncated, full = reference.logprobs(prompt, sampled, sampling)
    assert largest_difference(completion.full_logprobs.tolist(), full) <= tolerance
    allowed = [truncated]
    if sampling.temperature and (sampling.top_p < 1 or sampling.min_p):
        # Rounding decides if a token at a threshold is kept, which changes the probabilities of all other tokens.
        for factor in (1 - tolerance, 1 + tolerance):
            shifted = replace(sampling, top_p=min(1.0, sampling.top_p * factor), min_p=sampling.min_p / factor)
            allowed.append(reference.logprobs(prompt, sampled, shifted)[0])
    for actual, *expected in zip(completion.logprobs.tolist(), *allowed, strict=True):
        assert min(abs(actual - logprob) for logprob in expected) <= tolerance
