"""The body of a causal language model over the ragged batch: what every scorer puts a head on.

Legend: T tokens of all sequences, B sequences, N tokens that are scored.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.ragged_attention import RAGGED, Segments


class RaggedModel(nn.Module):
    """Base of scorers: hidden states of all tokens, of which a head reads those before the tokens to score.

    The model is switched to attention without padding. Raises ConfigError for one whose hidden states would depend on
    what else is in the batch, or on chance.
    """

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        _refuse_what_packing_changes(model)
        model.set_attn_implementation(RAGGED)
        self.model = model
        self._longest_exact = _longest_exact(model.config)

    def decoder_layers(self) -> list[nn.Module]:
        """The repeated blocks: what a strategy shards one by one."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if any(c.__name__ in names for c in type(module).__mro__)]

    def before_scored(
        self, input_ids: Tensor, position_ids: Tensor, offsets: Tensor, score_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Positions [N] of the tokens in score_mask [T], and the last hidden state before each [N, hidden size].

        Where there is none it is the batch's first token, for `spread` to multiply by 0: sharded models need the same
        backward on every rank.
        """
        segments = Segments.of(offsets)
        if self._longest_exact and max(segments.lengths) > self._longest_exact:
            raise ConfigError(
                f"A sequence has {max(segments.lengths)} tokens, but this model's rope changes for a whole micro-batch "
                f"beyond {self._longest_exact}; shorten prompts or responses (max_prompt_length, max_generate_length)."
            )
        positions = score_mask.nonzero().flatten()
        if positions.numel() == 0:
            positions = positions.new_zeros(1)
        else:
            assert bool((position_ids[positions] > 0).all()), "there is no state before a sequence's first token"
        return positions, self._hidden_before(positions, input_ids, position_ids, segments)

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


def spread(values: Tensor, positions: Tensor, score_mask: Tensor) -> Tensor:
    """[N] at its positions in [T]; 0, with a gradient of 0, outside score_mask."""
    return values.new_zeros(len(score_mask)).index_copy(0, positions, values * score_mask[positions])


def linear_head(model: PreTrainedModel) -> nn.Linear:
    """The LM head. Raises ConfigError for a model that is not a body with a linear head on it."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        raise ConfigError(
            f"{type(model).__name__} is not a causal language model with a linear head; use a text-only one."
        )
    return head


def check_packing(scorer: RaggedModel) -> None:
    """Run the same three tokens twice in one batch, after different ones; refuse a model in which it shows."""
    parameter = next(scorer.parameters())
    ids = torch.tensor([1, 2, 3, 4, 5, 1, 2, 3], device=parameter.device) % scorer.model.config.vocab_size
    places = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2], device=parameter.device)
    segments = Segments.of(torch.tensor([0, 3, 5, 8], device=parameter.device))
    with torch.no_grad():
        hidden = scorer._hidden_before(torch.arange(1, 9, device=ids.device), ids, places, segments)
    first, second = hidden[:3], hidden[5:]
    if not close(first, second, parameter.dtype):
        raise ConfigError(
            f"{type(scorer.model).__name__} lets sequences of one batch see each other (its layers are not all "
            "attention), so it cannot run without padding."
        )


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Equal up to what `dtype` can tell apart in differently shaped matrix products."""
    tolerance = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().amax()))


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
