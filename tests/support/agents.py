"""Generators of agents whose engine samples scripted texts."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from skyrl_train.agents.generator import AgentGenerator
from skyrl_train.agents.runner import AgentRunner
from skyrl_train.agents.server import SessionServer
from skyrl_train.config.environment import AgentConfig
from skyrl_train.config.hydra import to_dict
from skyrl_train.data.messages import Prompt
from skyrl_train.engines.client import EngineClient
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.rollouts.conversation import EpisodeLimiter
from skyrl_train.testing.scripted_engine import ScriptedEngine
from tests.support.sessions import TOKENIZER, ScriptedModel, session_settings

PROGRAM = str(Path(__file__).with_name("chat_agent.py"))


def command(*arguments: object) -> dict[str, Any]:
    """Return the settings of tests/support/chat_agent.py as a command without a sandbox."""
    return {"command": [sys.executable, "-S", PROGRAM, "{model}", *map(str, arguments)], "sandbox": {"kind": "none"}}


def agent_prompt(**row: Any) -> Prompt:
    extras = {"reward_spec": {"method": "rule", "ground_truth": "3"}, **row}
    return Prompt("7", [{"role": "user", "content": "1 + 2?"}], "agent", extras)


@asynccontextmanager
async def agent_generator(
    settings: dict[str, Any],
    texts: Any = lambda prompt: "#### 3",
    *,
    samples: int = 1,
    samples_by_source: dict[str, int] | None = None,
    engine: ScriptedEngine | None = None,
    limiter: EpisodeLimiter | None = None,
    **session: Any,
) -> AsyncIterator[AgentGenerator]:
    """Yield a generator with real sessions and processes, and close it."""
    defaults = to_dict(AgentConfig())
    settings = {**defaults, **settings, "sandbox": defaults["sandbox"] | settings.get("sandbox", {})}
    client = EngineClient([engine or ScriptedEngine(ScriptedModel(texts))], deadline_s=60.0)
    server = SessionServer(client, TOKENIZER, model_name="m", drain_s=0.1)
    limits = {"max_calls": settings["max_calls"], "max_sampled_tokens": settings["max_tokens"]}
    async with WorkerPool({}, max_env_workers=1) as environments:
        runner = AgentRunner(settings, server, model_name="m", environments=environments)
        try:
            yield AgentGenerator(
                runner,
                session_settings(**limits, **session),
                client=client,
                num_samples=lambda prompt: (samples_by_source or {}).get(prompt.data_source, samples),
                limiter=limiter,
            )
        finally:
            await runner.close()
