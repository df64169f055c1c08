"""A bounded store of tensordict rows, between a collector that writes to it and a loss that samples from it."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from skyrl_train.tensordict.ragged import rows_of, stacked


class WriteTransform(Protocol):
    """A transform between `extend` and the store: advantages, selections."""

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """Return the rows to store, among those written now or held back earlier; None: nothing yet."""
        ...


@dataclass(frozen=True)
class LazyStackStorage:
    """TorchRL's name for a store of `max_size` ragged rows, for `ReplayBuffer(storage=...)`."""

    max_size: int


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
        storage: LazyStackStorage | None = None,
        sampler: SamplerWithoutReplacement | None = None,
        batch_size: int | None = None,
        transform: WriteTransform | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
    ):
        """
        Args:
            max_size: How many rows are kept; or `storage` says it, as in TorchRL.
            sampler: TorchRL's place for `shuffle` and `drop_last`, whose values it replaces.
            batch_size: Rows per `sample()` and per batch of an iteration.
            transform: What rows go through when they are written.
            drop_last: Drop a smaller last batch.

        Raises ValueError unless exactly one of `max_size` and `storage` is given.
        """
        if (max_size is None) == (storage is None):
            raise ValueError(f"max_size={max_size}, storage={storage}: give one of the two.")
        max_size = storage.max_size if storage is not None else max_size
        assert max_size is not None
        if sampler is not None:
            shuffle, drop_last = sampler.shuffle, sampler.drop_last
        if max_size < 1:
            raise ValueError(f"max_size={max_size} must be at least 1.")
        self.max_size = max_size
        self.batch_size = batch_size
        self.write_count = 0
        """Total number of rows stored so far."""
        self._shuffle, self._drop_last = shuffle, drop_last
        self._random = random.Random(seed)
        self._transforms: list[WriteTransform] = [] if transform is None else [transform]
        self._rows: dict[int, TensorDictBase] = {}  # by write number: the oldest is first
        self._unseen: list[int] = []
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._rows)

    def append_transform(self, transform: WriteTransform) -> ReplayBuffer:
        """Add a transform. As in TorchRL, written rows go through the one added last first."""
        self._transforms.append(transform)
        return self

    def add(self, row: TensorDictBase) -> Tensor:
        """Write one row (batch size ())."""
        return self.extend(row.unsqueeze(0))

    def extend(self, tensordict: TensorDictBase) -> Tensor:
        """Write all rows of a tensordict of any batch size; return the int64 numbers of the rows that were stored."""
        with self._lock:
            found: TensorDictBase | None = tensordict
            for transform in reversed(self._transforms):
                found = None if found is None else transform.inv(found)
            rows = [] if found is None else rows_of(found)
            numbers = list(range(self.write_count, self.write_count + len(rows)))
            self.write_count += len(rows)
            self._rows.update((number, row.copy()) for number, row in zip(numbers, rows, strict=True))
            self._unseen += numbers
            surplus = list(self._rows)[: max(len(self._rows) - self.max_size, 0)]
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
            return stacked([self._rows[number] for number in chosen])

    def __iter__(self) -> Iterator[TensorDictBase]:
        """One pass over the rows stored now, in batches of `batch_size`."""
        size = self._size(None)
        with self._lock:
            rows = list(self._rows.values())
        if self._shuffle:
            self._random.shuffle(rows)
        for start in range(0, len(rows), size):
            if start + size <= len(rows) or not self._drop_last:
                yield stacked(rows[start : start + size])

    def empty(self) -> None:
        """Remove all rows, but not the groups that a transform still holds back."""
        with self._lock:
            self._rows.clear()
            self._unseen.clear()

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
