"""trainer.policy, trainer.ref, trainer.critic, trainer.reward: which models, how they are optimised and sharded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_train.config.choices import SCHEDULES
from skyrl_train.config.section import (
    AT_LEAST_MINUS_ONE,
    AT_LEAST_ONE,
    NON_NEGATIVE,
    Range,
    Section,
    config_field,
    interpolation,
)

UNSUPPORTED_INIT_METHOD = "{} is not available in this version: it changes the frozen weights, or reads data first."


@dataclass
class LoraConfig(Section):
    """Low-rank adapters: they are trained, and the model that they are added to stays as it is."""

    rank: int = config_field(0, range=NON_NEGATIVE)
    """Rank of the adapters; 0 trains the whole model."""
    alpha: int = config_field(16, range=AT_LEAST_ONE)
    """Scale of the adapters: their output is multiplied by alpha / rank."""
    dropout: float = config_field(
        0.0,
        choices=(0.0,),
        unavailable=(
            "Log-probs must not depend on chance: those of the update and of the rollouts would differ for nothing."
        ),
    )
    """Dropout on the adapters' input."""
    target_modules: str | list[str] = "all-linear"
    """Layers that get an adapter: `all-linear` (all but the head), a list of names, or a regular expression."""
    exclude_modules: str | list[str] | None = None
    """Layers that get no adapter even if `target_modules` matches them: a list of names, or a regular expression."""
    init_method: str = config_field(
        "kaiming",
        choices=("kaiming", "gaussian"),
        unavailable={
            name: UNSUPPORTED_INIT_METHOD.format(name)
            for name in ("pissa", "olora", "loftq", "corda", "eva", "lora_ga")
        },
    )
    """How the first of an adapter's two matrices is initialised. The second one starts at 0."""


@dataclass
class PolicyLoraConfig(LoraConfig):
    """Low-rank adapters of the policy: they are trained, and the model that they are added to stays as it is."""

    lora_sync_path: str = "/tmp/skyrl_lora_sync"
    """SkyRL's folder for adapters on their way to engines."""
    sync: str = config_field(
        "auto",
        choices=("auto", "merged", "adapter"),
        spellings={True: "merged", False: "adapter"},
        aliases="trainer.policy.megatron_config.lora_config.merge_lora",
    )
    """What engines get: `merged` weights at every sync, or the model once and then only the `adapter`. `auto` is
    explained in docs/lora.md."""


@dataclass
class ModelConfig(Section):
    """The model that is trained."""

    path: str = "Qwen/Qwen2.5-1.5B-Instruct"
    """Folder, address of a folder (docs/storage.md), or hub name of a Hugging Face causal language model. Reference and
    engines use it too by default."""
    lora: PolicyLoraConfig = config_field(factory=PolicyLoraConfig)


@dataclass
class RefModelConfig(Section):
    """The frozen model that the KL divergence is measured against."""

    path: str = config_field(
        interpolation("trainer.policy.model.path"), spellings={None: interpolation("trainer.policy.model.path")}
    )
    """Folder or hub name of the model. By default it follows the policy."""


@dataclass
class CriticModelConfig(Section):
    """The model that predicts values. Only advantage estimators with a critic need it."""

    path: str | None = None
    """Folder or hub name of a causal language model, usually the policy's. Its head is replaced by a value head."""
    lora: LoraConfig = config_field(factory=LoraConfig)


@dataclass
class OptimizerConfig(Section):
    """AdamW and its learning-rate schedule."""

    lr: float = config_field(1e-6, range=NON_NEGATIVE, usual=Range(1e-9, 0.1))
    """Learning rate after warm-up."""
    adam_betas: list[float] = config_field(factory=lambda: [0.9, 0.999], range=Range(0, 1, exclusive_high=True))
    """Decay rates of the first and of the second moment."""
    weight_decay: float = config_field(0.01, range=NON_NEGATIVE, usual=Range(1e-6, 1))
    """Decoupled weight decay."""
    max_grad_norm: float = config_field(1.0, range=NON_NEGATIVE, usual=Range(1e-3, 1e3))
    """A gradient with a larger norm is scaled down to this norm; 0 turns clipping off."""
    offload_after_step: bool = True
    """Keep the optimizer state in host memory between updates if models and engines share accelerators."""
    num_warmup_steps: int = config_field(0, range=NON_NEGATIVE)
    """Number of optimizer steps over which the learning rate rises linearly from 0."""
    scheduler: str = config_field("constant_with_warmup", choices=SCHEDULES)
    """Name of a learning-rate schedule of transformers (`constant_with_warmup`, `linear`, `cosine`, ...)."""


@dataclass
class FSDPConfig(Section):
    """How a model is sharded by FSDP2."""

    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state in host memory, and compute on the accelerator."""
    reshard_after_forward: bool | int | None = config_field(None, skyrl_default=True)
    """Free gathered parameters after the forward pass. This saves memory and costs one more gather in the backward
    pass. null is true, but false on accelerators where one rank has the whole model and there is room."""
    reduce_once: bool | None = None
    """Sum gradients over ranks once an update instead of after every micro-batch, which needs a whole gradient in
    float32 on every rank. null: on accelerators if there is room, on CPUs always."""
    fsdp_size: int = config_field(-1, range=AT_LEAST_MINUS_ONE)
    """Number of ranks that one copy of the model is sharded over; -1 is all of them."""


@dataclass
class DeepSpeedConfig(Section):
    """How a model is sharded by DeepSpeed's ZeRO."""

    zero_stage: int = config_field(3, range=Range(2, 3))
    """What is sharded over the ranks: 2 shards optimizer state and gradients, 3 also shards parameters."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory, and take the optimizer step there."""
    offload_parameters: bool = False
    """Keep parameters in host memory, and compute on the accelerator. Requires zero_stage=3."""
    zero_optimization: dict[str, Any] = config_field(factory=dict)
    """More keys of DeepSpeed's own section of this name, e.g. `stage3_param_persistence_threshold`."""


@dataclass
class RefDeepSpeedConfig(DeepSpeedConfig):
    """How the reference is sharded by DeepSpeed's ZeRO."""

    offload_optimizer: bool = False
    """Has no effect: the reference has no optimizer."""


@dataclass
class MegatronDDPConfig(Section):
    """Gradient reduction of Megatron. Accepted for compatibility, without effect."""

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
    """The profiler of Megatron workers. Accepted for compatibility, without effect."""

    enable: bool = False
    """Whether to profile."""
    ranks: list[int] = config_field(factory=list)
    """Ranks that are profiled."""
    save_path: str | None = None
    """Where traces are written."""


@dataclass
class MegatronLoraConfig(Section):
    """Adapters of Megatron workers. Accepted for compatibility, without effect."""

    lora_type: str = "lora"
    """Kind of adapter."""


@dataclass
class MegatronConfig(Section):
    """Megatron's parallelism, for recipes with `trainer.strategy=megatron`, which runs as `fsdp2`.

    With that strategy the sizes are applied as sizes of `fsdp2`, and a note names each change. Nothing else here has an
    effect.
    """

    tensor_model_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Ranks that every layer is split over: `tensor_parallel_size` with `trainer.strategy=megatron`."""
    pipeline_model_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Pipeline stages that the layers are split into."""
    context_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Ranks that every sequence is split over."""
    expert_model_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Ranks that the experts are split over."""
    expert_tensor_parallel_size: int | None = config_field(1, range=AT_LEAST_ONE)
    """Ranks that every expert is split over."""
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Changes to the Hugging Face model configuration. Refused with `trainer.strategy=megatron`."""
    transformer_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Changes to Megatron's transformer configuration. With `trainer.strategy=megatron`, those that change more than
    memory and speed are refused."""


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

    With that strategy the sizes are applied as sizes of `fsdp2`, and a note names each change. Nothing else here has an
    effect.
    """

    expert_tensor_parallel_size: int | None = config_field(None, range=AT_LEAST_ONE)
    ddp_config: MegatronDDPConfig = config_field(factory=MegatronDDPConfig)
    torch_profiler_config: MegatronProfilerConfig = config_field(factory=MegatronProfilerConfig)
    lora_config: MegatronLoraConfig = config_field(factory=MegatronLoraConfig)
    optimizer_config_kwargs: dict[str, Any] = config_field(factory=_optimizer_offload)
    """Changes to Megatron's optimizer configuration. With `trainer.strategy=megatron`, those that change more than
    memory and speed are refused."""
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
    """Number of neighbouring ranks that every sequence is split over. It must divide the number of the model's ranks
    and of its attention heads."""
    tensor_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the tensor-parallel group: neighbouring ranks that every layer is split over, by transformers' plan for
    the model. Requires `trainer.strategy=fsdp2`."""
    expert_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of neighbouring ranks that the experts of every layer are shared out to; tokens travel to the ranks of
    theirs. Requires `trainer.strategy=fsdp2` and a mixture of experts."""
    use_torch_compile: bool = False
    """Compile the layers of policy, reference and critic with torch.compile, which takes a minute in the first step."""
    record_memory: bool = False
    """Record what each rank allocates on its accelerator. The files are written next to the exports, and
    pytorch.org/memory_viz shows them."""
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Changes to the Hugging Face model configuration: `+trainer.policy.model_config_kwargs.num_hidden_layers=2`."""
    language_model_only: bool | None = config_field(None, aliases="generator.inference_engine.language_model_only")
    """Use only the language model of a composite checkpoint, such as a vision-language model. null: where a checkpoint
    is one, as images are not trained on. false refuses composites."""
    megatron_config: PolicyMegatronConfig = config_field(factory=PolicyMegatronConfig)


@dataclass
class RefConfig(Section):
    """The reference: a frozen model that the KL divergence is measured against."""

    model: RefModelConfig = config_field(factory=RefModelConfig)
    sequence_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of neighbouring ranks that every sequence is split over. It must divide the number of the model's ranks
    and of its attention heads."""
    tensor_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the tensor-parallel group: neighbouring ranks that every layer is split over, by transformers' plan for
    the model. Requires `trainer.strategy=fsdp2`."""
    expert_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of neighbouring ranks that the experts of every layer are shared out to; tokens travel to the ranks of
    theirs. Requires `trainer.strategy=fsdp2` and a mixture of experts."""
    fsdp_config: FSDPConfig = config_field(factory=FSDPConfig)
    deepspeed_config: RefDeepSpeedConfig = config_field(factory=RefDeepSpeedConfig)
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Changes to the Hugging Face model configuration."""
    language_model_only: bool | None = None
    """Likewise for the reference: see `trainer.policy.language_model_only`."""
    megatron_config: MegatronConfig = config_field(factory=MegatronConfig)


@dataclass
class CriticConfig(Section):
    """The critic: the model that predicts values for advantage estimators that need them."""

    model: CriticModelConfig = config_field(factory=CriticModelConfig)
    optimizer_config: OptimizerConfig = config_field(factory=lambda: OptimizerConfig(lr=5e-6))
    fsdp_config: FSDPConfig = config_field(factory=FSDPConfig)
    deepspeed_config: DeepSpeedConfig = config_field(factory=DeepSpeedConfig)
    sequence_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of neighbouring ranks that every sequence is split over. It must divide the number of the model's ranks
    and of its attention heads."""
    tensor_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Size of the tensor-parallel group: neighbouring ranks that every layer is split over, by transformers' plan for
    the model. Requires `trainer.strategy=fsdp2`."""
    expert_parallel_size: int = config_field(1, range=AT_LEAST_ONE)
    """Number of neighbouring ranks that the experts of every layer are shared out to; tokens travel to the ranks of
    theirs. Requires `trainer.strategy=fsdp2` and a mixture of experts."""
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Changes to the Hugging Face model configuration."""


@dataclass
class RewardModelConfig(Section):
    """The frozen classifier that scores conversations."""

    path: str | None = None
    """Folder or hub name of a sequence classification model with one output and a chat template; null uses no reward
    model."""


@dataclass
class RewardConfig(Section):
    """The reward model: it scores every rollout that has an answer, in training and in evaluation."""

    model: RewardModelConfig = config_field(factory=RewardModelConfig)
    coef: float = 1.0
    """The reward of a rollout is the environment's reward plus this coefficient times the model's score."""
    model_config_kwargs: dict[str, Any] = config_field(factory=dict)
    """Changes to the Hugging Face model configuration."""
