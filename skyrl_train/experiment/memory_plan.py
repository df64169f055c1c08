"""Predicts the memory of each slot in each phase of a step, from the configuration and the models' shapes.

Parameters, gradients and optimizer state are exact; the other items are estimates. No weights are loaded. Not counted
are libraries and the interpreter (0.3 to 1 GiB of host memory per process), the CUDA context (about 0.5 GiB) and
fragmentation.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from skyrl_train.config.choices import OptimizerName
from skyrl_train.config.drafts import get_speculative_config
from skyrl_train.config.predicates import (
    OffloadMode,
    frees_all_memory,
    gpus_per_engine,
    has_colocated_engines,
    is_colocated,
    max_sequence_length,
    num_ranks,
    offload_mode,
    prefers_adapter_sync,
    resolve_weight_sync_route,
    shares_gpu_memory,
    sync_replaces_all_weights,
)
from skyrl_train.config.schema import (
    Config,
    CriticConfig,
    GeneratorConfig,
    LoraConfig,
    PolicyConfig,
    RefConfig,
)
from skyrl_train.data.batch import MAX_ATTENDED_RATIO
from skyrl_train.engines.vllm.model_runner import expected_model_runner
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.algorithm import ObjectiveSpec, build_policy_objective_spec
from skyrl_train.experiment.draft_models import DraftSize, measure_drafts
from skyrl_train.models.activation_checkpointing import SELECTIVE
from skyrl_train.models.flash_attention import has_separate_kernels
from skyrl_train.models.layer_sizes import get_layer_sizes
from skyrl_train.models.loading import REWARD_PATH_KEY, build_meta_model, load_config
from skyrl_train.models.logprob_model import CACHED_CHUNKS, chunk_bytes
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.models.padding_free import count_attention_layers, count_mlp_layers, get_vllm_max_length
from skyrl_train.models.parallel_group import make_meta_group
from skyrl_train.models.ragged_model import RaggedModel, get_lm_head
from skyrl_train.models.recurrent_kernels import has_kernels as has_recurrent_kernels
from skyrl_train.models.recurrent_layers import RecurrentMixer, get_recurrent_mixers
from skyrl_train.models.recurrent_memory import measure_saved_bytes
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.strategies.optimizers import ParameterKind, choose_optimizer, classify_parameters, state_bytes
from skyrl_train.terminal import print_stderr
from skyrl_train.weight_sync.sender import MAX_CPU_BUCKET_BYTES

FP32 = 4
"""Bytes of a float32: the dtype of log-softmax, of norms internally, and of everything trained."""


class Phase(StrEnum):
    """A phase of a training step with a memory peak of its own."""

    GENERATING = "generating"
    SCORING = "scoring"
    UPDATING = "updating"
    SYNCING = "syncing"


PHASES = tuple(Phase)
LEARNER_PHASES = (Phase.SCORING, Phase.UPDATING)
"""The phases in which a learner's models compute."""
CONFIG_SECTIONS = {"policy": "policy", "reference": "ref", "critic": "critic"}
"""Role -> its section of trainer.*"""
_OPTIMIZER = "optimizer"
_OPTIMIZER_NOTES = {
    OptimizerName.ADAMW: "AdamW: 2 float32 moments",
    OptimizerName.MUON: "Muon: 1 float32 momentum of matrices; AdamW",
    OptimizerName.ADAMW_8BIT: "AdamW: 2 8-bit moments; float32 of embeddings",
}
_HEAD, _LAYERS, _EMBEDDINGS = "head", "layers", "embeddings"
"""Moments of a pass, each with its own peak. Roles run their passes one after another, too."""
_STAGES = (_HEAD, _LAYERS, _EMBEDDINGS)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEEPSPEED_BUCKET = 500_000_000
"""Elements: DeepSpeed's default for `reduce_bucket_size`."""
_DEEPSPEED_PREFETCH, _DEEPSPEED_REUSE = 50_000_000, 1_000_000_000
"""Elements: DeepSpeed's defaults for `stage3_prefetch_bucket_size` and `stage3_max_reuse_distance`."""
_MIXER_BACKWARD = 0.35
"""Bytes that backward of a recurrent layer adds at its peak, relative to what forward saved. Measured on CPUs: 0.1 for
gated delta nets, 0.3 to 0.4 for Mamba2 and Kimi delta attention."""
_NUM_LARGEST_PARTS = 3
_SAMPLER_COPIES = 3
"""Float32 copies of all logits of a step that a sampler holds."""
_GRAPH_BYTES = 2 << 30
"""Estimate of the memory of an engine's CUDA graphs and libraries."""
_CACHE_BLOCK_TOKENS = 16
"""Tokens of a block of vLLM's KV cache, the unit in which a sequence gets memory."""
_MAX_CACHE_BLOCK_TOKENS = 128
"""Tokens of a block for kernels that read larger ones, such as that of FlashAttention-4 for heads of size 256."""
_CACHE_SIZE_ARGUMENTS = frozenset(
    {
        *("kv_cache_memory_bytes", "num_gpu_blocks_override", "block_size", "kv_cache_dtype", "gpu_memory_utilization"),
        *("max_total_tokens", "max_running_requests", "mem_fraction_static", "page_size", "max_num_seqs"),
    }
)
"""Keys of generator.engine_init_kwargs with which a configuration sizes the KV cache itself."""
_CPU_CACHE_BYTES = 4 << 30
"""Maximum size of the KV cache that vLLM and SGLang allocate on a CPU: see their arguments.py."""


def memory_capacity(device: str) -> int | None:
    """Return the bytes of this machine's smallest accelerator, or for "cpu" of its main memory.

    A lower limit of the cgroup takes precedence over the main memory. Allocates no accelerator memory, which a driver
    must not do.

    Args:
        device: "cuda" or "cpu".

    Returns:
        Bytes; None if nvidia-smi reports no accelerator.
    """
    if device == "cuda":
        command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        try:
            listed = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            return None
        return min((int(mib) << 20 for mib in listed.split() if mib.isdigit()), default=None)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdigit() else total


# -- shapes


@dataclass(frozen=True)
class ParameterShape:
    """The shape of one parameter. Tied parameters are a single ParameterShape."""

    shape: tuple[int, ...]
    trained: bool = True
    kind: ParameterKind = ParameterKind.OTHER

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def shard_numel(self, ranks: int) -> int:
        """Return the number of elements on the fullest of `ranks`.

        FSDP2 splits the first dimension into equal chunks, except the last one.
        """
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


def numel(weights: Iterable[ParameterShape], ranks: int = 1) -> int:
    """Return the number of elements of all `weights` on the fullest of `ranks`."""
    return sum(weight.shard_numel(ranks) for weight in weights)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, or of one rank's part of it with tensor parallelism."""

    layers: tuple[tuple[ParameterShape, ...], ...]
    """The parameters of each decoder layer. A strategy gathers them layer by layer."""
    attention_layers: int
    """Number of decoder layers with attention."""
    mlp_layers: int
    """Number of decoder layers with an MLP or experts."""
    conv_states: int
    """Numbers per sequence, in the model's dtype, that an engine keeps for convolutions in recurrent layers."""
    scan_states: int
    """Numbers per sequence, in float32, that an engine keeps for scans in recurrent layers."""
    mixers: int
    """Number of mixers with a recurrent state, each in a decoder layer."""
    mixer_bytes: Mapping[tuple[int, bool], int]
    """(Bytes of a number in the compute dtype, True with the kernels of fla-core) -> bytes per token that a mixer
    saves for backward."""
    root: tuple[ParameterShape, ...]
    """All other parameters: embeddings, the last norm, and the head unless it is tied."""
    hidden: int
    intermediate: int
    """The MLP's width; for a mixture of experts the sum over the experts that process a token."""
    heads: int
    key_value_heads: int
    head_dim: int
    vocab: int
    """0 for a model without logits."""
    tied: bool
    max_positions: int
    """Maximum length of a sequence in an engine, in tokens."""
    normed: int
    """Numbers per token that the norms of one layer read, except those of queries and keys."""
    normed_heads: int
    """Numbers per token that the norms of queries and keys read; 0 without these."""
    experts_per_token: int
    softcapped: bool
    """True if attention scores are materialized: see ragged_attention._softcapped."""

    @property
    def weights(self) -> tuple[ParameterShape, ...]:
        """All parameters."""
        return (*self.root, *(weight for layer in self.layers for weight in layer))

    @property
    def largest_layer(self) -> int:
        """Number of elements of the largest layer."""
        return max((numel(layer) for layer in self.layers), default=0)

    @property
    def head(self) -> int:
        """Number of elements of the LM head."""
        return self.vocab * self.hidden

    @property
    def head_trained(self) -> bool:
        """True if the LM head is trained."""
        return any(weight.trained for weight in self.root if weight.shape == (self.vocab, self.hidden))


_shapes: dict[tuple[str, str, str, str, int], ModelShape] = {}


def model_shape(
    path: str,
    *,
    key: str,
    overrides: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    lora: LoraConfig | None = None,
    kind: Literal["policy", "critic", "reward"] = "policy",
    tensor_parallel_size: int = 1,
) -> ModelShape:
    """Return the shapes of the model that a worker builds from the same settings, from the model's configuration alone.

    Args:
        path: Path or hub name of the model.
        key: The configuration key of `path`, for messages.
        overrides: Changes to the model's configuration (model_config_kwargs); None to change none.
        rope_scaling: See trainer.rope_scaling. None keeps the model's.
        rope_theta: See trainer.rope_theta. None keeps the model's.
        lora: Adapters, without which all parameters are trained.
        kind: "policy" for a causal language model, "critic" for its body with a value head, "reward" for a sequence
            classifier, whose parameters are all in `root`.
        tensor_parallel_size: Number of ranks that each layer is divided over.

    Raises:
        ConfigError: The model cannot be loaded or trained; the message names `key`.
    """
    # memory_tuning.py makes many plans, and reading a configuration and building its model take long.
    cache_key = path, key, repr((overrides, rope_scaling, rope_theta, lora)), kind, tensor_parallel_size
    if cache_key not in _shapes:
        config = load_config(path, key=key, overrides=overrides, rope_scaling=rope_scaling, rope_theta=rope_theta)
        description = "classifier" if kind == "reward" else "causal language model"
        try:
            _shapes[cache_key] = _shape_of(config, key, lora, kind, tensor_parallel_size)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{key}={path!r} is not a {description} that transformers can build "
                f"({str(error).splitlines()[0]}). Choose another model."
            ) from error
    return _shapes[cache_key]


def _shape_of(
    config: PreTrainedConfig, key: str, lora: LoraConfig | None, kind: str, tensor_parallel_size: int
) -> ModelShape:
    text = config.get_text_config()
    hidden, vocab = int(getattr(text, "hidden_size", None) or 0), 0
    layers: list[torch.nn.Module] = []
    mixers: list[RecurrentMixer] = []
    kinds: Mapping[int, ParameterKind] = {}
    root: list[ParameterShape] = []
    with torch.device("meta"):
        if kind == "reward":
            scored: torch.nn.Module = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
        else:
            model = build_meta_model(config, torch.float32)
            head = get_lm_head(model)
            hidden, vocab = head.in_features, head.out_features
            if lora is not None and lora.rank:
                LoraAdapters(model, lora, key.removesuffix("path") + "lora")
            if kind == "critic":
                vocab, root = 0, [ParameterShape((1, hidden))]
            body = model.base_model if kind == "critic" else model
            scored = ragged = RaggedModel(body)  # type: ignore[arg-type]
            if tensor_parallel_size > 1:
                size_key = key.removesuffix("model.path") + "tensor_parallel_size"
                make_meta_group(TensorParallel, tensor_parallel_size, size_key).shard_model(ragged.model)  # type: ignore[arg-type]
            layers = ragged.decoder_layers()
            mixers = list(get_recurrent_mixers(ragged.model).values())
            kinds = classify_parameters(ragged)
    states = [mixer.state_shapes for mixer in mixers]
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    experts = int(getattr(text, "num_experts_per_tok", None) or 0)
    dense = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    moe = int(getattr(text, "moe_intermediate_size", None) or dense)
    shared = int(
        getattr(text, "shared_expert_intermediate_size", None) or getattr(text, "shared_intermediate_size", None) or 0
    )
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    key_value_heads = max(get_layer_sizes(text, "num_key_value_heads"), default=heads) // tensor_parallel_size
    head_dim = max(get_layer_sizes(text, "head_dim"), default=hidden // heads)
    # One-dimensional weights belong to norms. If not as wide as the residual stream, they normalize queries and keys.
    in_mixers = {id(weight) for mixer in mixers for weight in mixer.module.parameters()}
    with_attention = [layer for layer in layers if not any(id(weight) in in_mixers for weight in layer.parameters())]
    named = [*(with_attention or layers)[0].named_parameters()] if layers else []
    norms = [
        len(weight)
        for name, weight in named
        if weight.ndim == 1 and name.endswith("weight") and id(weight) not in in_mixers
    ]

    def describe(parameter: torch.nn.Parameter) -> ParameterShape:
        kind = kinds.get(id(parameter), ParameterKind.OTHER)
        return ParameterShape(tuple(parameter.shape), parameter.requires_grad, kind)

    return ModelShape(
        layers=tuple(tuple(describe(parameter) for parameter in layer.parameters()) for layer in layers),
        attention_layers=count_attention_layers(text),
        mlp_layers=count_mlp_layers(text),
        conv_states=sum(math.prod(conv) for conv, *_ in states),
        scan_states=sum(math.prod(scan) for _, *scans in states for scan in scans),
        mixers=len(mixers),
        mixer_bytes={
            (dtype.itemsize, has_kernels): measure_saved_bytes(mixer, hidden, dtype, has_kernels=has_kernels)
            for mixer in mixers[:1]  # all have the same sizes
            for dtype, has_kernels in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
        },
        root=(*(describe(parameter) for parameter in scored.parameters() if id(parameter) not in inside), *root),
        hidden=hidden,
        intermediate=(experts * moe + shared if experts else dense) // tensor_parallel_size,
        heads=heads // tensor_parallel_size,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        vocab=vocab,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        max_positions=get_vllm_max_length(text),
        normed=hidden * norms.count(hidden),
        normed_heads=(heads // tensor_parallel_size + key_value_heads) * head_dim if set(norms) - {hidden} else 0,
        experts_per_token=experts,
        softcapped=getattr(text, "attn_logit_softcapping", None) is not None,
    )


# -- plan


@dataclass(frozen=True)
class MemoryItem:
    """One item in the memory of a slot."""

    role: str
    name: str
    note: str
    sizes: Mapping[str, int]
    """Stage of a pass -> bytes; the key "" means all the time."""
    phases: tuple[Phase, ...] = PHASES
    exact: bool = False
    on_host: bool = False
    """True if the item is in host memory although the slot is an accelerator."""

    @property
    def size(self) -> int:
        """Bytes in the stage that needs the most."""
        return max(self.sizes.values())


@dataclass(frozen=True)
class SlotMemoryPlan:
    """The memory of one kind of slot, for its fullest slot."""

    name: str
    """The roles that share the slot, joined with " + "."""
    count: int
    items: tuple[MemoryItem, ...]

    def total(self, phase: Phase, *, on_host: bool = False, role: str | None = None) -> int:
        """Return the bytes at the peak of a phase: what is held all the time, plus the stage that needs the most.

        Args:
            phase: A phase of PHASES.
            on_host: True for the host memory of an accelerator's slot.
            role: Count only the items of this role; None for all.
        """
        stages: dict[tuple[str, str], int] = {}
        for item in self.items:
            if phase not in item.phases or item.on_host != on_host or role not in (None, item.role):
                continue
            for stage, size in item.sizes.items():
                key = (item.role, stage) if stage else ("", "")
                stages[key] = stages.get(key, 0) + size
        return stages.pop(("", ""), 0) + max(stages.values(), default=0)

    def peak(self, *, on_host: bool = False, role: str | None = None) -> tuple[int, Phase]:
        """Return the number of bytes and the name of the phase that needs the most memory.

        Args:
            on_host: True for the host memory of an accelerator's slot.
            role: Count only the items of this role; None for all.
        """
        return max((self.total(phase, on_host=on_host, role=role), phase) for phase in PHASES)

    @property
    def roles(self) -> list[str]:
        """The roles of the items, each once."""
        return list(dict.fromkeys(item.role for item in self.items))


@dataclass(frozen=True)
class _MicroBatch:
    """The largest micro-batch of a rank."""

    tokens: int
    """Tokens that the rank computes."""
    scored_tokens: int
    """Number of tokens for which the head computes logits."""
    kv_tokens: int
    """Number of tokens whose keys and values attention reads, and that recurrent layers compute. A prompt that samples
    share counts once for each of them."""
    several: bool
    """True if the rank runs more than one micro-batch."""


class ModelRank:
    """Plans the memory of one rank of the policy, the reference model or the critic."""

    def __init__(self, cfg: Config, role: str, ranks: int, capacity: int | None) -> None:
        """Read the configuration of a role's model.

        Args:
            cfg: The configuration.
            role: "policy", "reference" or "critic".
            ranks: Number of ranks of the role.
            capacity: Bytes of an accelerator, on which the chunks of logits depend; None if unknown.

        Raises:
            ConfigError: The model cannot be loaded.
        """
        trainer = cfg.trainer
        section: PolicyConfig | RefConfig | CriticConfig = getattr(trainer, CONFIG_SECTIONS[role])
        self.cfg, self.role, self.ranks, self.section = cfg, role, ranks, section
        self.on_gpu = cfg.device == "cuda"
        self.fsdp = section.fsdp_config if trainer.strategy in ("fsdp", "fsdp2") else None
        self.deepspeed = section.deepspeed_config if trainer.strategy == "deepspeed" else None
        self.tensor_parallel_size = section.tensor_parallel_size
        """Number of ranks that each layer is divided over."""
        chosen = self.fsdp.fsdp_size if self.fsdp is not None else -1
        self.num_shards = ranks // self.tensor_parallel_size if chosen == -1 else chosen
        """Number of ranks that gradients are sharded over, and parameters too except with ZeRO 2."""
        self.reshards = self.fsdp is not None and self.fsdp.reshard_after_forward is not False
        """True if FSDP2 frees gathered layers after forward."""
        once = self.fsdp.reduce_once if self.fsdp is not None else False
        self.reduces_once = not (self.on_gpu and self.reshards) if once is None else once
        """True if gradients are reduced over ranks once per update: see FSDP2Strategy."""
        self.shape = self.shape_of(self.tensor_parallel_size)
        self.trained = tuple(weight for weight in self.shape.weights if weight.trained and role != "reference")
        self.compute_bytes = 2 if trainer.bf16 else FP32
        """Bytes of a number in the compute dtype."""
        self.autocasts = trainer.strategy == "single" and trainer.bf16
        """True if weights and the residual stream stay float32, and linear layers cast what they read."""
        self.residual_bytes = FP32 if self.autocasts else self.compute_bytes
        """Bytes of a number in the residual stream."""
        self.chunk_bytes = chunk_bytes(cfg.device, capacity)

    @property
    def num_parameter_shards(self) -> int:
        """Number of ranks that parameters are sharded over."""
        return 1 if self.deepspeed is not None and self.deepspeed.zero_stage != 3 else self.num_shards

    def shape_of(self, tensor_parallel_size: int) -> ModelShape:
        """Return the model's shapes with layers divided over `tensor_parallel_size` ranks. Raises ConfigError."""
        trainer, model = self.cfg.trainer, self.section.model
        return model_shape(
            model.path or "",
            key=f"trainer.{CONFIG_SECTIONS[self.role]}.model.path",
            overrides=self.section.model_config_kwargs,
            rope_scaling=trainer.rope_scaling,
            rope_theta=trainer.rope_theta,
            lora=getattr(model, "lora", None),
            kind="critic" if self.role == "critic" else "policy",
            tensor_parallel_size=tensor_parallel_size,
        )

    def items(self) -> Iterator[MemoryItem]:
        """Yield the items of the rank: those held all the time, then those of scoring and of updates."""
        trainer = self.cfg.trainer
        yield from self._persistent_items()
        yield from self._scoring_items(
            self._micro_batch(trainer.micro_forward_batch_size_per_gpu, trainer.train_batch_size)
        )
        if self.role != "reference":
            prompts = trainer.critic_mini_batch_size if self.role == "critic" else trainer.policy_mini_batch_size
            yield from self._update_items(self._micro_batch(trainer.micro_train_batch_size_per_gpu, prompts))

    def _micro_batch(self, sequences: int | None, prompts: int) -> _MicroBatch:
        """Return the largest micro-batch when the samples of `prompts` prompts are sharded over the ranks.

        Its size is `sequences`, or max_tokens_per_microbatch tokens if that is configured. A parallel group shares
        every micro-batch: with sequence parallelism each rank computes a part of its tokens, with tensor parallelism
        all of them with a part of the layers. Either way it scores its share of the tokens.
        """
        trainer, generator, max_length = self.cfg.trainer, self.cfg.generator, max_sequence_length(self.cfg.generator)
        sequence_parallel_size = self.section.sequence_parallel_size
        group = sequence_parallel_size * self.tensor_parallel_size
        samples = min(prompts, trainer.train_batch_size) * generator.n_samples_per_prompt
        available = -(-samples * group // self.ranks) * max_length
        budget = trainer.max_tokens_per_microbatch
        tokens = min(max(budget, max_length) if budget else (sequences or 1) * max_length, available)
        shares = budget and generator.n_samples_per_prompt > 1 and trainer.share_prompt is not False
        attended = min(MAX_ATTENDED_RATIO * tokens, available) if shares else tokens
        # The share of response tokens is only known if a micro-batch is counted in sequences with one response each.
        response = max_length if budget or generator.max_turns > 1 else generator.sampling_params.max_generate_length
        scored = tokens * response // max_length
        return _MicroBatch(
            -(-tokens // sequence_parallel_size),
            -(-scored // group),
            -(-attended // sequence_parallel_size),
            available > tokens,
        )

    def _persistent_items(self) -> Iterator[MemoryItem]:
        """Yield the items that are held between passes.

        DeepSpeed holds parameters in the compute dtype and, with the optimizer's state, a float32 copy of a shard.
        """
        weights, trained = self.shape.weights, self.trained
        shard = self.num_parameter_shards
        count, num_trained = numel(weights), numel(trained)
        kinds = {"trained": num_trained, "frozen": count - num_trained}
        note = ", ".join(f"{size / 1e6:,.1f} M {kind}" for kind, size in kinds.items() if size)
        note += f", one of {self.tensor_parallel_size} parts of layers" if self.tensor_parallel_size > 1 else ""
        note += f", over {shard} ranks" if shard > 1 else ""
        if (zero := self.deepspeed) is not None:
            yield from self._persistent(
                "parameters", self.compute_bytes * -(-count // shard), note, zero.offload_parameters
            )
            if trained:
                part = FP32 * -(-num_trained // self.ranks)
                yield from self._persistent("master weights", part, "float32", zero.offload_optimizer)
                yield from self._persistent(
                    _OPTIMIZER, 2 * part, _OPTIMIZER_NOTES[OptimizerName.ADAMW], zero.offload_optimizer
                )
            return
        offload, held = self.fsdp is not None and self.fsdp.cpu_offload, numel(trained, shard)
        frozen = self.compute_bytes * (numel(weights, shard) - held)
        yield from self._persistent("parameters", FP32 * held + frozen, note, offload)
        if trained:
            optimizer = self.section.optimizer_config.name  # type: ignore[union-attr]  # the reference is not trained
            size = sum(
                state_bytes(choose_optimizer(optimizer, weight.kind, weight.numel), weight.shard_numel(shard))
                for weight in trained
            )
            yield from self._persistent(_OPTIMIZER, size, _OPTIMIZER_NOTES[OptimizerName(optimizer)], offload)

    def _persistent(self, name: str, size: int, note: str, offload: bool) -> Iterator[MemoryItem]:
        """Yield an item on the device, or in host memory while it is offloaded.

        With trainer.placement.colocate_offload=all, a role is offloaded while engines generate. It returns to the
        device to train; the policy's weights also to be sent.
        """
        is_deepspeed = self.deepspeed is not None
        item = MemoryItem(self.role, name, note, {"": size}, exact=not is_deepspeed)
        if offload and self.on_gpu:
            yield replace(item, on_host=True)
        elif frees_all_memory(self.cfg):
            is_sent = self.role == "policy" and name != _OPTIMIZER
            phases = (*LEARNER_PHASES, Phase.SYNCING) if is_sent else LEARNER_PHASES
            yield replace(item, phases=phases)
            other_phases = tuple(phase for phase in PHASES if phase not in phases)
            # FSDP2's buffers in host memory stay allocated.
            yield replace(item, phases=other_phases if is_deepspeed else PHASES, on_host=True)
        else:
            yield item

    def _scoring_items(self, work: _MicroBatch) -> Iterator[MemoryItem]:
        yield from self._gathered(Phase.SCORING)
        widest = (
            3 * work.tokens * (self.compute_bytes * self.shape.intermediate + self.residual_bytes * self.shape.hidden)
        )
        widest += self._mixer_bytes(work)  # without gradients, a scan holds most of what it would save
        yield self._item(Phase.SCORING, "activations", f"{work.tokens:,} tokens, one layer", {_LAYERS: widest})
        yield self._head_item(Phase.SCORING, work)

    def _update_items(self, work: _MicroBatch) -> Iterator[MemoryItem]:
        shape, fsdp, checkpointing = self.shape, self.fsdp, self.cfg.trainer.gradient_checkpointing
        recomputes = checkpointing is not False
        unsharded = self.reduces_once and work.several
        note = "float32" + (", unsharded until the last micro-batch" if unsharded and self.num_shards > 1 else "")
        held = dict.fromkeys(_STAGES, FP32 * numel(self.trained, 1 if unsharded else self.num_shards))
        offloads = fsdp is not None and fsdp.cpu_offload and self.on_gpu and not unsharded
        gradients = self._item(Phase.UPDATING, "gradients", note, held)
        yield replace(gradients, exact=self.deepspeed is None, on_host=offloads)
        fresh = self._fresh_gradients(unsharded)
        yield self._item(Phase.UPDATING, "new gradients", "before accumulation", fresh)
        yield from self._gathered(Phase.UPDATING)
        (layer, all_layers), inputs = self._layer_bytes(work), work.tokens * self.residual_bytes * shape.hidden
        saved = (len(shape.layers) * inputs if recomputes else all_layers) + 3 * inputs  # 3: inputs of the last norm
        note = "layers' inputs" if recomputes else "all layers"
        products = self._product_bytes(work) if checkpointing == SELECTIVE else 0
        kept_of_layer = products // max(1, len(shape.layers))
        if products:
            saved += products + self._kept_attention_inputs(work)
            note = "layers' inputs, matrix products and attention"
        note = f"{work.tokens:,} tokens, {note}"
        yield self._item(Phase.UPDATING, "activations", note, {_HEAD: saved, _LAYERS: saved})
        key_value = (
            (work.kv_tokens - work.tokens) * shape.key_value_heads * shape.head_dim * (2 * self.compute_bytes + FP32)
        )
        backward = (
            work.tokens * self.compute_bytes * shape.intermediate
            + inputs
            + key_value
            + (layer - kept_of_layer if recomputes else 0)
        )
        # A mixer's backward begins when the MLP after it has freed what it saved.
        mixer = int((_MIXER_BACKWARD + recomputes) * self._mixer_bytes(work)) - kept_of_layer
        backward = max(backward, mixer + inputs)
        note = "a layer, recomputed" if recomputes else "a layer's gradients"
        yield self._item(Phase.UPDATING, "backward of a layer", note, {_LAYERS: backward})
        yield self._head_item(Phase.UPDATING, work)

    def _item(self, phase: Phase, name: str, note: str, sizes: Mapping[str, int]) -> MemoryItem:
        return MemoryItem(self.role, name, note, sizes, (phase,))

    def _layer_bytes(self, work: _MicroBatch) -> tuple[int, int]:
        """Return the bytes that the largest layer saves for backward, and those of all layers.

        A norm saves its input, the normalized input in float32, and its output. Attention saves queries, keys, values
        and two copies of its result. The MLP saves four tensors of its width, and experts their inputs.
        """
        shape, size = self.shape, self.compute_bytes
        attention = 3 * size * shape.heads * shape.head_dim + shape.normed_heads * (FP32 + size)
        if shape.softcapped:  # the results of tanh and softmax
            attention += 2 * FP32 * shape.heads * max_sequence_length(self.cfg.generator)
        attention = work.tokens * attention + work.kv_tokens * 2 * size * shape.key_value_heads * shape.head_dim
        mlp = work.tokens * size * (4 * shape.intermediate + 2 * shape.hidden * shape.experts_per_token)
        norms = work.tokens * shape.normed * (FP32 + 2 * self.residual_bytes)
        mixer, count = self._mixer_bytes(work), len(shape.layers)
        total = count * norms + shape.mlp_layers * mlp + shape.attention_layers * attention + shape.mixers * mixer
        if shape.mixers + shape.attention_layers > count:  # Falcon-H1: both in each layer
            return norms + mlp + attention + mixer, total
        attention_or_mixer = max(attention if shape.attention_layers else 0, mixer)
        if shape.mlp_layers < count:  # Nemotron-H: an MLP is a layer of its own
            return norms + max(mlp, attention_or_mixer), total
        return norms + mlp + attention_or_mixer, total

    def _product_bytes(self, work: _MicroBatch) -> int:
        """Return the bytes of the results of matrix products and of attention in all layers: see SELECTIVE.

        These are queries, keys, values, what attention returns and its projection, the MLP's two inner tensors and its
        result. Adapters add as many products.
        """
        shape, size = self.shape, self.compute_bytes
        heads = 2 * shape.heads * shape.head_dim + 2 * shape.key_value_heads * shape.head_dim + shape.hidden
        mlp = 2 * shape.intermediate + shape.hidden * max(1, shape.experts_per_token)
        lora = getattr(self.section.model, "lora", None)
        products = 2 if lora is not None and lora.rank else 1
        per_token = shape.attention_layers * heads + shape.mlp_layers * mlp + shape.mixers * (2 * shape.hidden)
        return products * work.tokens * size * per_token

    def _kept_attention_inputs(self, work: _MicroBatch) -> int:
        """Return the bytes of queries, keys and values that SELECTIVE keeps for kernels that are not PyTorch's."""
        shape = self.shape
        if not (self.on_gpu and self.compute_bytes < FP32 and has_separate_kernels()):
            return 0
        heads = work.tokens * shape.heads + 2 * work.kv_tokens * shape.key_value_heads
        return shape.attention_layers * self.compute_bytes * shape.head_dim * heads

    def _mixer_bytes(self, work: _MicroBatch) -> int:
        """Return the bytes that a layer with a recurrent state saves for backward: it repeats shared prompts."""
        size = self.compute_bytes
        has_kernels = self.on_gpu and size < FP32 and has_recurrent_kernels()
        return work.kv_tokens * self.shape.mixer_bytes.get((size, has_kernels), 0)

    def _head_item(self, phase: Phase, work: _MicroBatch) -> MemoryItem:
        """Return the item of the head: two copies of a chunk of float32 logits, or a critic's values.

        In updates it includes the chunks that are kept for backward.
        """
        shape, device, updates = self.shape, self.cfg.device, phase is Phase.UPDATING
        if not shape.vocab:
            size = 2 * work.scored_tokens * shape.hidden * FP32
            return self._item(phase, "values", "float32 hidden states", {_HEAD: size})
        rows = max(1, self.chunk_bytes // (FP32 * shape.vocab))
        kept = min(CACHED_CHUNKS[device] if updates else 0, -(-work.scored_tokens // rows))
        chunk = min(rows, work.scored_tokens) * shape.vocab
        size = 2 * FP32 * chunk + FP32 * min(kept * rows, work.scored_tokens) * shape.vocab
        size += work.scored_tokens * shape.hidden * self.compute_bytes
        if updates and shape.softcapped:  # the gradient of the cap needs the original logits
            size += FP32 * chunk
        if updates and self.compute_bytes < FP32:  # gradients before they are accumulated in float32
            size += self.compute_bytes * (chunk + (shape.head if shape.head_trained else 0))
        note = f"chunks of {min(work.scored_tokens, rows):,} x {shape.vocab:,}" + (f", {kept} kept" if updates else "")
        return self._item(phase, "logits", note, {_HEAD: size})

    def _gathered(self, phase: Phase) -> Iterator[MemoryItem]:
        """Yield the weights used in computation, if they are not the parameters themselves.

        With FSDP2 these are the root all the time and, of the layers, the current one, the next one and the buffer in
        which that is gathered; all layers if they are not resharded after forward. ZeRO 3 prefetches one bucket, and
        keeps the last layers, which backward reuses within `stage3_max_reuse_distance` elements of forward and
        backward. Autocast keeps a copy of all weights.
        """
        count, largest = len(self.shape.layers), self.shape.largest_layer
        if self.deepspeed is not None and self.deepspeed.zero_stage == 3:
            options, layers = self.deepspeed.zero_optimization, sum(numel(layer) for layer in self.shape.layers)
            ahead = int(options.get("stage3_prefetch_bucket_size", _DEEPSPEED_PREFETCH))
            reach = int(options.get("stage3_max_reuse_distance", _DEEPSPEED_REUSE))
            elements = min(layers, max(reach // 2 if phase is Phase.UPDATING else 0, largest) + ahead)
            note = f"root and {elements / 1e6:,.1f} M of {layers / 1e6:,.1f} M in layers"
        elif self.fsdp is not None:
            num_resharded = 1 if self.num_shards == 1 else min(3, count)
            num_gathered = num_resharded if self.reshards else count
            elements, note = num_gathered * largest, f"root and {num_gathered} of {count} layers"
        elif self.autocasts and self.trained:
            elements, note = count * largest, "autocast's copy"
        else:
            return
        size = self.compute_bytes * (numel(self.shape.root) + elements)
        yield self._item(phase, "gathered weights", note, dict.fromkeys(_STAGES, size))

    def _fresh_gradients(self, unsharded: bool) -> dict[str, int]:
        """Return the bytes per stage of gradients that were just computed and are not accumulated yet.

        If the head is tied, its gradient is kept until that of the embeddings. Those of a complete layer are held,
        which FSDP2 reduces in float32 unless gradients are `unsharded`; DeepSpeed collects them in buckets of a fixed
        size.
        """
        shape, bytes_per_element = self.shape, self.residual_bytes
        head = FP32 * shape.head if shape.head_trained else 0
        tied_head = head if shape.tied else 0
        if self.deepspeed is not None:
            elements = int(self.deepspeed.zero_optimization.get("reduce_bucket_size", _DEEPSPEED_BUCKET))
            bucket = bytes_per_element * elements * (2 if self.on_gpu else 1)
            return {_HEAD: bucket + head, _LAYERS: bucket + tied_head, _EMBEDDINGS: bucket + tied_head + head}
        bytes_per_element += FP32 if self.fsdp is not None and not unsharded else 0
        layer = max((numel(weight for weight in layer if weight.trained) for layer in shape.layers), default=0)
        root = numel(weight for weight in shape.root if weight.trained)
        return {
            _HEAD: head,
            _LAYERS: tied_head + bytes_per_element * layer,
            _EMBEDDINGS: tied_head + bytes_per_element * root,
        }


def print_memory_plan(cfg: Config, objective_spec: ObjectiveSpec) -> None:
    """Print a summary of a starting run's plan to stderr.

    A plan that cannot be made does not stop a run, because engines and strategies understand free-form settings better.
    Then the note says why.

    Raises:
        ConfigError: A model cannot be loaded.
    """
    try:
        capacity = memory_capacity(cfg.device)
        lines = summary(memory_plan(cfg, capacity, objective_spec), cfg.device, capacity)
    except ConfigError:
        raise
    except Exception as error:
        lines = [f"no memory plan: {type(error).__name__}: {error}"]
    for line in lines:
        print_stderr(f"note: {line}")


def summary(plans: Sequence[SlotMemoryPlan], device: str, capacity: int | None) -> list[str]:
    """Return three lines: the peak of each kind of slot, its largest parts, and the command that shows the whole plan.

    Args:
        plans: The plan of each kind of slot.
        device: "cuda" or "cpu".
        capacity: Bytes of an accelerator, or of the main memory for device "cpu"; None if unknown.
    """
    available = f" of {_format_size(capacity)}" if capacity is not None and device == "cuda" else ""
    peaks = [f"{plan.name} at most {_format_size(plan.peak()[0])}{available} while {plan.peak()[1]}" for plan in plans]
    fullest = max(plans, key=lambda plan: plan.peak()[0])
    held = [item for item in fullest.items if fullest.peak()[1] in item.phases and not item.on_host]
    largest = sorted(held, key=lambda item: item.size, reverse=True)[:_NUM_LARGEST_PARTS]
    parts = ", ".join(f"{item.role} {item.name} {_format_size(item.size)}" for item in largest)
    return [
        f"memory plan{' per GPU' if device == 'cuda' else ''}: {'; '.join(peaks)}",
        f"memory plan: largest parts: {parts}",
        "memory plan: `skyrl-train plan` with the same arguments shows all parts",
    ]


def _format_size(size: int) -> str:
    """Return a number of bytes in GiB, or in MiB below 1 GiB."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{size / 2**20:,.0f} MiB"


def memory_plan(
    cfg: Config, capacity: int | None = None, objective_spec: ObjectiveSpec | None = None
) -> list[SlotMemoryPlan]:
    """Return one plan for every kind of slot.

    Reads the models' configurations, if necessary from the hub.

    Args:
        cfg: The configuration.
        capacity: Bytes of an accelerator, of which vLLM and SGLang take a share and on which chunks of logits depend;
            None if unknown.
        objective_spec: The loss, which decides which models the run has; None for that of training with rewards.

    Raises:
        ConfigError: A model cannot be loaded, or as in `build_policy_objective_spec`.
    """
    models = model_ranks(cfg, capacity, build_policy_objective_spec(cfg) if objective_spec is None else objective_spec)
    placement, generator = cfg.trainer.placement, cfg.generator
    shares = {"policy"} | {role for role in ("reference", "critic") if is_colocated(placement, CONFIG_SECTIONS[role])}
    policy_items = [item for model in models if model.role in shares for item in model.items()]
    policy_items += _bucket_items(cfg, models[0].shape_of(tensor_parallel_size=1), "policy")
    policy_items += _copy_items(cfg, models[0].shape, "policy", models[0].num_parameter_shards)
    names = [model.role for model in models if model.role in shares]
    reward, reward_shares = tuple(_reward_items(cfg)), is_colocated(placement, "reward")
    if reward and reward_shares:
        policy_items += reward
        names.append("reward model")
    engine = tuple(_engine_items(cfg, capacity)) if generator.run_engines_locally else ()
    engine_slots = generator.num_inference_engines * gpus_per_engine(generator) if engine else 0
    num_shared = min(models[0].ranks, engine_slots) if has_colocated_engines(cfg) else 0
    plans = [
        SlotMemoryPlan(" + ".join([*names, "engine"]), num_shared, (*policy_items, *engine)),
        SlotMemoryPlan(" + ".join(names), models[0].ranks - num_shared, tuple(policy_items)),
        *(
            SlotMemoryPlan(model.role, model.ranks, tuple(model.items()))
            for model in models
            if model.role not in shares
        ),
        SlotMemoryPlan("reward model", num_ranks(placement, "reward") if reward and not reward_shares else 0, reward),
        SlotMemoryPlan("engine", engine_slots - num_shared, engine),
    ]
    return [plan for plan in plans if plan.count]


def model_ranks(cfg: Config, capacity: int | None, objective_spec: ObjectiveSpec) -> list[ModelRank]:
    """Return one rank of each model that the learner needs, the policy first, for the memory plan.

    Args:
        cfg: The configuration.
        capacity: Memory of an accelerator in bytes; None if it is not known.
        objective_spec: Decides whether the learner needs a reference model and a critic.

    Raises:
        ConfigError: A model's configuration is invalid.
    """
    placement = cfg.trainer.placement
    needed = {
        "policy": True,
        "reference": objective_spec.needs_reference,
        "critic": objective_spec.critic_objective is not None,
    }
    models = []
    for role, section in CONFIG_SECTIONS.items():
        if needed[role]:
            ranks = num_ranks(placement, "policy" if is_colocated(placement, section) else section)
            models.append(ModelRank(cfg, role, ranks, capacity))
    return models


def _reward_items(cfg: Config) -> Iterator[MemoryItem]:
    """Yield the items of a reward model's replica, which is never offloaded and scores one conversation at a time."""
    reward, tokens = cfg.trainer.reward, max_sequence_length(cfg.generator)
    if reward.model.path is None:
        return
    shape = model_shape(reward.model.path, key=REWARD_PATH_KEY, overrides=reward.model_config_kwargs, kind="reward")
    size, weights = 2 if cfg.trainer.bf16 else FP32, numel(shape.weights)
    yield MemoryItem("reward model", "parameters", f"{weights / 1e6:,.1f} M frozen", {"": size * weights}, exact=True)
    layer = {_LAYERS: 3 * tokens * size * (shape.intermediate + shape.hidden)}
    yield MemoryItem("reward model", "activations", f"{tokens:,} tokens, one layer", layer, (Phase.GENERATING,))


def _engine_items(cfg: Config, capacity: int | None) -> Iterator[MemoryItem]:
    """Yield the items of one slot of an engine, at their maximum.

    Which memory engines free for the trainer says trainer.placement.colocate_offload. With `all`, engines that sleep
    until a sync replaces all their weights free all of it and, except for transformers and vLLM with a draft model,
    keep no copy. Otherwise only vLLM frees it, and keeps a copy in host memory.
    """
    generator, on_gpu = cfg.generator, cfg.device == "cuda"
    shape, parts = _engine_shape(cfg), gpus_per_engine(generator)
    weights = _engine_weight_bytes(cfg, shape)
    offloads, mode = frees_all_memory(cfg), offload_mode(cfg)
    note = f"{generator.model_dtype}" + (f", over {parts} slots" if parts > 1 else "")
    items = [MemoryItem("engine", "weights", note, {"": weights}, exact=parts == 1)]
    drafts = measure_drafts(cfg, shape.largest_layer) if generator.backend == "vllm" else DraftSize(0, 0)
    if drafts.weights:
        draft_bytes = -(-drafts.weights * _BYTES[generator.model_dtype] // parts)
        items.append(MemoryItem("engine", "draft weights", note, {"": draft_bytes}))
    if generator.backend == "vllm" and on_gpu and expected_model_runner(on_cpu=False) == "V2":
        items.append(sampler_item(generator, shape))
    is_replaced = sync_replaces_all_weights(cfg)
    keeps_copy = generator.backend == "transformers" or not is_replaced or drafts.weights > 0
    for item in items:
        if offloads and (is_replaced or generator.backend == "vllm"):
            yield replace(item, phases=(Phase.GENERATING, Phase.SYNCING))
            if keeps_copy:
                yield replace(item, phases=LEARNER_PHASES, on_host=True)
        else:
            yield item
    held, limit = sum(item.size for item in items), engine_cache_limit(cfg, capacity) if on_gpu else None
    note, cache = _cache(cfg, shape, parts, held, drafts.cache_per_token, capacity if on_gpu else None, limit)
    frees_cache = shares_gpu_memory(cfg) and mode is not OffloadMode.NONE
    cache_phases = (Phase.GENERATING,) if frees_cache else PHASES
    yield MemoryItem("engine", "KV cache", note, {"": cache}, cache_phases)
    if capacity is not None and on_gpu and generator.backend != "transformers" and shares_gpu_memory(cfg):
        # A cache without limit takes what this leaves of the engine's share. A sleeping engine keeps it.
        phases = set(PHASES if mode is not OffloadMode.ALL else (Phase.GENERATING,))
        phases -= set(() if limit is not None else cache_phases)
        if phases:
            note, size = "logits, activations, CUDA graphs", {"": _engine_workspace_bytes(cfg, shape)}
            yield MemoryItem("engine", "workspace", note, size, tuple(phase for phase in PHASES if phase in phases))
    if resolve_weight_sync_route(cfg) == "broadcast":
        yield from _bucket_items(cfg, shape, "engine")
    if generator.backend != "transformers":  # which applies changes to its own tensors
        # The ranks of an engine on one node share a copy.
        yield from _copy_items(
            cfg, shape, "engine", gpus_per_engine(generator) // cfg.trainer.placement.nodes_per_engine
        )


def sampler_item(generator: GeneratorConfig, shape: ModelShape) -> MemoryItem:
    """Return the buffers of the sampler in vLLM's V2 model runner, which every rank has for the full vocabulary.

    They are an int32 per request and token for penalties, a bit for the tokens of the prompt, and a bit per row of
    logits for JSON schemas. n-grams are looked up in a copy of all sequences.
    """
    drafts, requests = get_speculative_config(generator) or {}, generator.max_num_seqs
    rows = 1 + int(drafts.get("num_speculative_tokens") or 0)
    size = requests * (4 * shape.vocab + (1 + rows) * -(-shape.vocab // 32) * 4)
    if str(drafts.get("method")).startswith("ngram"):
        size += 4 * requests * (generator.engine_init_kwargs.get("max_model_len") or shape.max_positions)
    return MemoryItem("engine", "sampler", f"{requests:,} requests x {shape.vocab:,} tokens", {"": size})


def _engine_shape(cfg: Config) -> ModelShape:
    generator = cfg.generator
    rope = {"rope_scaling": generator.rope_scaling, "rope_theta": generator.rope_theta}
    return model_shape(generator.model_name, key="generator.model_name", **rope)  # type: ignore[arg-type]


def _engine_weight_bytes(cfg: Config, shape: ModelShape) -> int:
    """Return the bytes of an engine's weights in one slot."""
    return -(-numel(shape.weights) * _BYTES[cfg.generator.model_dtype] // gpus_per_engine(cfg.generator))


def _engine_workspace_bytes(cfg: Config, shape: ModelShape) -> int:
    """Return an estimate of what vLLM and SGLang hold in one slot beside weights and KV cache."""
    generator = cfg.generator
    logits = _SAMPLER_COPIES * FP32 * generator.max_num_seqs * shape.vocab
    tokens = max(generator.max_num_batched_tokens or 0, generator.max_num_seqs)
    widths = 2 * shape.intermediate // generator.inference_engine_tensor_parallel_size + 4 * shape.hidden
    return _GRAPH_BYTES + logits + tokens * widths * _BYTES[generator.model_dtype]


@dataclass(frozen=True)
class CacheLimit:
    """The size of a KV cache that holds all sequences that an engine can run at the same time."""

    tokens: int
    size: int
    """Bytes in one slot."""
    sequences: int
    length: int
    """Maximum length of a sequence, in tokens."""


def engine_cache_limit(cfg: Config, capacity: int | None) -> CacheLimit | None:
    """Return the size of a colocated engine's KV cache if it needs less than its share of the accelerator.

    An engine runs at most max_num_seqs sequences, and not more than a step or an evaluation samples. Conversations of
    several turns keep their cache while they wait for tools. The cache also holds one sequence of the engine's maximum
    length, which engines require.

    Args:
        cfg: The configuration.
        capacity: Bytes of the accelerator; None if unknown.

    Returns:
        None if the engine takes its share: it is not colocated, nothing is known of the accelerator, the configuration
        sizes the cache, or the engine's layout of the cache is not known, for example with recurrent layers.
    """
    generator = cfg.generator
    options = generator.engine_init_kwargs
    if capacity is None or not shares_gpu_memory(cfg) or generator.backend == "transformers":
        return None
    if not _CACHE_SIZE_ARGUMENTS.isdisjoint(options) or get_speculative_config(generator) is not None:
        return None
    shape = _engine_shape(cfg)
    if shape.mixers or not shape.attention_layers:
        return None
    lengths = (settings.max_generate_length for settings in (generator.sampling_params, generator.eval_sampling_params))
    length = generator.max_input_length + max(lengths) + _CACHE_BLOCK_TOKENS
    sequences = _max_concurrent_sequences(cfg)
    # vLLM requires complete blocks for the longest sequence, beside a block that it never uses.
    longest = int(options.get("max_model_len") or shape.max_positions) + 2 * _MAX_CACHE_BLOCK_TOKENS
    tokens = max(sequences * length, longest)
    size = tokens * _cache_bytes_per_token(cfg, shape)
    share = int(generator.gpu_memory_utilization * capacity)
    used = _engine_weight_bytes(cfg, shape) + _engine_workspace_bytes(cfg, shape)
    if generator.backend == "vllm" and expected_model_runner(on_cpu=False) == "V2":
        used += sampler_item(generator, shape).size
    return CacheLimit(tokens, size, sequences, length) if size <= share - used else None


def _max_concurrent_sequences(cfg: Config) -> int:
    """Return the largest number of sequences whose cache an engine uses at the same time."""
    trainer, generator = cfg.trainer, cfg.generator
    prompts = math.ceil(trainer.train_batch_size * (1 + generator.over_provisioning))
    samples = prompts * generator.n_samples_per_prompt
    if cfg.data.val_data and (trainer.eval_interval > 0 or trainer.eval_before_train):
        per_prompt = (generator.eval_n_samples_per_prompt, *generator.eval_n_samples_by_data_source.values())
        samples = max(samples, trainer.eval_batch_size * max(per_prompt))
    per_engine = -(-samples // generator.num_inference_engines)
    return per_engine if generator.max_turns > 1 else min(generator.max_num_seqs, per_engine)


def _cache_bytes_per_token(cfg: Config, shape: ModelShape) -> int:
    """Return the bytes of a token's keys and values in one slot."""
    generator = cfg.generator
    size = FP32 if generator.backend == "vllm" and cfg.device == "cpu" else _BYTES[generator.model_dtype]
    heads = max(1, -(-shape.key_value_heads // generator.inference_engine_tensor_parallel_size))
    layers = -(-shape.attention_layers // generator.inference_engine_pipeline_parallel_size)
    return max(1, 2 * layers * heads * shape.head_dim * size)


def _cache(
    cfg: Config,
    shape: ModelShape,
    parts: int,
    held: int,
    draft_numbers: int,
    capacity: int | None,
    limit: CacheLimit | None,
) -> tuple[str, int]:
    """Return a note on what the KV cache is for, and its bytes in one slot.

    Args:
        cfg: The configuration.
        shape: The engine's model.
        parts: Number of slots of an engine.
        held: Bytes of weights and buffers in the engine's share of an accelerator.
        draft_numbers: Numbers per token that drafts keep in the cache.
        capacity: Bytes of an accelerator; None if unknown, or for a CPU.
        limit: See `engine_cache_limit`.
    """
    generator = cfg.generator
    if limit is not None:
        return f"all of {limit.sequences:,} sequences of {limit.length:,} tokens", limit.size
    size = FP32 if generator.backend == "vllm" and cfg.device == "cpu" else _BYTES[generator.model_dtype]
    per_token = _cache_bytes_per_token(cfg, shape) + draft_numbers * size // parts
    state = (shape.conv_states * size + shape.scan_states * FP32) // parts
    state_note = f", {state / 1024:,.1f} KiB of states each" if state else ""
    response_length, input_length = generator.sampling_params.max_generate_length, generator.max_input_length
    samples = generator.n_samples_per_prompt
    per_engine = -(-cfg.trainer.train_batch_size * samples // generator.num_inference_engines)
    sequences = min(generator.max_num_seqs, per_engine)
    if generator.backend == "transformers":  # samples share their prompt's cache
        prompts = -(-sequences // samples)
        note = f"{sequences} sequences, {per_token / 1024:,.1f} KiB a token{state_note}"
        tokens = sequences * response_length + prompts * input_length
        return note, per_token * tokens + state * (sequences + prompts)
    if cfg.device == "cpu":
        length = generator.engine_init_kwargs.get("max_model_len") or shape.max_positions
        size = (per_token * length + state) * generator.max_num_seqs
        return "max_num_seqs sequences of full length, up to 4 GiB", min(size, _CPU_CACHE_BYTES)
    per_sequence = per_token * (input_length + response_length) + state
    if capacity is None:
        return f"{sequences} sequences of {input_length + response_length}{state_note}", sequences * per_sequence
    free = max(0, int(generator.gpu_memory_utilization * capacity) - held)
    capacity_sequences = free // per_sequence
    share = f"gpu_memory_utilization={generator.gpu_memory_utilization:g}"
    note = f"{share}: fits {capacity_sequences:,} sequences, {sequences:,} needed"
    return note, free


def _bucket_items(cfg: Config, shape: ModelShape, role: str) -> list[MemoryItem]:
    """Return two buckets that are used in turn and stay allocated; on the trainer also the tensor being copied."""
    generator = cfg.generator
    wire = _BYTES[generator.model_dtype]
    limit = int(generator.weight_transfer_threshold_cuda_ipc_GB * 2**30)
    on_device = resolve_weight_sync_route(cfg) in ("broadcast", "ipc")
    if cfg.device == "cpu" and on_device:
        limit = min(limit, MAX_CPU_BUCKET_BYTES)
    total, largest = numel(shape.weights), max(weight.numel for weight in shape.weights)
    bucket = max(min(limit, wire * total), wire * largest)
    on_host = cfg.device == "cuda" and not on_device
    items = [MemoryItem(role, "weight-sync buckets", "2, kept", {"": 2 * bucket}, on_host=on_host)]
    if role == "policy":
        tensor = {"": (FP32 + wire) * largest}
        note = "the largest, gathered and cast"
        items.append(MemoryItem(role, "tensor being sent", note, tensor, (Phase.SYNCING,)))
    return items


def _copy_items(cfg: Config, shape: ModelShape, role: str, num_shards: int = 1) -> list[MemoryItem]:
    """Return the copy of the weights that were synced last, if syncs send only changed elements."""
    if not cfg.generator.weight_sync_only_changed or prefers_adapter_sync(cfg):
        return []
    size = _BYTES[cfg.generator.model_dtype] * -(-numel(shape.weights) // num_shards)
    note = "weight_sync_only_changed" + (f", over {num_shards} ranks" if num_shards > 1 else "")
    return [MemoryItem(role, "weights synced last", note, {"": size}, on_host=cfg.device == "cuda")]
