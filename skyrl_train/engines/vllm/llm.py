"""A `vllm.LLM` that the user made, as an engine that samples and scores; and vLLM's outputs of a completion."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from vllm import LLM, SamplingParams as VLLMSamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput

from skyrl_train.data.token_arrays import to_logprob_array, to_token_array
from skyrl_train.engines.base import SAMPLING_PARAM_NAMES, Capabilities, Completion, SampleRequest, SamplingParams
from skyrl_train.errors import ConfigError, UnsupportedParameter

_ADVICE = "Pass the model's path to vLLMWrapper, whose log-probs are exact for all parameters."


class LLMEngine:
    """An engine that calls `LLM.generate`, one call at a time.

    The LLM stays the user's: it gets no weight updates, and `close` does nothing.

    vLLM reports log-probs before temperature and penalties (its `logprobs_mode` "raw_logprobs", the default) or after
    truncation. Parameters with which these differ from the log-probs that wrappers promise are refused.
    """

    def __init__(self, llm: LLM):
        """Read the limits and the kind of log-probs of an LLM. Raises ConfigError for one that reports logits."""
        self._llm, self._lock = llm, threading.Lock()
        config = llm.llm_engine.model_config
        mode = config.logprobs_mode
        if mode not in ("raw_logprobs", "processed_logprobs"):
            raise ConfigError(
                f"logprobs_mode={mode!r}: this vllm.LLM reports logits in place of log-probs. Make it with "
                "logprobs_mode='raw_logprobs', the default."
            )
        self._is_raw = mode == "raw_logprobs"
        self.capabilities = Capabilities(
            name="vllm.LLM",
            sampling=frozenset(SAMPLING_PARAM_NAMES),
            max_model_len=config.max_model_len,
            score_temperature=False,
        )

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Sample a completion for each request. Raises UnsupportedParameter if its log-probs would not be exact."""
        for request in requests:
            self._check(request.sampling)
        params = [self._params(request) for request in requests]
        outputs = await asyncio.to_thread(self._call, [request.token_ids.tolist() for request in requests], params)
        return [self._completion(request, out.outputs[0]) for request, out in zip(requests, outputs, strict=True)]

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-probs of all tokens but the first. Raises UnsupportedParameter for another temperature."""
        if temperature != 1.0:
            raise UnsupportedParameter(f"vllm.LLM scores at temperature 1 only, not at {temperature}. {_ADVICE}")
        params = VLLMSamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
        outputs = await asyncio.to_thread(self._call, [list(row) for row in token_ids], params)
        return [
            [found[token].logprob for token, found in zip(row[1:], out.prompt_logprobs[1:], strict=True)]
            for row, out in zip(token_ids, outputs, strict=True)
        ]

    async def close(self) -> None:
        """Do nothing: the LLM belongs to the caller."""

    def _call(self, rows: list[list[int]], params: Any) -> Any:
        with self._lock:
            return self._llm.generate([{"prompt_token_ids": row} for row in rows], params, use_tqdm=False)

    def _check(self, sampling: SamplingParams) -> None:
        off = {"top_p": 1.0, "top_k": 0, "min_p": 0.0}
        if self._is_raw:
            off = {"temperature": 1.0, "repetition_penalty": 1.0}
        for name, value in off.items():
            given = getattr(sampling, name)
            if given != value and (name, given) != ("temperature", 0.0):
                raise UnsupportedParameter(f"The log-probs of this vllm.LLM leave out {name}={given}. {_ADVICE}")

    def _params(self, request: SampleRequest) -> Any:
        values = {name: getattr(request.sampling, name) for name in SAMPLING_PARAM_NAMES}
        values |= {name: list(values[name]) for name in ("stop", "stop_token_ids")}
        return VLLMSamplingParams(**values, seed=request.seed % 2**63, logprobs=0, detokenize=bool(values["stop"]))

    def _completion(self, request: SampleRequest, out: Any) -> Completion:
        ids = to_token_array(out.token_ids)
        nats = to_logprob_array([found[i].logprob for i, found in zip(out.token_ids, out.logprobs, strict=True)])
        stopped = out.stop_reason if isinstance(out.stop_reason, str) else None
        return Completion(request.request_id, ids, nats, nats, out.finish_reason, [], stopped)


def to_request_output(
    request: SampleRequest,
    text: str | None,
    prompt_logprobs: Sequence[float] | None,
    completions: Sequence[Completion],
    texts: Sequence[str],
    *,
    logprobs: bool,
) -> RequestOutput:
    """Return vLLM's output of a prompt and its completions.

    Args:
        request: The request of the first completion.
        text: The prompt as text, or None.
        prompt_logprobs: Log-probs of the prompt's tokens after the first, or None.
        completions: The sampled completions.
        texts: Their texts.
        logprobs: True to include the log-probs of sampled tokens, before truncation.
    """
    outputs = []
    for index, (done, answer) in enumerate(zip(completions, texts, strict=True)):
        ids, nats = done.token_ids.tolist(), done.full_logprobs.tolist()
        own = [{token: Logprob(value)} for token, value in zip(ids, nats, strict=True)] if logprobs else None
        total = sum(nats) if logprobs else None
        outputs.append(
            CompletionOutput(
                index, answer, ids, total, own, finish_reason=str(done.stop_reason), stop_reason=done.stop_text
            )
        )
    ids = list(map(int, request.token_ids))
    scores: list[dict[int, Logprob] | None] | None = None
    if prompt_logprobs is not None:
        scores = [None, *({token: Logprob(value)} for token, value in zip(ids[1:], prompt_logprobs, strict=True))]
    return RequestOutput(request.group, text, ids, scores, outputs, finished=True)
