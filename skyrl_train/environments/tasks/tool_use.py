"""Questions that a model answers with the help of tools."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from skyrl_train.config.environment import ToolUseConfig
from skyrl_train.data.messages import Message, ToolCallRecord
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.tasks.gsm8k import parse_numeric_ground_truth, score
from skyrl_train.environments.tools.base import ToolBox, ToolResult, tool_call_record
from skyrl_train.environments.tools.parsers import DIALECTS, ParseError, ToolCall, parse_calls, render_tools, tool_tags
from skyrl_train.environments.tools.registry import check_tool, make_tool, tools
from skyrl_train.errors import ConfigError

DEFAULT_MAX_TURNS = 5
"""Maximum number of turns if neither the row nor the run sets a number."""
CALL_START_TIMEOUT_S = 20.0
"""Time after which no further call of a message is started.

Several slow calls in sequence could exceed trainer.timeouts.environment_step_s. The process would then be killed, which
interrupts its other episodes.
"""
NOT_RUN = f"Not run: the calls of one message must begin within {CALL_START_TIMEOUT_S:g} s."


class ToolUseEnv(TextEnv):
    """An environment in which the model calls tools until it writes a message without a call, which is its answer.

    The answer is rewarded by gsm8k's strict rules (`gsm8k.extract_strict_answer`: "#### 42"). Every other turn gets 0.
    With `tools_required`, a right answer gets 0 unless an earlier call succeeded. A message with a call is never an
    answer, even if `max_turns` leaves no turn for the call's result.

    A row has `reward_spec.ground_truth`. It may have `tool_settings` (tool -> settings) with settings that the tool
    allows a row to override (`Tool.from_row`). The environment's settings are those of
    `config.environment.ToolUseConfig` and of the sandbox.
    """

    parse_row = staticmethod(parse_numeric_ground_truth)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.ground_truth = self.parse_row(self.extras)
        self.settings, self.sandbox = _settings(self.env_config)
        self.max_turns = int(self.extras.get("max_turns") or DEFAULT_MAX_TURNS)
        self.turns = self.num_succeeded = self.num_failed = 0
        overrides = self.extras.get("tool_settings") or {}
        self.toolbox = ToolBox(
            [
                make_tool(name, _tool_arguments(name, self.settings, self.sandbox, overrides.get(name)))
                for name in self.settings.tools
            ]
        )
        self.schemas = self.toolbox.schemas()
        self.tags = tool_tags(self.schemas)

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        """Check the settings of the environment and of each of its tools.

        Raises:
            ConfigError: A setting is unknown, `tool_settings` names a tool that is not in `tools`, a tool cannot be
                used, or the tools are to be described in a dialect that has no description.
        """
        settings, sandbox = _settings(env_config)
        if settings.style == "native" and settings.describe_tools and settings.dialect not in DIALECTS:
            raise ConfigError(
                f"environment.skyrl_gym.tool_use.dialect={settings.dialect!r} has no description for the prompt; only "
                f"{', '.join(DIALECTS)} have one. Set tool_use.describe_tools=false, and add a column `tools` to the "
                "rows, which the model's chat template describes."
            )
        if unused := sorted(settings.tool_settings.keys() - set(settings.tools)):
            raise ConfigError(
                f"environment.skyrl_gym.tool_use.tool_settings has settings for {unused[0]!r}, which is not one of "
                f"tool_use.tools={list(settings.tools)}."
            )
        for name in settings.tools:
            check_tool(name, _tool_arguments(name, settings, sandbox))

    def init(self, prompt: list[Message]) -> tuple[list[Message], dict[str, Any]]:
        if not self.settings.describe_tools:
            return prompt, {}
        words = render_tools(self.schemas, self.settings.style, self.settings.dialect)
        if prompt and prompt[0].get("role") == "system":
            return [{**prompt[0], "content": f"{prompt[0]['content']}\n\n{words}"}, *prompt[1:]], {}
        return [{"role": "system", "content": words}, *prompt], {}

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        calls = parse_calls(action, self.settings.style, self.tags, dialect=self.settings.dialect, schemas=self.schemas)
        if not calls:
            is_eligible = self.num_succeeded > 0 or not self.settings.tools_required
            reward = score(action, self.ground_truth) if is_eligible else 0.0
            return StepOutput([], reward, done=True, metadata=self._counts(answered=True))
        if self.turns >= self.max_turns:  # the model would not see the results
            unseen = [_tool_call_record(call, "no_turn_left") for call in calls]
            return StepOutput([], 0.0, done=True, metadata=self._counts(answered=False), tool_calls=unseen)
        deadline = time.monotonic() + CALL_START_TIMEOUT_S
        results = [self._result(call, deadline) for call in calls]
        records = [_tool_call_record(call, result.error) for call, result in zip(calls, results, strict=True)]
        observations = self._observations([result.text for result in results])
        return StepOutput(observations, 0.0, done=False, tool_calls=records)

    def close(self) -> None:
        self.toolbox.close()

    def _result(self, call: ToolCall | ParseError, deadline: float) -> ToolResult:
        if isinstance(call, ToolCall) and time.monotonic() > deadline:
            result = ToolResult(NOT_RUN, "not_run")
        else:
            result = self.toolbox.run(call)
        self.num_succeeded += result.error is None
        self.num_failed += result.error is not None
        return result

    def _observations(self, texts: list[str]) -> list[Message]:
        """Return one tool message per result, or one user message with all results so that roles alternate."""
        if self.settings.observation_role == "tool":
            return [{"role": "tool", "content": text} for text in texts]
        blocks = [f"<tool_response>\n{text}\n</tool_response>" for text in texts]
        return [{"role": "user", "content": "\n".join(blocks)}]

    def _counts(self, answered: bool) -> dict[str, Any]:
        return {"answered": answered, "tool_calls": self.num_succeeded, "tool_errors": self.num_failed}


def _tool_call_record(call: ToolCall | ParseError, error: str | None) -> ToolCallRecord:
    if isinstance(call, ParseError):
        return tool_call_record("", call.raw, "unreadable")
    try:
        return tool_call_record(call.name, call.arguments, error)
    except RecursionError:  # the JSON encoder reaches its depth limit before the decoder does
        return tool_call_record(call.name, call.raw, error)


def _settings(env_config: Mapping[str, Any]) -> tuple[ToolUseConfig, Mapping[str, Any]]:
    """Return the settings of the environment and those of the sandbox."""
    settings = {name: value for name, value in env_config.items() if name != "sandbox"}
    known = {item.name for item in fields(ToolUseConfig)}
    if unknown := sorted(settings.keys() - known):
        raise ConfigError(f"environment.skyrl_gym.tool_use has no {unknown[0]!r}; it has {sorted(known)}.")
    return ToolUseConfig(**settings), env_config.get("sandbox") or {}


def _tool_arguments(
    name: str, settings: ToolUseConfig, sandbox: Mapping[str, Any], overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return a tool's constructor arguments: the configured ones, and the row's overrides that the tool allows."""
    factory = tools.get(name)
    arguments = dict(settings.tool_settings.get(name) or {})
    arguments |= {key: value for key, value in (overrides or {}).items() if key in getattr(factory, "from_row", ())}
    return arguments | ({"sandbox": sandbox} if getattr(factory, "sandboxed", False) else {})
