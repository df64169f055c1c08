"""The ragged batch as SkyRL's rectangles and back: prompts padded on the left, responses on the right."""

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
"""SkyRL's names of tensors (B, R), and the TrainBatch's attributes that hold them."""
_FIXED = ("sequences", "attention_mask", "response_mask")


class TrainingInputBatch(dict[str, Any]):
    """Tensors of one batch by name, (B, ...), and `metadata`. A tensor that was not computed is None."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.metadata: dict[str, Any] = {}

    @property
    def batch_size(self) -> int:
        return next((len(value) for value in self.values() if value is not None), 0)

    def __len__(self) -> int:
        """The number of rows, as in SkyRL."""
        return self.batch_size

    def __getitem__(self, name: Any) -> Any:
        """A tensor by its name; rows by a slice or a number."""
        if isinstance(name, str):
            return super().__getitem__(name)
        rows = slice(name, name + 1 or None) if isinstance(name, int) else name
        return self._with_rows(lambda value: value[rows])

    def __setitem__(self, name: str, value: Tensor | None) -> None:
        """Raises ValueError for what is no tensor of as many rows as the others."""
        if value is not None and (not isinstance(value, Tensor) or len(value) != (self.batch_size or len(value))):
            given = f"{tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"{name}: must be a tensor of {self.batch_size} rows, got {given}.")
        super().__setitem__(name, value)

    def _with_rows(self, take: Callable[[Tensor], Tensor]) -> TrainingInputBatch:
        part = TrainingInputBatch({name: None if value is None else take(value) for name, value in self.items()})
        part.metadata = self.metadata
        return part

    def slice(self, start: int, end: int, step: int = 1) -> TrainingInputBatch:
        """Rows of a range; `metadata` is the same object, as in all of SkyRL's parts of a batch."""
        return self[slice(start, end, step)]

    def chunk(self, chunk_size: int) -> list[TrainingInputBatch]:
        """Parts of `chunk_size` rows, the last of what is left."""
        return [self[start : start + chunk_size] for start in range(0, self.batch_size, chunk_size)]

    def repeat(self, repeats: int) -> TrainingInputBatch:
        """All rows, again and again."""
        return self._with_rows(lambda value: torch.cat([value] * repeats))

    def repeat_interleave(self, repeats: int) -> TrainingInputBatch:
        """Every row so many times."""
        return self._with_rows(lambda value: value.repeat_interleave(repeats, dim=0))

    @classmethod
    def cat(cls, shards: Sequence[TrainingInputBatch]) -> TrainingInputBatch:
        """The rows of batches that have the same tensors, and the metadata of the first."""
        whole = cls(
            {
                name: None if value is None else torch.cat([one[name] for one in shards])
                for name, value in shards[0].items()
            }
        )
        whole.metadata = shards[0].metadata
        return whole

    def save(self, path: str | Path) -> None:
        """Write it as a pickle, which only one's own programs should read."""
        Path(path).write_bytes(pickle.dumps(self))

    def load(self, path: str | Path) -> TrainingInputBatch:
        """Returns what `save` has written."""
        return cast(TrainingInputBatch, pickle.loads(Path(path).read_bytes()))

    def to(self, *args: Any, **kwargs: Any) -> TrainingInputBatch:
        """Move or cast every tensor, in place, as `Tensor.to`."""
        for name, value in self.items():
            if value is not None:
                super().__setitem__(name, value.to(*args, **kwargs))
        return self

    def select(self, keys: list[str], metadata_keys: list[str] | None = None) -> TrainingInputBatch:
        """Some of the tensors, and all metadata or some."""
        chosen = TrainingInputBatch({name: self[name] for name in keys})
        names = self.metadata if metadata_keys is None else metadata_keys
        chosen.metadata = {name: self.metadata[name] for name in names}
        return chosen


class PaddedLayout:
    """Values of tokens, [T], as (B, P + R) or, of responses alone, as (B, R), and back."""

    def __init__(self, batch: TrainBatch):
        self._rows = len(batch.prompt_lengths)  # one without a token has no place
        self._prompt = int(batch.prompt_lengths.max())
        responses = batch.lengths - batch.prompt_lengths
        self._response = int(responses.max())
        rows = batch.sequence_ids
        self._places = rows, batch.position_ids - batch.prompt_lengths[rows] + self._prompt
        self._of_response = batch.position_ids >= batch.prompt_lengths[rows]

    def to_padded(self, flat: Tensor, fill: float = 0) -> Tensor:
        """(B, P + R)"""
        return flat.new_full((self._rows, self._prompt + self._response), fill).index_put(self._places, flat)

    def to_padded_responses(self, flat: Tensor) -> Tensor:
        """(B, R), zeros to the right of a response."""
        return self.to_padded(flat)[:, self._prompt :]

    def to_ragged(self, padded_values: Tensor) -> Tensor:
        """[T], zeros on prompts. Raises ValueError for another shape than (B, R)."""
        if padded_values.shape != (self._rows, self._response):
            wanted = self._rows, self._response
            raise ValueError(f"shape {tuple(padded_values.shape)}: must be {wanted}, as it was given.")
        places = self._places[0], (self._places[1] - self._prompt).clamp(min=0)
        return torch.where(self._of_response, padded_values[places], torch.zeros((), dtype=padded_values.dtype))


def to_training_input(
    batch: TrainBatch, layout: PaddedLayout, samples: Sequence[tuple[str, int]], pad_token_id: int
) -> TrainingInputBatch:
    """SkyRL's batch of a scored TrainBatch, before advantages. `samples`: uid and number, of each of its sequences."""
    assert len(samples) == len(batch)
    data = _tensors(batch, layout, pad_token_id)
    data["is_last_step"] = _last_of_episodes(batch)
    lengths = (batch.lengths - batch.prompt_lengths).double()
    data.metadata = {
        "uids": [uid for uid, _ in samples],
        "trajectory_ids": [TrajectoryID(*one).to_string() for one in samples],
        "response_length": data["response_mask"].shape[1],
        "avg_response_length": float(lengths.mean()),
        "pad_size": 0,
        "metrics": {},
    }
    return data


def _tensors(batch: TrainBatch, layout: PaddedLayout, pad_token_id: int) -> TrainingInputBatch:
    """Return what the batch knows, by SkyRL's names; None for what it does not know."""
    of_response = torch.ones(len(batch.input_ids), dtype=torch.int64)
    data = TrainingInputBatch(
        sequences=layout.to_padded(batch.input_ids.long(), pad_token_id),
        attention_mask=layout.to_padded(of_response),
        response_mask=layout.to_padded_responses(of_response),
    )
    for name, field in _FIELDS.items():
        flat = getattr(batch, field)
        flat = flat.long() if name == "loss_mask" else flat
        data[name] = None if flat is None else layout.to_padded_responses(flat)
    data["rewards"] = None if batch.token_rewards is None else _rewards(batch, layout)
    return data


def set_from_output(data: TrainingInputBatch, output: GeneratorOutput, caller: str) -> TrainingInputBatch:
    """Set rewards of tokens, loss masks and the engine's log-probs to those of an output with the same rows.

    Raises ConfigError for an output with more or fewer entries.
    """
    rows, width = data["response_mask"].shape
    if len(output["response_ids"]) != rows:
        raise ConfigError(
            f"{caller}: the output has {len(output['response_ids'])} entries, but the step has {rows}. Leave samples out "
            "with loss_masks of zeros."
        )
    lengths = data["response_mask"].sum(dim=1).tolist()
    fields = {"loss_mask": output["loss_masks"], "rewards": output["rewards"]}
    if data["rollout_logprobs"] is not None and output.get("rollout_logprobs") is not None:
        fields["rollout_logprobs"] = output["rollout_logprobs"]  # type: ignore[assignment]
    for name, values in fields.items():
        filled = torch.zeros(rows, width, dtype=data[name].dtype)
        for row, (length, of_row) in enumerate(zip(lengths, values, strict=True)):
            filled[row, :length] = torch.tensor(of_row[:length], dtype=filled.dtype)  # type: ignore[index]
        data[name] = filled
    return data


def apply_changes(
    batch: TrainBatch, data: TrainingInputBatch, caller: str, pad_token_id: int, *, scored: bool, rewards: bool = True
) -> TrainBatch:
    """Return the batch with what an override has changed in `data`, which was made of it.

    Tensors that are as they were leave the batch as it was, to the last bit.

    Args:
        batch: The batch that `data` was made of.
        data: SkyRL's batch, (B, R) for each tensor of responses.
        by: The override, for messages.
        pad_token_id: As for `training_input`.
        scored: True if log-probs have been scored, for the tokens that the loss mask had then.
        rewards: False if changed rewards of tokens are not read any more.

    Raises:
        ConfigError: Tokens or rows have changed, a loss mask is neither 0 nor 1, or it has new tokens after scoring.
    """
    rectangles, dtype = PaddedLayout(batch), batch.rewards.dtype
    before = _tensors(batch, rectangles, pad_token_id)
    for name in _FIXED:
        if not _equal(data.get(name), before[name]):
            raise ConfigError(
                f"{caller}: data[{name!r}] has changed. Rows and tokens are those that were sampled: change them in the "
                "generator, or leave samples out with a loss_mask of zeros."
            )
    changed = {
        name: _flat(rectangles, data[name], name, caller)
        for name in (*_FIELDS, "rewards")
        if data.get(name) is not None and not _equal(data[name], before[name])
    }
    if (mask := changed.pop("loss_mask", None)) is not None:
        if bool(((mask != 0) & (mask != 1)).any()):
            raise ConfigError(f"{caller}: data['loss_mask'] must be 0 or 1. Scale data['advantages'] to weight tokens.")
        counts = mask.bool() & batch.expand_to_tokens(batch.status)
        if scored and bool((counts & ~batch.loss_mask).any()):
            raise ConfigError(
                f"{caller}: data['loss_mask'] has tokens that it did not have when log-probs were scored. Add them in "
                "convert_to_training_input."
            )
        batch = batch.with_tokens(loss_mask=counts)
    token_rewards = changed.pop("rewards", None)
    if rewards and token_rewards is not None and batch.token_rewards is not None:
        batch = with_token_rewards(batch, rectangles, data["rewards"])
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
    """(B, R) that of an episode without a sampled token, which has no place for it, on its last token."""
    rewards = layout.to_padded_responses(cast(Tensor, batch.token_rewards)).clone()
    if not rewards.shape[1]:
        return rewards
    episodes = batch.episodes
    silent = (episodes.sum_per_episode(batch.loss_mask.long()) == 0)[episodes.sequence_to_episode]
    ends = _last_of_episodes(batch)
    silent = silent if ends is None else silent & ends
    last = (batch.lengths - batch.prompt_lengths - 1).clamp(min=0)
    rewards[silent, last[silent]] = batch.rewards[silent].to(rewards.dtype)
    return rewards


def _last_of_episodes(batch: TrainBatch) -> Tensor | None:
    """[B] None if every sequence is an episode."""
    if batch.episode_ids is None:
        return None
    ids = batch.episode_ids
    return torch.cat([ids[1:] != ids[:-1], torch.ones(1, dtype=torch.bool)])


def with_token_rewards(batch: TrainBatch, layout: PaddedLayout, rewards: Tensor) -> TrainBatch:
    """The batch with other rewards of tokens, (B, R); an episode's reward is their sum."""
    flat = layout.to_ragged(rewards).to(cast(Tensor, batch.token_rewards).dtype)
    episodes = batch.episodes
    return replace(
        batch,
        token_rewards=flat,
        rewards=episodes.sum_per_episode(flat)[episodes.sequence_to_episode].to(batch.rewards.dtype),
    )
