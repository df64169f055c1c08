"""Forward passes of a Hugging Face causal language model in the transformers engine: prefill, decode, scoring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
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
from skyrl_train.engines.transformers.recurrent_states import RecurrentStates, run_with_plan
from skyrl_train.errors import EngineError
from skyrl_train.models.padding_free import count_attention_layers, unsupported_layer_types
from skyrl_train.models.recurrent_layers import get_recurrent_mixers, replace_recurrent_functions
from skyrl_train.models.routing import Routers
from skyrl_train.models.sliding_windows import disable_query_scaling, max_plain_attention_length, shortened_windows
from skyrl_train.weight_sync.protocol import AdapterSpec, adapter_names
from skyrl_train.weight_sync.receiver import InPlaceWeightStore

_LOGIT_ELEMENTS = 1 << 26
"""Maximum number of logits per forward pass in scoring: 256 MiB in float32."""
_MIN_ONEDNN_PRODUCTS = 1 << 19
"""Rows x inputs x outputs. For smaller layers oneDNN's fixed cost per call exceeds what its kernels save."""
_CHECK_WINDOW = 6
"""Sliding window in the check of a new model. It is shorter than the prompt of the check, so that it has an effect."""


class ModelRunner:
    """A model with the engine's attention function, and its LoRA adapters.

    The model belongs to the runner: its attention is replaced permanently, so other code must not run it.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device, name: str, keeps_routing: bool = False):
        """Move `model` to `device`, replace its attention, and check that decoding with the cache is exact.

        Args:
            model: The model, which the runner owns from now on.
            device: Device of the model.
            name: The engine's name, for error messages.
            keeps_routing: True to record the experts of each token for `routing`.

        Raises:
            EngineError: The model's architecture is not supported, decoding changes its logits, or `keeps_routing` is
                set for a model without routers.
        """
        if reason := unsupported_reason(model):
            raise EngineError(f"Engine {name!r} {reason}")
        self._routers = Routers(model)
        if keeps_routing and not self._routers.modules:
            raise EngineError(
                f"Engine {name!r} cannot record expert routing: {type(model).__name__} has no routers. "
                "Turn off what reads the routing, or choose a mixture-of-experts model."
            )
        self.model: Any = model.eval().requires_grad_(False)
        self.model.to(device)
        self.device = device
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.adapters = Adapters(model, name)
        replace_recurrent_functions(model)
        self._mixers = list(get_recurrent_mixers(model).values())
        if device.type == "cpu":
            use_onednn(model)
        with torch.inference_mode(), shortened_windows(model, _CHECK_WINDOW):
            reference = self._reference_logits()
            model.set_attn_implementation(ATTENTION_NAME)
            disable_query_scaling(model)
            for mixer in self._mixers:
                run_with_plan(mixer, self.adapters.on_tokens)
            self._routers.record_routed_experts = keeps_routing
            self._check_exact(reference, name)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The model's parameters by Hugging Face name. Tied parameters occur once."""
        return dict(self.model.named_parameters())

    def routing(self) -> np.ndarray | None:
        """Return the experts of the last forward pass, int16 [tokens, layers with experts, k]; None if not recorded."""
        return self._routers.routed_experts().cpu().numpy() if self._routers.record_routed_experts else None

    @property
    def max_positions(self) -> int:
        """Maximum length of a sequence that the model processes exactly, in tokens; 2^20 if it states none."""
        text = self.model.config.get_text_config()
        max_positions = int(getattr(text, "max_position_embeddings", None) or 1 << 20)
        return min(max_positions, max_plain_attention_length(text) or max_positions)

    def free_memory(self, *, weights: bool) -> int:
        """Free the accelerator's unused memory.

        Args:
            weights: True to move the weights to host memory first.

        Returns:
            The number of bytes freed; 0 on the CPU, where nothing is done.
        """
        if self.device.type != "cuda":
            return 0
        before = torch.cuda.memory_reserved(self.device)
        if weights:
            self.model.to("cpu")
        torch.cuda.empty_cache()
        return before - torch.cuda.memory_reserved(self.device)

    def onload_weights(self) -> None:
        """Move the weights back to the device, after `free_memory(weights=True)`."""
        self.model.to(self.device)

    def prefill(self, prompts: Sequence[PromptKey]) -> tuple[PackedPrompts, list[int], Tensor]:
        """Run U prompts in one forward pass without padding, each with its adapter.

        Returns:
            The keys and values, the index of each prompt's first token in them, and the logits [U, V] after each
            prompt's last token. The last two are in the order of `prompts`.
        """
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index].token_ids))
        texts = [prompts[index].token_ids for index in order]
        packed, starts = self._pack(texts, keep_states=True)
        lengths = [len(text) for text in texts]
        ends = torch.tensor([start + length - 1 for start, length in zip(starts, lengths, strict=True)])
        with self.adapters.applied(adapted_rows([prompts[index].adapter for index in order], lengths, self.device)):
            logits = self._forward(texts, packed, ends.to(self.device))
        inverse = sorted(range(len(order)), key=order.__getitem__)
        return packed, [starts[index] for index in inverse], logits[inverse]

    def decode(self, ids: Tensor, cache: DecodeCache, adapted: AdaptedRows = ()) -> Tensor:
        """Run the cache's current decode step and store its keys and values.

        Args:
            ids: The newest token of each row, int64 [B].
            cache: The cache, after `begin` or `advance`.
            adapted: The rows that use adapters.

        Returns:
            The logits of the next token, [B, V].
        """
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
        """Return the log-probs in nats of all tokens but the first, for each sequence.

        Args:
            sequences: Token ids.
            temperature: Divisor of the logits. 0 means 1.
        """
        scores: list[list[float]] = [[] for _ in sequences]
        for batch in self._score_batches(sequences):
            batch_sequences = [sequences[index] for index in batch]
            packed, starts = self._pack(batch_sequences, keep_states=False)
            logits = self._forward(batch_sequences, packed, slice(None)).float() / (temperature or 1.0)
            for index, start in zip(batch, starts, strict=True):
                targets = torch.tensor(sequences[index][1:], device=self.device)
                rows = logits[start : start + len(targets)]
                logprobs = rows.gather(1, targets.unsqueeze(1)).squeeze(1) - rows.logsumexp(-1)
                scores[index] = logprobs.tolist()
        return scores

    def _score_batches(self, sequences: Sequence[Sequence[int]]) -> Iterator[list[int]]:
        """Yield batches of at most _LOGIT_ELEMENTS logits: indices of sequences, shortest first.

        Sequences of fewer than two tokens are left out. A longer one than the limit is a batch of its own.
        """
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

    def _pack(self, prompts: Sequence[Sequence[int]], *, keep_states: bool) -> tuple[PackedPrompts, list[int]]:
        lengths = [len(prompt) for prompt in prompts]
        create_states = partial(RecurrentStates.empty, self.model.config) if keep_states and self._mixers else None
        return PackedPrompts(lengths, self.device, create_states), [0, *accumulate(lengths)][:-1]

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
        """Return the logits of the check tokens with the model's own eager attention, [12, V]."""
        self.model.set_attn_implementation("eager")
        ids = torch.tensor([self._check_tokens()], device=self.device)
        return self.model(input_ids=ids, use_cache=False).logits[0].float()  # type: ignore[no-any-return]

    def _check_exact(self, reference: Tensor, name: str) -> None:
        """Raise EngineError if prefilling 8 tokens and decoding 4 gives other logits than `reference` [12, V].

        The prompt is packed with another one, and two rows decode, so that packing and sharing take part in the check.
        """
        tokens = self._check_tokens()
        prompt = PromptKey(tuple(tokens[:8]))
        packed, starts, logits = self.prefill([PromptKey(tuple(tokens[:3])), prompt])
        results = [logits[1]]
        cache = DecodeCache(self.device)
        slots = sorted(cache.allocate_slots([NewPrompt(prompt, 2, starts[1])], packed, frozenset()))
        for step, token in enumerate(tokens[8:]):
            cache.begin(slots, [step, step])
            results.append(self.decode(torch.tensor([token, token], device=self.device), cache)[1])
        expected = reference[7:]
        tolerance = 1e-3 if reference.dtype == torch.float32 and self.model.dtype == torch.float32 else 0.1
        error = float((torch.stack(results).float() - expected).abs().max())
        if not error <= tolerance * max(1.0, float(expected.abs().max())):
            raise EngineError(
                f"Engine {name!r} cannot serve {type(self.model).__name__} exactly: decoding with the KV cache changes "
                f"logits by {error:.3g}. Use another engine for this model."
            )


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Return why the transformers engine cannot serve a model, judging by its class and configuration.

    Args:
        model: The model, which may be on the meta device.

    Returns:
        A sentence without its subject ("cannot serve ..."), or None if the model looks supported. `ModelRunner` also
        checks that decoding is exact.
    """
    config: Any = model.config
    text: Any = config.get_text_config()
    types = unsupported_layer_types(model)
    reason = None
    if getattr(config, "is_encoder_decoder", False):
        reason = "it has an encoder"
    elif model.get_output_embeddings() is None:
        reason = "it has no language-model head"
    elif types:
        reason = f"it has layers of type {', '.join(types)}, whose states it does not keep"
    elif text.model_type == "recurrent_gemma":
        reason = "its recurrent layers keep states in the model, for one batch"
    elif not count_attention_layers(text):
        reason = "it has no attention layers"
    elif not model._can_set_attn_implementation():
        reason = "it does not implement transformers' attention interface"
    elif getattr(text, "num_kv_shared_layers", 0):
        reason = "its layers share keys and values"
    elif (getattr(text, "rope_parameters", None) or {}).get("rope_type") in ("dynamic", "longrope"):
        reason = "its RoPE depends on the longest sequence of a batch; set rope_scaling to a static type"
    return reason and f"cannot serve {type(model).__name__}: {reason}. Use another engine for this model."


class TransformersWeightStore(InPlaceWeightStore):
    """A WeightStore that overwrites the model's tensors in place, and loads the adapter of a sync beside the model."""

    def __init__(self, model_runner: ModelRunner):
        """Create a store for the model of `model_runner`."""
        super().__init__(self._current_tensors)
        self._model_runner = model_runner
        self._pending_adapter: tuple[AdapterSpec, Adapter] | None = None
        """Adapter of the current sync."""
        self._synced: tuple[AdapterSpec, Adapter] | None = None
        """Adapter of the last finished sync."""

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        if adapter is None:
            self._pending_adapter = None
        elif self._synced is not None and self._synced[0] == adapter:
            self._pending_adapter = self._synced
        else:
            self._pending_adapter = adapter, self._model_runner.adapters.zero_adapter(adapter)
        return self._current_tensors()

    def finish(self) -> None:
        self._synced = self._pending_adapter
        self._model_runner.adapters.synced = None if self._synced is None else self._synced[1]
        super().finish()

    def _current_tensors(self) -> dict[str, Tensor]:
        tensors = self._model_runner.parameters
        if self._pending_adapter is not None:
            for layer, pair in self._pending_adapter[1].layers.items():
                tensors.update(zip(adapter_names(layer), pair, strict=True))
        return tensors


class OneDnnLinear(nn.Linear):
    """A float32 linear layer that computes with oneDNN, which uses the widest vector instructions of every CPU.

    The library behind `F.linear` uses them only on one vendor's CPUs. On others this layer is 2.3 times as fast
    (AVX-512, 64 to 512 rows, width 192 to 1024). The operator reads the plain weight, so new weights need no
    repacking. It does not support gradients.
    """

    def forward(self, input: Tensor) -> Tensor:
        if input.numel() * self.out_features < _MIN_ONEDNN_PRODUCTS:
            return F.linear(input, self.weight, self.bias)
        linear: Any = torch.ops.mkldnn._linear_pointwise
        return linear(input, self.weight, self.bias, "none", [], "")  # type: ignore[no-any-return]


def use_onednn(model: nn.Module) -> None:
    """Turn the float32 linear layers of a model on the CPU into OneDnnLinear, in place.

    Parameters and their names do not change. Does nothing if this build of torch lacks oneDNN.
    """
    if not torch.backends.mkldnn.is_available():
        return
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype == torch.float32 and module.weight.device.type == "cpu":
            module.__class__ = OneDnnLinear
