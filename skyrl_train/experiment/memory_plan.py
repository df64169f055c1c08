"""Predicts the memory of each slot in each phase of a step, from the configuration and the models' shapes.

Parameters, gradients and optimizer state are exact; the other rows are estimates. No weights are loaded. Not counted:
libraries and the interpreter (0.3 to 1 GiB of host memory per process), the CUDA context (about 0.5 GiB) and
fragmentation.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from skyrl_train.config.predicates import (
    gpus_per_engine,
    has_colocated_engines,
    is_colocated,
    max_sequence_length,
    num_ranks,
    resolve_weight_sync_route,
    shares_gpu_memory,
    sync_replaces_all_weights,
)
from skyrl_train.config.schema import (
    Config,
    CriticConfig,
    LoraConfig,
    PolicyConfig,
    RefConfig,
)
from skyrl_train.data.batch import MAX_ATTENDED_RATIO
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.algorithm import ObjectiveSpec, build_policy_objective_spec
from skyrl_train.models.layer_sizes import get_layer_sizes
from skyrl_train.models.loading import REWARD_PATH_KEY, build_meta_model, load_config
from skyrl_train.models.logprob_model import CACHED_CHUNKS, chunk_bytes
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.models.parallel_group import make_meta_group
from skyrl_train.models.ragged_model import RaggedModel, get_lm_head
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.terminal import print_stderr
from skyrl_train.weight_sync.sender import MAX_CPU_BUCKET_BYTES

FP32 = 4
"""Bytes of a float32: the dtype of log-softmax, of norms internally, and of everything trained."""
PHASES = ("generating", "scoring", "updating", "syncing")
LEARNER_PHASES = PHASES[1:3]
"""The phases in which a learner's models compute."""
CONFIG_SECTIONS = {"policy": "policy", "reference": "ref", "critic": "critic"}
"""Role -> its section of trainer.*"""
_OPTIMIZER = "optimizer"
_HEAD, _LAYERS, _EMBEDDINGS = "head", "layers", "embeddings"
"""Moments of a pass, each with its own peak. Roles run their passes one after another, too."""
_STAGES = (_HEAD, _LAYERS, _EMBEDDINGS)
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEEPSPEED_BUCKET = 500_000_000
"""Elements: DeepSpeed's default for `reduce_bucket_size`."""
_DEEPSPEED_PREFETCH, _DEEPSPEED_REUSE = 50_000_000, 1_000_000_000
"""Elements: DeepSpeed's defaults for `stage3_prefetch_bucket_size` and `stage3_max_reuse_distance`."""
_CPU_CACHE_BYTES = 4 << 30
"""The most that vLLM and SGLang take for keys and values on a CPU: see their arguments.py."""


def memory_capacity(device: str) -> int | None:
    """Bytes of this machine's smallest accelerator, or for "cpu" of its main memory (of the cgroup's limit if lower).

    None if it cannot be found out. Touches no accelerator: a driver must not allocate memory there.
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
    """One parameter; tied parameters are a single Weight."""

    shape: tuple[int, ...]
    trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard_numel(self, ranks: int) -> int:
        """Elements on the fullest of `ranks`: FSDP2 cuts the first dimension into equal pieces, except the last."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


def numel(weights: Iterable[ParameterShape], ranks: int = 1) -> int:
    """Elements of all `weights` on the fullest of `ranks`."""
    return sum(weight.shard_numel(ranks) for weight in weights)


@dataclass(frozen=True)
class ModelShape:
    """The sizes of a model, or with tensor parallelism of one rank's part of it."""

    layers: tuple[tuple[ParameterShape, ...], ...]
    """The weights of each decoder layer: the units in which a strategy gathers them."""
    root: tuple[ParameterShape, ...]
    """All other weights: embeddings, the last norm, the head unless it is tied."""
    hidden: int
    intermediate: int
    """The MLP's width; for a mixture of experts the sum over the experts that a token uses."""
    heads: int
    key_value_heads: int
    head_dim: int
    vocab: int
    """0 for a model without logits."""
    tied: bool
    max_positions: int
    normed: int
    """Numbers per token that one layer's norms read, except those of queries and keys."""
    normed_heads: int
    """The same for norms of queries and keys; 0 without these."""
    experts_per_token: int
    softcapped: bool
    """Attention scores are materialised: see ragged_attention._softcapped."""

    @property
    def weights(self) -> tuple[ParameterShape, ...]:
        return (*self.root, *(weight for layer in self.layers for weight in layer))

    @property
    def largest_layer(self) -> int:
        """Elements of the largest layer."""
        return max((numel(layer) for layer in self.layers), default=0)

    @property
    def head(self) -> int:
        """Elements of the LM head."""
        return self.vocab * self.hidden

    @property
    def head_trained(self) -> bool:
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
    """Return the shapes of the model that a worker builds from the same settings, from its configuration alone.

    Args:
        kind: A causal language model, its body with a value head, or a sequence classifier (all in `root`).
        parts: The ranks that layers are divided over.

    Raises:
        ConfigError: There is nothing to load, or the model cannot be trained; names `key`.
    """
    # A plan is made many times, see memory_fit.py, and reading a configuration and building its model take long.
    same = path, key, repr((overrides, rope_scaling, rope_theta, lora)), kind, tensor_parallel_size
    if same not in _shapes:
        config = load_config(path, key=key, overrides=overrides, rope_scaling=rope_scaling, rope_theta=rope_theta)
        what = "classifier" if kind == "reward" else "causal language model"
        try:
            _shapes[same] = _shape_of(config, key, lora, kind, tensor_parallel_size)
        except ValueError as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"{key}={path!r} is no {what}. ({str(error).splitlines()[0]})") from error
    return _shapes[same]


def _shape_of(
    config: PreTrainedConfig, key: str, lora: LoraConfig | None, kind: str, tensor_parallel_size: int
) -> ModelShape:
    text = config.get_text_config()
    hidden, vocab = int(getattr(text, "hidden_size", None) or 0), 0
    layers: list[torch.nn.Module] = []
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
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    experts = int(getattr(text, "num_experts_per_tok", None) or 0)
    dense = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    moe = int(getattr(text, "moe_intermediate_size", None) or dense)
    shared = int(getattr(text, "shared_expert_intermediate_size", None) or 0)
    heads = int(getattr(text, "num_attention_heads", None) or 1)
    key_value_heads = max(get_layer_sizes(text, "num_key_value_heads"), default=heads) // tensor_parallel_size
    head_dim = max(get_layer_sizes(text, "head_dim"), default=hidden // heads)
    # One-dimensional weights are of norms; those that are not as wide as the stream are of queries and keys.
    named = layers[0].named_parameters() if layers else ()
    norms = [len(weight) for name, weight in named if weight.ndim == 1 and name.endswith("weight")]
    return ModelShape(
        layers=tuple(tuple(_weight(parameter) for parameter in layer.parameters()) for layer in layers),
        root=(*(_weight(parameter) for parameter in scored.parameters() if id(parameter) not in inside), *root),
        hidden=hidden,
        intermediate=(experts * moe + shared if experts else dense) // tensor_parallel_size,
        heads=heads // tensor_parallel_size,
        key_value_heads=key_value_heads,
        head_dim=head_dim,
        vocab=vocab,
        tied=bool(getattr(text, "tie_word_embeddings", False)),
        max_positions=int(getattr(text, "max_position_embeddings", None) or 1 << 20),
        normed=hidden * norms.count(hidden),
        normed_heads=(heads // tensor_parallel_size + key_value_heads) * head_dim if set(norms) - {hidden} else 0,
        experts_per_token=experts,
        softcapped=getattr(text, "attn_logit_softcapping", None) is not None,
    )


def _weight(parameter: torch.nn.Parameter) -> ParameterShape:
    return ParameterShape(tuple(parameter.shape), parameter.requires_grad)


# -- plan


@dataclass(frozen=True)
class MemoryItem:
    """One item in the memory of one slot."""

    role: str
    name: str
    note: str
    sizes: Mapping[str, int]
    """Moment of a pass -> bytes; the key "" means all the time."""
    phases: tuple[str, ...] = PHASES
    exact: bool = False
    on_host: bool = False
    """True if it is in the host's memory although the slot is an accelerator."""

    @property
    def size(self) -> int:
        return max(self.sizes.values())


@dataclass(frozen=True)
class SlotMemoryPlan:
    """The memory of one kind of slot: that of the fullest slot of this kind."""

    name: str
    """The roles that share it."""
    count: int
    items: tuple[MemoryItem, ...]

    def total(self, phase: str, *, on_host: bool = False, role: str | None = None) -> int:
        """Bytes at the peak of a phase: everything that is there all the time, plus the moment that needs most."""
        moments: dict[tuple[str, str], int] = {}
        for line in self.items:
            if phase not in line.phases or line.on_host != on_host or role not in (None, line.role):
                continue
            for moment, size in line.sizes.items():
                at = (line.role, moment) if moment else ("", "")
                moments[at] = moments.get(at, 0) + size
        return moments.pop(("", ""), 0) + max(moments.values(), default=0)

    def peak(self, *, on_host: bool = False, role: str | None = None) -> tuple[int, str]:
        """(bytes, phase) of the phase that needs most."""
        return max((self.total(phase, on_host=on_host, role=role), phase) for phase in PHASES)

    @property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(line.role for line in self.items))


@dataclass(frozen=True)
class _MicroBatch:
    """The largest micro-batch of a rank."""

    tokens: int
    """Tokens that the rank computes."""
    scored_tokens: int
    """Those of them that the head scores."""
    kv_tokens: int
    """Tokens whose keys and values attention reads: a prompt that samples share counts once for each of them."""
    several: bool
    """True if the rank runs more than one micro-batch."""


class ModelRank:
    """One rank of the policy, the reference model or the critic."""

    def __init__(self, cfg: Config, role: str, ranks: int, capacity: int | None) -> None:
        """`capacity`: bytes of an accelerator, on which the head's chunks depend; None if unknown."""
        trainer = cfg.trainer
        section: PolicyConfig | RefConfig | CriticConfig = getattr(trainer, CONFIG_SECTIONS[role])
        self.cfg, self.role, self.ranks, self.section = cfg, role, ranks, section
        self.on_gpu = cfg.device == "cuda"
        self.fsdp = section.fsdp_config if trainer.strategy in ("fsdp", "fsdp2") else None
        self.deepspeed = section.deepspeed_config if trainer.strategy == "deepspeed" else None
        self.tensor_parallel_size = section.tensor_parallel_size
        """The ranks that each layer is divided over."""
        chosen = self.fsdp.fsdp_size if self.fsdp is not None else -1
        self.num_shards = ranks // self.tensor_parallel_size if chosen == -1 else chosen
        """The ranks that gradients are sharded over, and parameters too except with ZeRO 2."""
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

    def shape_of(self, tensor_parallel_size: int) -> ModelShape:
        """The model's shapes if layers are divided over `parts` ranks."""
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
        trainer = self.cfg.trainer
        yield from self._persistent_items()
        yield from self._scoring_items(
            self._micro_batch(trainer.micro_forward_batch_size_per_gpu, trainer.train_batch_size)
        )
        if self.role != "reference":
            prompts = trainer.critic_mini_batch_size if self.role == "critic" else trainer.policy_mini_batch_size
            yield from self._update_items(self._micro_batch(trainer.micro_train_batch_size_per_gpu, prompts))

    def _micro_batch(self, sequences: int | None, prompts: int) -> _MicroBatch:
        """A pass of `sequences`, or of max_tokens_per_microbatch tokens, when the samples of `prompts` are sharded.

        A parallel group shares every micro-batch: with sequence parallelism each rank runs a part of its tokens, with
        tensor parallelism all of them with a part of the layers. Either way it scores its share of the tokens.
        """
        trainer, generator, longest = self.cfg.trainer, self.cfg.generator, max_sequence_length(self.cfg.generator)
        over = self.section.sequence_parallel_size
        group = over * self.tensor_parallel_size
        samples = min(prompts, trainer.train_batch_size) * generator.n_samples_per_prompt
        available = -(-samples * group // self.ranks) * longest
        budget = trainer.max_tokens_per_microbatch
        tokens = min(max(budget, longest) if budget else (sequences or 1) * longest, available)
        shares = budget and generator.n_samples_per_prompt > 1 and trainer.share_prompt is not False
        seen = min(MAX_ATTENDED_RATIO * tokens, available) if shares else tokens
        # Only where sequences are counted, and have one response each, is it known how much of them is response.
        response = longest if budget or generator.max_turns > 1 else generator.sampling_params.max_generate_length
        scored = tokens * response // longest
        return _MicroBatch(-(-tokens // over), -(-scored // group), -(-seen // over), available > tokens)

    def _persistent_items(self) -> Iterator[MemoryItem]:
        """Memory that is held between passes.

        DeepSpeed keeps parameters in the compute dtype and, with the optimizer's state, a float32 copy of a shard.
        """
        weights, trained, moments = self.shape.weights, self.trained, "AdamW: 2 float32 moments"
        shard = 1 if self.deepspeed is not None and self.deepspeed.zero_stage != 3 else self.num_shards
        count, learnt = numel(weights), numel(trained)
        kinds = {"trained": learnt, "frozen": count - learnt}
        note = ", ".join(f"{size / 1e6:,.1f} M {kind}" for kind, size in kinds.items() if size)
        note += f", one of {self.tensor_parallel_size} parts of layers" if self.tensor_parallel_size > 1 else ""
        note += f", over {shard} ranks" if shard > 1 else ""
        if (zero := self.deepspeed) is not None:
            yield from self._persistent(
                "parameters", self.compute_bytes * -(-count // shard), note, zero.offload_parameters
            )
            if trained:
                part = FP32 * -(-learnt // self.ranks)
                yield from self._persistent("master weights", part, "float32", zero.offload_optimizer)
                yield from self._persistent(_OPTIMIZER, 2 * part, moments, zero.offload_optimizer)
            return
        offload, held = self.fsdp is not None and self.fsdp.cpu_offload, numel(trained, shard)
        frozen = self.compute_bytes * (numel(weights, shard) - held)
        yield from self._persistent("parameters", FP32 * held + frozen, note, offload)
        if trained:
            yield from self._persistent(_OPTIMIZER, 2 * FP32 * held + FP32 * len(trained), moments, offload)

    def _persistent(self, name: str, size: int, note: str, offload: bool) -> Iterator[MemoryItem]:
        """On the device, or in host memory if it is offloaded.

        A role that leaves the device while engines generate comes back to learn; the policy's weights also to be sent.
        """
        zero = self.deepspeed is not None
        line = MemoryItem(self.role, name, note, {"": size}, exact=not zero)
        if offload and self.on_gpu:
            yield replace(line, on_host=True)
        elif shares_gpu_memory(self.cfg):
            phases = (*LEARNER_PHASES, "syncing") if self.role == "policy" and name != _OPTIMIZER else LEARNER_PHASES
            yield replace(line, phases=phases)
            away = tuple(phase for phase in PHASES if phase not in phases)
            yield replace(line, phases=away if zero else PHASES, on_host=True)  # FSDP2's host buffers stay
        else:
            yield line

    def _scoring_items(self, work: _MicroBatch) -> Iterator[MemoryItem]:
        yield from self._gathered("scoring")
        widest = (
            3 * work.tokens * (self.compute_bytes * self.shape.intermediate + self.residual_bytes * self.shape.hidden)
        )
        yield self._item("scoring", "activations", f"{work.tokens:,} tokens, one layer", {_LAYERS: widest})
        yield self._head_item("scoring", work)

    def _update_items(self, work: _MicroBatch) -> Iterator[MemoryItem]:
        shape, fsdp, recomputes = self.shape, self.fsdp, self.cfg.trainer.gradient_checkpointing
        whole = self.reduces_once and work.several
        note = "float32" + (", whole until the last micro-batch" if whole and self.num_shards > 1 else "")
        held = dict.fromkeys(_STAGES, FP32 * numel(self.trained, 1 if whole else self.num_shards))
        offloads = fsdp is not None and fsdp.cpu_offload and self.on_gpu and not whole
        line = self._item("updating", "gradients", note, held)
        yield replace(line, exact=self.deepspeed is None, on_host=offloads)
        yield self._item("updating", "gradients under way", "before they are added", self._fresh_gradients(whole))
        yield from self._gathered("updating")
        layer, inputs = self._layer_bytes(work), work.tokens * self.residual_bytes * shape.hidden
        saved = len(shape.layers) * (inputs if recomputes else layer) + 3 * inputs  # and those of the last norm
        note = f"{work.tokens:,} tokens, " + ("layers' inputs" if recomputes else "all layers")
        yield self._item("updating", "activations", note, {_HEAD: saved, _LAYERS: saved})
        key_value = (
            (work.kv_tokens - work.tokens) * shape.key_value_heads * shape.head_dim * (2 * self.compute_bytes + FP32)
        )
        backward = (
            work.tokens * self.compute_bytes * shape.intermediate + inputs + key_value + (layer if recomputes else 0)
        )
        note = "a layer, computed again" if recomputes else "a layer's gradients"
        yield self._item("updating", "backward of a layer", note, {_LAYERS: backward})
        yield self._head_item("updating", work)

    def _item(self, phase: str, name: str, note: str, sizes: Mapping[str, int]) -> MemoryItem:
        return MemoryItem(self.role, name, note, sizes, (phase,))

    def _layer_bytes(self, work: _MicroBatch) -> int:
        """Bytes that one layer saves for backward.

        A norm saves its input and the normalised input in float32, and its output; attention saves queries, keys,
        values and two copies of its result; the MLP saves four tensors of its width, and experts their inputs.
        """
        shape, size = self.shape, self.compute_bytes
        numbers = 3 * shape.heads * shape.head_dim + 4 * shape.intermediate + 2 * shape.hidden * shape.experts_per_token
        each = size * numbers + shape.normed * (FP32 + 2 * self.residual_bytes) + shape.normed_heads * (FP32 + size)
        if shape.softcapped:  # the results of tanh and softmax
            each += 2 * FP32 * shape.heads * max_sequence_length(self.cfg.generator)
        return work.tokens * each + work.kv_tokens * 2 * size * shape.key_value_heads * shape.head_dim

    def _head_item(self, phase: str, work: _MicroBatch) -> MemoryItem:
        """Two copies of a chunk of float32 logits, in an update also those kept for backward; or a critic's values."""
        shape, device, updates = self.shape, self.cfg.device, phase == "updating"
        if not shape.vocab:
            size = 2 * work.scored_tokens * shape.hidden * FP32
            return self._item(phase, "values", "float32 hidden states", {_HEAD: size})
        rows = max(1, self.chunk_bytes // (FP32 * shape.vocab))
        kept = min(CACHED_CHUNKS[device] if updates else 0, -(-work.scored_tokens // rows))
        chunk = min(rows, work.scored_tokens) * shape.vocab
        size = 2 * FP32 * chunk + FP32 * min(kept * rows, work.scored_tokens) * shape.vocab
        size += work.scored_tokens * shape.hidden * self.compute_bytes
        if updates and shape.softcapped:  # the gradient of the cap needs the logits as they were
            size += FP32 * chunk
        if updates and self.compute_bytes < FP32:  # gradients before they are added up in float32
            size += self.compute_bytes * (chunk + (shape.head if shape.head_trained else 0))
        note = f"chunks of {min(work.scored_tokens, rows):,} x {shape.vocab:,}" + (f", {kept} kept" if updates else "")
        return self._item(phase, "logits", note, {_HEAD: size})

    def _gathered(self, phase: str) -> Iterator[MemoryItem]:
        """The weights used in computation, if they are not the parameters themselves.

        With FSDP2: the root all the time, and of the layers the current one, the next one, and the buffer in which that
        is gathered; all layers if they are not resharded after forward. ZeRO 3 prefetches one bucket, and keeps the
        last layers, which backward reuses within `stage3_max_reuse_distance` elements of forward and backward.
        Autocast keeps a copy of all weights.
        """
        count, largest = len(self.shape.layers), self.shape.largest_layer
        if self.deepspeed is not None and self.deepspeed.zero_stage == 3:
            options, layers = self.deepspeed.zero_optimization, sum(numel(layer) for layer in self.shape.layers)
            ahead = int(options.get("stage3_prefetch_bucket_size", _DEEPSPEED_PREFETCH))
            reach = int(options.get("stage3_max_reuse_distance", _DEEPSPEED_REUSE))
            elements = min(layers, max(reach // 2 if phase == "updating" else 0, largest) + ahead)
            note = f"root and {elements / 1e6:,.1f} M of {layers / 1e6:,.1f} M in layers"
        elif self.fsdp is not None:
            few = 1 if self.num_shards == 1 else min(3, count)
            some = few if self.reshards else count
            elements, note = some * largest, f"root and {some} of {count} layers"
        elif self.autocasts and self.trained:
            elements, note = count * largest, "autocast's copy"
        else:
            return
        size = self.compute_bytes * (numel(self.shape.root) + elements)
        yield self._item(phase, "gathered weights", note, dict.fromkeys(_STAGES, size))

    def _fresh_gradients(self, whole: bool) -> dict[str, int]:
        """Gradients that were just computed and are not added up yet.

        If the head is tied, its gradient is kept until that of the embeddings. There are those of a whole layer, which
        FSDP2 reduces in float32 unless gradients are `whole`; DeepSpeed collects them in buckets of a fixed size.
        """
        shape, each = self.shape, self.residual_bytes
        head = FP32 * shape.head if shape.head_trained else 0
        waiting = head if shape.tied else 0
        if self.deepspeed is not None:
            elements = int(self.deepspeed.zero_optimization.get("reduce_bucket_size", _DEEPSPEED_BUCKET))
            bucket = each * elements * (2 if self.on_gpu else 1)
            return {_HEAD: bucket + head, _LAYERS: bucket + waiting, _EMBEDDINGS: bucket + waiting + head}
        each += FP32 if self.fsdp is not None and not whole else 0
        layer = max((numel(weight for weight in layer if weight.trained) for layer in shape.layers), default=0)
        root = numel(weight for weight in shape.root if weight.trained)
        return {_HEAD: head, _LAYERS: waiting + each * layer, _EMBEDDINGS: waiting + each * root}


def print_memory_plan(cfg: Config, objective_spec: ObjectiveSpec) -> None:
    """Print the plan of a run that begins, one note per role on stderr.

    A plan that cannot be made must not stop a run: engines and strategies understand free-form settings better.
    """
    try:
        lines = summary(memory_plan(cfg, memory_capacity(cfg.device), objective_spec))
    except ConfigError:
        raise
    except Exception as error:
        lines = [f"no memory plan: {type(error).__name__}: {error}"]
    for line in lines:
        print_stderr(f"note: {line}")


def summary(plans: Sequence[SlotMemoryPlan]) -> list[str]:
    """One line per role, to compare with a run's measurements (memory/*)."""
    described = []
    for plan in plans:
        for role in plan.roles:
            size, phase = plan.peak(role=role)
            held = [line for line in plan.items if line.role == role and phase in line.phases and not line.on_host]
            parts = ", ".join(f"{line.name} {line.size / 2**30:.3f}" for line in held)
            described.append(f"memory plan: {role}: {size / 2**30:.3f} GiB a slot at most, while {phase} ({parts})")
    return list(dict.fromkeys(described))  # a role may have slots of two kinds


def memory_plan(
    cfg: Config, capacity: int | None = None, objective_spec: ObjectiveSpec | None = None
) -> list[SlotMemoryPlan]:
    """Return one plan for every kind of slot.

    Reads the models' configurations, if necessary from the hub.

    Args:
        capacity: Bytes of an accelerator, of which vLLM and SGLang take a share, and a chunk of logits another.

    Raises:
        ConfigError: A model cannot be loaded, or as `policy_learning` does.
    """
    models = model_ranks(cfg, capacity, build_policy_objective_spec(cfg) if objective_spec is None else objective_spec)
    placement, generator = cfg.trainer.placement, cfg.generator
    shares = {"policy"} | {role for role in ("reference", "critic") if is_colocated(placement, CONFIG_SECTIONS[role])}
    home = [line for model in models if model.role in shares for line in model.items()]
    home += _bucket_items(cfg, models[0].shape_of(tensor_parallel_size=1), "policy")
    names = [model.role for model in models if model.role in shares]
    reward, reward_shares = tuple(_reward_items(cfg)), is_colocated(placement, "reward")
    if reward and reward_shares:
        home += reward
        names.append("reward model")
    engine = tuple(_engine_items(cfg, capacity)) if generator.run_engines_locally else ()
    slots = generator.num_inference_engines * gpus_per_engine(generator) if engine else 0
    both = min(models[0].ranks, slots) if has_colocated_engines(cfg) else 0
    plans = [
        SlotMemoryPlan(" + ".join([*names, "engine"]), both, (*home, *engine)),
        SlotMemoryPlan(" + ".join(names), models[0].ranks - both, tuple(home)),
        *(
            SlotMemoryPlan(model.role, model.ranks, tuple(model.items()))
            for model in models
            if model.role not in shares
        ),
        SlotMemoryPlan("reward model", num_ranks(placement, "reward") if reward and not reward_shares else 0, reward),
        SlotMemoryPlan("engine", slots - both, engine),
    ]
    return [plan for plan in plans if plan.count]


def model_ranks(cfg: Config, capacity: int | None, objective_spec: ObjectiveSpec) -> list[ModelRank]:
    """Return a rank of each of the learner's models, the policy first."""
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
    """One replica, which scores one conversation at a time and is never moved; none without a reward model."""
    reward, tokens = cfg.trainer.reward, max_sequence_length(cfg.generator)
    if reward.model.path is None:
        return
    shape = model_shape(reward.model.path, key=REWARD_PATH_KEY, overrides=reward.model_config_kwargs, kind="reward")
    size, weights = 2 if cfg.trainer.bf16 else FP32, numel(shape.weights)
    yield MemoryItem("reward model", "parameters", f"{weights / 1e6:,.1f} M frozen", {"": size * weights}, exact=True)
    layer = {_LAYERS: 3 * tokens * size * (shape.intermediate + shape.hidden)}
    yield MemoryItem("reward model", "activations", f"{tokens:,} tokens, one layer", layer, ("generating",))


def _engine_items(cfg: Config, capacity: int | None) -> Iterator[MemoryItem]:
    """The most that weights, keys and values may take.

    Awake, vLLM and SGLang hold a share of an accelerator, however much they need. Asleep until a sync that replaces
    their weights, engines free all of it, and but for `transformers` keep no copy; else only vLLM does, with a copy.
    """
    generator, on_gpu = cfg.generator, cfg.device == "cuda"
    rope = {"rope_scaling": generator.rope_scaling, "rope_theta": generator.rope_theta}
    shape = model_shape(generator.model_name, key="generator.model_name", **rope)  # type: ignore[arg-type]
    parts = generator.inference_engine_tensor_parallel_size * generator.inference_engine_pipeline_parallel_size
    size = _BYTES[generator.model_dtype]
    weights = -(-numel(shape.weights) * size // parts)
    moves = shares_gpu_memory(cfg)
    note = f"{generator.model_dtype}" + (f", over {parts} slots" if parts > 1 else "")
    line = MemoryItem("engine", "weights", note, {"": weights}, exact=parts == 1)
    replaced = sync_replaces_all_weights(cfg)
    if moves and (replaced or generator.backend == "vllm"):
        yield replace(line, phases=("generating", "syncing"))
        if generator.backend == "transformers" or not replaced:
            yield replace(line, phases=LEARNER_PHASES, on_host=True)
    else:
        yield line
    note, cache = _cache(cfg, shape, parts, weights, capacity if on_gpu else None)
    yield MemoryItem("engine", "KV cache", note, {"": cache}, ("generating",) if moves else PHASES)
    if resolve_weight_sync_route(cfg) == "broadcast":
        yield from _bucket_items(cfg, shape, "engine")


def _cache(cfg: Config, shape: ModelShape, parts: int, weights: int, capacity: int | None) -> tuple[str, int]:
    """A note on what the keys and values are for, and their bytes in one slot."""
    generator = cfg.generator
    size = 4 if generator.backend == "vllm" and cfg.device == "cpu" else _BYTES[generator.model_dtype]
    per_token = max(1, 2 * len(shape.layers) * shape.key_value_heads * shape.head_dim * size // parts)
    new, old = generator.sampling_params.max_generate_length, generator.max_input_length
    samples = generator.n_samples_per_prompt
    wanted = -(-cfg.trainer.train_batch_size * samples // generator.num_inference_engines)
    sequences = min(generator.max_num_seqs, wanted)
    if generator.backend == "transformers":  # a prompt once for all of its samples
        note = f"{sequences} sequences, {per_token / 1024:,.1f} KiB a token"
        return note, per_token * (sequences * new + -(-sequences // samples) * old)
    if cfg.device == "cpu":
        length = generator.engine_init_kwargs.get("max_model_len") or shape.max_positions
        most = per_token * generator.max_num_seqs * length
        return "as many full sequences as max_num_seqs, up to 4 GiB", min(most, _CPU_CACHE_BYTES)
    if capacity is None:
        return f"{sequences} sequences of {old + new}", per_token * sequences * (old + new)
    free = max(0, int(generator.gpu_memory_utilization * capacity) - weights)
    room = free // (per_token * (old + new))
    share = f"gpu_memory_utilization={generator.gpu_memory_utilization:g}"
    note = f"{share}: room for {room:,} sequences, {sequences:,} wanted"
    return note, free


def _bucket_items(cfg: Config, shape: ModelShape, role: str) -> list[MemoryItem]:
    """Two buckets that are used in turn and stay allocated, and on the trainer the tensor being copied into one."""
    generator = cfg.generator
    wire = _BYTES[generator.model_dtype]
    limit = int(generator.weight_transfer_threshold_cuda_ipc_GB * 2**30)
    on_device = resolve_weight_sync_route(cfg) in ("broadcast", "ipc")
    if cfg.device == "cpu" and on_device:
        limit = min(limit, MAX_CPU_BUCKET_BYTES)
    total, largest = numel(shape.weights), max(weight.numel for weight in shape.weights)
    bucket = max(min(limit, wire * total), wire * largest)
    on_host = cfg.device == "cuda" and not on_device
    lines = [MemoryItem(role, "weight-sync buckets", "2, kept", {"": 2 * bucket}, on_host=on_host)]
    if role == "policy":
        whole = {"": (FP32 + wire) * largest}
        lines.append(MemoryItem(role, "tensor being sent", "the largest, gathered and cast", whole, ("syncing",)))
    return lines
