"""SGLang is asked to free only memory that it has, and to allocate only memory that it freed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from skyrl_train.engines.lifecycle import Lifecycle
from skyrl_train.engines.sglang.requests import RequestManager


class Memory(RequestManager):
    """The traffic of an engine on an accelerator, with notes of what is asked of SGLang."""

    def __init__(self) -> None:
        manager: Any = None
        super().__init__(manager, None, frozenset(), Lifecycle("a"), max_model_len=64, on_cpu=False, max_num_seqs=4)
        self.events: list[str] = []
        self.may_score = asyncio.Event()

    async def _memory(self, what: str, tags: Iterable[str]) -> None:
        self.events.append(f"{what} {' '.join(sorted(tags))}")
        await asyncio.sleep(0)

    async def _score(self, ids: Sequence[int]) -> list[float]:
        await self.may_score.wait()
        self.events.append("score")
        return []


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))


async def begun(*work: Any) -> list[asyncio.Future[Any]]:
    """Start one after the other."""
    started = []
    for one in work:
        started.append(asyncio.ensure_future(one))
        await asyncio.sleep(0.01)
    return started


def test_scores_restore_freed_cache_temporarily():
    async def run() -> list[str]:
        traffic = Memory()
        calls = await begun(traffic.score([[1]]), traffic.score([[2]]), traffic.sleep(1), traffic.score([[3]]))
        traffic.may_score.set()
        await asyncio.gather(*calls)
        await traffic.wake_up(None)
        return traffic.events

    assert asyncio.run(run()) == [
        "score",
        "score",
        "release kv_cache",
        "resume kv_cache",
        "score",
        "release kv_cache",
        "resume kv_cache",
    ]
