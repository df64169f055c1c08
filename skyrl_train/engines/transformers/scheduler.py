"""Continuous batching of the transformers engine: admission, decode steps, ends of requests.

Everything here runs on the engine's thread. Nothing but deadlines depends on time, so the same list of requests given
to an idle engine takes the same steps and gives bit-identical results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_train.data.token_arrays import LogProbs, Tokens, to_int_tuple, to_logprob_array, to_token_array
from skyrl_train.data.token_texts import token_text
from skyrl_train.engines.base import Completion, SampleRequest, VersionSpan
from skyrl_train.engines.lifecycle import RequestDeadlines
from skyrl_train.engines.sampling_params import check_logprobs, check_unique_request_ids
from skyrl_train.engines.token_sampler import RowSampler, StopStrings
from skyrl_train.engines.transformers.adapters import adapted_rows
from skyrl_train.engines.transformers.cache import DecodeCache, NewPrompt, PromptKey
from skyrl_train.engines.transformers.model_runner import ModelRunner

_PREFILL_TOKENS = 8192
"""The most prompt tokens in one forward, unless a single prompt is longer: bounds the memory of activations."""


class GenerateCall:
    """One call of generate(): its future gets the completions, in request order, once all requests are done."""

    def __init__(self, requests: Sequence[SampleRequest]):
        self.future: Future[list[Completion]] = Future()
        # From now on the future cannot be cancelled while the engine's thread uses it.
        self.future.set_running_or_notify_cancel()
        self.requests = [TrackedRequest(request, self) for request in requests]
        self._left = len(self.requests)

    def request_done(self) -> None:
        self._left -= 1
        if not self._left and not self.future.done():
            self.future.set_result([row.completion for row in self.requests if row.completion is not None])

    def fail(self, error: Exception) -> None:
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """One request from submission to completion."""

    request: SampleRequest
    call: GenerateCall
    key: PromptKey = field(default_factory=lambda: PromptKey(()))
    """The tokens to prefill when it is admitted: the prompt, and after a retraction also its sampled tokens."""
    limit: int = 0
    """The most tokens to sample: max_tokens, or less if the model's maximum length is reached first."""
    stop_ids: frozenset[int] = frozenset()
    """All token ids that end it, including end-of-sequence."""
    min_tokens_forbidden: Tensor | None = None
    """Token ids that are forbidden before min_tokens."""
    stops: StopStrings | None = None
    seen: Tensor | None = None
    """bool [V], the tokens in it so far, if there is a repetition penalty."""
    buffer_row: int = -1
    """Its page in the Transcript."""
    slot: int = -1
    """Its slot in the DecodeCache."""
    generated: int = 0
    stop_text: str | None = None
    version_changes: list[tuple[int, int]] = field(default_factory=list)
    """(first token, version) of every change of weights, the first ones included."""
    routing: list[np.ndarray] = field(default_factory=list)
    """int16 [tokens, layers, k] of consecutive tokens from the prompt's first one on; empty if it is not kept."""
    completion: Completion | None = None

    @property
    def num_reprefilled(self) -> int:
        """How many sampled tokens were prefilled with the prompt, after a retraction."""
        return len(self.key.token_ids) - len(self.request.token_ids)

    def admit(self, buffer: SampledTokenBuffer, version: int, routing: np.ndarray | None) -> None:
        """Begin to run with weights of this version, for the first time or after a retraction.

        `routing`: of the tokens that were prefilled. Those that were sampled earlier stay where they went then.
        """
        if routing is not None:
            self.routing.append(routing[sum(map(len, self.routing)) :])
        if self.buffer_row < 0:
            self.buffer_row = buffer.page()
        if not self.version_changes or self.version_changes[-1][1] != version:
            self.version_changes.append((self.generated, version))

    def retract(self, buffer: SampledTokenBuffer) -> None:
        """Prepare for the queue, keeping the tokens sampled so far."""
        sampled, _, _ = buffer.read(self.buffer_row, self.generated)
        self.key = self.key._replace(token_ids=to_int_tuple(np.concatenate((self.request.token_ids, sampled))))

    def finish(self, buffer: SampledTokenBuffer, reason: str, running_s: float) -> None:
        ids, logprobs, full = to_token_array([]), to_logprob_array([]), to_logprob_array([])
        if self.buffer_row >= 0:
            ids, logprobs, full = buffer.read(self.buffer_row, self.generated)
        starts = [start for start, _ in self.version_changes[1:]] + [self.generated]
        spans = [
            VersionSpan(start, stop, version)
            for (start, version), stop in zip(self.version_changes, starts, strict=False)
            if stop > start
        ]
        request_id = self.request.request_id
        routing = np.concatenate(self.routing) if self.routing else None
        self.completion = Completion(request_id, ids, logprobs, full, reason, spans, self.stop_text, running_s, routing)
        if self.buffer_row >= 0:
            buffer.free(self.buffer_row)


class SampledTokenBuffer:
    """Sampled tokens and log-probs of all running requests, in arrays that they share."""

    def __init__(self) -> None:
        self._ids = np.zeros((0, 64), dtype=np.int64)
        self._logprobs = np.zeros((2, 0, 64), dtype=np.float32)
        self._free: list[int] = []

    def page(self) -> int:
        if not self._free:
            count = len(self._ids)
            more = max(16, count)
            self._ids = np.pad(self._ids, ((0, more), (0, 0)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, more), (0, 0)))
            self._free = list(range(count, count + more))
        return self._free.pop()

    def write(self, pages: np.ndarray, at: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Write one token per row: pages, at (its index), ids [B]; logprobs [2, B] (sampled from; full)."""
        if len(at) and (longest := int(at.max())) >= self._ids.shape[1]:
            more = max(longest + 1 - self._ids.shape[1], self._ids.shape[1])
            self._ids = np.pad(self._ids, ((0, 0), (0, more)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, 0), (0, more)))
        self._ids[pages, at] = ids
        self._logprobs[:, pages, at] = logprobs

    def read(self, page: int, count: int) -> tuple[Tokens, LogProbs, LogProbs]:
        """Copies of a request's first tokens and of their log-probs: sampled from, and full."""
        logprobs, full = (row[page, :count].copy() for row in self._logprobs)
        return self._ids[page, :count].astype(np.int32), logprobs, full

    def at(self, pages: np.ndarray, at: np.ndarray) -> np.ndarray:
        return self._ids[pages, at]

    def tail(self, page: int, start: int, stop: int) -> list[int]:
        return self._ids[page, start:stop].tolist()

    def free(self, page: int) -> None:
        self._free.append(page)


class Scheduler:
    """Queues requests and runs them as rows of one batch, step by step."""

    def __init__(
        self,
        model_runner: ModelRunner,
        tokenizer: Any,
        eos: frozenset[int],
        deadlines: RequestDeadlines,
        *,
        max_num_seqs: int,
        max_model_len: int,
        name: str,
    ):
        self._model_runner = model_runner
        self._tokenizer = tokenizer
        self._eos = frozenset(end for end in eos if end < model_runner.vocab_size)
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._name = name
        self._cache = DecodeCache(model_runner.device)
        self._token_buffer = SampledTokenBuffer()
        self._queue: deque[TrackedRequest] = deque()
        self._rows: list[TrackedRequest] = []
        self._batch: _Batch | None = None
        self._prompt_logits: dict[PromptKey, Tensor] = {}
        """The last logits of prompts that queued requests share with admitted ones."""
        self._prompt_routing: dict[PromptKey, np.ndarray] = {}
        """The same for where their tokens went, if the engine keeps that."""
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self._next_ids: Tensor | None = None
        self._finished: list[TrackedRequest] = []
        self._calls: set[GenerateCall] = set()
        """Calls that have not got their completions yet."""
        self._deadlines = deadlines
        self.version = 0
        self.generated_tokens = self.prefilled_tokens = self.cached_tokens = 0

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def queued(self) -> int:
        return len(self._queue)

    def submit(self, call: GenerateCall) -> None:
        """Queue the requests of a call, in order.

        Raises UnsupportedParameter for an adapter that is not loaded and for an id that is in use.
        """
        under_way = (row.request.request_id for row in (*self._rows, *self._queue))
        check_unique_request_ids(self._name, (row.request for row in call.requests), under_way)
        for row in call.requests:
            self._prepare(row)
        self._queue.extend(call.requests)
        self._deadlines.add((row.request.request_id, row.request.deadline_s) for row in call.requests)
        self._calls.add(call)

    def _prepare(self, row: TrackedRequest) -> None:
        params = row.request.sampling
        row.key = PromptKey(to_int_tuple(row.request.token_ids), self._model_runner.adapters.get(row.request.adapter))
        row.limit = min(params.max_tokens, self._max_model_len - len(row.request.token_ids))
        eos = frozenset() if params.ignore_eos else self._eos
        row.stop_ids = eos | frozenset(params.stop_token_ids)
        if params.min_tokens and row.stop_ids:
            row.min_tokens_forbidden = torch.tensor(sorted(row.stop_ids), device=self._model_runner.device)
        if params.stop:
            if params.stop not in self._stop_strings:
                self._stop_strings[params.stop] = StopStrings(self._tokenizer, params.stop)
            row.stops = self._stop_strings[params.stop]
        if params.repetition_penalty != 1:
            row.seen = torch.zeros(self._model_runner.vocab_size, dtype=torch.bool, device=self._model_runner.device)
            row.seen[list(row.key.token_ids)] = True

    # -- ends that the model did not cause ----------------------------------------------------------------------------

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """End these requests (None: all) with their tokens so far; unknown ids are ignored."""
        ids = None if request_ids is None else set(request_ids)
        self._end(lambda row: ids is None or row.request.request_id in ids)

    def retract(self) -> None:
        """Put running rows back at the head of the queue; their tokens so far are prefilled when they are admitted."""
        for row in self._rows:
            row.retract(self._token_buffer)
        self._queue.extendleft(reversed(self._rows))
        self._rows, self._batch = [], None
        self.reset_prefix_cache()

    def fail(self, error: Exception) -> None:
        """Drop all running and queued requests: their callers get `error`."""
        self._deadlines.clear()  # also of those that were being admitted, which are in neither list
        self._rows, self._batch = [], None
        self._queue.clear()
        self._token_buffer = SampledTokenBuffer()
        self.reset_prefix_cache()
        self._deliver()
        calls, self._calls = self._calls, set()
        for call in calls:
            call.fail(error)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prompts; running rows keep their own keys and values. An idle engine frees the memory."""
        self._prompt_logits.clear()
        self._prompt_routing.clear()
        self._cache.forget_prompts()
        if not self._rows:
            self._cache.reset()

    def on_weights_changed(self, version: int) -> None:
        """Continue running rows with the new weights, on top of keys and values of the old ones."""
        self.version = version
        for row in self._rows:
            row.version_changes.append((row.generated, version))
        self.reset_prefix_cache()

    def _end(self, chosen: Any) -> None:
        ended = [row for row in (*self._rows, *self._queue) if chosen(row)]
        self._queue = deque(row for row in self._queue if not chosen(row))
        self._drop([chosen(row) for row in self._rows])
        for row in ended:
            self._finish(row, "abort")
        self._clean_up()

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, *, can_admit: bool) -> None:
        """Admit the queued requests that fit, if it `admits` any, then sample one token for every running row."""
        while can_admit and self._queue and len(self._rows) < self._max_num_seqs:
            self._admit()
        if self._rows:
            self._decode()
        self._clean_up()

    def _finish(self, row: TrackedRequest, reason: str) -> None:
        row.finish(self._token_buffer, reason, self._deadlines.remove(row.request.request_id))
        self._finished.append(row)

    def _deliver(self) -> None:
        """Complete the callers' futures: after everything else, so that the state that they then see is current."""
        finished, self._finished = self._finished, []
        for row in finished:
            row.call.request_done()
            if row.call.future.done():
                self._calls.discard(row.call)

    def _clean_up(self) -> None:
        """Clean up after rows have ended: compact the cache if most lanes are empty, reset it if no row is left."""
        self._compact_cache()
        self._deliver()

    def _compact_cache(self) -> None:
        if not self._rows and not self._queue:
            self._prompt_logits.clear()
            self._prompt_routing.clear()
            self._cache.reset()
            return
        if self._batch is None and self._rows:
            moved = self._cache.compact(self._queued_prompts())
            if moved is not None:
                for row in self._rows:
                    row.slot = int(moved[row.slot])

    def _queued_prompts(self) -> frozenset[PromptKey]:
        return frozenset(row.key for row in self._queue)

    def _admit(self) -> None:
        """Take queued requests in order, prefill their prompts, sample first tokens, give slots to those that go on."""
        rows, unread = self._next_rows()
        packed, starts = None, {}
        if unread:
            packed, places, logits = self._model_runner.prefill(unread)
            starts = dict(zip(unread, places, strict=True))
            self._prompt_logits.update(zip(unread, logits, strict=True))
            if (routing := self._model_runner.routing()) is not None:
                self._prompt_routing |= {key: routing[at : at + len(key.token_ids)] for key, at in starts.items()}
        lengths = sum(len(row.key.token_ids) for row in rows)
        fresh = sum(len(key.token_ids) for key in unread)
        self.prefilled_tokens += fresh
        self.cached_tokens += lengths - fresh
        for row in rows:
            row.admit(self._token_buffer, self.version, self._prompt_routing.get(row.key))
        logits = torch.stack([self._prompt_logits[row.key] for row in rows])
        _, done = _Batch(rows, self._model_runner).sample(logits, self)
        needed = self._queued_prompts()
        staying = [row for row, over in zip(rows, done, strict=True) if not over]
        by_prompt: dict[PromptKey, list[TrackedRequest]] = {}
        for row in staying:
            by_prompt.setdefault(row.key, []).append(row)
        new = [NewPrompt(key, len(same), starts.get(key)) for key, same in by_prompt.items()]
        slots = iter(self._cache.allocate_slots(new, packed, needed)) if new else iter(())
        for same in by_prompt.values():
            for row in same:
                row.slot = next(slots)
        for kept in (self._prompt_logits, self._prompt_routing):
            for key in [key for key in kept if key not in needed]:
                del kept[key]
        self._next_ids = None
        self._rows = sorted([*self._rows, *staying], key=lambda row: row.slot)
        self._batch = None

    def _next_rows(self) -> tuple[list[TrackedRequest], list[PromptKey]]:
        """The next requests of the queue to admit, and those of their prompts that need a prefill."""
        rows: list[TrackedRequest] = []
        unread: dict[PromptKey, None] = {}
        tokens = 0
        while self._queue and len(self._rows) + len(rows) < self._max_num_seqs:
            key = self._queue[0].key
            if key not in unread and not (key in self._prompt_logits and self._cache.has_prompt(key)):
                if unread and tokens + len(key.token_ids) > _PREFILL_TOKENS:
                    break
                unread[key] = None
                tokens += len(key.token_ids)
            rows.append(self._queue.popleft())
        return rows, list(unread)

    def _decode(self) -> None:
        if self._batch is None:
            self._batch = _Batch(self._rows, self._model_runner)
            self._next_ids = None
        if self._next_ids is None or not self._cache.advance():
            # The newest token of a row is not stored yet: this step stores it.
            self._cache.begin([row.slot for row in self._rows], self._batch.generated - self._batch.reread - 1)
        if self._next_ids is None:
            last = self._token_buffer.at(self._batch.pages, self._batch.generated - 1)
            self._next_ids = torch.from_numpy(last).to(self._model_runner.device)
        logits = self._model_runner.decode(self._next_ids, self._cache, self._batch.adapted)
        if (routing := self._model_runner.routing()) is not None:
            for row, of_token in zip(self._rows, routing, strict=True):
                row.routing.append(of_token[None])
        ids, done = self._batch.sample(logits, self)
        self._next_ids = ids
        if done.any():
            self._drop(done)

    def _drop(self, gone: Sequence[bool] | np.ndarray) -> None:
        """Take rows out of the batch; their lanes are free."""
        leaving = [row.slot for row, leaves in zip(self._rows, gone, strict=True) if leaves]
        if leaving:
            self._cache.release(leaving)
            self._rows = [row for row, leaves in zip(self._rows, gone, strict=True) if not leaves]
            self._batch = None

    # -- after sampling ----------------------------------------------------------------------------------------------

    def record(self, batch: _Batch, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Write a step's tokens down and finish the rows they ended: bool [B]."""
        if not np.isfinite(logprobs).all():  # asked of all at once: number by number it would slow every step
            check_logprobs(self._name, *logprobs.tolist())
        self._token_buffer.write(batch.pages, batch.generated, ids, logprobs)
        batch.generated += 1
        self.generated_tokens += len(ids)
        full = batch.generated >= batch.limits
        stopped = np.zeros(len(ids), dtype=bool)
        if batch.may_stop is not None:
            for index in np.flatnonzero(batch.may_stop[ids]):
                stopped[index] = int(ids[index]) in batch.rows[index].stop_ids
        for index in batch.with_strings:
            stopped[index] |= self._string_completed(batch, index, int(ids[index]))
        for index in batch.penalised:
            batch.rows[index].seen[ids[index]] = True  # type: ignore[index]
        done = full | stopped
        for index in np.flatnonzero(done):
            row = batch.rows[index]
            row.generated = int(batch.generated[index])
            if stopped[index] and row.stop_text is None and self._tokenizer is not None:
                row.stop_text = token_text(self._tokenizer, int(ids[index]))
            self._finish(row, "stop" if stopped[index] else "length")
        return done

    def _string_completed(self, batch: _Batch, index: int, token: int) -> bool:
        row, count = batch.rows[index], int(batch.generated[index])
        assert row.stops is not None
        if count < row.request.sampling.min_tokens or not row.stops.may_end_at(token):
            return False
        row.stop_text = row.stops.find(
            self._token_buffer.tail(row.buffer_row, max(0, count - row.stops.max_tail_tokens), count)
        )
        return row.stop_text is not None


class _Batch:
    """The state that stays the same between steps as long as the same rows run, as arrays [B]."""

    def __init__(self, rows: Sequence[TrackedRequest], model_runner: ModelRunner):
        self.rows = rows
        generated = [row.generated for row in rows]
        params = [row.request.sampling for row in rows]
        self._sampler = RowSampler(params, [row.request.seed for row in rows], generated, model_runner.device)
        self.pages = np.array([row.buffer_row for row in rows])
        self.generated = np.array(generated)
        self.reread = np.array([row.num_reprefilled for row in rows])
        self.adapted = adapted_rows([row.key.adapter for row in rows], [1] * len(rows), model_runner.device)
        self.limits = np.array([row.limit for row in rows])
        self.with_strings = [index for index, row in enumerate(rows) if row.stops is not None]
        self.penalised = [index for index, row in enumerate(rows) if row.seen is not None]
        self._below_min_tokens = [index for index, row in enumerate(rows) if row.min_tokens_forbidden is not None]
        ends = set().union(*(row.stop_ids for row in rows))
        self.may_stop: np.ndarray | None = None
        if ends:
            self.may_stop = np.zeros(model_runner.vocab_size, dtype=bool)
            self.may_stop[list(ends)] = True

    def sample(self, logits: Tensor, scheduler: Scheduler) -> tuple[Tensor, np.ndarray]:
        """Sample and record a token for each row; returns ids [B] on the device, and bool [B]: which rows are done."""
        forbidden = [
            (index, self.rows[index].min_tokens_forbidden)
            for index in self._below_min_tokens
            if self.generated[index] < self.rows[index].request.sampling.min_tokens
        ]
        seen = [self.rows[index].seen for index in self.penalised]
        sampled = self._sampler(logits, seen, forbidden)  # type: ignore[arg-type]
        # One transfer from the device; float64 holds every id exactly.
        columns = torch.stack((sampled.ids.double(), sampled.logprobs.double(), sampled.full_logprobs.double()))
        ids, *logprobs = columns.cpu().numpy()
        done = scheduler.record(self, ids.astype(np.int64), np.stack(logprobs))
        for row, count in zip(self.rows, self.generated.tolist(), strict=True):
            row.generated = count
        return sampled.ids, done
