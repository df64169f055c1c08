"""The body of a causal language model over the ragged batch: the base of all scorers, which add a head.

Legend: T tokens of all sequences, B sequences, N tokens that are scored.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError
from skyrl_train.models.expert_parallel import ExpertParallel
from skyrl_train.models.lent_weights import weights_lent
from skyrl_train.models.lora import BASE
from skyrl_train.models.packing import Packing
from skyrl_train.models.padding_free import adapt, check_padding_free, ropes
from skyrl_train.models.parts import Part
from skyrl_train.models.ragged_attention import RAGGED, gathered
from skyrl_train.models.rank_group import RankGroup
from skyrl_train.models.routing import Balance, Routers
from skyrl_train.models.saved_weights import EVERYTHING, SavedWeights
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.tensor_parallel import TensorParallel
from skyrl_train.models.windows import chunk_limit, windows_of

_CHECK_WINDOW = 4
"""Tokens that layers with a sliding window see in the check of a new model: fewer than its sequences have."""


class RaggedModel(nn.Module):
    """Base of scorers: computes hidden states of all tokens; the head reads those before the tokens to score.

    The model is switched to attention without padding. Raises ConfigError for a model whose hidden states would depend
    on other sequences in the batch, or on randomness.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        parallel_group: RankGroup | None = None,
        saved: SavedWeights | None = None,
        expert_parallel: ExpertParallel | None = None,
    ):
        """`parallel_group`: the ranks that share every batch; each passes the whole batch and gets its whole result.

        `expert_parallel`: the ranks that share out the experts; they run the same number of batches.
        `saved`: what the parameters of a model on the meta device are read from.
        """
        super().__init__()
        adapt(model)
        check_padding_free(model)
        model.set_attn_implementation(RAGGED)
        self.model = model
        self.saved = saved
        self.parallel_group = parallel_group
        self.sequence_parallel = parallel_group if isinstance(parallel_group, SequenceParallel) else None
        self.tensor_parallel = parallel_group if isinstance(parallel_group, TensorParallel) else None
        self.expert_parallel = expert_parallel
        self.routers = Routers(model)
        self.balance_weight = 0.0
        """Of the routers' auxiliary loss, for each token that is scored; 0 for none."""
        self.choices: Tensor | None = None
        """[T, L, k] int16: the experts that the last forward chose, if routers keep their choices."""
        self.parts: dict[str, Part] = {}
        """Checkpoint name -> part, for parameters of which this rank has only a part."""
        self._longest_exact = longest_exact(model.config.get_text_config())
        self._learned_positions = _learned_positions(model)
        self._noisy = [module for module in model.modules() if any("jitter" in name for name in vars(module))]

    def train(self, mode: bool = True) -> Self:
        """See Module. Routers with jitter stay in evaluation mode: the engines' log-probs have none of its noise."""
        super().train(mode)
        for module in self._noisy:
            module.training = False
        return self

    def hf_name(self, name: str) -> str:
        """A parameter's name in the Hugging Face checkpoint, from its name in this module."""
        return name.removeprefix("model.")

    def read(self, name: str, rows: slice = EVERYTHING) -> Tensor:
        """Rows of this rank's part of a parameter, by its name in this module, from the checkpoint, in its dtype."""
        assert self.saved is not None, f"{name} has no values: its model was made on the meta device"
        name = self.hf_name(name)
        part, saved = self.parts.get(name), name.replace(BASE, ".")
        if part is None:
            return self.saved.read(saved, rows)
        if part.dim == 0 and part.blocks == 1:
            return self.saved.read(saved, part.rows(self.saved.count_rows(saved), rows))
        return part.of(self.saved.read(saved))[rows]

    def saved_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, buffer) of those that checkpoints have: DeepSeek's routers have one."""
        for path, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}", buffer

    def experts(self) -> list[nn.Module]:
        """The modules with the experts of a layer, where ranks share these out."""
        if self.expert_parallel is None:
            return []
        owners = {name.rpartition(".")[0] for name in self.parts}
        return [module for path, module in self.model.named_modules() if self.hf_name(f"model.{path}") in owners]

    def decoder_layers(self) -> list[nn.Module]:
        """The repeated blocks, which strategies shard one by one."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if any(c.__name__ in names for c in type(module).__mro__)]

    def before_scored(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        offsets: Tensor,
        score_mask: Tensor,
        repeated: Tensor | None,
        routing: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Positions [N] of the tokens in score_mask [T], and the last hidden state before each [N, hidden size].

        In a parallel group, only those whose state is on this rank. repeated [B]: how many first tokens a sequence has
        in common with the one before it; these are run once (see data.batch.TrainBatch.repeated_prompts); None means
        none. `routing` [T, L, k]: see TrainBatch.
        If nothing is scored, it returns position and state of some first token, which `spread` multiplies by 0:
        sharded models need the same backward on every rank.
        """
        packing = Packing.of(offsets, repeated, self._least_tokens)
        longest = max(packing.segments.seen)
        if self._longest_exact and longest > self._longest_exact:
            raise ConfigError(
                f"A sequence has {longest} tokens, but beyond {self._longest_exact} this model's rope changes for a "
                "whole micro-batch (longrope), or its attention is divided into chunks (Llama 4); shorten prompts or "
                "responses (max_prompt_length, max_generate_length)."
            )
        if self._learned_positions and longest > self._learned_positions:
            raise ConfigError(
                f"A sequence has {longest} tokens, but this model has embeddings of {self._learned_positions} "
                "positions; shorten prompts or responses (max_prompt_length, max_generate_length)."
            )
        positions = score_mask.nonzero().flatten()
        assert bool((position_ids[positions] > 0).all()), "there is no state before a sequence's first token"
        places = packing.places[positions - 1]
        if self.sequence_parallel is not None:
            mine = self.sequence_parallel.chunk(len(packing.tokens))
            here = (places >= mine.start) & (places < mine.stop)
            positions, places = positions[here], places[here] - mine.start
        if self.tensor_parallel is not None:
            mine = self.tensor_parallel.chunk(len(positions))
            positions, places = positions[mine], places[mine]
        if positions.numel() == 0:
            positions, places = positions.new_zeros(1), places.new_zeros(1)
        if self.balance_weight:
            self.routers.balance = self._balance(packing, offsets, score_mask)
        hidden = self._hidden(input_ids, position_ids, packing, self.sequence_parallel, routing)
        self.choices = self.routers.choices()[packing.places] if self.routers.keeps_choices else None
        return positions, gathered(hidden, places)

    def _balance(self, packing: Packing, offsets: Tensor, score_mask: Tensor) -> Balance:
        sequence_ids = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())
        scored = sequence_ids.new_zeros(len(offsets) - 1).index_add(0, sequence_ids, score_mask.long()).double()
        ranks = 1 if self.tensor_parallel is None else self.tensor_parallel.size  # each of which adds the same
        return Balance(packing.places, sequence_ids, scored * self.balance_weight / ranks)

    def spread(self, values: Tensor, positions: Tensor, score_mask: Tensor) -> Tensor:
        """[T] with all ranks' values [N] at their positions; 0, with a gradient of 0, outside score_mask."""
        everywhere = values.new_zeros(len(score_mask)).index_copy(0, positions, values * score_mask[positions])
        return everywhere if self.parallel_group is None else self.parallel_group.sum_of_parts(everywhere)

    @property
    def _least_tokens(self) -> int:
        """The fewest tokens of a batch: every rank must have one, as it takes part in the exchanges between ranks."""
        return 1 if self.sequence_parallel is None else self.sequence_parallel.size

    def _hidden(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        packing: Packing,
        parallel: SequenceParallel | None,
        routing: Tensor | None = None,
    ) -> Tensor:
        """[c, hidden size] the last hidden states of the tokens of `packing` that this rank runs."""
        tokens = packing.tokens if parallel is None else packing.tokens[parallel.chunk(len(packing.tokens))]
        with self.routers.running(None if routing is None else routing[tokens]):
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
    """The LM head. Raises ConfigError for a model that is not a body with a linear head."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        raise ConfigError(
            f"{type(model).__name__} is not a causal language model with a linear head; use a text-only one."
        )
    return head


def check_and_divide(scorer: RaggedModel) -> None:
    """Check that a model can run without padding and in its parallel group; with tensor parallelism also divide it.

    It runs the same tokens twice in one batch, after different ones: results must be equal, and those of the model's
    own attention. Sliding windows are shorter meanwhile than the sequences. Then the parallel group, if there is one,
    must get the same results as one process. Raises ConfigError.
    """
    with weights_lent(scorer), windows_of(scorer.model, _CHECK_WINDOW) as windowed:
        _check_and_divide(scorer, compares=windowed or scorer.saved is None)


def _check_and_divide(scorer: RaggedModel, compares: bool) -> None:
    """`compares`: with the model's own attention, which reads lent weights once more."""
    parameter, vocabulary = next(scorer.parameters()), scorer.model.config.get_text_config().vocab_size
    same = torch.arange(1, 10, device=parameter.device) % vocabulary
    ids = torch.cat([same, same[[3, 4]], same])
    places = torch.cat([torch.arange(length, device=parameter.device) for length in (9, 2, 9)])
    packing = Packing.of(torch.tensor([0, 9, 11, 20], device=parameter.device), None, scorer._least_tokens)
    with torch.no_grad():
        computed = scorer._hidden(ids, places, packing, None)
    first, second = computed[packing.places[:9]], computed[packing.places[11:]]
    if not close(first, second, computed.dtype):
        raise ConfigError(
            f"{type(scorer.model).__name__} lets sequences of one batch see each other (its layers are not all "
            "attention), so it cannot run without padding."
        )
    if compares:
        own = _own_attention(scorer, same)
        deviation = (first - own).float().norm(dim=-1) / own.float().norm(dim=-1)
        # The median: rounding may send some tokens to other experts.
        if not float(deviation.median()) <= (0.25 if computed.dtype.itemsize < 4 else 1e-3):
            raise ConfigError(
                f"{type(scorer.model).__name__} computes something else without padding than with its own attention, "
                "so it cannot be trained exactly. Use another model class."
            )
    groups = [one for one in (scorer.parallel_group, scorer.expert_parallel) if one is not None]
    if not groups:
        return
    for group in (scorer.tensor_parallel, scorer.expert_parallel):
        if group is not None:
            parts = group.divide(scorer.model)
            scorer.parts |= {scorer.hf_name(f"model.{name}"): part for name, part in parts.items()}
    if scorer.sequence_parallel is not None:
        computed = computed[scorer.sequence_parallel.chunk(len(computed))]
    message = (
        f"{type(scorer.model).__name__} computes something else when it is divided over ranks: set "
        f"{' and '.join(group.key for group in groups)} to 1."
    )
    try:
        with torch.no_grad():
            again = scorer._hidden(ids, places, packing, scorer.sequence_parallel)
    except dist.DistError:
        raise
    except (RuntimeError, TypeError) as error:  # such as weights of another number of heads
        raise ConfigError(f"{message} ({error})") from error
    deviation = (again - computed).float().norm(dim=-1) / computed.float().norm(dim=-1)
    if not float(deviation.max()) <= (
        0.25 if computed.dtype.itemsize < 4 else 1e-4
    ):  # relative: some channels are large
        raise ConfigError(message)


def _own_attention(scorer: RaggedModel, ids: Tensor) -> Tensor:
    """[T, hidden size] the last hidden states of one sequence with the model's own attention."""
    model: Any = scorer.model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), scorer.routers.running(None):
            hidden: Tensor = model.base_model(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state
    finally:
        model.set_attn_implementation(RAGGED)
    return hidden.squeeze(0)


def close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
    """Whether tensors are equal up to the rounding of differently shaped matrix products in `dtype`."""
    tolerance = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    return torch.allclose(one, other, rtol=tolerance, atol=tolerance * float(one.abs().amax()))


def _learned_positions(model: PreTrainedModel) -> int | None:
    """Return the number of positions of a model that has an embedding of each, as GPT-2 does; None for others."""
    longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    words = model.get_input_embeddings()
    tables = [one.num_embeddings for one in model.modules() if isinstance(one, nn.Embedding) and one is not words]
    # Some tables begin with two rows that no position has.
    return longest if longest is not None and {longest, longest + 2} & set(tables) else None


def longest_exact(config: Any) -> int | None:
    """Return the length beyond which a model computes something else in a batch than alone; None if there is none.

    Longrope changes its frequencies for a whole batch. For chunked attention see `chunk_limit`.
    """
    limits = [
        int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in ropes(config)
        if rope.get("rope_type") == "longrope"
    ]
    if (chunk := chunk_limit(config)) is not None:
        limits.append(chunk)
    return min(limits, default=None)
