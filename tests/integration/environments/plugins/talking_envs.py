"""An environment of three turns that may fail or hang in the second one, as the row says."""

from __future__ import annotations

import time
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.registry import register


class TalkingEnv(TextEnv):
    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        self.turns = 0
        return prompt, {}

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        if self.turns == 2 and self.extras["behaviour"] == "fail":
            raise RuntimeError("no")
        if self.turns == 2 and self.extras["behaviour"] == "hang":
            time.sleep(3600)
        return StepOutput([{"role": "user", "content": f"more {self.turns}"}], 1.0, self.turns == 3)


register("talking", TalkingEnv)
