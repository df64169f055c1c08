"""The sampler of vLLM's V2 model runner with two log-probs per token. Imports vLLM and Triton: see engine.py.

vLLM's V2 sampler keeps the parameters and seeds of requests on the device and draws tokens with one kernel for all
rows, from counter-based noise: the same seed and position give the same noise in every batch. It is kept here. It also
applies min-p first, keeps only some of the tokens that are tied at the threshold, and returns one of the two log-probs.
This module changes that. A row is a position whose logits are sampled from: with speculative decoding a request has
several in a step, one more than it has drafts. Every row is sampled from as without drafts, and a draft is accepted if
it is the token that was sampled. Legend: R rows, B requests, V tokens of the vocabulary, K drafts of a request at most.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p, apply_top_k_top_p_pytorch
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.sample.states import NO_LOGPROBS, SamplingStates
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    gather_draft_sampled,
    get_max_chunk_logits,
)

from skyrl_train.engines.vllm.arguments import MIN_P, SEED
from skyrl_train.engines.vllm.logprob_kernel import token_logprobs
from skyrl_train.engines.vllm.sampler import check_sampler_class
from skyrl_train.errors import ConfigError


def replace_sampler(runner: Any, engine: str) -> None:
    """Make the sampler of a V2 model runner return both log-probs.

    Args:
        runner: vLLM's V2 model runner, before its first step.
        engine: The engine's name, for error messages.

    Raises:
        ConfigError: The runner has another sampler, or a mode of speculative decoding that changes the distribution.
    """
    sampler, worker = runner.sampler, runner.structured_outputs_worker
    check_sampler_class(runner, Sampler, engine)
    if (speculative := runner.speculative_config) is not None:
        unsupported = {
            "rejection_sample_method": speculative.rejection_sample_method == "synthetic",
            "enable_adaptive_verification": speculative.enable_adaptive_verification,
        }
        for option in (name for name, is_set in unsupported.items() if is_set):
            raise ConfigError(
                f"Engine {engine!r} does not support {option}={getattr(speculative, option)!r} of speculative_config: "
                "sampled tokens and log-probs would not be exact. Remove it from generator.engine_init_kwargs."
            )
        runner.rejection_sampler.__class__ = DraftVerifier
    # The objects stay the same: their buffers have the size of the vocabulary for every request.
    sampler.__class__, sampler.sampling_states.__class__ = DualLogprobSampler, Truncation
    apply_mask = worker.apply_grammar_bitmask

    def keep_unmasked_logits(logits: Tensor, batch: InputBatch, request_ids: list[str], mask: np.ndarray) -> None:
        if request_ids:
            sampler.unmasked = logits.clone()
        apply_mask(logits, batch, request_ids, mask)

    worker.apply_grammar_bitmask = keep_unmasked_logits


class Truncation(SamplingStates):  # type: ignore[misc]
    """The sampling parameters of all requests, with truncation as in the other engines: top-k, top-p, then min-p."""

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Store the parameters of a request, with the seed of its SampleRequest. vLLM calls this."""
        changes_logits: bool = super().add_request(req_idx, sampling_params)
        extra = sampling_params.extra_args or {}
        self.seeds.np[req_idx] = np.uint64(extra.get(SEED, 0)).astype(np.int64)
        self.min_p.np[req_idx] = min_p = extra.get(MIN_P, sampling_params.min_p)
        return changes_logits or (min_p != 0.0 and sampling_params.temperature != 0.0)

    def apply_min_p(self, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: np.ndarray) -> None:
        """Do nothing: `apply_top_k_top_p`, which vLLM calls afterwards, applies it last."""

    def apply_top_k_top_p(self, logits: Tensor, expanded_idx_mapping: Tensor, idx_mapping_np: np.ndarray) -> Tensor:
        """Set the logits of dropped tokens to -inf, in place. Tokens that are tied with the last kept one are kept.

        Args:
            logits: float32 [R, V], divided by the temperature.
            expanded_idx_mapping: Index of each row's request, [R].
            idx_mapping_np: Indices of the requests.
        """
        top_k, top_p = self.get_top_k_top_p(expanded_idx_mapping, idx_mapping_np)
        threshold = None
        if top_k is not None or top_p is not None:
            # Triton's interpreter, which runs kernels on a CPU, does not support vLLM's kernel.
            mask = apply_top_k_top_p_pytorch if logits.device.type == "cpu" else apply_top_k_top_p
            masked = mask(logits.clone(), top_k, top_p)
            threshold = masked.masked_fill_(masked == -math.inf, math.inf).amin(-1, keepdim=True)
        if np.any(self.min_p.np[idx_mapping_np]):
            min_p = self.min_p.gpu[expanded_idx_mapping].unsqueeze(1).log()
            lowest = logits.amax(-1, keepdim=True) + min_p
            threshold = lowest if threshold is None else threshold.maximum(lowest)
        return logits if threshold is None else logits.masked_fill_(logits < threshold, -math.inf)


class DualLogprobSampler(Sampler):  # type: ignore[misc]
    """A sampler that returns two log-probs of each sampled token, in the two columns that `logprobs=1` provides.

    The columns are those of sampler.DualLogprobSampler.
    """

    unmasked: Tensor | None = None
    """The logits of the next step before the mask of JSON schemas, [R, V]; None if no row has a schema."""

    def __call__(self, logits: Tensor, input_batch: InputBatch) -> SamplerOutput:
        """Sample a token for each row of the batch.

        Args:
            logits: [R, V].
            input_batch: The requests and positions of the rows.
        """
        batch = input_batch
        ids, logprobs = self.sample_rows(logits, batch, slice(None), slice(None))
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            batch.seq_lens.new_ones(batch.num_reqs),
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            self.req_states.prefill_len.gpu,
        )
        return SamplerOutput(
            sampled_token_ids=ids.view(-1, 1),
            logprobs_tensors=logprobs,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )

    def sample_rows(
        self, logits: Tensor, batch: InputBatch, rows: slice, requests: slice
    ) -> tuple[Tensor, LogprobsTensors | None]:
        """Sample a token for each of some rows. The last call of a step must contain the last row.

        Args:
            logits: The logits of all rows of the batch, [R, V].
            batch: The requests and positions of the rows.
            rows: The rows to sample.
            requests: The requests of these rows, all of whose rows must be in `rows`.

        Returns:
            The token ids and, if a request asks for log-probs, the columns of `DualLogprobSampler`.
        """
        states, logits_indices = self.sampling_states, batch.logits_indices[rows]
        expanded, requests_np = batch.expanded_idx_mapping[rows], batch.idx_mapping_np[requests]
        positions = batch.positions[logits_indices]
        model_logits = logits[rows]
        target = self.apply_sampling_params(
            model_logits,
            expanded,
            batch.idx_mapping[requests],
            requests_np,
            positions,
            batch.input_ids[logits_indices],
            batch.expanded_local_pos[rows],
            batch.seq_lens_cpu_upper_bound.numpy()[requests],
        )
        ids = gumbel_sample(
            target,
            expanded,
            states.temperature.gpu,
            states.seeds.gpu,
            positions,
            apply_temperature=False,
            is_drafting=False,
            use_fp64=self.use_fp64_gumbel,
        )
        if self.unmasked is not None:
            model_logits = self.unmasked[rows]
            if rows.stop is None or rows.stop == len(logits):
                self.unmasked = None
        # All parts of a batch get the same columns.
        return ids, self.both_logprobs(ids, target, model_logits, expanded, batch.idx_mapping_np)

    def both_logprobs(
        self, ids: Tensor, target: Tensor, logits: Tensor, requests: Tensor, requests_np: np.ndarray
    ) -> LogprobsTensors | None:
        """Return both log-probs of each row's token and, if a request asks for them, the most likely tokens.

        Args:
            ids: The sampled token of each row, [R].
            target: The logits that were sampled from, [R, V].
            logits: The model's logits, [R, V].
            requests: Index of each row's request, [R].
            requests_np: Indices of all requests of the batch, which decide on the number of columns.

        Returns:
            The columns of `DualLogprobSampler`; None if no request asks for log-probs.
        """
        num_columns = self.sampling_states.max_num_logprobs(requests_np)
        if num_columns == NO_LOGPROBS:
            return None
        temperatures = self.sampling_states.temperature.gpu
        tokens = ids.view(-1, 1)
        if num_columns > 1:
            tokens = torch.cat((tokens, logits.topk(num_columns - 1).indices), dim=1)
        full = token_logprobs(logits, tokens, temperatures, requests)
        if target is logits:
            behavior = full[:, :1]
        else:  # Its rows are divided by the temperature already.
            behavior = token_logprobs(target, tokens[:, :1], torch.ones_like(temperatures), requests)
        greedy = temperatures[requests].unsqueeze(1) == 0
        columns = torch.cat((behavior.masked_fill(greedy, 0.0), full), dim=1)
        return LogprobsTensors(
            torch.cat((tokens[:, :1], tokens), dim=1).to(torch.int32), columns, torch.zeros_like(ids)
        )


class DraftVerifier(RejectionSampler):  # type: ignore[misc]
    """A verifier of drafts that returns the same tokens and log-probs as sampling without drafts.

    The token of a row is drawn from the target distribution, with the noise of the request's seed and the position,
    whatever the draft is. A draft is accepted if it is that token. For a draft that was not drawn with this noise, such
    as an n-gram's, the probability of that is the one of rejection sampling.
    """

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Sample a token for each row, and keep those before and at the first difference from the drafts.

        Args:
            logits: [R, V].
            input_batch: The requests and positions of the rows. The input token of a request's second row is its first
                draft.
            draft_logits: Ignored.
            invalid_drafts: True for rows whose draft the JSON schema has not checked, [R].
        """
        batch, sampler = input_batch, self.sampler
        parts = [sampler.sample_rows(logits, batch, *part) for part in _parts(batch.cu_num_logits_np, logits.shape[1])]
        ids = torch.cat([part for part, _ in parts])
        drafts, _ = gather_draft_sampled(
            batch.input_ids,
            batch.positions,
            batch.logits_indices,
            batch.expanded_idx_mapping,
            batch.expanded_local_pos,
            sampler.req_states.prefill_len.gpu,
        )
        if invalid_drafts is not None:
            drafts = drafts.masked_fill(invalid_drafts, -1)
        sampled, num_accepted = accept_drafts(ids, drafts, batch.cu_num_logits, self.num_speculative_steps)
        num_sampled, num_rejected = get_num_sampled_and_rejected(
            num_accepted + 1,
            batch.seq_lens,
            batch.cu_num_logits,
            batch.idx_mapping,
            sampler.req_states.prefill_len.gpu,
        )
        logprobs = [part for _, part in parts if part is not None]
        return SamplerOutput(
            sampled_token_ids=sampled,
            logprobs_tensors=LogprobsTensors.cat(logprobs, batch.cu_num_logits_np.tolist()) if logprobs else None,
            num_nans=None,
            num_sampled=num_sampled,
            num_rejected=num_rejected,
        )


def accept_drafts(ids: Tensor, drafts: Tensor, first_rows: Tensor, max_drafts: int) -> tuple[Tensor, Tensor]:
    """Return the sampled tokens by request, and the number of accepted drafts of each request.

    Args:
        ids: The sampled token of each row, [R].
        drafts: The input token of each row, [R]: a draft, except in each request's first row. -1 is never accepted.
        first_rows: The first row of each request, and R, int [B + 1].
        max_drafts: K.

    Returns:
        [B, K + 1], of which only the accepted drafts and one more token are meaningful; int32 [B].
    """
    rows = first_rows[:-1, None] + torch.arange(max_drafts + 1, device=ids.device)
    exists = rows < first_rows[1:, None]
    rows = rows.clamp(max=len(ids) - 1)
    sampled = ids[rows]
    accepted = (sampled[:, :-1] == drafts[rows[:, 1:]]) & exists[:, 1:]
    return sampled, accepted.cumprod(1).sum(1, dtype=torch.int32)


def _parts(first_rows: np.ndarray, vocab_size: int) -> Iterator[tuple[slice, slice]]:
    """Yield the rows and requests of parts of a batch, whose copied logits take about a gigabyte at most."""
    limit, begin, count = get_max_chunk_logits(vocab_size), 0, len(first_rows) - 1
    while begin < count:
        end = int(np.searchsorted(first_rows, first_rows[begin] + limit, side="right")) - 1
        end = min(count, max(begin + 1, end))
        yield slice(int(first_rows[begin]), int(first_rows[end])), slice(begin, end)
        begin = end
