r"""Decides whether two pieces of LaTeX are equal: math-verify, in processes that can be killed.

`9^{9^{9}}` keeps sympy busy in C forever, and neither a signal handler nor a thread's timeout can interrupt it. So a
`Grader` has a server process (`python -m skyrl_train.environments.graders.latex`) that loads math-verify once and forks
for every grading; the fork has limits on memory and time, and is killed at the deadline.

Wire: JSON lines over the server's stdin and stdout, one request at a time.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib.util
import json
import logging
import math
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from skyrl_train.errors import ConfigError, EnvironmentFailure

START_DEADLINE_S = 60.0
"""Time for the server to import math-verify, which takes two seconds on an idle machine."""
GRACE_S = 0.5
"""Time for the server to report that it killed a grading, before it is killed itself."""
MAX_CHARACTERS = 1000
"""Maximum characters of an answer; the longest in MATH has 159."""
MEMORY_BYTES = 2 * 2**30
NAME = re.compile(r"\s*\\?[A-Za-z]+(?:_(?:\w|\{\w+\}))?(?:\([A-Za-z, ]*\))?\s*=(?!=)")
THOUSANDS = re.compile(r"(?<=[0-9])(?:\\[,;:! ]|~|\{,\})(?=[0-9]{3}(?![0-9]))")
HEDGES = (
    r"\b(?:or|either|maybe|perhaps|possibly|not)\b",
    r"\\(?:approx|equiv|sim|simeq|cong|neq?|lor|vee|to|implies|iff|pm|mp)(?![A-Za-z])|\\(?:left)?[Rr]ightarrow",
    r"(?<!\\)\$",
    r"[0-9](?:\s|~|\\[,;:! ]|\\q?quad)+[0-9]",
    r"\\[lcdv]?dots[bcimo]?(?![A-Za-z])|\.\.\.|\u2026",
    r"[0-9}]\s*(?:_|'|\u2032|\^?\s*\\prime(?![A-Za-z]))",
    r"\\(?:text|textrm|textbf|mathrm|mbox)\s*\{[^{}]*[0-9][^{}]*\}",
)
HEDGE = [re.compile(pattern, re.IGNORECASE) for pattern in HEDGES]


def one_answer(answer: str, truth: str) -> str | None:
    r"""The part of `answer` to compare with `truth`, or None if it offers more than one value.

    math-verify takes the last side of "41 = 42" and ignores text, so that it reads "42 \text{ (or 41)}" and
    "42 \approx 41" as 42. Here an answer must have as many equals signs as the truth, besides a name in front
    ("x = 42"), and no hedging word or sign, dots, subscript, prime, adjacent digits or digits in text, unless the
    truth has them too.
    """
    if len(answer) > max(MAX_CHARACTERS, len(truth)):
        return None
    answer, truth = (text.strip().removesuffix(".") for text in (answer, truth))
    answer, truth = (THOUSANDS.sub("", NAME.sub("", text, count=1)) for text in (answer, truth))
    if answer.count("=") > truth.count("="):
        return None
    if any(hedge.search(answer) and not hedge.search(truth) for hedge in HEDGE):
        return None
    return answer.strip() or None


def check_installed() -> None:
    if importlib.util.find_spec("math_verify") is None:
        raise ConfigError("the math environment needs math-verify; install it with: pip install 'skyrl-train[math]'.")


class Grader:
    """Compares answers, one call at a time.

    The server starts with `start` or the first `grade`, and is restarted when lost.

    Example:
        with Grader(deadline_s=5.0) as grader:
            grader.grade(r"\\frac{2}{4}", "0.5")      # (True, "graded")
    """

    def __init__(self, deadline_s: float = 5.0):
        self.deadline_s = deadline_s
        self._server: subprocess.Popen[bytes] | None = None
        self._ready = False

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the server without waiting for it. Raises ConfigError if math-verify is not installed."""
        if self._server is not None:
            return
        if importlib.util.find_spec("math_verify") is None:
            raise ConfigError(
                "the math environment needs math-verify; install it with: pip install 'skyrl-train[math]'."
            )
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._ready = False
        self._server = subprocess.Popen(
            [sys.executable, "-P", "-m", "skyrl_train.environments.graders.latex"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )

    def grade(self, answer: str, truth: str) -> tuple[bool, str]:
        """Return whether `answer` equals `truth`, and how that was decided.

        The second value is "no_answer" (see `one_answer`), "same_text", "graded", "timeout" or "died" (out of memory or
        stack). Takes at most `deadline_s` plus a second, not counting the start of the server. Raises
        EnvironmentFailure("grader") if the server does not start, or exits twice without having been killed here.
        """
        compared = one_answer(answer, truth)
        if compared is None:
            return False, "no_answer"
        if _squeezed(compared) == _squeezed(one_answer(truth, truth) or truth):
            return True, "same_text"
        request = {"answer": compared, "truth": truth, "deadline_s": self.deadline_s}
        for _ in range(2):
            self._wait_until_ready()
            try:
                reply = self._ask(request)
            except EOFError:  # the server itself was killed from outside: the answer is not to blame
                self.close()
                continue
            except TimeoutError:
                self.close()
                return False, "timeout"
            return reply["same"], reply["how"]
        raise EnvironmentFailure("grader", "its process ended twice while it was grading")

    def close(self) -> None:
        """Kill the server and the grading that it is running. A later `grade` starts another server."""
        server, self._server = self._server, None
        if server is None:
            return
        server.kill()
        for pipe in (server.stdin, server.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        server.wait()

    def _wait_until_ready(self) -> None:
        self.start()
        if not self._ready:
            try:
                self._receive(START_DEADLINE_S)
            except (EOFError, TimeoutError) as error:
                self.close()
                raise EnvironmentFailure("grader", f"the process that loads math-verify: {error}") from error
            self._ready = True

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._server is not None and self._server.stdin is not None
        try:
            self._server.stdin.write(json.dumps(request).encode("ascii") + b"\n")
            self._server.stdin.flush()
        except BrokenPipeError as error:
            raise EOFError("ended") from error
        return self._receive(self.deadline_s + GRACE_S)

    def _receive(self, seconds: float) -> dict[str, Any]:
        """The server's next line. Raises TimeoutError if none comes within `seconds`, EOFError if it has ended."""
        assert self._server is not None and self._server.stdout is not None
        readable, _, _ = select.select([self._server.stdout], [], [], seconds)
        if not readable:
            raise TimeoutError(f"no answer within {seconds:g} s")
        line = self._server.stdout.readline()  # lines are written whole, so this does not wait for the rest
        if not line:
            raise EOFError("ended")
        return json.loads(line)


@functools.cache
def shared(deadline_s: float) -> Grader:
    """The grader of this process: its environments are called one at a time, so one server is enough for all."""
    return Grader(deadline_s)


def _squeezed(text: str) -> str:
    return re.sub(r"\s+|\\!|\\left|\\right", "", text).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


# ---------------------------------------------------------------------------------------------------- server's end


def _same() -> Callable[[str, str], bool]:
    """math-verify's comparison of two pieces of LaTeX, without its timeouts: the process is killed instead."""
    from math_verify import parse, verify
    from math_verify.parser import LatexExtractionConfig

    def parsed(latex: str) -> list[Any]:
        return parse(
            f"\\boxed{{{latex}}}",
            extraction_config=[LatexExtractionConfig(boxed_match_priority=0)],
            fallback_mode="no_fallback",
            parsing_timeout=None,
        )

    def same(answer: str, truth: str) -> bool:
        return bool(verify(parsed(truth), parsed(answer), timeout_seconds=None))

    return same


def _forked(same: Callable[[str, str], bool], answer: str, truth: str, deadline_s: float) -> dict[str, Any]:
    """Run one comparison in a separate process."""
    until = time.monotonic() + deadline_s
    source, sink = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        verdict = b"0"
        try:
            _limit(parent, deadline_s)
            verdict = b"1" if same(answer, truth) else b"0"
        except BaseException:  # whatever sympy raises on a model's text: the answer is wrong
            verdict = b"0"
        finally:
            os.write(sink, verdict)
            os._exit(0)
    os.close(sink)
    with os.fdopen(source, "rb", buffering=0) as verdicts:
        readable, _, _ = select.select([verdicts], [], [], max(0.0, until - time.monotonic()))
        verdict = verdicts.read(1) if readable else b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return {"same": verdict == b"1", "how": "graded" if verdict else "died" if readable else "timeout"}


def _limit(parent: int, deadline_s: float) -> None:
    """Set limits that hold even if the server no longer watches."""
    _die_with_parent()
    if os.getppid() != parent:
        os._exit(0)
    for kind, amount in (
        (resource.RLIMIT_CPU, math.ceil(deadline_s) + 1),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, MEMORY_BYTES),
    ):
        with contextlib.suppress(ValueError, OSError):  # macOS has no RLIMIT_AS
            resource.setrlimit(kind, (amount, amount))


def _die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def serve() -> None:
    """Run the server until its stdin is closed."""
    _die_with_parent()
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(3000)
    same = _same()
    same("\\frac{1}{2}", "0.5")  # every fork inherits what the first comparison loads and caches
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    sink.write(b"{}\n")
    for line in sys.stdin.buffer:
        sink.write(json.dumps(_forked(same, **json.loads(line))).encode("ascii") + b"\n")


if __name__ == "__main__":
    serve()
