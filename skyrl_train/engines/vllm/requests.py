"""Requests in the vLLM engine, which vLLM gives its outputs to. Imports vLLM: see engine.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest

from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, VersionSpan
from skyrl_train.engines.sampling_params import check_logprobs


class VLLMCall:
    """One call of generate(): done when all of its entries are."""

    def __init__(self, requests: Sequence[SampleRequest], build: Callable[[SampleRequest], EngineCoreRequest]):
        """`build` raises for one that vLLM refuses, and so for the whole call."""
        self.future: Future[None] = Future()
        self.entries = [VLLMRequest(request, build(request), self) for request in requests]

    def entry_done(self) -> None:
        if not self.future.done() and all(entry.output is not None for entry in self.entries):
            self.future.set_result(None)


class VLLMRequest:
    """One request; vLLM puts its final output here."""

    def __init__(self, request: SampleRequest, built: EngineCoreRequest, call: VLLMCall):
        self.id = request.request_id
        self.request = request
        self.call = call
        self.core_request = built
        """The request as vLLM takes it, for the weights and adapters of when it came."""
        self.output: RequestOutput | None = None
        self.running_s = 0.0
        """Seconds that it ran; set when it is finished."""

    def put(self, output: RequestOutput) -> None:
        """Called by vLLM with the final output."""
        self.output = output

    def put_empty(self) -> None:
        """Set an empty output, for a request that was aborted before vLLM saw it."""
        empty = CompletionOutput(0, "", [], None, None, finish_reason="abort")
        self.put(RequestOutput(self.id, None, self.request.token_ids.tolist(), None, [empty], finished=True))

    def completion(self, engine: str, decode: Callable[[int], str | None]) -> Completion:
        """vLLM's output as a Completion. Raises EngineError if a log-prob is not finite."""
        assert self.output is not None
        sampled = self.output.outputs[0]
        both: Any = sampled.logprobs
        behaviour, full = np.frombuffer(both or b"", np.float32).reshape(-1, 2)[: len(sampled.token_ids)].T.copy()
        check_logprobs(engine, behaviour, full)
        stop_text = None
        if sampled.finish_reason == "stop":
            ended_by = sampled.stop_reason
            stop_text = ended_by if isinstance(ended_by, str) else decode(sampled.token_ids[-1])
        return Completion(
            request_id=self.id,
            token_ids=to_token_array(sampled.token_ids),
            logprobs=behaviour,
            full_logprobs=full,
            stop_reason=sampled.finish_reason or "abort",
            versions=[VersionSpan(span.start, span.end, int(span.version)) for span in sampled.weight_versions or ()],
            stop_text=stop_text,
            running_s=self.running_s,
        )


class SampledLogProbs:
    """Collects a request's log-probs in place of vLLM's LogprobsProcessor, which makes a list's items of each token.

    That is a tenth of the processor time of a step with hundreds of requests.
    """

    prompt_logprobs = prompt_token_id_logprobs = cumulative_logprob = None

    def __init__(self) -> None:
        self.logprobs = bytearray()
        """float32 [tokens, 2]: the sampler's two columns."""

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Called by vLLM with what a step brought."""
        if output.new_logprobs is not None:
            self.logprobs += output.new_logprobs.logprobs.tobytes()


class ScoreSink:
    """Takes the log-probs of all tokens but the first of a scored sequence."""

    def __init__(self, answers: dict[str, list[float]]):
        self._answers = answers

    def put(self, output: RequestOutput) -> None:
        logprobs: Any = output.prompt_logprobs
        self._answers[output.request_id] = list(logprobs.logprobs)
