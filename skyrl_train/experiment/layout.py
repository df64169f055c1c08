"""The slots of a run: which process is where, how many threads it has, and which paths its node must see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from skyrl_train.cluster.paths import SharedPath
from skyrl_train.cluster.placement import Slots, reserve
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.predicates import SlotCounts, slots_per_engine
from skyrl_train.config.schema import Config, GeneratorConfig, PlacementConfig
from skyrl_train.config.sources import local_path
from skyrl_train.storage.places import working_folder


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
    counts: SlotCounts,
    placement: PlacementConfig,
    generator: GeneratorConfig,
    *,
    device: str,
    deadline_s: float,
    at_once: bool = False,
    other_cpus: float = 0.0,
) -> Layout:
    """Reserve all slots of a run. Raises ConfigError when they cannot be had within `deadline_s`.

    Args:
        at_once: Engines and learner do not wait for each other.
        other_cpus: CPUs of the cluster that slots leave free.
    """
    take = partial(
        reserve, cluster, device=device, total_slots=counts.total, deadline_s=deadline_s, other_cpus=other_cpus
    )

    def dedicated(count: int, tenants: int, key: str) -> Slots | None:
        """Slots for a role of the trainer."""
        if not count:
            return None
        return take(count=count, tenants=tenants, key=key, strategy=placement.strategy, labels=placement.node_labels)

    stride = slots_per_engine(generator)
    num_engines = counts.engines // stride
    tenants = 1 + counts.reference_colocated + counts.critic_colocated + counts.reward_colocated
    sampling = num_engines * at_once  # none where engines are elsewhere
    if counts.time_shared:
        keys = f"policy_num_gpus_per_node={counts.policy} generator.num_inference_engines={num_engines}"
        home = dedicated(counts.total, tenants + 1, keys)
    else:
        home = dedicated(counts.policy, tenants, "trainer.placement.policy_num_gpus_per_node")
    policy = _role(home, counts.policy, beside=sampling)
    reference, critic, reward = (
        dedicated(count, 1, f"trainer.placement.{role}_num_gpus_per_node")
        for role, count in (("ref", counts.reference), ("critic", counts.critic), ("reward", counts.reward))
    )
    reward_beside_engines = counts.reward_colocated and not counts.policy
    if counts.time_shared:
        engines = home
    elif counts.engines:
        engines = take(
            count=counts.engines,
            tenants=1 + reward_beside_engines,
            key="generator.num_inference_engines",
            strategy=placement.engine_strategy,
            labels=placement.engine_node_labels,
            # An engine's ranks on a node are processes that one actor there starts.
            together=1 if reward_beside_engines else stride // placement.nodes_per_engine,
        )
    else:
        engines = None
    return Layout(
        policy=policy,
        reference=policy if counts.reference_colocated else _role(reference, counts.reference, beside=sampling),
        critic=policy if counts.critic_colocated else _role(critic, counts.critic, beside=sampling),
        reward=(policy or _role(engines, counts.engines)) if counts.reward_colocated else _role(reward, counts.reward),
        engines=_role(engines, num_engines, stride, counts.policy * at_once, placement.nodes_per_engine),
        time_shared=counts.time_shared,
    )


def _role(slots: Slots | None, count: int, stride: int = 1, beside: int = 0, nodes: int = 1) -> RoleSlots | None:
    return None if slots is None else RoleSlots(slots, count, stride, beside, nodes)


def threads_per_process(cluster: Cluster, role_slots: RoleSlots, device: str) -> int:
    """CPU threads for each process of a role: they compute at the same time; other roles do where rollouts run ahead.

    Those on accelerators need them, too: for optimizer states in host memory, and to read and check weights.
    """
    if device == "cuda":
        return role_slots.slots.cores
    return max(1, int(cluster.cpus) // max(1, role_slots.count + role_slots.beside))


# -- paths


def weight_folder(cfg: Config) -> str:
    """The folder for weights on the "checkpoint" route."""
    return cfg.generator.weight_sync_folder or str(working_folder(cfg.trainer.ckpt_path) / "weight_sync")


def shared_paths(cfg: Config, layout: Layout) -> Iterator[SharedPath]:
    """Models, checkpoints, exports and the folder for weights, with the nodes of the roles that use them.

    The folders that are written to are made, as the run would make them later.
    """
    trainer, generator = cfg.trainer, cfg.generator
    for role, slots in (("policy", layout.policy), ("ref", layout.reference), ("critic", layout.critic)):
        path = getattr(trainer, role).model.path
        if slots is not None and path is not None:
            yield SharedPath(f"trainer.{role}.model.path", local_path(path), _nodes(slots))
    if layout.reward is not None and trainer.reward.model.path is not None:
        yield SharedPath("trainer.reward.model.path", local_path(trainer.reward.model.path), _nodes(layout.reward))
    if layout.engines is not None:
        yield SharedPath("generator.model_name", local_path(generator.model_name), _nodes(layout.engines))
    if layout.policy is None:
        return
    trained = _nodes(layout.policy) | _nodes(layout.critic)
    if trainer.resume_mode == "from_path" and trainer.resume_path:
        yield SharedPath("trainer.resume_path", trainer.resume_path, trained)
    if trainer.ckpt_interval > 0:
        yield from _written("trainer.ckpt_path", trainer.ckpt_path, trained)
    if trainer.hf_save_interval > 0:
        yield from _written("trainer.export_path", trainer.export_path, trained)
    if generator.weight_sync_route == "checkpoint" and layout.engines is not None:
        key = "generator.weight_sync_folder"
        yield from _written(key, weight_folder(cfg), _nodes(layout.policy) | _nodes(layout.engines))


def _nodes(slots: RoleSlots | None) -> frozenset[str]:
    return frozenset() if slots is None else frozenset(slots.slots.nodes)


def _written(key: str, path: str, nodes: frozenset[str]) -> Iterator[SharedPath]:
    folder = working_folder(path).absolute()  # of an address the folder that ranks write to before it is uploaded
    os.makedirs(folder, exist_ok=True)
    yield SharedPath(key, str(folder), nodes, written=True)
