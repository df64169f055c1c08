"""The sampler and stopping rules that all engines share, in SGLang's process. Imports SGLang: see engine.py.

They replace SGLang's own: its sampler supports seeds only in its deterministic mode, applies top-p before it
renormalizes after top-k, and does not penalize prompt tokens. It returns log-probs without truncation, or, with
penalties, none that are scaled by temperature alone.
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
from transformers import PreTrainedTokenizerBase

from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.json_constraint import JsonConstraint, JsonGrammars
from skyrl_train.engines.token_sampler import RowSampler, RowSamplingParams, StopStrings, mask_by_sorting, to_device

BACKEND = "pytorch"
"""Name of SGLang's `sampling_backend` that is replaced."""


def has_modified_distribution(request: SampleRequest) -> bool:
    """True if tokens are sampled from another distribution than softmax(logits / temperature). Greedy is False."""
    params = request.sampling
    truncated = params.top_p < 1 or params.top_k > 0 or params.min_p > 0 or request.json_schema is not None
    return params.temperature > 0 and (truncated or params.repetition_penalty != 1 or params.min_tokens > 0)


def to_sglang_params(request: SampleRequest, max_tokens: int, eos: frozenset[int]) -> dict[str, Any]:
    """Return SGLang's sampling parameters for a request.

    SGLang itself only enforces the length. The other parameters are in `custom_params`, which RequestParams decodes in
    SGLang's process.

    Args:
        request: The request.
        max_tokens: Maximum number of tokens to sample.
        eos: End-of-sequence tokens of the model, which apply unless the request ignores them.
    """
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
            "json_schema": request.json_schema,
        },
    }


class RequestParams:
    """The sampling parameters of one request in SGLang's process, decoded from those of `to_sglang_params`."""

    def __init__(self, custom_params: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase | None):
        """Decode `custom_params`.

        Args:
            custom_params: The request's `custom_params`.
            tokenizer: Decodes tokens for stop strings.
        """
        params: dict[str, Any] = {field.name: custom_params[field.name] for field in fields(SamplingParams)}
        self.params = SamplingParams(**params | {"stop": tuple(custom_params["stop"])})
        self.seed = custom_params["seed"] % 2**64
        self.stop_ids = frozenset(custom_params["stop_token_ids"])
        self.stops = StopStrings(tokenizer, self.params.stop) if self.params.stop else None
        self.json_schema: str | None = custom_params["json_schema"]


def get_request_params(req: Req) -> RequestParams | None:
    """Return the parameters of a request; None for a sequence to score, which has none from `to_sglang_params`."""
    custom_params = req.sampling_params.custom_params
    if not custom_params or "seed" not in custom_params:
        return None
    params: RequestParams | None = getattr(req, "_skyrl_params", None)
    if params is None:
        params = req._skyrl_params = RequestParams(custom_params, _tokenizer)
    return params


class _BatchEntry:
    """A request in a batch, from its prefill on."""

    def __init__(self, req: Req, vocab_size: int, device: str):
        request = get_request_params(req)
        self.params = SamplingParams(max_tokens=1, temperature=0.0) if request is None else request.params
        self.row_params = RowSamplingParams.of(self.params)
        self.seed = 0 if request is None else request.seed
        self.generated = len(req.output_ids)
        """Number of tokens sampled so far, including those that SGLang has not processed yet."""
        self.returns_both = bool(req.return_sampling_mask)
        self.num_top: int = req.logprob.top_logprobs_num if req.return_logprob else 0
        self.constraint: JsonConstraint | None = None
        self.min_tokens_forbidden: Tensor | None = None
        self.seen: Tensor | None = None
        if request is not None and self.params.min_tokens and request.stop_ids:
            stop_ids = [token for token in sorted(request.stop_ids) if token < vocab_size]
            self.min_tokens_forbidden = torch.tensor(stop_ids, dtype=torch.int64, device=device)
        if request is not None and request.json_schema is not None:
            self.constraint = _get_grammars(vocab_size).start(request.json_schema)
            for token in req.output_ids:  # sampled before a retraction
                self.constraint.accept(int(token))
        if self.params.repetition_penalty != 1:
            self.seen = torch.zeros(vocab_size, dtype=torch.bool, device=device)
            self.seen[torch.tensor([*req.origin_input_ids, *req.output_ids], device=device)] = True


class _Batch:
    """The state of steps with the same rows."""

    def __init__(self, rows: Sequence[_BatchEntry], device: torch.device):
        self.rows = rows
        params, seeds = [row.row_params for row in rows], [row.seed for row in rows]
        # On an accelerator `mask_by_sorting` does not synchronize, so SGLang prepares the next step during this one.
        mask = None if device.type == "cpu" else mask_by_sorting
        tops = [row.num_top for row in rows] if any(row.num_top for row in rows) else ()
        self._sampler = RowSampler(params, seeds, [row.generated for row in rows], device, mask, tops)
        self._constrained = [(index, row.constraint) for index, row in enumerate(rows) if row.constraint is not None]
        penalized = [index for index, row in enumerate(rows) if row.seen is not None]
        self._penalized = to_device(penalized, torch.int64, device) if penalized else None
        self._seen = _join_seen([rows[index] for index in penalized])
        self._below_min_tokens = [
            (index, row.min_tokens_forbidden) for index, row in enumerate(rows) if row.min_tokens_forbidden is not None
        ]
        both = [index for index, row in enumerate(rows) if row.returns_both]
        self._both = to_device(both, torch.int64, device) if both else None

    def sample(self, logits: Tensor, output: LogitsProcessorOutput) -> Tensor:
        """Sample one token per row.

        Args:
            logits: [B, V].
            output: SGLang's output, to which the log-probs are added.

        Returns:
            The token ids, int64 [B].
        """
        rows = self.rows
        forbidden = [(i, ids) for i, ids in self._below_min_tokens if rows[i].generated < rows[i].params.min_tokens]
        forbidden += [(index, constraint.forbidden().to(logits.device)) for index, constraint in self._constrained]
        sampled = self._sampler(logits, self._seen, forbidden)
        for index, constraint in self._constrained:  # the next mask needs the token, so this waits for the device
            constraint.accept(int(sampled.ids[index]))
        if self._penalized is not None:
            self._seen.scatter_(1, sampled.ids[self._penalized].unsqueeze(1), True)
        for row in rows:
            row.generated += 1
        output.next_token_logprobs = sampled.full_logprobs
        if sampled.top_ids is not None and sampled.top_logprobs is not None:
            ids, logprobs = iter(sampled.top_ids), iter(sampled.top_logprobs)
            none = logits.new_empty(0)
            output.next_token_top_logprobs_idx = [next(ids)[: row.num_top] if row.num_top else none for row in rows]
            output.next_token_top_logprobs_val = [
                next(logprobs)[: row.num_top] if row.num_top else none for row in rows
            ]
        if self._both is not None:
            output.sampling_mask_output = _as_mask(sampled.ids[self._both], sampled.logprobs[self._both])
        return sampled.ids


def _join_seen(rows: Sequence[_BatchEntry]) -> Tensor:
    """Return the seen tokens of rows with a repetition penalty, bool [rows, V], and let each row have its part."""
    if not rows:
        return torch.empty(0)
    joined = torch.stack([row.seen for row in rows if row.seen is not None])
    for row, seen in zip(rows, joined, strict=True):
        row.seen = seen
    return joined


def _as_mask(ids: Tensor, logprobs: Tensor) -> SamplingMaskOutput:
    """Return log-probs of the distribution sampled from as SGLang's sampling mask, whose other fields are unused."""
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


# SGLang provides these three hooks. `custom_params` is a field of its batches that is otherwise unused here.


def _on_create_batch(info: SamplingBatchInfo, batch: Any, vocab_size: int) -> None:
    info.custom_params = [_BatchEntry(req, vocab_size, info.device) for req in batch.reqs]


def _on_merge_batch(info: SamplingBatchInfo, other: SamplingBatchInfo) -> None:
    info.custom_params = [*info.custom_params, *other.custom_params]


def _on_filter_batch(info: SamplingBatchInfo, keep: Sequence[int], keep_on_device: Tensor) -> None:
    info.custom_params = [info.custom_params[index] for index in keep]


_tokenizer: PreTrainedTokenizerBase | None = None
_stop_tokens: frozenset[int] = frozenset()
_grammars: JsonGrammars | None = None


def _get_grammars(vocab_size: int) -> JsonGrammars:
    global _grammars
    if _grammars is None:
        _grammars = JsonGrammars("sglang", _tokenizer, vocab_size, _stop_tokens)
    return _grammars


_sglang_update_finish_state = Req.update_finish_state


def _update_finish_state(req: Req, new_tokens: int = 1) -> None:
    """Set the request's finish reason if its newest token ends it. SGLang calls this after appending a token."""
    request = get_request_params(req)
    if request is None or req.finished() or req.to_finish is not None:
        _sglang_update_finish_state(req, new_tokens)
        return
    token, count = int(req.output_ids[-1]), len(req.output_ids)
    text = None
    if request.stops is not None and count >= request.params.min_tokens and request.stops.may_end_at(token):
        text = request.stops.find(list(req.output_ids[-request.stops.max_tail_tokens :]))
    if text is not None:
        req.finished_reason = FINISH_MATCHED_STR(matched=text)
    elif token in request.stop_ids:
        req.finished_reason = FINISH_MATCHED_TOKEN(matched=token)
    elif count >= req.sampling_params.max_new_tokens:
        req.finished_reason = FINISH_LENGTH(length=count)


def install_sampler(tokenizer: PreTrainedTokenizerBase | None, stop_tokens: frozenset[int] = frozenset()) -> None:
    """Replace SGLang's sampling and stopping rules in this process with those that all engines here share.

    Args:
        tokenizer: The model's tokenizer; None if no request has stop strings or a schema.
        stop_tokens: The model's end-of-sequence tokens, which may follow complete JSON.
    """
    global _tokenizer, _stop_tokens
    _tokenizer, _stop_tokens = tokenizer, stop_tokens
    sglang_sampler.register_sampler_backend(BACKEND, _Sampler)
    SamplingBatchInfo.adjusted_from_schedule_batch = _on_create_batch
    SamplingBatchInfo.adjusted_merge_batch = _on_merge_batch
    SamplingBatchInfo.adjusted_filter_batch = _on_filter_batch
    Req.update_finish_state = _update_finish_state
