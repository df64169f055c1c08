from __future__ import annotations

from skyrl_train.build.algorithm import policy_learning
from skyrl_train.build.learner import _critic, _reference
from skyrl_train.config.hydra import load
from skyrl_train.config.schema import LoraConfig
from skyrl_train.testing.learner_specs import tiny_spec
from skyrl_train.trainer.schedule import StepSchedule


def test_only_what_is_trained_has_adapters_each_model_its_own():
    overrides = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=/x"]
    spec, schedule = tiny_spec("/x", lora=LoraConfig(rank=8)), StepSchedule(8, 4, 1)
    for rank in (0, 4):
        cfg = load([*overrides, f"trainer.critic.model.lora.rank={rank}"])
        assert _reference(spec, cfg.trainer, None).lora is None
        critic = _critic(spec, cfg.trainer, None, policy_learning(cfg), schedule)
        assert (critic.lora.rank if critic.lora else 0) == rank
