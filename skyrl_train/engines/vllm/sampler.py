"""The sampler that all engines share, in vLLM's workers, where it replaces vLLM's own. Imports vLLM: see engine.py.

vLLM's sampler uses one random generator per request with a seed, so a step launches more kernels the more requests it
has. It applies min-p first, keeps only some of the tokens that are tied at the threshold, and returns only one of the
two log-probs. Only vLLM's workers import this module, because its imports decide whether torch compiles anything; see
`arguments.configure_threads`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import ref

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
from vllm.v1.worker import gpu_model_runner

from skyrl_train.engines.token_sampler import RowSampler, RowSamplingParams, SampledTokens
from skyrl_train.engines.vllm.arguments import SEED, TOP_LOGPROBS
from skyrl_train.errors import ConfigError


def replace_sampler(runner: Any, engine: str) -> None:
    """Replace the sampler of a vLLM model runner with one that samples as all other engines do.

    Args:
        runner: vLLM's GPUModelRunner or CPUModelRunner, before its first step.
        engine: The engine's name, for error messages.

    Raises:
        ConfigError: The runner has another sampler, speculative decoding or logits processors, which the replacement
            does not support.
    """
    check_sampler_class(runner, Sampler, engine)
    processors = runner.input_batch.logitsprocs.argmax_invariant
    if runner.speculative_config is not None:
        raise ConfigError(
            f"Engine {engine!r} does not support speculative_config with vLLM's V1 model runner, whose speculative "
            "sampler ignores the seeds of requests and does not return both log-probs. Set "
            "generator.speculative.method=null, and remove speculative_config from generator.engine_init_kwargs."
        )
    unsupported = [
        type(processor).__name__ for processor in processors if not isinstance(processor, MinPLogitsProcessor)
    ]
    if unsupported:
        raise ConfigError(
            f"Engine {engine!r} does not support logits_processors={unsupported}: only processors whose "
            "is_argmax_invariant() returns False are applied. Remove them from generator.engine_init_kwargs."
        )
    tracker = BatchTracker(runner.device)
    # vLLM's argument `logits_processors` would make it wait for the tokens of every step.
    processors.append(tracker)
    runner.sampler = DualLogprobSampler(tracker)
    _keep_unmasked_logits(runner)


def check_sampler_class(runner: Any, expected: type, engine: str) -> None:
    """Raise ConfigError if a model runner does not sample with the class of vLLM that ours replaces."""
    found = type(runner.sampler)
    if found is not expected:
        raise ConfigError(
            f"Engine {engine!r}: vLLM samples with {found.__module__}.{found.__name__}, which cannot return both "
            f"log-probs; it must be {expected.__module__}.{expected.__name__}. Set VLLM_USE_V2_MODEL_RUNNER=0."
        )


_runners: tuple[ref[Any], ...] = ()
"""Runners whose samplers are replaced. The references are weak, because a runner holds the weights and the KV cache."""
_apply_mask = gpu_model_runner.apply_grammar_bitmask


def _keep_unmasked_logits(runner: Any) -> None:
    """Pass the logits of each step to the runner's sampler before vLLM masks the tokens that schemas do not allow."""
    global _runners
    _runners = (*(reference for reference in _runners if reference() is not None), ref(runner))
    gpu_model_runner.apply_grammar_bitmask = _apply_grammar_bitmask


def _apply_grammar_bitmask(scheduler_output: Any, grammar_output: Any, input_batch: Any, logits: Tensor) -> None:
    for reference in _runners:
        runner = reference()
        if runner is not None and input_batch is runner.input_batch:
            runner.sampler.unmasked = logits.clone()
    _apply_mask(scheduler_output, grammar_output, input_batch, logits)


class BatchTracker(LogitsProcessor):
    """A logits processor that leaves logits alone and tracks the requests in the rows of vLLM's batch.

    vLLM reports every change of the batch to its logits processors. `sampler` samples the next token of each row. vLLM
    appends a placeholder to a request's list of tokens when it starts a step, so the list has the right length before
    the tokens are known.
    """

    sampler: RowSampler
    """The sampler of the current batch; set before the first step."""

    def __init__(self, device: torch.device):
        """Create a tracker of an empty batch on `device`."""
        self._device = device
        self._rows: dict[int, tuple[RowSamplingParams, int, int, Sequence[int]]] = {}
        """Sampling parameters, seed, number of most likely tokens and tokens so far of each row in use."""
        self._generated: list[int] = []

    def is_argmax_invariant(self) -> bool:
        """Return True: logits stay as they are."""
        return True

    def apply(self, logits: Tensor) -> Tensor:
        return logits

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the rows, and create a new sampler if they changed. vLLM calls this before every step."""
        process_dict_updates(self._rows, batch_update, _row)
        rows = [self._rows[index] for index in range(len(self._rows))]
        generated = [len(output) for *_, output in rows]
        # A row in a chunked prefill does not sample, so its position in the random stream does not advance.
        if batch_update is not None or generated != [count + 1 for count in self._generated]:
            params, seeds, tops, _ = zip(*rows, strict=True) if rows else ((), (), (), ())
            mask = None if self._device.type == "cpu" else apply_top_k_top_p
            # Rows that ask for no tokens get some, too, because vLLM returns the same columns for all rows.
            tops = (max(tops),) * len(tops) if any(tops) else ()
            self.sampler = RowSampler(params, seeds, generated, self._device, mask, tops)
        self._generated = generated


def _row(params: Any, prompt: Any, output: Sequence[int]) -> tuple[RowSamplingParams, int, int, Sequence[int]]:
    extra = params.extra_args or {}
    return RowSamplingParams.of(params), extra.get(SEED, 0), extra.get(TOP_LOGPROBS, 0), output


class DualLogprobSampler(Sampler):
    """A sampler that returns two log-probs of each sampled token, in the two columns that `logprobs=1` provides.

    The first column is the log-prob in the distribution sampled from, after the JSON schema, penalties, temperature,
    top-k, top-p and min-p (0 if greedy). The second column is the log-prob of the temperature-scaled logits alone
    (temperature 1 if greedy). Further columns, if a request asks for them, are the most likely tokens in the
    distribution of the second.
    """

    unmasked: Tensor | None = None
    """The logits of the next step before the mask of JSON schemas, [B, V]; None if no row has a schema."""

    def __init__(self, tracker: BatchTracker):
        """Create a sampler of the rows that `tracker` knows."""
        super().__init__("processed_logprobs")
        self._tracker = tracker

    def forward(self, logits: Tensor, sampling_metadata: SamplingMetadata, *args: Any, **kwargs: Any) -> SamplerOutput:
        """Sample a token for each row of the batch.

        Args:
            logits: [B, V].
            sampling_metadata: vLLM's data of the batch, for penalties and the like.
            args: Ignored.
            kwargs: Ignored.

        Returns:
            The token ids, int32 [B, 1], and two log-probs per token unless no row asks for log-probs.
        """
        sampler = self._tracker.sampler
        scaled = target = sampler.scale(logits)
        if self.unmasked is not None:
            scaled, self.unmasked = sampler.scale(self.unmasked), None
        if _changes_logits(sampling_metadata):
            copied = logits.to(torch.float32, copy=True)
            processed = self.apply_logits_processors(copied, sampling_metadata, predict_bonus_token=False)
            target = sampler.scale(processed)
        sampled = sampler.sample(target, scaled)
        logprobs = None if sampling_metadata.max_num_logprobs is None else _both_logprobs(sampled)
        return SamplerOutput(sampled.ids.to(torch.int32).unsqueeze(1), logprobs)


def _both_logprobs(sampled: SampledTokens) -> LogprobsTensors:
    ids = sampled.ids.unsqueeze(1).expand(-1, 2).to(torch.int32)
    columns = torch.stack((sampled.logprobs, sampled.full_logprobs), dim=1)
    if sampled.top_ids is not None and sampled.top_logprobs is not None:
        ids = torch.cat((ids, sampled.top_ids.to(torch.int32)), dim=1)
        columns = torch.cat((columns, sampled.top_logprobs), dim=1)
    return LogprobsTensors(ids, columns, torch.zeros_like(sampled.ids))


def _changes_logits(metadata: SamplingMetadata) -> bool:
    """True if vLLM changes the logits of any row in other ways than by temperature and truncation."""
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
