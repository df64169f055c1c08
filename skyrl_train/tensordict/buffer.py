"""A bounded store of tensordict rows between a collector that writes and a loss that samples."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from typing import Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from skyrl_train.tensordict.ragged import rows_of, stacked


class WriteTransform(Protocol):
    """What stands between `extend` and the store: advantages, selections."""

    def inv(self, tensordict: TensorDictBase) -> TensorDictBase | None:
        """What is to be stored of what was written (and of what was written before); None: nothing yet."""
        ...


class ReplayBuffer:
    """The last `max_size` rows, each sampled once before any is sampled again. Threads may write and sample.

    Rows may be ragged. Sampling copies no tensors; what is written into a sample does not change what is stored.
    """

    def __init__(
        self,
        max_size: int,
        *,
        batch_size: int | None = None,
        transform: WriteTransform | None = None,
        shuffle: bool = True,
        drop_last: bool = False,
        seed: int | None = None,
    ):
        """batch_size: rows of `sample()` and of iteration. drop_last: leave out an iteration's smaller last batch."""
        if max_size < 1:
            raise ValueError(f"max_size={max_size} must be at least 1.")
        self.max_size = max_size
        self.batch_size = batch_size
        self.write_count = 0
        """Rows stored since the beginning."""
        self._shuffle, self._drop_last = shuffle, drop_last
        self._random = random.Random(seed)
        self._transforms: list[WriteTransform] = [] if transform is None else [transform]
        self._rows: dict[int, TensorDictBase] = {}  # by number of writing: the oldest is the first
        self._unseen: list[int] = []
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._rows)

    def append_transform(self, transform: WriteTransform) -> ReplayBuffer:
        """What is written goes through the transform added last first, as in TorchRL."""
        self._transforms.append(transform)
        return self

    def add(self, row: TensorDictBase) -> Tensor:
        """Writes one row (batch size ())."""
        return self.extend(row.unsqueeze(0))

    def extend(self, tensordict: TensorDictBase) -> Tensor:
        """Writes all rows of a tensordict of any batch size; int64 numbers of the rows that were stored, maybe none."""
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
        """Rows not sampled yet, at random (or in order without `shuffle`); all are new again when they are used up.

        ValueError when fewer rows are stored than asked for.
        """
        size = self._size(batch_size)
        with self._lock:
            if len(self) < size:
                raise ValueError(f"{size} rows asked for, {len(self)} stored; write more or ask for fewer.")
            chosen = self._take(size)
            if len(chosen) < size:  # the rest of a pass, and the beginning of the next without repeating a row
                taken = set(chosen)
                self._unseen = [number for number in self._rows if number not in taken]
                chosen += self._take(size - len(chosen))
            return stacked([self._rows[number] for number in chosen])

    def __iter__(self) -> Iterator[TensorDictBase]:
        """One pass over what is stored now, in batches of `batch_size`."""
        size = self._size(None)
        with self._lock:
            rows = list(self._rows.values())
        if self._shuffle:
            self._random.shuffle(rows)
        for start in range(0, len(rows), size):
            if start + size <= len(rows) or not self._drop_last:
                yield stacked(rows[start : start + size])

    def empty(self) -> None:
        """Forgets all rows. Groups that a transform still waits for are its own."""
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
