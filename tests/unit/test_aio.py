from __future__ import annotations

import asyncio
import gc
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from skyrl_train.aio import EventLoopThrottle, finish_despite_cancellation, gather_all, with_timeout


def test_gather_all_keeps_order():
    async def after(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert asyncio.run(gather_all(after(seconds) for seconds in (0.02, 0.0, 0.01))) == [0.02, 0.0, 0.01]


@pytest.mark.defect("wait-for-drops-cancellation")
@pytest.mark.parametrize("turns", [0, 1, 2])
def test_cancellation_is_raised_when_result_arrives(turns: int):
    """A cancellation `turns` iterations of the loop after the result, which the waiting task has not seen yet."""

    async def run() -> bool:
        result = asyncio.get_running_loop().create_future()
        task = asyncio.ensure_future(with_timeout(30, result))
        await asyncio.sleep(0)
        result.set_result(7)
        for _ in range(turns):
            await asyncio.sleep(0)
        was_running = task.cancel()
        await asyncio.wait([task])
        return was_running == task.cancelled()

    assert asyncio.run(run())


def test_work_within_seconds_has_result_or_timeout():
    assert (
        asyncio.run(with_timeout(30, asyncio.sleep(0, 7)))
        == asyncio.run(with_timeout(math.inf, asyncio.sleep(0, 7)))
        == 7
    )
    with pytest.raises(TimeoutError):
        asyncio.run(with_timeout(0.01, asyncio.sleep(30)))


@pytest.mark.defect("unawaited-error-tracebacks")
def test_first_error_is_raised_after_cleanup():
    ended: list[str] = []
    reported: list[dict[str, Any]] = []

    async def fails(name: str, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            raise ValueError(name)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            raise KeyError(name) from None  # from its cleanup
        finally:
            ended.append(name)

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
        with pytest.raises(ValueError, match="first"):
            await gather_all([fails("slow", 60), fails("first", 0), fails("second", 0)])
        assert sorted(ended) == ["first", "second", "slow"]
        assert asyncio.all_tasks() == {asyncio.current_task()}
        gc.collect()
        await asyncio.sleep(0)

    asyncio.run(run())
    gc.collect()
    assert reported == []


def test_cancelled_work_runs_to_its_end():
    async def run(error: Exception | None) -> list[str]:
        done: list[str] = []

        async def work() -> None:
            await asyncio.sleep(0.02)
            done.append("all of it")
            if error is not None:
                raise error

        task = asyncio.ensure_future(finish_despite_cancellation(work()))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(type(error) if error else asyncio.CancelledError):
            await task
        return done

    for error in (None, ValueError("late")):
        assert asyncio.run(run(error)) == ["all of it"]


def test_throttle_limits_calls_per_iteration_in_order():
    throttle = EventLoopThrottle(3)

    async def run() -> list[list[int]]:
        iterations: list[list[int]] = [[]]

        async def goes(number: int) -> None:
            await throttle()
            iterations[-1].append(number)

        tasks = [asyncio.ensure_future(goes(number)) for number in range(11)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        iterations.append([])
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            iterations.append([])
        return [turn for turn in iterations if turn]

    for _ in (1, 2):  # a new event loop each time
        assert asyncio.run(run()) == [[0, 1, 2], [3, 5, 6], [7, 8, 9], [10]]


def test_throttle_is_independent_per_loop():
    throttle = EventLoopThrottle(1)

    async def run() -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*(throttle() for _ in range(2000)))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: asyncio.run(run()), range(3)))


def test_closed_loop_does_not_block_throttle():
    throttle = EventLoopThrottle(1)
    loop = asyncio.new_event_loop()
    for _ in range(3):
        loop.create_task(throttle()).add_done_callback(lambda task: task.cancelled())
    loop.call_soon(loop.stop)
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.close()
    asyncio.run(asyncio.wait_for(throttle(), 5))
