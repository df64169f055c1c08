from __future__ import annotations

import asyncio
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.data.messages import Prompt
from skyrl_train.environments.base import StepOutput, validate_step_output
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.environments.tasks import tool_use
from skyrl_train.environments.tasks.tool_use import ToolUseEnv
from skyrl_train.environments.tools import registry
from skyrl_train.environments.tools.base import Tool, ToolError
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.environments import check_environments

QUESTION = [{"role": "user", "content": "What is 6 * 7?"}]
ROW = {"reward_spec": {"method": "rule", "ground_truth": "42"}, "max_turns": 3}


class Calculator(Tool):
    """A tool that adds numbers and rejects words."""

    name = "add"
    description = "Adds two numbers."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    }
    from_row = ("offset",)
    made: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, offset: int = 0, scale: int = 1):
        self.offset = offset
        Calculator.made.append({"offset": offset, "scale": scale})

    @classmethod
    def check(cls, **settings: Any) -> None:
        if settings.get("scale") == 0:
            raise ConfigError("scale=0")

    async def call(self, arguments: dict[str, Any]) -> str:
        if arguments["a"] < 0:
            raise ToolError("no negative numbers")
        return str(arguments["a"] + arguments["b"] + self.offset)


@pytest.fixture(autouse=True)
def calculator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry.tools, "loaded", dict(registry.tools.loaded))
    registry.tools.register("add")(Calculator)
    monkeypatch.setattr(Calculator, "made", [])


@pytest.fixture
def episode() -> Iterator[Any]:
    opened = []

    def make(extras: dict[str, Any] | None = None, **settings: Any) -> ToolUseEnv:
        opened.append(ToolUseEnv({"tools": ["add"], **settings}, ROW | (extras or {})))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


def call(a: Any, b: Any = 2) -> str:
    return f'<tool_call>{{"name": "add", "arguments": {{"a": {a}, "b": {b}}}}}</tool_call>'


def step(environment: ToolUseEnv, text: str) -> StepOutput:
    output = environment.step(text)
    assert isinstance(output, StepOutput)
    return output


def test_message_without_call_is_scored(episode: Any):
    environment = episode()
    first = step(environment, f"I add. {call(40)}")
    assert (first.done, first.reward) == (False, 0.0)
    assert first.observations == [{"role": "user", "content": "<tool_response>\n42\n</tool_response>"}]
    last = step(environment, "#### 42")
    assert (last.done, last.reward) == (True, 1.0)
    assert last.metadata == {"answered": True, "tool_calls": 1, "tool_errors": 0}


@pytest.mark.parametrize(("text", "reward"), [("#### 42", 1.0), ("#### 41", 0.0), ("42", 0.0), ("", 0.0)])
def test_answer_is_scored_by_strict_rule(episode: Any, text: str, reward: float):
    assert step(episode(), text).reward == reward


def test_invalid_calls_get_feedback(episode: Any):
    environment = episode({"max_turns": 9})
    for text, observation in [
        (call(-1), "no negative numbers"),
        (call('"x"'), "must be of type number"),
        ("<tool_call>{</tool_call>", "not valid JSON"),
        ('<tool_call>{"name": "shell"}</tool_call>', "no tool 'shell'"),
        ("<tool_call>", "is not closed"),
    ]:
        output = step(environment, text)
        assert not output.done and observation in output.observations[0]["content"]
    assert step(environment, "#### 42").metadata["tool_errors"] == 5


def test_tool_calls_are_recorded_with_errors(episode: Any, request: pytest.FixtureRequest):
    environment = episode({"max_turns": 9})
    for text, *told in [
        (call(40), {"name": "add", "arguments": '{"a": 40, "b": 2}'}),
        (call(-1), {"name": "add", "arguments": '{"a": -1, "b": 2}', "error": "tool_error"}),
        (
            call(1) + "<tool_call>{",
            {"name": "add", "arguments": '{"a": 1, "b": 2}'},
            {"name": "", "arguments": "<tool_call>{", "error": "unreadable"},
        ),
        (
            '<tool_call>{"name": "é"}</tool_call>',
            {"name": "é", "arguments": "{}", "error": "unknown_tool"},
        ),
    ]:
        assert validate_step_output(step(environment, str(text))).tool_calls == told
    assert step(environment, "#### 42").tool_calls == []
    request.addfinalizer(partial(sys.setrecursionlimit, sys.getrecursionlimit()))
    sys.setrecursionlimit(1000)  # the default of a new process; earlier tests may have raised it
    deep = [call("[" * depth + "]" * depth) for depth in range(800, 1000, 5)]  # near the depth limit of JSON parsing
    told = [step(episode({"max_turns": 9}), text).tool_calls[0]["error"] for text in deep]
    assert {*told} == {"bad_arguments", "unreadable"}
    last = step(episode({"max_turns": 1}), call(40))
    assert last.tool_calls == [{"name": "add", "arguments": '{"a": 40, "b": 2}', "error": "no_turn_left"}]


def test_calls_of_a_message_are_answered_in_order(episode: Any):
    for role, count in (("user", 1), ("tool", 2)):
        messages = step(episode(observation_role=role), call(1) + call(2)).observations
        assert [message["role"] for message in messages] == [role] * count
        text = "".join(message["content"] for message in messages)
        assert text.index("3") < text.index("4")


def test_calls_after_slow_calls_are_not_started(episode: Any, monkeypatch: pytest.MonkeyPatch):
    """Otherwise sixteen sleeping programs would exceed the step's deadline, and its process would be killed."""
    monkeypatch.setattr(tool_use, "CALL_START_TIMEOUT_S", -1.0)
    environment = episode()
    observation = step(environment, call(1) + "<tool_call>{</tool_call>").observations[0]["content"]
    assert "Not run" in observation and "not valid JSON" in observation


def test_call_in_last_turn_is_not_run(episode: Any):
    environment = episode({"max_turns": 1})
    output = step(environment, f"#### 42 {call(40)}")
    assert (output.done, output.reward) == (True, 0.0)
    assert output.metadata == {"answered": False, "tool_calls": 0, "tool_errors": 0}


def test_tools_required_needs_a_successful_call(episode: Any):
    assert step(episode(tools_required=True), "#### 42").reward == 0.0
    failed = episode(tools_required=True)
    step(failed, call(-1))
    assert step(failed, "#### 42").reward == 0.0
    worked = episode(tools_required=True)
    step(worked, call(1))
    assert step(worked, "#### 42").reward == 1.0


def test_tools_are_described_in_the_system_message(episode: Any):
    opened, _ = episode().init(QUESTION)
    assert opened[0]["role"] == "system" and "Adds two numbers." in opened[0]["content"]
    assert opened[1:] == QUESTION
    system = {"role": "system", "content": "Be brief."}
    opened, _ = episode(style="native").init([system, *QUESTION])
    assert opened[0]["content"].startswith("Be brief.\n\n# Tools") and len(opened) == 2
    assert episode(describe_tools=False).init(QUESTION) == (QUESTION, {})


def test_row_overrides_only_allowed_settings(episode: Any):
    episode({"tool_settings": {"add": {"offset": 5, "scale": 7}}}, tool_settings={"add": {"scale": 2}})
    assert Calculator.made == [{"offset": 5, "scale": 2}]


def test_settings_are_checked_when_a_run_starts():
    ToolUseEnv.check({"tools": ["add"]})
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"tools": ["ad"]}, "Unknown tool 'ad'"),
        ({"tools": ["add"], "tool_settings": {"add": {"ofset": 1}}}, "does not accept the settings"),
        ({"tools": ["add"], "tool_settings": {"add": {"scale": 0}}}, "scale=0"),
        ({"tools": ["add"], "tool_settings": {"python": {}}}, "settings for 'python', which is not one of"),
        ({"tool": ["add"]}, "has no 'tool'"),
        ({"sandbox": {"kind": "docker"}}, "sandbox.kind='docker' is not a known kind of sandbox"),
        ({"sandbox": {"kind": "unsafe_local"}}, "i_know_this_runs_model_code_on_this_machine=true"),
    ]
    for settings, message in wrong:
        with pytest.raises(ConfigError, match=message):
            ToolUseEnv.check(settings)


@pytest.mark.fault("F22")
def test_missing_sandbox_is_reported_before_the_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    settings = ["trainer.policy.model.path=model", "environment.env_class=tool_use"]
    cfg = prepare_config(settings, has_accelerator=False).config
    rows = PromptDataset((Prompt("0", QUESTION, "tool_use", ROW),), too_long=0)
    with pytest.raises(ConfigError, match="bwrap is not installed"):
        check_environments(cfg, rows, None)
    check_environments(cfg, PromptDataset((Prompt("0", QUESTION, "gsm8k", ROW),), too_long=0))


@pytest.mark.parametrize("extras", [{}, {"reward_spec": None}, {"reward_spec": {"ground_truth": None}}])
def test_row_without_answer_is_rejected(extras: dict[str, Any]):
    with pytest.raises(ValueError, match="ground_truth"):
        ToolUseEnv({"tools": ["add"]}, extras)


def test_sandboxed_tool_runs_in_worker_pool():
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed: scripts/sandbox_tools installs it")

    async def run() -> list[StepOutput]:
        settings = {"tool_use": {"tools": ["python"], "tool_settings": {"python": {"persistent": True}}}}
        async with WorkerPool(settings, max_env_workers=1, environment_step_s=120) as pool:
            row = {"reward_spec": {"method": "rule", "ground_truth": "42"}, "max_turns": 4}
            episode = await pool.start("tool_use", Prompt("0", QUESTION, "tool_use", row))
            assert "<python>" in episode.messages[0]["content"]
            texts = ["<python>x = 6 * 7</python>", "<python>print(x)</python>", "#### 42"]
            outputs = [await episode.step(text) for text in texts]
            await episode.close()
            return outputs

    outputs = asyncio.run(run())
    assert "[no output]" in outputs[0].observations[0]["content"]
    assert outputs[1].observations[0]["content"] == "<tool_response>\n42\n</tool_response>"
    assert (outputs[2].done, outputs[2].reward) == (True, 1.0)


@pytest.mark.parametrize(
    ("dialect", "text"),
    [
        (
            "qwen3_coder",
            "<tool_call>\n<function=add>\n<parameter=a>\n40\n</parameter>\n<parameter=b>\n2\n</parameter>\n"
            "</function>\n</tool_call>",
        ),
        (
            "harmony",
            "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
            '<|constrain|>json<|message|>{"a": 40, "b": 2}',
        ),
    ],
)
def test_native_dialects_are_parsed(episode: Any, dialect: str, text: str):
    environment = episode(style="native", dialect=dialect, describe_tools=False)
    assert "42" in step(environment, text).observations[0]["content"]


def test_dialect_without_description_is_rejected():
    with pytest.raises(ConfigError, match=r"dialect='glm' has no description .* Set tool_use.describe_tools=false"):
        ToolUseEnv.check({"tools": ["add"], "style": "native", "dialect": "glm"})
    ToolUseEnv.check({"tools": ["add"], "style": "native", "dialect": "glm", "describe_tools": False})
