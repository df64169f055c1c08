"""The order in which a run visits a dataset: a function of the seed, so that a position in it is a single number."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from skyrl_train.errors import DataError


class PromptOrder:
    """An endless sequence of row numbers; every epoch is another permutation of the `size` rows.

    `index` counts from the start of the run over all epochs: epoch index // size, position index % size. Only the seed
    and this number determine the row.

    Example:
        order = PromptOrder(size=100, seed=0)
        first = [next(order) for _ in range(3)]      # order.state() is now {"epoch": 0, "position": 3}
        again = [order.row(index) for index in range(3)]
    """

    def __init__(self, size: int, seed: int, shuffle: bool = True):
        if size < 1:
            raise DataError("an order needs at least one row, got none.")
        self.size = size
        self.seed = seed
        self.cursor = 0
        """The next index, counted over all epochs; assign to it to move."""
        self._permutation = lru_cache(maxsize=2)(self._permute if shuffle else lambda epoch: np.arange(size))

    def row(self, index: int) -> int:
        """The row at an index of the run."""
        epoch, position = divmod(index, self.size)
        return int(self._permutation(epoch)[position])

    def __iter__(self) -> PromptOrder:
        return self

    def __next__(self) -> int:
        row = self.row(self.cursor)
        self.cursor += 1
        return row

    def state(self) -> dict[str, int]:
        epoch, position = divmod(self.cursor, self.size)
        return {"epoch": epoch, "position": position}

    def load_state(self, state: dict[str, int]) -> None:
        """Continue where `state()` was taken. Raises DataError for a position that this dataset does not have."""
        if not 0 <= state["position"] < self.size or state["epoch"] < 0:
            raise DataError(f"position {state['position']} of epoch {state['epoch']} is not in 0..{self.size - 1}.")
        self.cursor = state["epoch"] * self.size + state["position"]

    def _permute(self, epoch: int) -> np.ndarray:
        return np.random.Generator(np.random.PCG64([self.seed, epoch])).permutation(self.size)
