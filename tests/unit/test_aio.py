from __future__ import annotations

import asyncio
import gc
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from skyrl_train.aio import EventLoopThrottle, finish_despite_cancellation, gather_all, with_timeout


def test_results_come_in_the_order_of_the_calls():
    async def after(seconds: float) -> float:
        await asyncio.sleep(seconds)
        return seconds

    assert asyncio.run(gather_all(after(seconds) for seconds in (0.02, 0.0, 0.01))) == [0.02, 0.0, 0.01]


@pytest.mark.defect("cancellations-that-were-dropped")
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


@pytest.mark.defect("tracebacks-of-what-nobody-awaits")
def test_the_first_error_is_raised_once_the_others_have_ended_and_theirs_are_printed_nowhere():
    ended: list[str] = []
    reported: list[dict[str, Any]] = []

    async def fails(name: str, after_s: float) -> None:
        try:
            await asyncio.sleep(after_s)
            raise ValueError(name)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            raise KeyError(name) from None  # of its own cleanup
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


def test_what_is_cancelled_is_taken_to_its_end_and_what_it_raises_then_is_raised():
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


def test_so_many_go_through_in_a_turn_of_the_loop_in_the_order_in_which_they_came():
    passes = EventLoopThrottle(3)

    async def run() -> list[list[int]]:
        turns: list[list[int]] = [[]]

        async def goes(number: int) -> None:
            await passes()
            turns[-1].append(number)

        tasks = [asyncio.ensure_future(goes(number)) for number in range(11)]
        await asyncio.sleep(0)
        tasks[4].cancel()
        turns.append([])
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            turns.append([])
        return [turn for turn in turns if turn]

    for _ in (1, 2):  # in a loop of its own each
        assert asyncio.run(run()) == [[0, 1, 2], [3, 5, 6], [7, 8, 9], [10]]


def test_loops_of_several_threads_do_not_hold_each_other_up():
    passes = EventLoopThrottle(1)

    async def run() -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*(passes() for _ in range(2000)))

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(lambda _: asyncio.run(run()), range(3)))


def test_a_loop_that_ended_while_some_waited_holds_up_no_other():
    passes = EventLoopThrottle(1)
    loop = asyncio.new_event_loop()
    for _ in range(3):
        loop.create_task(passes()).add_done_callback(lambda task: task.cancelled())
    loop.call_soon(loop.stop)
    loop.run_forever()
    for task in asyncio.all_tasks(loop):
        task.cancel()
    loop.close()
    asyncio.run(asyncio.wait_for(passes(), 5))
