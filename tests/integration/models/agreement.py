"""The agreement that is required between an engine and the learner."""

from __future__ import annotations

import copy

import torch

from skyrl_train.engines.base import Completion, SampleRequest
from skyrl_train.models.logprob_model import LogprobModel
from tests.support.engine_harness import TOLERANCE, EngineHarness, largest_difference
from tests.support.padded_reference import single_sequence

PROMPTS = (tuple(3 + (7 * n) % 250 for n in range(40)), (3, 10, 17, 24, 31))
"""One prompt is longer than the tiny models' windows, and the response to the other crosses them."""


def assert_agrees_with_the_learner(bench: EngineHarness) -> None:
    """Check that an engine's log-probs of its samples are those of a LogprobModel of `bench.model`."""
    requests = [bench.request(prompt, seed=seed, max_tokens=24) for seed, prompt in enumerate(PROMPTS)]
    model = LogprobModel(copy.deepcopy(bench.model))
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert len(completion.token_ids) == 24
        difference = largest_difference(
            completion.full_logprobs.tolist(), learners_logprobs(model, request, completion)
        )
        assert difference <= TOLERANCE, f"{difference:.2g} nats"


@torch.no_grad()
def learners_logprobs(model: LogprobModel, request: SampleRequest, completion: Completion) -> list[float]:
    ids = [*request.token_ids.tolist(), *completion.token_ids.tolist()]
    batch = single_sequence(ids, len(request.token_ids), request.sampling.temperature)
    return model(model.lay_out(batch)).logprobs[batch.loss_mask].tolist()  # type: ignore[no-any-return]
