"""Conversion of prompts to an engine's sample requests."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Sequence

import torch

from skyrl_train.engines.base import Capabilities, SampleRequest, parse_token_ids
from skyrl_train.engines.sampling_params import request_seed
from skyrl_train.errors import UnsupportedParameter
from skyrl_train.tensordict.wrappers.parameters import Generation


def sample_requests(
    rows: Sequence[Sequence[int]],
    generation: Generation,
    capabilities: Capabilities,
    copies: Sequence[int] | None = None,
) -> list[SampleRequest]:
    """Return one request per sample, with the samples of a row next to each other.

    With a seed, the samples depend only on the seed, the tokens and `copies`, which is `numbered(rows)` by default;
    pass it if the rows are from several calls. Raises UnsupportedParameter for a seed that the engine does not support.
    """
    if generation.seed is not None and not capabilities.seeds:
        raise UnsupportedParameter(
            f"Engine {capabilities.name!r} does not support seed={generation.seed}. Leave it out."
        )
    base = int(torch.randint(1 << 62, ())) if generation.seed is None else generation.seed
    copies = numbered(rows) if copies is None else copies
    requests, name = [], uuid.uuid4().hex[:12]
    for place, row in enumerate(rows):
        group = f"{name}-{place}"
        text = str(place)
        if generation.seed is not None:
            text = ",".join(map(str, row)) + (f";{copies[place]}" if copies[place] else "")
        ids = parse_token_ids(f"row {place}", row)
        for sample in range(generation.num_samples or 1):
            seed = request_seed(base, text, sample, 0, 0)
            request_id = f"{group}-{sample}"
            requests.append(SampleRequest(request_id, ids, generation.sampling, seed, session=group, group=group))
    return requests


def numbered(rows: Sequence[Sequence[int]]) -> list[int]:
    """Return, for each row, the number of earlier rows that equal it."""
    seen: Counter[tuple[int, ...]] = Counter()
    found = []
    for row in rows:
        found.append(seen[tuple(row)])
        seen[tuple(row)] += 1
    return found
