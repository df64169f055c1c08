"""The forwards of a Hugging Face causal language model in the transformers engine: prefill, decode step, scores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from skyrl_train.engines.transformers.adapters import AdaptedRows, Adapter, Adapters, adapted_rows
from skyrl_train.engines.transformers.attention import ATTENTION_NAME, PackedPrompts
from skyrl_train.engines.transformers.cache import DecodeCache, NewPrompt, PromptKey
from skyrl_train.errors import EngineError
from skyrl_train.models.padding_free import SUPPORTED_ATTENTION_TYPES
from skyrl_train.models.routing import Routers
from skyrl_train.models.sliding_windows import disable_query_scaling, max_plain_attention_length, shortened_windows
from skyrl_train.weight_sync.protocol import AdapterSpec, adapter_names
from skyrl_train.weight_sync.receiver import InPlaceWeightStore

_LOGIT_ELEMENTS = 1 << 26
"""The most elements of logits per forward in scoring: 256 MiB in float32."""
_FEWEST_PRODUCTS = 1 << 19
"""Rows x inputs x outputs. For smaller products oneDNN's fixed cost per call exceeds what its kernels save."""
_CHECK_WINDOW = 6
"""Tokens that layers with a sliding window see in the check of a new model: fewer than its prompt has."""


class ModelRunner:
    """Owns `model`, whose attention is replaced for good, so nothing else may run it.

    Raises EngineError for models that would not be served exactly.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, name: str, keeps_routing: bool = False):
        """`keeps_routing`: whether `routing` tells which experts the tokens of the last forward went to."""
        if reason := unsupported_reason(model):
            raise EngineError(f"Engine {name!r} {reason}")
        self._routers = Routers(model)
        if keeps_routing and not self._routers.modules:
            raise EngineError(f"Engine {name!r}: {type(model).__name__} has no routers whose choices it could keep.")
        self.model: Any = model.eval().requires_grad_(False)
        self.model.to(device)
        self.device = device
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.adapters = Adapters(model, name)
        if device.type == "cpu":
            use_onednn(model)
        with torch.inference_mode(), shortened_windows(model, _CHECK_WINDOW):
            reference = self._reference_logits()
            model.set_attn_implementation(ATTENTION_NAME)
            disable_query_scaling(model)
            self._routers.record_routed_experts = keeps_routing
            self._check_exact(reference, name)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The parameters by Hugging Face name; tied ones once."""
        return dict(self.model.named_parameters())

    def routing(self) -> np.ndarray | None:
        """int16 [tokens, layers with experts, k] of the last forward, if it is kept."""
        return self._routers.routed_experts().cpu().numpy() if self._routers.record_routed_experts else None

    @property
    def max_positions(self) -> int:
        text = self.model.config.get_text_config()
        longest = int(getattr(text, "max_position_embeddings", None) or 1 << 20)
        return min(longest, max_plain_attention_length(text) or longest)

    def free_memory(self, *, weights: bool) -> int:
        """Free unused memory of the accelerator, and with `weights` move them to the host; returns bytes, 0 on CPU."""
        if self.device.type != "cuda":
            return 0
        before = torch.cuda.memory_reserved(self.device)
        if weights:
            self.model.to("cpu")
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self.device)

    def onload_weights(self) -> None:
        """Move the weights to the device again."""
        self.model.to(self.device)

    def prefill(self, prompts: Sequence[PromptKey]) -> tuple[PackedPrompts, list[int], Tensor]:
        """Run U prompts in one forward without padding, each through its adapter.

        Returns keys and values, the index at which each prompt begins in them, and the logits [U, V] after each
        prompt's last token.
        """
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
        texts = [prompts[index].token_ids for index in order]
        packed, starts = self._pack(texts)
        lengths = [len(text) for text in texts]
        ends = torch.tensor([start + length - 1 for start, length in zip(starts, lengths, strict=True)])
        with self.adapters.applied(adapted_rows([prompts[index].adapter for index in order], lengths, self.device)):
            logits = self._forward(texts, packed, ends.to(self.device))
        place = sorted(range(len(order)), key=order.__getitem__)
        return packed, [starts[rank] for rank in place], logits[place]

    def decode(self, ids: Tensor, cache: DecodeCache, adapted: AdaptedRows = ()) -> Tensor:
        """Run one token of every row in the cache's current step: int64 [B] -> logits [B, V]."""
        with self.adapters.applied(adapted), self._routers.forward_pass():
            output = self.model(
                input_ids=ids.unsqueeze(1),
                position_ids=cache.positions,
                past_key_values=cache,
                use_cache=True,
                engine_plan=cache,
            )
        return output.logits[:, -1]  # type: ignore[no-any-return]

    def score(self, sequences: Sequence[Sequence[int]], temperature: float) -> list[list[float]]:
        """Log-probs (nats) of all tokens but the first of each sequence, at `temperature` (0 counts as 1)."""
        scores: list[list[float]] = [[] for _ in sequences]
        for batch in self._score_batches(sequences):
            chosen = [sequences[index] for index in batch]
            packed, starts = self._pack(chosen)
            logits = self._forward(chosen, packed, slice(None)).float() / (temperature or 1.0)
            for index, start in zip(batch, starts, strict=True):
                targets = torch.tensor(sequences[index][1:], device=self.device)
                rows = logits[start : start + len(targets)]
                picked = rows.gather(1, targets.unsqueeze(1)).squeeze(1) - rows.logsumexp(-1)
                scores[index] = picked.tolist()
        return scores

    def _score_batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Indices of sequences of at least two tokens, sorted by length, in batches within _LOGIT_ELEMENTS."""
        batch: list[int] = []
        tokens = 0
        for index in sorted(range(len(sequences)), key=lambda i: len(sequences[i])):
            length = len(sequences[index])
            if length < 2:
                continue
            if batch and (tokens + length) * self.vocab_size > _LOGIT_ELEMENTS:
                yield batch
                batch, tokens = [], 0
            batch.append(index)
            tokens += length
        if batch:
            yield batch

    def _pack(self, prompts: Sequence[Sequence[int]]) -> tuple[PackedPrompts, list[int]]:
        lengths = [len(prompt) for prompt in prompts]
        return PackedPrompts(lengths, self.device), [0, *accumulate(lengths)][:-1]

    def _forward(self, prompts: Sequence[Sequence[int]], packed: PackedPrompts, keep: Tensor | slice) -> Tensor:
        ids = torch.tensor([token for prompt in prompts for token in prompt], device=self.device)
        positions = torch.cat([torch.arange(len(prompt)) for prompt in prompts]).to(self.device)
        with self._routers.forward_pass():
            output = self.model(
                input_ids=ids.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                past_key_values=packed,
                use_cache=True,
                engine_plan=packed,
                logits_to_keep=0 if isinstance(keep, slice) else keep,
            )
        return output.logits[0]  # type: ignore[no-any-return]

    def _check_tokens(self) -> list[int]:
        return [(7 * index + 3) % self.vocab_size for index in range(12)]

    def _reference_logits(self) -> Tensor:
        """Logits with the model's own eager attention: [12, V]."""
        self.model.set_attn_implementation("eager")
        ids = torch.tensor([self._check_tokens()], device=self.device)
        return self.model(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    def _check_exact(self, reference: Tensor, name: str) -> None:
        """Raises EngineError if logits differ from `reference`, for two rows that prefill 8 tokens, packed with another
        prompt, and then decode 4.
        """
        tokens = self._check_tokens()
        prompt = PromptKey(tuple(tokens[:8]))
        packed, starts, logits = self.prefill([PromptKey(tuple(tokens[:3])), prompt])
        got = [logits[1]]
        cache = DecodeCache(self.device)
        slots = sorted(cache.allocate_slots([NewPrompt(prompt, 2, starts[1])], packed, frozenset()))
        for step, token in enumerate(tokens[8:]):
            cache.begin(slots, [step, step])
            got.append(self.decode(torch.tensor([token, token], device=self.device), cache)[1])
        wanted = reference[7:]
        tolerance = 1e-3 if reference.dtype == torch.float32 and self.model.dtype == torch.float32 else 0.1
        error = float((torch.stack(got).float() - wanted).abs().max())
        if not error <= tolerance * max(1.0, float(wanted.abs().max())):
            raise EngineError(
                f"Engine {name!r} cannot serve {type(self.model).__name__} exactly: decoding with its cache changes "
                f"logits by {error:.3g}. Use another engine for this model."
            )


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Return why the engine cannot serve a model, which may be on the meta device; None if nothing is known yet."""
    config: Any = model.config
    text: Any = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ()) - SUPPORTED_ATTENTION_TYPES
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it has an encoder"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-model head"
    elif kinds:
        reason = f"it has layers of kind {', '.join(sorted(kinds))}, whose state is not keys and values"
    elif not model._can_set_attn_implementation():
        reason = "it does not follow transformers' attention interface"
    elif getattr(text, "num_kv_shared_layers", 0):
        reason = "its layers share keys and values"
    elif (getattr(text, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope"):
        reason = "its rope depends on the longest sequence of a batch; set rope_scaling to a static type"
    return reason and f"cannot serve {type(model).__name__}: {reason}. Use another engine for this model."


class TransformersWeightStore(InPlaceWeightStore):
    """A WeightStore that overwrites every tensor in place, by name."""

    def __init__(self, model_runner: ModelRunner):
        super().__init__(self._all)
        self._model_runner = model_runner
        self._pending_adapter: tuple[AdapterSpec, Adapter] | None = None
        """The adapter of the current sync."""
        self._synced: tuple[AdapterSpec, Adapter] | None = None
        """The adapter of the last finished sync."""

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        if adapter is None:
            self._pending_adapter = None
        elif self._synced is not None and self._synced[0] == adapter:
            self._pending_adapter = self._synced
        else:
            self._pending_adapter = adapter, self._model_runner.adapters.zero_adapter(adapter)
        return self._all()

    def finish(self) -> None:
        self._synced = self._pending_adapter
        self._model_runner.adapters.synced = None if self._synced is None else self._synced[1]
        super().finish()

    def _all(self) -> dict[str, Tensor]:
        tensors = self._model_runner.parameters
        if self._pending_adapter is not None:
            for layer, pair in self._pending_adapter[1].layers.items():
                tensors.update(zip(adapter_names(layer), pair, strict=True))
        return tensors


class OneDnnLinear(nn.Linear):
    """float32 products with oneDNN, which uses the widest instructions of every CPU.

    The library behind `F.linear` uses them only on one vendor's CPUs; on others this is 2.3 times as fast (AVX-512,
    64-512 rows, width 192-1024). The operator reads the plain weight, so new weights need no repacking. It has no
    gradient.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() * self.out_features < _FEWEST_PRODUCTS:
            return F.linear(input, self.weight, self.bias)
        linear: Any = torch.ops.mkldnn._linear_pointwise
        return linear(input, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


def use_onednn(model: nn.Module) -> None:
    """Make the float32 linear layers of a model on the CPU OneDnnLinear, in place; parameters and names stay."""
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.__class__ = OneDnnLinear
