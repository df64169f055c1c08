"""Continuous batching of the transformers engine: admission, decode steps, completions.

Everything here runs on the engine's thread. Only deadlines depend on time, so an idle engine takes the same steps for
the same list of requests and returns bit-identical results.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from skyrl_train.data.token_arrays import LogProbs, Tokens, to_int_tuple, to_logprob_array, to_token_array
from skyrl_train.data.token_texts import token_text
from skyrl_train.engines.base import Completion, SampleRequest, TopLogProbs, VersionSpan
from skyrl_train.engines.json_constraint import JsonConstraint, JsonGrammars
from skyrl_train.engines.lifecycle import RequestDeadlines
from skyrl_train.engines.sampling_params import check_logprobs, check_unique_request_ids
from skyrl_train.engines.token_sampler import RowSampler, StopStrings
from skyrl_train.engines.transformers.adapters import adapted_rows
from skyrl_train.engines.transformers.cache import DecodeCache, NewPrompt, PromptKey
from skyrl_train.engines.transformers.model_runner import ModelRunner

_PREFILL_TOKENS = 8192
"""Maximum number of prompt tokens in one forward pass, unless one prompt is longer. It bounds activation memory."""


class GenerateCall:
    """One call of `generate`, with the future of its completions."""

    def __init__(self, requests: Sequence[SampleRequest]):
        """Create a tracked request for each of `requests`, and a future that callers cannot cancel."""
        self.future: Future[list[Completion]] = Future()
        """The completions, in request order, once every request has ended."""
        # A running future cannot be cancelled while the engine's thread uses it.
        self.future.set_running_or_notify_cancel()
        self.requests = [TrackedRequest(request, self) for request in requests]
        self._num_unfinished = len(self.requests)

    def request_done(self) -> None:
        """Count one request as ended. The last one completes the future, unless the call has failed."""
        self._num_unfinished -= 1
        if not self._num_unfinished and not self.future.done():
            self.future.set_result([row.completion for row in self.requests if row.completion is not None])

    def fail(self, error: Exception) -> None:
        """Raise `error` to the caller that waits for this call.

        Does nothing if the call has finished or was cancelled.
        """
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(eq=False, slots=True)
class TrackedRequest:
    """A request and its state, from submission to completion."""

    request: SampleRequest
    call: GenerateCall
    key: PromptKey = field(default_factory=lambda: PromptKey(()))
    """The tokens to prefill on admission: the prompt, and after a retraction also the sampled tokens."""
    limit: int = 0
    """Maximum number of tokens to sample: max_tokens, or less if the model's maximum length is reached first."""
    stop_ids: frozenset[int] = frozenset()
    """All token ids that end the request, including end-of-sequence."""
    min_tokens_forbidden: Tensor | None = None
    """Token ids that must not be sampled before min_tokens; None if there are none."""
    stops: StopStrings | None = None
    seen: Tensor | None = None
    """The tokens of prompt and response so far, bool [V]; None without a repetition penalty."""
    buffer_row: int = -1
    """Row in the SampledTokenBuffer; -1 before the request is first admitted."""
    slot: int = -1
    """Slot in the DecodeCache; -1 before the request is first admitted."""
    generated: int = 0
    stop_text: str | None = None
    version_changes: list[tuple[int, int]] = field(default_factory=list)
    """(index of the first sampled token, version) of every weight version that the request has used."""
    routing: list[np.ndarray] = field(default_factory=list)
    """The experts of consecutive tokens from the prompt's first one on, int16 [tokens, layers, k]; empty if the engine
    does not record them."""
    constraint: JsonConstraint | None = None
    """The state of the request's `json_schema`."""
    top_logprobs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """Token ids and log-probs of the most likely tokens at each position, each [k], if the request asks for them."""
    completion: Completion | None = None

    @property
    def num_reprefilled(self) -> int:
        """Number of sampled tokens that were prefilled together with the prompt, after a retraction."""
        return len(self.key.token_ids) - len(self.request.token_ids)

    def admit(self, buffer: SampledTokenBuffer, version: int, routing: np.ndarray | None) -> None:
        """Record that the request starts to run, for the first time or after a retraction.

        Args:
            buffer: Buffer in which the request gets a row, unless it has one.
            version: Version of the weights.
            routing: Experts of the prefilled tokens, int16 [tokens, layers, k], or None. Tokens that were sampled
                before a retraction keep the experts that they had then.
        """
        if routing is not None:
            self.routing.append(routing[sum(map(len, self.routing)) :])
        if self.buffer_row < 0:
            self.buffer_row = buffer.allocate()
        if not self.version_changes or self.version_changes[-1][1] != version:
            self.version_changes.append((self.generated, version))

    def retract(self, buffer: SampledTokenBuffer) -> None:
        """Prepare a running request for its return to the queue: its next prefill includes the tokens sampled so far.

        Args:
            buffer: Buffer that holds the sampled tokens.
        """
        sampled, _, _ = buffer.read(self.buffer_row, self.generated)
        self.key = self.key._replace(token_ids=to_int_tuple(np.concatenate((self.request.token_ids, sampled))))

    def finish(self, buffer: SampledTokenBuffer, reason: str, running_s: float) -> None:
        """Set `completion` and free the request's row in `buffer`.

        Args:
            buffer: The buffer with the sampled tokens.
            reason: The completion's `stop_reason`.
            running_s: Seconds for which the request ran.
        """
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
        routing = np.concatenate(self.routing)[self.request.known_routing :] if self.routing else None
        self.completion = Completion(
            request_id,
            ids,
            logprobs,
            full,
            reason,
            spans,
            self.stop_text,
            running_s,
            routing,
            self._take_top_logprobs(),
        )
        if self.buffer_row >= 0:
            buffer.free(self.buffer_row)

    def _take_top_logprobs(self) -> TopLogProbs | None:
        if not self.top_logprobs:
            return None
        ids, logprobs = zip(*self.top_logprobs, strict=True)
        return TopLogProbs(to_token_array(ids), to_logprob_array(logprobs))


class SampledTokenBuffer:
    """The sampled tokens and log-probs of all running requests, in shared arrays with one row per request."""

    def __init__(self) -> None:
        self._ids = np.zeros((0, 64), dtype=np.int64)
        self._logprobs = np.zeros((2, 0, 64), dtype=np.float32)
        self._free: list[int] = []

    def allocate(self) -> int:
        """Return the index of a free row, enlarging the arrays if there is none."""
        if not self._free:
            count = len(self._ids)
            added = max(16, count)
            self._ids = np.pad(self._ids, ((0, added), (0, 0)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, added), (0, 0)))
            self._free = list(range(count, count + added))
        return self._free.pop()

    def write(self, rows: np.ndarray, columns: np.ndarray, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Write one token for each of some requests.

        Args:
            rows: Rows of the requests, [B].
            columns: Index of the token in its response, [B].
            ids: Token ids, [B].
            logprobs: Log-probs of the distribution sampled from, and full log-probs: [2, B].
        """
        if len(columns) and (max_column := int(columns.max())) >= self._ids.shape[1]:
            added = max(max_column + 1 - self._ids.shape[1], self._ids.shape[1])
            self._ids = np.pad(self._ids, ((0, 0), (0, added)))
            self._logprobs = np.pad(self._logprobs, ((0, 0), (0, 0), (0, added)))
        self._ids[rows, columns] = ids
        self._logprobs[:, rows, columns] = logprobs

    def read(self, row: int, count: int) -> tuple[Tokens, LogProbs, LogProbs]:
        """Return copies of a request's first `count` tokens, log-probs and full log-probs, each [count]."""
        logprobs, full = (values[row, :count].copy() for values in self._logprobs)
        return self.read_ids(row, count), logprobs, full

    def read_ids(self, row: int, count: int) -> Tokens:
        """Return a copy of a request's first `count` tokens."""
        return self._ids[row, :count].astype(np.int32)

    def get_ids(self, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Return the token ids at (rows[i], columns[i]), int64 [B].

        Args:
            rows: Indices of rows [B].
            columns: Positions of the tokens in their rows [B].
        """
        return self._ids[rows, columns]

    def get_range(self, row: int, start: int, stop: int) -> list[int]:
        """Return the token ids [start, stop) of a row."""
        return self._ids[row, start:stop].tolist()

    def free(self, row: int) -> None:
        """Make a row available to another request."""
        self._free.append(row)


class Scheduler:
    """A scheduler that queues requests and runs them as rows of one batch, step by step."""

    def __init__(
        self,
        model_runner: ModelRunner,
        tokenizer: PreTrainedTokenizerBase | None,
        eos: frozenset[int],
        deadlines: RequestDeadlines,
        *,
        max_num_seqs: int,
        max_model_len: int,
        name: str,
        grammars: JsonGrammars | None,
    ):
        """Create a scheduler without requests.

        Args:
            model_runner: Runs the forward passes.
            tokenizer: Decodes tokens for stop strings and `Completion.stop_text`; None if neither is needed.
            eos: The model's end-of-sequence tokens.
            deadlines: The engine's record of deadlines. The scheduler adds and removes its requests.
            max_num_seqs: Maximum number of running requests.
            max_model_len: Maximum length of a prompt with its response, in tokens.
            name: The engine's name, for error messages.
            grammars: Grammars of `SampleRequest.json_schema`; None if no request has one.
        """
        self._grammars = grammars
        self._model_runner = model_runner
        self._tokenizer = tokenizer
        self._eos = frozenset(token for token in eos if token < model_runner.vocab_size)
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._name = name
        self._cache = DecodeCache(model_runner.device)
        self._token_buffer = SampledTokenBuffer()
        self._queue: deque[TrackedRequest] = deque()
        self._rows: list[TrackedRequest] = []
        self._batch: _Batch | None = None
        self._prompt_logits: dict[PromptKey, Tensor] = {}
        """The last logits [V] of prompts that queued requests share with admitted ones."""
        self._prompt_routing: dict[PromptKey, np.ndarray] = {}
        """The experts of the same prompts' tokens, if the engine records them."""
        self._stop_strings: dict[tuple[str, ...], StopStrings] = {}
        self._next_ids: Tensor | None = None
        self._finished: list[TrackedRequest] = []
        self._calls: set[GenerateCall] = set()
        """Calls whose futures are not done."""
        self._deadlines = deadlines
        self.version = 0
        self.generated_tokens = self.prefilled_tokens = self.cached_tokens = 0

    @property
    def running(self) -> int:
        """Number of running requests."""
        return len(self._rows)

    @property
    def queued(self) -> int:
        """Number of requests that wait for admission."""
        return len(self._queue)

    def submit(self, call: GenerateCall) -> None:
        """Queue the requests of a call, in the order in which it lists them.

        Raises:
            UnsupportedParameter: A request names an adapter that is not loaded, or an id that another running or
                queued request has.
        """
        active_ids = {row.request.request_id for row in (*self._rows, *self._queue)}
        check_unique_request_ids(self._name, (row.request for row in call.requests), active_ids)
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
        if row.request.json_schema is not None and self._grammars is not None:
            row.constraint = self._grammars.start(row.request.json_schema)

    # -- requests that end for other reasons than the model's output -------------------------------------------------

    def abort(self, request_ids: Iterable[str] | None = None) -> None:
        """Complete requests with their tokens so far and stop_reason "abort".

        Args:
            request_ids: The requests; None for all. Unknown ids are ignored.
        """
        ids = None if request_ids is None else set(request_ids)
        self._abort_if(lambda row: ids is None or row.request.request_id in ids)

    def partial_tokens(self, request_ids: Iterable[str]) -> dict[str, Tokens]:
        """Return the tokens of those of these requests that are running or retracted, by request id."""
        ids = set(request_ids)
        retracted = takewhile(lambda row: row.generated, self._queue)  # they are at the head of the queue
        return {
            row.request.request_id: self._token_buffer.read_ids(row.buffer_row, row.generated)
            for row in (*self._rows, *retracted)
            if row.request.request_id in ids
        }

    def retract(self) -> None:
        """Put running requests back at the head of the queue.

        When they are admitted again, their prompts are prefilled together with their tokens so far.
        """
        for row in self._rows:
            row.retract(self._token_buffer)
        self._queue.extendleft(reversed(self._rows))
        self._rows, self._batch = [], None
        self.reset_prefix_cache()

    def fail(self, error: Exception) -> None:
        """Drop all running and queued requests, and raise `error` in their callers."""
        self._deadlines.clear()  # This includes requests that are being admitted, which are in neither list.
        self._rows, self._batch = [], None
        self._queue.clear()
        self._token_buffer = SampledTokenBuffer()
        self.reset_prefix_cache()
        self._deliver()
        calls, self._calls = self._calls, set()
        for call in calls:
            call.fail(error)

    def reset_prefix_cache(self) -> None:
        """Drop all cached prompts. Running rows keep their keys and values; without running rows memory is freed."""
        self._prompt_logits.clear()
        self._prompt_routing.clear()
        self._cache.forget_prompts()
        if not self._rows:
            self._cache.reset()

    def on_weights_changed(self, version: int) -> None:
        """Record that the model now has weights of `version`, and drop cached prompts.

        Running rows continue with the new weights. They keep the keys, values and states that the old weights computed.
        """
        self.version = version
        for row in self._rows:
            row.version_changes.append((row.generated, version))
        self.reset_prefix_cache()

    def _abort_if(self, predicate: Callable[[TrackedRequest], bool]) -> None:
        aborted = [row for row in (*self._rows, *self._queue) if predicate(row)]
        self._queue = deque(row for row in self._queue if not predicate(row))
        self._drop([predicate(row) for row in self._rows])
        for row in aborted:
            self._finish(row, "abort")
        self._clean_up()

    # -- a step ------------------------------------------------------------------------------------------------------

    def step(self, *, can_admit: bool) -> None:
        """Admit queued requests, then sample one token for every running row.

        Args:
            can_admit: False to leave queued requests in the queue.

        Raises:
            EngineError: Sampled log-probs are not finite.
        """
        while can_admit and self._queue and len(self._rows) < self._max_num_seqs:
            self._admit()
        if self._rows:
            self._decode()
        self._clean_up()

    def _finish(self, row: TrackedRequest, reason: str) -> None:
        row.finish(self._token_buffer, reason, self._deadlines.remove(row.request.request_id))
        self._finished.append(row)

    def _deliver(self) -> None:
        """Complete the callers' futures. This runs last in a step, so that callers see the engine's current state."""
        finished, self._finished = self._finished, []
        for row in finished:
            row.call.request_done()
            if row.call.future.done():
                self._calls.discard(row.call)

    def _clean_up(self) -> None:
        """Compact or reset the cache if rows have ended, then deliver completions."""
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
        """Prefill the next queued requests, sample their first tokens, and allocate slots for those that continue."""
        rows, new_keys = self._next_rows()
        packed, starts = None, {}
        if new_keys:
            packed, offsets, logits = self._model_runner.prefill(new_keys)
            starts = dict(zip(new_keys, offsets, strict=True))
            self._prompt_logits.update(zip(new_keys, logits, strict=True))
            if (routing := self._model_runner.routing()) is not None:
                self._prompt_routing |= {
                    key: routing[start : start + len(key.token_ids)] for key, start in starts.items()
                }
        prompt_tokens = sum(len(row.key.token_ids) for row in rows)
        prefilled_tokens = sum(len(key.token_ids) for key in new_keys)
        self.prefilled_tokens += prefilled_tokens
        self.cached_tokens += prompt_tokens - prefilled_tokens
        for row in rows:
            row.admit(self._token_buffer, self.version, self._prompt_routing.get(row.key))
        logits = torch.stack([self._prompt_logits[row.key] for row in rows])
        _, done = _Batch(rows, self._model_runner).sample(logits, self)
        needed = self._queued_prompts()
        continuing = [row for row, is_done in zip(rows, done, strict=True) if not is_done]
        by_prompt: dict[PromptKey, list[TrackedRequest]] = {}
        for row in continuing:
            by_prompt.setdefault(row.key, []).append(row)
        new_prompts = [NewPrompt(key, len(same), starts.get(key)) for key, same in by_prompt.items()]
        slots = iter(self._cache.allocate_slots(new_prompts, packed, needed)) if new_prompts else iter(())
        for same in by_prompt.values():
            for row in same:
                row.slot = next(slots)
        for by_key in (self._prompt_logits, self._prompt_routing):
            for key in [key for key in by_key if key not in needed]:
                del by_key[key]
        self._next_ids = None
        self._rows = sorted([*self._rows, *continuing], key=lambda row: row.slot)
        self._batch = None

    def _next_rows(self) -> tuple[list[TrackedRequest], list[PromptKey]]:
        """Take the next requests from the queue; return them and those of their prompts that need a prefill."""
        rows: list[TrackedRequest] = []
        new_keys: dict[PromptKey, None] = {}
        tokens = 0
        while self._queue and len(self._rows) + len(rows) < self._max_num_seqs:
            key = self._queue[0].key
            if key not in new_keys and not (key in self._prompt_logits and self._cache.has_prompt(key)):
                if new_keys and tokens + len(key.token_ids) > _PREFILL_TOKENS:
                    break
                new_keys[key] = None
                tokens += len(key.token_ids)
            rows.append(self._queue.popleft())
        return rows, list(new_keys)

    def _decode(self) -> None:
        if self._batch is None:
            self._batch = _Batch(self._rows, self._model_runner)
            self._next_ids = None
        if self._next_ids is None or not self._cache.advance():
            # The newest token of a row is not in the cache yet: this step stores it.
            self._cache.begin([row.slot for row in self._rows], self._batch.generated - self._batch.reprefilled - 1)
        if self._next_ids is None:
            last = self._token_buffer.get_ids(self._batch.buffer_rows, self._batch.generated - 1)
            self._next_ids = torch.from_numpy(last).to(self._model_runner.device)
        logits = self._model_runner.decode(self._next_ids, self._cache, self._batch.adapted)
        if (routing := self._model_runner.routing()) is not None:
            for row, experts in zip(self._rows, routing, strict=True):
                row.routing.append(experts[None])
        ids, done = self._batch.sample(logits, self)
        self._next_ids = ids
        if done.any():
            self._drop(done)

    def _drop(self, dropped: Sequence[bool] | np.ndarray) -> None:
        """Remove the rows for which `dropped` [B] is True from the batch, and free their lanes in the cache."""
        slots = [row.slot for row, is_dropped in zip(self._rows, dropped, strict=True) if is_dropped]
        if slots:
            self._cache.release(slots)
            self._rows = [row for row, is_dropped in zip(self._rows, dropped, strict=True) if not is_dropped]
            self._batch = None

    # -- after sampling ----------------------------------------------------------------------------------------------

    def record(self, batch: _Batch, ids: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
        """Store the tokens of a step and finish the requests that end with them.

        Args:
            batch: The rows of the step.
            ids: The sampled tokens, int64 [B].
            logprobs: Their log-probs and full log-probs, [2, B].

        Returns:
            True for rows that ended, bool [B].

        Raises:
            EngineError: A log-prob is not finite.
        """
        if not np.isfinite(logprobs).all():  # One array operation; a check of each number would slow every step.
            check_logprobs(self._name, *logprobs.tolist())
        self._token_buffer.write(batch.buffer_rows, batch.generated, ids, logprobs)
        batch.generated += 1
        self.generated_tokens += len(ids)
        full = batch.generated >= batch.limits
        stopped = np.zeros(len(ids), dtype=bool)
        if batch.may_stop is not None:
            for index in np.flatnonzero(batch.may_stop[ids]):
                stopped[index] = int(ids[index]) in batch.rows[index].stop_ids
        for index in batch.with_stop_strings:
            stopped[index] |= self._completes_stop_string(batch, index, int(ids[index]))
        for index in batch.penalized:
            batch.rows[index].seen[ids[index]] = True  # type: ignore[index]
        for row, index in batch.constrained:
            row.accept(int(ids[index]))
        done = full | stopped
        for index in np.flatnonzero(done):
            row = batch.rows[index]
            row.generated = int(batch.generated[index])
            if stopped[index] and row.stop_text is None and self._tokenizer is not None:
                row.stop_text = token_text(self._tokenizer, int(ids[index]))
            self._finish(row, "stop" if stopped[index] else "length")
        return done

    def _completes_stop_string(self, batch: _Batch, index: int, token: int) -> bool:
        row, count = batch.rows[index], int(batch.generated[index])
        assert row.stops is not None
        if count < row.request.sampling.min_tokens or not row.stops.may_end_at(token):
            return False
        row.stop_text = row.stops.find(
            self._token_buffer.get_range(row.buffer_row, max(0, count - row.stops.max_tail_tokens), count)
        )
        return row.stop_text is not None


class _Batch:
    """The state of steps with the same rows, as arrays [B]."""

    def __init__(self, rows: Sequence[TrackedRequest], model_runner: ModelRunner):
        self.rows = rows
        generated = [row.generated for row in rows]
        params = [row.request.sampling for row in rows]
        tops = [row.request.top_logprobs for row in rows]
        self._top_rows = [row for row in rows if row.request.top_logprobs]
        self._sampler = RowSampler(
            params,
            [row.request.seed for row in rows],
            generated,
            model_runner.device,
            top_logprobs=tops if self._top_rows else (),
        )
        self.constrained = [(row.constraint, index) for index, row in enumerate(rows) if row.constraint is not None]
        self.buffer_rows = np.array([row.buffer_row for row in rows])
        self.generated = np.array(generated)
        self.reprefilled = np.array([row.num_reprefilled for row in rows])
        self.adapted = adapted_rows([row.key.adapter for row in rows], [1] * len(rows), model_runner.device)
        self.limits = np.array([row.limit for row in rows])
        self.with_stop_strings = [index for index, row in enumerate(rows) if row.stops is not None]
        self.penalized = [index for index, row in enumerate(rows) if row.seen is not None]
        self._below_min_tokens = [index for index, row in enumerate(rows) if row.min_tokens_forbidden is not None]
        stop_ids = set().union(*(row.stop_ids for row in rows))
        self.may_stop: np.ndarray | None = None
        """True for tokens that end at least one of the rows, bool [V]; None if there is no such token."""
        if stop_ids:
            self.may_stop = np.zeros(model_runner.vocab_size, dtype=bool)
            self.may_stop[list(stop_ids)] = True

    def sample(self, logits: Tensor, scheduler: Scheduler) -> tuple[Tensor, np.ndarray]:
        """Sample and record a token for each row.

        Returns:
            The token ids [B] on the device, and True for rows that ended, bool [B].
        """
        forbidden = [
            (index, self.rows[index].min_tokens_forbidden)
            for index in self._below_min_tokens
            if self.generated[index] < self.rows[index].request.sampling.min_tokens
        ]
        forbidden += [(index, constraint.forbidden().to(logits.device)) for constraint, index in self.constrained]
        seen = [self.rows[index].seen for index in self.penalized]
        sampled = self._sampler(logits, seen, forbidden)  # type: ignore[arg-type]
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            tops = zip(self._top_rows, sampled.top_ids.cpu().numpy(), sampled.top_logprobs.cpu().numpy(), strict=True)
            for row, top_ids, top_logprobs in tops:
                count = row.request.top_logprobs
                row.top_logprobs.append((top_ids[:count], top_logprobs[:count]))
        # Copying all columns at once takes one transfer from the device. float64 represents every id exactly.
        columns = torch.stack((sampled.ids.double(), sampled.logprobs.double(), sampled.full_logprobs.double()))
        ids, *logprobs = columns.cpu().numpy()
        done = scheduler.record(self, ids.astype(np.int64), np.stack(logprobs))
        for row, count in zip(self.rows, self.generated.tolist(), strict=True):
            row.generated = count
        return sampled.ids, done
