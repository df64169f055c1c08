"""The transform that supplies resets with the rows of a dataset."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack

from skyrl_train.tensordict.envs.base import Transform, keys_of

Stack = Callable[[list[TensorDictBase]], TensorDictBase]


class DataLoadingPrimer(Transform):
    """A transform that gives every reset the next rows of a loader, which is repeated endlessly.

    A loader yields mappings (one row, or columns of a batch: lists and tensors of one length), lists of mappings, or
    tensordicts of batch [] or [N]. Values other than tensors are kept unchanged; "text" is renamed to "query", because
    policies write their own "text".

    Args:
        dataloader, dataloader_factory: A loader, or a function that makes one for every pass; exactly one of them.
        stack_method: None for a lazy stack of the rows, "as_nested_tensor", "as_padded_tensor", or a callable.
        batch_size: Number of rows per reset, unless the environment determines it.
        repeats: Number of consecutive times that each row is used.
        primers, group_repeats: Accepted without effect, for compatibility with TorchRL: keys are read from the rows,
            and repeats are always consecutive.
    """

    def __init__(
        self,
        dataloader: Iterable[Any] | None = None,
        *,
        dataloader_factory: Callable[[], Iterable[Any]] | None = None,
        primers: Any = None,
        stack_method: str | Stack | None = None,
        batch_size: Sequence[int] | int | None = None,
        repeats: int | None = None,
        device: torch.device | str | None = None,
        group_repeats: bool = False,
        use_ray_service: bool = False,
    ):
        if (dataloader is None) == (dataloader_factory is None):
            raise ValueError("DataLoadingPrimer needs exactly one of dataloader and dataloader_factory.")
        if use_ray_service:
            raise ValueError(
                "use_ray_service=True is not supported. Give each process a loader over its own rows instead."
            )
        if repeats is not None and repeats < 0:
            raise ValueError(f"repeats={repeats} must not be negative.")
        methods: dict[str, Stack] = {"as_nested_tensor": as_nested_tensor, "as_padded_tensor": as_padded_tensor}
        if isinstance(stack_method, str) and stack_method not in methods:
            raise ValueError(f"stack_method={stack_method!r} is not one of {sorted(methods)}.")
        self._stack: Stack = methods[stack_method] if isinstance(stack_method, str) else stack_method or lazy_stack
        self._factory = dataloader_factory
        self._loader = dataloader
        self.batch_size = batch_size
        self.repeats = max(1, repeats or 1)
        self.device = device
        self._columns: set[str] = set()
        self.reset_dataloader()

    def reset_dataloader(self) -> None:
        """Start again with the first row; pending repeats are dropped."""
        self._queue: deque[TensorDictBase] = deque()
        self._rows: Iterator[TensorDictBase] | None = None

    def take(self, count: int) -> list[TensorDictBase]:
        """Return the next `count` rows, each of batch size []. Raises ValueError if the loader yields no rows."""
        return [self._next() for _ in range(count)]

    def forward(self, tensordict: TensorDictBase | None = None) -> TensorDictBase:
        """Return the next rows of the loader, stacked.

        Args:
            tensordict: Its batch size is the number of rows; None, or no batch dimension, takes that of `batch_size`.
        """
        size = [self.batch_size] if isinstance(self.batch_size, int) else list(self.batch_size or [1])
        count = tensordict.batch_size[0] if tensordict is not None and tensordict.batch_dims else size[0]
        return self._stack(self.take(count))

    __call__ = forward

    def before_reset(self, given: TensorDictBase) -> TensorDictBase:
        rows = self.take(len(given))
        self._columns.update(
            *(row.keys() for row in rows)
        )  # a row may lack keys, whose values must not remain from the row before
        kept = [row.exclude(*self._columns) for row in given.unbind(0)]
        if self._stack is lazy_stack:
            return lazy_stack([row.update(new) for row, new in zip(kept, rows, strict=True)])
        return self._stack(rows).update(
            TensorDict({"episode": given["episode"]}) if "episode" in keys_of(given) else {}
        )

    def _next(self) -> TensorDictBase:
        if not self._queue:
            row = self._draw()
            self._queue.extend(row.copy() for _ in range(self.repeats))
        return self._queue.popleft()

    def _draw(self) -> TensorDictBase:
        for again in (False, True):
            if self._rows is None or again:
                source = self._loader if self._factory is None else self._factory()
                assert source is not None
                self._rows = (row for batch in source for row in self._unbound(batch))
            found = next(self._rows, None)
            if found is not None:
                return found
        raise ValueError("The dataloader yields no rows. Give one with at least one row.")

    def _unbound(self, batch: Any) -> list[TensorDictBase]:
        if isinstance(batch, TensorDictBase):
            if batch.batch_dims > 1:
                raise ValueError(
                    f"The loader yields batch_size={tuple(batch.batch_size)}; at most one dimension is allowed."
                )
            rows = list(batch.unbind(0)) if batch.batch_dims else [batch]
        elif isinstance(batch, Mapping):
            rows = [_row(columns) for columns in _columns(batch)]
        elif isinstance(batch, list | tuple) and all(isinstance(row, Mapping) for row in batch):
            rows = [_row(row) for row in batch]
        else:
            raise TypeError(f"The loader yields {type(batch).__name__}, not mappings, lists of them, or tensordicts.")
        return [_renamed(row.to(self.device) if self.device is not None else row) for row in rows]


def batches(
    rows: Sequence[Mapping[str, Any]],
    size: int,
    *,
    shuffle: bool,
    seed: int | None,
    collate_fn: Callable[[list[Mapping[str, Any]]], Any] | None = None,
) -> Iterable[Any]:
    """Return a loader over `rows` that can be iterated repeatedly.

    Args:
        rows: The rows.
        size: Number of rows of a batch.
        shuffle: True for a new order in every pass.
        seed: Seed of the orders; None for random ones.
        collate_fn: Function that converts a list of rows to a batch; None yields the lists.

    Raises:
        ValueError: `size` is below 1.
    """
    if size < 1:
        raise ValueError(f"batch_size_dl={size} must be at least 1.")
    return _Batches(rows, size, shuffle, random.Random(seed), collate_fn)


class _Batches:
    def __init__(self, rows: Sequence[Any], size: int, shuffle: bool, order: random.Random, collate: Any):
        self._rows, self._size, self._shuffle, self._random, self._collate = rows, size, shuffle, order, collate

    def __iter__(self) -> Iterator[Any]:
        places = list(range(len(self._rows)))
        if self._shuffle:
            self._random.shuffle(places)
        for start in range(0, len(places), self._size):
            batch = [self._rows[place] for place in places[start : start + self._size]]
            yield batch if self._collate is None else self._collate(batch)


def as_nested_tensor(list_of_tensordicts: list[TensorDictBase]) -> TensorDictBase:
    """Stack rows [..., L_i] into one tensordict [N]; tensors of different lengths become nested (jagged)."""
    return _stacked_rows(
        list_of_tensordicts, lambda tensors: torch.nested.as_nested_tensor(tensors, layout=torch.jagged)
    )


def as_padded_tensor(list_of_tensordicts: list[TensorDictBase], dim: int = 0, stack_dim: int = 0) -> TensorDictBase:
    """Stack rows into one tensordict [N]; tensors are padded to the longest with zeros on the left of `dim`.

    Raises ValueError for a negative `dim`, or for a `stack_dim` other than 0: a tensordict's batch comes first.
    """
    if dim < 0 or stack_dim != 0:
        raise ValueError(f"dim={dim} must not be negative, and stack_dim={stack_dim} must be 0.")

    def padded(tensors: list[torch.Tensor]) -> torch.Tensor:
        longest = max(tensor.shape[dim] for tensor in tensors)
        return torch.stack([_left_padded(tensor, dim, longest) for tensor in tensors])

    return _stacked_rows(list_of_tensordicts, padded)


def _left_padded(tensor: torch.Tensor, dim: int, length: int) -> torch.Tensor:
    shape = list(tensor.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([tensor.new_zeros(shape), tensor], dim)


def _stacked_rows(rows: list[TensorDictBase], ragged: Callable[[list[torch.Tensor]], torch.Tensor]) -> TensorDictBase:
    stacked: dict[str, Any] = {}
    for key in sorted(keys_of(rows[0])):
        values = [row.get(key) for row in rows]
        if not isinstance(values[0], torch.Tensor):
            stacked[key] = lazy_stack(values)
        elif values[0].ndim == 0 or len({value.shape for value in values}) == 1:
            stacked[key] = torch.stack(values)
        else:
            stacked[key] = ragged(values)
    return TensorDict(stacked, batch_size=[len(rows)])


def _columns(batch: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the rows of a batched mapping; a mapping whose values are not lists or batched tensors is one row."""
    lengths = {
        len(value) if isinstance(value, list | tuple) or (isinstance(value, torch.Tensor) and value.ndim) else -1
        for value in batch.values()
    }
    if len(lengths) != 1 or -1 in lengths:
        return [dict(batch)]
    return [{key: value[place] for key, value in batch.items()} for place in range(lengths.pop())]


def _row(values: Mapping[str, Any]) -> TensorDictBase:
    row = TensorDict({}, batch_size=[])
    for key, value in values.items():
        row.set(key, value if isinstance(value, torch.Tensor | TensorDictBase) else NonTensorData(value))
    return row


def _renamed(row: TensorDictBase) -> TensorDictBase:
    if keys_of(row) & {"text", "query"} == {"text"}:
        return row.copy().rename_key_("text", "query")
    return row
