"""Shapes of a model without its weights, and the bytes that a pass over it needs: arithmetic only, nothing is loaded.

Legend: T tokens of a micro-batch, h hidden size, i intermediate size, q = heads x head size, k = key/value heads x head
size, V vocabulary, a bytes of a number in the compute dtype (`Settings.a`). "Saved" tensors are those that autograd
keeps for backward; each counts once, however many operations use it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedConfig

from skyrl_train.config.schema import LoraConfig
from skyrl_train.errors import ConfigError
from skyrl_train.models.layer_sizes import sizes_of_layers
from skyrl_train.models.loading import REWARD_PATH, load_config, model_without_memory
from skyrl_train.models.lora import Adapters
from skyrl_train.models.ragged_model import RaggedModel, linear_head
from skyrl_train.models.tensor_parallel import TensorParallel

FP32 = 4
"""Bytes of a float32: the dtype of log-softmax, of norms internally, and of everything trained."""
_LOGIT_COPIES = 2
"""Copies of a chunk of logits: the logits and their softmax. See models/sampled_logprobs.py."""


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
                FirstRank(None, key.removesuffix("model.path") + "tensor_parallel_size", parts).divide(scored.model)  # type: ignore[arg-type]
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


@dataclass(frozen=True)
class FirstRank(TensorParallel):
    """The first rank of a tensor-parallel group that is never started: for the shapes of its part."""

    ranks: int

    @property
    def size(self) -> int:
        return self.ranks

    @property
    def rank(self) -> int:
        return 0


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
