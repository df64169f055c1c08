"""Log-probabilities and entropies of chosen tokens under a causal language model, from the ragged batch.

Legend: T tokens of all sequences, B sequences, N tokens that are scored, V vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from skyrl_train.errors import ConfigError
from skyrl_train.models.ragged_attention import RAGGED, Segments

CHUNK_BYTES = 1 << 27
"""Size of one chunk's logits: chunks of thousands of rows for a small vocabulary, of hundreds for a large one."""


class Scores(NamedTuple):
    """Both [T], 0 where a token was not scored."""

    logprobs: Tensor
    """nats, of the token given what precedes it in its sequence, at the sequence's temperature."""
    entropy: Tensor | None
    """nats, of the distribution that the token was drawn from; None unless asked for."""


class TokenScorer(nn.Module):
    """The root that strategies shard: hidden states of all tokens, then the LM head on the rows that are needed.

    The head runs inside this module's forward, where sharded weights are gathered, in chunks whose logits are computed
    again in backward: no tensor of shape (tokens, vocabulary) outlives a chunk. Softmax is at least float32. The
    model is switched to attention without padding. Raises ConfigError for a model whose logits it cannot reproduce.
    """

    def __init__(self, model: PreTrainedModel, chunk_bytes: int = CHUNK_BYTES):
        super().__init__()
        _refuse_what_packing_changes(model)
        model.set_attn_implementation(RAGGED)
        self.model = model
        self.chunk_bytes = chunk_bytes
        config = model.config
        self._softcap: float | None = getattr(config, "final_logit_softcapping", None)
        self._logit_factor: float = getattr(config, "logit_scale", None) or 1.0 / getattr(config, "logits_scaling", 1.0)
        self._longest_exact = _longest_exact(config)
        _check_head(self)
        _check_packing(self)

    def decoder_layers(self) -> list[nn.Module]:
        """The repeated blocks: what a strategy shards one by one."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if any(c.__name__ in names for c in type(module).__mro__)]

    def hf_name(self, name: str) -> str:
        """A parameter's name in the Hugging Face checkpoint, from its name in this module."""
        return name.removeprefix("model.")

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        offsets: Tensor,
        temperature: Tensor,
        score_mask: Tensor,
        wants_entropy: bool = False,
    ) -> Scores:
        """input_ids, position_ids, score_mask [T], offsets [B+1], temperature [B] (0 counts as 1, as engines score it).

        score_mask is True on tokens to score and never on a sequence's first. With an all-False mask the result still
        has a (zero) gradient for every parameter: sharded models need the same backward on every rank.
        """
        segments = Segments.of(offsets)
        if self._longest_exact and max(segments.lengths) > self._longest_exact:
            raise ConfigError(
                f"A sequence has {max(segments.lengths)} tokens, but this model's rope changes for a whole micro-batch "
                f"beyond {self._longest_exact}; shorten prompts or responses (max_prompt_length, max_generate_length)."
            )
        positions = score_mask.nonzero().flatten()
        nothing = positions.numel() == 0
        if nothing:
            positions = positions.new_zeros(1)
        else:
            assert bool((position_ids[positions] > 0).all()), "the first token of a sequence has no log-prob"
        hidden = self._hidden_before(positions, input_ids, position_ids, segments)
        sequence = torch.searchsorted(offsets, positions, right=True) - 1
        divisor = torch.where(temperature > 0, temperature, 1.0)[sequence]
        chunks = zip(*(x.split(self._rows()) for x in (hidden, input_ids[positions], divisor)), strict=True)
        parts = [self._chunk(rows, targets, divisors, wants_entropy) for rows, targets, divisors in chunks]
        columns = [torch.cat(values) for values in zip(*parts, strict=True)]
        if nothing:
            columns = [values * 0.0 for values in columns]
        spread = [values.new_zeros(len(input_ids)).index_copy(0, positions, values) for values in columns]
        return Scores(spread[0], spread[1] if wants_entropy else None)

    def _hidden_before(self, positions: Tensor, input_ids: Tensor, position_ids: Tensor, segments: Segments) -> Tensor:
        """[N, hidden size] the last hidden state of the token before each position."""
        segments, order = segments.by_length()
        output = self.model.base_model(
            input_ids=input_ids[order].unsqueeze(0),
            position_ids=position_ids[order].unsqueeze(0),
            use_cache=False,
            ragged_segments=segments,
        )
        row = torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))
        return output.last_hidden_state.squeeze(0)[row[(positions - 1).clamp(min=0)]]

    def _rows(self) -> int:
        return max(1, self.chunk_bytes // (4 * self.model.config.vocab_size))

    def _chunk(self, hidden: Tensor, targets: Tensor, divisor: Tensor, wants_entropy: bool) -> tuple[Tensor, ...]:
        inputs = (hidden, targets, divisor, wants_entropy)
        if not torch.is_grad_enabled():
            return self._score_rows(*inputs)
        scored: tuple[Tensor, ...] = checkpoint(
            self._score_rows, *inputs, use_reentrant=False, preserve_rng_state=False
        )
        return scored

    def _score_rows(self, hidden: Tensor, targets: Tensor, divisor: Tensor, wants_entropy: bool) -> tuple[Tensor, ...]:
        """[n, hidden size], [n], [n] -> log-probs [n] and, where wanted, entropies [n]."""
        logits = self.logits(hidden)
        logits = logits / divisor.to(logits.dtype).unsqueeze(1)
        normaliser = logits.logsumexp(-1)
        logprobs = logits.gather(1, targets.unsqueeze(1)).squeeze(1) - normaliser
        if not wants_entropy:
            return (logprobs,)
        return logprobs, normaliser - (logits.softmax(-1) * logits).sum(-1)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden size] -> [..., V] at least float32, with the architecture's own scaling and capping."""
        logits = self.model.get_output_embeddings()(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32)) * self._logit_factor
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


def _refuse_what_packing_changes(model: PreTrainedModel) -> None:
    """ConfigError for a model whose log-probs would depend on what else is in the batch, or on chance."""
    config: Any = model.config
    name = type(model).__name__
    if not model._can_set_attn_implementation():
        raise ConfigError(f"{name} does not follow transformers' attention interface: it cannot run without padding.")
    kinds: set[str] = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ConfigError(
            f"{name} has layers of kind {sorted(kinds)}; only full and sliding-window attention are known."
        )
    if any(rope.get("rope_type") == "dynamic" for rope in _ropes(config)):
        raise ConfigError(
            f"{name} uses rope type 'dynamic', which depends on the longest sequence of a batch; "
            "set trainer.rope_scaling to a static type such as 'yarn' or 'linear'."
        )
    dropping: list[str] = [
        path for path, module in model.named_modules() if isinstance(module, nn.Dropout) and module.p > 0
    ]
    if getattr(config, "attention_dropout", None):
        dropping.append("attention_dropout")
    if dropping:
        raise ConfigError(
            f"{name} drops activations at random ({', '.join(dropping[-3:])}), so log-probs would be noise; "
            "set its dropout keys to 0 in model_config_kwargs."
        )


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The model's sets of rope parameters: one, or one for each kind of layer."""
    parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    return [value for value in parameters.values() if isinstance(value, dict)] or [parameters]


def _longest_exact(config: Any) -> int | None:
    """longrope swaps its frequencies once any sequence of a batch is longer than this; None for other kinds of rope."""
    limits = [
        int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in _ropes(config)
        if rope.get("rope_type") == "longrope"
    ]
    return min(limits, default=None)


def _check_head(scorer: TokenScorer) -> None:
    """Compare `logits` with what the model's own forward makes of the same hidden states; refuse where they differ.

    Costs a few rows of the head: the body of the model is replaced by the given states for the time of the call.
    """
    model = scorer.model
    head = model.get_output_embeddings()
    body = model.base_model
    name = type(model).__name__
    if not isinstance(head, nn.Linear) or body is model:
        raise ConfigError(f"{name} is not a causal language model with a linear head; use a text-only one.")
    noise = torch.randn(1, 4, head.in_features, generator=torch.Generator().manual_seed(0))
    sizes = torch.tensor([0.1, 1.0, 10.0, 100.0]).view(1, 4, 1)
    hidden: Any = (noise * sizes).to(head.weight.device, head.weight.dtype)
    ids = torch.zeros(1, 4, dtype=torch.int64, device=hidden.device)
    body.forward = lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=hidden)
    try:
        with torch.no_grad():
            theirs = model(input_ids=ids, use_cache=False).logits
            ours = scorer.logits(hidden)
    finally:
        del body.forward
    if theirs.shape != ours.shape or not _close(theirs.to(ours.dtype), ours, head.weight.dtype):
        raise ConfigError(
            f"{name} changes its logits after the head in a way that is not known here (known: "
            "final_logit_softcapping, logit_scale, logits_scaling); its log-probs would be wrong, so it is not trained."
        )


def _check_packing(scorer: TokenScorer) -> None:
    """Run the same three tokens twice in one batch, after different ones; refuse a model in which it shows."""
    parameter = next(scorer.parameters())
    ids = torch.tensor([1, 2, 3, 4, 5, 1, 2, 3], device=parameter.device) % scorer.model.config.vocab_size
    places = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2], device=parameter.device)
    segments = Segments.of(torch.tensor([0, 3, 5, 8], device=parameter.device))
    with torch.no_grad():
        hidden = scorer._hidden_before(torch.arange(1, 9, device=ids.device), ids, places, segments)
    first, second = hidden[:3], hidden[5:]
    if not _close(first, second, parameter.dtype):
        raise ConfigError(
            f"{type(scorer.model).__name__} lets sequences of one batch see each other (its layers are not all "
            "attention), so it cannot run without padding."
        )


def _close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to what `dtype` can tell apart in differently shaped matrix products."""
    tolerance = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().amax()))
