from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.data.trajectory import OK, TrajectoryGroup
from skyrl_train.engines.base import SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.rollouts.conversation import ConversationGenerator, RolloutSettings
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer

EPISODES, FAILING, HANGING = 256, 5, 2
STEP_DEADLINE_S = 10.0
"""Much more than a turn takes on busy cores, so only environments that hang exceed it."""


def behaviour(number: int) -> str:
    if number % 51 == 7 and number // 51 < FAILING:
        return "fail"
    return "hang" if number % 101 == 50 and number // 101 < HANGING else "talk"


@pytest.mark.fault("F11")
def test_concurrent_conversations_fail_independently(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "plugins"))
    tokenizer = byte_tokenizer()
    engine = ScriptedEngine(lambda request: [*tokenizer("ab")["input_ids"], tokenizer.eos_token_id], delay_s=0.001)
    settings = RolloutSettings(SamplingParams(9), 1, 3, max_input_length=500, rollout_s=400.0, max_turns=5)
    prompts = [
        Prompt(str(number), [{"role": "user", "content": "go"}], "talking", {"behaviour": behaviour(number)})
        for number in range(EPISODES)
    ]

    async def main() -> list[TrajectoryGroup]:
        async with asyncio.timeout(400), WorkerPool({}, 4, STEP_DEADLINE_S, ("talking_envs",)) as pool:
            generator = ConversationGenerator(EngineClient([engine], deadline_s=400.0), pool, tokenizer, settings)
            groups = await asyncio.gather(*(generator.rollout(prompt, at) for at, prompt in enumerate(prompts)))
            assert not any(worker.episodes for worker in pool.workers), "all are closed"
        assert (await engine.health()).running == 0
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return groups

    groups = asyncio.run(main())
    items = [group.trajectories[0] for group in groups]
    assert Counter(item.error for item in items) == {
        None: EPISODES - FAILING - HANGING,
        "RuntimeError": FAILING,
        "timeout": HANGING,
    }
    for item in items:
        expected = {"talk": None, "fail": "RuntimeError", "hang": "timeout"}[item.prompt.env_extras["behaviour"]]
        assert item.error == expected
        assert (item.reward, len(item.turns)) == ((3.0, 3) if item.status == OK else (0.0, 2))
