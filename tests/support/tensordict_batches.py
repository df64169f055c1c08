"""A TrainBatch in the form of a collector's tensordicts, with every padding, and policies that score it."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torch import Tensor, nn
from torch.nn.functional import pad

from skyrl_train.data.batch import TrainBatch
from skyrl_train.tensordict.buffer import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from skyrl_train.tensordict.ragged import TokenLayout, column, rows_of

LAYOUTS = ("ragged", "left prompt, right response", "all left", "right, in a stack of different widths")


def as_tensordict(batch: TrainBatch, layout: str, garbage: float = torch.nan) -> TensorDictBase:
    """Return tokens, masks, old log_probs, next.ref_log_probs and advantage of a batch, with `garbage` in padding."""
    rows = [_row(batch, index) for index in range(len(batch))]
    if layout == "ragged":
        return lazy_stack(rows)
    widest = int(batch.prompt_lengths.max()), int((batch.lengths - batch.prompt_lengths).max())
    padded = []
    for index, row in enumerate(rows):
        prompt = int(batch.prompt_lengths[index])
        left, right = widest[0] - prompt, widest[1] - (len(row["tokens", "full"]) - prompt)
        if layout == "all left":
            left, right = left + right, 0
        elif layout.startswith("right"):
            left, right = 0, index
        padded.append(_padded(row, left, right, garbage))
        if layout != "left prompt, right response":
            del padded[-1]["tokens", "prompt"]
    return lazy_stack(padded) if layout.startswith("right") else torch.stack(padded).contiguous()


def _row(batch: TrainBatch, index: int) -> TensorDictBase:
    place = slice(int(batch.offsets[index]), int(batch.offsets[index + 1]))
    assert batch.old_logprobs is not None and batch.ref_logprobs is not None and batch.advantages is not None
    ids = batch.input_ids[place]
    return TensorDict(
        {
            "tokens": {"prompt": ids[: int(batch.prompt_lengths[index])], "full": ids},
            "masks": {
                "all_attention_mask": torch.ones_like(ids, dtype=torch.bool),
                "all_assistant_mask": batch.loss_mask[place],
            },
            "log_probs": {"full": batch.old_logprobs[place]},
            "next": {"ref_log_probs": {"full": batch.ref_logprobs[place]}},
            "advantage": batch.advantages[place, None],
        }
    )


def _padded(row: TensorDictBase, left: int, right: int, garbage: float) -> TensorDictBase:
    """Padding has token 0, which sequences also contain. Only a mask tells them apart."""

    def wider(value: Tensor) -> Tensor:
        if value.ndim == 2:
            return wider(value[:, 0])[:, None]
        fill = garbage if value.is_floating_point() else 0
        return pad(value, (left, right), value=fill)

    prompt = row["tokens", "prompt"]
    result = row.apply(wider)
    assert result is not None
    result["tokens", "prompt"] = pad(prompt, (left, 0))
    return result


def replay_buffer(size: int, *, shuffle: bool = True, **settings: Any) -> ReplayBuffer:
    """Return a buffer of rows of any length that are sampled without replacement."""
    sampler = SamplerWithoutReplacement(shuffle=shuffle)
    return ReplayBuffer(storage=LazyStackStorage(size), sampler=sampler, **settings)


class TablePolicy(nn.Module):
    """A policy that looks up the log-prob of a token by its ID, and is called like a wrapper in log-prob mode."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.table = nn.Parameter(table.detach().clone())

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        rows = rows_of(tensordict)
        for row in rows:
            row["log_probs", "full"] = self.table[row["tokens", "full"]]
        return lazy_stack(rows)


class BigramPolicy(nn.Module):
    """A policy that predicts the logits of a token from the previous token.

    `get_dist` takes ragged rows or rectangles, and returns a distribution over left-padded rows.
    """

    def __init__(self, vocab_size: int, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(vocab_size, vocab_size, generator=generator, dtype=torch.float64))

    def get_dist(self, tensordict: TensorDictBase) -> torch.distributions.Categorical:
        tokens = column(tensordict, ("tokens", "full"))
        assert tokens is not None
        layout = TokenLayout.of(tokens, column(tensordict, ("masks", "all_attention_mask")))
        previous = layout.rectangle(tokens, "tokens").roll(1, dims=1)
        return torch.distributions.Categorical(logits=self.weight[previous])
