"""The slots of a run: which process runs where, how many threads it has, and which paths its node must see."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from skyrl_train.cluster.placement import ResourcePool, reserve_pool
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.cluster.shared_paths import SharedPath
from skyrl_train.config.locations import strip_file_scheme
from skyrl_train.config.predicates import SlotCounts, gpus_per_engine
from skyrl_train.config.schema import Config, GeneratorConfig, PlacementConfig
from skyrl_train.storage.uris import resolve_local_folder


@dataclass(frozen=True)
class RolePlacement:
    """The slots of one role. Member i occupies `slots_per_member` slots, starting at slot `i * slots_per_member`."""

    pool: ResourcePool
    count: int
    slots_per_member: int = 1
    num_concurrent: int = 0
    """Number of members of other roles that compute at the same time."""
    nodes_per_member: int = 1
    """Number of nodes of one member, which has equally many slots on each."""


@dataclass(frozen=True)
class RunPlacement:
    """The slots of every role; None for a role that the run does not have."""

    policy: RolePlacement | None
    reference: RolePlacement | None
    critic: RolePlacement | None
    reward: RolePlacement | None
    engines: RolePlacement | None
    engines_colocated: bool
    """True if engines and learner are colocated: they share slots and work one after the other."""

    @property
    def num_slots(self) -> int:
        """Number of slots that the run has reserved. Slots that roles share count once."""
        return sum({id(pool): pool.num_slots for pool in self._pools}.values())

    @property
    def node_ids(self) -> set[str]:
        """Ids of the nodes that the run's slots are on."""
        return {node for pool in self._pools for node in pool.slot_node_ids}

    @property
    def has_gpus(self) -> bool:
        """True if any slot has a GPU."""
        return any(pool.gpus_per_slot for pool in self._pools)

    @property
    def _pools(self) -> list[ResourcePool]:
        roles = (self.policy, self.reference, self.critic, self.reward, self.engines)
        return [role.pool for role in roles if role is not None]

    @property
    def is_single_node(self) -> bool:
        """True if the policy and the engines run on the same single node and can share memory."""
        return len({node for role in (self.policy, self.engines) if role for node in role.pool.slot_node_ids}) <= 1


def reserve_slots(
    cluster: Cluster,
    counts: SlotCounts,
    placement: PlacementConfig,
    generator: GeneratorConfig,
    *,
    device: str,
    deadline_s: float,
    overlaps_training: bool = False,
    reserved_cpus: float = 0.0,
) -> RunPlacement:
    """Reserve all slots of a run. Blocks until the cluster has them.

    Args:
        cluster: The cluster.
        counts: The number of slots of each role.
        placement: trainer.placement.
        generator: The settings of the engines.
        device: "cuda" or "cpu".
        deadline_s: Seconds to wait for each reservation.
        overlaps_training: True if engines and learner compute at the same time.
        reserved_cpus: CPUs of the cluster that slots leave free.

    Raises:
        ConfigError: The cluster did not provide the slots within `deadline_s`.
    """
    reserve = partial(
        reserve_pool,
        cluster,
        device=device,
        total_slots=counts.total,
        deadline_s=deadline_s,
        reserved_cpus=reserved_cpus,
    )

    def dedicated(count: int, actors_per_slot: int, key: str) -> ResourcePool | None:
        """Reserve slots for a role of the trainer."""
        if not count:
            return None
        return reserve(
            count=count,
            actors_per_slot=actors_per_slot,
            key=key,
            strategy=placement.strategy,
            labels=placement.node_labels,
        )

    slots_per_engine = gpus_per_engine(generator)
    num_engines = counts.engines // slots_per_engine
    actors_per_slot = 1 + counts.reference_colocated + counts.critic_colocated + counts.reward_colocated
    num_sampling = num_engines * overlaps_training  # none where engines are elsewhere
    if counts.engines_colocated:
        keys = f"policy_num_gpus_per_node={counts.policy} generator.num_inference_engines={num_engines}"
        policy_pool = dedicated(counts.total, actors_per_slot + 1, keys)
    else:
        policy_pool = dedicated(counts.policy, actors_per_slot, "trainer.placement.policy_num_gpus_per_node")
    policy = _role(policy_pool, counts.policy, num_concurrent=num_sampling)
    reference, critic, reward = (
        dedicated(count, 1, f"trainer.placement.{role}_num_gpus_per_node")
        for role, count in (("ref", counts.reference), ("critic", counts.critic), ("reward", counts.reward))
    )
    reward_beside_engines = counts.reward_colocated and not counts.policy
    if counts.engines_colocated:
        engines = policy_pool
    elif counts.engines:
        engines = reserve(
            count=counts.engines,
            actors_per_slot=1 + reward_beside_engines,
            key="generator.num_inference_engines",
            strategy=placement.engine_strategy,
            labels=placement.engine_node_labels,
            # An engine's ranks on a node are processes that one actor there starts.
            slots_per_bundle=1 if reward_beside_engines else slots_per_engine // placement.nodes_per_engine,
        )
    else:
        engines = None
    return RunPlacement(
        policy=policy,
        reference=policy
        if counts.reference_colocated
        else _role(reference, counts.reference, num_concurrent=num_sampling),
        critic=policy if counts.critic_colocated else _role(critic, counts.critic, num_concurrent=num_sampling),
        reward=(policy or _role(engines, counts.engines)) if counts.reward_colocated else _role(reward, counts.reward),
        engines=_role(
            engines, num_engines, slots_per_engine, counts.policy * overlaps_training, placement.nodes_per_engine
        ),
        engines_colocated=counts.engines_colocated,
    )


def _role(
    pool: ResourcePool | None, count: int, slots_per_member: int = 1, num_concurrent: int = 0, nodes_per_member: int = 1
) -> RolePlacement | None:
    return None if pool is None else RolePlacement(pool, count, slots_per_member, num_concurrent, nodes_per_member)


def threads_per_process(cluster: Cluster, role_placement: RolePlacement, device: str) -> int:
    """Return the number of CPU threads for each process of a role.

    Members of a role compute at the same time, and other roles do too where rollouts run ahead. Processes on
    accelerators need threads for optimizer state in host memory and for reading and verifying weights.

    Args:
        cluster: Cluster of the run.
        role_placement: Slots of the role.
        device: "cuda" or "cpu".
    """
    if device == "cuda":
        return role_placement.pool.min_cores_per_slot
    return max(1, int(cluster.num_cpus) // max(1, role_placement.count + role_placement.num_concurrent))


# -- paths


def weight_folder(cfg: Config) -> str:
    """Return the folder for weights on the "checkpoint" route."""
    return cfg.generator.weight_sync_folder or str(resolve_local_folder(cfg.trainer.ckpt_path) / "weight_sync")


def shared_paths(cfg: Config, placement: RunPlacement) -> Iterator[SharedPath]:
    """Yield models, checkpoints, exports and the folder for weights, each with the nodes that use it.

    Creates the folders that the run will write to.
    """
    trainer, generator = cfg.trainer, cfg.generator
    for role, role_placement in (
        ("policy", placement.policy),
        ("ref", placement.reference),
        ("critic", placement.critic),
    ):
        path = getattr(trainer, role).model.path
        if role_placement is not None and path is not None:
            yield SharedPath(f"trainer.{role}.model.path", strip_file_scheme(path), _nodes(role_placement))
    if placement.reward is not None and trainer.reward.model.path is not None:
        yield SharedPath(
            "trainer.reward.model.path", strip_file_scheme(trainer.reward.model.path), _nodes(placement.reward)
        )
    if placement.engines is not None:
        yield SharedPath("generator.model_name", strip_file_scheme(generator.model_name), _nodes(placement.engines))
    if placement.policy is None:
        return
    trained = _nodes(placement.policy) | _nodes(placement.critic)
    if trainer.resume_mode == "from_path" and trainer.resume_path:
        yield SharedPath("trainer.resume_path", trainer.resume_path, trained)
    if trainer.ckpt_interval > 0:
        yield from _output_folder("trainer.ckpt_path", trainer.ckpt_path, trained)
    if trainer.hf_save_interval > 0:
        yield from _output_folder("trainer.export_path", trainer.export_path, trained)
    if generator.weight_sync_route == "checkpoint" and placement.engines is not None:
        key = "generator.weight_sync_folder"
        yield from _output_folder(key, weight_folder(cfg), _nodes(placement.policy) | _nodes(placement.engines))


def _nodes(role_placement: RolePlacement | None) -> frozenset[str]:
    return frozenset() if role_placement is None else frozenset(role_placement.pool.slot_node_ids)


def _output_folder(key: str, path: str, nodes: frozenset[str]) -> Iterator[SharedPath]:
    folder = resolve_local_folder(path).absolute()  # for a URI: the local folder that is uploaded
    os.makedirs(folder, exist_ok=True)
    yield SharedPath(key, str(folder), nodes, is_written=True)
