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
"""What data goes through: an object with `inv(tensordict)` for what is written (None: nothing to store yet), with
`forward(tensordict)` for what is read, or both; or a function, for what is read."""


@dataclass(frozen=True)
class LazyStackStorage:
    """TorchRL's name for a store of `max_size` ragged rows (None: any number), for `ReplayBuffer(storage=...)`."""

    max_size: int | None = None


@dataclass(frozen=True)
class SamplerWithoutReplacement:
    """TorchRL's name for what a `ReplayBuffer` does: each row once before any again."""

    drop_last: bool = False
    shuffle: bool = True


class ReplayBuffer:
    """The last `max_size` rows, each sampled once before any is sampled again. Thread-safe.

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
        """
        Args:
            max_size: How many rows are kept; or `storage` says it, as in TorchRL: also an empty one of torchrl's, or a
                class or function that makes one. Rows are kept here whatever it is.
            sampler: TorchRL's place for `shuffle` and `drop_last`, whose values it replaces; also torchrl's own, and
                a class or function that makes one.
            batch_size: Rows per `sample()` and per batch of an iteration.
            transform: What rows go through when they are written and read; see `append_transform`.
            drop_last: Drop a smaller last batch.

        Raises ValueError unless exactly one of `max_size` and `storage` is given, and for other samplers.
        """
        if (max_size is None) == (storage is None):
            raise ValueError(f"max_size={max_size}, storage={storage}: give one of the two.")
        if sampler is not None:
            sampler = sampler() if callable(sampler) else sampler
            if type(sampler).__name__ != SamplerWithoutReplacement.__name__:
                raise ValueError(f"sampler={sampler!r:.80}: only SamplerWithoutReplacement; every row is sampled once.")
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
        """Add a transform: `inv` for rows that are written, through the one added last first, `forward` for those read.

        A function is for rows that are read. `invert` exchanges the two. Raises TypeError for something else.
        """
        return self.insert_transform(len(self._transforms), transform, invert=invert)

    def insert_transform(self, index: int, transform: Transform, *, invert: bool = False) -> ReplayBuffer:
        """Like `append_transform`, at a place among the transforms."""
        self._transforms.insert(index, _ReadAndWrite.of(transform, invert))
        return self

    def add(self, row: TensorDictBase) -> Tensor:
        """Write one row (batch size ())."""
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
        """Rows not yet sampled, at random (or in order without `shuffle`); a new pass starts when none is left.

        Raises ValueError if fewer rows are stored than requested.
        """
        size = self._size(batch_size)
        with self._lock:
            if len(self) < size:
                raise ValueError(f"{size} rows asked for, {len(self)} stored; write more or ask for fewer.")
            chosen = self._take(size)
            if len(chosen) < size:  # the rest of this pass, and the start of the next one without repeating a row
                taken = set(chosen)
                self._unseen = [number for number in self._rows if number not in taken]
                chosen += self._take(size - len(chosen))
            rows = [self._rows[number] for number in chosen]
        return self._read(stacked(rows))

    def __getitem__(self, index: Any) -> Any:
        """Rows by place, the oldest first: one for an int, several for a slice, list or tensor. A key: of all rows."""
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
            raise IndexError(f"no row at {index!r} of {len(rows)}.")
        return self._read(stacked(chosen))

    def __iter__(self) -> Iterator[TensorDictBase]:
        """One pass over the rows stored now, in batches of `batch_size`."""
        size = self._size(None)
        with self._lock:
            rows = list(self._rows.values())
        if self._shuffle:
            self._random.shuffle(rows)
        for start in range(0, len(rows), size):
            if start + size <= len(rows) or not self._drop_last:
                yield self._read(stacked(rows[start : start + size]))

    def empty(self, empty_write_count: bool = True) -> None:
        """Remove all rows, but not the groups that a transform still holds back; `write_count` begins at 0 again."""
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
            raise TypeError(f"transform {transform!r:.80} has no `inv` and no `forward`, and is no function.")
        if read is None:
            read = _unchanged if write is not None else transform
        pair = read, write or _unchanged
        return cls(*(reversed(pair) if invert else pair))


def _unchanged(tensordict: TensorDictBase) -> TensorDictBase:
    return tensordict


def _size_of(storage: Any) -> int | None:
    """The size that a storage, or a class or function that makes one, says."""
    if isinstance(storage, type) or (callable(storage) and not hasattr(storage, "max_size")):
        storage = storage()
    if not hasattr(storage, "max_size"):
        raise ValueError(f"storage={storage!r:.80} has no max_size: give LazyStackStorage(n).")
    if not isinstance(storage, LazyStackStorage) and len(storage):
        raise ValueError(f"storage={storage!r:.80} holds {len(storage)} rows: write them with extend().")
    return storage.max_size  # type: ignore[no-any-return]
