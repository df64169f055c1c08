"""The root of the configuration with `data` and `trainer`. Sections that builders take can be imported from here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_train.config.algorithm import AlgorithmConfig, DPPOConfig, OverlongBufferConfig
from skyrl_train.config.choices import STRATEGIES, TRACKERS
from skyrl_train.config.environment import EnvironmentConfig
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.model import (
    CriticConfig,
    DeepSpeedConfig,
    FSDPConfig,
    LoraConfig,
    OptimizerConfig,
    PolicyConfig,
    RefConfig,
    RewardConfig,
)
from skyrl_train.config.section import (
    AT_LEAST_MINUS_ONE,
    AT_LEAST_ONE,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    Range,
    Section,
    config_field,
)


@dataclass
class CurriculumConfig(Section):
    """Leave out prompts that are too hard or too easy for now.

    The pass rate of a prompt is the share of its samples with a reward of 1 or more. A prompt whose last pass rate lies
    outside the range is left out the next time its turn comes, and drawn again the time after. The range from 0 to 1
    leaves nothing out; with any other, `trainer.epochs` only determines the number of steps.
    """

    min_pass_rate: float = config_field(0.0, range=FRACTION)
    """Prompts with a lower pass rate are left out."""
    max_pass_rate: float = config_field(1.0, range=FRACTION)
    """Prompts with a higher pass rate are left out."""


@dataclass
class DataConfig(Section):
    """Where prompts are drawn from: parquet or jsonl files, folders, or names of hub datasets. Files and folders may be
    at addresses, s3://bucket/file or file:///file: see docs/storage.md."""

    train_data: list[str] = config_field(factory=lambda: ["${oc.env:HOME}/data/gsm8k/train.parquet"])
    """Training data."""
    val_data: list[str] = config_field(factory=lambda: ["${oc.env:HOME}/data/gsm8k/validation.parquet"])
    """Evaluation data."""
    curriculum: CurriculumConfig = config_field(factory=CurriculumConfig)


PLACEMENT_STRATEGIES = ("PACK", "SPREAD")
NULL_MEANS_NEVER = {None: -1}
"""How recipes write that something never happens, and how it is written here."""


@dataclass
class PlacementConfig(Section):
    """Which models share accelerators, and how many they get. Without accelerators a "GPU" is a slot of CPU.

    A model that is colocated with the policy has the policy's ranks. A dedicated one has its own, and then 0 nodes or
    ranks are refused.
    """

    colocate_all: bool = True
    """Colocate trained models and engines: they share accelerators and take turns on them."""
    colocate_policy_ref: bool = True
    """Colocate policy and reference."""
    policy_num_nodes: int = config_field(1, range=AT_LEAST_ONE)
    """Nodes of the policy."""
    policy_num_gpus_per_node: int = config_field(1, range=AT_LEAST_ONE)
    """Ranks of the policy on each node."""
    critic_num_nodes: int = config_field(1, range=NON_NEGATIVE)
    """Nodes of the critic."""
    critic_num_gpus_per_node: int = config_field(1, range=NON_NEGATIVE)
    """Ranks of the critic on each node."""
    ref_num_nodes: int = config_field(1, range=NON_NEGATIVE)
    """Nodes of the reference."""
    ref_num_gpus_per_node: int = config_field(1, range=NON_NEGATIVE)
    """Ranks of the reference on each node."""
    reward_num_nodes: int = config_field(1, range=NON_NEGATIVE)
    """Nodes of the reward model."""
    reward_num_gpus_per_node: int = config_field(1, range=NON_NEGATIVE)
    """Replicas of the reward model on each node."""
    strategy: str = config_field("PACK", choices=PLACEMENT_STRATEGIES)
    """How the ranks of a model are placed: `PACK` on as few nodes as possible, `SPREAD` on as many as possible. In
    either case ranks on one node are neighbours."""
    engine_strategy: str = config_field("PACK", choices=PLACEMENT_STRATEGIES)
    """The same of engines that have slots of their own."""
    nodes_per_engine: int = config_field(1, range=AT_LEAST_ONE)
    """Nodes that each engine's ranks are spread over, as many on each; more than 1 is for models that one node cannot
    hold, with `generator.backend=vllm`."""
    node_labels: dict[str, str] = config_field(factory=dict)
    """Ray's labels of the nodes that models may be on, such as `{ray.io/accelerator-type: H100}`; with
    `colocate_all` those of engines too. Empty: any node."""
    engine_node_labels: dict[str, str] = config_field(factory=dict)
    """The same of engines that have slots of their own."""


@dataclass
class FullyAsyncConfig(Section):
    """Generating and training at the same time, on engines that are not colocated with the trainer."""

    enabled: bool = False
    """Rollouts of later steps go on while a step is learnt; `false` is synchronous training."""
    max_staleness_steps: int = config_field(4, range=NON_NEGATIVE)
    """The age, in steps, of the oldest weights that may have sampled a token of those that a step trains on; 1 is one
    step off."""
    num_parallel_generation_workers: int = config_field(768, range=AT_LEAST_ONE)
    """Maximum number of groups of rollouts in flight."""
    on_sync: str = config_field(
        "keep",
        choices=("keep", "recompute", "abort"),
        aliases="clear_kv_cache_on_weight_sync",
        spellings={False: "keep", True: "recompute"},
    )
    """What new weights mean for sequences that are being sampled: they go on with the keys and values that they have,
    these are computed anew with the new weights, or the sequences are begun again."""
    sample_full_batch: bool = False
    """With `trainer.algorithm.zero_variance_filter`: groups with equal rewards are left out, and others are sampled
    until a step is full; the same as `trainer.algorithm.dynamic_sampling.type=filter`."""


GUARDS = ("equal_rewards", "ratio", "cut")
"""The guards that warn unless `stop` names them."""


@dataclass
class GuardsConfig(Section):
    """How a run that goes wrong is noticed. A guard warns once, or stops the run if `stop` names it; null is off.

    The limit of rollouts that failed, or were cut by `timeouts.rollout_s`, is `trainer.max_failed_fraction`: a step
    with more of them always stops the run.
    """

    max_skipped_updates: int = config_field(5, range=AT_LEAST_ONE)
    """Updates in a row whose gradient was not finite, and which every rank skipped, after which the run stops. The
    1st, 10th, 100th, ... step with such updates warns."""
    equal_rewards_steps: int | None = config_field(10, range=AT_LEAST_ONE)
    """Steps in a row in which all rewards that are compared were the same, so that nothing is learnt from them
    (`equal_rewards`): those of every prompt, or of the whole step where the advantage estimator compares all samples
    (`gae`, `reinforce++`, your own). Never where rewards are not read (`distillation`, `cross_entropy`)."""
    max_ratio: float | None = config_field(100.0, range=POSITIVE)
    """The largest probability ratio of a token (`ratio`): in an update over that before the step
    (`policy/ratio_max`), or in the trainer over that in the engine that sampled it (`mismatch/ratio_max`)."""
    max_cut_fraction: float | None = config_field(0.9, range=FRACTION)
    """Share of a step's responses that reach the length limit (`cut`)."""
    stop: list[str] = config_field(factory=list, choices=GUARDS)
    """The guards that stop the run: its last step is saved."""


@dataclass
class TimeoutsConfig(Section):
    """Time limits (seconds): every wait has one, and an error names the wait that exceeded it."""

    placement_s: float = config_field(10.0, range=POSITIVE)
    """For placement groups to become ready. Raise it on clusters that start nodes on demand."""
    engine_start_s: float = config_field(600.0, range=POSITIVE)
    """For an engine or a trainer rank to load its model."""
    rendezvous_s: float = config_field(120.0, range=POSITIVE)
    """For ranks and engines to find each other for collectives."""
    rollout_s: float = config_field(1800.0, range=POSITIVE, usual=Range(1, 86_400))
    """For all turns of one episode, while they run in an engine's batch: waiting for room in it does not count. An
    episode that is cut is masked, and counted in `rollouts/failed/deadline`."""
    environment_step_s: float = config_field(60.0, range=POSITIVE, usual=Range(0.05, 86_400))
    """For one call of an environment; its process is killed afterwards."""
    environment_hosts_s: float = config_field(180.0, range=POSITIVE)
    """For `environment.hosts` to start, and for one of them to be there again after all of them were lost. Then the run
    ends."""
    weight_sync_s: float = config_field(600.0, range=POSITIVE)
    """For the trainer's weights to reach all engines."""
    drain_s: float = config_field(300.0, range=POSITIVE)
    """For an engine that leaves a run under way to answer the requests that it has; then others get them."""
    update_s: float = config_field(3600.0, range=POSITIVE)
    """For one call of the trainer's ranks, which scores a batch or learns from it."""
    checkpoint_s: float = config_field(1800.0, range=POSITIVE)
    """For a rank to write or read its part of a checkpoint, or to export the model."""
    upload_s: float = config_field(1800.0, range=POSITIVE)
    """For a run that has ended, or starts its ranks again, to upload what is not at its addresses, see `ckpt_path`."""


@dataclass
class TrainerConfig(Section):
    """The training loop."""

    placement: PlacementConfig = config_field(factory=PlacementConfig)
    sequence_parallel_backend: str = config_field("ulysses", choices=("ulysses",))
    """How sequences are split over ranks."""
    strategy: str = config_field("fsdp2", choices=STRATEGIES)
    """How a model is distributed over ranks. `fsdp2` (also called `fsdp`) shards it with PyTorch, `deepspeed` with
    DeepSpeed's ZeRO. `single` is one rank without sharding. `megatron` is `fsdp2` with the tensor parallelism of
    `megatron_config`."""
    policy: PolicyConfig = config_field(factory=PolicyConfig)
    ref: RefConfig = config_field(factory=RefConfig)
    critic: CriticConfig = config_field(factory=CriticConfig)
    reward: RewardConfig = config_field(factory=RewardConfig)
    algorithm: AlgorithmConfig = config_field(factory=AlgorithmConfig)
    fully_async: FullyAsyncConfig = config_field(factory=FullyAsyncConfig)
    timeouts: TimeoutsConfig = config_field(factory=TimeoutsConfig)
    guards: GuardsConfig = config_field(factory=GuardsConfig)
    gradient_checkpointing: bool = True
    """Recompute activations in the backward pass. This saves memory and costs about a third more compute."""
    gradient_checkpointing_use_reentrant: bool = False
    """Use PyTorch's older implementation of recomputation."""
    seed: int = config_field(42, range=NON_NEGATIVE)
    """Seed of the data order, of sampling and of initialisation."""
    restarts: int = config_field(0, range=NON_NEGATIVE)
    """How often, in the whole run, the ranks are started again from the newest checkpoint when one of them was lost,
    with its node or alone; on fewer slots if there are no more. 0: the run ends with what it saved."""
    resume_mode: str = config_field(
        "latest",
        choices=("latest", "from_path", "none"),
        spellings={None: "none", "": "none", "None": "none"},
    )
    """`latest` continues from the newest checkpoint if there is one, `from_path` from `resume_path`; `none` starts
    anew."""
    resume_path: str | None = None
    """Checkpoint folder for `resume_mode=from_path`, on this machine or at an address."""
    log_path: str = "/tmp/skyrl-logs"
    """SkyRL's folder for the logs of processes."""
    ckpt_path: str = "${oc.env:HOME}/ckpts/"
    """Folder of the run: its checkpoints are written here. If nobody sets it, a folder of this configuration's own
    below the default, PROJECT/RUN-DIGEST, which the same command finds again; the number of steps, ranks and engines
    may change, what decides what is learnt makes another folder. An address, `s3://bucket/folder` or `file:///folder`,
    has a copy of the folder: the run works on this machine, see docs/storage.md."""
    max_ckpts_to_keep: int = config_field(-1, range=AT_LEAST_MINUS_ONE, spellings=NULL_MEANS_NEVER)
    """Keep only this many of the newest checkpoints; -1 keeps all."""
    ckpt_interval: int = config_field(10, range=AT_LEAST_MINUS_ONE, spellings=NULL_MEANS_NEVER)
    """How many steps apart checkpoints are written; 0 or less writes none. If it is enabled, the last step writes one
    too."""
    async_checkpoint: bool = config_field(
        False,
        aliases="trainer.policy.megatron_config.async_dist_ckpt_save",
    )
    """Write checkpoints while training goes on, from a copy of weights and optimizer state in host memory, which must
    have room for it. A save waits for the one before it."""
    hf_save_interval: int = config_field(-1, range=AT_LEAST_MINUS_ONE, spellings=NULL_MEANS_NEVER)
    """How many steps apart the model is exported in Hugging Face format; 0 or less exports nothing. If it is enabled,
    the model is also exported after the last step."""
    export_path: str = "${oc.env:HOME}/exports/"
    """Exports and dumps are written here. If nobody sets it, in a folder of this configuration's own below the default,
    as for `ckpt_path`. It may be an address, too."""
    bf16: bool = True
    """Compute in bfloat16, with optimizer state in fp32; false computes in fp32."""
    epochs: int = config_field(1, range=AT_LEAST_ONE, usual=Range(1, 1_000))
    """Passes over the training data. The run has as many steps as it takes to train on every prompt this many times."""
    update_epochs_per_batch: int = config_field(1, range=AT_LEAST_ONE)
    """Passes over one batch of rollouts."""
    train_batch_size: int = config_field(1024, range=AT_LEAST_ONE, usual=Range(1, 65_536))
    """Prompts per step. The last batch of an epoch may be smaller."""
    policy_mini_batch_size: int = config_field(256, range=AT_LEAST_ONE)
    """Prompts per optimizer update of the policy. The last mini-batch of a step may be smaller."""
    critic_mini_batch_size: int = config_field(256, range=AT_LEAST_ONE)
    """Prompts per optimizer update of the critic. The last mini-batch of a step may be smaller."""
    micro_train_batch_size_per_gpu: int | None = config_field(None, range=AT_LEAST_ONE, skyrl_default=1)
    """Sequences per micro-batch: those that a rank runs through one forward and backward pass. Changes memory and speed
    only, never the update, except with `loss_reduction=token_mean_legacy`. null: one, unless tokens are counted."""
    micro_forward_batch_size_per_gpu: int | None = config_field(None, range=AT_LEAST_ONE, skyrl_default=1)
    """Sequences per micro-batch of a pass without gradient, on each rank. Changes memory and speed only. null: one,
    unless tokens are counted."""
    max_tokens_per_microbatch: int | None = config_field(None, range=AT_LEAST_ONE, spellings={-1: None})
    """Tokens per micro-batch on a rank. It replaces the two numbers of sequences above. null: on accelerators, if
    neither of those is set either, the most that the memory plan finds room for, up to 16,384; else sequences are
    counted."""
    share_prompt: bool | None = None
    """Run a prompt that several samples in a micro-batch share only once. null does so if it saves at least a sixteenth
    of the tokens."""
    moe_routing_replay: str | None = config_field(
        None,
        choices=(None, "rollout", "old_policy"),
        spellings={"none": None, True: "rollout", False: None},
        aliases="trainer.policy.megatron_config.moe_enable_routing_replay",
    )
    """Which experts a mixture of experts sends a token to when it is scored and learnt: rollout for those that it went
    to in the engine, old_policy for those that the policy chose before the step's first update, null for those that
    routers choose anew."""
    update_ref_every_epoch: bool = False
    """Replace the reference by the policy after every epoch."""
    use_sample_packing: bool = config_field(True, aliases="remove_microbatch_padding")
    """Pack sequences without padding."""
    eval_batch_size: int = config_field(1024, range=AT_LEAST_ONE)
    """Prompts in flight during evaluation."""
    eval_before_train: bool = True
    """Evaluate before the first step."""
    eval_interval: int = config_field(5, range=AT_LEAST_MINUS_ONE, spellings=NULL_MEANS_NEVER)
    """How many steps apart evaluations are; 0 or less evaluates after no step. If it is enabled, there is also an
    evaluation after the last step."""
    max_prompt_length: int = config_field(512, range=AT_LEAST_ONE)
    """Maximum length (tokens) of a prompt. Longer prompts are dropped from the data and counted."""
    max_steps: int | None = config_field(None, range=AT_LEAST_ONE, aliases=("max_training_steps", "num_dummy_steps"))
    """Stop after this many steps even if epochs are left; null trains for all `epochs`."""
    max_failed_fraction: float = config_field(0.5, range=FRACTION)
    """If a larger share of a step's rollouts failed, the run stops instead of training on what is left."""
    flash_attn: bool = True
    """Use flash attention; false uses PyTorch's scaled dot product attention."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""
    project_name: str = "skyrl"
    """Name of the project in trackers."""
    run_name: str = "test_run"
    """Name of the run."""
    logger: str | list[str] = config_field(
        "wandb", choices=TRACKERS, plugins=True, spellings={None: [], "": [], "none": []}
    )
    """Trackers in addition to the console and the JSONL files, which are always on: `wandb`, `tensorboard`, `mlflow`,
    `trackio`, one or a list. null, `console` or an empty list adds none."""
    console_samples: int = config_field(1, range=NON_NEGATIVE)
    """How many completions are shown on the console, of the first step and of every `console_samples_interval`th."""
    console_samples_interval: int = config_field(10, range=AT_LEAST_ONE)
    """How many steps apart completions are shown. All that were chosen for people are in samples.jsonl."""
    keep_rollouts: str = config_field("sample", choices=("all", "sample", "none"), spellings={None: "none", "": "none"})
    """The rollouts of a step that are kept in `rollouts` in the run's folder, with tokens, log-probs and advantages:
    `all`, those of its first 8 prompts, or `none`."""
    keep_rollouts_gb: float | None = config_field(None, range=POSITIVE)
    """Gigabytes that they take at most; beyond that those of the oldest steps are deleted. null is 1 for `sample`, and
    no bound for `all`."""
    metrics_port: int | None = config_field(None, range=Range(0, 65535))
    """Port at which the run answers `GET /metrics` for Prometheus, with the newest value of every number of
    metrics.jsonl; 0 takes a free one, which is said. null serves nothing."""
    metrics_host: str = "127.0.0.1"
    """Address of `metrics_port`. One that other machines reach asks for the token of SKYRL_API_KEY."""
    plugins: list[str] = config_field(factory=list)
    """Modules that are imported in the driver and in every worker; they register losses, advantages, environments and
    trackers."""
    profile_steps: list[int] = config_field(factory=list, range=AT_LEAST_ONE)
    """Steps that are profiled, 1 being the first: traces of torch's profiler, and a table of the slowest operations,
    in `profiles` in the run's folder. A profiled step takes longer."""
    trace: bool = False
    """Write a time line of driver, trainer ranks, engines and environments, for Perfetto, to `trace.json` in the run's
    folder."""
    dump_data_batch: bool = False
    """Write the batch of every step next to the exports; `skyrl_train.trainer.batch_dump.read_batch` reads it."""
    dump_eval_results: bool = True
    """Write the rollouts of every evaluation next to the exports: a file for each data source."""
    rope_scaling: dict[str, Any] | None = None
    """Scaling of rotary embeddings in trained models, as in the Hugging Face configuration."""
    rope_theta: float | None = config_field(None, range=POSITIVE)
    """Base of rotary embeddings in trained models."""


@dataclass
class Config(Section):
    """The whole configuration. Names and defaults are SkyRL's for every key that SkyRL has."""

    data: DataConfig = config_field(factory=DataConfig)
    trainer: TrainerConfig = config_field(factory=TrainerConfig)
    generator: GeneratorConfig = config_field(factory=GeneratorConfig)
    environment: EnvironmentConfig = config_field(factory=EnvironmentConfig)
    device: str = config_field("auto", choices=("auto", "cpu", "cuda"))
    """`cpu`, `cuda`, or `auto`: CUDA if there is an accelerator, otherwise CPU with settings to match."""
