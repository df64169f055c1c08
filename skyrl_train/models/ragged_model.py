"""The body of a causal language model over the ragged batch: what every scorer puts a head on.

Legend: T tokens of all sequences, B sequences, N tokens that are scored.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.packing import Packing
from skyrl_train.models.ragged_attention import RAGGED, gathered
from skyrl_train.models.rank_group import RankGroup
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.tensor_parallel import Part, TensorParallel


class RaggedModel(nn.Module):
    """Base of scorers: hidden states of all tokens, of which a head reads those before the tokens to score.

    The model is switched to attention without padding. Raises ConfigError for one whose hidden states would depend on
    what else is in the batch, or on chance.
    """

    def __init__(self, model: PreTrainedModel, together: RankGroup | None = None):
        """`together`: the ranks that run every batch together; each of them gives all of it and gets all of it."""
        super().__init__()
        _refuse_what_packing_changes(model)
        model.set_attn_implementation(RAGGED)
        self.model = model
        self.together = together
        self.parallel = together if isinstance(together, SequenceParallel) else None
        self.tensor = together if isinstance(together, TensorParallel) else None
        self.parts: dict[str, Part] = {}
        """Of parameters by their names in checkpoints, where this rank has a part."""
        self._longest_exact = _longest_exact(model.config)

    def hf_name(self, name: str) -> str:
        """A parameter's name in the Hugging Face checkpoint, from its name in this module."""
        return name.removeprefix("model.")

    def decoder_layers(self) -> list[nn.Module]:
        """The repeated blocks: what a strategy shards one by one."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if any(c.__name__ in names for c in type(module).__mro__)]

    def before_scored(
        self, input_ids: Tensor, position_ids: Tensor, offsets: Tensor, score_mask: Tensor, repeated: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Positions [N] of the tokens in score_mask [T], and the last hidden state before each [N, hidden size].

        With ranks that run the batch together, those whose state is on this one. repeated [B]: how many first tokens a
        sequence has in common with the one before it, which go through the model once (see
        data.batch.TrainBatch.repeated_prompts); None is none. Where nothing is scored, position and state are those of
        some first token, for `spread` to multiply by 0: sharded models need the same backward on every rank.
        """
        packing = Packing.of(offsets, repeated, self._least_tokens)
        longest = max(packing.segments.seen)
        if self._longest_exact and longest > self._longest_exact:
            raise ConfigError(
                f"A sequence has {longest} tokens, but this model's rope changes for a whole micro-batch "
                f"beyond {self._longest_exact}; shorten prompts or responses (max_prompt_length, max_generate_length)."
            )
        positions = score_mask.nonzero().flatten()
        assert bool((position_ids[positions] > 0).all()), "there is no state before a sequence's first token"
        places = packing.places[positions - 1]
        if self.parallel is not None:
            mine = self.parallel.chunk(len(packing.tokens))
            here = (places >= mine.start) & (places < mine.stop)
            positions, places = positions[here], places[here] - mine.start
        if self.tensor is not None:
            mine = self.tensor.chunk(len(positions))
            positions, places = positions[mine], places[mine]
        if positions.numel() == 0:
            positions, places = positions.new_zeros(1), places.new_zeros(1)
        return positions, gathered(self._hidden(input_ids, position_ids, packing, self.parallel), places)

    def spread(self, values: Tensor, positions: Tensor, score_mask: Tensor) -> Tensor:
        """[N] at its positions in [T], and there what other ranks have; 0, with a gradient of 0, outside score_mask."""
        everywhere = values.new_zeros(len(score_mask)).index_copy(0, positions, values * score_mask[positions])
        return everywhere if self.together is None else self.together.together(everywhere)

    @property
    def _least_tokens(self) -> int:
        """Of a batch: no rank may be without, or it would miss the exchanges between them."""
        return 1 if self.parallel is None else self.parallel.size

    def _hidden(
        self, input_ids: Tensor, position_ids: Tensor, packing: Packing, parallel: SequenceParallel | None
    ) -> Tensor:
        """[c, hidden size] the last hidden states of those of packing's tokens that this rank runs."""
        tokens = packing.tokens if parallel is None else packing.tokens[parallel.chunk(len(packing.tokens))]
        output = self.model.base_model(
            input_ids=input_ids[tokens].unsqueeze(0),
            position_ids=position_ids[tokens].unsqueeze(0),
            use_cache=False,
            ragged_segments=packing.segments,
            sequence_parallel=parallel,
        )
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden


def linear_head(model: PreTrainedModel) -> nn.Linear:
    """The LM head. Raises ConfigError for a model that is not a body with a linear head on it."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        raise ConfigError(
            f"{type(model).__name__} is not a causal language model with a linear head; use a text-only one."
        )
    return head


def check_and_divide(scorer: RaggedModel) -> None:
    """Run the same three tokens twice in one batch, after different ones; refuse a model in which it shows.

    Then, with ranks that run batches together, the same on all of them: what one process computes must come out. Those
    that have a part of every layer keep that alone.
    """
    parameter = next(scorer.parameters())
    ids = torch.tensor([1, 2, 3, 4, 5, 1, 2, 3], device=parameter.device) % scorer.model.config.vocab_size
    places = torch.tensor([0, 1, 2, 0, 1, 0, 1, 2], device=parameter.device)
    packing = Packing.of(torch.tensor([0, 3, 5, 8], device=parameter.device), None, scorer._least_tokens)
    with torch.no_grad():
        computed = scorer._hidden(ids, places, packing, None)
    first, second = computed[packing.places[:3]], computed[packing.places[5:]]
    if not close(first, second, parameter.dtype):
        raise ConfigError(
            f"{type(scorer.model).__name__} lets sequences of one batch see each other (its layers are not all "
            "attention), so it cannot run without padding."
        )
    if scorer.together is None:
        return
    if scorer.tensor is not None:
        parts = scorer.tensor.divide(scorer.model)
        scorer.parts = {scorer.hf_name(f"model.{name}"): part for name, part in parts.items()}
    if scorer.parallel is not None:
        computed = computed[scorer.parallel.chunk(len(computed))]
    message = (
        f"{type(scorer.model).__name__} computes something else when it is divided over ranks: set "
        f"{scorer.together.key} to 1."
    )
    try:
        with torch.no_grad():
            again = scorer._hidden(ids, places, packing, scorer.parallel)
    except dist.DistError:
        raise
    except RuntimeError as error:  # such as weights of another number of heads
        raise ConfigError(f"{message} ({error})") from error
    apart = (again - computed).float().norm(dim=-1) / computed.float().norm(dim=-1)
    if not float(apart.max()) <= (0.25 if parameter.dtype.itemsize < 4 else 1e-4):  # relative: some channels are large
        raise ConfigError(message)


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
