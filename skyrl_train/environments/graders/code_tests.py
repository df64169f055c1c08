"""Grades programs with tests. Each test runs the program in a new sandbox, and its answer is compared outside.

The sandbox contains only the program and the test's input, and neither the expected output nor the comparison code. So
a program gains nothing if it exits early, replaces the driver, patches `__eq__` or prints the output of a passing test:
it only gives a wrong answer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from enum import StrEnum
from pathlib import Path
from typing import Any

from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.fenced_blocks import PYTHON_LANGUAGES as PYTHON_FENCES, find_fenced_blocks
from skyrl_train.environments.tools.sandbox import PYTHON, Limits, Sandbox, SandboxResult

_INSIDE = Path(__file__).with_name("code_tests_in_sandbox.py")
_MIN_OUTPUT_LIMIT_BYTES = 65536
"""Minimum limit of a program's output. The limit is four times the size of the expected output if that is larger."""


@dataclass(frozen=True, slots=True)
class CodeTest:
    """A test of a program or of a function, with its input and expected output."""

    input: str
    """Standard input of a program. For a function, its arguments as JSON, one per line."""
    output: str
    """Expected standard output of a program. For a function, its return value as JSON."""
    function: str | None = None
    """Name of the function, or of the method of class Solution, to call. None for a program."""


class GradingFailure(StrEnum):
    """The reason why grading ended before a program passed all tests."""

    WRONG_ANSWER = "wrong_answer"
    ERROR = "error"
    """The program exited with a non-zero status."""
    LIMIT = "limit"
    """A test hit its time limit or one of the sandbox's limits."""
    OUT_OF_TIME = "out_of_time"
    """The time of all tests together is over."""


@dataclass(frozen=True, slots=True)
class GradingResult:
    """The result of grading a program, which ends at the first test that fails."""

    passed: int
    """Number of tests that the program passed."""
    total: int
    """Number of all tests."""
    failure: GradingFailure | None
    """Why grading ended, or None if all tests passed."""


def last_python_block(text: str) -> str | None:
    """Return the last closed Python block of a response's final answer.

    If there is none, return the answer's last block if it is an unclosed Python block, and None otherwise.
    """
    blocks = find_fenced_blocks(final_answer(text))
    programs = [block.body for block in blocks if block.is_closed and block.language in PYTHON_FENCES]
    if not programs and blocks and blocks[-1].language in PYTHON_FENCES:
        programs = [blocks[-1].body]
    return programs[-1] if programs else None


def grade(
    code: str, tests: Sequence[CodeTest], sandbox: Sandbox, test_timeout_s: float, timeout_s: float
) -> GradingResult:
    """Run a program on tests, first to last, until one fails. A test that exceeds a time limit fails.

    Args:
        code: Source code of the program.
        tests: Tests to run.
        sandbox: Sandbox that runs the program, with a new process and folder for each test.
        test_timeout_s: Maximum time of each test, in seconds.
        timeout_s: Maximum time of all tests together, in seconds.

    Raises:
        EnvironmentFailure: The sandbox itself fails.
    """
    deadline = time.monotonic() + timeout_s
    for passed, test in enumerate(tests):
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return GradingResult(passed, len(tests), GradingFailure.OUT_OF_TIME)
        outcome = _run(code, test, sandbox, min(test_timeout_s, remaining_s))
        if outcome.killed_by is not None or outcome.timed_out:
            out_of_total = remaining_s < test_timeout_s and outcome.killed_by == "wall"
            failure = GradingFailure.OUT_OF_TIME if out_of_total else GradingFailure.LIMIT
            return GradingResult(passed, len(tests), failure)
        if outcome.returncode != 0:
            return GradingResult(passed, len(tests), GradingFailure.ERROR)
        matches = outputs_match if test.function is None else values_match
        if not matches(outcome.stdout, test.output):
            return GradingResult(passed, len(tests), GradingFailure.WRONG_ANSWER)
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
    """True if all lines of two outputs are equal, ignoring the white space around them.

    Lines of numbers are compared as numbers, so 1.0 equals 1.
    """
    lines, expected_lines = ([line.strip() for line in text.strip().split("\n")] for text in (written, expected))
    return len(lines) == len(expected_lines) and all(map(_same_line, lines, expected_lines))


def _same_line(line: str, expected: str) -> bool:
    if line == expected:
        return True
    words, numbers = line.split(), expected.split()
    if len(words) != len(numbers):
        return False
    try:
        return all(Decimal(word) == Decimal(number) for word, number in zip(words, numbers, strict=True))
    except InvalidOperation:  # not a number, or a signaling NaN
        return False


def values_match(written: str, expected: str) -> bool:
    """True if two JSON texts have equal values. 1 equals 1.0. False if one of them is not JSON."""
    try:
        return bool(_value(written) == _value(expected))
    except (ValueError, RecursionError):
        return False


def _value(text: str) -> Any:
    """Parse JSON. Integers that are too long to convert (see sys.set_int_max_str_digits) become text."""
    return json.loads(text, parse_int=lambda digits: int(digits) if len(digits) < 4000 else digits)


def parse_tests(truth: Any) -> list[CodeTest]:
    """Parse a row's tests, which may have the formats of LiveCodeBench and related datasets.

    Args:
        truth: The tests as JSON text or as columns, in one of two forms. One is a list of
            {"input": ..., "output": ..., "testtype": "stdin" or "functional", "metadata": {"func_name": ...}}, in which
            `fn_name` may replace the metadata. The other is {"inputs": [...], "outputs": [...], "fn_name": ...}.

    Raises:
        ValueError: The tests have another form, or there are none.
    """
    if isinstance(truth, str):
        try:
            truth = json.loads(truth)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"the tests are not JSON: {error}") from error
    if isinstance(truth, Mapping):
        inputs, outputs = truth.get("inputs"), truth.get("outputs")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
            raise ValueError(f"tests need inputs and outputs, lists of equal length, got {truth!r:.120}")
        common = {key: truth[key] for key in ("fn_name", "metadata", "testtype") if truth.get(key)}
        truth = [{"input": i, "output": o, **common} for i, o in zip(inputs, outputs, strict=True)]
    if not isinstance(truth, list) or not truth:
        raise ValueError(f"tests must be a list of at least one test, got {truth!r:.120}")
    return [_test(entry) for entry in truth]


def _test(entry: Any) -> CodeTest:
    if not isinstance(entry, Mapping) or entry.get("input") is None or entry.get("output") is None:
        raise ValueError(f"a test needs input and output, got {entry!r:.120}")
    metadata = entry.get("metadata")
    function = entry.get("fn_name") or (metadata.get("func_name") if isinstance(metadata, Mapping) else None)
    kind = entry.get("testtype") or entry.get("type") or ("functional" if function else "stdin")
    arguments, output = entry["input"], entry["output"]
    if kind in ("stdin", "stdin_stdout"):
        return CodeTest(_lines(arguments), _lines(output))
    if kind not in ("functional", "function_call", "call_based"):
        raise ValueError(f"testtype={kind!r:.80} is not stdin or functional")
    if not isinstance(function, str) or not function.isidentifier():
        raise ValueError(f"a functional test needs the name of its function, got {function!r:.80}")
    arguments = "\n".join(map(json.dumps, arguments)) if isinstance(arguments, list) else arguments
    output = output if isinstance(output, str) else json.dumps(output)
    if not isinstance(arguments, str):
        raise ValueError(f"the input of a functional test must be a list of arguments or text, got {arguments!r:.80}")
    return CodeTest(arguments, output, function)


def _lines(value: Any) -> str:
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"input and output of a stdin test must be text, got {value!r:.80}")
    return value
