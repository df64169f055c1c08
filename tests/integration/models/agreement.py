"""What an engine and the learner must agree on."""

from __future__ import annotations

import copy

import torch

from skyrl_train.engines.base import Completion, SampleRequest
from skyrl_train.models.logprob_model import LogprobModel
from tests.support.engine_harness import TOLERANCE, EngineHarness, largest_difference

PROMPTS = (tuple(3 + (7 * n) % 250 for n in range(40)), (3, 10, 17, 24, 31))
"""One longer than the tiny models' windows, and one that leaves them while it is answered."""


def assert_agrees_with_the_learner(bench: EngineHarness) -> None:
    """The engine's log-probs of what it samples are those of the scorer that trains `bench.model`."""
    requests = [bench.request(prompt, seed=seed, max_tokens=24) for seed, prompt in enumerate(PROMPTS)]
    model = LogprobModel(copy.deepcopy(bench.model))
    for request, completion in zip(requests, bench.generate(*requests), strict=True):
        assert len(completion.token_ids) == 24
        gap = largest_difference(completion.full_logprobs.tolist(), learners_logprobs(model, request, completion))
        assert gap <= TOLERANCE, f"{gap:.2g} nats"


@torch.no_grad()
def learners_logprobs(model: LogprobModel, request: SampleRequest, completion: Completion) -> list[float]:
    ids = torch.tensor([*request.token_ids.tolist(), *completion.token_ids.tolist()])
    places = torch.arange(len(ids))
    sampled = places >= len(request.token_ids)
    temperature = torch.tensor([request.sampling.temperature])
    scores = model(ids, places, torch.tensor([0, len(ids)]), temperature, sampled, False, None)
    return scores.logprobs[sampled].tolist()  # type: ignore[no-any-return]
