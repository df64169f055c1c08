"""trainer: the loop, its batch sizes, placement, checkpoints and reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.model import CriticConfig, PolicyConfig, RefConfig, RewardConfig
from skyrl_train.config.section import Section


@dataclass
class PlacementConfig(Section):
    """Which models share accelerators, and how many they get. Without accelerators a "GPU" is a slot of CPU."""

    colocate_all: bool = True
    """Trained models and engines share accelerators and take turns."""
    colocate_policy_ref: bool = True
    """Policy and reference share accelerators."""
    policy_num_nodes: int = 1
    """Nodes of the policy."""
    policy_num_gpus_per_node: int = 1
    """Ranks of the policy on each node."""
    critic_num_nodes: int = 1
    """Nodes of the critic."""
    critic_num_gpus_per_node: int = 1
    """Ranks of the critic on each node."""
    ref_num_nodes: int = 1
    """Nodes of the reference."""
    ref_num_gpus_per_node: int = 1
    """Ranks of the reference on each node."""
    reward_num_nodes: int = 1
    """Nodes of the reward model."""
    reward_num_gpus_per_node: int = 1
    """Replicas of the reward model on each node."""


@dataclass
class FullyAsyncConfig(Section):
    """Training on rollouts that were begun with older weights."""

    enabled: bool = False
    """Generate and train at the same time; `false` is synchronous."""
    max_staleness_steps: int = 4
    """Rollouts are at most this many weight versions old when they are trained on."""
    num_parallel_generation_workers: int = 768
    """Groups of rollouts in flight at most."""


@dataclass
class TimeoutsConfig(Section):
    """Every wait has a deadline (seconds); what passed it is named in the error."""

    placement_s: float = 10.0
    """Placement groups become ready; raise it on clusters that start nodes on demand."""
    engine_start_s: float = 600.0
    """An engine or a trainer rank loads its model."""
    rendezvous_s: float = 120.0
    """Ranks and engines find each other for collectives."""
    rollout_s: float = 1800.0
    """One group of rollouts, all turns."""
    environment_step_s: float = 60.0
    """One call of an environment: its process is killed afterwards."""
    weight_sync_s: float = 600.0
    """The trainer's weights reach all engines."""
    update_s: float = 3600.0
    """One call of the trainer's ranks: to score or to learn from a batch."""
    checkpoint_s: float = 1800.0
    """A rank writes or reads its part of a checkpoint, or exports the model."""


@dataclass
class TrainerConfig(Section):
    """The training loop."""

    placement: PlacementConfig = field(default_factory=PlacementConfig)
    sequence_parallel_backend: str = "ulysses"
    """How sequences are split over ranks."""
    strategy: str = "fsdp2"
    """How a model is spread over ranks.

    `fsdp2` (`fsdp` is another name for it) shards it with PyTorch, `deepspeed` with DeepSpeed's ZeRO; `single` is one
    rank without sharding, `megatron` is `fsdp2` with the tensor parallelism of `megatron_config`.
    """
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    ref: RefConfig = field(default_factory=RefConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    fully_async: FullyAsyncConfig = field(default_factory=FullyAsyncConfig)
    timeouts: TimeoutsConfig = field(default_factory=TimeoutsConfig)
    gradient_checkpointing: bool = True
    """Recompute activations in backward: less memory, about a third more compute."""
    gradient_checkpointing_use_reentrant: bool = False
    """PyTorch's older implementation of recomputation."""
    seed: int = 42
    """Seed of data order, sampling and initialisation."""
    resume_mode: str = "latest"
    """`latest` goes on from the newest checkpoint if any, `from_path` from `resume_path`, `none` (or null) is a new
    start."""
    resume_path: str | None = None
    """Checkpoint folder for `resume_mode=from_path`."""
    log_path: str = "/tmp/skyrl-logs"
    """SkyRL's folder for logs of processes; without effect here, where a run's records are in `ckpt_path`."""
    ckpt_path: str = "${oc.env:HOME}/ckpts/"
    """Checkpoints go here."""
    max_ckpts_to_keep: int = -1
    """The newest this many are kept; -1 keeps all."""
    ckpt_interval: int = 10
    """Steps between checkpoints; 0 or less writes none."""
    hf_save_interval: int = -1
    """Steps between exports in Hugging Face format; 0 or less exports none."""
    export_path: str = "${oc.env:HOME}/exports/"
    """Exports, dumps and metrics go here."""
    bf16: bool = True
    """Compute in bfloat16 with fp32 optimizer state; false is fp32."""
    epochs: int = 1
    """Passes over the training data: as many steps as train on every prompt so often."""
    update_epochs_per_batch: int = 1
    """Passes over one batch of rollouts."""
    train_batch_size: int = 1024
    """Prompts per step; the last batch of an epoch may be smaller."""
    policy_mini_batch_size: int = 256
    """Prompts per optimizer update; the last one of a step may be smaller."""
    critic_mini_batch_size: int = 256
    """Prompts per optimizer update of the critic; the last one of a step may be smaller."""
    micro_train_batch_size_per_gpu: int = 1
    """Sequences per forward and backward pass on a rank. Changes memory and speed only, never the update."""
    micro_forward_batch_size_per_gpu: int = 1
    """Sequences per pass without gradient on a rank. Changes memory and speed only."""
    max_tokens_per_microbatch: int | None = None
    """Tokens per pass on a rank, instead of the two counts of sequences above; null uses the counts."""
    share_prompt: bool | None = None
    """Run the prompt of samples that are in one pass once; null does where it saves a sixteenth of the tokens."""
    update_ref_every_epoch: bool = False
    """Replace the reference by the policy after every epoch."""
    use_sample_packing: bool = True
    """Batches are always packed without padding here."""
    eval_batch_size: int = 1024
    """Prompts in flight during evaluation."""
    eval_before_train: bool = True
    """Evaluate before the first step."""
    eval_interval: int = 5
    """Steps between evaluations; 0 or less evaluates at no step."""
    max_prompt_length: int = 512
    """Longer prompts (tokens) are dropped from the data and counted."""
    max_steps: int | None = None
    """Stop after this many steps even if epochs are left; null lets `epochs` decide."""
    max_failed_fraction: float = 0.5
    """A step in which a larger share of rollouts failed stops the run instead of training on what is left."""
    flash_attn: bool = True
    """Use flash attention; false uses PyTorch's scaled dot product attention."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""
    project_name: str = "skyrl"
    """Project of the tracker."""
    run_name: str = "test_run"
    """Name of the run."""
    logger: str | list[str] = "wandb"
    """Trackers besides the console and the JSONL files, which are always on: `wandb`, `tensorboard`, one or a list;
    null, `console` or an empty list is no other."""
    plugins: list[str] = field(default_factory=list)
    """Modules imported in the driver and in every worker; they register losses, advantages, environments, trackers."""
    dump_data_batch: bool = False
    """Write the batch of every step next to the exports; `skyrl_train.trainer.batch_dump.read_batch` reads it."""
    dump_eval_results: bool = True
    """Write every evaluation's rollouts next to the exports."""
    rope_scaling: dict[str, Any] | None = None
    """Rotary embedding scaling of trained models, as in the Hugging Face configuration."""
    rope_theta: float | None = None
    """Rotary embedding base of trained models."""
