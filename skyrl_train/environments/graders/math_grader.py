r"""Compares mathematical answers with ground truths in a child process that can be killed.

`9^{9^{9}}` keeps sympy busy in C indefinitely, and Python code in the same process cannot interrupt it. So a
`MathGrader` has a child process (`python -m skyrl_train.environments.graders.math_grader`), which loads math-verify
once and answers one request at a time, as JSON lines over its stdin and stdout. A kernel timer ends the child at the
deadline.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import json
import logging
import os
import re
import resource
import select
import signal
import subprocess
import sys
from enum import StrEnum
from typing import Any

from skyrl_train.environments.graders.math_normalization import normalize_latex
from skyrl_train.errors import ConfigError, EnvironmentFailure
from skyrl_train.prctl import set_process_attribute

START_TIMEOUT_S = 60.0
"""Maximum time for the child to import math-verify, which takes two seconds on an idle machine."""
EXIT_TIMEOUT_S = 0.5
"""Time that the child has to end after its deadline, before it is killed."""
MAX_ANSWER_CHARS = 1000
"""Maximum characters of an answer. The longest in MATH has 159."""
MEMORY_BYTES = 2 * 2**30
HEDGE_SOURCES = (
    r"\b(?:either|maybe|perhaps|possibly|probably|about|approx|approximately|roughly|or so|if|not|wrong|incorrect)\b",
    r"\b(?:dozen|hundred|squared|cubed|and counting)\b",
    r"\\(?:approx|equiv|sim|simeq|cong|to|implies|iff)(?![A-Za-z])|\\[Rr]ightarrow",
    r"[0-9]\s+[0-9]+(?![0-9]|\s*/)",
    r"\\[lcdv]?dots[bcimo]?(?![A-Za-z])|\.\.\.",
    r"[0-9}]\s*(?:'|\^?\s*\{?\s*\\prime(?![A-Za-z]))",
)
HEDGE_PATTERNS = [re.compile(pattern, re.IGNORECASE) for pattern in HEDGE_SOURCES]


class GradingMethod(StrEnum):
    """How a comparison of an answer with the ground truth was decided."""

    NO_ANSWER = "no_answer"
    """The answer is too long or ambiguous; see `is_unambiguous`."""
    SAME_TEXT = "same_text"
    """The normalized texts are equal."""
    GRADED = "graded"
    """The child compared the two."""
    TIMEOUT = "timeout"
    DIED = "died"
    """The child ran out of memory or stack, or died for another reason."""


def is_unambiguous(answer: str, truth: str) -> bool:
    r"""True if an answer is not empty and does not hedge, except in ways in which the ground truth hedges too.

    A hedge is a word such as "maybe" or "dozen", a sign such as \approx, dots, a prime after a number, or numbers side
    by side.

    Args:
        answer: The normalized answer; see `normalize_latex`.
        truth: The normalized ground truth.
    """
    return bool(answer) and not any(hedge.search(answer) and not hedge.search(truth) for hedge in HEDGE_PATTERNS)


def check_installed() -> None:
    """Raise ConfigError if math-verify is not installed."""
    if importlib.util.find_spec("latex2sympy2_extended") is None:  # math-verify installs it as its parser
        raise ConfigError("the math environment needs math-verify; install it with: pip install 'skyrl-train[math]'.")


class MathGrader:
    """A grader that compares answers in a child process. It is not thread-safe.

    `start` or the first request starts the child, and a child that died is started again. A fork of this process does
    not share the child. It starts its own.

    Args:
        deadline_s: Maximum time of each comparison, in seconds.

    Example:
        with MathGrader(deadline_s=5.0) as grader:
            grader.grade(r"\\frac{2}{4}", "0.5")      # (True, "graded")
    """

    def __init__(self, deadline_s: float = 5.0):
        self.deadline_s = deadline_s
        self._child: subprocess.Popen[bytes] | None = None
        self._owner = os.getpid()
        """Id of the process that started the child."""
        self._ready = False
        self._numbers = itertools.count()

    def __enter__(self) -> MathGrader:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the child without waiting for it. Raises ConfigError if math-verify is not installed."""
        if self._owner != os.getpid():
            self._child, self._owner = None, os.getpid()  # this closes the fork's copies of the pipes
        if self._child is not None:
            return
        check_installed()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._ready = False
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", "skyrl_train.environments.graders.math_grader"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
        )

    def grade(self, answer: str, truth: str) -> tuple[bool, GradingMethod]:
        """Compare an answer with the ground truth.

        This blocks for at most `deadline_s` plus a second, and for the start of the child if it is not ready.

        Args:
            answer: The model's answer in LaTeX.
            truth: The ground truth in LaTeX.

        Returns:
            True if they are equal, and how that was decided.

        Raises:
            EnvironmentFailure: The child does not start (kind "grader").
            ConfigError: math-verify is not installed.
        """
        if len(answer) > max(MAX_ANSWER_CHARS, len(truth)):
            return False, GradingMethod.NO_ANSWER
        compared, reference = normalize_latex(answer), normalize_latex(truth)
        if not is_unambiguous(compared, reference):
            return False, GradingMethod.NO_ANSWER
        if compared == reference:
            return True, GradingMethod.SAME_TEXT
        reply = self._ask({"truth": truth, "answer": answer})
        return reply.get("same", False), GradingMethod(reply["how"])

    def ground_truth_problem(self, truth: str) -> str | None:
        """Return why a text cannot be a ground truth, or None if it can be.

        Args:
            truth: The ground truth in LaTeX.

        Raises:
            EnvironmentFailure: The child does not start (kind "grader").
            ConfigError: math-verify is not installed.
        """
        reply = self._ask({"truth": truth})
        return (
            reply["why"]
            if reply["how"] == GradingMethod.GRADED
            else f"reading it takes more than {self.deadline_s:g} s"
        )

    def close(self) -> None:
        """End the child. A later request starts another one."""
        child, self._child = self._child, None
        if child is None or self._owner != os.getpid():
            return
        child.kill()
        for pipe in (child.stdin, child.stdout):
            with contextlib.suppress(BrokenPipeError):
                assert pipe is not None
                pipe.close()
        child.wait()

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply. If the child dies, try once more before the request gets "died"."""
        for _ in range(2):
            self._wait_until_ready()
            assert self._child is not None and self._child.stdin is not None
            number = next(self._numbers)
            message = request | {"deadline_s": self.deadline_s, "number": number}
            try:
                self._child.stdin.write(json.dumps(message).encode("ascii") + b"\n")
                self._child.stdin.flush()
                reply = self._receive(self.deadline_s + EXIT_TIMEOUT_S)
                if reply["number"] == number:
                    return reply
                ended = 0  # two threads sent requests at the same time, so the replies are mixed up
            except TimeoutError:
                ended = -signal.SIGALRM
            except (EOFError, BrokenPipeError):
                ended = self._child.wait()
            self.close()
            self.start()  # it loads while the model generates
            if ended == -signal.SIGALRM:
                return {"how": GradingMethod.TIMEOUT}
        return {"how": GradingMethod.DIED}

    def _wait_until_ready(self) -> None:
        self.start()
        if not self._ready:
            try:
                self._receive(START_TIMEOUT_S)
            except (EOFError, TimeoutError) as error:
                self.close()
                raise EnvironmentFailure("grader", f"the math grader's process did not start: {error}") from error
            self._ready = True

    def _receive(self, seconds: float) -> dict[str, Any]:
        """Return the child's next reply. Raise TimeoutError if there is none in time, or EOFError if it has ended."""
        assert self._child is not None and self._child.stdout is not None
        readable, _, _ = select.select([self._child.stdout], [], [], seconds)
        if not readable:
            raise TimeoutError(f"no answer within {seconds:g} s")
        line = self._child.stdout.readline()  # a line is written at once, so this does not wait for the rest
        if not line:
            raise EOFError("it ended")
        return json.loads(line)


@functools.cache
def get_grader(deadline_s: float) -> MathGrader:
    """Return this process's grader with the given deadline in seconds.

    All environments of the process share it, because they are called one at a time.
    """
    return MathGrader(deadline_s)


def _limit() -> None:
    """Limit this child's memory and files. On Linux, also make the kernel end it together with its parent."""
    set_process_attribute("PR_SET_PDEATHSIG", signal.SIGKILL)
    for kind, amount in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_AS, MEMORY_BYTES),
    ):
        with contextlib.suppress(ValueError, OSError):  # macOS has no RLIMIT_AS
            resource.setrlimit(kind, (amount, amount))


def run_grader() -> None:
    """Answer requests from stdin until it is closed. Runs in the child process."""
    _limit()
    logging.disable(logging.CRITICAL)
    sys.setrecursionlimit(3000)
    from skyrl_train.environments.graders.math_equality import ground_truth_problem, is_equal

    if not is_equal(r"\frac{x}{2}", "0.5x"):  # also loads the modules that a comparison needs
        raise RuntimeError("math-verify does not parse")
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process even during C code
    sink = os.fdopen(os.dup(1), "wb", buffering=0)
    sink.write(b"{}\n")
    for line in sys.stdin.buffer:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["deadline_s"])
        reply: dict[str, Any] = {"how": GradingMethod.GRADED, "number": request["number"]}
        try:
            if "answer" in request:
                reply["same"] = is_equal(request["truth"], request["answer"])
            else:
                reply["why"] = ground_truth_problem(request["truth"])
        except (MemoryError, RecursionError):
            reply["how"] = GradingMethod.DIED
        except Exception as error:  # sympy raises many types on a model's text, which is then wrong
            reply |= {"same": False, "why": f"{type(error).__name__}: {error}"[:200]}
        signal.setitimer(signal.ITIMER_REAL, 0)
        sink.write(json.dumps(reply).encode("ascii") + b"\n")


if __name__ == "__main__":
    run_grader()
