"""The SGLang engine frees only memory that SGLang has, and allocates only memory that was freed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import pytest
import torch

from skyrl_train.engines.lifecycle import Lifecycle
from skyrl_train.engines.sglang.requests import RequestManager


class RecordingManager(RequestManager):
    """A RequestManager of an engine on an accelerator that records what it would ask of SGLang."""

    def __init__(self) -> None:
        unused: Any = None
        super().__init__(unused, unused, frozenset(), Lifecycle("a"), max_model_len=64, on_cpu=False, max_num_seqs=4)
        self.events: list[str] = []
        self.may_score = asyncio.Event()

    async def _change_memory(self, action: Literal["release", "resume"], tags: Iterable[str]) -> None:
        self.events.append(f"{action} {' '.join(sorted(tags))}")
        await asyncio.sleep(0)

    async def _score(self, ids: Sequence[int]) -> list[float]:
        await self.may_score.wait()
        self.events.append("score")
        return []


@pytest.fixture(autouse=True)
def _accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (0, 0))


async def start_in_order(*coroutines: Any) -> list[asyncio.Future[Any]]:
    started = []
    for coroutine in coroutines:
        started.append(asyncio.ensure_future(coroutine))
        await asyncio.sleep(0.01)
    return started


def test_scores_restore_freed_cache_temporarily():
    async def run() -> list[str]:
        manager = RecordingManager()
        calls = await start_in_order(manager.score([[1]]), manager.score([[2]]), manager.sleep(1), manager.score([[3]]))
        manager.may_score.set()
        await asyncio.gather(*calls)
        await manager.wake_up(None)
        return manager.events

    assert asyncio.run(run()) == [
        "score",
        "score",
        "release kv_cache",
        "resume kv_cache",
        "score",
        "release kv_cache",
        "resume kv_cache",
    ]
