"""The reward model and the rollouts that it scores, from configuration."""

from __future__ import annotations

from typing import Any

from skyrl_train.assembly.layout import RoleSlots
from skyrl_train.assembly.learner import threads_per_process
from skyrl_train.assembly.services import Services
from skyrl_train.cluster.actors import spawn
from skyrl_train.config.schema import Config
from skyrl_train.learner.reward_worker import RewardModel
from skyrl_train.rollouts.scoring import FirstRollout, ScoredRollouts

WORKER = "skyrl_train.learner.reward_worker:RewardWorker"


def build_reward_model(base: Services) -> RewardModel | None:
    """Spawn a replica in each of its slots; `RewardModel.setup` loads them later. None without trainer.reward.model."""
    role_slots = base.layout.reward
    if role_slots is None:
        return None
    return RewardModel([_replica(base, role_slots, index) for index in range(role_slots.count)])


def _replica(base: Services, role_slots: RoleSlots, index: int) -> Any:
    trainer, device = base.cfg.trainer, base.cfg.device
    return spawn(
        base.cluster,
        WORKER,
        {
            "path": trainer.reward.model.path,
            "dtype": "bfloat16" if trainer.bf16 else "float32",
            "device": device,
            "threads": threads_per_process(base.cluster, role_slots, device),
            "model_config_kwargs": trainer.reward.model_config_kwargs,
        },
        slots=role_slots.slots,
        index=index,
        name=f"reward model {index}",
        concurrent=False,
        deadline_s=trainer.timeouts.rollout_s,
    )


async def start_reward_model(model: RewardModel | None, deadline_s: float) -> None:
    """Load the reward model, if there is one. Raises DeadlineExceeded if it takes longer than `deadline_s`."""
    if model is not None:
        await model.setup(deadline_s)


def scored_rollouts(cfg: Config, generator: Any, model: RewardModel | None, first: FirstRollout) -> ScoredRollouts:
    """The generator's rollouts, scored by the reward model if there is one."""
    judge = None if model is None else model.score
    return ScoredRollouts(generator.rollout, judge=judge, coef=cfg.trainer.reward.coef, first=first)
