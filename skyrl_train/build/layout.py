"""Who runs where: slots for the policy, the reference, the critic, the reward model and the engines."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.cluster.placement import Slots, reserve
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.schema import GeneratorConfig, PlacementConfig


@dataclass(frozen=True)
class Seats:
    """Slots of one role: its i-th member sits in slot `first + i * stride`."""

    slots: Slots
    count: int
    stride: int = 1


@dataclass(frozen=True)
class Layout:
    """Seats of every role; None for a role that the run has not got."""

    policy: Seats | None
    reference: Seats | None
    critic: Seats | None
    reward: Seats | None
    engines: Seats | None
    time_shared: bool
    """Engines and learner take turns on the same slots."""


def slots_per_engine(generator: GeneratorConfig) -> int:
    """Accelerators of one engine: tensor x pipeline x data parallel."""
    return (
        generator.inference_engine_tensor_parallel_size
        * generator.inference_engine_pipeline_parallel_size
        * generator.inference_engine_data_parallel_size
    )


def place(
    cluster: Cluster,
    placement: PlacementConfig,
    generator: GeneratorConfig,
    *,
    device: str,
    deadline_s: float,
    with_policy: bool = True,
    with_reference: bool = False,
    with_critic: bool = False,
    with_reward: bool = False,
    with_engines: bool = True,
) -> Layout:
    """Reserve all slots of a run. Raises ConfigError when they cannot be had within `deadline_s`."""
    reference_beside = with_reference and (placement.colocate_policy_ref or placement.colocate_all)
    critic_beside = with_critic and placement.colocate_all
    reward_beside = with_reward and placement.colocate_all and (with_policy or with_engines)
    policy = placement.policy_num_nodes * placement.policy_num_gpus_per_node if with_policy else 0
    reference = critic = reward = 0  # slots of their own
    if with_reference and not reference_beside:
        reference = placement.ref_num_nodes * placement.ref_num_gpus_per_node
    if with_critic and not critic_beside:
        critic = placement.critic_num_nodes * placement.critic_num_gpus_per_node
    if with_reward and not reward_beside:
        reward = placement.reward_num_nodes * placement.reward_num_gpus_per_node
    stride = slots_per_engine(generator)
    engines = generator.num_inference_engines * stride if with_engines else 0
    time_shared = placement.colocate_all and bool(policy) and bool(engines)
    total = max(policy, engines) if time_shared else policy + reference + critic + reward + engines

    def take(count: int, tenants: int, key: str) -> Slots | None:
        if not count:
            return None
        return reserve(
            cluster, count=count, tenants=tenants, device=device, total_slots=total, deadline_s=deadline_s, key=key
        )

    def seats(slots: Slots | None, count: int, stride: int = 1) -> Seats | None:
        return None if slots is None else Seats(slots, count, stride)

    tenants = 1 + reference_beside + critic_beside + reward_beside
    if time_shared:
        keys = f"policy_num_gpus_per_node={policy} generator.num_inference_engines={engines // stride}"
        home = take(total, tenants + 1, keys)
    else:
        home = take(policy, tenants, "trainer.placement.policy_num_gpus_per_node")
    at_home = seats(home, policy)
    reference_slots = take(reference, 1, "trainer.placement.ref_num_gpus_per_node")
    critic_slots = take(critic, 1, "trainer.placement.critic_num_gpus_per_node")
    reward_slots = take(reward, 1, "trainer.placement.reward_num_gpus_per_node")
    judged_at_engines = reward_beside and not with_policy
    engine_slots = home if time_shared else take(engines, 1 + judged_at_engines, "generator.num_inference_engines")
    return Layout(
        policy=at_home,
        reference=at_home if reference_beside else seats(reference_slots, reference),
        critic=at_home if critic_beside else seats(critic_slots, critic),
        reward=(at_home or seats(engine_slots, engines)) if reward_beside else seats(reward_slots, reward),
        engines=seats(engine_slots, generator.num_inference_engines, stride),
        time_shared=time_shared,
    )
