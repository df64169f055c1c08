from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.data.messages import Prompt
from skyrl_train.environments.base import StepOutput
from skyrl_train.environments.integrations import skyrl_gym
from skyrl_train.environments.pool import WorkerPool
from skyrl_train.environments.registry import environments
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.environments import environment_settings

QUESTION = [{"role": "user", "content": "12 * 34?"}]
SETTINGS = [
    "trainer.policy.model.path=model",
    "trainer.plugins=[multiply_env]",
    "environment.skyrl_gym.own.multiply.partial_reward=0.25",
    "environment.skyrl_gym.own.multiply_by_class.partial_reward=0.5",
]


def play(env_class: str, texts: Sequence[str], **extras: Any) -> list[StepOutput]:
    """Play one episode with the configuration SETTINGS and return the output of every step."""
    cfg = prepare_config(SETTINGS, has_accelerator=False).config

    async def main() -> list[StepOutput]:
        async with WorkerPool(environment_settings(cfg), 1, 60.0, tuple(cfg.trainer.plugins)) as pool:
            row = Prompt("0", QUESTION, env_class, {"reward_spec": {"method": "rule", "ground_truth": "408"}, **extras})
            episode = await pool.start(env_class, row)
            assert episode.messages == QUESTION
            return [await episode.step(text) for text in texts]

    return asyncio.run(asyncio.wait_for(main(), 120))


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def test_skyrl_gym_environment_runs_with_new_import():
    first, second, third = play("multiply", ["400 + 8?", "<add>400,8</add>", r"\boxed{408}"])
    assert (first.observations[0]["content"], first.reward, first.done) == ("try again", 0.0, False)
    assert second.observations == [{"role": "user", "content": "408"}]
    assert (third.reward, third.done, third.metadata) == (1.0, True, {"parsed_answer": "408", "turns": 3})


def test_registered_arguments_and_settings_are_passed():
    first, second = play("multiply_by_class", ["?", r"\boxed{407}"], max_turns=2)
    assert first.observations[0]["content"] == "once more"
    assert (second.reward, second.done) == (0.5, True)


def test_settings_of_own_environments_are_mappings():
    cfg = prepare_config([*SETTINGS, "environment.skyrl_gym.own.mine=3"], has_accelerator=False).config
    with pytest.raises(ConfigError, match=r"own\.mine=3.*own\.mine\.KEY=VALUE"):
        environment_settings(cfg)


def test_own_settings_come_on_top_of_a_section():
    override = "environment.skyrl_gym.own={search: {topk: 7, mine: 1}}"
    cfg = prepare_config(["trainer.policy.model.path=model", override], has_accelerator=False).config
    search = environment_settings(cfg)["search"]
    assert (search["topk"], search["mine"], search["timeout"]) == (7, 1, 30.0)


def test_only_built_in_names_can_be_replaced(caplog: pytest.LogCaptureFixture):
    name, built_in = next(iter(environments.table.items()))
    try:
        skyrl_gym.register(name, "multiply_env:MultiplyEnv")
        assert environments.table[name] == "multiply_env:MultiplyEnv"
        assert name in caplog.text
        with pytest.raises(ConfigError, match="already registered"):
            skyrl_gym.register(name, "other:Env")
    finally:
        skyrl_gym.deregister(name)
        environments.table[name] = built_in


def test_default_metrics_are_averaged():
    episodes = [{"turns": 1, "won": True, "name": "a"}, {"turns": 2, "won": False}]
    assert skyrl_gym.metrics.default_aggregate_metrics(episodes) == {"turns": 1.5, "won": 0.5}
