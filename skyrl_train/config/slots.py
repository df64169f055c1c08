"""How many slots a run needs, and which roles share them. A slot is an accelerator, or a share of the CPUs."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.trainer import PlacementConfig


@dataclass(frozen=True)
class SlotCounts:
    """Dedicated slots of each role: 0 for a role that the run does not have, or that is colocated with another."""

    policy: int
    reference: int
    critic: int
    reward: int
    engines: int
    reference_colocated: bool
    """Colocated with the policy."""
    critic_colocated: bool
    reward_colocated: bool
    """Colocated with the policy, or with the engines if there is no policy."""
    time_shared: bool
    """Whether engines and learner take turns on the same slots."""

    @property
    def processes(self) -> int:
        """Ranks and replicas, those included that share the policy's slots."""
        sharing = self.reference_colocated + self.critic_colocated + self.reward_colocated
        own = self.policy + self.reference + self.critic + self.reward + self.engines
        return own + sharing * (self.policy or self.engines)

    @property
    def total(self) -> int:
        if self.time_shared:
            return max(self.policy, self.engines)
        return self.policy + self.reference + self.critic + self.reward + self.engines


def slots_per_engine(generator: GeneratorConfig) -> int:
    """Accelerators of one engine: tensor x pipeline parallel."""
    return generator.inference_engine_tensor_parallel_size * generator.inference_engine_pipeline_parallel_size


def count_slots(
    placement: PlacementConfig,
    generator: GeneratorConfig,
    *,
    with_policy: bool = True,
    with_reference: bool = False,
    with_critic: bool = False,
    with_reward: bool = False,
    with_engines: bool = True,
) -> SlotCounts:
    """The slots of a run with these roles."""
    reference_colocated = with_reference and (placement.colocate_policy_ref or placement.colocate_all)
    critic_colocated = with_critic and placement.colocate_all
    reward_colocated = with_reward and placement.colocate_all and (with_policy or with_engines)
    policy = placement.policy_num_nodes * placement.policy_num_gpus_per_node if with_policy else 0
    reference = placement.ref_num_nodes * placement.ref_num_gpus_per_node
    critic = placement.critic_num_nodes * placement.critic_num_gpus_per_node
    reward = placement.reward_num_nodes * placement.reward_num_gpus_per_node
    engines = generator.num_inference_engines * slots_per_engine(generator) if with_engines else 0
    return SlotCounts(
        policy=policy,
        reference=reference if with_reference and not reference_colocated else 0,
        critic=critic if with_critic and not critic_colocated else 0,
        reward=reward if with_reward and not reward_colocated else 0,
        engines=engines,
        reference_colocated=reference_colocated,
        critic_colocated=critic_colocated,
        reward_colocated=reward_colocated,
        time_shared=placement.colocate_all and bool(policy) and bool(engines),
    )
