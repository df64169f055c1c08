"""Assigns slots to the policy, the reference, the critic, the reward model and the engines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from skyrl_train.cluster.placement import Slots, reserve
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.predicates import count_slots, slots_per_engine
from skyrl_train.config.schema import GeneratorConfig, PlacementConfig

_ENGINES = "generator.num_inference_engines"


@dataclass(frozen=True)
class RoleSlots:
    """The slots of one role: its i-th member occupies slot `i * stride`."""

    slots: Slots
    count: int
    stride: int = 1
    beside: int = 0
    """Members of other roles that compute at the same time."""
    nodes: int = 1
    """Nodes of one member, with as many of its slots on each."""


@dataclass(frozen=True)
class Layout:
    """The slots of every role; None for a role that the run does not have."""

    policy: RoleSlots | None
    reference: RoleSlots | None
    critic: RoleSlots | None
    reward: RoleSlots | None
    engines: RoleSlots | None
    time_shared: bool
    """Engines and learner take turns on the same slots."""

    @property
    def num_slots(self) -> int:
        """Of the whole run."""
        roles = (self.policy, self.reference, self.critic, self.reward, self.engines)
        return sum({id(role.slots): role.slots.count for role in roles if role is not None}.values())

    @property
    def one_node(self) -> bool:
        """Whether the policy and the engines have one node together, and so one memory."""
        return len({node for role in (self.policy, self.engines) if role for node in role.slots.nodes}) <= 1


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
    at_once: bool = False,
    other_cpus: float = 0.0,
) -> Layout:
    """Reserve all slots of a run. Raises ConfigError when they cannot be had within `deadline_s`.

    `at_once`: engines and learner do not wait for each other. `other_cpus`: CPUs of the cluster that slots leave.
    """
    counts = count_slots(
        placement,
        generator,
        with_policy=with_policy,
        with_reference=with_reference,
        with_critic=with_critic,
        with_reward=with_reward,
        with_engines=with_engines,
    )
    policy, engines, stride = counts.policy, counts.engines, slots_per_engine(generator)
    time_shared, total, nodes = counts.time_shared, counts.total, placement.nodes_per_engine
    how: dict[str, Any] = {"total_slots": total, "deadline_s": deadline_s, "other_cpus": other_cpus}
    take: Callable[..., Slots | None] = partial(_take, cluster, placement, device=device, **how)
    tenants = 1 + counts.reference_colocated + counts.critic_colocated + counts.reward_colocated
    if time_shared:
        keys = f"policy_num_gpus_per_node={policy} generator.num_inference_engines={engines // stride}"
        home = take(total, tenants + 1, keys)
    else:
        home = take(policy, tenants, "trainer.placement.policy_num_gpus_per_node")
    sampling = engines // stride * at_once  # none where engines are elsewhere
    policy_slots = _role(home, policy, beside=sampling)
    reference_slots = take(counts.reference, 1, "trainer.placement.ref_num_gpus_per_node")
    critic_slots = take(counts.critic, 1, "trainer.placement.critic_num_gpus_per_node")
    reward_slots = take(counts.reward, 1, "trainer.placement.reward_num_gpus_per_node")
    judged_at_engines = counts.reward_colocated and not with_policy
    apart = _engines_apart(placement, 1 if judged_at_engines else stride // nodes)
    engine_slots = home if time_shared else take(engines, 1 + judged_at_engines, _ENGINES, **apart)
    return Layout(
        policy=policy_slots,
        reference=policy_slots
        if counts.reference_colocated
        else _role(reference_slots, counts.reference, beside=sampling),
        critic=policy_slots if counts.critic_colocated else _role(critic_slots, counts.critic, beside=sampling),
        reward=(
            (policy_slots or _role(engine_slots, engines))
            if counts.reward_colocated
            else _role(reward_slots, counts.reward)
        ),
        engines=_role(engine_slots, engines // stride, stride, beside=policy * at_once, nodes=nodes),
        time_shared=time_shared,
    )


def _engines_apart(placement: PlacementConfig, together: int) -> dict[str, Any]:
    """Where engines with slots of their own are. Ranks of one on a node are processes that one actor there starts."""
    return {
        "strategy": placement.engine_strategy,
        "labels": placement.engine_node_labels,
        "together": together,
    }


def _take(cluster: Cluster, placement: PlacementConfig, count: int, tenants: int, key: str, **how: Any) -> Slots | None:
    where = {"strategy": placement.strategy, "labels": placement.node_labels}
    return reserve(cluster, count=count, tenants=tenants, key=key, **(where | how)) if count else None


def _role(slots: Slots | None, count: int, stride: int = 1, beside: int = 0, nodes: int = 1) -> RoleSlots | None:
    return None if slots is None else RoleSlots(slots, count, stride, beside, nodes)
