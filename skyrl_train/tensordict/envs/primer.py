"""The transform that supplies resets with the rows of a dataset."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase
from torchrl.data import Composite, NonTensor
from torchrl.envs.llm import transforms as torchrl_transforms
from torchrl.envs.llm.transforms import as_nested_tensor as as_nested_tensor, as_padded_tensor as as_padded_tensor

from skyrl_train.tensordict.envs.rows import reset_rows


class DataLoadingPrimer(torchrl_transforms.DataLoadingPrimer):  # type: ignore[misc]
    """TorchRL's primer, which gives every reset the next rows of a loader that is repeated endlessly.

    Unlike TorchRL's, it also takes lists of mappings and rows with different columns, keeps values other than tensors
    unchanged, renames "text" to "query" (policies write their own "text"), and raises ValueError for no rows.

    Args:
        dataloader: Loader of mappings (one row, or the columns of a batch), lists of mappings, or tensordicts.
        question_key: Column whose value is also stored under "query", unless there is a column "query".
        **settings: Arguments of TorchRL's class.
    """

    primers: Composite
    batch_size: Any

    def __init__(self, dataloader: Iterable[Any] | None = None, *, question_key: str | None = None, **settings: Any):
        if (settings.get("repeats") or 0) < 0:
            raise ValueError(f"repeats={settings['repeats']} must not be negative.")
        self._question_key = question_key
        super().__init__(dataloader, **settings)
        if not self.batch_size:
            self.expand_specs, self.batch_size = True, None  # the environment's batch size counts
        if settings.get("primers") is None:
            self.primers = self.primers.clone()
            for key, spec in self.primers.items():
                if isinstance(spec, NonTensor):  # example data of one row would make the specs of two workers differ
                    self.primers[key] = NonTensor(spec.shape, example_data="a string", device=spec.device)

    @classmethod
    def _endless_iter(cls, obj: Iterable[Any]) -> Iterator[Any]:
        while True:
            batch = None
            for batch in obj:
                yield batch
            if batch is None:
                raise ValueError("The dataloader yields no rows. Give one with at least one row.")

    def _load_from_dataloader(self, reset: torch.Tensor | None = None) -> TensorDictBase:
        if reset is not None and reset.ndim:
            return self.stack_method([self._load_from_dataloader() for _ in range(int(reset.sum()))])
        while not self._queue:
            for row in self._rows_of(next(self.endless_dataloader)):
                self._queue.extend(row.copy() for _ in range(max(1, self.repeats)))
        row = self._queue.popleft()
        return row if self.device is None else row.to(self.device)

    def _reset_func(self, tensordict: TensorDictBase, tensordict_reset: TensorDictBase) -> TensorDictBase:
        """Give the rows that are reset their next data; the others get a placeholder, which `reset` discards."""
        if not tensordict.ndim:
            return tensordict_reset.update(self._load_from_dataloader())
        chosen = reset_rows(tensordict, len(tensordict))
        if not any(chosen):
            return tensordict_reset
        fresh = [self._load_from_dataloader() if reset else None for reset in chosen]
        placeholder = next(row for row in fresh if row is not None)
        rows = self.stack_method([placeholder.copy() if row is None else row for row in fresh])
        return rows.update(tensordict.exclude(*rows.keys()))

    def _rows_of(self, batch: Any) -> list[TensorDictBase]:
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
        for row in rows:
            names = set(row.keys())
            if "query" not in names and "text" in names:
                row.rename_key_("text", "query")
            elif "query" not in names and self._question_key in names:
                row.set("query", row.get(self._question_key))
        return rows


class RayDataLoadingPrimer(torchrl_transforms.RayDataLoadingPrimer):  # type: ignore[misc]
    """TorchRL's primer in a Ray actor that several environments share, with the rows of `DataLoadingPrimer`."""

    def _create_actor(self, **_: Any) -> Any:
        remote = self._ray.remote(num_cpus=self._num_cpus, num_gpus=self._num_gpus)(DataLoadingPrimer)
        if self._actor_name is not None:
            # get_if_exists: of processes that start at the same time, one makes the actor
            remote = remote.options(name=self._actor_name, lifetime="detached", get_if_exists=True)
        loader = {"dataloader": self._dataloader, "dataloader_factory": self._dataloader_factory}
        return remote.remote(**loader, **self._creation_kwargs)

    @torchrl_transforms.RayDataLoadingPrimer.primers.getter
    def primers(self) -> Any:
        """Return the specs of the rows."""
        return self._ray.get(self._actor._getattr.remote("primers"))  # TorchRL's asks for a method that actors lack


DataLoadingPrimer._RayServiceClass = RayDataLoadingPrimer


class Batches:
    """A loader over rows that can be iterated repeatedly; columns that a row lacks are None.

    Args:
        rows: The rows.
        size: Number of rows of a batch; ValueError below 1.
        shuffle: True for a new order in every pass.
        seed: Seed of the orders; None for random ones.
        collate_fn: Function that converts a list of rows to a batch; None yields the lists.
    """

    def __init__(
        self,
        rows: Sequence[Mapping[str, Any]],
        size: int,
        *,
        shuffle: bool,
        seed: int | None,
        collate_fn: Callable[[list[Mapping[str, Any]]], Any] | None = None,
    ):
        if size < 1:
            raise ValueError(f"batch_size_dl={size} must be at least 1.")
        columns = list(dict.fromkeys(column for row in rows for column in row))
        self.rows = [{column: row.get(column) for column in columns} for row in rows]
        self.size, self.shuffle, self.random, self.collate_fn = size, shuffle, random.Random(seed), collate_fn or list

    def __iter__(self) -> Iterator[Any]:
        places = list(range(len(self.rows)))
        if self.shuffle:
            self.random.shuffle(places)
        for start in range(0, len(places), self.size):
            yield self.collate_fn([self.rows[place] for place in places[start : start + self.size]])


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
    kept = (torch.Tensor, TensorDictBase)
    columns = {key: value if isinstance(value, kept) else NonTensorData(value) for key, value in values.items()}
    return TensorDict(columns)
