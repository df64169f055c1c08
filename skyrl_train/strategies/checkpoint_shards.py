"""One rank's shard of a model on disk: safetensors and JSON files that any other number of ranks can read.

A slice of a parameter is elements [start, stop) of the flattened tensor: full rows with FSDP2, any range with ZeRO.
Rank r writes only shard_r.json and shard_r.safetensors, so ranks never write the same file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from skyrl_train.atomic_files import FileDigest, digest_file
from skyrl_train.errors import CheckpointError
from skyrl_train.models.parameter_shards import ParameterShard

T = TypeVar("T")
_WRONG_STRUCTURE = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""The errors of reading JSON with another structure.

Checksums show that a file is complete, not that a rank wrote it.
"""


@dataclass(frozen=True)
class ParameterSlice:
    """Elements [start, stop) of a flattened tensor of `shape`."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int

    @classmethod
    def from_tensor(cls, parameter: Tensor) -> ParameterSlice:
        """Return this rank's slice of a parameter: all of it, or some rows if it is sharded."""
        start, stop, row = 0, parameter.numel(), math.prod(parameter.shape[1:])
        if isinstance(parameter, DTensor):
            local, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start, stop = offset[0] * row, (offset[0] + local[0]) * row
        return cls(tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), start, stop)

    def to_full(self, shard: ParameterShard) -> ParameterSlice:
        """Convert a slice of a tensor- or expert-parallel shard to a slice of the full parameter.

        The slice must consist of rows. If the shard is not sharded by rows, the result contains all columns of these
        rows.

        Args:
            shard: The shard that this slice is a part of.
        """
        shape = (*self.shape[: shard.dim], self.shape[shard.dim] * shard.size, *self.shape[shard.dim + 1 :])
        if shard.dim == 0:
            assert shard.blocks == 1, "rows of several blocks are not consecutive"
            before = shard.rank * math.prod(self.shape)
            return replace(self, shape=shape, start=before + self.start, stop=before + self.stop)
        return replace(self, shape=shape, start=self.start * shard.size, stop=self.stop * shard.size)


def to_local(tensor: Tensor) -> Tensor:
    """Return this rank's rows as a plain tensor that shares memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class CheckpointShard:
    """The data that one rank saves, in host memory."""

    rank: int
    slices: Mapping[str, ParameterSlice]
    tensors: Mapping[str, Tensor]
    """"kind/parameter" -> tensor of any shape; the file contains it flattened."""
    meta: Mapping[str, Any]

    def write(self, folder: Path) -> dict[str, FileDigest]:
        """Write this rank's two files durably (fsync).

        Args:
            folder: The folder of the checkpoint; it is created if necessary.

        Returns:
            File name -> digest of the file's content.

        Raises:
            OSError: A file cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        tensor_file, table_file = folder / f"shard_{self.rank}.safetensors", folder / f"shard_{self.rank}.json"
        flat = {name: tensor.detach().cpu().contiguous().view(-1) for name, tensor in self.tensors.items()}
        try:
            save_file(flat, tensor_file)
        except SafetensorError as error:  # its own type, also for errors of the file system
            raise OSError(f"{tensor_file}: {error}") from error
        slices = {name: asdict(parameter_slice) for name, parameter_slice in self.slices.items()}
        table_file.write_text(json.dumps({**self.meta, "rank": self.rank, "slices": slices}) + "\n")
        return {file.name: digest_file(file, fsync=True) for file in (tensor_file, table_file)}


class CheckpointReader:
    """Reads slices from the files of all ranks of a checkpoint, and loads only the requested elements."""

    def __init__(self, folder: Path, stack: ExitStack):
        """Open the files of all ranks.

        Args:
            folder: The folder of the checkpoint.
            stack: Closes the files.

        Raises:
            CheckpointError: A file is missing, corrupt or of another structure.
        """
        self.folder = folder
        self._meta = self._json(0)
        ranks = range(max(1, self.read_int("world_size")))
        self._tables = [self._table(rank) for rank in ranks]
        self._files = [self._open(rank, stack) for rank in ranks]
        self._keys = [set(file.keys()) for file in self._files]

    def read_int(self, key: str) -> int:
        """Return an integer that every rank saved with the same value. Only rank 0's JSON file is read; true is 1.

        Raises:
            CheckpointError: The value is missing or not a number.
        """
        return self._read(key, int)

    def read_optional_float(self, key: str) -> float | None:
        """Return a number that every rank saved with the same value, or None if it is missing or null.

        Only rank 0's JSON file is read.

        Raises:
            CheckpointError: The value has another type.
        """
        return None if self._meta.get(key) is None else self._read(key, float)

    def read_string(self, key: str, default: str) -> str:
        """Return a text that every rank saved with the same value, or `default` if it is missing or null.

        Only rank 0's JSON file is read.
        """
        value = self._meta.get(key)
        return default if value is None else str(value)

    def _read(self, key: str, kind: Callable[[Any], T]) -> T:
        try:
            return kind(self._meta[key])
        except _WRONG_STRUCTURE as error:
            raise CheckpointError(
                f"{self.folder / 'shard_0.json'}: {key} is {self._meta.get(key)!r:.80}, not the number that a rank "
                "saves there. Resume from another checkpoint."
            ) from error

    def check_parameters(self, slices: Mapping[str, ParameterSlice]) -> None:
        """Raise CheckpointError unless the checkpoint has exactly these parameters, with these shapes and dtypes."""
        for name in sorted({*slices, *self._tables[0]}):
            expected_slice, saved_slice = slices.get(name), self._tables[0].get(name)
            saved = None if saved_slice is None else (saved_slice.shape, saved_slice.dtype)
            expected = None if expected_slice is None else (expected_slice.shape, expected_slice.dtype)
            if saved != expected:
                raise CheckpointError(
                    f"{self.folder}: parameter {name!r} is {_describe_parameter(saved)} in the checkpoint and "
                    f"{_describe_parameter(expected)} in the model. The checkpoint is from another model: resume with "
                    "that model, or from another checkpoint."
                )

    def __contains__(self, key: str) -> bool:
        return key in self._keys[0]

    def read_scalar(self, key: str) -> Tensor:
        """Return a number [] that is the same on all ranks."""
        return self._files[0].get_tensor(key).reshape(())

    def read_elements(self, key: str, parameter_slice: ParameterSlice, block_size: int = 1) -> Tensor:
        """Return the elements [stop - start] of a slice, assembled from the files of the ranks that saved them.

        Args:
            key: "kind/parameter".
            parameter_slice: The slice to read.
            block_size: Number of consecutive elements of a saved slice that share one number in the file, which is
                returned for each of them.

        Raises:
            CheckpointError: No rank saved some of the elements.
        """
        name = key.split("/", 1)[1]
        ranks = zip(self._files, self._tables, self._keys, strict=True)
        sources = [(file, table[name]) for file, table, keys in ranks if name in table and key in keys]
        chunks = []
        position = parameter_slice.start
        for file, saved in sorted(sources, key=lambda source: source[1].start):
            stop = min(saved.stop, parameter_slice.stop)
            if saved.start <= position < stop:  # skip replicas of rows that have been read
                first, last = position - saved.start, stop - saved.start
                numbers = file.get_slice(key)[first // block_size : -(-last // block_size)]
                skipped = first % block_size
                chunks.append(numbers.repeat_interleave(block_size)[skipped : skipped + last - first])
                position = stop
        if position != parameter_slice.stop:
            raise CheckpointError(
                f"{self.folder}: elements {position}:{parameter_slice.stop} of {name!r} are in no shard. Resume from "
                "another checkpoint."
            )
        return torch.cat(chunks) if chunks else torch.empty(0, dtype=getattr(torch, parameter_slice.dtype))

    def _table(self, rank: int) -> dict[str, ParameterSlice]:
        slices: Any = self._json(rank).get("slices")
        try:
            return {name: _parse(fields_of_slice) for name, fields_of_slice in slices.items()}
        except _WRONG_STRUCTURE as error:
            raise CheckpointError(
                f"{self.folder / f'shard_{rank}.json'}: slices are {slices!r:.80}, not what a rank saves there "
                f"({type(error).__name__}: {error}). Resume from another checkpoint."
            ) from error

    def _json(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"shard_{rank}.json"
        try:
            return dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is missing or corrupt ({error}). Resume from another checkpoint.") from error

    def _open(self, rank: int, stack: ExitStack) -> Any:
        path = self.folder / f"shard_{rank}.safetensors"
        try:
            return stack.enter_context(safe_open(path, framework="pt"))
        except Exception as error:  # safetensors raises its own type for a corrupt header, OSError for a missing file
            raise CheckpointError(f"{path} is missing or corrupt ({error}). Resume from another checkpoint.") from error


@contextmanager
def open_shards(folder: Path) -> Iterator[CheckpointReader]:
    """Open a checkpoint; its files are closed at the end of the context.

    Raises:
        CheckpointError: A file is missing, corrupt or of another structure.
    """
    with ExitStack() as stack:
        yield CheckpointReader(folder, stack)


def _parse(fields: dict[str, Any]) -> ParameterSlice:
    shape, dtype = tuple(map(int, fields["shape"])), str(fields["dtype"])
    return ParameterSlice(shape, dtype, int(fields["start"]), int(fields["stop"]))


def _describe_parameter(shape_and_dtype: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if shape_and_dtype is None else f"{shape_and_dtype[1]} {list(shape_and_dtype[0])}"
