"""Generators of agents, as an experiment builds them."""

from __future__ import annotations

from skyrl_train.config.prepare import prepare_config
from skyrl_train.data.messages import Prompt
from skyrl_train.engines.client import EngineClient
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.experiment.trainer import build_generator
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer
from tests.support.async_tests import async_test

OVERRIDES = [
    "trainer.policy.model.path=model",
    "environment.skyrl_gym.agent.run=tests.support.coroutine_agents:ask",
    "generator.eval_n_samples_per_prompt=2",
    "generator.eval_n_samples_by_data_source={aime: 3}",
]


def prompt(source: str) -> Prompt:
    return Prompt("0", [{"role": "user", "content": "1 + 2?"}], "agent", {"returned": 1.0}, source)


@async_test
async def test_agents_are_evaluated_and_pools_replaced():
    """The number of samples depends on the data source, and a second pool of the same client gets agents of its own."""
    cfg = prepare_config(OVERRIDES, has_user_code=True, has_accelerator=True).config
    client = EngineClient([ScriptedEngine()], deadline_s=60.0)
    for _ in range(2):
        async with WorkerPool({}, max_env_workers=1) as environments:
            generator = build_generator(cfg, byte_tokenizer(), client, environments, evaluation=True)
            groups = [await generator.rollout(prompt(source), 0) for source in ("aime", "other")]
        assert [len(group.trajectories) for group in groups] == [3, 2]
        assert {item.reward for group in groups for item in group.trajectories} == {1.0}
