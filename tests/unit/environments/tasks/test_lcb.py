from __future__ import annotations

import base64
import json
import pickle
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.data.dataset import load_prompts
from skyrl_train.environments.graders.code_tests import (
    CodeTest,
    GradingFailure,
    GradingResult,
    grade,
    last_python_block,
    outputs_match,
    parse_tests,
    values_match,
)
from skyrl_train.environments.tasks.lcb import LCBEnv
from skyrl_train.environments.tools.sandbox import Sandbox
from skyrl_train.errors import ConfigError

SCRIPT = Path(__file__).parents[4] / "examples" / "livecodebench" / "lcb_dataset.py"
ADD = [CodeTest("1 2\n", "3\n"), CodeTest("20 22\n", "42\n")]
METHOD = [CodeTest("[1, 2]\n4", "7", "total"), CodeTest("[]\n0", "0", "total")]


def needs_bubblewrap() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")


def verdict(code: str, tests: list[CodeTest], test_timeout_s: float = 30.0, timeout_s: float = 120.0) -> GradingResult:
    needs_bubblewrap()
    return grade(code, tests, Sandbox(), test_timeout_s, timeout_s)


@pytest.mark.parametrize(
    ("code", "tests"),
    [
        ("a, b = map(int, input().split())\nprint(a + b)", ADD),
        ("import sys\nprint(sum(map(int, sys.stdin.read().split())))\nsys.exit()", ADD),
        (
            "from __future__ import annotations\nif __name__ == '__main__':\n    print(sum(map(int, input().split())))",
            ADD,
        ),
        (
            "class Solution:\n    def total(self, xs: List[int], y) -> int:\n        return sum(xs) + y",
            METHOD,
        ),
        ("def total(xs, y):\n    print(y)\n    return sum(xs) + y", METHOD),
        ("def total(xs, y):\n    return float(reduce(operator.add, xs, y))", METHOD),
        ("def pair(x):\n    return (x, {1: None})", [CodeTest("true", '[true, {"1": null}]', "pair")]),
    ],
)
def test_correct_program_passes_every_test(code: str, tests: list[CodeTest]):
    assert verdict(code, tests) == GradingResult(len(tests), len(tests), None)


@pytest.mark.parametrize(
    ("code", "tests", "expected"),
    [
        ("print(3)", ADD, GradingResult(1, 2, GradingFailure.WRONG_ANSWER)),
        ("print(input())", ADD, GradingResult(0, 2, GradingFailure.WRONG_ANSWER)),
        ("print(3); raise SystemExit(1)", ADD, GradingResult(0, 2, GradingFailure.ERROR)),
        ("print(3", ADD, GradingResult(0, 2, GradingFailure.ERROR)),
        ("print('x' * 10**7)", ADD, GradingResult(0, 2, GradingFailure.LIMIT)),
        ("def total(xs, y): return {y}", METHOD, GradingResult(0, 2, GradingFailure.ERROR)),
        ("def other(xs, y): return 7", METHOD, GradingResult(0, 2, GradingFailure.ERROR)),
        ("def total(xs, y): print(7)", METHOD, GradingResult(0, 2, GradingFailure.WRONG_ANSWER)),
    ],
)
def test_grading_ends_at_the_first_test_that_fails(code: str, tests: list[CodeTest], expected: GradingResult):
    assert verdict(code, tests) == expected


PASS = "print('PASS'); print('1 passed'); print(True)"
ATTACKS = {
    "leaves with success": "import sys; sys.exit(0)",
    "leaves at once": "import os; os._exit(0)",
    "says pass at exit": f"import atexit; atexit.register(lambda: exec({PASS!r}))",
    "overwrites the runner": (
        "import os, sys\n"
        "for name in ('driver.py', 'solution.py', sys.argv[0]):\n"
        "    try: open(name, 'w').write('print(True)')\n"
        "    except OSError: pass\n"
        "sys.modules['__main__'].main = sys.modules['json'].dump = sys.modules['json'].dumps = lambda *a, **k: 'true'"
    ),
    "is equal to everything": (
        "class Any(int):\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    __hash__ = int.__hash__\n"
        "def total(xs, y): return Any(5)\n"
        "print(Any(5))"
    ),
    "writes to every descriptor": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, b'true\\nPASS\\n{\"passed\": true}')\n"
        "    except OSError: pass"
    ),
    "forks and kills its parent": (
        "import os, signal\n"
        "if os.fork() == 0: os.kill(os.getppid(), signal.SIGKILL); os._exit(0)\n"
        "import time; time.sleep(5)"
    ),
    "looks for the answers": (
        "import os\n"
        "for root, _, names in os.walk('/tmp'):\n"
        "    for name in names: print(open(os.path.join(root, name), errors='replace').read())"
    ),
}


@pytest.mark.fault("F23")
@pytest.mark.parametrize("attack", ATTACKS)
def test_cheating_program_fails(attack: str):
    """A program cannot affect the comparison, which happens outside of its sandbox."""
    for tests in (ADD, METHOD):
        assert verdict(ATTACKS[attack], tests).failure is not None
        assert verdict(ATTACKS[attack], tests).passed == 0


def test_a_test_and_all_tests_have_deadlines():
    before = time.monotonic()
    loop = "while True: pass"
    assert verdict(loop, ADD, test_timeout_s=1.0) == GradingResult(0, 2, GradingFailure.LIMIT)
    assert verdict(loop, ADD, timeout_s=1.0).failure in ("out_of_time", "limit")
    assert verdict(loop, ADD, timeout_s=0.0) == GradingResult(0, 2, GradingFailure.OUT_OF_TIME)
    assert time.monotonic() - before < 100


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```python\na = 1\n```", "a = 1"),
        ("```python\na\n```\ntext\n```Python3\nb\nc\n```\nbye", "b\nc"),
        ("  ```py\n  a\n  ```", "a"),
        ("```python\na\n```\n```python\nb", "a"),  # the last block is truncated
        ("```python\na\n```python\nb\n```", "b"),
        ("```python\na", "a"),
        ("text\n```python\na\n```\n```sh\nls", "a"),
        ("```python\na\n```sh\nls\n```", None),
        ('```Python title="x"\na\n```', "a"),
        ("~~~py\na\n~~~", "a"),
        ("````python\n'''\n```\n'''\n````", "'''\n```\n'''"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b"),
        ("<think>```python\na\n```", None),
        ("```\na\n```", None),
        ("```python\n```", ""),
        ("print(1)", None),
        ("", None),
    ],
)
def test_last_python_block_of_the_answer_counts(text: str, code: str | None):
    assert last_python_block(text) == code


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("3\n", "3", True),
        ("  3 \n 4\n\n", "3\n4", True),
        ("3 4", "3\n4", False),
        ("1.0 2", "1 2.00", True),
        ("1.0000001", "1", False),
        ("Yes", "YES", False),
        ("nan", "nan", True),
        ("nan", "NaN", False),
        ("sNaN", "1", False),
        ("1e999999999", "1", False),
        ("", "", True),
        ("", "0", False),
    ],
)
def test_lines_are_compared_and_numbers_by_value(written: str, expected: str, same: bool):
    assert outputs_match(written, expected) is same


@pytest.mark.parametrize(
    ("written", "expected", "same"),
    [
        ("[1, 2.0]", "[1.0,2]", True),
        ('{"a": [true, null]}', '{"a":[true,null]}', True),
        ("1", '"1"', False),
        ("9" * 5000, "9" * 5000, True),
        ("NaN", "NaN", False),
        ("[" * 100_000, "[]", False),
        ("1 2", "1", False),
        ("", "null", False),
    ],
)
def test_values_are_compared_as_json(written: str, expected: str, same: bool):
    assert values_match(written, expected) is same


def test_tests_are_parsed_in_every_format():
    stdin = [CodeTest("1\n2", "3")]
    assert parse_tests('[{"input": "1\\n2", "output": "3", "testtype": "stdin"}]') == stdin
    assert parse_tests([{"input": ["1", "2"], "output": ["3"], "type": "stdin_stdout"}]) == stdin
    assert parse_tests({"inputs": ["1\n2"], "outputs": ["3"]}) == stdin
    call = [CodeTest("[1]\n2", "3", "f")]
    assert (
        parse_tests([{"input": "[1]\n2", "output": "3", "testtype": "functional", "metadata": {"func_name": "f"}}])
        == call
    )
    assert parse_tests({"inputs": [[[1], 2]], "outputs": [3], "fn_name": "f"}) == call
    assert parse_tests({"inputs": [[[1], 2]], "outputs": [3], "metadata": {"func_name": "f"}}) == call


@pytest.mark.parametrize(
    "truth",
    [
        None,
        "",
        "{",
        [],
        "[1]",
        {"inputs": ["1"], "outputs": []},
        [{"input": "1"}],
        [{"input": 1, "output": "2"}],
        [{"input": "1", "output": "2", "testtype": "functional"}],
        [{"input": "1", "output": "2", "testtype": "functional", "fn_name": "os.system('x')"}],
        [{"input": "1", "output": "2", "testtype": "assert"}],
    ],
)
def test_row_without_tests_is_rejected(truth: Any):
    with pytest.raises(ValueError, match="test"):
        LCBEnv({}, {"reward_spec": {"ground_truth": truth}})


def test_the_reward_is_all_or_nothing():
    needs_bubblewrap()
    row = {"reward_spec": {"ground_truth": [{"input": "1 2", "output": "3"}, {"input": "2 2", "output": "4"}]}}
    right, half = "print(sum(map(int, input().split())))", "print(3)"
    outputs = [LCBEnv({}, row).step(f"So:\n```python\n{code}\n```") for code in (right, half)]
    outputs.append(LCBEnv({"max_tests": 1}, row).step(f"```python\n{half}\n```"))
    outputs.append(LCBEnv({}, row).step(f"```python\n{right}"))
    outputs.append(LCBEnv({}, row).step(right))
    assert [output.reward for output in outputs] == [1.0, 0.0, 1.0, 1.0, 0.0]
    assert [output.metadata["tests_passed"] for output in outputs] == [1.0, 0.5, 1.0, 1.0, 0.0]
    assert [output.metadata["has_code"] for output in outputs] == [True, True, True, True, False]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["environment.skyrl_gym.lcb.timeout_s=55"], "lcb.timeout_s=55.0: must be at most 50"),
        (["trainer.timeouts.environment_step_s=30"], "at most 20 with trainer.timeouts.environment_step_s=30"),
        (["environment.skyrl_gym.lcb.test_timeout_s=46"], "at most environment.skyrl_gym.lcb.timeout_s=45"),
        (["environment.skyrl_gym.lcb.max_tests=0"], "lcb.max_tests=0"),
    ],
)
def test_limits_beyond_step_timeout_are_rejected(overrides: list[str], message: str):
    with pytest.raises(ConfigError) as caught:
        prepare_config(["environment.env_class=lcb", *overrides], has_accelerator=False)
    assert message.partition(": must")[0] in str(caught.value)


class Evil:
    def __reduce__(self) -> Any:
        return eval, ("print('pickled code ran')",)


def packed(value: Any) -> str:
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def convert(folder: Path, *rows: dict[str, Any]) -> subprocess.CompletedProcess[str]:
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    command = [sys.executable, str(SCRIPT), "--input", str(folder), "--output", str(folder / "out")]
    return subprocess.run(command, capture_output=True, text=True)


def test_local_rows_are_converted_and_graded(tmp_path: Path):
    needs_bubblewrap()
    hidden = packed(json.dumps([{"input": "2", "output": "4", "testtype": "stdin"}]))
    own = {
        "question_content": "Double it.",
        "public_test_cases": '[{"input": "1", "output": "2", "testtype": "stdin"}]',
        "private_test_cases": hidden,
        "starter_code": "",
        "metadata": "{}",
    }
    method = {
        "problem": "Double it.",
        "tests": json.dumps([{"input": "3", "output": "6", "testtype": "functional"}]),
        "starter_code": "class Solution:\n    def double(self, x): ...",
        "metadata": {"func_name": "double"},
    }
    done = convert(tmp_path, own)
    assert done.returncode == 0, done.stderr
    first = load_prompts([str(tmp_path / "out" / "train.parquet")], lambda messages: 1, 10, "other")[0]
    assert first.env_class == "lcb"
    assert len(json.loads(first.env_extras["reward_spec"]["ground_truth"])) == 2
    assert LCBEnv({}, first.env_extras).step("```python\nprint(2 * int(input()))\n```").reward == 1.0
    assert convert(tmp_path, method).returncode == 0
    first = load_prompts([str(tmp_path / "out" / "train.parquet")], lambda messages: 1, 10, "other")[0]
    assert "def double" in first.messages[0]["content"]
    code = "class Solution:\n    def double(self, x): return 2 * x"
    assert LCBEnv({}, first.env_extras).step(f"```python\n{code}\n```").reward == 1.0


@pytest.mark.fault("F38")
def test_pickled_code_in_tests_is_rejected(tmp_path: Path):
    done = convert(tmp_path, {"question_content": "x", "public_test_cases": "[]", "private_test_cases": packed(Evil())})
    assert done.returncode == 1
    assert "private_test_cases name builtins.eval: not a text" in done.stderr
    assert "pickled code ran" not in done.stdout + done.stderr
