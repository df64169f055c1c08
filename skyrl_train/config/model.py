"""Configuration sections of the models (`trainer.policy`, `ref`, `critic`, `reward`): optimizer, LoRA and sharding."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_train.config.choices import SCHEDULES, OptimizerName
from skyrl_train.config.section import (
    AT_LEAST_MINUS_ONE,
    AT_LEAST_ONE,
    NON_NEGATIVE,
    Range,
    Section,
    config_field,
    interpolation,
)

UNSUPPORTED_INIT_METHOD = "{} is not supported: it changes the frozen weights or reads data before training."


@dataclass
class LoraConfig(Section):
    """LoRA adapters (low-rank adaptation): only the adapters are trained, the base model is frozen."""

    rank: int = config_field(0, range=NON_NEGATIVE)
    """Rank of the adapters. 0 trains the full model without adapters."""
    alpha: int = config_field(16, range=AT_LEAST_ONE)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: float = config_field(
        0.0,
        choices=(0.0,),
        unavailable_reason=(
            "Log-probs must be deterministic: with dropout the trainer's and the engine's would differ at random."
        ),
    )
    """Dropout on the adapters' input."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: `all-linear` (all linear layers except the head), a list of names, or a regular
    expression."""
    exclude_modules: str | list[str] | None = None
    """Layers that get no adapter even if `target_modules` matches them, and modules of experts, such as `mlp.experts`,
    whatever `target_parameters` names: a list of names, or a regular expression. null excludes none."""
    target_parameters: list[str] | None = None
    """Parameters of a mixture's experts that get an adapter for each expert, such as `[gate_up_proj, down_proj]`: full
    names or their ends, as in PEFT. null leaves experts frozen."""
    init_method: str = config_field(
        "kaiming",
        choices=("kaiming", "gaussian"),
        unavailable_reason={
            name: UNSUPPORTED_INIT_METHOD.format(name)
            for name in ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
        },
    )
    """Initialization of the first of an adapter's two matrices. The second matrix starts at 0."""


@dataclass
class PolicyLoraConfig(LoraConfig):
    """LoRA adapters of the policy: only the adapters are trained, the base model is frozen."""

    lora_sync_path: str = "/tmp/skyrl_lora_sync"
    """Folder through which SkyRL sends adapters to the engines."""
    sync: str = config_field(
        "auto",
        choices=("auto", "merged", "adapter"),
        value_aliases={True: "merged", False: "adapter"},
        aliases="trainer.policy.megatron_config.lora_config.merge_lora",
    )
    """Form in which engines receive the adapters. `merged` sends the base weights with the adapters merged in at every
    sync. `adapter` sends the base model once and then only the adapter. docs/guides/lora.md explains `auto`."""


@dataclass
class ModelConfig(Section):
    """The model that is trained."""

    path: str = "Qwen/Qwen2.5-1.5B-Instruct"
    """Folder, URI of a folder (docs/guides/storage.md), or hub name of a Hugging Face causal language model. The
    reference and the engines use it too by default."""
    lora: PolicyLoraConfig = config_field(factory=PolicyLoraConfig)


@dataclass
class RefModelConfig(Section):
    """The frozen model that the KL divergence is measured against."""

    path: str = config_field(
        interpolation("trainer.policy.model.path"), value_aliases={None: interpolation("trainer.policy.model.path")}
    )
    """Folder, URI of a folder, or hub name of the model. By default it follows the policy."""


@dataclass
class CriticModelConfig(Section):
    """The model that predicts values. Only advantage estimators with a critic need it."""

    path: str | None = None
    """Folder, URI of a folder, or hub name of a causal language model, usually the policy's. Its head is replaced by a
    value head. null uses no critic."""
    lora: LoraConfig = config_field(factory=LoraConfig)


@dataclass
class OptimizerConfig(Section):
    """The optimizer and its learning-rate schedule."""

    name: str = config_field("adamw", choices=tuple(map(str, OptimizerName)))
    """Optimizer. `adamw` is PyTorch's fused AdamW. `muon` updates the matrices of layers with PyTorch's Muon, and other
    parameters with AdamW. `adamw_8bit` is AdamW of bitsandbytes, whose moments have 8 bits per element instead of 32.
    docs/concepts/strategies.md compares them."""
    lr: float = config_field(1e-6, range=NON_NEGATIVE, typical_range=Range(1e-9, 0.1))
    """Learning rate after warm-up."""
    adam_betas: list[float] = config_field(factory=lambda: [0.9, 0.999], range=Range(0, 1, exclusive_high=True))
    """Decay rates of AdamW's first and second moment."""
    momentum: float = config_field(0.95, range=Range(0, 1, exclusive_high=True))
    """Decay rate of Muon's momentum. Requires `name=muon`."""
    weight_decay: float = config_field(0.01, range=NON_NEGATIVE, typical_range=Range(1e-6, 1))
    """Coefficient of the decoupled weight decay."""
    max_grad_norm: float = config_field(1.0, range=NON_NEGATIVE, typical_range=Range(1e-3, 1e3))
    """Maximum gradient norm. A gradient with a larger norm is scaled down to it. 0 turns clipping off."""
    offload_after_step: bool = True
    """Keep the optimizer state in host memory between updates if models and engines share accelerators."""
    num_warmup_steps: int = config_field(0, range=NON_NEGATIVE)
    """Number of optimizer steps over which the learning rate rises linearly from 0."""
    scheduler: str = config_field("constant_with_warmup", choices=SCHEDULES)
    """Name of a learning-rate schedule of transformers (`constant_with_warmup`, `linear`, `cosine`, ...)."""


@dataclass
class FSDPConfig(Section):
    """Sharding of a model with FSDP2."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and compute on the accelerator."""
    reshard_after_forward: bool | int | None = config_field(None, skyrl_default=True)
    """Free gathered parameters after the forward pass. This saves memory and costs one more gather in the backward
    pass. null is true, except on accelerators where one rank holds the full model and the memory plan has room for
    it."""
    reduce_once: bool | None = None
    """Reduce gradients over ranks once per update instead of after every micro-batch. This needs memory for a full
    float32 gradient on every rank. null is true on CPUs, and on accelerators if the memory plan has room for it."""
    fsdp_size: int = config_field(-1, range=AT_LEAST_MINUS_ONE)
    """Number of ranks that one copy of the model is sharded over. -1 is all ranks."""


@dataclass
class DeepSpeedConfig(Section):
    """Sharding of a model with DeepSpeed's ZeRO."""

    zero_stage: int = config_field(3, range=Range(2, 3))
    """ZeRO stage. 2 shards optimizer state and gradients over the ranks, 3 also shards parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory, and run the optimizer step on the CPU."""
    offload_parameters: bool = False
    """Keep parameters in host memory, and compute on the accelerator. Requires `zero_stage=3`."""
    zero_optimization: dict[str, Any] = config_field(factory=dict)
    """Further keys of DeepSpeed's own section of this name, for example `stage3_param_persistence_threshold`."""


@dataclass
class RefDeepSpeedConfig(DeepSpeedConfig):
    """Sharding of the reference with DeepSpeed's ZeRO."""

    offload_optimizer: bool = False
    """Has no effect: the reference has no optimizer."""


@dataclass
class MegatronDDPConfig(Section):
    """Gradient reduction of Megatron workers. These keys are accepted for compatibility and have no effect."""

    grad_reduce_in_fp32: bool = True
    """Reduce gradients in fp32."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during the backward pass."""
    overlap_param_gather: bool = False
    """Gather parameters during the forward pass."""
    average_in_collective: bool = True
    """Average inside the collective."""


@dataclass
class MegatronProfilerConfig(Section):
    """Profiler of Megatron workers. These keys are accepted for compatibility and have no effect."""

    enable: bool = False
    """Enable the profiler."""
    ranks: list[int] = config_field(factory=list)
    """Ranks that are profiled."""
    save_path: str | None = None
    """Folder of the traces."""


@dataclass
class MegatronLoraConfig(Section):
    """Adapters of Megatron workers. These keys are accepted for compatibility and have no effect."""

    lora_type: str = "lora"
    """Kind of adapter."""


@dataclass
class MegatronConfig(Section):
    """Megatron's parallelism, for recipes with `trainer.strategy=megatron`, which runs as `fsdp2`.

    With that strategy the sizes are translated to sizes of `fsdp2`, and a note names each change. The other keys have
    no effect.
    """

    tensor_model_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the tensor-parallel group. With `trainer.strategy=megatron` it becomes `tensor_parallel_size`."""
    pipeline_model_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of pipeline stages. With `trainer.strategy=megatron` their ranks become ranks of `fsdp2`."""
    context_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of ranks that every sequence is split over. With `trainer.strategy=megatron` it becomes
    `sequence_parallel_size`."""
    expert_model_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of ranks that the experts are distributed over. With `trainer.strategy=megatron` it becomes
    `expert_parallel_size`."""
    expert_tensor_parallel_size: int | None = config_field(1, range=AT_LEAST_ONE)
    """Number of ranks that every expert is sharded over. With `trainer.strategy=megatron` they become ranks of
    `fsdp2`."""
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Overrides of the Hugging Face model configuration. Any key is an error with `trainer.strategy=megatron`."""
    transformer_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Overrides of Megatron's transformer configuration. With `trainer.strategy=megatron` a key that changes more than
    memory and speed is an error."""


def _recompute() -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_modules": ["core_attn"],
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def _optimizer_offload() -> dict[str, Any]:
    return {
        "overlap_cpu_optimizer_d2h_h2d": False,
        "use_precision_aware_optimizer": False,
        "optimizer_cpu_offload": False,
        "optimizer_offload_fraction": 0.0,
    }


@dataclass
class PolicyMegatronConfig(MegatronConfig):
    """Megatron's settings of the policy, for recipes with `trainer.strategy=megatron`, which runs as `fsdp2`.

    With that strategy the sizes are translated to sizes of `fsdp2`, and a note names each change. The other keys have
    no effect.
    """

    expert_tensor_parallel_size: int | None = config_field(None, range=AT_LEAST_ONE)
    ddp_config: MegatronDDPConfig = config_field(factory=MegatronDDPConfig)
    torch_profiler_config: MegatronProfilerConfig = config_field(factory=MegatronProfilerConfig)
    lora_config: MegatronLoraConfig = config_field(factory=MegatronLoraConfig)
    optimizer_config_kwargs: dict[str, Any] = config_field(factory=_optimizer_offload)
    """Overrides of Megatron's optimizer configuration. With `trainer.strategy=megatron` a key that changes more than
    memory and speed is an error."""
    transformer_config_kwargs: dict[str, Any] = config_field(factory=_recompute)
    empty_cuda_cache: bool = True
    """Empty the CUDA cache between phases of a step."""


@dataclass
class PolicyConfig(Section):
    """The policy: the model that is trained and that rollouts are sampled from."""

    model: ModelConfig = config_field(factory=ModelConfig)
    optimizer_config: OptimizerConfig = config_field(factory=OptimizerConfig)
    fsdp_config: FSDPConfig = config_field(factory=FSDPConfig)
    deepspeed_config: DeepSpeedConfig = config_field(factory=DeepSpeedConfig)
    sequence_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of consecutive ranks that every sequence is split over. It must divide the number of the model's ranks and
    the number of its attention heads."""
    tensor_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the tensor-parallel group: number of consecutive ranks that every layer is sharded over, by transformers'
    tensor-parallel plan for the model. It must divide the number of the model's ranks. Requires
    `trainer.strategy=fsdp2`."""
    expert_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the expert-parallel group: number of consecutive ranks that the experts of every layer are distributed
    over. Tokens are sent to the ranks of their experts. It must divide the number of the model's ranks. Requires
    `trainer.strategy=fsdp2` and a mixture of experts."""
    use_torch_compile: bool = False
    """Compile the layers of policy, reference and critic with torch.compile, which takes a minute in the first step."""
    record_memory: bool = False
    """Record the allocations of each rank on its accelerator. The files are written next to the exports and can be
    viewed at pytorch.org/memory_viz. Not available on CPUs."""
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Overrides of the Hugging Face model configuration, for example
    `+trainer.policy.model_config_kwargs.num_hidden_layers=2`."""
    language_model_only: bool | None = config_field(None, aliases="generator.inference_engine.language_model_only")
    """Load only the language model of a composite checkpoint, such as a vision-language model. null does so for every
    composite checkpoint, because images are not trained on. With false a composite checkpoint is an error."""
    megatron_config: PolicyMegatronConfig = config_field(factory=PolicyMegatronConfig)


@dataclass
class RefConfig(Section):
    """The reference: a frozen model that the KL divergence is measured against."""

    model: RefModelConfig = config_field(factory=RefModelConfig)
    sequence_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of consecutive ranks that every sequence is split over. It must divide the number of the model's ranks and
    the number of its attention heads."""
    tensor_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the tensor-parallel group: number of consecutive ranks that every layer is sharded over, by transformers'
    tensor-parallel plan for the model. It must divide the number of the model's ranks. Requires
    `trainer.strategy=fsdp2`."""
    expert_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the expert-parallel group: number of consecutive ranks that the experts of every layer are distributed
    over. Tokens are sent to the ranks of their experts. It must divide the number of the model's ranks. Requires
    `trainer.strategy=fsdp2` and a mixture of experts."""
    fsdp_config: FSDPConfig = config_field(factory=FSDPConfig)
    deepspeed_config: RefDeepSpeedConfig = config_field(factory=RefDeepSpeedConfig)
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Overrides of the Hugging Face model configuration."""
    language_model_only: bool | None = None
    """Load only the language model of a composite reference checkpoint: see `trainer.policy.language_model_only`."""
    megatron_config: MegatronConfig = config_field(factory=MegatronConfig)


@dataclass
class CriticConfig(Section):
    """The critic: the model that predicts values for advantage estimators that need them."""

    model: CriticModelConfig = config_field(factory=CriticModelConfig)
    optimizer_config: OptimizerConfig = config_field(factory=lambda: OptimizerConfig(lr=5e-6))
    fsdp_config: FSDPConfig = config_field(factory=FSDPConfig)
    deepspeed_config: DeepSpeedConfig = config_field(factory=DeepSpeedConfig)
    sequence_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of consecutive ranks that every sequence is split over. It must divide the number of the model's ranks and
    the number of its attention heads."""
    tensor_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the tensor-parallel group: number of consecutive ranks that every layer is sharded over, by transformers'
    tensor-parallel plan for the model. It must divide the number of the model's ranks. Requires
    `trainer.strategy=fsdp2`."""
    expert_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the expert-parallel group: number of consecutive ranks that the experts of every layer are distributed
    over. Tokens are sent to the ranks of their experts. It must divide the number of the model's ranks. Requires
    `trainer.strategy=fsdp2` and a mixture of experts."""
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Overrides of the Hugging Face model configuration."""


@dataclass
class RewardModelConfig(Section):
    """The frozen classifier that scores conversations."""

    path: str | None = None
    """Folder, URI of a folder, or hub name of a sequence classification model with one output and a chat template. null
    uses no reward model."""


@dataclass
class RewardConfig(Section):
    """The reward model: it scores every rollout that has an answer, in training and in evaluation."""

    model: RewardModelConfig = config_field(factory=RewardModelConfig)
    coef: float = 1.0
    """Coefficient of the model's score. The reward of a rollout is the environment's reward plus this coefficient times
    the score."""
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Overrides of the Hugging Face model configuration."""
