"""Every environment grades only the final answer and ignores the reasoning before it."""

from __future__ import annotations

import json
import shutil
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.hydra import load_preset, to_dict
from skyrl_train.data.reasoning import REASONING_FORMATS
from skyrl_train.environments import registry
from skyrl_train.environments.graders import math_grader
from skyrl_train.environments.tasks.judge import parse_verdict
from skyrl_train.environments.tools.parsers import parse_calls
from skyrl_train.errors import EnvironmentFailure
from tests.support.web_server import Request, Response, web_server

WRAPS: dict[str, Callable[[str], str]] = {
    entry.open_marker: lambda text, form=entry: f"{form.open_marker}\n{text}\n{form.close_marker}"  # type: ignore[misc]
    for entry in REASONING_FORMATS
}
HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>"
WRAPS["harmony"] = HARMONY.format
CALL = '{"name": "python", "arguments": {"code": "1"}}'
NEEDS_SANDBOX = ("lcb",)


def truth(value: Any) -> dict[str, Any]:
    return {"reward_spec": {"method": "rule", "ground_truth": value}}


def instruction(name: str, **kwargs: Any) -> dict[str, Any]:
    return truth(json.dumps({"instruction_id_list": [name], "kwargs": [kwargs]}))


@dataclass
class Case:
    """A row of an environment, a right answer and a wrong answer."""

    env: str
    row: dict[str, Any]
    right: str
    wrong: str
    settings: dict[str, Any] = field(default_factory=dict)


URL = {"search_url": "http://127.0.0.1:1/", "sandbox": {}}
CASES = {
    "gsm8k": Case("gsm8k", truth("42"), "#### 42", "#### 41"),
    "gsm8k flexible": Case("gsm8k", truth("42"), "It is 42", "It is 41", {"method": "flexible"}),
    "gsm8k_multi_turn": Case("gsm8k_multi_turn", truth("42") | {"max_turns": 1}, "#### 42", "#### 41"),
    "arithmetic": Case("arithmetic", truth("42"), "#### 42", "#### 41"),
    "multiply": Case("multiply", truth("42") | {"max_turns": 1}, r"\boxed{42}", r"\boxed{41}"),
    "math": Case("math", truth("42"), r"\boxed{42}", r"\boxed{41}"),
    "aime": Case("aime", truth("42"), "Answer: 42", "Answer: 41"),
    "countdown": Case(
        "countdown",
        truth({"target": 24, "numbers": [3, 8]}),
        "<answer>3 * 8</answer>",
        "<answer>3 + 8</answer>",
    ),
    "no_comma": Case("ifeval", instruction("punctuation:no_comma"), "Fine.", "Fine, too."),
    "json_format": Case("ifeval", instruction("detectable_format:json_format"), '{"a": 1}', "a"),
    "existence": Case("ifeval", instruction("keywords:existence", keywords=["sky"]), "The sky.", "Done."),
    "quotation": Case("ifeval", instruction("startend:quotation"), '"Fine."', "Fine."),
    "search": Case("search", truth(["Paris"]) | {"max_turns": 1}, "<answer>Paris</answer>", "<answer>A</answer>", URL),
    "searchcode": Case(
        "searchcode",
        truth("42") | {"max_turns": 1},
        "<solution>#### 42</solution>",
        "<solution>#### 41</solution>",
        URL,
    ),
    "text2sql": Case(
        "text2sql",
        truth("SELECT 42 FROM t") | {"db_id": "farm", "max_turns": 1},
        "<solution>SELECT 42 FROM t</solution>",
        "<solution>SELECT 41 FROM t</solution>",
    ),
    "tool_use": Case(
        "tool_use",
        truth("42") | {"max_turns": 2},
        "#### 42",
        "#### 41",
        {"tools": ["python"]},
    ),
    "lcb": Case(
        "lcb",
        truth([{"input": "", "output": "42"}]),
        "```python\nprint(42)\n```",
        "```python\nprint(41)\n```",
    ),
}


@pytest.fixture(autouse=True)
def _graders() -> Iterator[None]:
    yield
    math_grader.get_grader(5.0).close()


@pytest.fixture(scope="module")
def databases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("databases")
    with sqlite3.connect(folder / "farm.sqlite") as connection:
        connection.executescript("CREATE TABLE t (x INT); INSERT INTO t VALUES (1);")
    return folder


def graded(case: Case, text: str, databases: Path) -> float:
    settings = case.settings | ({"db_path": str(databases)} if case.env == "text2sql" else {})
    environment = registry.make(case.env, settings, case.row)
    try:
        environment.init([{"role": "user", "content": "?"}])
        output = environment.step(text)
        assert output.done
        return float(output.reward)
    finally:
        environment.close()


@pytest.mark.parametrize("name", CASES)
def test_reasoning_changes_no_reward(name: str, databases: Path):
    case = CASES[name]
    if case.env in NEEDS_SANDBOX and (sys.platform != "linux" or shutil.which("bwrap") is None):
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")
    right, wrong, nothing = (graded(case, text, databases) for text in (case.right, case.wrong, ""))
    assert right == 1.0 and wrong < 1.0 and nothing < 1.0
    for wrap in WRAPS.values() if case.env not in NEEDS_SANDBOX else (WRAPS["<think>"], WRAPS["harmony"]):
        assert graded(case, wrap(case.wrong) + case.right, databases) == right
        assert graded(case, wrap(case.right) + case.wrong, databases) == wrong
        assert graded(case, wrap(case.right), databases) == nothing
    for opens in ("<think>", "[THINK]", "<|channel|>analysis<|message|>"):
        assert graded(case, f"{opens}{case.right}", databases) == nothing


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_calls_in_reasoning_are_not_run(wrap: Callable[[str], str]):
    for style, call in (
        ("xml", "<python>1</python>"),
        ("json", f"```json\n{CALL}\n```"),
        ("native", f"<tool_call>{CALL}</tool_call>"),
    ):
        assert parse_calls(wrap(call), style, {"python": "code"}) == []
        assert len(parse_calls(wrap(call) + call, style, {"python": "code"})) == 1


@pytest.mark.parametrize(
    "text",
    [
        f"```python\nx = 1\n```\n```json\n{CALL}\n```",
        f"```json\n{CALL}\n```\n```python\nx = 1\n```",
        f'```json title="call"\n{CALL}\n```',
        f"~~~json\n{CALL}\n~~~",
        f"````json\n{CALL}\n````",
        f"```python\nx = 1\n```\n```json\n{CALL}",
        f"```python\nx = 1\n```\n{CALL}\n```text\ny\n```",
        f'```python\n{{"name": "x"}}\n```\n{CALL}',
        f"[Step 1] Multiply.\n{{x}} is 6.\n[1] is the source.\n{CALL}",
    ],
)
def test_json_calls_are_found_among_other_fences(text: str):
    (call,) = parse_calls(text, "json")
    assert (call.name, call.arguments) == ("python", {"code": "1"})  # type: ignore[union-attr]


@pytest.mark.parametrize("text", ['~~~json\n{"a": 1}\n~~~', '````json a="b"\n{"a": 1}\n````', '```json\n{"a": 1}'])
def test_json_format_accepts_every_fence(text: str, databases: Path):
    assert graded(CASES["json_format"], text, databases) == 1.0


@pytest.mark.parametrize("verdict", ["CORRECT", "WRONG"])
def test_judge_reads_answers_and_judges_without_reasoning(verdict: str):
    def says(request: Request) -> Response:
        message = {"content": f"<think>VERDICT: WRONG?\nVERDICT: CORRECT?</think>VERDICT: {verdict}"}
        return Response(json.dumps({"choices": [{"message": message}]}).encode())

    with web_server(says) as server:
        environment = registry.make("llm_as_a_judge", {"base_url": server.url}, truth("Paris"))
        assert environment.step("<think>secret").reward == 0.0 and server.requests == []
        assert environment.step("<think>secret</think>Rome").reward == float(verdict == "CORRECT")
        asked = json.loads(server.requests[0].body)["messages"][1]["content"]
    assert "secret" not in asked and "Rome" in asked
    with pytest.raises(EnvironmentFailure, match="judge_failed"):
        parse_verdict("<think>VERDICT: CORRECT")


def test_commands_in_reasoning_are_not_run():
    if sys.platform != "linux" or shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")
    row = {"repository": {"a.py": ""}, "tests": [{"script": "print(1)", "output": "1"}], "max_turns": 9}
    environment = registry.make("mini_swe", to_dict(load_preset().environment.skyrl_gym.mini_swe), row)
    environment.init([{"role": "user", "content": "?"}])
    try:
        for text in (
            "<think>```bash\necho no\n```</think>```bash\necho yes\n```",
            '````bash title="x"\necho yes # ```\n````',
            "~~~bash\necho yes\n~~~",
        ):
            assert "\nyes\n" in environment.step(text).observations[0]["content"]
        for text in ("<think>```bash\necho no\n```", "```bash\necho no"):  # the second one may have been truncated
            assert "there were 0" in environment.step(text).observations[0]["content"]
    finally:
        environment.close()
