"""An engine that returns the same answer to every request, for control_plane.py."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np

from skyrl_train.engines.base import Completion, SampleRequest, VersionSpan
from skyrl_train.testing.scripted_engine import ScriptedEngine

ANSWER_S = 0.005


class FixedAnswerEngine(ScriptedEngine):
    """Answers each call after 5 ms, with new arrays for each request."""

    def __init__(self, ids: np.ndarray, logprobs: np.ndarray, name: str):
        """Create an engine that answers with `ids` [L] and `logprobs` [L]."""
        super().__init__(name=name)
        self._ids = ids
        self._logprobs = logprobs

    async def generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        await asyncio.sleep(ANSWER_S)
        return [
            Completion(
                request.request_id,
                self._ids.copy(),
                self._logprobs.copy(),
                self._logprobs.copy(),
                "stop",
                [VersionSpan(0, len(self._ids), 0)],
            )
            for request in requests
        ]
