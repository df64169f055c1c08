"""How a run ends early: by real signals, by an error that is explained; and the driver's garbage collector."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import pytest
from ray.exceptions import RayTaskError

from skyrl_train.errors import ClusterLost, EngineError, RunInterrupted, SkyRLError
from skyrl_train.experiment.driver import (
    BUG_REPORT_HINT,
    GC_THRESHOLDS,
    exit_on_signals,
    format_failure,
    relaxed_gc,
    run_until_signaled,
)
from skyrl_train.report.logs import TRACEBACK_NOTE_PREFIX
from tests.support.signal_handlers import default_sighup


async def never() -> SkyRLError:
    await asyncio.Event().wait()
    raise AssertionError


async def soon(error: SkyRLError) -> SkyRLError:
    await asyncio.sleep(0.01)
    return error


@pytest.mark.fault("F39")
@pytest.mark.defect("C3-signals-lose-the-run")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_cancels_the_work_and_is_the_reason_once_it_has_ended(number: int):
    done: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            done.append("saved")
            raise

    with pytest.raises(RunInterrupted) as stopped:
        asyncio.run(run_until_signaled(work(), never()))
    assert (stopped.value.signal, done) == (number, ["saved"])


def test_work_that_ends_by_itself_gives_its_result_or_its_error():
    async def result() -> int:
        return 7

    async def error() -> int:
        raise KeyError("a bug")

    assert asyncio.run(run_until_signaled(result(), never())) == 7
    with pytest.raises(KeyError, match="a bug"):
        asyncio.run(run_until_signaled(error(), never()))


@pytest.mark.defect("signals-swallowed-by-a-blocked-loop")
def test_a_signal_that_comes_while_the_end_of_the_work_blocks_the_loop_is_the_reason():
    async def work() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)  # as ray.shutdown() does
        return 7

    with pytest.raises(RunInterrupted, match="SIGTERM"):
        asyncio.run(run_until_signaled(work(), never()))


def test_the_death_of_the_cluster_ends_it_for_that_reason_whatever_closing_raises():
    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            raise ConnectionError("closing failed, too")

    with pytest.raises(ClusterLost, match="gcs_server") as lost:
        asyncio.run(run_until_signaled(work(), soon(ClusterLost("gcs_server"))))
    assert isinstance(lost.value.__cause__, ConnectionError)


@pytest.mark.defect("signals-in-a-program")
def test_whoever_is_cancelled_waits_for_the_end_of_the_work_also_in_a_thread_without_signals():
    done: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.05)
            done.append("saved")

    async def cancels() -> None:
        told = asyncio.ensure_future(run_until_signaled(work(), never()))
        await asyncio.sleep(0.05)
        told.cancel()
        await asyncio.wait([told])
        assert told.cancelled() and done == ["saved"]

    with ThreadPoolExecutor() as threads:
        threads.submit(asyncio.run, cancels()).result(20)


@pytest.mark.parametrize(("code", "status"), [(143, 143), (130, 130), (1, -signal.SIGABRT)])
def test_a_process_that_was_told_to_end_says_so_whatever_its_teardown_does(code: int, status: int):
    program = f"""
import atexit, os, sys
from skyrl_train.experiment.driver import exit_with_signal_status
class Library:
    def __del__(self, abort=os.abort):
        abort()
library = Library()
atexit.register(print, "closed")
with exit_with_signal_status():
    print("ended by a signal")
    sys.exit({code})
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout.splitlines()[:1]) == (status, ["ended by a signal"])
    assert code == 1 or ended.stdout.splitlines() == ["ended by a signal", "closed"]


TAKES_TIME_TO_SAVE = """
import asyncio
from skyrl_train.experiment.driver import run_until_signaled
async def work():
    try:
        print("running", flush=True)
        await asyncio.sleep(60)
    finally:
        print("saving", flush=True)
        await asyncio.sleep(3)
        print("saved", flush=True)
        await asyncio.sleep(60)
asyncio.run(run_until_signaled(work(), asyncio.Event().wait()))
"""


@contextmanager
def taking_time_to_save() -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    command = [sys.executable, "-c", TAKES_TIME_TO_SAVE]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=default_sighup) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"running\n"
        yield run, run.stdout


@pytest.mark.fault("F39")
@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGINT", "SIGTERM"), ("SIGTERM", "SIGINT")])
def test_second_signal_exits_without_saving(first: str, second: str):
    with taking_time_to_save() as (run, stdout):
        run.send_signal(signal.Signals[first])
        assert stdout.readline() == b"saving\n"
        time.sleep(0.2)
        run.send_signal(signal.Signals[second])
        assert run.wait(10) == 128 + signal.Signals[second]
        assert stdout.read() == b""


@pytest.mark.fault("F39")
@pytest.mark.defect("group-signals-kill-ray-first")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_repeated_signal_counts_once(number: signal.Signals):
    with taking_time_to_save() as (run, stdout):
        run.send_signal(number)
        assert stdout.readline() == b"saving\n"
        run.send_signal(number)  # `timeout` signals its child and then the group, `uv run` what its child got as well
        assert stdout.readline() == b"saved\n"
        run.send_signal(number)
        assert run.wait(10) == 128 + number


def test_ignored_sighup_stays_ignored():
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + TAKES_TIME_TO_SAVE
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == b"running\n"
        run.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        assert run.stderr.readline().startswith(b"SIGTERM")
        run.kill()


@pytest.mark.defect("signals-after-the-end")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_handlers_from_before_are_back_once_the_work_has_ended(number: int):
    async def work() -> None:
        assert signal.getsignal(number) is not ours

    def ours(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(number, ours)
    try:
        asyncio.run(run_until_signaled(work(), never()))
        assert signal.getsignal(number) is ours
    finally:
        signal.signal(number, before)


@pytest.mark.fault("F39")
@pytest.mark.defect("signals-after-the-end")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["work", "closing", "exit", "teardown"])
def test_a_signal_to_a_process_whose_work_is_over_is_not_its_crash(place: str, number: signal.Signals):
    program = f"""
import asyncio, atexit, os, sys
from skyrl_train.experiment.driver import exit_with_signal_status, run_until_signaled
def told(here, kill=os.kill, pid=os.getpid()):
    if here == "{place}":
        kill(pid, {int(number)})
class Library:
    def __del__(self, told=told, write=os.write):
        told("teardown")
        write(1, b"torn down")
library = Library()
async def work():
    pass
@exit_with_signal_status()
def main():
    atexit.register(told, "exit")
    told("work")
    asyncio.run(run_until_signaled(work(), asyncio.Event().wait()))
    told("closing")
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    if place == "teardown":
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "torn down", "")
    else:
        assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", f"ended by {number.name}\n")


@pytest.mark.fault("F39")
@pytest.mark.defect("signals-in-a-library")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_start_ends_it_whatever_library_it_interrupts(number: signal.Signals):
    """Exceptions in weak references' callbacks are printed and lost, as those in the release of a lock are."""
    program = f"""
import os, weakref
from skyrl_train.experiment.driver import exit_on_signals
class Thing:
    pass
thing = Thing()
ref = weakref.ref(thing, lambda ref: os.kill(os.getpid(), {int(number)}))
with exit_on_signals():
    del thing
    print("went on", flush=True)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", f"ended by {number.name}\n")


def test_a_program_s_own_handlers_are_back_after_a_start():
    def ours(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, ours)
    try:
        with exit_on_signals():
            assert signal.getsignal(signal.SIGTERM) is not ours
        assert signal.getsignal(signal.SIGTERM) is ours
    finally:
        signal.signal(signal.SIGTERM, before)


def raised(function: object, *args: object) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011 - any
        function(*args)  # type: ignore[operator]
    found.value.add_note(f"{TRACEBACK_NOTE_PREFIX} FILE.")
    return found.value


def chained() -> None:
    try:
        {"y": 0}["x"]
    except KeyError as error:
        raise RuntimeError("no batch") from error


def handled() -> None:
    try:
        {"y": 0}["x"]
    except KeyError:
        raise RuntimeError("no batch")  # noqa: B904


def test_the_cause_is_last_and_what_was_handled_is_none():
    lines = format_failure(raised(chained)).splitlines()
    assert lines[0] == f"{TRACEBACK_NOTE_PREFIX} FILE."
    assert lines[1].startswith("RuntimeError: no batch (") and lines[1].endswith(" in chained)")
    assert lines[2].startswith(f"KeyError: 'x' ({__file__}:") and len(lines) == 3
    lines = format_failure(raised(handled)).splitlines()
    assert lines[-1].startswith("RuntimeError: no batch") and "KeyError" not in str(lines)


def test_an_error_of_ours_is_one_line_below_its_notes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_TOKEN", "0123456789")
    error = EngineError("engine 0 died")
    error.add_note("with 0123456789")
    error.__notes__.append(7)  # type: ignore[arg-type]
    assert format_failure(error) == "with <A_TOKEN>\n7\nEngineError: engine 0 died"


def test_without_a_line_of_the_user_s_own_it_may_be_our_defect():
    error = raised(json.loads, "{")
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
    assert format_failure(error).splitlines()[1:] == [BUG_REPORT_HINT, f"JSONDecodeError: {error}"]


@pytest.mark.parametrize("on_top", [True, False])
def test_a_line_of_another_process_is_named(on_top: bool, tmp_path: Path):
    frames = ((tmp_path / "my_loss.py", 12, "my_loss"), (json.__file__, 1, "loads"))
    there = "".join('  File "{}", line {}, in {}\n'.format(*frame) for frame in frames)
    cause_line = f"ValueError: bad ({tmp_path}/my_loss.py:12 in my_loss)"
    cause = ValueError("bad")
    carrier = RayTaskError("call", there, cause).as_instanceof_cause()
    carrier.add_note(f"{TRACEBACK_NOTE_PREFIX} FILE.")
    if on_top:
        assert format_failure(carrier).splitlines()[-1] == cause_line
        return
    error = raised(_raise, cause, carrier)
    error.raised_in = "learner 0.update"  # type: ignore[attr-defined]
    assert format_failure(error).splitlines()[-1] == f"learner 0.update: {cause_line}"


def _raise(error: Exception, cause: Exception) -> None:
    raise error from cause


def test_before_there_is_a_log_the_traceback_is_printed():
    with pytest.raises(RuntimeError) as found:
        chained()
    assert "Traceback (most recent call last)" in format_failure(found.value)


def test_the_collector_is_as_it_was_after_a_run_that_failed():
    before = gc.get_threshold(), gc.get_freeze_count()
    with suppress(RuntimeError), relaxed_gc():
        assert gc.get_threshold() == GC_THRESHOLDS and gc.isenabled() and gc.get_freeze_count() > before[1]
        raise RuntimeError
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
