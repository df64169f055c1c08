# ruff: noqa: UP006, UP035, B006, SIM401
"""An environment written for SkyRL-Gym (the task of its tutorial); only the import lines differ."""

import re
from typing import Any, Dict

from skyrl_train.environments.integrations import skyrl_gym
from skyrl_train.environments.integrations.skyrl_gym import (
    BaseTextEnv,
    BaseTextEnvStepOutput,
    ConversationType,
    ToolGroup,
    tool,
)


class CalculatorToolGroup(ToolGroup):
    def __init__(self, limit: int):
        self.limit = limit
        super().__init__(name="CalculatorToolGroup")

    @tool
    def add(self, left: str, right: str) -> str:
        return str(min(int(left) + int(right), self.limit))


class MultiplyEnv(BaseTextEnv):
    def __init__(self, env_config: Any = {}, extras: Dict[str, Any] = {}, hint: str = "try again"):
        super().__init__()
        assert "reward_spec" in extras, "reward_spec field is required"
        self.ground_truth = extras["reward_spec"]["ground_truth"]
        self.max_turns = extras["max_turns"] if "max_turns" in extras else 3
        self.partial = env_config.partial_reward
        self.hint = hint
        self.init_tool_groups([CalculatorToolGroup(limit=10**6)])
        self.chat_history: ConversationType = []

    def _boxed(self, action: str):
        match = re.search(r"\\boxed\{(\d+)\}", action)
        return match.group(1) if match else None

    def step(self, action: str) -> BaseTextEnvStepOutput:
        self.turns += 1
        self.chat_history.append({"role": "assistant", "content": action})
        asked = re.search(r"<add>(\d+),(\d+)</add>", action)
        answer = self._boxed(action)
        correct = answer is not None and answer.strip() == str(self.ground_truth).strip()
        if correct or self.turns >= self.max_turns:
            reward = 1.0 if correct else self.partial if answer is not None else 0.0
            return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={"parsed_answer": answer})
        if asked:
            group = self.tool_to_toolgroup["add"]
            text = self._execute_tool(group, "add", (asked.group(1), asked.group(2)))
        else:
            text = self.hint
        message = {"role": "user", "content": text}
        return BaseTextEnvStepOutput(observations=[message], reward=0.0, done=False, metadata={})

    def get_metrics(self) -> Dict[str, Any]:
        return {"turns": self.turns}


skyrl_gym.register(id="multiply", entry_point="multiply_env:MultiplyEnv")
skyrl_gym.envs.register(id="multiply_by_class", entry_point=MultiplyEnv, kwargs={"hint": "once more"})
