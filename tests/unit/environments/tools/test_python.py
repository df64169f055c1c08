from __future__ import annotations

import asyncio
import time
from typing import Any

import psutil
import pytest

from skyrl_train.environments.tools.base import ToolBox
from skyrl_train.environments.tools.python import PythonTool
from skyrl_train.environments.tools.sandbox import Limits, Sandbox
from skyrl_train.errors import ConfigError


def run_codes(*codes: str, **settings: Any) -> list[str]:
    box = ToolBox([PythonTool(**{"wall_s": 60.0, **settings})])
    try:
        return [box.call("python", {"code": code}).text for code in codes]
    finally:
        box.close()


def test_printed_output_is_the_result(sandbox: Sandbox):
    printed, silent, failed, left = run_codes("print(6 * 7)", "x = 1", "print('a'); 1 / 0", "import os; os._exit(7)")
    assert (printed, silent, left) == ("42", "[no output]", "[exit status 7]")
    assert failed.startswith("a\nTraceback") and failed.endswith("ZeroDivisionError: division by zero")


def test_only_persistent_calls_share_state(sandbox: Sandbox):
    codes = ["x = 41\nopen('kept', 'w').write('k')", "x += 1", "print(x, open('kept').read())"]
    assert "NameError" in run_codes(*codes)[1]
    assert run_codes(*codes, persistent=True)[2] == "42 k"


def test_session_survives_errors_and_sys_exit(sandbox: Sandbox):
    first, second, third, fourth = run_codes(
        "x = 1",
        "import sys; sys.exit(3)",
        "def f():\n    return x / 0\nf()",
        "print(x, repr(sys.stdin.read()))",
        persistent=True,
    )
    assert first == "[no output]" and "SystemExit: 3" in second
    assert "return x / 0" in third and "session_in_sandbox" not in third
    assert fourth == "1 ''"


@pytest.mark.fault("F17")
def test_timeout_is_reported(sandbox: Sandbox):
    assert run_codes("print('so far'); 9**9**9", wall_s=1.5)[0].endswith("[timed out after 1.5 s]")


@pytest.mark.fault("F17")
def test_timeout_ends_session_and_next_call_restarts(sandbox: Sandbox):
    hung, after = run_codes("x = 1\nwhile True: pass", "print('x' in globals())", persistent=True, wall_s=5.0)
    assert "[timed out after 5 s]\n[the Python process has ended: its variables are gone]" in hung
    assert after == "False"


@pytest.mark.fault("F18")
def test_endless_output_is_truncated_with_marker(sandbox: Sandbox):
    for persistent in (False, True):
        (text,) = run_codes("while True: print('x' * 1000)", persistent=persistent)
        assert "[... " in text and "[stopped: it printed more than 65536 bytes]" in text and len(text) < 9000


def test_session_exit_is_reported(sandbox: Sandbox):
    ended, after = run_codes("import os; os._exit(0)", "print(1)", persistent=True)
    assert "variables are gone" in ended and after == "1"


def test_session_survives_hostile_code(sandbox: Sandbox):
    with sandbox.session(Limits(wall_s=60.0)) as session:
        assert session.execute("import sys; sys.stdout = None; sys.stderr = open('/dev/null')").killed_by is None
        assert session.execute("sys.stdout = sys.__stdout__; print('back')").stdout == "back\n"
        assert session.execute("x = '" + "é" * 200_000 + "'; print(len(x))").stdout == "200000\n"
        assert session.execute("print('\ud800')").killed_by is None
        assert session.execute("import os; os.write(4, b'..'); os.write(5, b'..')").killed_by is None
        session.close()


@pytest.mark.defect("processes-outlive-python-call")
def test_processes_end_and_threads_pause_between_blocks(sandbox: Sandbox):
    code = """
import os, subprocess, threading
ticks = 0
def tick():
    global ticks
    while True:
        ticks += 1
threading.Thread(target=tick, daemon=True).start()
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
        while True:
            pass
sleeper = subprocess.Popen(["/usr/bin/sleep", "1000"])
"""
    others = set(psutil.Process().children())
    with sandbox.session(Limits(wall_s=60.0)) as session:
        assert session.execute(code).killed_by is None
        (started,) = set(psutil.Process().children()) - others
        processes = started.children(recursive=True)
        before = [process.cpu_times() for process in processes]
        time.sleep(0.5)
        assert [process.cpu_times() for process in processes] == before
        assert session.execute("print(sleeper.wait()); before = ticks").stdout == "-9\n"
        assert session.execute("import time; time.sleep(0.1); print(ticks > before)").stdout == "True\n"


@pytest.mark.defect("forged-end-of-output")
def test_code_cannot_forge_end_of_block(sandbox: Sandbox):
    forge = """
import os, time
for fd in range(3, 64):
    try:
        os.write(fd, b"." * 64)
    except OSError:
        continue
"""
    with sandbox.session(Limits(wall_s=60.0)) as session:
        assert session.execute(forge + "time.sleep(0.3); print('late')").stdout == "late\n"
        assert session.execute("print('next')").stdout == "next\n"
        assert session.execute("os.close(1); os.close(2)").killed_by is None
    with sandbox.session(Limits(wall_s=60.0)) as session:
        assert session.execute(forge.replace("os.write", "while True: os.write")).killed_by == "output"


def test_result_names_exceeded_limit(sandbox: Sandbox):
    (text,) = run_codes("import os\nfor number in range(10**6): os.mkdir(str(number))", persistent=True)
    assert text.startswith("[stopped: it made more than 10000 files and folders]\n[the Python process has ended")


def test_sandbox_settings_are_checked_at_start(sandbox: Sandbox):
    PythonTool.check(sandbox={})
    with pytest.raises(ConfigError, match="i_know_this_runs_model_code"):
        PythonTool.check(sandbox={"kind": "unsafe_local"})


def test_close_during_call_ends_session(sandbox: Sandbox):
    async def run() -> None:
        tool = PythonTool(persistent=True, wall_s=2.0)
        call = asyncio.create_task(tool.call({"code": "import time; time.sleep(1000)"}))
        await asyncio.sleep(0.5)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
        await tool.close()

    asyncio.run(run())
