"""A bounded store of tensordict rows, between a collector that writes to it and a loss that samples from it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from skyrl_train.tensordict.ragged import rows_of, stacked

Transform = Any
"""A transform of a buffer: an object with `inv(tensordict)`, applied on writing (it returns None to store nothing yet),
`forward(tensordict)`, applied on reading, or both; or a function, applied on reading."""


@dataclass(frozen=True)
class LazyStackStorage:
    """TorchRL's name for the size of a buffer: `ReplayBuffer(storage=...)` keeps `max_size` rows (None: no limit)."""

    max_size: int | None = None


@dataclass(frozen=True)
class SamplerWithoutReplacement:
    """TorchRL's name for the sampling order of a `ReplayBuffer`: every row once before any row is repeated."""

    drop_last: bool = False
    shuffle: bool = True


class ReplayBuffer:
    """A thread-safe buffer of the last `max_size` rows, each sampled once before any is sampled again.

    Rows may be ragged. Sampling copies no tensors; writing entries into a sample does not change the stored rows.
    """

    def __init__(
        self,
        max_size: int | None = None,
        *,
        storage: LazyStackStorage | Any = None,
        sampler: SamplerWithoutReplacement | Any = None,
        batch_size: int | None = None,
        transform: Transform | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
    ):
        """Create an empty buffer.

        Args:
            max_size: Maximum number of rows; older rows are dropped.
            storage: Alternative to `max_size`, as in TorchRL: a LazyStackStorage, an empty TorchRL storage, or a class
                or function that makes one. Only its `max_size` is used.
            sampler: A SamplerWithoutReplacement (ours or TorchRL's), or a class or function that makes one. It replaces
                `shuffle` and `drop_last`.
            batch_size: Rows per `sample()` and per batch of an iteration.
            transform: Applied to rows when they are written and read; see `append_transform`.
            shuffle: Sample in random order rather than in the order of writing.
            drop_last: Drop a smaller last batch of an iteration.
            seed: Seed of the random order.

        Raises:
            ValueError: If not exactly one of `max_size` and `storage` is given, the size is below 1, the storage is not
                empty, or the sampler is of another kind.
        """
        if (max_size is None) == (storage is None):
            raise ValueError(f"max_size={max_size}, storage={storage}: give exactly one of the two.")
        if sampler is not None:
            sampler = sampler() if callable(sampler) else sampler
            if type(sampler).__name__ != SamplerWithoutReplacement.__name__:
                raise ValueError(f"sampler={sampler!r:.80} is not supported; only SamplerWithoutReplacement is.")
            shuffle, drop_last = sampler.shuffle, sampler.drop_last
        self.max_size = max_size if storage is None else _size_of(storage)
        """None: rows are never dropped."""
        if self.max_size is not None and self.max_size < 1:
            raise ValueError(f"max_size={self.max_size} must be at least 1.")
        self.batch_size = batch_size
        self.write_count = 0
        """Total number of rows stored so far, since the buffer was emptied."""
        self._shuffle, self._drop_last = shuffle, drop_last
        self._random = random.Random(seed)
        self._transforms: list[_ReadAndWrite] = []
        if transform is not None:
            self.append_transform(transform)
        self._rows: dict[int, TensorDictBase] = {}  # by write number: the oldest is first
        self._unseen: list[int] = []
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._rows)

    def append_transform(self, transform: Transform, *, invert: bool = False) -> ReplayBuffer:
        """Add a transform after the existing ones and return the buffer.

        Written rows pass through the `inv` methods, the last added first; read rows through the `forward` methods, the
        first added first. A plain function is applied on reading. `invert` exchanges the two directions. Raises
        TypeError for an object that is neither a function nor has `inv` or `forward`.
        """
        return self.insert_transform(len(self._transforms), transform, invert=invert)

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> ReplayBuffer:
        """Insert a transform at `index` among the existing ones, and return the buffer.

        Args:
            index: Position of the transform.
            transform: A transform with `inv` (for written rows) or `forward` (for read rows), or a function for read
                rows.
            invert: True exchanges the two directions.

        Raises:
            TypeError: The transform is neither a function nor has `inv` or `forward`.
        """
        self._transforms.insert(index, _ReadAndWrite.of(transform, invert))
        return self

    def add(self, row: TensorDictBase) -> Tensor:
        """Write one row (batch size []); return the int64 numbers of the rows that were stored."""
        return self.extend(row.unsqueeze(0))

    def extend(self, tensordict: TensorDictBase) -> Tensor:
        """Write all rows of a tensordict of any batch size; return the int64 numbers of the rows that were stored."""
        with self._lock:
            found: TensorDictBase | None = tensordict
            for transform in reversed(self._transforms):
                found = None if found is None else transform.write(found)
            rows = [] if found is None else rows_of(found)
            numbers = list(range(self.write_count, self.write_count + len(rows)))
            self.write_count += len(rows)
            self._rows.update((number, row.copy()) for number, row in zip(numbers, rows, strict=True))
            self._unseen += numbers
            surplus = list(self._rows)[: max(len(self._rows) - (self.max_size or len(self._rows)), 0)]
            for number in surplus:
                del self._rows[number]
            if surplus:
                self._unseen = [number for number in self._unseen if number in self._rows]
            return torch.tensor(numbers, dtype=torch.int64)

    def sample(self, batch_size: int | None = None) -> TensorDictBase:
        """Return rows not yet sampled, in random order (or in order without `shuffle`), as a batch [batch_size].

        A new pass over the rows starts when none is left. If fewer rows are left than requested, the batch continues
        with rows of the next pass, without repeating a row. Raises ValueError if fewer rows are stored than requested,
        or if neither this call nor the buffer has a batch size.
        """
        size = self._size(batch_size)
        with self._lock:
            if len(self) < size:
                raise ValueError(
                    f"batch_size={size}, but only {len(self)} rows are stored. Write more rows or sample fewer."
                )
            chosen = self._take(size)
            if len(chosen) < size:  # the rest of this pass, and the start of the next one without repeating a row
                taken = set(chosen)
                self._unseen = [number for number in self._rows if number not in taken]
                chosen += self._take(size - len(chosen))
            rows = [self._rows[number] for number in chosen]
        return self._read(stacked(rows))

    def __getitem__(self, index: Any) -> Any:
        """Return rows by position, the oldest first, or an entry of all rows by its key.

        An int gives one row; a slice, list or tensor gives a batch. Raises IndexError if no row is selected.
        """
        if isinstance(index, str) or (isinstance(index, tuple) and all(isinstance(part, str) for part in index)):
            return self[:][index]
        with self._lock:
            rows = list(self._rows.values())
        if isinstance(index, int):
            return self._read(stacked([rows[index]]))[0]
        if not isinstance(index, slice):
            places = torch.arange(len(rows))[torch.as_tensor(index)].reshape(-1).tolist()
            chosen = [rows[place] for place in places]
        else:
            chosen = rows[index]
        if not chosen:
            raise IndexError(
                f"index {index!r} selects none of the {len(rows)} rows. Give an index below the number of rows."
            )
        return self._read(stacked(chosen))

    def __iter__(self) -> Iterator[TensorDictBase]:
        """Iterate once over the rows stored now, in batches of `batch_size`."""
        size = self._size(None)
        with self._lock:
            rows = list(self._rows.values())
        if self._shuffle:
            self._random.shuffle(rows)
        for start in range(0, len(rows), size):
            if start + size <= len(rows) or not self._drop_last:
                yield self._read(stacked(rows[start : start + size]))

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows, but not the groups that a transform still holds back.

        With `empty_write_count`, also reset `write_count` to 0.
        """
        with self._lock:
            self._rows.clear()
            self._unseen.clear()
            if empty_write_count:
                self.write_count = 0

    def _read(self, batch: TensorDictBase) -> TensorDictBase:
        for transform in self._transforms:
            batch = transform.read(batch)
        return batch

    def _size(self, asked: int | None) -> int:
        size = self.batch_size if asked is None else asked
        if size is None or size < 1:
            raise ValueError(f"batch_size={size} must be at least 1: give it to sample() or to the buffer.")
        return size

    def _take(self, number: int) -> list[int]:
        if self._shuffle:
            self._random.shuffle(self._unseen)
        taken, self._unseen = self._unseen[:number], self._unseen[number:]
        return taken


@dataclass(frozen=True)
class _ReadAndWrite:
    """The two directions of a transform."""

    read: Callable[[TensorDictBase], TensorDictBase]
    write: Callable[[TensorDictBase], TensorDictBase | None]

    @classmethod
    def of(cls, transform: Transform, invert: bool) -> _ReadAndWrite:
        read, write = getattr(transform, "forward", None), getattr(transform, "inv", None)
        if isinstance(transform, type) or not (callable(transform) or callable(read) or callable(write)):
            raise TypeError(f"transform {transform!r:.80} has no `inv` and no `forward`, and is not a function.")
        if read is None:
            read = _unchanged if write is not None else transform
        pair = read, write or _unchanged
        return cls(*(reversed(pair) if invert else pair))


def _unchanged(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict


def _size_of(storage: Any) -> int | None:
    """Return the max_size of a storage, or of the one that a class or function makes."""
    if isinstance(storage, type) or (callable(storage) and not hasattr(storage, "max_size")):
        storage = storage()
    if not hasattr(storage, "max_size"):
        raise ValueError(f"storage={storage!r:.80} has no max_size: give LazyStackStorage(n).")
    if not isinstance(storage, LazyStackStorage) and len(storage):
        raise ValueError(
            f"storage={storage!r:.80} already has {len(storage)} rows. Give an empty one and write them with extend()."
        )
    return storage.max_size  # type: ignore[no-any-return]
