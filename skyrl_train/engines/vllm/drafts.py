"""A change of vLLM's draft models, which the import of this module makes. It requires Triton: see sampler_v2.py.

Engines with speculative decoding name this module as that of their WorkerExtension, because vLLM imports it before it
loads models and captures CUDA graphs.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from skyrl_train.engines.vllm.worker import WorkerExtension

__all__ = ["WorkerExtension", "sample_draft"]


def sample_draft(
    self: Any,
    hidden_states: Tensor,
    sample_src_positions: Tensor,
    idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    draft_step: Tensor,
    draft_logits: Tensor | None,
    spec_step_idx: int = 0,
) -> Tensor:
    """Sample drafts with the noise that the sampler uses at their positions. This replaces vLLM's method.

    A draft model that computes the policy's distribution then proposes exactly the tokens that the sampler accepts.
    vLLM's own drafts are the most likely tokens, of which fewer are accepted at temperatures near 1.

    Args:
        self: vLLM's DraftModelSpeculator.
        hidden_states: Hidden states of the draft model at the last token of each request, [B, H].
        sample_src_positions: Position of the token before the draft, [B].
        idx_mapping: Index of each request, [B].
        temperature: Temperatures by index of the request.
        seeds: Seeds by index of the request.
        draft_step: Ignored.
        draft_logits: Ignored.
        spec_step_idx: Number of the draft, from 0.
    """
    return gumbel_sample(  # type: ignore[no-any-return]
        self.compute_draft_logits(hidden_states, spec_step_idx),
        idx_mapping,
        temperature,
        seeds,
        sample_src_positions,
        apply_temperature=True,
        is_drafting=False,
        use_fp64=self.use_fp64_gumbel,
    )


DraftModelSpeculator.sample_draft = sample_draft
