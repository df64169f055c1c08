"""The models that a run trains or scores with: ranks of policy, reference and critic, and the reward model."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from skyrl_train.cluster.actors import spawn
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.choices import STRATEGIES
from skyrl_train.config.schema import (
    CriticConfig,
    GeneratorConfig,
    LoraConfig,
    PolicyConfig,
    RefConfig,
    TimeoutsConfig,
    TrainerConfig,
)
from skyrl_train.errors import DeadlineExceeded
from skyrl_train.experiment.algorithm import ObjectiveSpec
from skyrl_train.experiment.data import check_same_tokens
from skyrl_train.experiment.placement import RolePlacement, RunPlacement, threads_per_process
from skyrl_train.learner.learner import BatchSizes, Learner, WorkerGroup
from skyrl_train.learner.reward_worker import RewardModel
from skyrl_train.learner.worker import LearnerSpec
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.trainer.trainer import StepSchedule

LEARNER_WORKER = "skyrl_train.learner.worker:LearnerWorker"
REWARD_WORKER = "skyrl_train.learner.reward_worker:RewardWorker"


def build_learner(
    cluster: Cluster,
    trainer: TrainerConfig,
    placement: RunPlacement,
    *,
    objective_spec: ObjectiveSpec,
    schedule: StepSchedule,
    generator: GeneratorConfig,
    device: str,
) -> Learner:
    """Start the processes of policy, reference and critic. `Learner.setup` loads their models later.

    Args:
        cluster: The cluster.
        trainer: The settings of training.
        placement: The slots of every role.
        objective_spec: The loss and what it needs.
        schedule: The schedule of steps, from which the number of optimizer steps follows.
        generator: The settings of the engines, for weight syncs.
        device: "cuda" or "cpu".

    Raises:
        ConfigError: The tokenizer of the reference or the critic assigns other ids to the policy's tokens.
    """
    assert placement.policy is not None
    spec = LearnerSpec(
        model_path=trainer.policy.model.path,
        strategy=STRATEGIES[trainer.strategy],
        device=device,
        dtype="bfloat16" if trainer.bf16 else "float32",
        seed=trainer.seed,
        threads=threads_per_process(cluster, placement.policy, device),
        optimizer_config=trainer.policy.optimizer_config,
        total_steps=optimizer_steps(trainer, schedule, trainer.policy_mini_batch_size),
        objective=objective_spec.objective,
        use_torch_compile=trainer.policy.use_torch_compile,
        gradient_checkpointing=True if trainer.gradient_checkpointing is None else trainer.gradient_checkpointing,
        gradient_checkpointing_use_reentrant=trainer.gradient_checkpointing_use_reentrant,
        rope_scaling=trainer.rope_scaling,
        rope_theta=trainer.rope_theta,
        rendezvous_s=trainer.timeouts.rendezvous_s,
        update_s=trainer.timeouts.update_s,
        max_skipped_updates=trainer.guards.max_skipped_updates,
        model_dtype=generator.model_dtype,
        weight_transfer_threshold_cuda_ipc_GB=generator.weight_transfer_threshold_cuda_ipc_GB,
        weight_sync_only_changed=generator.weight_sync_only_changed,
        lora=_lora(trainer.policy.model.lora),
        router_aux_loss_coef=trainer.algorithm.router_aux_loss_coef,
        moe_routing_replay=trainer.moe_routing_replay,
        **_section_settings(trainer.policy),
        shares_accelerator=placement.policy in (placement.reference, placement.critic, placement.reward),
        memory_snapshot_folder=str(resolve_local_folder(trainer.export_path) / "memory_snapshots")
        if trainer.policy.record_memory
        else None,
    )
    reference = critic = None
    if placement.reference is not None:
        check_same_tokens(trainer.policy.model.path, trainer.ref.model.path, "trainer.ref.model.path")
        frozen_spec = reference_spec(spec, trainer, threads_per_process(cluster, placement.reference, device))
        reference = _spawn_workers(cluster, frozen_spec, placement.reference, "reference", trainer.timeouts)
    if placement.critic is not None:
        check_same_tokens(trainer.policy.model.path, str(trainer.critic.model.path), "trainer.critic.model.path")
        value_spec = critic_spec(
            spec, trainer, threads_per_process(cluster, placement.critic, device), objective_spec, schedule
        )
        critic = _spawn_workers(cluster, value_spec, placement.critic, "critic", trainer.timeouts)
    return Learner(
        _spawn_workers(cluster, spec, placement.policy, "learner", trainer.timeouts),
        reference,
        batch_sizes(trainer),
        critic=critic,
        reduction=objective_spec.reduction,
        token_selector=objective_spec.token_selector,
        needs_old_logprobs=objective_spec.needs_old_logprobs,
        moe_routing_replay=trainer.moe_routing_replay,
        stacks_file=resolve_local_folder(trainer.ckpt_path) / "stacks.txt",
    )


async def start_learner(learner: Learner, trainer: TrainerConfig) -> None:
    """Load the learner's models.

    Raises:
        DeadlineExceeded: Loading took more than timeouts.engine_start_s; the error has the stacks of all ranks.
    """
    try:
        async with asyncio.timeout(trainer.timeouts.engine_start_s) as deadline:
            await learner.setup()
    except TimeoutError as error:
        if not deadline.expired():
            await learner.attach_stall_report(error)
            raise
        expiry = DeadlineExceeded("start of the trainer's ranks", trainer.timeouts.engine_start_s)
        await learner.attach_stall_report(expiry)
        raise expiry from error


def reference_spec(policy: LearnerSpec, trainer: TrainerConfig, threads: int | None) -> LearnerSpec:
    """Return the spec of the reference's ranks: the policy's, frozen and in the compute dtype.

    Args:
        policy: The spec of the policy's ranks.
        trainer: The settings of training.
        threads: CPU threads of each process; None for torch's default.
    """
    return replace(
        policy,
        model_path=trainer.ref.model.path,
        model_config_key="trainer.ref.model.path",
        optimizer_config=None,
        total_steps=None,
        objective=None,
        threads=threads,
        lora=None,
        router_aux_loss_coef=0.0,
        moe_routing_replay=None,
        **_section_settings(trainer.ref),
        memory_snapshot_folder=None,
    )


def critic_spec(
    policy: LearnerSpec,
    trainer: TrainerConfig,
    threads: int | None,
    objective_spec: ObjectiveSpec,
    schedule: StepSchedule,
) -> LearnerSpec:
    """Return the spec of the critic's ranks: a body with a value head and its own optimizer.

    Args:
        policy: The spec of the policy's ranks.
        trainer: The settings of training; trainer.critic.model.path must be set.
        threads: CPU threads of each process; None for torch's default.
        objective_spec: The loss and what it needs.
        schedule: The schedule of steps.
    """
    critic = trainer.critic
    assert critic.model.path is not None
    return replace(
        policy,
        model_path=critic.model.path,
        model_config_key="trainer.critic.model.path",
        optimizer_config=critic.optimizer_config,
        total_steps=optimizer_steps(trainer, schedule, trainer.critic_mini_batch_size),
        objective=objective_spec.critic_objective,
        threads=threads,
        value_head_prefix=trainer.algorithm.value_head_prefix,
        lora=_lora(critic.model.lora),
        router_aux_loss_coef=0.0,
        moe_routing_replay=None,
        **_section_settings(critic),
        memory_snapshot_folder=None,
    )


def _section_settings(section: PolicyConfig | RefConfig | CriticConfig) -> dict[str, Any]:
    """Return the keys that policy, reference and critic each have in their own section."""
    names = (
        "fsdp_config",
        "deepspeed_config",
        "model_config_kwargs",
        "sequence_parallel_size",
        "tensor_parallel_size",
        "expert_parallel_size",
    )
    return {name: getattr(section, name) for name in names}


def _lora(settings: LoraConfig) -> LoraConfig | None:
    return settings if settings.rank else None


def optimizer_steps(trainer: TrainerConfig, schedule: StepSchedule, mini_batch_size: int) -> int:
    """Return a run's number of optimizer steps of one model.

    Args:
        trainer: The settings of training, with update_epochs_per_batch.
        schedule: The steps of the run.
        mini_batch_size: Number of prompts per optimizer step of this model.
    """
    sizes = (schedule.num_prompts_in_step(step) for step in range(schedule.total_steps))
    return sum(-(-size // mini_batch_size) for size in sizes) * trainer.update_epochs_per_batch


def batch_sizes(trainer: TrainerConfig) -> BatchSizes:
    """Return the sizes of mini-batches and micro-batches. Micro-batch sizes that are not configured are 1."""
    return BatchSizes(
        policy_mini_batch_size=trainer.policy_mini_batch_size,
        critic_mini_batch_size=trainer.critic_mini_batch_size,
        update_epochs_per_batch=trainer.update_epochs_per_batch,
        micro_train_batch_size_per_gpu=trainer.micro_train_batch_size_per_gpu or 1,
        micro_forward_batch_size_per_gpu=trainer.micro_forward_batch_size_per_gpu or 1,
        max_tokens_per_microbatch=trainer.max_tokens_per_microbatch,
        share_prompt=trainer.share_prompt,
    )


def _spawn_workers(
    cluster: Cluster, spec: LearnerSpec, role_placement: RolePlacement, role: str, timeouts: TimeoutsConfig
) -> WorkerGroup:
    return WorkerGroup(
        [
            spawn(
                cluster,
                LEARNER_WORKER,
                {"spec": spec, "rank": rank, "world_size": role_placement.count},
                pool=role_placement.pool,
                index=rank,
                name=f"{role} {rank}",
                is_async=False,
                deadline_s=timeouts.update_s,
                deadlines=dict.fromkeys(("save", "wait_for_discarded_save", "load", "export"), timeouts.checkpoint_s)
                | dict.fromkeys(("address", "setup", "reload"), timeouts.engine_start_s)
                # Called in the background: it may have to wait for an update.
                | {"poll_save": timeouts.update_s + timeouts.checkpoint_s},
            )
            for rank in range(role_placement.count)
        ],
        spec.parallel_size,
        cluster.failure_detection_s,
    )


# -- reward model


def build_reward_model(
    cluster: Cluster, trainer: TrainerConfig, placement: RunPlacement, *, device: str
) -> RewardModel | None:
    """Start a replica of the reward model on each of its slots. `RewardModel.setup` loads them later.

    Args:
        cluster: Cluster of the run.
        trainer: The settings of training.
        placement: Slots of the run's processes.
        device: "cuda" or "cpu".

    Returns:
        The reward model; None if the run has none (trainer.reward.model.path).
    """
    role_placement = placement.reward
    if role_placement is None:
        return None
    settings = {
        "path": trainer.reward.model.path,
        "dtype": "bfloat16" if trainer.bf16 else "float32",
        "device": device,
        "threads": threads_per_process(cluster, role_placement, device),
        "model_config_kwargs": trainer.reward.model_config_kwargs,
    }
    return RewardModel(
        [
            spawn(
                cluster,
                REWARD_WORKER,
                settings,
                pool=role_placement.pool,
                index=index,
                name=f"reward model {index}",
                is_async=False,
                deadline_s=trainer.timeouts.rollout_s,
            )
            for index in range(role_placement.count)
        ]
    )
