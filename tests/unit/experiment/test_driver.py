"""Early ends of a run by signals and errors, the report of a failure, and the driver's garbage collector."""

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
def test_signal_cancels_work_and_is_raised(number: int):
    events: list[str] = []

    async def work() -> None:
        os.kill(os.getpid(), number)
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0.01)
            events.append("saved")
            raise

    with pytest.raises(RunInterrupted) as interruption:
        asyncio.run(run_until_signaled(work(), never()))
    assert (interruption.value.signal, events) == (number, ["saved"])


def test_result_and_error_of_work_pass_through():
    async def result() -> int:
        return 7

    async def error() -> int:
        raise KeyError("a bug")

    assert asyncio.run(run_until_signaled(result(), never())) == 7
    with pytest.raises(KeyError, match="a bug"):
        asyncio.run(run_until_signaled(error(), never()))


@pytest.mark.defect("blocked-loop-drops-signal")
def test_signal_during_blocked_loop_is_raised():
    async def work() -> int:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.05)  # as ray.shutdown() does
        return 7

    with pytest.raises(RunInterrupted, match="SIGTERM"):
        asyncio.run(run_until_signaled(work(), never()))


def test_lost_cluster_is_raised_over_closing_errors():
    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            raise ConnectionError("closing failed, too")

    with pytest.raises(ClusterLost, match="gcs_server") as lost:
        asyncio.run(run_until_signaled(work(), soon(ClusterLost("gcs_server"))))
    assert isinstance(lost.value.__cause__, ConnectionError)


@pytest.mark.defect("signal-in-api-program")
def test_cancelled_caller_waits_for_work_in_thread():
    done: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.05)
            done.append("saved")

    async def cancel() -> None:
        waiting = asyncio.ensure_future(run_until_signaled(work(), never()))
        await asyncio.sleep(0.05)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() and done == ["saved"]

    with ThreadPoolExecutor() as threads:
        threads.submit(asyncio.run, cancel()).result(20)


@pytest.mark.parametrize(("code", "status"), [(143, 143), (130, 130), (1, -signal.SIGABRT)])
def test_signal_status_survives_crashing_teardown(code: int, status: int):
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


SLOW_SAVING_PROGRAM = """
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
def slow_saving_run() -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    command = [sys.executable, "-c", SLOW_SAVING_PROGRAM]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, preexec_fn=default_sighup) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == b"running\n"
        yield run, run.stdout


@pytest.mark.fault("F39")
@pytest.mark.parametrize(("first", "second"), [("SIGINT", "SIGINT"), ("SIGINT", "SIGTERM"), ("SIGTERM", "SIGINT")])
def test_second_signal_exits_without_saving(first: str, second: str):
    with slow_saving_run() as (run, stdout):
        run.send_signal(signal.Signals[first])
        assert stdout.readline() == b"saving\n"
        time.sleep(0.2)
        run.send_signal(signal.Signals[second])
        assert run.wait(10) == 128 + signal.Signals[second]
        assert stdout.read() == b""


@pytest.mark.fault("F39")
@pytest.mark.defect("group-signals-kill-ray-first")
@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.on_demand) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_repeated_signal_counts_once(number: signal.Signals):
    with slow_saving_run() as (run, stdout):
        run.send_signal(number)
        assert stdout.readline() == b"saving\n"
        run.send_signal(
            number
        )  # `timeout` signals its child, then the group; `uv run` forwards what the group got, too
        assert stdout.readline() == b"saved\n"
        run.send_signal(number)
        assert run.wait(10) == 128 + number


def test_ignored_sighup_stays_ignored():
    program = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + SLOW_SAVING_PROGRAM
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout is not None and run.stderr is not None
        assert run.stdout.readline() == b"running\n"
        run.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        run.send_signal(signal.SIGTERM)
        assert run.stderr.readline().startswith(b"SIGTERM")
        run.kill()


@pytest.mark.defect("signal-during-shutdown")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_previous_handlers_are_restored_after_work(number: int):
    async def work() -> None:
        assert signal.getsignal(number) is not own_handler

    def own_handler(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(number, own_handler)
    try:
        asyncio.run(run_until_signaled(work(), never()))
        assert signal.getsignal(number) is own_handler
    finally:
        signal.signal(number, before)


@pytest.mark.fault("F39")
@pytest.mark.defect("signal-during-shutdown")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["work", "closing", "exit", "teardown"])
def test_signal_after_work_does_not_crash(place: str, number: signal.Signals):
    program = f"""
import asyncio, atexit, os, sys
from skyrl_train.experiment.driver import exit_with_signal_status, run_until_signaled
def signal_at(moment, kill=os.kill, pid=os.getpid()):
    if moment == "{place}":
        kill(pid, {int(number)})
class Library:
    def __del__(self, signal_at=signal_at, write=os.write):
        signal_at("teardown")
        write(1, b"deleted")
library = Library()
async def work():
    pass
@exit_with_signal_status()
def main():
    atexit.register(signal_at, "exit")
    signal_at("work")
    asyncio.run(run_until_signaled(work(), asyncio.Event().wait()))
    signal_at("closing")
main()
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    if place == "teardown":
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "deleted", "")
    else:
        assert (ended.returncode, ended.stdout, ended.stderr) == (128 + number, "", f"ended by {number.name}\n")


@pytest.mark.fault("F39")
@pytest.mark.defect("signal-during-startup-hangs")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_during_start_exits_at_once(number: signal.Signals):
    """An exception in a weak reference's callback would be printed and lost, as in the release of a lock."""
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


def test_own_handlers_are_restored_after_start():
    def own_handler(number: int, frame: object) -> None:
        raise AssertionError

    before = signal.signal(signal.SIGTERM, own_handler)
    try:
        with exit_on_signals():
            assert signal.getsignal(signal.SIGTERM) is not own_handler
        assert signal.getsignal(signal.SIGTERM) is own_handler
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


def test_failure_ends_with_cause_not_handled_error():
    lines = format_failure(raised(chained)).splitlines()
    assert lines[0] == f"{TRACEBACK_NOTE_PREFIX} FILE."
    assert lines[1].startswith("RuntimeError: no batch (") and lines[1].endswith(" in chained)")
    assert lines[2].startswith(f"KeyError: 'x' ({__file__}:") and len(lines) == 3
    lines = format_failure(raised(handled)).splitlines()
    assert lines[-1].startswith("RuntimeError: no batch") and "KeyError" not in str(lines)


def test_own_error_is_one_line_below_notes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_TOKEN", "0123456789")
    error = EngineError("engine 0 died")
    error.add_note("with 0123456789")
    error.__notes__.append(7)  # type: ignore[arg-type]
    assert format_failure(error) == "with <A_TOKEN>\n7\nEngineError: engine 0 died"


def test_failure_without_user_frame_asks_for_report():
    error = raised(json.loads, "{")
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
    assert format_failure(error).splitlines()[1:] == [BUG_REPORT_HINT, f"JSONDecodeError: {error}"]


@pytest.mark.parametrize("is_outermost", [True, False])
def test_frame_of_another_process_is_named(is_outermost: bool, tmp_path: Path):
    frames = ((tmp_path / "my_loss.py", 12, "my_loss"), (json.__file__, 1, "loads"))
    remote_traceback = "".join('  File "{}", line {}, in {}\n'.format(*frame) for frame in frames)
    cause_line = f"ValueError: bad ({tmp_path}/my_loss.py:12 in my_loss)"
    cause = ValueError("bad")
    task_error = RayTaskError("call", remote_traceback, cause).as_instanceof_cause()
    task_error.add_note(f"{TRACEBACK_NOTE_PREFIX} FILE.")
    if is_outermost:
        assert format_failure(task_error).splitlines()[-1] == cause_line
        return
    error = raised(_raise, cause, task_error)
    error.raised_in = "learner 0.update"  # type: ignore[attr-defined]
    assert format_failure(error).splitlines()[-1] == f"learner 0.update: {cause_line}"


def _raise(error: Exception, cause: Exception) -> None:
    raise error from cause


def test_traceback_is_printed_without_log():
    with pytest.raises(RuntimeError) as found:
        chained()
    assert "Traceback (most recent call last)" in format_failure(found.value)


def test_gc_settings_are_restored_after_failure():
    gc.unfreeze()  # conftest.py has frozen what collection imported
    before = gc.get_threshold(), gc.get_freeze_count()
    with suppress(RuntimeError), relaxed_gc():
        assert gc.get_threshold() == GC_THRESHOLDS and gc.isenabled() and gc.get_freeze_count() > before[1]
        raise RuntimeError
    assert (gc.get_threshold(), gc.get_freeze_count()) == before
