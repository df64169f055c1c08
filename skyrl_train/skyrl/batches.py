"""Conversion between ragged batches and SkyRL's padded ones: prompts are padded on the left, responses on the right.

Legend: T tokens of all sequences, B sequences, P tokens of the longest prompt, R tokens of the longest response.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from skyrl_train.data.batch import TrainBatch
from skyrl_train.errors import ConfigError
from skyrl_train.skyrl.interface import GeneratorOutput, TrajectoryID

_FIELDS = {
    "loss_mask": "loss_mask",
    "rollout_logprobs": "rollout_logprobs",
    "action_log_probs": "old_logprobs",
    "base_action_log_probs": "ref_logprobs",
    "values": "values",
    "advantages": "token_advantages",
    "returns": "returns",
}
"""SkyRL's names of [B, R] tensors -> the attributes of TrainBatch that hold them."""
_IMMUTABLE_FIELDS = ("sequences", "attention_mask", "response_mask")


class TrainingInputBatch(dict[str, Any]):
    """A batch in SkyRL's form: a dict from names to [B, ...] tensors, and `metadata`.

    A tensor that was not computed is None.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.metadata: dict[str, Any] = {}

    @property
    def batch_size(self) -> int:
        """The number of rows, B; 0 if the batch has no tensor."""
        return next((len(value) for value in self.values() if value is not None), 0)

    def __len__(self) -> int:
        """Return the number of rows, as SkyRL's class does, not the number of tensors."""
        return self.batch_size

    def __getitem__(self, name: Any) -> Any:
        """Return the tensor of a name, or a batch of the rows that an integer or a slice selects."""
        if isinstance(name, str):
            return super().__getitem__(name)
        rows = slice(name, name + 1 or None) if isinstance(name, int) else name
        return self._with_rows(lambda value: value[rows])

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        """Set a tensor.

        Raises:
            ValueError: `value` is neither None nor a tensor, or has another number of rows than the other tensors.
        """
        if value is not None and (not isinstance(value, Tensor) or len(value) != (self.batch_size or len(value))):
            actual = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name}: must be a tensor of {self.batch_size} rows, or None; got {actual}.")
        super().__setitem__(name, value)

    def _with_rows(self, select: Callable[[Tensor], Tensor]) -> TrainingInputBatch:
        part = TrainingInputBatch({name: None if value is None else select(value) for name, value in self.items()})
        part.metadata = self.metadata
        return part

    def slice(self, start: int, end: int, step: int = 1) -> TrainingInputBatch:
        """Return the rows `start:end:step`. The result shares the `metadata` object, as in SkyRL."""
        return self[slice(start, end, step)]

    def chunk(self, chunk_size: int) -> list[TrainingInputBatch]:
        """Split the batch into batches of `chunk_size` rows; the last one may have fewer."""
        return [self[start : start + chunk_size] for start in range(0, self.batch_size, chunk_size)]

    def repeat(self, repeats: int) -> TrainingInputBatch:
        """Return all rows `repeats` times, one copy of the batch after the other."""
        return self._with_rows(lambda value: torch.cat([value] * repeats))

    def repeat_interleave(self, repeats: int) -> TrainingInputBatch:
        """Return every row `repeats` times in succession."""
        return self._with_rows(lambda value: value.repeat_interleave(repeats, dim=0))

    @classmethod
    def cat(cls, shards: Sequence[TrainingInputBatch]) -> TrainingInputBatch:
        """Concatenate the rows of batches that have the same tensors. The result gets the metadata of the first one."""
        batch = cls(
            {
                name: None if value is None else torch.cat([shard[name] for shard in shards])
                for name, value in shards[0].items()
            }
        )
        batch.metadata = shards[0].metadata
        return batch

    def save(self, path: str | Path) -> None:
        """Write the batch to `path` as a pickle. Load only files that you trust: unpickling runs code."""
        Path(path).write_bytes(pickle.dumps(self))

    def load(self, path: str | Path) -> TrainingInputBatch:
        """Return the batch that `save` has written to `path`; `self` does not change.

        Unpickling runs code, so load only files that you trust.

        Raises:
            OSError: The file cannot be read.
        """
        return cast(TrainingInputBatch, pickle.loads(Path(path).read_bytes()))

    def to(self, *args: Any, **kwargs: Any) -> TrainingInputBatch:
        """Move or cast every tensor in place, with the arguments of `Tensor.to`; return the batch itself."""
        for name, value in self.items():
            if value is not None:
                super().__setitem__(name, value.to(*args, **kwargs))
        return self

    def select(self, keys: list[str], metadata_keys: list[str] | None = None) -> TrainingInputBatch:
        """Return a batch with some of the tensors.

        Args:
            keys: Names of the tensors.
            metadata_keys: Names of the metadata entries; None selects all.

        Raises:
            KeyError: A name is unknown.
        """
        chosen = TrainingInputBatch({name: self[name] for name in keys})
        names = self.metadata if metadata_keys is None else metadata_keys
        chosen.metadata = {name: self.metadata[name] for name in names}
        return chosen


class PaddedLayout:
    """The indices of a ragged batch's tokens, [T], in SkyRL's padded tensors: [B, P + R], or [B, R] for responses.

    B is the number of sequences, P the longest prompt and R the longest response, in tokens.
    """

    def __init__(self, batch: TrainBatch):
        self._rows = len(batch.prompt_lengths)  # a response without tokens has no entry in [T]
        self._prompt = int(batch.prompt_lengths.max())
        responses = batch.lengths - batch.prompt_lengths
        self._response = int(responses.max())
        rows = batch.sequence_ids
        self._indices = rows, batch.position_ids - batch.prompt_lengths[rows] + self._prompt
        self._is_response = batch.position_ids >= batch.prompt_lengths[rows]

    def to_padded(self, flat: Tensor, fill: float = 0) -> Tensor:
        """Return token values [T] as a tensor [B, P + R], padded with `fill` on both sides."""
        return flat.new_full((self._rows, self._prompt + self._response), fill).index_put(self._indices, flat)

    def to_padded_responses(self, flat: Tensor) -> Tensor:
        """Return the values of response tokens, from [T], as a tensor [B, R], with zeros to the right of responses."""
        return self.to_padded(flat)[:, self._prompt :]

    def to_ragged(self, padded_values: Tensor) -> Tensor:
        """Return values of responses [B, R] as values of tokens [T], with zeros on prompts.

        Raises:
            ValueError: `padded_values` has another shape.
        """
        if padded_values.shape != (self._rows, self._response):
            expected = self._rows, self._response
            raise ValueError(f"shape {tuple(padded_values.shape)}: must be {expected}, as in the batch of the step.")
        indices = self._indices[0], (self._indices[1] - self._prompt).clamp(min=0)
        return torch.where(self._is_response, padded_values[indices], torch.zeros((), dtype=padded_values.dtype))


def to_training_input(
    batch: TrainBatch, layout: PaddedLayout, samples: Sequence[tuple[str, int]], pad_token_id: int
) -> TrainingInputBatch:
    """Return SkyRL's form of a TrainBatch that has no advantages yet.

    Args:
        batch: The batch, with or without log-probs.
        layout: The padded layout of the batch.
        samples: The prompt's uid and the sample's index, for each sequence of the batch.
        pad_token_id: The token in padded indices of `sequences`.
    """
    assert len(samples) == len(batch)
    data = _tensors(batch, layout, pad_token_id)
    data["is_last_step"] = _is_last_step(batch)
    lengths = (batch.lengths - batch.prompt_lengths).double()
    data.metadata = {
        "uids": [uid for uid, _ in samples],
        "trajectory_ids": [TrajectoryID(uid, index).to_string() for uid, index in samples],
        "response_length": data["response_mask"].shape[1],
        "avg_response_length": float(lengths.mean()),
        "pad_size": 0,
        "metrics": {},
    }
    return data


def _tensors(batch: TrainBatch, layout: PaddedLayout, pad_token_id: int) -> TrainingInputBatch:
    """Return the tensors of the batch under SkyRL's names; those that the batch does not have are None."""
    token_mask = torch.ones(len(batch.input_ids), dtype=torch.int64)
    data = TrainingInputBatch(
        sequences=layout.to_padded(batch.input_ids.long(), pad_token_id),
        attention_mask=layout.to_padded(token_mask),
        response_mask=layout.to_padded_responses(token_mask),
    )
    for name, field in _FIELDS.items():
        flat = getattr(batch, field)
        flat = flat.long() if name == "loss_mask" else flat
        data[name] = None if flat is None else layout.to_padded_responses(flat)
    data["rewards"] = None if batch.token_rewards is None else _rewards(batch, layout)
    return data


def set_from_output(data: TrainingInputBatch, output: GeneratorOutput, caller: str) -> TrainingInputBatch:
    """Set token rewards, loss masks and the engine's log-probs in `data` to those of a generator's output.

    Args:
        data: The batch to change, in place.
        output: An output with one entry for each row of `data`, in the same order. Rewards are per token.
        caller: The name of the override that returned the output, for the error message.

    Returns:
        `data`.

    Raises:
        ConfigError: The output has another number of entries than `data` has rows.
    """
    rows, width = data["response_mask"].shape
    if len(output["response_ids"]) != rows:
        raise ConfigError(
            f"{caller}: the output has {len(output['response_ids'])} entries, but the step has {rows} samples. Keep "
            "every entry, and exclude samples with loss_masks of zeros."
        )
    lengths = data["response_mask"].sum(dim=1).tolist()
    fields = {"loss_mask": output["loss_masks"], "rewards": output["rewards"]}
    if data["rollout_logprobs"] is not None and output.get("rollout_logprobs") is not None:
        fields["rollout_logprobs"] = output["rollout_logprobs"]  # type: ignore[assignment]
    for name, values in fields.items():
        filled = torch.zeros(rows, width, dtype=data[name].dtype)
        for row, (length, row_values) in enumerate(zip(lengths, values, strict=True)):
            filled[row, :length] = torch.tensor(row_values[:length], dtype=filled.dtype)  # type: ignore[index]
        data[name] = filled
    return data


def apply_changes(
    batch: TrainBatch, data: TrainingInputBatch, caller: str, pad_token_id: int, *, scored: bool, rewards: bool = True
) -> TrainBatch:
    """Return the batch with the changes that an override has made in its SkyRL form.

    Tensors that are unchanged leave those of the batch bitwise equal. Failed episodes stay masked.

    Args:
        batch: The batch from which `data` was made.
        data: SkyRL's form of the batch; tensors of responses are [B, R].
        caller: The name of the override, for error messages.
        pad_token_id: The token in padded places of `sequences`, as for `to_training_input`.
        scored: True if log-probs have been computed; the loss mask may then lose tokens but not gain any.
        rewards: False if nothing reads token rewards later; changes of them are then ignored.

    Raises:
        ConfigError: Tokens or rows have changed, a tensor has another shape than [B, R], a loss mask has a value other
            than 0 and 1, or it has new tokens although `scored`.
    """
    layout, dtype = PaddedLayout(batch), batch.rewards.dtype
    before = _tensors(batch, layout, pad_token_id)
    for name in _IMMUTABLE_FIELDS:
        if not _equal(data.get(name), before[name]):
            raise ConfigError(
                f"{caller}: data[{name!r}] has changed, but rows and tokens must stay as they were sampled. Change "
                "them in the generator, or exclude samples with a loss_mask of zeros."
            )
    changed = {
        name: _flat(layout, data[name], name, caller)
        for name in (*_FIELDS, "rewards")
        if data.get(name) is not None and not _equal(data[name], before[name])
    }
    if (mask := changed.pop("loss_mask", None)) is not None:
        if bool(((mask != 0) & (mask != 1)).any()):
            raise ConfigError(f"{caller}: data['loss_mask'] must be 0 or 1. Scale data['advantages'] to weight tokens.")
        loss_mask = mask.bool() & batch.expand_to_tokens(batch.status)
        if scored and bool((loss_mask & ~batch.loss_mask).any()):
            raise ConfigError(
                f"{caller}: data['loss_mask'] has tokens that it did not have when log-probs were computed. Add them "
                "in convert_to_training_input."
            )
        batch = batch.with_tokens(loss_mask=loss_mask)
    token_rewards = changed.pop("rewards", None)
    if rewards and token_rewards is not None and batch.token_rewards is not None:
        batch = with_token_rewards(batch, layout, data["rewards"])
    if (advantages := changed.pop("advantages", None)) is not None:
        batch = replace(batch, sequence_advantages=None)
        batch = batch.with_tokens(advantages=torch.where(batch.loss_mask, advantages.to(dtype), 0.0))
    return batch.with_tokens(**{_FIELDS[name]: flat.to(dtype) for name, flat in changed.items()})


def _equal(tensor: Tensor | None, before: Tensor | None) -> bool:
    if tensor is None or before is None:
        return tensor is before
    return tensor.shape == before.shape and torch.equal(tensor.double(), before.double())


def _flat(layout: PaddedLayout, tensor: Tensor, name: str, caller: str) -> Tensor:
    try:
        return layout.to_ragged(tensor.detach().cpu())
    except ValueError as error:
        raise ConfigError(f"{caller}: data[{name!r}] has {error}") from error


def _rewards(batch: TrainBatch, layout: PaddedLayout) -> Tensor:
    """Return token rewards [B, R].

    An episode without a sampled token has no place for its reward; this puts it on the last token.
    """
    rewards = layout.to_padded_responses(cast(Tensor, batch.token_rewards)).clone()
    if not rewards.shape[1]:
        return rewards
    episodes = batch.episodes
    has_no_samples = (episodes.sum_per_episode(batch.loss_mask.long()) == 0)[episodes.sequence_to_episode]
    ends = _is_last_step(batch)
    has_no_samples = has_no_samples if ends is None else has_no_samples & ends
    last = (batch.lengths - batch.prompt_lengths - 1).clamp(min=0)
    rewards[has_no_samples, last[has_no_samples]] = batch.rewards[has_no_samples].to(rewards.dtype)
    return rewards


def _is_last_step(batch: TrainBatch) -> Tensor | None:
    """Return a mask [B] of the sequences that end an episode; None if every sequence is an episode."""
    if batch.episode_ids is None:
        return None
    ids = batch.episode_ids
    return torch.cat([ids[1:] != ids[:-1], torch.ones(1, dtype=torch.bool)])


def with_token_rewards(batch: TrainBatch, layout: PaddedLayout, rewards: Tensor) -> TrainBatch:
    """Return the batch with other token rewards; the reward of an episode becomes their sum.

    Args:
        batch: A batch that has token rewards.
        layout: The padded layout of the batch.
        rewards: The new rewards of response tokens, [B, R].

    Raises:
        ValueError: `rewards` has another shape.
    """
    flat = layout.to_ragged(rewards).to(cast(Tensor, batch.token_rewards).dtype)
    episodes = batch.episodes
    return replace(
        batch,
        token_rewards=flat,
        rewards=episodes.sum_per_episode(flat)[episodes.sequence_to_episode].to(batch.rewards.dtype),
    )
