"""Questions that the model answers with the help of searches and programs, in SkyRL-Gym's format."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.tasks.gsm8k import parse_numeric_ground_truth, score
from skyrl_train.environments.tasks.search import (
    DEFAULT_MAX_TURNS,
    check_search,
    make_search_tool,
    to_observation,
)
from skyrl_train.environments.tools.base import ToolBox, tool_call_record
from skyrl_train.environments.tools.registry import check_tool, make_tool

CALL = re.compile(r"<tool>\s*<(search|python)>((?:(?!<tool>).)*?)</\1>\s*</tool>", re.DOTALL)
SOLUTION = re.compile(r"<solution>((?:(?!<solution>).)*?)</solution>", re.DOTALL)
ARGUMENT = {"search": "query", "python": "code"}
PYTHON_TIMEOUT_S = 10.0
HINT = (
    "Write <tool><search>a query</search></tool> to search, <tool><python>code that prints</python></tool> to compute, "
    "or <solution>#### a number</solution> to answer."
)


class SearchCodeEnv(TextEnv):
    """An environment in which the model may search and run programs before it answers.

    The model writes `<tool><search>query</search></tool>` or `<tool><python>code</python></tool>`, and at last
    `<solution>...</solution>`. The first turn with a solution in its final answer (`reasoning.final_answer`) ends the
    episode. Its reward follows gsm8k's strict rules (`gsm8k.extract_strict_answer`: "#### 42"), applied to all
    solutions of that turn, so solutions that differ get 0. An episode that runs out of turns gets 0.

    Each program runs separately in the sandbox. The settings are those of `config.environment.SearchCodeConfig` and of
    the sandbox. An episode whose search fails (see `search.to_observation`) is masked with the kind "search_failed".
    """

    parse_row = staticmethod(parse_numeric_ground_truth)

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.ground_truth = self.parse_row(self.extras)
        self.max_turns = int(self.extras.get("max_turns") or DEFAULT_MAX_TURNS)
        self.turns = 0
        self.calls = {"search": 0, "python": 0}
        python = make_tool("python", _python_settings(self.env_config))
        self.toolbox = ToolBox([make_search_tool(self.env_config), python])

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        check_search(env_config)
        check_tool("python", _python_settings(env_config))

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        action = final_answer(action)
        solutions = SOLUTION.findall(action)
        if solutions or self.turns >= self.max_turns:
            reward = score("\n".join(solutions), self.ground_truth)
            return StepOutput([], reward, done=True, metadata={**self.calls, "answered": bool(solutions)})
        call = CALL.search(action)
        if call is None:
            return StepOutput([{"role": "user", "content": HINT}], 0.0, done=False)
        tool, arguments = call[1], {ARGUMENT[call[1]]: call[2].strip()}
        self.calls[tool] += 1
        result = self.toolbox.call(tool, arguments)
        content = to_observation(result) if tool == "search" else result.text
        record = tool_call_record(tool, arguments, result.error)
        return StepOutput([{"role": "user", "content": content}], 0.0, done=False, tool_calls=[record])

    def close(self) -> None:
        self.toolbox.close()


def _python_settings(env_config: Mapping[str, Any]) -> dict[str, Any]:
    wall_s = env_config.get("python_timeout", PYTHON_TIMEOUT_S)
    return {"wall_s": wall_s, "sandbox": env_config.get("sandbox") or {}}
