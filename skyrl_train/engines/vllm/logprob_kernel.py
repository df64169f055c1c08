"""A Triton kernel that computes log-probs of chosen tokens. It requires Triton: see sampler_v2.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_LOWEST = tl.constexpr(-3.0e38)
"""Below every logit, and finite: the difference of two infinities would be NaN."""
BLOCK_SIZE, NUM_WARPS = 4096, 8


@triton.jit
def _token_logprob_kernel(  # type: ignore[no-untyped-def]
    logits_ptr, stride, tokens_ptr, num_tokens, temperatures_ptr, requests_ptr, logprobs_ptr, vocabulary,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the log-probs of some tokens of one row per program. A temperature of 0 counts as 1.

    Every lane keeps the maximum m of the logits x that it read, and the sum of exp(x - m). Lanes are combined at the
    end.
    """
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures_ptr + tl.load(requests_ptr + row))
    temperature = tl.where(temperature == 0.0, 1.0, temperature)
    logits_ptr += row * stride
    largest = tl.full([BLOCK], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocabulary, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        logits = tl.load(logits_ptr + columns, mask=columns < vocabulary, other=float("-inf")).to(tl.float32)
        logits = logits / temperature
        new_largest = tl.maximum(largest, logits)
        total = total * tl.exp(largest - new_largest) + tl.exp(logits - new_largest)
        largest = new_largest
    maximum = tl.max(largest)
    normalizer = maximum + tl.log(tl.sum(total * tl.exp(largest - maximum)))
    for index in range(num_tokens):
        token = tl.load(tokens_ptr + row * num_tokens + index)
        logit = tl.load(logits_ptr + token).to(tl.float32) / temperature
        tl.store(logprobs_ptr + row * num_tokens + index, logit - normalizer)


def token_logprobs(logits: Tensor, tokens: Tensor, temperatures: Tensor, requests: Tensor) -> Tensor:
    """Return the log-probs (nats) of tokens under softmax(logits / temperature), without a copy of the logits.

    Args:
        logits: [R, V].
        tokens: Token ids, int64 [R, K].
        temperatures: Temperature of each request, float32 [N]; 0 counts as 1.
        requests: The request of each row, an index into `temperatures`, [R].

    Returns:
        float32 [R, K]. A row without a finite logit, or with NaN, yields NaN.
    """
    tokens = tokens.contiguous()
    logprobs = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
    _token_logprob_kernel[(len(logits),)](
        logits,
        logits.stride(0),
        tokens,
        tokens.shape[1],
        temperatures,
        requests.contiguous(),
        logprobs,
        logits.shape[1],
        BLOCK=BLOCK_SIZE,
        num_warps=NUM_WARPS,
    )
    return logprobs
