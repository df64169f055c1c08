"""Sampling and stopping inside SGLang's process, as in all our engines; replaces SGLang's own.

SGLang's sampler supports seeds only in its deterministic mode, applies top-p before top-k is renormalised, does not
penalise prompt tokens, and returns log-probs without the truncation or, with penalties, no temperature-only ones.
Imports SGLang: see engine.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

import torch
from sglang.srt.layers import sampler as sglang_sampler
from sglang.srt.layers.logits_processor import LogitsProcessorOutput, SamplingMaskOutput, SamplingMaskStatus
from sglang.srt.managers.schedule_batch import FINISH_LENGTH, FINISH_MATCHED_STR, FINISH_MATCHED_TOKEN, Req
from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
from torch import Tensor

from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.token_sampler import RowSampler, StopStrings, mask_by_sorting, to_device

BACKEND = "pytorch"
"""The `sampling_backend` to replace."""


def has_altered_distribution(params: SamplingParams) -> bool:
    """Whether tokens are sampled from a distribution other than softmax(logits / temperature)."""
    truncated = params.top_p < 1 or params.top_k > 0 or params.min_p > 0
    return params.temperature > 0 and (truncated or params.repetition_penalty != 1 or params.min_tokens > 0)


def to_sglang_params(request: SampleRequest, max_tokens: int, eos: frozenset[int]) -> dict[str, Any]:
    """SGLang's sampling parameters for a request: SGLang itself decides only the length."""
    params = request.sampling
    stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else eos)
    return {
        "max_new_tokens": max_tokens,
        "top_k": 1,
        "custom_params": {
            **asdict(params),
            "stop": list(params.stop),
            "stop_token_ids": sorted(stop_ids),
            "seed": request.seed % 2**63 - (request.seed % 2**64 >= 2**63) * 2**63,
        },
    }


class RequestParams:
    """The sampling parameters of one request, decoded from those of `for_sglang`."""

    def __init__(self, asked: Mapping[str, Any], tokenizer: Any):
        params: dict[str, Any] = {field.name: asked[field.name] for field in fields(SamplingParams)}
        self.params = SamplingParams(**params | {"stop": tuple(asked["stop"])})
        self.seed = asked["seed"] % 2**64
        self.stop_ids = frozenset(asked["stop_token_ids"])
        self.stops = StopStrings(tokenizer, self.params.stop) if self.params.stop else None


def get_request_params(req: Req) -> RequestParams | None:
    """The rules of a request; None if it is not from `for_sglang`: a sequence to score."""
    asked = req.sampling_params.custom_params
    if not asked or "seed" not in asked:
        return None
    rules: RequestParams | None = getattr(req, "_rules", None)
    if rules is None:
        rules = req._rules = RequestParams(asked, _tokenizer)
    return rules


class _BatchEntry:
    """A request in a batch, from its prefill on."""

    def __init__(self, req: Req, vocab_size: int, device: str):
        rules = get_request_params(req)
        self.params = SamplingParams(max_tokens=1, temperature=0.0) if rules is None else rules.params
        self.seed = 0 if rules is None else rules.seed
        self.generated = len(req.output_ids)
        """Number of tokens sampled so far, including those that SGLang has not processed yet."""
        self.returns_both = bool(req.return_sampling_mask)
        self.min_tokens_forbidden: Tensor | None = None
        self.seen: Tensor | None = None
        if rules is not None and self.params.min_tokens and rules.stop_ids:
            ends = [end for end in sorted(rules.stop_ids) if end < vocab_size]
            self.min_tokens_forbidden = torch.tensor(ends, dtype=torch.int64, device=device)
        if self.params.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor([*req.origin_input_ids, *req.output_ids], device=device)] = True


class _Batch:
    """The state that stays the same between steps as long as the same rows run."""

    def __init__(self, rows: Sequence[_BatchEntry], device: torch.device):
        self.rows = rows
        params, seeds = [row.params for row in rows], [row.seed for row in rows]
        mask = None if device.type == "cpu" else mask_by_sorting  # so that the next step is prepared meanwhile
        self._sampler = RowSampler(params, seeds, [row.generated for row in rows], device, mask)
        self._penalised = [(index, row.seen) for index, row in enumerate(rows) if row.seen is not None]
        self._below_min_tokens = [
            (index, row.min_tokens_forbidden) for index, row in enumerate(rows) if row.min_tokens_forbidden is not None
        ]
        both = [index for index, row in enumerate(rows) if row.returns_both]
        self._both = to_device(both, torch.int64, device) if both else None

    def sample(self, logits: Tensor, output: LogitsProcessorOutput) -> Tensor:
        """Sample one token per row: [B, V] -> int64 [B]; log-probs are put into `output`."""
        rows = self.rows
        forbidden = [(i, ends) for i, ends in self._below_min_tokens if rows[i].generated < rows[i].params.min_tokens]
        seen = [seen for _, seen in self._penalised]
        sampled = self._sampler(logits, seen, forbidden)
        for index, mine in self._penalised:
            mine.index_fill_(0, sampled.ids[index : index + 1], True)
        for row in rows:
            row.generated += 1
        output.next_token_logprobs = sampled.full_logprobs
        if self._both is not None:
            output.sampling_mask_output = _as_mask(sampled.ids[self._both], sampled.logprobs[self._both])
        return sampled.ids


def _as_mask(ids: Tensor, logprobs: Tensor) -> SamplingMaskOutput:
    """Log-probs of the distribution sampled from, in the form in which SGLang returns them; the mask is not used."""
    ones = torch.ones(len(ids), dtype=torch.int32, device=ids.device)
    return SamplingMaskOutput(
        token_ids=ids.to(torch.int32).unsqueeze(1),
        lengths=ones,
        selected_logprobs=logprobs,
        support_logprobs=None,
        statuses=ones * int(SamplingMaskStatus.OK),
    )


class _Sampler(sglang_sampler.Sampler):
    def __init__(self) -> None:
        super().__init__()
        self._batch: _Batch | None = None

    def forward(
        self,
        logits_output: LogitsProcessorOutput,
        sampling_info: SamplingBatchInfo,
        return_logprob: bool,
        top_logprobs_nums: Sequence[int],
        token_ids_logprobs: Sequence[Sequence[int]],
        positions: Tensor,
    ) -> Tensor:
        rows, logits = sampling_info.custom_params, logits_output.next_token_logits
        if self._batch is None or self._batch.rows is not rows:
            self._batch = _Batch(rows, logits.device)
        return self._batch.sample(logits, logits_output)


# SGLang provides these three hooks. `custom_params` is one of its fields that is otherwise unused here.


def _on_create_batch(info: SamplingBatchInfo, batch: Any, vocab_size: int) -> None:
    info.custom_params = [_BatchEntry(req, vocab_size, info.device) for req in batch.reqs]


def _on_merge_batch(info: SamplingBatchInfo, other: SamplingBatchInfo) -> None:
    info.custom_params = [*info.custom_params, *other.custom_params]


def _on_filter_batch(info: SamplingBatchInfo, keep: Sequence[int], keep_on_device: Tensor) -> None:
    info.custom_params = [info.custom_params[index] for index in keep]


_tokenizer: Any = None
_finish_sglang = Req.update_finish_state


def _update_finish_state(req: Req, new_tokens: int = 1) -> None:
    """Called after a token was appended: decides whether it ends the request."""
    rules = get_request_params(req)
    if rules is None or req.finished() or req.to_finish is not None:
        _finish_sglang(req, new_tokens)
        return
    token, count = int(req.output_ids[-1]), len(req.output_ids)
    text = None
    if rules.stops is not None and count >= rules.params.min_tokens and rules.stops.may_end_at(token):
        text = rules.stops.find(list(req.output_ids[-rules.stops.max_tail_tokens :]))
    if text is not None:
        req.finished_reason = FINISH_MATCHED_STR(matched=text)
    elif token in rules.stop_ids:
        req.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
    elif count >= req.sampling_params.max_new_tokens:
        req.finished_reason = FINISH_LENGTH(length=count)


def install_sampler(tokenizer: Any) -> None:
    """Replace sampling and stopping in this process. Without a tokenizer there are no stop strings."""
    global _tokenizer
    _tokenizer = tokenizer
    sglang_sampler.register_sampler_backend(BACKEND, _Sampler)
    SamplingBatchInfo.adjusted_from_schedule_batch = _on_create_batch
    SamplingBatchInfo.adjusted_merge_batch = _on_merge_batch
    SamplingBatchInfo.adjusted_filter_batch = _on_filter_batch
    Req.update_finish_state = _update_finish_state
