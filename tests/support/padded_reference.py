"""The reference for the ragged path: log-probs and values from a padded rectangle and the model's forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.data.batch import SFTExample, TrainBatch, collate_sft_examples


def ragged_batch(
    lengths: Sequence[int], *, seed: int = 0, vocab_size: int = 256, temperatures: Sequence[float] | None = None
) -> TrainBatch:
    """Return random token IDs.

    The first third of every sequence (at least one token) is prompt, the rest is sampled.
    """
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor(lengths)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    prompts = (sizes // 3).clamp(min=1)
    positions = torch.cat([torch.arange(length) for length in lengths])
    rows = len(lengths)
    return TrainBatch(
        input_ids=torch.randint(3, vocab_size, (int(sizes.sum()),), generator=generator),
        loss_mask=positions >= torch.repeat_interleave(prompts, sizes),
        offsets=offsets,
        prompt_lengths=prompts,
        group_ids=torch.arange(rows) // 2,
        rewards=torch.zeros(rows),
        temperature=torch.tensor(temperatures or [1.0] * rows),
        status=torch.ones(rows, dtype=torch.bool),
        min_versions=torch.zeros(rows, dtype=torch.int64),
        max_versions=torch.zeros(rows, dtype=torch.int64),
    )


def single_sequence(ids: Sequence[int], num_given: int, temperature: float = 1.0) -> TrainBatch:
    """Return a batch of one sequence, in which the tokens after the first `num_given` are in the loss mask."""
    batch = collate_sft_examples([SFTExample(list(ids), [index >= num_given for index in range(len(ids))])])
    return replace(batch, temperature=torch.tensor([temperature]))


def grouped_batch(
    groups: Sequence[tuple[int, Sequence[int]]], *, seed: int = 0, vocab_size: int = 256, temperature: float = 0.8
) -> TrainBatch:
    """Return groups of (prompt length, response lengths). The samples of a group begin with the same random prompt."""
    lengths = [prompt + response for prompt, responses in groups for response in responses]
    batch = ragged_batch(lengths, seed=seed, vocab_size=vocab_size, temperatures=[temperature] * len(lengths))
    prompts = torch.tensor([prompt for prompt, responses in groups for _ in responses])
    group_ids = torch.repeat_interleave(torch.tensor([len(responses) for _, responses in groups]))
    in_prompt = batch.position_ids < batch.expand_to_tokens(prompts)
    owner = batch.expand_to_tokens(group_ids)
    shared = torch.randint(
        3, vocab_size, (len(groups), max(lengths)), generator=torch.Generator().manual_seed(seed + 1)
    )
    return replace(
        batch,
        input_ids=torch.where(in_prompt, shared[owner, batch.position_ids], batch.input_ids),
        loss_mask=~in_prompt,
        prompt_lengths=prompts,
        group_ids=group_ids,
    )


def padded_scores(model: PreTrainedModel, batch: TrainBatch) -> tuple[Tensor, Tensor]:
    """Return [T] log-probs and [T] entropies of masked tokens, 0 elsewhere, from right-padded rows and all logits."""
    ids = batch.padded(batch.input_ids)
    mask = batch.padded(torch.ones_like(batch.input_ids))
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits / batch.temperature.to(logits.dtype)[:, None, None]
    everything = logits.log_softmax(-1)
    chosen = everything.gather(-1, ids[:, 1:, None]).squeeze(-1)
    entropy = -(everything.exp() * everything).sum(-1)
    pad = chosen.new_zeros(len(batch), 1)
    rows, columns = batch.sequence_ids, batch.position_ids
    return tuple(torch.cat([pad, x], dim=1)[rows, columns] * batch.loss_mask for x in (chosen, entropy))  # type: ignore[return-value]


def padded_values(model: PreTrainedModel, weight: Tensor, batch: TrainBatch) -> Tensor:
    """Return [T] `weight` [1, hidden size] times the last hidden state before each masked token, 0 elsewhere."""
    ids = batch.padded(batch.input_ids)
    mask = batch.padded(torch.ones_like(batch.input_ids))
    hidden = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state[:, :-1]
    values = (hidden @ weight.mT).squeeze(-1)
    pad = values.new_zeros(len(batch), 1)
    return torch.cat([pad, values], dim=1)[batch.sequence_ids, batch.position_ids] * batch.loss_mask


def assert_same_tensors(
    got: Mapping[str, Tensor], wanted: Mapping[str, Tensor], tolerance: float = 1e-9, case: str = ""
) -> None:
    """Check gradients or weights by name: the norm of each error is small beside its own norm, or the norm of all."""
    assert got.keys() == wanted.keys(), case
    whole = torch.stack([tensor.norm() for tensor in wanted.values()]).norm()
    for name, tensor in wanted.items():
        error = float((got[name] - tensor).norm())
        assert error <= tolerance * max(float(tensor.norm()), 1e-3 * float(whole)), (case, name, error)
