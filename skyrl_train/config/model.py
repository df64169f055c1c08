"""trainer.policy, trainer.ref, trainer.critic, trainer.reward: which models, how they are optimised and sharded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_train.config.section import Section, interpolation


@dataclass
class LoraConfig(Section):
    """Low-rank adapters on a model: they are trained, and the model below them stays as it is."""

    rank: int = 0
    """Rank of the adapters; 0 trains the whole model."""
    alpha: int = 16
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: float = 0.0
    """Dropout on the adapters' input."""
    lora_sync_path: str = "/tmp/skyrl_lora_sync"
    """Folder of adapters on their way to engines; read for compatibility: they go where weights go."""
    sync: str = "auto"
    """What engines get: `merged` weights, or the model once and then the `adapter` alone; `auto`: see docs/lora.md."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: `all-linear` (all but the head), a list of names, or a regular expression."""
    exclude_modules: str | list[str] | None = None
    """Layers that get none although `target_modules` fits them: a list of names, or a regular expression."""
    init_method: str = "kaiming"
    """How the first of an adapter's two matrices starts; the second starts at 0."""


@dataclass
class ModelConfig(Section):
    """The model that is trained."""

    path: str = "Qwen/Qwen2.5-1.5B-Instruct"
    """A folder or a hub name of a Hugging Face causal language model. Reference and engines follow it by default."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class RefModelConfig(Section):
    """The frozen model that the KL divergence is measured against."""

    path: str = interpolation("trainer.policy.model.path")
    """A folder or a hub name."""


@dataclass
class CriticModelConfig(Section):
    """The model that predicts values; only for advantage estimators that need one."""

    path: str | None = None
    """A folder or a hub name of a causal language model, usually the policy's: its body gets a value head."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass
class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = 1e-6
    """Learning rate after warm-up."""
    adam_betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """Decay of the first and of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to this norm when it is larger; 0 does not clip."""
    offload_after_step: bool = True
    """Keep the optimizer state in host memory between updates when models and engines share accelerators."""
    num_warmup_steps: int = 0
    """Optimizer steps over which the learning rate rises linearly from 0."""
    scheduler: str = "constant_with_warmup"
    """Name of a transformers schedule (`constant_with_warmup`, `linear`, `cosine`, ...)."""


@dataclass
class FSDPConfig(Section):
    """How a model is sharded by FSDP2."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory and compute on the accelerator."""
    reshard_after_forward: bool | int = True
    """Free gathered parameters after forward: less memory, one more gather in backward."""
    fsdp_size: int = -1
    """Ranks that one copy of the model is sharded over; -1 means all of them."""


@dataclass
class DeepSpeedConfig(Section):
    """How a model is sharded by DeepSpeed's ZeRO."""

    zero_stage: int = 3
    """What ranks share out: 2 optimizer state and gradients, 3 parameters too."""
    offload_optimizer: bool = False
    """Keep optimizer state in host memory and step there."""
    offload_parameters: bool = False
    """Keep parameters in host memory and compute on the accelerator; with zero_stage=3."""
    zero_optimization: dict[str, Any] = field(default_factory=dict)
    """Further keys of DeepSpeed's own section of this name, e.g. `stage3_param_persistence_threshold`."""


@dataclass
class MegatronDDPConfig(Section):
    """Gradient reduction of Megatron; read for compatibility."""

    grad_reduce_in_fp32: bool = True
    """Reduce gradients in fp32."""
    overlap_grad_reduce: bool = False
    """Reduce gradients during backward."""
    overlap_param_gather: bool = False
    """Gather parameters during forward."""
    average_in_collective: bool = True
    """Average inside the collective."""


@dataclass
class MegatronProfilerConfig(Section):
    """The profiler of Megatron workers; read for compatibility."""

    enable: bool = False
    """Whether to profile."""
    ranks: list[int] = field(default_factory=list)
    """Ranks that are profiled."""
    save_path: str | None = None
    """Where traces go."""


@dataclass
class MegatronLoraConfig(Section):
    """Adapters of Megatron workers; read for compatibility."""

    lora_type: str = "lora"
    """Kind of adapter."""


@dataclass
class MegatronConfig(Section):
    """Megatron's parallelism; read for compatibility with recipes of `trainer.strategy=megatron`."""

    tensor_model_parallel_size: int = 1
    """Ranks that a layer is split over: `tensor_parallel_size` with `trainer.strategy=megatron`."""
    pipeline_model_parallel_size: int = 1
    """Stages that the layers are split into."""
    context_parallel_size: int = 1
    """Ranks that a sequence is split over."""
    expert_model_parallel_size: int = 1
    """Ranks that experts are split over."""
    expert_tensor_parallel_size: int | None = 1
    """Ranks that an expert is split over."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the Hugging Face model configuration."""
    transformer_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to Megatron's transformer configuration."""


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
    """Megatron settings of the trained model; read for compatibility."""

    expert_tensor_parallel_size: int | None = None
    """Ranks that an expert is split over."""
    ddp_config: MegatronDDPConfig = field(default_factory=MegatronDDPConfig)
    torch_profiler_config: MegatronProfilerConfig = field(default_factory=MegatronProfilerConfig)
    lora_config: MegatronLoraConfig = field(default_factory=MegatronLoraConfig)
    optimizer_config_kwargs: dict[str, Any] = field(default_factory=_optimizer_offload)
    """Changes to Megatron's optimizer configuration."""
    transformer_config_kwargs: dict[str, Any] = field(default_factory=_recompute)
    """Changes to Megatron's transformer configuration."""
    empty_cuda_cache: bool = True
    """Empty the CUDA cache between phases."""


@dataclass
class PolicyConfig(Section):
    """The policy: the model that is trained and samples."""

    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=OptimizerConfig)
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    deepspeed_config: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    sequence_parallel_size: int = 1
    """Neighbouring ranks that split every sequence: a divisor of the model's ranks and of its attention heads."""
    tensor_parallel_size: int = 1
    """Neighbouring ranks that split every layer, by transformers' plan for the model, with `trainer.strategy=fsdp2`."""
    use_torch_compile: bool = False
    """Run the layers of policy, reference and critic through torch.compile, which takes a minute in the first step."""
    record_memory: bool = False
    """Record what each rank allocates on its accelerator, for pytorch.org/memory_viz, next to the exports."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the Hugging Face model configuration: `+trainer.policy.model_config_kwargs.num_hidden_layers=2`."""
    megatron_config: PolicyMegatronConfig = field(default_factory=PolicyMegatronConfig)


@dataclass
class RefConfig(Section):
    """The reference: a frozen model that the KL divergence is measured against."""

    model: RefModelConfig = field(default_factory=RefModelConfig)
    sequence_parallel_size: int = 1
    """Neighbouring ranks that split every sequence: a divisor of the model's ranks and of its attention heads."""
    tensor_parallel_size: int = 1
    """Neighbouring ranks that split every layer, by transformers' plan for the model, with `trainer.strategy=fsdp2`."""
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    deepspeed_config: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the Hugging Face model configuration."""
    megatron_config: MegatronConfig = field(default_factory=MegatronConfig)


@dataclass
class CriticConfig(Section):
    """The critic: predicts values for advantage estimators that need them."""

    model: CriticModelConfig = field(default_factory=CriticModelConfig)
    optimizer_config: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=5e-6))
    fsdp_config: FSDPConfig = field(default_factory=FSDPConfig)
    deepspeed_config: DeepSpeedConfig = field(default_factory=DeepSpeedConfig)
    sequence_parallel_size: int = 1
    """Neighbouring ranks that split every sequence: a divisor of the model's ranks and of its attention heads."""
    tensor_parallel_size: int = 1
    """Neighbouring ranks that split every layer, by transformers' plan for the model, with `trainer.strategy=fsdp2`."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the Hugging Face model configuration."""


@dataclass
class RewardModelConfig(Section):
    """The frozen classifier that scores conversations."""

    path: str | None = None
    """A folder or a hub name of a sequence classification model with one output and a chat template; null is none."""


@dataclass
class RewardConfig(Section):
    """The reward model: scores every rollout that has an answer, in training and in evaluation."""

    model: RewardModelConfig = field(default_factory=RewardModelConfig)
    coef: float = 1.0
    """A rollout's reward is the environment's plus this many times the model's score."""
    model_config_kwargs: dict[str, Any] = field(default_factory=dict)
    """Changes to the Hugging Face model configuration."""
