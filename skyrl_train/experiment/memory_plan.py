"""Predicts the memory of every slot in every phase of a step, from the configuration and the models' shapes.

Parameters, gradients and optimizer state are exact; lines marked as estimates follow from the formulas below. No
weights are loaded. Not counted: libraries and the interpreter (0.3 to 1 GiB of host memory per process), the CUDA
context (about 0.5 GiB) and fragmentation.

Legend: T tokens of a micro-batch, h hidden size, i intermediate size, q = heads x head size, k = key/value heads x head
size, V vocabulary, a bytes of a number in the compute dtype (`Settings.a`). "Saved" tensors are those that autograd
keeps for backward; each counts once, however many operations use it.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from skyrl_train.config.predicates import (
    has_colocated_engines,
    is_colocated,
    longest_sequence,
    num_ranks,
    replaces_weights,
    shares_memory,
    slots_per_engine,
    weight_route,
)
from skyrl_train.config.schema import (
    Config,
    CriticConfig,
    DeepSpeedConfig,
    FSDPConfig,
    LoraConfig,
    PolicyConfig,
    RefConfig,
)
from skyrl_train.data.batch import MAX_REACH
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.algorithm import Learning, policy_learning
from skyrl_train.messages import to_stderr
from skyrl_train.models.layer_sizes import sizes_of_layers
from skyrl_train.models.loading import POLICY_PATH, REWARD_PATH, load_config, model_without_memory
from skyrl_train.models.lora import Adapters
from skyrl_train.models.ragged_model import RaggedModel, linear_head
from skyrl_train.models.rank_group import planned_group
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.models.token_scorer import KEPT_CHUNKS, chunk_bytes
from skyrl_train.weight_sync.sender import CPU_BUCKET

FP32 = 4
"""Bytes of a float32: the dtype of log-softmax, of norms internally, and of everything trained."""
_LOGIT_COPIES = 2
"""Copies of a chunk of logits: the logits and their softmax. See models/sampled_logprobs.py."""
PHASES = ("generating", "scoring", "updating", "syncing")
LEARNING = PHASES[1:3]
"""The phases in which a learner's models compute."""
_OPTIMIZER = "optimizer"
_HEAD, _LAYERS, _EMBEDDINGS = "head", "layers", "embeddings"
"""Moments of a pass, each with its own peak. Roles run their passes one after another, too."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DEEPSPEED_BUCKET = 500_000_000
"""Elements: DeepSpeed's default for `reduce_bucket_size`."""
_DEEPSPEED_PREFETCH, _DEEPSPEED_REUSE = 50_000_000, 1_000_000_000
"""Elements: DeepSpeed's defaults for `stage3_prefetch_bucket_size` and `stage3_max_reuse_distance`."""
_CPU_CACHE_BYTES = 4 << 30
"""The most that vLLM and SGLang take for keys and values on a CPU: see their arguments.py."""


def capacity_of(device: str) -> int | None:
    """Bytes of this machine's smallest accelerator, or for "cpu" of its main memory (of the cgroup's limit if lower).

    None if it cannot be found out. Touches no accelerator: a driver must not allocate memory there.
    """
    if device == "cuda":
        sizes = _accelerators()
        return min(sizes) << 20 if sizes else None
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else ""
    return min(total, int(text)) if text.isdigit() else total


def _accelerators() -> list[int]:
    """MiB of every accelerator; empty if nvidia-smi does not answer."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [int(line) for line in listed.split() if line.isdigit()]


# -- shapes


@dataclass(frozen=True)
class Weight:
    """One parameter; tied parameters are a single Weight."""

    shape: tuple[int, ...]
    trained: bool = True

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def shard(self, ranks: int) -> int:
        """Elements on the fullest of `ranks`: FSDP2 cuts the first dimension into equal pieces, but for the last."""
        return -(-self.shape[0] // ranks) * math.prod(self.shape[1:])


def numel(weights: Iterable[Weight], ranks: int = 1) -> int:
    """Elements of all `weights` on the fullest of `ranks`."""
    return sum(weight.shard(ranks) for weight in weights)


@dataclass(frozen=True)
class ModelShape:
    """A causal language model, or its body with a value head."""

    layers: tuple[tuple[Weight, ...], ...]
    """The weights of every decoder layer: the units in which a strategy gathers them."""
    root: tuple[Weight, ...]
    """All other weights: embeddings, the last norm, the head unless it is tied."""
    norms: tuple[int, ...]
    """Widths of one layer's norms."""
    hidden: int
    intermediate: int
    """The MLP's width; for a mixture of experts the sum over the experts that a token uses."""
    heads: int
    key_value_heads: int
    head_dim: int
    vocab: int
    """0 for a critic: it has no logits."""
    tied: bool
    max_positions: int
    experts_per_token: int = 0
    softcapped: bool = False
    """Attention scores are materialised: see ragged_attention._softcapped."""

    @property
    def weights(self) -> tuple[Weight, ...]:
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

    def kv_bytes_per_token(self, size: int) -> int:
        """Bytes of one token's keys and values in all layers, with `size` bytes per number."""
        return 2 * len(self.layers) * self.key_value_heads * self.head_dim * size


def model_shape(
    path: str,
    *,
    key: str,
    overrides: Mapping[str, Any] | None = None,
    rope_scaling: Mapping[str, Any] | None = None,
    rope_theta: float | None = None,
    lora: LoraConfig | None = None,
    critic: bool = False,
    parts: int = 1,
) -> ModelShape:
    """The shapes of the model that LearnerWorker builds from the same settings, from the model's configuration alone.

    If layers are divided into `parts`, these are the shapes of one rank's part. Raises ConfigError naming `key` if
    there is nothing to load, or for a model that cannot be trained.
    """
    config = load_config(path, key=key, overrides=overrides, rope_scaling=rope_scaling, rope_theta=rope_theta)
    # A plan is made many times, see memory_fit.py, and to build a model takes long even without its weights.
    same = config.to_json_string(use_diff=False), repr(lora), critic, parts
    if same not in _shapes:
        _shapes[same] = _shape_of(config, path, key, lora, critic, parts)
    return _shapes[same]


_shapes: dict[tuple[str, str, bool, int], ModelShape] = {}


def _shape_of(
    config: PreTrainedConfig, path: str, key: str, lora: LoraConfig | None, critic: bool, parts: int
) -> ModelShape:
    try:
        with torch.device("meta"):
            model = model_without_memory(config, torch.float32)
            head = linear_head(model)
            if lora is not None and lora.rank:
                Adapters(model, lora, key.removesuffix("path") + "lora")
            scored = RaggedModel(model.base_model if critic else model)  # type: ignore[arg-type]
            if parts > 1:
                size_key = key.removesuffix("model.path") + "tensor_parallel_size"
                planned_group(TensorParallel, parts, size_key).divide(scored.model)  # type: ignore[arg-type]
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{key}={path!r} is no causal language model. ({str(error).splitlines()[0]})") from error
    layers = scored.decoder_layers()
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    root = [_weight(parameter) for parameter in scored.parameters() if id(parameter) not in inside]
    text = config.get_text_config()
    experts = int(getattr(text, "num_experts_per_tok", None) or 0)
    heads = int(text.num_attention_heads)
    return ModelShape(
        layers=tuple(tuple(_weight(parameter) for parameter in layer.parameters()) for layer in layers),
        root=(*root, *([Weight((1, head.in_features))] if critic else [])),
        norms=_norms(layers),
        hidden=head.in_features,
        intermediate=_intermediate(text, experts, head.in_features) // parts,
        heads=heads // parts,
        key_value_heads=max(sizes_of_layers(text, "num_key_value_heads"), default=heads) // parts,
        head_dim=max(sizes_of_layers(text, "head_dim"), default=head.in_features // heads),
        vocab=0 if critic else head.out_features,
        tied=bool(model.config.get_text_config().tie_word_embeddings),
        max_positions=int(getattr(text, "max_position_embeddings", None) or 1 << 20),
        experts_per_token=experts,
        softcapped=getattr(text, "attn_logit_softcapping", None) is not None,
    )


def reward_model_shape(path: str, overrides: Mapping[str, Any]) -> ModelShape:
    """The shapes of the model that RewardWorker loads, all in `root`. Raises ConfigError as `model_shape` does."""
    config = load_config(path, key=REWARD_PATH, overrides=overrides)
    try:
        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    except ValueError as error:
        raise ConfigError(f"{REWARD_PATH}={path!r} is no classifier. ({str(error).splitlines()[0]})") from error
    text = config.get_text_config()
    experts, hidden, heads = (
        int(getattr(text, name, None) or 0) for name in ("num_experts_per_tok", "hidden_size", "num_attention_heads")
    )
    return ModelShape(
        layers=(),
        root=tuple(_weight(parameter) for parameter in model.parameters()),
        norms=(),
        hidden=hidden,
        intermediate=_intermediate(text, experts, hidden),
        heads=heads,
        key_value_heads=heads,
        head_dim=hidden // max(1, heads),
        vocab=0,
        tied=False,
        max_positions=int(getattr(text, "max_position_embeddings", None) or 1 << 20),
        experts_per_token=experts,
    )


def _weight(parameter: torch.nn.Parameter) -> Weight:
    return Weight(tuple(parameter.shape), parameter.requires_grad)


def _norms(layers: Sequence[torch.nn.Module]) -> tuple[int, ...]:
    """The widths of the first layer's norms: its one-dimensional weights (those of linear layers have two)."""
    named = layers[0].named_parameters() if layers else ()
    return tuple(len(weight) for name, weight in named if weight.ndim == 1 and name.endswith("weight"))


def _intermediate(text: Any, experts: int, hidden: int) -> int:
    dense = int(getattr(text, "intermediate_size", None) or 4 * hidden)
    if not experts:
        return dense
    shared = int(getattr(text, "shared_expert_intermediate_size", None) or 0)
    return experts * int(getattr(text, "moe_intermediate_size", None) or dense) + shared


@dataclass(frozen=True)
class Settings:
    """The settings of a model that determine the memory of a pass."""

    a: int
    """Bytes of a number in the compute dtype."""
    autocast: bool
    """The residual stream stays float32, and every linear layer casts what it reads."""
    on_gpu: bool
    gradient_checkpointing: bool
    longest: int
    """The most tokens that a sequence may have."""
    capacity: int | None = None
    """Bytes of an accelerator, on which the head's chunks depend; None if unknown."""

    @property
    def stream(self) -> int:
        """Bytes of a number in the residual stream."""
        return FP32 if self.autocast else self.a


def layer_bytes_per_token(shape: ModelShape, run: Settings) -> int:
    """Bytes saved per token in one decoder layer (estimate).

    - each norm over h saves its input in float32 (the residual stream itself or a copy), the normalised input and its
      output: 12 h if all is float32, 4 h + 2 a h if the stream is narrower; norms over q and k, in models that have
      them, do not save their output
    - q, k, v, gate and up read that output; with autocast each reads a copy of its own instead: 5 a h
    - attention saves its arguments and its result, 2 q + 2 k numbers, and a float32 log-sum per head; on CPUs the
      results of several runs are concatenated by a copy: q more
    - the MLP saves gate, its activation, up, and their product: 4 i; experts also save their input, 2 h each
    - softcapped scores: up to `longest` per head; the results of tanh, softmax and their cast are saved
    """
    a, query, key = run.a, shape.heads * shape.head_dim, shape.key_value_heads * shape.head_dim
    normed = FP32 + run.stream + (0 if run.autocast else a)
    norms = normed * shape.hidden * sum(1 for width in shape.norms if width == shape.hidden)
    if any(width != shape.hidden for width in shape.norms):
        norms += (query + key) * (FP32 + a)
    casts = 5 * a * shape.hidden if run.autocast else 0
    attention = a * ((2 if run.on_gpu else 3) * query + 2 * key) + FP32 * shape.heads
    mlp = a * (4 * shape.intermediate + 2 * shape.hidden * shape.experts_per_token)
    scores = (2 * a + FP32) * shape.heads * run.longest if shape.softcapped else 0
    return norms + casts + attention + mlp + scores


def saved_bytes(shape: ModelShape, tokens: int, seen: int, run: Settings) -> int:
    """Bytes saved for a micro-batch at the end of its forward (estimate).

    All that every layer saves, or with gradient checkpointing only every layer's input; also the last norm, the rotary
    tables, and the rows that the head reads. `seen`: the tokens whose keys and values attention reads.
    """
    of_layer = run.stream * shape.hidden if run.gradient_checkpointing else layer_bytes_per_token(shape, run)
    last = shape.hidden * (FP32 + 2 * run.stream) + 2 * shape.head_dim * run.stream
    repeated = 0 if run.gradient_checkpointing else len(shape.layers) * _repeated_bytes(shape, seen - tokens, run)
    return tokens * (len(shape.layers) * of_layer + last) + repeated


def _repeated_bytes(shape: ModelShape, tokens: int, run: Settings) -> int:
    """Bytes of one layer's keys and values of tokens that are read again: attention has a copy for every sample."""
    return tokens * 2 * run.a * shape.key_value_heads * shape.head_dim


def layer_backward_bytes(shape: ModelShape, tokens: int, seen: int, run: Settings) -> int:
    """Bytes that backward through one layer adds (estimate).

    Gradients of the MLP's product and of the residual stream; with gradient checkpointing also everything that the
    layer saves, as it is computed again. Where prompts are shared, the gradients of all `seen` keys and values, and of
    one of the two in float32 as they are added up.
    """
    again = layer_bytes_per_token(shape, run) if run.gradient_checkpointing else 0
    size = tokens * (again + run.a * shape.intermediate + run.stream * shape.hidden)
    if seen > tokens:
        size += seen * shape.key_value_heads * shape.head_dim * (2 * run.a + FP32)
        size += _repeated_bytes(shape, seen - tokens, run) if run.gradient_checkpointing else 0
    return size


def layer_forward_bytes(shape: ModelShape, tokens: int, run: Settings) -> int:
    """Bytes of a layer without gradient (estimate): the MLP's three widest tensors, the residual stream and a norm."""
    return tokens * 3 * (run.a * shape.intermediate + run.stream * shape.hidden)


def chunk_rows(shape: ModelShape, chunk_bytes: int) -> int:
    """Rows of a chunk of logits: see TokenScorer."""
    return max(1, chunk_bytes // (FP32 * max(1, shape.vocab)))


def head_bytes(shape: ModelShape, scored: int, a: int, chunk_bytes: int) -> int:
    """Bytes that the head adds to a pass (estimate): copies of one chunk of float32 logits, gradients of hidden rows.

    For a critic's head: a float32 copy of the hidden states, and its product with the weight.
    """
    if not shape.vocab:
        return 2 * scored * shape.hidden * FP32
    chunk = min(scored, chunk_rows(shape, chunk_bytes)) * shape.vocab * FP32
    return _LOGIT_COPIES * chunk + scored * shape.hidden * a


def head_backward_bytes(shape: ModelShape, scored: int, a: int, chunk_bytes: int, kept_chunks: int) -> int:
    """Bytes that the head adds to an update (estimate).

    In addition to `head_bytes`: the chunks that are kept, a copy of the logits if they are capped, and in half
    precision a chunk's gradient and its product with the states, which is then added up in float32.
    """
    size = head_bytes(shape, scored, a, chunk_bytes)
    if not shape.vocab:
        return size
    rows = chunk_rows(shape, chunk_bytes)
    chunk = min(scored, rows) * shape.vocab
    size += min(scored, kept_chunks * rows) * shape.vocab * FP32 + (FP32 * chunk if shape.softcapped else 0)
    if a < FP32:
        size += a * (chunk + (shape.head if shape.head_trained else 0))
    return size


# -- plan


@dataclass(frozen=True)
class MemoryLine:
    """One item in the memory of one slot."""

    role: str
    what: str
    note: str
    sizes: Mapping[str, int]
    """Moment of a pass -> bytes; the key "" means all the time."""
    phases: tuple[str, ...] = PHASES
    exact: bool = False
    on_host: bool = False
    """Whether it is in the host's memory although the slot is an accelerator."""

    @property
    def size(self) -> int:
        return max(self.sizes.values())


@dataclass(frozen=True)
class SlotPlan:
    """The memory of one kind of slot: that of the fullest slot of this kind."""

    name: str
    """The roles that share it."""
    count: int
    lines: tuple[MemoryLine, ...]

    def total(self, phase: str, *, on_host: bool = False, role: str | None = None) -> int:
        """Bytes at the peak of a phase: everything that is there all the time, plus the moment that needs most."""
        moments: dict[tuple[str, str], int] = {}
        for line in self.lines:
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
        return list(dict.fromkeys(line.role for line in self.lines))


@dataclass(frozen=True)
class _Pass:
    """The largest micro-batch of a rank."""

    tokens: int
    """That it computes."""
    scored: int
    """How many of these tokens are scored."""
    seen: int
    """Tokens whose keys and values attention reads: prompts that samples share count once for each."""
    several: bool
    """Whether the rank runs more than one micro-batch."""


@dataclass(frozen=True)
class ModelRank:
    """One rank of a policy, reference or critic."""

    role: str
    shape: ModelShape
    ranks: int
    parts: int
    """The number of ranks that every layer is divided over (tensor parallelism)."""
    fsdp_config: FSDPConfig | None
    """For trainer.strategy=fsdp2."""
    deepspeed_config: DeepSpeedConfig | None
    """For trainer.strategy=deepspeed; neither for single."""
    run: Settings
    leaves: bool
    """Whether it moves to host memory while engines generate."""
    update: _Pass | None
    """None for a frozen model."""
    score: _Pass

    @property
    def shard(self) -> int:
        """The number of ranks that one copy of a part is sharded over."""
        if self.fsdp_config is not None and self.fsdp_config.fsdp_size != -1:
            return self.fsdp_config.fsdp_size
        return self.ranks // self.parts

    @property
    def trained(self) -> tuple[Weight, ...]:
        return tuple(weight for weight in self.shape.weights if weight.trained) if self.update else ()

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced over ranks once per update: see FSDP2Strategy."""
        if self.fsdp_config is None:
            return False
        chosen = self.fsdp_config.reduce_once
        return not (self.run.on_gpu and self.reshards) if chosen is None else chosen

    @property
    def reshards(self) -> bool:
        """Whether FSDP2 frees gathered layers after forward."""
        return self.fsdp_config is not None and self.fsdp_config.reshard_after_forward is not False

    def lines(self) -> Iterator[MemoryLine]:
        if self.deepspeed_config is not None:
            yield from self._zero_lines(self.deepspeed_config)
        else:
            yield from self._held("parameters", self._parameter_bytes(), self._how_many(self.shard))
        if self.trained and self.deepspeed_config is None:
            held = numel(self.trained, self.shard)
            yield from self._held(_OPTIMIZER, 2 * FP32 * held + FP32 * len(self.trained), "AdamW: 2 float32 moments")
        yield from self._score_lines()
        if self.update is not None:
            yield from self._update_lines(self.update)

    def _zero_lines(self, zero: DeepSpeedConfig) -> Iterator[MemoryLine]:
        """DeepSpeed keeps parameters in the compute dtype; with its state, a float32 copy of this rank's part."""
        shard = self.ranks if zero.zero_stage == 3 else 1
        size = self.run.a * -(-numel(self.shape.weights) // shard)
        yield from self._held("parameters", size, self._how_many(shard), zero.offload_parameters, exact=False)
        if self.trained:
            size = FP32 * -(-numel(self.trained) // self.ranks)
            yield from self._held("master weights", size, "float32", zero.offload_optimizer, exact=False)
            note = "AdamW: 2 float32 moments"
            yield from self._held(_OPTIMIZER, 2 * size, note, zero.offload_optimizer, exact=False)

    def _parameter_bytes(self) -> int:
        trained = numel(self.trained, self.shard)
        return trained * FP32 + (numel(self.shape.weights, self.shard) - trained) * self.run.a

    def _how_many(self, shard: int) -> str:
        count, trained = numel(self.shape.weights), numel(self.trained)
        kinds = [f"{trained / 1e6:,.1f} M trained"] if trained else []
        if count > trained:
            kinds.append(f"{(count - trained) / 1e6:,.1f} M frozen")
        parts = f", one of {self.parts} parts of layers" if self.parts > 1 else ""
        return ", ".join(kinds) + parts + (f", over {shard} ranks" if shard > 1 else "")

    def _held(self, what: str, size: int, note: str, offload: bool = False, exact: bool = True) -> Iterator[MemoryLine]:
        """Memory held between passes: on the device, or in host memory if it is offloaded.

        A role that leaves the device comes back to learn, and of the policy its weights to be sent.
        """
        line = MemoryLine(self.role, what, note, {"": size}, exact=exact)
        if self.run.on_gpu and (offload or (self.fsdp_config is not None and self.fsdp_config.cpu_offload)):
            yield replace(line, on_host=True)
        elif self.leaves:
            sent = self.role == "policy" and what != _OPTIMIZER
            phases = (*LEARNING, "syncing") if sent else LEARNING
            yield replace(line, phases=phases)
            others = tuple(phase for phase in PHASES if phase not in phases)
            yield replace(
                line, phases=others if self.deepspeed_config else PHASES, on_host=True
            )  # in buffers that stay
        else:
            yield line

    def _update_lines(self, update: _Pass) -> Iterator[MemoryLine]:
        updating, shape, a = ("updating",), self.shape, self.run.a
        whole = self.reduces_once and update.several
        size = FP32 * numel(self.trained, 1 if whole else self.shard)
        always = dict.fromkeys((_HEAD, _LAYERS, _EMBEDDINGS), size)
        offloads = self.fsdp_config is not None and self.fsdp_config.cpu_offload and self.run.on_gpu and not whole
        note = "float32" + (", whole until the last micro-batch" if whole and self.shard > 1 else "")
        exact = self.deepspeed_config is None
        yield MemoryLine(self.role, "gradients", note, always, updating, exact=exact, on_host=offloads)
        yield MemoryLine(
            self.role, "gradients under way", "before they are added", self._fresh_gradients(update), updating
        )
        yield from self._gathered(updating)
        saved = saved_bytes(shape, update.tokens, update.seen, self.run)
        note = f"{update.tokens:,} tokens, " + ("layers' inputs" if self.run.gradient_checkpointing else "all layers")
        yield MemoryLine(self.role, "activations", note, {_HEAD: saved, _LAYERS: saved}, updating)
        again = layer_backward_bytes(shape, update.tokens, update.seen, self.run)
        what = "a layer, computed again" if self.run.gradient_checkpointing else "a layer's gradients"
        yield MemoryLine(self.role, "backward of a layer", what, {_LAYERS: again}, updating)
        kept = KEPT_CHUNKS[self._device]
        logits = head_backward_bytes(shape, update.scored, a, self._chunk_bytes, kept)
        what, note = _of_head(shape, update.scored, self._chunk_bytes, kept)
        yield MemoryLine(self.role, what, note, {_HEAD: logits}, updating)

    @property
    def _device(self) -> str:
        return "cuda" if self.run.on_gpu else "cpu"

    @property
    def _chunk_bytes(self) -> int:
        return chunk_bytes(self._device, self.run.capacity)

    def _score_lines(self) -> Iterator[MemoryLine]:
        scoring, tokens, scored = ("scoring",), self.score.tokens, self.score.scored
        yield from self._gathered(scoring)
        layer = layer_forward_bytes(self.shape, tokens, self.run)
        yield MemoryLine(self.role, "activations", f"{tokens:,} tokens, one layer", {_LAYERS: layer}, scoring)
        logits = head_bytes(self.shape, scored, self.run.a, self._chunk_bytes)
        yield MemoryLine(self.role, *_of_head(self.shape, scored, self._chunk_bytes), {_HEAD: logits}, scoring)

    def _gathered(self, phases: tuple[str, ...]) -> Iterator[MemoryLine]:
        """The weights used in computation, if they are not the parameters themselves.

        With sharding: the root all the time, and of the layers the current one, the next one, and the buffer in which
        that is gathered; all layers if they are not resharded after forward. Autocast keeps a copy of all weights.
        """
        root, layers, layer = numel(self.shape.root), len(self.shape.layers), self.shape.largest_layer
        if self.deepspeed_config is not None and self.deepspeed_config.zero_stage == 3:
            yield self._gathered_by_zero(self.deepspeed_config.zero_optimization, phases)
            return
        if self.fsdp_config is not None:
            few = 1 if self.shard == 1 else min(3, layers)
            count = few if self.reshards else layers
            note = f"root and {count} of {layers} layers"
        elif self.run.autocast and self.trained:
            count, note = layers, "autocast's copy"
        else:
            return
        size = self.run.a * (root + count * layer)
        yield MemoryLine(
            self.role, "gathered weights", note, dict.fromkeys((_HEAD, _LAYERS, _EMBEDDINGS), size), phases
        )

    def _gathered_by_zero(self, options: Mapping[str, Any], phases: tuple[str, ...]) -> MemoryLine:
        """ZeRO 3 prefetches one bucket, and keeps the last layers after forward.

        It keeps those that backward reuses within `stage3_max_reuse_distance` elements, counted over forward and
        backward.
        """
        layers = sum(numel(layer) for layer in self.shape.layers)
        ahead = int(options.get("stage3_prefetch_bucket_size", _DEEPSPEED_PREFETCH))
        kept = int(options.get("stage3_max_reuse_distance", _DEEPSPEED_REUSE)) // 2 if "updating" in phases else 0
        elements = min(layers, max(kept, self.shape.largest_layer) + ahead)
        note = f"root and {elements / 1e6:,.1f} M of {layers / 1e6:,.1f} M in layers"
        size = self.run.a * (numel(self.shape.root) + elements)
        return MemoryLine(
            self.role, "gathered weights", note, dict.fromkeys((_HEAD, _LAYERS, _EMBEDDINGS), size), phases
        )

    def _fresh_gradients(self, update: _Pass) -> dict[str, int]:
        """Gradients that are just computed and not accumulated yet.

        If the head is tied, its gradient is kept until that of the embeddings. FSDP2 has the gradients of a whole
        layer, and reduces them in float32; DeepSpeed collects them in buckets of a fixed size.
        """
        shape, a = self.shape, FP32 if self.run.autocast else self.run.a
        head = FP32 * shape.head if shape.head_trained else 0
        waiting = head if shape.tied else 0
        by_layer = [[weight.numel for weight in layer if weight.trained] for layer in shape.layers]
        if self.deepspeed_config is not None:
            elements = self.deepspeed_config.zero_optimization.get("reduce_bucket_size", _DEEPSPEED_BUCKET)
            bucket = a * int(elements) * (2 if self.run.on_gpu else 1)
            return {_HEAD: bucket + head, _LAYERS: bucket + waiting, _EMBEDDINGS: bucket + waiting + head}
        if self.fsdp_config is None:
            largest = a * max((size for layer in by_layer for size in layer), default=0)
            return {_HEAD: head, _LAYERS: waiting + largest, _EMBEDDINGS: waiting + head}
        reduced = 0 if self.reduces_once and update.several else FP32
        layer = (a + reduced) * max(sum(layer) for layer in by_layer)
        root = (a + reduced) * sum(weight.numel for weight in shape.root if weight.trained)
        return {_HEAD: head, _LAYERS: waiting + layer, _EMBEDDINGS: waiting + root}


def _of_head(shape: ModelShape, scored: int, chunk_bytes: int, kept_chunks: int = 0) -> tuple[str, str]:
    if not shape.vocab:
        return "values", "float32 hidden states"
    rows = chunk_rows(shape, chunk_bytes)
    kept = f", {min(kept_chunks, -(-scored // rows))} kept" if kept_chunks else ""
    return "logits", f"chunks of {min(scored, rows):,} x {shape.vocab:,}{kept}"


def announce(cfg: Config, learning: Learning) -> None:
    """Print the plan of a run that begins, one note per role on stderr.

    A plan that cannot be made must not stop a run: engines and strategies understand free-form settings better.
    """
    try:
        lines = summary(memory_plan(cfg, capacity_of(cfg.device), learning))
    except ConfigError:
        raise
    except Exception as error:
        lines = [f"no memory plan: {type(error).__name__}: {error}"]
    for line in lines:
        to_stderr(f"note: {line}")


def summary(plans: Sequence[SlotPlan]) -> list[str]:
    """One line per role, to compare with a run's measurements (memory/*)."""
    described = []
    for plan in plans:
        for role in plan.roles:
            size, phase = plan.peak(role=role)
            held = [line for line in plan.lines if line.role == role and phase in line.phases and not line.on_host]
            parts = ", ".join(f"{line.what} {line.size / 2**30:.3f}" for line in held)
            described.append(f"memory plan: {role}: {size / 2**30:.3f} GiB a slot at most, while {phase} ({parts})")
    return list(dict.fromkeys(described))  # a role may have slots of two kinds


def memory_plan(cfg: Config, capacity: int | None = None, learning: Learning | None = None) -> list[SlotPlan]:
    """One plan for every kind of slot. `capacity`: bytes of an accelerator, of which vLLM and SGLang take a share,
    and a chunk of logits another.

    Reads the models' configurations, if necessary from the hub. Raises ConfigError for a model that cannot be loaded,
    and as `policy_learning` does.
    """
    learning = policy_learning(cfg) if learning is None else learning
    placement, generator = cfg.trainer.placement, cfg.generator
    colocated, dedicated = model_ranks(cfg, capacity, learning)
    policy = colocated[0].ranks
    reward = tuple(_reward_lines(cfg))
    local = generator.run_engines_locally
    shared = has_colocated_engines(cfg)
    slots = generator.num_inference_engines * slots_per_engine(generator)
    engine = tuple(_engine_lines(cfg, capacity, shared)) if local else ()
    home = [line for model in colocated for line in model.lines()]
    home += _bucket_lines(cfg, _policy_shape(cfg, parts=1), "policy")
    names = [model.role for model in colocated]
    if reward and is_colocated(placement, "reward"):
        home += reward
        names.append("reward model")
    both = min(policy, slots) if shared else 0
    plans = [
        SlotPlan(" + ".join([*names, "engine"]), both, (*home, *engine)),
        SlotPlan(" + ".join(names), policy - both, tuple(home)),
    ]
    plans += [SlotPlan(model.role, model.ranks, tuple(model.lines())) for model in dedicated]
    if reward and not is_colocated(placement, "reward"):
        plans.append(SlotPlan("reward model", num_ranks(placement, "reward"), reward))
    if local:
        plans.append(SlotPlan("engine", slots - both, engine))
    return [plan for plan in plans if plan.count]


def model_ranks(cfg: Config, capacity: int | None, learning: Learning) -> tuple[list[ModelRank], list[ModelRank]]:
    """The learner's models: those in the policy's slots, the policy first, and those in slots of their own."""
    placement = cfg.trainer.placement
    policy = num_ranks(placement, "policy")
    colocated = [_policy(cfg, policy, capacity)]
    dedicated: list[ModelRank] = []
    if learning.with_reference:
        shares = is_colocated(placement, "ref")
        ranks = policy if shares else num_ranks(placement, "ref")
        (colocated if shares else dedicated).append(_reference(cfg, ranks, colocated[0]))
    if learning.critic is not None:
        shares = is_colocated(placement, "critic")
        ranks = policy if shares else num_ranks(placement, "critic")
        (colocated if shares else dedicated).append(_critic(cfg, ranks, colocated[0]))
    return colocated, dedicated


def _policy_shape(cfg: Config, parts: int) -> ModelShape:
    policy = cfg.trainer.policy
    lora, changes = policy.model.lora, policy.model_config_kwargs
    return _shape(cfg, policy.model.path, POLICY_PATH, changes, lora=lora, parts=parts)


def _policy(cfg: Config, ranks: int, capacity: int | None) -> ModelRank:
    trainer, policy = cfg.trainer, cfg.trainer.policy
    shape = _policy_shape(cfg, policy.tensor_parallel_size)
    run = Settings(
        a=2 if trainer.bf16 else FP32,
        autocast=trainer.strategy == "single" and trainer.bf16,
        on_gpu=cfg.device == "cuda",
        gradient_checkpointing=trainer.gradient_checkpointing,
        longest=longest_sequence(cfg.generator),
        capacity=capacity,
    )
    return _model(cfg, "policy", policy, shape, ranks, run, shares_memory(cfg), trainer.policy_mini_batch_size)


def _reference(cfg: Config, ranks: int, policy: ModelRank) -> ModelRank:
    ref = cfg.trainer.ref
    key, parts = "trainer.ref.model.path", ref.tensor_parallel_size
    shape = _shape(cfg, ref.model.path, key, ref.model_config_kwargs, parts=parts)
    return _model(cfg, "reference", ref, shape, ranks, policy.run, policy.leaves, None)


def _critic(cfg: Config, ranks: int, policy: ModelRank) -> ModelRank:
    critic = cfg.trainer.critic
    assert critic.model.path is not None, "a critic is only asked for where it has a path"
    key, overrides = "trainer.critic.model.path", critic.model_config_kwargs
    options: dict[str, Any] = {"lora": critic.model.lora, "parts": critic.tensor_parallel_size}
    shape = _shape(cfg, critic.model.path, key, overrides, critic=True, **options)
    mini_batch = cfg.trainer.critic_mini_batch_size
    return _model(cfg, "critic", critic, shape, ranks, policy.run, policy.leaves, mini_batch)


def _reward_lines(cfg: Config) -> Iterator[MemoryLine]:
    """Of one replica, which scores one conversation at a time and is never moved; none without a reward model."""
    reward = cfg.trainer.reward
    if reward.model.path is None:
        return
    shape = reward_model_shape(reward.model.path, reward.model_config_kwargs)
    size, tokens = 2 if cfg.trainer.bf16 else FP32, longest_sequence(cfg.generator)
    run = Settings(a=size, autocast=False, on_gpu=cfg.device == "cuda", gradient_checkpointing=False, longest=tokens)
    weights = numel(shape.weights)
    yield MemoryLine("reward model", "parameters", f"{weights / 1e6:,.1f} M frozen", {"": size * weights}, exact=True)
    layer = {_LAYERS: layer_forward_bytes(shape, tokens, run)}
    yield MemoryLine("reward model", "activations", f"{tokens:,} tokens, one layer", layer, ("generating",))


def _model(
    cfg: Config,
    role: str,
    section: PolicyConfig | RefConfig | CriticConfig,
    shape: ModelShape,
    ranks: int,
    run: Settings,
    leaves: bool,
    mini_batch: int | None,
) -> ModelRank:
    """`mini_batch`: prompts per optimizer step; None for a frozen model."""
    trainer, parts, tokens = cfg.trainer, section.tensor_parallel_size, section.sequence_parallel_size
    update = None
    if mini_batch is not None:
        update = _pass(cfg, trainer.micro_train_batch_size_per_gpu or 1, mini_batch, ranks, tokens, parts)
    return ModelRank(
        role=role,
        shape=shape,
        ranks=ranks,
        parts=parts,
        fsdp_config=section.fsdp_config if trainer.strategy in ("fsdp", "fsdp2") else None,
        deepspeed_config=section.deepspeed_config if trainer.strategy == "deepspeed" else None,
        run=run,
        leaves=leaves,
        update=update,
        score=_pass(cfg, trainer.micro_forward_batch_size_per_gpu or 1, trainer.train_batch_size, ranks, tokens, parts),
    )


def _shape(cfg: Config, path: str, key: str, overrides: Mapping[str, Any], **options: Any) -> ModelShape:
    scaling, theta = cfg.trainer.rope_scaling, cfg.trainer.rope_theta
    return model_shape(path, key=key, overrides=overrides, rope_scaling=scaling, rope_theta=theta, **options)


def _pass(cfg: Config, sequences: int, prompts: int, ranks: int, over: int, parts: int) -> _Pass:
    """A pass of `sequences`, or of max_tokens_per_microbatch tokens, when the samples of `prompts` are sharded.

    A parallel group of over x parts ranks shares every micro-batch. Each of `over` ranks runs a part of its tokens;
    each of `parts` ranks runs all of them, with a part of the layers. Either way it scores its share of the tokens.
    """
    group = over * parts
    trainer, generator, longest = cfg.trainer, cfg.generator, longest_sequence(cfg.generator)
    share = -(-min(prompts, trainer.train_batch_size) * generator.n_samples_per_prompt * group // ranks)
    budget = trainer.max_tokens_per_microbatch
    tokens = min(max(budget, longest) if budget else sequences * longest, share * longest)
    shares = budget and generator.n_samples_per_prompt > 1 and trainer.share_prompt is not False
    seen = min(MAX_REACH * tokens, share * longest) if shares else tokens
    # Only where sequences are counted, and have one response each, is it known how much of them is response.
    response = longest if budget or generator.max_turns > 1 else generator.sampling_params.max_generate_length
    scored = tokens * response // longest
    return _Pass(-(-tokens // over), -(-scored // group), -(-seen // over), share * longest > tokens)


def _engine_lines(cfg: Config, capacity: int | None, shared: bool) -> Iterator[MemoryLine]:
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
    moves = shared and on_gpu
    note = f"{generator.model_dtype}" + (f", over {parts} slots" if parts > 1 else "")
    line = MemoryLine("engine", "weights", note, {"": weights}, exact=parts == 1)
    replaced = replaces_weights(cfg)
    if moves and (replaced or generator.backend == "vllm"):
        yield replace(line, phases=("generating", "syncing"))
        if generator.backend == "transformers" or not replaced:
            yield replace(line, phases=LEARNING, on_host=True)
    else:
        yield line
    note, cache = _cache(cfg, shape, parts, weights, capacity if on_gpu else None)
    yield MemoryLine("engine", "KV cache", note, {"": cache}, ("generating",) if moves else PHASES)
    if weight_route(cfg) == "broadcast":
        yield from _bucket_lines(cfg, shape, "engine")


def _cache(cfg: Config, shape: ModelShape, parts: int, weights: int, capacity: int | None) -> tuple[str, int]:
    """A note on what the keys and values are for, and their bytes in one slot."""
    generator = cfg.generator
    size = 4 if generator.backend == "vllm" and cfg.device == "cpu" else _BYTES[generator.model_dtype]
    per_token = max(1, shape.kv_bytes_per_token(size) // parts)
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


def _bucket_lines(cfg: Config, shape: ModelShape, role: str) -> list[MemoryLine]:
    """Two buckets that are used in turn and stay allocated, and on the trainer the tensor being copied into one."""
    generator = cfg.generator
    wire = _BYTES[generator.model_dtype]
    limit = int(generator.weight_transfer_threshold_cuda_ipc_GB * 2**30)
    on_device = weight_route(cfg) in ("broadcast", "ipc")
    if cfg.device == "cpu" and on_device:
        limit = min(limit, CPU_BUCKET)
    total, largest = numel(shape.weights), max(weight.numel for weight in shape.weights)
    bucket = max(min(limit, wire * total), wire * largest)
    on_host = cfg.device == "cuda" and not on_device
    lines = [MemoryLine(role, "weight-sync buckets", "2, kept", {"": 2 * bucket}, on_host=on_host)]
    if role == "policy":
        whole = {"": (FP32 + wire) * largest}
        lines.append(MemoryLine(role, "tensor being sent", "the largest, gathered and cast", whole, ("syncing",)))
    return lines
