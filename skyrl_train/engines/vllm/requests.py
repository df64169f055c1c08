"""Requests of the vLLM engine, and the sinks that receive vLLM's outputs. Imports vLLM: see engine.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, TopLogProbs, VersionSpan
from skyrl_train.engines.sampling_params import check_logprobs


class VLLMCall:
    """One call of `generate`, which ends when all of its entries have their output, or when one fails."""

    def __init__(self, requests: Sequence[SampleRequest], build: Callable[[SampleRequest], EngineCoreRequest]):
        """Build all requests of a call, whose caller does not wait yet.

        Args:
            requests: The requests.
            build: Converts a request. Its exceptions propagate, so one rejected request fails the whole call.
        """
        self.entries = [VLLMRequest(request, build(request), self) for request in requests]
        self.is_done = False
        self._future: asyncio.Future[None] | None = None
        """Only the event loop of the caller completes it; see `resolve_calls`."""
        self._error: Exception | None = None
        self._unfinished = len(self.entries)

    def entry_done(self) -> bool:
        """Count an entry that has its output. Return True if it was the last one."""
        self._unfinished -= 1
        was_done, self.is_done = self.is_done, self.is_done or not self._unfinished
        return self.is_done and not was_done

    def fail(self, error: Exception) -> bool:
        """End the call with an error. Return False if it has already ended."""
        if self.is_done:
            return False
        self.is_done, self._error = True, error
        return True

    def future(self) -> asyncio.Future[None]:
        """Return a future of the running event loop, which ends with the call. Create it before the call starts."""
        self._future = asyncio.get_running_loop().create_future()
        return self._future

    @property
    def loop(self) -> asyncio.AbstractEventLoop | None:
        """The event loop of the caller; None if nobody waits."""
        return None if self._future is None else self._future.get_loop()

    def resolve(self) -> None:
        """Complete the future. Runs on the event loop."""
        assert self._future is not None
        if self._future.done():
            return
        if self._error is None:
            self._future.set_result(None)
        else:
            self._future.set_exception(self._error)


def resolve_calls(calls: Sequence[VLLMCall]) -> None:
    """Complete the futures of calls that have ended, from another thread: with one wake-up of each event loop.

    A wake-up releases the GIL, which the thread gets back only after a while if the loop is busy.
    """
    by_loop: dict[asyncio.AbstractEventLoop, list[VLLMCall]] = {}
    for call in calls:
        if call.loop is not None:
            by_loop.setdefault(call.loop, []).append(call)
    for loop, ended in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed, so nobody waits
            loop.call_soon_threadsafe(_resolve_all, ended)


def _resolve_all(calls: Sequence[VLLMCall]) -> None:
    for call in calls:
        call.resolve()


class VLLMRequest:
    """A request and the sink of its final output."""

    def __init__(self, request: SampleRequest, core_request: EngineCoreRequest, call: VLLMCall):
        """Track a request.

        Args:
            request: The request.
            core_request: The same request in vLLM's form.
            call: The call that the request belongs to.
        """
        self.id = request.request_id
        self.request = request
        self.call = call
        self.core_request = core_request
        """The request in vLLM's form, for the weights and adapters at the time of its last conversion."""
        self.output: RequestOutput | None = None
        self.running_s = 0.0
        """Seconds for which the request ran; set when it ends."""

    def put(self, output: RequestOutput) -> None:
        """Store the final output. vLLM calls this."""
        self.output = output

    def put_empty(self) -> None:
        """Store an empty output with finish_reason "abort", for a request that never reached vLLM."""
        empty = CompletionOutput(0, "", [], None, None, finish_reason="abort")
        self.put(RequestOutput(self.id, None, self.request.token_ids.tolist(), None, [empty], finished=True))

    def completion(self, engine: str, decode: Callable[[int], str | None]) -> Completion:
        """Convert vLLM's output to a Completion.

        Args:
            engine: The engine's name, for error messages.
            decode: Returns the text of a token id, for `Completion.stop_text`.

        Raises:
            EngineError: A log-prob is not finite.
        """
        assert self.output is not None
        sampled = self.output.outputs[0]
        columns: Any = sampled.logprobs or SampledLogProbs()
        count = len(sampled.token_ids)
        behavior, full = np.frombuffer(columns.both, np.float32).reshape(-1, 2)[:count].T.copy()
        check_logprobs(engine, behavior, full)
        stop_text = None
        if sampled.finish_reason == "stop":
            stop = sampled.stop_reason
            stop_text = stop if isinstance(stop, str) else decode(sampled.token_ids[-1])
        return Completion(
            request_id=self.id,
            token_ids=to_token_array(sampled.token_ids),
            logprobs=behavior,
            full_logprobs=full,
            stop_reason=sampled.finish_reason or "abort",
            versions=[VersionSpan(span.start, span.end, int(span.version)) for span in sampled.weight_versions or ()],
            stop_text=stop_text,
            running_s=self.running_s,
            routing=sampled.routed_experts,
            top_logprobs=columns.top_logprobs(count),
        )


class SampledLogProbs:
    """A replacement of vLLM's LogprobsProcessor that collects a request's log-probs as bytes.

    vLLM's own class creates Python objects for every token, which takes a tenth of the CPU time of a step with hundreds
    of requests.
    """

    prompt_logprobs = prompt_token_id_logprobs = cumulative_logprob = None

    def __init__(self, num_top: int = 0):
        """Create a collector for a request that asks for `num_top` of the most likely tokens at each position."""
        self.both = bytearray()
        """float32 [tokens, 2]: the first two columns of DualLogprobSampler."""
        self._num_top = num_top
        self._top_ids: list[np.ndarray] = []
        self._top_logprobs: list[np.ndarray] = []

    @property
    def logprobs(self) -> SampledLogProbs:
        """This object, which vLLM passes on as the log-probs of the final output."""
        return self

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Append the log-probs of a step. vLLM calls this."""
        if (new := output.new_logprobs) is None:
            return
        columns = new.logprobs
        self.both += columns.tobytes() if columns.shape[1] == 2 else columns[:, :2].tobytes()
        if self._num_top:
            self._top_ids.append(new.logprob_token_ids[:, 2 : 2 + self._num_top].copy())
            self._top_logprobs.append(columns[:, 2 : 2 + self._num_top].copy())

    def top_logprobs(self, count: int) -> TopLogProbs | None:
        """Return the most likely tokens at the first `count` positions, or None if there are none."""
        if not self._top_ids:
            return None
        return TopLogProbs(np.concatenate(self._top_ids)[:count], np.concatenate(self._top_logprobs)[:count])


class ScoreSink:
    """A sink for the log-probs of scored sequences."""

    def __init__(self, results: dict[str, list[float]]):
        """Create a sink that writes to `results`: log-probs by request id."""
        self._results = results

    def put(self, output: RequestOutput) -> None:
        """Store the log-probs of all tokens but the first. vLLM calls this."""
        logprobs: Any = output.prompt_logprobs
        self._results[output.request_id] = list(logprobs.logprobs)
