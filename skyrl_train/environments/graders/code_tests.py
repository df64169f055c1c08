"""Grades programs with tests: each test runs the program in a new sandbox, and its answer is judged outside.

The sandbox contains only the program and the test's input, neither the expected output nor the code that compares. So a
program that exits early, replaces the driver, patches `__eq__` or prints what a passing test would print has only given
a wrong answer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.fenced_blocks import PYTHON_LANGUAGES as PYTHON_FENCES, find_fenced_blocks
from skyrl_train.environments.tools.sandbox import PYTHON, Limits, Sandbox, SandboxResult

_INSIDE = Path(__file__).with_name("code_tests_in_sandbox.py")
_MIN_OUTPUT_LIMIT_BYTES = 65536
"""Bytes that a program may write at least; otherwise four times the size of the expected output."""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """One test: the input and the expected output."""

    input: str
    """Standard input; for a function, its arguments as JSON, one per line."""
    output: str
    """Expected standard output; for a function, its return value as JSON."""
    function: str | None = None
    """The function, or method of class Solution, to call; None for a program."""


@dataclass(frozen=True, slots=True)
class GradingResult:
    """How many tests a program passed: grading ends at the first one that it fails."""

    passed: int
    total: int
    failure: str | None
    """None, "wrong_answer", "error" (non-zero status), "limit" (time or output of a test), "out_of_time" (of all)."""


def last_python_block(text: str) -> str | None:
    """Return the last closed ```python block of the final answer, else one that its end leaves open, or None."""
    found = find_fenced_blocks(final_answer(text))
    blocks = [fence.body for fence in found if fence.is_closed and fence.language in PYTHON_FENCES]
    if not blocks and found and found[-1].language in PYTHON_FENCES:
        blocks = [found[-1].body]
    return blocks[-1] if blocks else None


def grade(
    code: str, tests: Sequence[CodeTest], sandbox: Sandbox, test_timeout_s: float, timeout_s: float
) -> GradingResult:
    """Run `code` on the tests in order, each in a new process, for at most `timeout_s` seconds in all.

    Raises EnvironmentFailure if the sandbox itself fails.
    """
    deadline = time.monotonic() + timeout_s
    for passed, test in enumerate(tests):
        left = deadline - time.monotonic()
        if left <= 0:
            return GradingResult(passed, len(tests), "out_of_time")
        outcome = _run(code, test, sandbox, min(test_timeout_s, left))
        if outcome.killed_by is not None or outcome.timed_out:
            out_of_total = left < test_timeout_s and outcome.killed_by == "wall"
            return GradingResult(passed, len(tests), "out_of_time" if out_of_total else "limit")
        if outcome.returncode != 0:
            return GradingResult(passed, len(tests), "error")
        matches = outputs_match if test.function is None else values_match
        if not matches(outcome.stdout, test.output):
            return GradingResult(passed, len(tests), "wrong_answer")
    return GradingResult(len(tests), len(tests), None)


def _run(code: str, test: CodeTest, sandbox: Sandbox, timeout_s: float) -> SandboxResult:
    limits = Limits(
        wall_s=timeout_s,
        cpu_s=math.ceil(timeout_s),
        output=max(_MIN_OUTPUT_LIMIT_BYTES, 4 * len(test.output.encode("utf-8", "replace"))),
    )
    files = {"driver.py": _INSIDE.read_bytes(), "solution.py": code.encode("utf-8", "replace")}
    command = [PYTHON, "-I", "driver.py", *([test.function] if test.function else [])]
    return sandbox.run(files, command, test.input.encode("utf-8", "replace"), limits)


def outputs_match(written: str, expected: str) -> bool:
    """Whether all lines are equal, ignoring surrounding space; lines of numbers are compared as numbers (1.0 is 1)."""
    lines, wanted = ([line.strip() for line in text.strip().split("\n")] for text in (written, expected))
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, wanted: str) -> bool:
    if line == wanted:
        return True
    words, numbers = line.split(), wanted.split()
    if len(words) != len(numbers):
        return False
    try:
        return all(Decimal(word) == Decimal(number) for word, number in zip(words, numbers, strict=True))
    except InvalidOperation:  # not a number, or a signalling NaN
        return False


def values_match(written: str, expected: str) -> bool:
    """Whether two JSON values are equal; lists equal tuples, and 1 equals 1.0."""
    try:
        return bool(_value(written) == _value(expected))
    except (ValueError, RecursionError):
        return False


def _value(text: str) -> Any:
    """Parse JSON; integers too long to convert (see sys.set_int_max_str_digits) are compared as text."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else digits)


def parse_tests(truth: Any) -> list[CodeTest]:
    """A row's tests in the formats of LiveCodeBench and related datasets, as JSON or as columns.

    [{"input": ..., "output": ..., "testtype": "stdin" | "functional", "metadata": {"func_name": ...}}, ...] or
    {"inputs": [...], "outputs": [...], "fn_name": ...}; `fn_name` in a list's tests counts as well. Raises ValueError.
    """
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"the tests are not JSON: {error}") from error
    if isinstance(truth, Mapping):
        inputs, outputs = truth.get("inputs"), truth.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError(f"tests need inputs and outputs, lists of one length, got {truth!r:.120}")
        common = {key: truth[key] for key in ("fn_name", "metadata", "testtype") if truth.get(key)}
        truth = [{"input": i, "output": o, **common} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(truth, list) or not truth:
        raise ValueError(f"tests are a list with at least one, got {truth!r:.120}")
    return [_test(each) for each in truth]


def _test(each: Any) -> CodeTest:
    if not isinstance(each, Mapping) or each.get("input") is None or each.get("output") is None:
        raise ValueError(f"a test needs input and output, got {each!r:.120}")
    metadata = each.get("metadata")
    function = each.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    kind = each.get("testtype") or each.get("type") or ("functional" if function else "stdin")
    given, wanted = each["input"], each["output"]
    if kind in ("stdin", "stdin_stdout"):
        return CodeTest(_lines(given), _lines(wanted))
    if kind not in ("functional", "function_call", "call_based"):
        raise ValueError(f"testtype={kind!r:.80} is not stdin or functional")
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"a functional test needs the name of its function, got {function!r:.80}")
    given = "\n".join(map(json.dumps, given)) if isinstance(given, list) else given
    wanted = wanted if isinstance(wanted, str) else json.dumps(wanted)
    if not isinstance(given, str):
        raise ValueError(f"the input of a functional test is a list of arguments or text, got {given!r:.80}")
    return CodeTest(given, wanted, function)


def _lines(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"input and output of a stdin test are text, got {value!r:.80}")
    return value
