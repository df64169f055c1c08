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
from skyrl_train.models.lora import BASE_LAYER_INFIX
from skyrl_train.models.padding_free import check_padding_free, get_rope_parameters, patch_model
from skyrl_train.models.parallel_group import ParallelGroup
from skyrl_train.models.parameter_shards import ParameterShard
from skyrl_train.models.pretrained_weights import ALL_ROWS, PretrainedWeights
from skyrl_train.models.ragged_attention import RAGGED_ATTENTION_NAME, deterministic_index_select
from skyrl_train.models.routing import RouterLossInputs, Routers
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.shared_prompts import SharedPromptLayout
from skyrl_train.models.sliding_windows import max_plain_attention_length, shortened_windows
from skyrl_train.models.temporary_weights import temporarily_materialized
from skyrl_train.models.tensor_parallel import TensorParallel

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
        parallel_group: ParallelGroup | None = None,
        pretrained: PretrainedWeights | None = None,
        expert_parallel: ExpertParallel | None = None,
    ):
        """`parallel_group`: the ranks that share every batch; each passes the whole batch and gets its whole result.

        `expert_parallel`: the ranks that share out the experts; they run the same number of batches.
        `saved`: what the parameters of a model on the meta device are read from.
        """
        super().__init__()
        patch_model(model)
        check_padding_free(model)
        model.set_attn_implementation(RAGGED_ATTENTION_NAME)
        self.model = model
        self.pretrained = pretrained
        self.parallel_group = parallel_group
        self.sequence_parallel = parallel_group if isinstance(parallel_group, SequenceParallel) else None
        self.tensor_parallel = parallel_group if isinstance(parallel_group, TensorParallel) else None
        self.expert_parallel = expert_parallel
        self.routers = Routers(model)
        self.router_aux_loss_weight = 0.0
        """Of the routers' auxiliary loss, for each token that is scored; 0 for none."""
        self.routed_experts: Tensor | None = None
        """[T, L, k] int16: the experts that the last forward chose, if routers keep their choices."""
        self.parameter_shards: dict[str, ParameterShard] = {}
        """Checkpoint name -> part, for parameters of which this rank has only a part."""
        self._max_exact_length = max_exact_length(model.config.get_text_config())
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

    def read_pretrained(self, name: str, rows: slice = ALL_ROWS) -> Tensor:
        """Rows of this rank's part of a parameter, by its name in this module, from the checkpoint, in its dtype."""
        assert self.pretrained is not None, f"{name} has no values: its model was made on the meta device"
        name = self.hf_name(name)
        part, saved = self.parameter_shards.get(name), name.replace(BASE_LAYER_INFIX, ".")
        if part is None:
            return self.pretrained.read(saved, rows)
        if part.dim == 0 and part.blocks == 1:
            return self.pretrained.read(saved, part.to_full_rows(self.pretrained.count_rows(saved), rows))
        return part.extract(self.pretrained.read(saved))[rows]

    def persistent_buffers(self) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, buffer) of those that checkpoints have: DeepSeek's routers have one."""
        for path, module in self.model.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}", buffer

    def expert_modules(self) -> list[nn.Module]:
        """The modules with the experts of a layer, where ranks share these out."""
        if self.expert_parallel is None:
            return []
        owners = {name.rpartition(".")[0] for name in self.parameter_shards}
        return [module for path, module in self.model.named_modules() if self.hf_name(f"model.{path}") in owners]

    def decoder_layers(self) -> list[nn.Module]:
        """The repeated blocks, which strategies shard one by one."""
        names = set(self.model._no_split_modules or ())
        return [module for module in self.model.modules() if any(c.__name__ in names for c in type(module).__mro__)]

    def hidden_before_targets(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        offsets: Tensor,
        target_mask: Tensor,
        shared_prompt_lengths: Tensor | None,
        replayed_experts: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Positions [N] of the tokens in score_mask [T], and the last hidden state before each [N, hidden size].

        In a parallel group, only those whose state is on this rank. repeated [B]: how many first tokens a sequence has
        in common with the one before it; these are run once (see data.batch.TrainBatch.repeated_prompts); None means
        none. `routing` [T, L, k]: see TrainBatch.
        If nothing is scored, it returns position and state of some first token, which `spread` multiplies by 0:
        sharded models need the same backward on every rank.
        """
        layout = SharedPromptLayout.from_offsets(offsets, shared_prompt_lengths, self._min_tokens)
        longest = max(layout.segments.attended_lengths)
        if self._max_exact_length and longest > self._max_exact_length:
            raise ConfigError(
                f"A sequence has {longest} tokens, but beyond {self._max_exact_length} this model's rope changes for a "
                "whole micro-batch (longrope), or its attention is divided into chunks (Llama 4); shorten prompts or "
                "responses (max_prompt_length, max_generate_length)."
            )
        if self._learned_positions and longest > self._learned_positions:
            raise ConfigError(
                f"A sequence has {longest} tokens, but this model has embeddings of {self._learned_positions} "
                "positions; shorten prompts or responses (max_prompt_length, max_generate_length)."
            )
        positions = target_mask.nonzero().flatten()
        assert bool((position_ids[positions] > 0).all()), "there is no state before a sequence's first token"
        places = layout.inverse_indices[positions - 1]
        if self.sequence_parallel is not None:
            mine = self.sequence_parallel.local_slice(len(layout.token_indices))
            here = (places >= mine.start) & (places < mine.stop)
            positions, places = positions[here], places[here] - mine.start
        if self.tensor_parallel is not None:
            mine = self.tensor_parallel.local_slice(len(positions))
            positions, places = positions[mine], places[mine]
        if positions.numel() == 0:
            positions, places = positions.new_zeros(1), places.new_zeros(1)
        if self.router_aux_loss_weight:
            self.routers.loss_inputs = self._router_loss_inputs(layout, offsets, target_mask)
        hidden = self._hidden_states(input_ids, position_ids, layout, self.sequence_parallel, replayed_experts)
        self.routed_experts = (
            self.routers.routed_experts()[layout.inverse_indices] if self.routers.record_routed_experts else None
        )
        return positions, deterministic_index_select(hidden, places)

    def _router_loss_inputs(self, layout: SharedPromptLayout, offsets: Tensor, target_mask: Tensor) -> RouterLossInputs:
        sequence_ids = torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), offsets.diff())
        scored = sequence_ids.new_zeros(len(offsets) - 1).index_add(0, sequence_ids, target_mask.long()).double()
        ranks = 1 if self.tensor_parallel is None else self.tensor_parallel.size  # each of which adds the same
        return RouterLossInputs(layout.inverse_indices, sequence_ids, scored * self.router_aux_loss_weight / ranks)

    def scatter_to_tokens(self, values: Tensor, positions: Tensor, target_mask: Tensor) -> Tensor:
        """[T] with all ranks' values [N] at their positions; 0, with a gradient of 0, outside score_mask."""
        everywhere = values.new_zeros(len(target_mask)).index_copy(0, positions, values * target_mask[positions])
        return everywhere if self.parallel_group is None else self.parallel_group.all_reduce_disjoint(everywhere)

    @property
    def _min_tokens(self) -> int:
        """The fewest tokens of a batch: every rank must have one, as it takes part in the exchanges between ranks."""
        return 1 if self.sequence_parallel is None else self.sequence_parallel.size

    def _hidden_states(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        layout: SharedPromptLayout,
        parallel: SequenceParallel | None,
        replayed_experts: Tensor | None = None,
    ) -> Tensor:
        """[c, hidden size] the last hidden states of the tokens of `packing` that this rank runs."""
        tokens = (
            layout.token_indices
            if parallel is None
            else layout.token_indices[parallel.local_slice(len(layout.token_indices))]
        )
        with self.routers.forward_pass(None if replayed_experts is None else replayed_experts[tokens]):
            output = self.model.base_model(
                input_ids=input_ids[tokens].unsqueeze(0),
                position_ids=position_ids[tokens].unsqueeze(0),
                use_cache=False,
                ragged_segments=layout.segments,
                sequence_parallel=parallel,
            )
        hidden: Tensor = output.last_hidden_state.squeeze(0)
        return hidden


def get_lm_head(model: PreTrainedModel) -> nn.Linear:
    """The LM head. Raises ConfigError for a model that is not a body with a linear head."""
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear) or model.base_model is model:
        raise ConfigError(
            f"{type(model).__name__} is not a causal language model with a linear head; use a text-only one."
        )
    return head


def verify_and_shard(ragged_model: RaggedModel) -> None:
    """Check that a model can run without padding and in its parallel group; with tensor parallelism also divide it.

    It runs the same tokens twice in one batch, after different ones: results must be equal, and those of the model's
    own attention. Sliding windows are shorter meanwhile than the sequences. Then the parallel group, if there is one,
    must get the same results as one process. Raises ConfigError.
    """
    with temporarily_materialized(ragged_model), shortened_windows(ragged_model.model, _CHECK_WINDOW) as windowed:
        _verify_and_shard(ragged_model, compare_attention=windowed or ragged_model.pretrained is None)


def _verify_and_shard(ragged_model: RaggedModel, compare_attention: bool) -> None:
    """`compares`: with the model's own attention, which reads lent weights once more."""
    parameter, vocabulary = next(ragged_model.parameters()), ragged_model.model.config.get_text_config().vocab_size
    same = torch.arange(1, 10, device=parameter.device) % vocabulary
    ids = torch.cat([same, same[[3, 4]], same])
    places = torch.cat([torch.arange(length, device=parameter.device) for length in (9, 2, 9)])
    layout = SharedPromptLayout.from_offsets(
        torch.tensor([0, 9, 11, 20], device=parameter.device), None, ragged_model._min_tokens
    )
    with torch.no_grad():
        computed = ragged_model._hidden_states(ids, places, layout, None)
    first, second = computed[layout.inverse_indices[:9]], computed[layout.inverse_indices[11:]]
    if not is_close(first, second, computed.dtype):
        raise ConfigError(
            f"{type(ragged_model.model).__name__} lets sequences of one batch see each other (its layers are not all "
            "attention), so it cannot run without padding."
        )
    if compare_attention:
        own = _own_attention(ragged_model, same)
        deviation = (first - own).float().norm(dim=-1) / own.float().norm(dim=-1)
        # The median: rounding may send some tokens to other experts.
        if not float(deviation.median()) <= (0.25 if computed.dtype.itemsize < 4 else 1e-3):
            raise ConfigError(
                f"{type(ragged_model.model).__name__} computes something else without padding than with its own attention, "
                "so it cannot be trained exactly. Use another model class."
            )
    groups = [one for one in (ragged_model.parallel_group, ragged_model.expert_parallel) if one is not None]
    if not groups:
        return
    for group in (ragged_model.tensor_parallel, ragged_model.expert_parallel):
        if group is not None:
            parts = group.shard_model(ragged_model.model)
            ragged_model.parameter_shards |= {
                ragged_model.hf_name(f"model.{name}"): part for name, part in parts.items()
            }
    if ragged_model.sequence_parallel is not None:
        computed = computed[ragged_model.sequence_parallel.local_slice(len(computed))]
    message = (
        f"{type(ragged_model.model).__name__} computes something else when it is divided over ranks: set "
        f"{' and '.join(group.size_key for group in groups)} to 1."
    )
    try:
        with torch.no_grad():
            again = ragged_model._hidden_states(ids, places, layout, ragged_model.sequence_parallel)
    except dist.DistError:
        raise
    except (RuntimeError, TypeError) as error:  # such as weights of another number of heads
        raise ConfigError(f"{message} ({error})") from error
    deviation = (again - computed).float().norm(dim=-1) / computed.float().norm(dim=-1)
    if not float(deviation.max()) <= (
        0.25 if computed.dtype.itemsize < 4 else 1e-4
    ):  # relative: some channels are large
        raise ConfigError(message)


def _own_attention(ragged_model: RaggedModel, ids: Tensor) -> Tensor:
    """[T, hidden size] the last hidden states of one sequence with the model's own attention."""
    model: Any = ragged_model.model
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad(), ragged_model.routers.forward_pass(None):
            hidden: Tensor = model.base_model(input_ids=ids.unsqueeze(0), use_cache=False).last_hidden_state
    finally:
        model.set_attn_implementation(RAGGED_ATTENTION_NAME)
    return hidden.squeeze(0)


def is_close(one: Tensor, other: Tensor, dtype: torch.dtype) -> bool:
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


def max_exact_length(config: Any) -> int | None:
    """Return the length beyond which a model computes something else in a batch than alone; None if there is none.

    Longrope changes its frequencies for a whole batch. For chunked attention see `chunk_limit`.
    """
    limits = [
        int(rope.get("original_max_position_embeddings") or config.max_position_embeddings)
        for rope in get_rope_parameters(config)
        if rope.get("rope_type") == "longrope"
    ]
    if (chunk := max_plain_attention_length(config)) is not None:
        limits.append(chunk)
    return min(limits, default=None)
