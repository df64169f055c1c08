"""Both ends of a collector in an actor, without the actor: calls that are given up, and what fails at the end."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from tensordict import TensorDictBase, set_list_to_stack

from skyrl_train.tensordict.collectors.ray_collector import RayLLMCollector, _Hosted
from tests.support.conversations import answer, conversations

DEADLINE_S = 60.0


def test_cancelled_take_leaves_its_batch_to_the_next():
    begun: list[bool] = []
    entered, allowed = threading.Event(), threading.Event()

    def policy(tensordict: TensorDictBase) -> TensorDictBase:
        begun.append(True)
        entered.set()
        assert allowed.wait(DEADLINE_S)
        return answer(tensordict)

    hosted = _Hosted({"env": conversations(1, rows=1), "policy": policy, "dialog_turns_per_batch": 1})

    async def given_up_and_asked_again() -> TensorDictBase | None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(hosted.take(False, None), 0.2)
        again = asyncio.ensure_future(hosted.take(False, None))
        assert await asyncio.to_thread(entered.wait, DEADLINE_S)
        stopping = asyncio.ensure_future(hosted.stop())
        await asyncio.sleep(0.1)
        assert not stopping.done()  # it waits for the turn
        allowed.set()
        await asyncio.wait_for(stopping, DEADLINE_S)
        return await again

    with set_list_to_stack(True):
        batch = asyncio.run(given_up_and_asked_again())
    assert batch is not None and batch.batch_size == (1, 1)
    assert begun == [True]


def test_failing_actor_end_still_leaves_ray():
    done: list[Any] = []

    class Cluster:
        def __exit__(self, *failure: object) -> None:
            done.append("left")

    class Ends(RayLLMCollector):
        def __init__(self) -> None:
            self.deliver_to(None, None, None, DEADLINE_S)
            self._cluster: Any = Cluster()

        def _end(self, method: str, *args: Any) -> None:
            done.append(method)
            raise RuntimeError(method)

    with pytest.raises(RuntimeError):
        Ends().shutdown()
    assert done == ["stop", "shutdown", "left"]
