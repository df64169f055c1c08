"""An engine of any kind with everything at hand to hold it to the protocol: see tests/integration/engines."""

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
from tests.support.reference_sampler import Reference
from tests.support.weight_targets import AdaptedTrainer, LocalTrainer

T = TypeVar("T")
TOLERANCE = 1e-4
"""nats, between an engine in float32 and the reference."""
MAX_MODEL_LEN = 1024
"""What the engines of the suite are started with."""
MAX_NUM_SEQS = 16
PROMPT = (50, 60, 70, 80, 90)
LONG_PROMPT = tuple(3 + (7 * n) % 250 for n in range(300))
LONGEST = 500
"""Tokens of a request that is still running when something happens to it."""
PROBE_IDS = [[5, 9, 77, 30, 12, 44], [8, 8, 8, 250], list(range(20, 60))]
TOKENIZER = byte_tokenizer()
_EASIEST_FIRST = ("in_process", "ipc", "checkpoint", "broadcast")
END_OF_SEQUENCE, END_OF_TURN = "<|endoftext|>", "<|im_end|>"


def save_as_base_model(model: PreTrainedModel, folder: Path) -> None:
    """Save a model whose configurations and tokenizer name another end than that of the turns in its chat template."""
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = END_OF_SEQUENCE
    assert model.generation_config is not None
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


class BackgroundLoop:
    """One event loop for engines that live longer than a test."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-bench", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], timeout_s: float = 240.0) -> T:
        """Wait for a coroutine on the loop. TimeoutError after `timeout_s`, when it is cancelled."""
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
    """An engine, a model with the weights that it serves, and the loop that both are used on."""

    _names = itertools.count()

    def __init__(
        self,
        engine: InferenceEngine,
        model: PreTrainedModel,
        loop: BackgroundLoop,
        folder: Path,
        head_start_s: float = 0.05,
    ):
        """`model` has the shape of the engine's; `folder` is for the `checkpoint` route.

        `head_start_s`: from when the engine counts a request as running until it has some tokens.
        """
        self._head_start_s = head_start_s
        self.engine = engine
        self.capabilities = engine.capabilities
        self._model = model
        self.tied = bool(model.config.tie_word_embeddings)
        self.run = loop.run
        self.folder = folder
        self._served: object = None
        """Which weights it has; None when that is not known."""

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
        **sampling: Any,
    ) -> SampleRequest:
        """Like a rollout's, 16 tokens unless said otherwise, not ended by the model; ids are never used twice."""
        params = SamplingParams(**({"max_tokens": 16, "ignore_eos": True} | sampling))
        request_id = f"{name or 'request'}-{next(self._names)}"
        return SampleRequest(request_id, to_token_array(prompt), params, seed, "", group, deadline_s, adapter)

    def generate(self, *requests: SampleRequest) -> list[Completion]:
        return self.run(self.engine.generate(requests))

    def start(self, *requests: SampleRequest) -> asyncio.Task[list[Completion]]:
        """On the loop: requests under way, each in a call of its own; the task ends when all have."""

        async def all_of_them() -> list[Completion]:
            answers = await asyncio.gather(*(self.engine.generate([request]) for request in requests))
            return [completion for (completion,) in answers]

        return asyncio.ensure_future(all_of_them())

    async def wait_until_running(self, count: int = 1) -> None:
        """Until that many requests have begun and had time for some tokens."""
        async with asyncio.timeout(60):
            while (await self.engine.health()).running < count:
                await asyncio.sleep(0.002)
        await asyncio.sleep(self._head_start_s)

    @property
    def pause_mode(self) -> str:
        """One that lets requests go on afterwards, the gentlest that there is."""
        return "keep" if "keep" in self.capabilities.pause_modes else "retract"

    def refusal_reason(self, feature: str) -> str:
        """Why the engine refuses `feature`. AssertionError where its capabilities do not say."""
        found = [why for name, why in self.capabilities.refusals.items() if feature in name]
        assert found, f"{self.capabilities.name} lacks {feature}, and its capabilities.refusals do not say why"
        return found[0]

    @property
    def model(self) -> PreTrainedModel:
        """What the trainer has; the engine has it after a sync."""
        return self._model

    @model.setter
    def model(self, model: PreTrainedModel) -> None:
        self._model, self._served = model, None

    # -- weights -----------------------------------------------------------------------------------------------------

    def random_model(self, seed: int) -> PreTrainedModel:
        return tiny_model(self.model.config.model_type, tied=self.tied, seed=seed)

    def spelling_model(self, text: str) -> PreTrainedModel:
        """Whatever character of `text` it read last, it goes on with the next one, round and round, almost surely."""
        return spelling_model([*TOKENIZER.encode(text, add_special_tokens=False)], tied=self.tied)

    def serve(self, model: PreTrainedModel, name: object = None) -> Reference:
        """Give the engine these weights, unless weights of this `name` are there already; returns what is right now."""
        if name is None or name != self._served:
            self.run(self.publish(model))
            self._served = name
        return Reference(self.model)

    async def publish(self, model: PreTrainedModel, route: str = "", *, probed: bool = False) -> dict[str, float]:
        """One sync as the version after the one that is served."""
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
        """Syncs of `self.model`; `trainer` and `engine` may stand in between. Leaves no connection behind."""
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
        return next(route for route in _EASIEST_FIRST if route in self.capabilities.weight_routes)

    async def restore(self) -> None:
        """Whatever a test did: awake, whole, not paused."""
        health = await self.engine.health()
        if health.asleep:
            await self.engine.wake_up()
        if health.torn:
            await self.publish(self.model)
        await self.engine.resume()


def long_requests(bench: EngineHarness, count: int = 4, **options: Any) -> list[SampleRequest]:
    return [bench.request((*PROMPT, n), seed=n, max_tokens=LONGEST, **options) for n in range(count)]


def spelling_model(tokens: Sequence[int], *, tied: bool) -> PreTrainedModel:
    """Each of `tokens` is followed by the next one in a ring: the first layer's feed-forward maps code to code."""
    model: Any = tiny_model("qwen3", tied=tied)
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
    """Versions cover the tokens without gap, in the order of `allowed`; returns the spans."""
    spans = completion.versions
    edges = [0, *(span.stop for span in spans)]
    assert [span.start for span in spans] == edges[:-1], spans
    assert edges[-1] == len(completion.token_ids), spans
    versions = [span.version for span in spans]
    assert versions == [version for version in allowed if version in versions], (versions, allowed)
    return spans


def largest_difference(got: ArrayLike, wanted: ArrayLike) -> float:
    """In nats; of one length."""
    one, other = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    assert one.shape == other.shape
    return float(np.abs(one - other).max(initial=0.0))


def assert_logprobs(
    reference: Reference, request: SampleRequest, completion: Completion, *, tolerance: float = TOLERANCE
) -> None:
    """Both log-probs of every token are the reference's."""
    prompt, sampled, sampling = request.token_ids, completion.token_ids.tolist(), request.sampling
    truncated, full = reference.logprobs(prompt, sampled, sampling)
    assert largest_difference(completion.full_logprobs.tolist(), full) <= tolerance
    allowed = [truncated]
    if sampling.temperature and (sampling.top_p < 1 or sampling.min_p):
        # Rounding decides whether a token that lies at a threshold is kept, and with it the share of all others.
        for more in (1 - tolerance, 1 + tolerance):
            moved = replace(sampling, top_p=min(1.0, sampling.top_p * more), min_p=sampling.min_p / more)
            allowed.append(reference.logprobs(prompt, sampled, moved)[0])
    for got, *wanted in zip(completion.logprobs.tolist(), *allowed, strict=True):
        assert min(abs(got - one) for one in wanted) <= tolerance
