"""The dataset scripts of rule-graded environments convert local files into rows that the environments score."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.data.dataset import load_prompts
from skyrl_train.environments import registry
from skyrl_train.environments.graders import math_grader
from skyrl_train.errors import DataError
from tests.support.doc_pages import REPOSITORY, Command, find_commands

EXAMPLES = Path(__file__).parents[3] / "examples"
GSM8K = {"question": "6 boxes of 200?", "answer": "6*200 = <<6*200=1200>>1200\n#### 1,200"}
MATH = {"problem": "Half?", "solution": r"\boxed{2}? No, \boxed{\frac{1}{2}}.", "level": "Level 1"}
DAPO = {"prompt": [{"role": "user", "content": "6*7?"}], "reward_model": {"ground_truth": "42", "style": "rule"}}
CASES: dict[str, tuple[dict[str, Any], str, float]] = {
    "gsm8k_multi_turn": (GSM8K, "#### 1200", 1.0),
    "math": (MATH, r"\boxed{\frac12}", 1.0),
    "aime": (DAPO, "Answer: 42", 1.0),
    "countdown": ({"target": 24, "nums": [3, 8]}, "<answer>3 * 8</answer>", 1.0),
}
"""A row of each environment's source, an answer, and the reward of that answer."""


def script(name: str) -> Any:
    path = EXAMPLES / name / f"{name}_dataset.py"
    spec = importlib.util.spec_from_file_location(f"{name}_dataset", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def converted(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path, *arguments: str) -> list[Any]:
    """Run a script as `python script.py arguments` does, and return the prompts that it wrote for training."""
    path = EXAMPLES / name / f"{name}_dataset.py"
    monkeypatch.setattr(sys, "argv", [str(path), "--output", str(folder / "out"), *arguments])
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    assert (folder / "out" / "validation.parquet").is_file()
    return list(load_prompts([str(folder / "out" / "train.parquet")], lambda messages: 1, 10, "none").prompts)


@pytest.mark.parametrize("name", sorted(CASES))
def test_local_rows_are_converted_and_scored(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    row, answer, reward = CASES[name]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    (prompt,) = converted(name, monkeypatch, tmp_path, "--input", str(tmp_path))
    assert prompt.env_class == name
    assert prompt.messages[-1]["role"] == "user"
    try:
        environment = registry.make(name, {}, prompt.env_extras)
        assert environment.step(answer).reward == reward
        assert registry.make(name, {}, prompt.env_extras).step("").reward <= 0.0
    finally:
        math_grader.get_grader(5.0).close()


def test_multiplications_are_written_without_any_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    prompts = converted("multiply", monkeypatch, tmp_path, "--digits", "2", "--train-size", "30", "--test-size", "3")
    assert len(prompts) == 30
    a, b = prompts[0].messages[-1]["content"].split(" * ")
    answer = rf"\boxed{{{int(a) * int(b)}}}"
    assert registry.make("multiply", {}, prompts[0].env_extras).step(answer).reward == 1.0
    with pytest.raises(SystemExit, match="digits=0 must be from 1 to 12"):
        converted("multiply", monkeypatch, tmp_path, "--digits", "0")


def test_repeated_problems_and_non_integer_answers_are_skipped():
    module = script("aime")
    other = DAPO | {"reward_model": {"ground_truth": r"\frac12"}}
    rows = [module.convert("file, row", row, "train", n) for n, row in enumerate([DAPO, DAPO, other])]
    assert [row is None for row in rows] == [False, True, True]
    assert module.convert("file, row", DAPO, "test", 0) is not None, "in another split"


def test_problems_without_answer_are_skipped():
    convert = script("math").convert
    assert convert("here", {"problem": "?", "solution": "none"}, "train", 0) is None
    assert convert("here", {"problem": "?", "answer": 7}, "train", 0)["reward_spec"]["ground_truth"] == "7"


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("gsm8k_multi_turn", {"question": "?", "answer": "1200"}, "ends in '#### <number>'"),
        ("math", {"problem": "?"}, "'solution'"),
        ("aime", {"prompt": "6*7?"}, "needs prompt"),
        ("countdown", {"target": 24, "nums": ["3"]}, "needs target"),
    ],
)
def test_malformed_row_is_rejected_with_location(name: str, row: dict[str, Any], message: str):
    with pytest.raises(DataError, match=rf"file, row 7: .*{message}"):
        script(name).convert("file, row 7", row, "train", 6)


QUESTION = {"question": "6 * 7?", "answer": "so\n#### 42", "golden_answers": ["42"]}
TESTS = '[{"input": "1", "output": "2", "testtype": "stdin"}]'
SOURCES = {name: row for name, (row, _, _) in CASES.items()} | {
    "ifeval": {"prompt": "Say sky.", "instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["sky"]}]},
    "livecodebench": {"question_content": "Double it.", "public_test_cases": TESTS, "metadata": "{}"},
    "text2sql": {"question": "How many?", "sql": "SELECT 1", "schema": "CREATE TABLE a (b INT)", "db_id": "farm"},
}
"""Source row of the script in each folder of examples/. Other scripts convert QUESTION."""


@pytest.mark.parametrize("command", find_commands(r"python (-m )?examples[/.]\w+[/.]\w+_dataset"), ids=str)
def test_the_commands_of_the_pages(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Scripts that read from the hub read the same rows from a local folder instead."""
    script, *words = command.words[1:] if command.words[1] != "-m" else command.words[2:]
    path = REPOSITORY / (script if script.endswith(".py") else f"{script.replace('.', '/')}.py")
    if path.parent.name in ("reasoning_gym", "verifiers"):
        pytest.importorskip(path.parent.name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.syspath_prepend(str(REPOSITORY / "tests" / "unit" / "environments" / "integrations"))  # vf_guess
    placeholders = {"FOLDER": str(tmp_path), "ID": "vf-guess"}
    arguments = [placeholders.get(word) or os.path.expandvars(os.path.expanduser(word)) for word in words]
    if "conversion_main" in (source := path.read_text()) and "--input" not in arguments:
        arguments += ["--input", str(tmp_path)]
    for split in ("train", "test", "validation"):
        row = SOURCES.get(path.parent.name, QUESTION)
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.setattr(sys, "argv", [str(path), *arguments])
    exec(compile(source, str(path), "exec"), {"__name__": "__main__"})
    output = Path(arguments[arguments.index("--output") + 1])
    for split in ("train", "validation"):
        assert load_prompts([str(output / f"{split}.parquet")], lambda messages: 1, 10, "none").prompts
