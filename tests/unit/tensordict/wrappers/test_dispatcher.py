"""Calls of many threads in batches: everyone gets their own answer, nobody hangs."""

from __future__ import annotations

import copy
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack

from skyrl_train.errors import ConfigError, DeadlineExceeded
from skyrl_train.tensordict.wrappers.dispatcher import Dispatcher
from tests.support.machine_speed import slowness


def double(items: list[Any], parameters: Any) -> list[Any]:
    return [(item, parameters) for item in items]


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.001)


GOOD, BAD, SLOW, STUCK = range(4)


@pytest.mark.defect("D10")
def test_64_threads_50_calls_with_failures_and_timeouts_get_their_own_answers(wrap: Any):
    def answer(request: Any) -> list[int]:
        kind = request.token_ids[-1]
        if kind == BAD:
            raise ValueError("bad prompt")
        if kind == STUCK:
            raise DeadlineExceeded("the engine", 1.0)
        return [*request.token_ids, request.sampling.top_k]  # whose prompt, and with whose keywords

    wrapper = wrap(
        answer,
        tokenizer=None,
        input_mode="tokens",
        inplace=False,
        min_batch_size=4,
        max_batch_size=32,
        batching_timeout=0.01,
    )
    wrapper.engine.delay_s = lambda request: 0.002 if request.token_ids[-1] == SLOW else 0.0
    impatient = copy.copy(wrapper)  # the same queue
    impatient.timeout = 1e-6

    def caller(thread: int) -> dict[str, int]:
        dice, seen = random.Random(thread), {"good": 0, "bad": 0, "late": 0}
        for number in range(50):
            kind = dice.choices([GOOD, BAD, SLOW, STUCK], [895, 50, 50, 5])[0]
            top_k, policy = dice.randint(1, 3), impatient if dice.random() < 0.03 else wrapper
            prompts = [[thread, number, place, *[7] * dice.randrange(3), kind] for place in range(dice.randint(1, 3))]
            rows = lazy_stack([TensorDict(tokens=torch.tensor(prompt)) for prompt in prompts])
            try:
                out = policy(rows, top_k=top_k)
                found = [row.tolist() for row in out.get(("tokens", "response"), as_list=True)]
                assert found == [[*prompt, top_k] for prompt in prompts]
                assert kind in (GOOD, SLOW)
                seen["good"] += 1
            except ValueError:
                assert kind == BAD
                seen["bad"] += 1
            except DeadlineExceeded:  # its own, or that of a batch with a stuck prompt
                seen["late"] += 1
        return seen

    started = time.process_time()
    with ThreadPoolExecutor(64) as pool:  # a hang is ended by the limit of every test
        results = list(pool.map(caller, range(64)))
    assert time.process_time() - started < 15 * slowness()
    assert sum(sum(seen.values()) for seen in results) == 64 * 50
    assert sum(seen["good"] for seen in results) > 64 * 50 * 0.6
    assert all(sum(seen[kind] for seen in results) > 0 for kind in ("bad", "late"))
    state = wrapper.get_batching_state()
    assert state["queue_size"] == state["pending_futures"] == 0
    assert not state["processing"]
    batches = wrapper.engine.batches
    assert 4 < max(map(len, batches)) <= 32  # calls do share batches
    assert all(len({request.sampling for request in batch}) == 1 for batch in batches)


def test_the_batching_state_has_torchrls_keys():
    begun, go_on = threading.Event(), threading.Event()

    def run(items: list[int], _: Any) -> list[int]:
        begun.set()
        assert go_on.wait(30)
        return items

    dispatcher = Dispatcher(run, min_size=1, max_size=2, wait_s=0.5)
    idle: dict[str, Any] = {
        "min_batch_size": 1,
        "max_batch_size": 2,
        "timeout": 0.5,
        "queue_size": 0,
        "pending_futures": 0,
    }
    idle |= {"processing": False, "lock_state": "unlocked"}
    assert dispatcher.state() == idle
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(dispatcher.submit, [1, 2, 3], (), 30.0)
        assert begun.wait(30)
        busy: dict[str, Any] = {"queue_size": 1, "pending_futures": 1, "processing": True, "lock_state": "locked"}
        assert dispatcher.state() == {**idle, **busy}
        go_on.set()
        assert call.result() == [1, 2, 3]
    assert dispatcher.state() == idle


class Leisurely(list):
    """Lets other threads run wherever it is read: what is queued in two moves gets mixed."""

    def __len__(self) -> int:
        time.sleep(0.0005)
        return super().__len__()

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            time.sleep(0.0005)
            yield item


@pytest.mark.defect("D10")
def test_calls_that_are_queued_at_the_same_moment_keep_their_own_answers():
    dispatcher = Dispatcher(double, min_size=4, max_size=5, wait_s=0.01)
    barrier = threading.Barrier(8)

    def caller(thread: int) -> None:
        for number in range(10):
            items = [(thread, number, place) for place in range(3)]
            barrier.wait(60)
            assert dispatcher.submit(Leisurely(items), 0, 60.0) == [(item, 0) for item in items]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(caller, range(8)))


@pytest.mark.defect("D11")
def test_a_lone_caller_is_answered_when_the_wait_for_company_is_over():
    assert Dispatcher(double, min_size=4, wait_s=0.05).submit(["x"], "p", 60.0) == [("x", "p")]


@pytest.mark.defect("D12")
def test_a_batch_that_fails_spoils_neither_its_neighbours_nor_what_follows():
    def run(items: list[Any], _: Any) -> list[Any]:
        if "bad" in items:
            raise RuntimeError("bad item")
        return items

    dispatcher = Dispatcher(run, min_size=2, wait_s=60.0)
    with ThreadPoolExecutor(2) as pool:
        good, bad = pool.submit(dispatcher.submit, ["good"], 0, 60.0), pool.submit(dispatcher.submit, ["bad"], 0, 60.0)
        assert good.result(60) == ["good"]
        assert isinstance(bad.exception(60), RuntimeError)
    assert dispatcher.submit(["a", "b"], 0, 60.0) == ["a", "b"]


@pytest.mark.defect("D12")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_items_of_a_call_that_failed_leave_the_queue(error: type[BaseException]):
    def run(items: list[Any], _: Any) -> list[Any]:
        raise error

    dispatcher = Dispatcher(run, max_size=1)
    with pytest.raises(error):
        dispatcher.submit(["bad", "x"], 0, 60.0)
    assert dispatcher.state()["queue_size"] == 0
    assert not dispatcher._groups


@pytest.mark.defect("D12")
def test_after_a_timeout_no_callers_items_are_tried_again():
    sizes: list[int] = []

    def run(items: list[Any], _: Any) -> list[Any]:
        sizes.append(len(items))
        raise ValueError("bad item") if len(items) > 1 else TimeoutError("the engine hangs")

    dispatcher = Dispatcher(run, min_size=3, wait_s=60.0)
    with ThreadPoolExecutor(3) as pool:
        futures = [pool.submit(dispatcher.submit, [name], 0, 60.0) for name in "abc"]
        assert all(isinstance(future.exception(60), TimeoutError) for future in futures)
    assert sizes == [3, 1]


def pending(dispatcher: Dispatcher, pool: ThreadPoolExecutor) -> list[Future[list[Any]]]:
    futures = [pool.submit(dispatcher.submit, [name], 0, 120.0) for name in ("a", "b")]
    until(lambda: dispatcher.state()["queue_size"] == 2)
    return futures


@pytest.mark.defect("D13")
def test_cleanup_answers_or_cancels_whoever_waits_and_never_deadlocks():
    dispatcher = Dispatcher(double, min_size=100, wait_s=100.0)
    with ThreadPoolExecutor(2) as pool:
        flushed = pending(dispatcher, pool)
        dispatcher.cleanup(flush=True)
        assert [future.result(60) for future in flushed] == [[("a", 0)], [("b", 0)]]
        cancelled = pending(dispatcher, pool)
        dispatcher.cleanup()
        wait(cancelled, 60)
        errors = [future.exception(0) for future in cancelled]
        assert all(isinstance(error, CancelledError) for error in errors)
    assert dispatcher.state()["queue_size"] == 0


def test_cleanup_from_inside_a_batch_returns():
    def run(items: list[Any], _: Any) -> list[Any]:
        dispatcher.cleanup(flush=True)
        return items

    dispatcher = Dispatcher(run)
    assert dispatcher.submit(["x"], 0, 60.0) == ["x"]


@pytest.mark.defect("D14")
def test_only_a_largest_size_means_batches_of_one_and_more():
    sizes: list[int] = []

    def run(items: list[Any], _: Any) -> list[Any]:
        sizes.append(len(items))
        return items

    assert Dispatcher(run, max_size=2).submit(list("abcde"), 0, 60.0) == list("abcde")
    assert sizes == [2, 2, 1]


@pytest.mark.defect("D14")
def test_calls_with_other_parameters_are_other_batches():
    seen: list[tuple[Any, ...]] = []

    def run(items: list[Any], parameters: Any) -> list[Any]:
        seen.append((parameters, *items))
        return items

    dispatcher = Dispatcher(run, min_size=2, wait_s=60.0)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda one: dispatcher.submit([one], one[0], 60.0), ["p1", "q1", "p2", "q2"]))
    assert sorted(parameters for parameters, *_ in seen) == ["p", "q"]
    assert all(item[0] == parameters for parameters, *items in seen for item in items)


def test_a_caller_that_waits_too_long_leaves_the_queue():
    dispatcher = Dispatcher(double, min_size=4, wait_s=100.0)
    with pytest.raises(DeadlineExceeded):
        dispatcher.submit(["x"], 0, 0.01)
    assert dispatcher.state()["queue_size"] == 0


def test_an_interrupt_of_the_leader_reaches_those_who_wait_for_it():
    def run(items: list[Any], _: Any) -> list[Any]:
        raise KeyboardInterrupt

    dispatcher = Dispatcher(run, min_size=2, wait_s=60.0)
    errors: list[BaseException] = []

    def caller() -> None:
        try:
            dispatcher.submit(["x"], 0, 60.0)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=caller) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(errors) == 2


@pytest.mark.parametrize("sizes", [(0, 1), (3, 2), (None, 0)])
def test_sizes_that_cannot_be_are_refused(sizes: tuple[Any, Any]):
    with pytest.raises(ConfigError, match="min_batch_size"):
        Dispatcher(double, *sizes)
