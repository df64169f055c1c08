"""Who runs where: slots for the policy, the reference and the engines."""

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
    with_engines: bool = True,
) -> Layout:
    """Reserve all slots of a run. Raises ConfigError when they cannot be had within `deadline_s`."""
    policy = placement.policy_num_nodes * placement.policy_num_gpus_per_node if with_policy else 0
    reference = placement.ref_num_nodes * placement.ref_num_gpus_per_node if with_reference else 0
    stride = slots_per_engine(generator)
    engines = generator.num_inference_engines * stride if with_engines else 0
    shared_reference = bool(reference) and (placement.colocate_policy_ref or placement.colocate_all)
    if shared_reference:
        reference = policy
    time_shared = placement.colocate_all and bool(policy) and bool(engines)
    learner_slots = policy + (0 if shared_reference else reference)
    total = max(policy, engines) if time_shared else learner_slots + engines

    def take(count: int, tenants: int, key: str) -> Slots:
        return reserve(
            cluster, count=count, tenants=tenants, device=device, total_slots=total, deadline_s=deadline_s, key=key
        )

    if time_shared:
        keys = f"policy_num_gpus_per_node={policy} generator.num_inference_engines={engines // stride}"
        slots = take(total, 2 + bool(reference), keys)
        return Layout(
            policy=Seats(slots, policy),
            reference=Seats(slots, policy) if reference else None,
            engines=Seats(slots, generator.num_inference_engines, stride),
            time_shared=True,
        )
    policy_slots = take(policy, 1 + shared_reference, "trainer.placement.policy_num_gpus_per_node") if policy else None
    reference_slots = policy_slots
    if reference and not shared_reference:
        reference_slots = take(reference, 1, "trainer.placement.ref_num_gpus_per_node")
    engine_slots = take(engines, 1, "generator.num_inference_engines") if engines else None
    return Layout(
        policy=Seats(policy_slots, policy) if policy_slots else None,
        reference=Seats(reference_slots, reference) if reference_slots and reference else None,
        engines=Seats(engine_slots, generator.num_inference_engines, stride) if engine_slots else None,
        time_shared=False,
    )
