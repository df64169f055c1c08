"""Token-level values of a tensordict as the ragged [T] tensors that all algorithms work on.

A tensordict has one row per sequence. Its token-level entries are rectangles [B, L], with padding marked by a mask
(left of a prompt, right of a response, or all on the left), or ragged: lazy stacks of rows of different lengths, or
nested tensors. Both give the same flat values, so that no result depends on how a batch was padded.

Legend: B sequences, L positions of the widest row, T tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor
from torch.nn.functional import pad

Key = str | tuple[str, ...]
Column = Tensor | list[Tensor]
"""One entry for all rows: [B, ...], or B tensors of different shapes."""


def rows_of(tensordict: TensorDictBase, ndim: int = 0) -> list[TensorDictBase]:
    """Return the rows of a tensordict of any batch size, in row-major order; a row has at most `ndim` dimensions."""
    if tensordict.ndim <= ndim:
        return [tensordict]
    return [row for part in tensordict.unbind(0) for row in rows_of(part, ndim)]


def flattened(tensordict: TensorDictBase) -> TensorDictBase:
    """Return the rows of a tensordict of any batch size as a tensordict of batch size [B]."""
    return tensordict if tensordict.ndim == 1 else lazy_stack(rows_of(tensordict))


def nested_stack(rows: Sequence[Any], shape: Sequence[int], stack: Callable[[list[Any]], Any] = lazy_stack) -> Any:
    """Stack rows of any length into `shape`, by default lazily; `rows` are in row-major order."""
    if not shape:
        return rows[0]
    step = len(rows) // shape[0]
    return stack([nested_stack(rows[i * step : (i + 1) * step], shape[1:], stack) for i in range(shape[0])])


def column(tensordict: TensorDictBase, key: Key) -> Column | None:
    """Return an entry of a tensordict [B], or None if a row lacks it. Raises TypeError for an entry without tensors."""
    value = tensordict.get(key, None, as_list=True)
    if isinstance(value, Tensor) and value.is_nested:
        return list(value.unbind())
    if isinstance(value, list) and any(row is None for row in value):
        return None
    if value is None or isinstance(value, Tensor | list):
        return value
    raise TypeError(f"{key!r} holds {type(value).__name__}; it must be a tensor, a nested tensor or a stack of them.")


@dataclass(frozen=True)
class TokenLayout:
    """The positions of B rows' tokens in a rectangle; ragged rows are right-aligned, as left-padding policies do.

    Example: rows (5 6 7) and (8 9) give present=[[1,1,1],[0,1,1]], widths=[3,2], sequence_ids=[0,0,0,1,1].
    """

    present: Tensor
    """[B, L] bool: True for tokens, False for padding."""
    widths: tuple[int, ...]
    """Number of positions of each row; L for every row of a rectangle."""
    padding_known: bool = True
    """False for a rectangle without an attention mask: `present` is then True everywhere, even in padding."""

    @classmethod
    def of(cls, tokens: Column, attention: Column | None) -> TokenLayout:
        """Make the layout of a rectangle [B, L] or of rows; without `attention` (of the same form), all tokens count.

        Raises ValueError if the mask has another shape than the tokens.
        """
        rows = list(tokens)
        widths = tuple(len(row) for row in rows)
        device = rows[0].device if rows else None
        everything = cls(torch.ones(len(rows), max(widths, default=0), dtype=torch.bool, device=device), widths)
        if attention is not None:
            return cls(everything.rectangle(attention, "the attention mask").bool(), widths)
        if isinstance(tokens, Tensor):
            return cls(everything.present, widths, padding_known=len(rows) == 1)
        ones = [torch.ones_like(row, dtype=torch.bool) for row in rows]
        return cls(everything.rectangle(ones, "tokens"), widths)

    @property
    def sequence_ids(self) -> Tensor:
        """Row index of each token, [T] int64."""
        return self.present.nonzero()[:, 0]

    @property
    def first_tokens(self) -> Tensor:
        """Mask of the first token of each row, which has no log-prob, [T] bool."""
        ids = self.sequence_ids
        return torch.cat([ids.new_ones(1), ids.diff()])[: len(ids)].bool()

    def rectangle(self, values: Column, name: Key) -> Tensor:
        """Return token-level values as a rectangle [B, L], with 0 in padding; drop a trailing dimension of 1.

        A row must have either all positions of its tokens' row, or only those that are not padding. Raises ValueError,
        naming `name`, for any other shape.
        """
        if isinstance(values, Tensor):
            if values.ndim == 3 and values.shape[-1] == 1:
                values = values.squeeze(-1)
            if values.shape == self.present.shape:
                return values
            raise ValueError(f"{name!r} has shape {list(values.shape)}; tokens have {list(self.present.shape)}.")
        if len(values) != len(self.widths):
            raise ValueError(f"{name!r} has {len(values)} rows; tokens have {len(self.widths)}.")
        rows = [self._row(index, row.reshape(-1), name) for index, row in enumerate(values)]
        return torch.stack(rows) if rows else self.present.new_zeros(self.present.shape)

    def _row(self, index: int, row: Tensor, name: Key) -> Tensor:
        if len(row) == self.widths[index]:
            return pad(row, (self.present.shape[1] - len(row), 0))
        present = self.present[index]
        if len(row) == int(present.sum()):
            return torch.zeros_like(present, dtype=row.dtype).index_put((present,), row)
        raise ValueError(f"{name!r} has {len(row)} values in row {index}; its tokens have {self.widths[index]}.")

    def flat(self, values: Column, name: Key) -> Tensor:
        """Return token-level values as a flat tensor [T]. Raises like `rectangle`."""
        return self.rectangle(values, name)[self.present]

    def spread(self, values: Column, name: Key) -> Tensor:
        """Return values [T] from one per row ([B], [B, 1], [B, 1, 1]) or one per token. Raises like `rectangle`."""
        if isinstance(values, list):
            values = [row.reshape(-1) for row in values]
            if all(row.numel() == 1 for row in values):
                values = torch.cat(values)
        if isinstance(values, Tensor) and values.numel() == len(self.widths):
            return values.reshape(-1)[self.sequence_ids]
        return self.flat(values, name)

    def unflatten(self, values: Tensor) -> Tensor:
        """Return flat values [T] as a rectangle [B, L], with 0 in padding."""
        return values.new_zeros(self.present.shape).index_put((self.present,), values)

    def after(self, tokens: Column, prompts: Column) -> Tensor:
        """Return a mask [T] bool of the tokens after their row's prompt.

        Raises ValueError if a row does not begin with its prompt.
        """
        whole, result = self.rectangle(tokens, "tokens"), self.present.clone()
        if isinstance(prompts, Tensor) and torch.equal(whole[:, : prompts.shape[1]], prompts):
            result[:, : prompts.shape[1]] = False  # prompts in rectangles are left-padded
            return result[self.present]
        for index, prompt in enumerate(prompts):
            begin, length = whole.shape[1] - self.widths[index], len(prompt)
            places = self.present[index].nonzero()[:length, 0]
            if torch.equal(whole[index, begin : begin + length], prompt):
                result[index, begin : begin + length] = False
            elif torch.equal(whole[index, places], prompt):
                result[index, places] = False
            else:
                raise ValueError(
                    f"Row {index} does not begin with its prompt of {length} tokens, so its response is not known. "
                    "Give the assistant mask and masking_strategy='rlhf'."
                )
        return result[self.present]
