"""The layout of a micro-batch for a forward pass: computed on the host, before anything is copied to the device.

Legend: T tokens of all sequences, B sequences, c tokens that this rank runs, N target tokens of this rank, L layers
with experts, k experts for each token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from skyrl_train.data.batch import TrainBatch
from skyrl_train.models.ragged_attention import Segments
from skyrl_train.models.routing import RouterLossInputs
from skyrl_train.models.sequence_parallel import SequenceParallel
from skyrl_train.models.shared_prompts import SharedPromptLayout
from skyrl_train.models.tensor_parallel import TensorParallel


@dataclass(frozen=True)
class TargetTokens:
    """The target tokens of this rank: those whose log-probs, or values of the states before them, are computed.

    If there are none, it has one arbitrary token, so that every rank runs the same backward.
    """

    positions: Tensor
    """[N] int64: the index of each target among the T tokens."""
    input_ids: Tensor
    """[N] int64: token ids of the targets."""
    state_indices: Tensor
    """[N] int64: the index, among the c tokens, of the token before each target."""
    temperature: Tensor | None
    """[N] float32: sampling temperatures, where 0 counts as 1, as in engines; None if all are 1."""
    is_placeholder: bool
    """True if the token is arbitrary, so that its values must be multiplied by 0."""


@dataclass(frozen=True)
class ModelInputs:
    """Everything that a forward pass reads of a micro-batch. The copy on a device is made by `copy_to_device`."""

    num_tokens: int
    """Number of tokens of the micro-batch, T."""
    num_computed_tokens: int
    """Number of tokens that all ranks together run: shared prompts count once."""
    input_ids: Tensor
    """[c] int64: ids of the tokens that this rank runs."""
    position_ids: Tensor
    """[c] int64: position of each of them in its sequence."""
    segments: Segments
    """The segments of the tokens of all ranks."""
    targets: TargetTokens
    replayed_experts: Tensor | None
    """[c, L, k] int16: expert ids to replay; see TrainBatch.routing."""
    inverse_indices: Tensor | None
    """[T] int64: index of each token of the batch among the computed ones; None unless routed experts are recorded."""
    router_loss_inputs: RouterLossInputs | None
    """None without a router auxiliary loss."""


def lay_out(
    batch: TrainBatch,
    shared_prompt_lengths: Tensor | None,
    replayed_experts: Tensor | None,
    *,
    sequence_parallel: SequenceParallel | None,
    tensor_parallel: TensorParallel | None,
    has_recurrent_layers: bool,
    records_experts: bool,
    router_aux_loss_weight: float,
) -> ModelInputs:
    """Return the inputs of a forward pass on the CPU.

    Args:
        batch: The micro-batch, on the CPU. Its loss mask never has a sequence's first token.
        shared_prompt_lengths: Number of leading tokens that each sequence shares with the previous one [B]; they run
            once. None: no tokens are shared.
        replayed_experts: Expert ids [T, L, k] to replay; None lets the routers choose.
        sequence_parallel: The ranks that divide the computed tokens.
        tensor_parallel: The ranks that divide the targets.
        has_recurrent_layers: Also prepare the sequences without shared prompts.
        records_experts: Include `inverse_indices`.
        router_aux_loss_weight: Weight of the router auxiliary loss for each target token; 0 for none.
    """
    # Every rank takes part in the exchanges between ranks, so it needs a token.
    min_tokens = 1 if sequence_parallel is None else sequence_parallel.size
    layout = SharedPromptLayout.from_offsets(batch.offsets, shared_prompt_lengths, min_tokens)
    tokens = layout.token_indices
    positions, position_ids = batch.loss_mask.nonzero().flatten(), batch.position_ids
    assert bool((position_ids[positions] > 0).all()), "there is no state before a sequence's first token"
    indices = layout.inverse_indices[positions - 1]
    if sequence_parallel is not None:
        local = sequence_parallel.local_slice(len(tokens))
        is_local = (indices >= local.start) & (indices < local.stop)
        tokens, positions, indices = tokens[local], positions[is_local], indices[is_local] - local.start
    if tensor_parallel is not None:
        local = tensor_parallel.local_slice(len(positions))
        positions, indices = positions[local], indices[local]
    router_loss_inputs = None
    if router_aux_loss_weight:
        num_targets = batch.sum_per_sequence(batch.loss_mask.long()).double()
        ranks = 1 if tensor_parallel is None else tensor_parallel.size  # each of which adds the same
        weights = num_targets * router_aux_loss_weight / ranks
        router_loss_inputs = RouterLossInputs(layout.inverse_indices, batch.sequence_ids, weights)
    return ModelInputs(
        num_tokens=len(batch.input_ids),
        num_computed_tokens=len(layout.token_indices),
        input_ids=batch.input_ids[tokens].long(),
        position_ids=position_ids[tokens],
        segments=layout.segments.prepare_sequences() if has_recurrent_layers else layout.segments,
        targets=_target_tokens(batch, positions, indices),
        replayed_experts=None if replayed_experts is None else replayed_experts[tokens],
        inverse_indices=layout.inverse_indices if records_experts else None,
        router_loss_inputs=router_loss_inputs,
    )


def _target_tokens(batch: TrainBatch, positions: Tensor, indices: Tensor) -> TargetTokens:
    is_placeholder = len(positions) == 0
    if is_placeholder:
        positions, indices = positions.new_zeros(1), indices.new_zeros(1)
    sequence_ids = torch.searchsorted(batch.offsets, positions, right=True) - 1
    temperature = torch.where(batch.temperature > 0, batch.temperature, 1.0)[sequence_ids]
    return TargetTokens(
        positions,
        batch.input_ids[positions].long(),
        indices,
        None if bool((temperature == 1).all()) else temperature,
        is_placeholder,
    )
