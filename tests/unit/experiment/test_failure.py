"""What is printed of an error that ends a run: the cause last, at a line of the user's own code if there is one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ray.exceptions import RayTaskError

from skyrl_train.errors import EngineError
from skyrl_train.experiment.driver import REPORT, account_of
from skyrl_train.report.logs import TRACEBACK


def raised(function: object, *args: object) -> Exception:
    with pytest.raises(Exception) as found:  # noqa: PT011 - any
        function(*args)  # type: ignore[operator]
    found.value.add_note(f"{TRACEBACK} FILE.")
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
    lines = account_of(raised(chained)).splitlines()
    assert lines[0] == f"{TRACEBACK} FILE."
    assert lines[1].startswith("RuntimeError: no batch (") and lines[1].endswith(" in chained)")
    assert lines[2].startswith(f"KeyError: 'x' ({__file__}:") and len(lines) == 3
    lines = account_of(raised(handled)).splitlines()
    assert lines[-1].startswith("RuntimeError: no batch") and "KeyError" not in str(lines)


def test_an_error_of_ours_is_one_line_below_its_notes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("A_TOKEN", "0123456789")
    error = EngineError("engine 0 died")
    error.add_note("with 0123456789")
    error.__notes__.append(7)  # type: ignore[arg-type]
    assert account_of(error) == "with <A_TOKEN>\n7\nEngineError: engine 0 died"


def test_without_a_line_of_the_user_s_own_it_may_be_our_defect():
    error = raised(json.loads, "{")
    error.__traceback__ = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_next
    assert account_of(error).splitlines()[1:] == [REPORT, f"JSONDecodeError: {error}"]


@pytest.mark.parametrize("on_top", [True, False])
def test_a_line_of_another_process_is_named(on_top: bool, tmp_path: Path):
    frames = ((tmp_path / "my_loss.py", 12, "my_loss"), (json.__file__, 1, "loads"))
    there = "".join('  File "{}", line {}, in {}\n'.format(*frame) for frame in frames)
    cause_line = f"ValueError: bad ({tmp_path}/my_loss.py:12 in my_loss)"
    cause = ValueError("bad")
    carrier = RayTaskError("call", there, cause).as_instanceof_cause()
    carrier.add_note(f"{TRACEBACK} FILE.")
    if on_top:
        assert account_of(carrier).splitlines()[-1] == cause_line
        return
    error = raised(_raise, cause, carrier)
    error.raised_in = "learner 0.update"  # type: ignore[attr-defined]
    assert account_of(error).splitlines()[-1] == f"learner 0.update: {cause_line}"


def _raise(error: Exception, cause: Exception) -> None:
    raise error from cause


def test_before_there_is_a_log_the_traceback_is_printed():
    with pytest.raises(RuntimeError) as found:
        chained()
    assert "Traceback (most recent call last)" in account_of(found.value)
