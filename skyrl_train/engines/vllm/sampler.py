"""Sampling inside vLLM's workers, as in all our engines; replaces vLLM's own. Imports vLLM: see engine.py.

vLLM's sampler has a generator for each request with a seed, so a step's kernels grow in number with its requests; it
applies min-p first, keeps some of the tokens that are tied with the last one kept, and tells one of the two log-probs.
Imported by vLLM's workers alone: what this imports settles whether anything is compiled, see arguments.bind_threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors, SamplerOutput
from vllm.v1.sample.logits_processor import (
    LogitBiasLogitsProcessor,
    LogitsProcessor,
    MinPLogitsProcessor,
    MinTokensLogitsProcessor,
)
from vllm.v1.sample.logits_processor.builtin import process_dict_updates
from vllm.v1.sample.logits_processor.interface import BatchUpdate
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p
from vllm.v1.sample.sampler import Sampler

from skyrl_train.engines.token_sampler import RowSampler, RowSamplingParams, SampledTokens
from skyrl_train.engines.vllm.arguments import SEED
from skyrl_train.errors import ConfigError


def replace_sampler(runner: Any, engine: str) -> None:
    """Let a model runner of vLLM sample as all our engines do. Raises ConfigError if it samples in other ways, too."""
    kind, processors = type(runner.sampler), runner.input_batch.logitsprocs.argmax_invariant
    if kind is not Sampler:
        raise ConfigError(
            f"Engine {engine!r}: vLLM samples by {kind.__module__}.{kind.__name__}, which cannot tell both "
            f"log-probs; it must be {Sampler.__module__}.Sampler: set VLLM_USE_V2_MODEL_RUNNER=0."
        )
    if runner.speculative_config is not None:
        raise ConfigError(
            f"Engine {engine!r}: speculative_config: vLLM then samples by itself, without both log-probs and without "
            "the seeds of requests; leave it out (generator.engine_init_kwargs)."
        )
    if unknown := [type(one).__name__ for one in processors if not isinstance(one, MinPLogitsProcessor)]:
        raise ConfigError(
            f"Engine {engine!r}: logits_processors={unknown}: only those with is_argmax_invariant() false are applied; "
            "leave them out (generator.engine_init_kwargs)."
        )
    rows = BatchTracker(runner.device)
    # Not by vLLM's argument `logits_processors`: for those it waits for the tokens of every step.
    processors.append(rows)
    runner.sampler = DualLogprobSampler(rows)


class BatchTracker(LogitsProcessor):
    """Knows the requests in the rows of vLLM's batch, as vLLM tells its logits processors of every change.

    Its `sampler` draws what each row has next. vLLM appends to a request's list of tokens when it begins a step, at
    first a placeholder, so that the list has the right length before the tokens are known.
    """

    sampler: RowSampler

    def __init__(self, device: torch.device):
        self._device = device
        self._rows: dict[int, tuple[RowSamplingParams, int, Sequence[int]]] = {}
        """Of each row in use: its sampling parameters, its seed, and its tokens so far."""
        self._generated: list[int] = []

    def is_argmax_invariant(self) -> bool:
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called by vLLM before every step."""
        process_dict_updates(self._rows, batch_update, _row)
        rows = [self._rows[index] for index in range(len(self._rows))]
        generated = [len(output) for _, _, output in rows]
        # A row that reads a part of its prompt does not sample: its next number stays the same.
        if batch_update is not None or generated != [count + 1 for count in self._generated]:
            numbers, seeds, _ = zip(*rows, strict=True) if rows else ((), (), ())
            mask = None if self._device.type == "cpu" else apply_top_k_top_p
            self.sampler = RowSampler(numbers, seeds, generated, self._device, mask)
        self._generated = generated


def _row(params: Any, prompt: Any, output: Sequence[int]) -> tuple[RowSamplingParams, int, Sequence[int]]:
    return RowSamplingParams.of(params), (params.extra_args or {}).get(SEED, 0), output


class DualLogprobSampler(Sampler):
    """Returns two log-probs of each sampled token, in the two columns that `logprobs=1` provides.

    The first is of the distribution sampled from (penalties, temperature, top-k, top-p, min-p; 0 if greedy), the second
    of the temperature-scaled logits alone (temperature 1 if greedy).
    """

    def __init__(self, rows: BatchTracker):
        super().__init__("processed_logprobs")
        self._rows = rows

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Sample a token for each row of `logits` [B, V], the rows of the batch."""
        sampler, logits = self._rows.sampler, logits.float()
        scaled = target = sampler.scale(logits)
        if _alters(sampling_metadata):
            altered = self.apply_logits_processors(logits.clone(), sampling_metadata, predict_bonus_token=False)
            target = sampler.scale(altered)
        sampled = sampler.sample(target, scaled)
        told = None if sampling_metadata.max_num_logprobs is None else _both_logprobs(sampled)
        return SamplerOutput(sampled.ids.to(torch.int32).unsqueeze(1), told)


def _both_logprobs(sampled: SampledTokens) -> LogprobsTensors:
    ids = sampled.ids.unsqueeze(1).expand(-1, 2).to(torch.int32)
    both = torch.stack((sampled.logprobs, sampled.full_logprobs), dim=1)
    return LogprobsTensors(ids, both, torch.zeros_like(sampled.ids))


def _alters(metadata: SamplingMetadata) -> bool:
    """Whether vLLM changes the logits of any row, other than by temperature and truncation."""
    return bool(
        not metadata.no_penalties
        or metadata.bad_words_token_ids
        or metadata.allowed_token_ids_mask is not None
        or metadata.thinking_budget_state_holder is not None
        or any(map(_is_active, metadata.logitsprocs.non_argmax_invariant))
    )


def _is_active(processor: LogitsProcessor) -> bool:
    if isinstance(processor, MinTokensLogitsProcessor):
        return bool(processor.min_toks)
    return bool(processor.biases) if isinstance(processor, LogitBiasLogitsProcessor) else True
