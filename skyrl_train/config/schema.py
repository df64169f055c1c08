"""The root of the configuration and its sections `data` and `trainer`.

Sections of the other modules that a run's builders take as arguments can be imported from here, too.
"""

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
    """Curriculum that temporarily skips prompts that are too hard or too easy.

    The pass rate of a prompt is the fraction of its samples with a reward of 1 or more. A prompt whose last pass rate
    lies outside the range is skipped the next time its turn comes, and drawn again the time after. The range from 0 to
    1 skips nothing. With any other range `trainer.epochs` only determines the number of steps.
    """

    min_pass_rate: float = config_field(0.0, range=FRACTION)
    """Prompts with a lower pass rate are skipped. It must not be above `max_pass_rate`."""
    max_pass_rate: float = config_field(1.0, range=FRACTION)
    """Prompts with a higher pass rate are skipped."""


@dataclass
class DataConfig(Section):
    """Sources of prompts: parquet or jsonl files, folders, and names of datasets on the Hugging Face hub.

    Files and folders may be URIs, such as s3://bucket/file or file:///file: see docs/guides/storage.md.
    """

    train_data: list[str] = config_field(factory=lambda: ["${oc.env:HOME}/data/gsm8k/train.parquet"])
    """Sources of the training data."""
    val_data: list[str] = config_field(factory=lambda: ["${oc.env:HOME}/data/gsm8k/validation.parquet"])
    """Sources of the evaluation data."""
    curriculum: CurriculumConfig = config_field(factory=CurriculumConfig)


PLACEMENT_STRATEGIES = ("PACK", "SPREAD")
OFFLOAD_MODES = ("none", "kv_cache", "all")
NULL_MEANS_NEVER = {None: -1}
"""Value aliases of intervals and limits: recipes write null where this package writes -1."""


@dataclass
class PlacementConfig(Section):
    """Number of GPUs of each model, and the models and engines that share GPUs (are colocated).

    Without accelerators a "GPU" is the share of CPUs of one rank. A model that is colocated with the policy uses the
    policy's ranks. A model that is not colocated has dedicated ranks, and its numbers of nodes and ranks must be at
    least 1.
    """

    colocate_all: bool = True
    """Colocate all models and engines. They time-share the same accelerators: engines and trainer run alternately."""
    colocate_offload: str | None = config_field(None, choices=(None, *OFFLOAD_MODES))
    """Memory of colocated engines and models that is freed while the other side works. With `none` nothing moves. With
    `kv_cache` engines free their KV cache, and all weights stay. With `all` engines free weights and KV cache, and
    models move to host memory. `null` chooses the first of these that fits the memory plan."""
    colocate_policy_ref: bool = True
    """Colocate policy and reference."""
    policy_num_nodes: int = config_field(1, range=AT_LEAST_ONE)
    """Number of nodes of the policy."""
    policy_num_gpus_per_node: int = config_field(1, range=AT_LEAST_ONE)
    """Number of ranks of the policy on each node."""
    critic_num_nodes: int = config_field(1, range=NON_NEGATIVE)
    """Number of nodes of the critic. It applies if the critic is not colocated."""
    critic_num_gpus_per_node: int = config_field(1, range=NON_NEGATIVE)
    """Number of ranks of the critic on each node. It applies if the critic is not colocated."""
    ref_num_nodes: int = config_field(1, range=NON_NEGATIVE)
    """Number of nodes of the reference. It applies if the reference is not colocated."""
    ref_num_gpus_per_node: int = config_field(1, range=NON_NEGATIVE)
    """Number of ranks of the reference on each node. It applies if the reference is not colocated."""
    reward_num_nodes: int = config_field(1, range=NON_NEGATIVE)
    """Number of nodes of the reward model. It applies if the reward model is not colocated."""
    reward_num_gpus_per_node: int = config_field(1, range=NON_NEGATIVE)
    """Number of replicas of the reward model on each node. It applies if the reward model is not colocated."""
    strategy: str = config_field("PACK", choices=PLACEMENT_STRATEGIES)
    """Placement of a model's ranks: `PACK` uses as few nodes as possible, `SPREAD` as many as possible. In either case
    the ranks on one node are consecutive."""
    engine_strategy: str = config_field("PACK", choices=PLACEMENT_STRATEGIES)
    """Placement strategy, as in `strategy`, of engines that are not colocated."""
    nodes_per_engine: int = config_field(1, range=AT_LEAST_ONE)
    """Number of nodes that each engine spans, with the same number of its ranks on each. More than 1 is for models that
    do not fit on one node, and requires `generator.backend=vllm`."""
    node_labels: dict[str, str] = config_field(factory=dict)
    """Ray node labels that the nodes of models must have, such as `{ray.io/accelerator-type: H100}`. With
    `colocate_all` it applies to engines, too. An empty mapping allows all nodes."""
    engine_node_labels: dict[str, str] = config_field(factory=dict)
    """Ray node labels that the nodes of engines must have if the engines are not colocated. An empty mapping allows all
    nodes."""


@dataclass
class FullyAsyncConfig(Section):
    """Asynchronous training: generation and training at the same time, on engines that are not colocated."""

    enabled: bool = False
    """Generate rollouts of later steps while a step trains. `false` is synchronous training."""
    max_staleness_steps: int = config_field(4, range=NON_NEGATIVE)
    """Maximum age (steps) of the weights that sampled a token which a step trains on. 1 is one-step off-policy
    training."""
    num_parallel_generation_workers: int = config_field(768, range=AT_LEAST_ONE)
    """Maximum number of groups in flight."""
    on_sync: str = config_field(
        "keep",
        choices=("keep", "recompute", "abort"),
        aliases="clear_kv_cache_on_weight_sync",
        value_aliases={False: "keep", True: "recompute"},
    )
    """Effect of a weight sync on sequences that are being sampled. `keep` continues them with their KV cache.
    `recompute` computes the KV cache again with the new weights and continues. `abort` samples them again from the
    beginning."""
    sample_full_batch: bool = False
    """Drop groups with equal rewards and sample others until a step is full, like
    `trainer.algorithm.dynamic_sampling.type=filter`. Requires `trainer.algorithm.zero_variance_filter=true`."""


GUARDS = ("equal_rewards", "ratio", "cut")
"""Guards that only warn unless `trainer.guards.stop` names them."""


@dataclass
class GuardsConfig(Section):
    """Guards that stop unhealthy runs. A guard acts if `stop` names it and its limit is not null. The diagnosis warns
    about the same symptoms in any case.

    Rollouts that failed or exceeded `timeouts.rollout_s` have a separate limit: a step with a larger fraction of them
    than `trainer.max_failed_fraction` always stops the run.
    """

    max_skipped_updates: int = config_field(5, range=AT_LEAST_ONE)
    """Number of consecutive updates with a non-finite gradient after which the run stops. Every rank skips such an
    update. The 1st, 10th, 100th, ... step with skipped updates warns."""
    equal_rewards_steps: int | None = config_field(10, range=AT_LEAST_ONE)
    """Number of consecutive steps without a training signal after which the guard `equal_rewards` stops the run: all
    rewards that the advantage estimator compares are equal. It compares the samples of each prompt, or all samples of a
    step (`gae`, `reinforce++`, your own estimators). The guard does not apply where rewards are not read
    (`distillation`, `cross_entropy`)."""
    max_ratio: float | None = config_field(100.0, range=POSITIVE)
    """Largest probability ratio of a token above which the diagnosis warns, or the guard `ratio` stops the run. It
    checks the ratio of the updated policy to the policy before the step (`policy/ratio_max`) and the ratio of the
    trainer to the engine that sampled the token (`mismatch/ratio_max`). null turns off both."""
    max_cut_fraction: float | None = config_field(0.9, range=FRACTION)
    """Fraction of a step's responses that reach the length limit above which the guard `cut` stops the run."""
    stop: list[str] = config_field(factory=list, choices=GUARDS)
    """Guards that may stop the run. It saves its last step before it stops."""


@dataclass
class TimeoutsConfig(Section):
    """Time limits (seconds). Every wait of a run has one, and an error names the limit that was exceeded."""

    placement_s: float = config_field(10.0, range=POSITIVE)
    """Limit for Ray's placement groups to become ready. Raise it on clusters that start nodes on demand."""
    engine_start_s: float = config_field(600.0, range=POSITIVE)
    """Limit for an engine or a trainer rank to load its model."""
    rendezvous_s: float = config_field(120.0, range=POSITIVE)
    """Limit for ranks and engines to connect for collectives."""
    rollout_s: float = config_field(1800.0, range=POSITIVE, typical_range=Range(1, 86_400))
    """Limit for all turns of one episode, counted while they run in an engine's batch. Waiting for room in the batch
    does not count. An episode that exceeds it is masked and counted in `rollouts/failed/deadline`."""
    environment_step_s: float = config_field(60.0, range=POSITIVE, typical_range=Range(0.05, 86_400))
    """Limit for one call of an environment. The environment's process is killed if it takes longer."""
    environment_hosts_s: float = config_field(180.0, range=POSITIVE)
    """Limit for all `environment.hosts` to start, and for one host to restart after all were lost. The run ends if it
    is exceeded."""
    weight_sync_s: float = config_field(600.0, range=POSITIVE)
    """Limit for the trainer's weights to reach all engines."""
    drain_s: float = config_field(300.0, range=POSITIVE)
    """Limit for an engine that is removed from a running run to finish its requests. Unfinished requests are then
    repeated on other engines."""
    update_s: float = config_field(3600.0, range=POSITIVE)
    """Limit for one call of the trainer's ranks: computing a batch's log-probs or values, or one update."""
    checkpoint_s: float = config_field(1800.0, range=POSITIVE)
    """Limit for a rank to write or read its shard of a checkpoint, or to export the model."""
    upload_s: float = config_field(1800.0, range=POSITIVE)
    """Limit for pending uploads to finish when the run ends or restarts its ranks, if `ckpt_path` or `export_path` is a
    URI."""


@dataclass
class TrainerConfig(Section):
    """The training loop."""

    placement: PlacementConfig = config_field(factory=PlacementConfig)
    sequence_parallel_backend: str = config_field("ulysses", choices=("ulysses",))
    """Implementation of sequence parallelism."""
    strategy: str = config_field("fsdp2", choices=STRATEGIES)
    """Strategy that distributes a model over ranks. `fsdp2` (also called `fsdp`) shards it with PyTorch, `deepspeed`
    with DeepSpeed's ZeRO. `single` is one rank without sharding. `megatron` is `fsdp2` with the parallelism of
    `megatron_config`."""
    policy: PolicyConfig = config_field(factory=PolicyConfig)
    ref: RefConfig = config_field(factory=RefConfig)
    critic: CriticConfig = config_field(factory=CriticConfig)
    reward: RewardConfig = config_field(factory=RewardConfig)
    algorithm: AlgorithmConfig = config_field(factory=AlgorithmConfig)
    fully_async: FullyAsyncConfig = config_field(factory=FullyAsyncConfig)
    timeouts: TimeoutsConfig = config_field(factory=TimeoutsConfig)
    guards: GuardsConfig = config_field(factory=GuardsConfig)
    gradient_checkpointing: bool | str | None = config_field(
        None, choices=(None, True, False, "selective"), skyrl_default=True
    )
    """Recompute activations in the backward pass to save memory. `true` keeps only the inputs of layers, which costs
    about a third more compute. `selective` also keeps the results of matrix products and of attention, and recomputes
    the rest, which costs little. `false` keeps all activations. null chooses the fastest that fits by the memory
    plan."""
    gradient_checkpointing_use_reentrant: bool = False
    """Use PyTorch's older, reentrant implementation of activation checkpointing."""
    seed: int = config_field(42, range=NON_NEGATIVE)
    """Seed of the data order, of sampling and of initialization."""
    restarts: int = config_field(0, range=NON_NEGATIVE)
    """Maximum number of restarts in a run. If a rank or its node is lost, the ranks are restarted from the latest
    checkpoint, with fewer GPUs if no more are available. 0 ends the run instead; its saved checkpoints remain."""
    resume_mode: str = config_field(
        "latest",
        choices=("latest", "from_path", "none"),
        value_aliases={None: "none", "": "none", "None": "none"},
    )
    """`latest` continues from the latest checkpoint if there is one. `from_path` continues from `resume_path`. `none`
    starts a new run."""
    resume_path: str | None = None
    """Checkpoint folder for `resume_mode=from_path`: a local path or a URI."""
    log_path: str = "/tmp/skyrl-logs"
    """SkyRL's folder for the logs of processes."""
    ckpt_path: str = "${oc.env:HOME}/ckpts/"
    """Folder of the run, which holds its checkpoints, metrics and logs. If it is not set, the run uses a subfolder of
    the default that belongs to its configuration, PROJECT/RUN-DIGEST, and the same command finds it again. Settings
    that affect training results change the subfolder; the numbers of steps, ranks and engines do not. If it is a URI,
    `s3://bucket/folder` or `file:///folder`, the run works in a local folder and keeps a copy at the URI: see
    docs/guides/storage.md."""
    max_ckpts_to_keep: int = config_field(-1, range=AT_LEAST_MINUS_ONE, value_aliases=NULL_MEANS_NEVER)
    """Number of latest checkpoints that are kept. -1 keeps all."""
    ckpt_interval: int = config_field(10, range=AT_LEAST_MINUS_ONE, value_aliases=NULL_MEANS_NEVER)
    """Interval (steps) between checkpoints. If it is more than 0, the last step writes one, too. 0 and -1 write
    none."""
    async_checkpoint: bool = config_field(
        False,
        aliases="trainer.policy.megatron_config.async_dist_ckpt_save",
    )
    """Write checkpoints in the background while training continues. This needs host memory for a copy of weights and
    optimizer state. A save waits until the previous save has finished."""
    hf_save_interval: int = config_field(-1, range=AT_LEAST_MINUS_ONE, value_aliases=NULL_MEANS_NEVER)
    """Interval (steps) between exports of the model in Hugging Face format. If it is more than 0, the model is also
    exported after the last step. 0 and -1 export nothing."""
    export_path: str = "${oc.env:HOME}/exports/"
    """Folder of exports and dumps. If it is not set, the run uses a subfolder of the default that belongs to its
    configuration, as for `ckpt_path`. It may be a URI, too."""
    bf16: bool = True
    """Compute in bfloat16, with optimizer state in float32. false computes in float32."""
    epochs: int = config_field(1, range=AT_LEAST_ONE, typical_range=Range(1, 1_000))
    """Passes over the training data. They determine the number of steps: every prompt is trained on this many times."""
    update_epochs_per_batch: int = config_field(1, range=AT_LEAST_ONE)
    """Number of passes over one batch of rollouts."""
    train_batch_size: int = config_field(1024, range=AT_LEAST_ONE, typical_range=Range(1, 65_536))
    """Number of prompts per step. The last batch of an epoch may be smaller."""
    policy_mini_batch_size: int = config_field(256, range=AT_LEAST_ONE)
    """Number of prompts per optimizer update of the policy. It must not be above `train_batch_size`. The last
    mini-batch of a step may be smaller."""
    critic_mini_batch_size: int = config_field(256, range=AT_LEAST_ONE)
    """Number of prompts per optimizer update of the critic. It must not be above `train_batch_size`. The last
    mini-batch of a step may be smaller."""
    micro_train_batch_size_per_gpu: int | None = config_field(None, range=AT_LEAST_ONE, skyrl_default=1)
    """Number of sequences per micro-batch, which a rank runs through one forward and backward pass. It changes memory
    and speed only, never the update, except with `loss_reduction=token_mean_legacy`. null is 1, unless
    `max_tokens_per_microbatch` applies."""
    micro_forward_batch_size_per_gpu: int | None = config_field(None, range=AT_LEAST_ONE, skyrl_default=1)
    """Number of sequences per micro-batch of a pass without gradient, on each rank. It changes memory and speed only.
    null is 1, unless `max_tokens_per_microbatch` applies."""
    max_tokens_per_microbatch: int | None = config_field(None, range=AT_LEAST_ONE, value_aliases={-1: None})
    """Maximum number of tokens per micro-batch on a rank. It replaces the two limits in sequences above. null uses
    these limits. If all three keys are null, runs on accelerators use the largest number of tokens, up to 16,384, that
    the memory plan has room for."""
    share_prompt: bool | None = None
    """Compute a prompt that several samples of a micro-batch share only once. null does so if it saves at least a
    sixteenth of the tokens."""
    moe_routing_replay: str | None = config_field(
        None,
        choices=(None, "rollout", "old_policy"),
        value_aliases={"none": None, True: "rollout", False: None},
        aliases="trainer.policy.megatron_config.moe_enable_routing_replay",
    )
    """Routing replay of a mixture of experts: the experts that process a token when its log-probs are computed and in
    updates. `rollout` replays the engine's choice of experts, which on CPUs only the transformers engine returns.
    `old_policy` replays the policy's choice before the step's first update. null lets the routers choose again in every
    pass."""
    update_ref_every_epoch: bool = False
    """Replace the reference with the policy after every epoch."""
    use_sample_packing: bool = config_field(True, aliases="remove_microbatch_padding")
    """Pack sequences without padding."""
    eval_batch_size: int = config_field(1024, range=AT_LEAST_ONE)
    """Maximum number of prompts in flight during evaluation."""
    eval_before_train: bool = True
    """Evaluate before the first step."""
    eval_interval: int = config_field(5, range=AT_LEAST_MINUS_ONE, value_aliases=NULL_MEANS_NEVER)
    """Interval (steps) between evaluations. If it is more than 0, there is also an evaluation after the last step. 0
    and -1 evaluate after no step."""
    max_prompt_length: int = config_field(512, range=AT_LEAST_ONE)
    """Maximum length (tokens) of a prompt. Longer prompts are dropped from the data and counted."""
    max_steps: int | None = config_field(None, range=AT_LEAST_ONE, aliases=("max_training_steps", "num_dummy_steps"))
    """Maximum number of steps. The run stops after it even if epochs are left. null trains for all `epochs`."""
    max_failed_fraction: float = config_field(0.5, range=FRACTION)
    """Maximum fraction of the rollouts of a step or an evaluation that may fail. If more fail, their rollouts are
    saved, and the run stops instead of training on the rest."""
    flash_attn: bool = True
    """Use flash attention. false uses PyTorch's scaled dot product attention."""
    disable_fast_tokenizer: bool = False
    """Use the slow tokenizer."""
    project_name: str = "skyrl"
    """Name of the project in trackers and in the default folders of runs."""
    run_name: str = "test_run"
    """Name of the run in trackers and in the default folders of runs."""
    logger: str | list[str] = config_field(
        "wandb", choices=TRACKERS, allows_plugins=True, value_aliases={None: [], "": [], "none": []}
    )
    """Trackers in addition to the console and the JSONL files, which are always on: one name or a list of names. null,
    `console` or an empty list adds none."""
    console_samples: int = config_field(1, range=NON_NEGATIVE)
    """Number of completions that are printed to the console after the first step and after every
    `console_samples_interval`th step."""
    console_samples_interval: int = config_field(10, range=AT_LEAST_ONE)
    """Interval (steps) between completions on the console. samples.jsonl holds a few completions of every step."""
    keep_rollouts: str = config_field(
        "sample", choices=("all", "sample", "none"), value_aliases={None: "none", "": "none"}
    )
    """Rollouts of a step that are kept in `rollouts` in the run's folder, with tokens, log-probs and advantages: `all`
    rollouts, a `sample` (those of the step's first 8 prompts), or `none`."""
    keep_rollouts_gb: float | None = config_field(None, range=POSITIVE)
    """Maximum size (GB) of the kept rollouts. If it is exceeded, the rollouts of the oldest steps are deleted. null is
    1 for `keep_rollouts=sample` and no limit for `all`."""
    metrics_port: int | None = config_field(None, range=Range(0, 65535))
    """Port on which the run serves `GET /metrics` for Prometheus, with the latest value of every metric of
    metrics.jsonl. 0 chooses a free port and prints it. null serves nothing."""
    metrics_host: str = "127.0.0.1"
    """Network address on which `metrics_port` listens. An address that other machines can reach requires the
    environment variable SKYRL_API_KEY, and requests must present it as their token."""
    plugins: list[str] = config_field(factory=list)
    """Modules that are imported in the driver and in every worker. They can register losses, advantage estimators,
    environments and trackers."""
    profile_steps: list[int] = config_field(factory=list, range=AT_LEAST_ONE)
    """Steps that are profiled; 1 is the first. Traces of torch's profiler and a table of the slowest operations are
    written to `profiles` in the run's folder. A profiled step takes longer."""
    trace: bool = False
    """Write a timeline of driver, trainer ranks, engines and environments for Perfetto to `trace.json` in the run's
    folder."""
    dump_data_batch: bool = False
    """Write the training batch of every step next to the exports. `skyrl_train.trainer.batch_dump.read_batch` reads
    it."""
    dump_eval_results: bool = True
    """Write the rollouts of every evaluation next to the exports, one file per data source."""
    rope_scaling: dict[str, Any] | None = None
    """Scaling of rotary embeddings in trained models, in the format of the Hugging Face model configuration. null keeps
    the model's own."""
    rope_theta: float | None = config_field(None, range=POSITIVE)
    """Base of rotary embeddings in trained models. null keeps the model's own."""


@dataclass
class Config(Section):
    """The complete configuration. Names and defaults are SkyRL's for every key that SkyRL has."""

    data: DataConfig = config_field(factory=DataConfig)
    trainer: TrainerConfig = config_field(factory=TrainerConfig)
    generator: GeneratorConfig = config_field(factory=GeneratorConfig)
    environment: EnvironmentConfig = config_field(factory=EnvironmentConfig)
    device: str = config_field("auto", choices=("auto", "cpu", "cuda"))
    """Device of models and engines. `auto` is `cuda` if this machine has an accelerator, otherwise `cpu`. On a CPU,
    defaults that need an accelerator are replaced."""
