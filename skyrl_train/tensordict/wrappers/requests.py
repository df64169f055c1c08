"""Prompts -> what an engine is asked to sample."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence

import torch

from skyrl_train.engines.base import Capabilities, SampleRequest
from skyrl_train.engines.sampling import request_seed
from skyrl_train.errors import UnsupportedParameter
from skyrl_train.tensordict.wrappers.parameters import Generation


def sample_requests(
    rows: Sequence[Sequence[int]],
    generation: Generation,
    capabilities: Capabilities,
    copies: Sequence[int] | None = None,
) -> list[SampleRequest]:
    """One for each sample, those of a row together.

    With a seed, seed, tokens and `copies` decide what is sampled: `numbered(rows)`, unless the rows are of several
    calls.
    """
    if generation.seed is not None and not capabilities.seeds:
        raise UnsupportedParameter(f"Engine {capabilities.name!r} cannot honour seed={generation.seed}; leave it out.")
    base = int(torch.randint(1 << 62, ())) if generation.seed is None else generation.seed
    copies = numbered(rows) if copies is None else copies
    requests, name = [], uuid.uuid4().hex[:12]
    for place, row in enumerate(rows):
        group = f"{name}-{place}"
        text = str(place) if generation.seed is None else ",".join(map(str, row))
        if generation.seed is not None and copies[place]:
            text += f";{copies[place]}"
        ids = tuple(row)
        for sample in range(generation.num_samples or 1):
            seed = request_seed(base, text, sample, 0, 0)
            requests.append(
                SampleRequest(f"{group}-{sample}", ids, generation.sampling, seed, session=group, group=group)
            )
    return requests


def numbered(rows: Sequence[Sequence[int]]) -> list[int]:
    """How many rows before each one equal it."""
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for row in rows:
        found.append(seen[tuple(row)])
        seen[tuple(row)] += 1
    return found
