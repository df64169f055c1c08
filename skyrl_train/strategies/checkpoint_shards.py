"""One rank's slice of a model on disk: safetensors and JSON, which any other number of ranks can read.

A slice is elements [start, stop) of the flattened tensor: whole rows with FSDP2, any range with ZeRO. Rank r writes
only shard_r.json and shard_r.safetensors, so ranks never write the same file.
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
_NOT_AS_SAVED = (LookupError, TypeError, ValueError, AttributeError, OverflowError)
"""What reading JSON of another shape raises. Checksums say that a file is whole, not who wrote it."""


@dataclass(frozen=True)
class ParameterSlice:
    """Elements [start, stop) of a flattened tensor of `shape`."""

    shape: tuple[int, ...]
    dtype: str
    start: int
    stop: int

    @classmethod
    def from_tensor(cls, parameter: Tensor) -> ParameterSlice:
        """This rank's slice of a parameter: all of it, or some rows if it is sharded."""
        start, stop, row = 0, parameter.numel(), math.prod(parameter.shape[1:])
        if isinstance(parameter, DTensor):
            local, offset = compute_local_shape_and_global_offset(
                parameter.shape, parameter.device_mesh, parameter.placements
            )
            start, stop = offset[0] * row, (offset[0] + local[0]) * row
        return cls(tuple(parameter.shape), str(parameter.dtype).removeprefix("torch."), start, stop)

    def to_full(self, shard: ParameterShard) -> ParameterSlice:
        """Convert a slice of rows of a part to the slice of these rows in the whole parameter.

        If the part is not rows itself, the slice gets all columns.
        """
        shape = (*self.shape[: shard.dim], self.shape[shard.dim] * shard.size, *self.shape[shard.dim + 1 :])
        if shard.dim == 0:
            assert shard.blocks == 1, "rows of several blocks are no slice"
            before = shard.rank * math.prod(self.shape)
            return replace(self, shape=shape, start=before + self.start, stop=before + self.stop)
        return replace(self, shape=shape, start=self.start * shard.size, stop=self.stop * shard.size)


def to_local(tensor: Tensor) -> Tensor:
    """This rank's rows, as a plain tensor that shares memory with `tensor`."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class CheckpointShard:
    """What one rank saves, in host memory."""

    rank: int
    slices: Mapping[str, ParameterSlice]
    tensors: Mapping[str, Tensor]
    """"kind/parameter" -> tensor of any shape; flattened in the file."""
    meta: Mapping[str, Any]

    def write(self, folder: Path) -> dict[str, FileDigest]:
        """Write this rank's two files durably; file name -> what it holds. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors, table = folder / f"shard_{self.rank}.safetensors", folder / f"shard_{self.rank}.json"
        flat = {name: tensor.detach().cpu().contiguous().view(-1) for name, tensor in self.tensors.items()}
        try:
            save_file(flat, tensors)
        except SafetensorError as error:  # its own type, whatever the disk said
            raise OSError(f"{tensors}: {error}") from error
        slices = {name: asdict(piece) for name, piece in self.slices.items()}
        table.write_text(json.dumps({**self.meta, "rank": self.rank, "slices": slices}) + "\n")
        return {file.name: digest_file(file, fsync=True) for file in (tensors, table)}


class CheckpointReader:
    """Reads slices from the files of all ranks of a checkpoint; loads only the requested elements."""

    def __init__(self, folder: Path, stack: ExitStack):
        self.folder = folder
        self._meta = self._json(0)
        ranks = range(max(1, self.read_int("world_size")))
        self._tables = [self._table(rank) for rank in ranks]
        self._files = [self._open(rank, stack) for rank in ranks]
        self._keys = [set(file.keys()) for file in self._files]

    def read_int(self, key: str) -> int:
        """A number of a rank's JSON that is the same on all ranks; True is 1. Raises CheckpointError if it is none."""
        return self._read(key, int)

    def read_optional_float(self, key: str) -> float | None:
        """The same of a number that may be missing. Raises CheckpointError for what is no number."""
        return None if self._meta.get(key) is None else self._read(key, float)

    def _read(self, key: str, kind: Callable[[Any], T]) -> T:
        try:
            return kind(self._meta[key])
        except _NOT_AS_SAVED as error:
            raise CheckpointError(
                f"{self.folder / 'shard_0.json'}: {key} is {self._meta.get(key)!r:.80}, not the number that a rank "
                "saves there; resume from another checkpoint."
            ) from error

    def check_parameters(self, slices: Mapping[str, ParameterSlice]) -> None:
        """Raises CheckpointError unless the checkpoint has exactly these parameters."""
        for name in sorted({*slices, *self._tables[0]}):
            wanted, saved = slices.get(name), self._tables[0].get(name)
            got = None if saved is None else (saved.shape, saved.dtype)
            want = None if wanted is None else (wanted.shape, wanted.dtype)
            if got != want:
                raise CheckpointError(
                    f"{self.folder}: parameter {name!r} is {_describe_parameter(got)} in the checkpoint and {_describe_parameter(want)} in the "
                    "model; it was saved from another one."
                )

    def __contains__(self, key: str) -> bool:
        return key in self._keys[0]

    def read_scalar(self, key: str) -> Tensor:
        """A number [] that is the same on all ranks."""
        return self._files[0].get_tensor(key).reshape(())

    def read_elements(self, key: str, piece: ParameterSlice) -> Tensor:
        """Elements [stop - start] of a sharded tensor, assembled from the files of the ranks that saved them."""
        name = key.split("/", 1)[1]
        ranks = zip(self._files, self._tables, self._keys, strict=True)
        holders = [(file, table[name]) for file, table, keys in ranks if name in table and key in keys]
        parts = []
        position = piece.start
        for file, saved in sorted(holders, key=lambda holder: holder[1].start):
            stop = min(saved.stop, piece.stop)
            if saved.start <= position < stop:  # skips replicas of rows that are already read
                parts.append(file.get_slice(key)[position - saved.start : stop - saved.start])
                position = stop
        if position != piece.stop:
            raise CheckpointError(f"{self.folder}: elements {position}:{piece.stop} of {name!r} are in no shard.")
        return torch.cat(parts) if parts else torch.empty(0, dtype=getattr(torch, piece.dtype))

    def _table(self, rank: int) -> dict[str, ParameterSlice]:
        pieces: Any = self._json(rank).get("slices")
        try:
            return {name: _parse(piece) for name, piece in pieces.items()}
        except _NOT_AS_SAVED as error:
            raise CheckpointError(
                f"{self.folder / f'shard_{rank}.json'}: slices are {pieces!r:.80}, not what a rank saves there "
                f"({type(error).__name__}: {error}); resume from another checkpoint."
            ) from error

    def _json(self, rank: int) -> dict[str, Any]:
        path = self.folder / f"shard_{rank}.json"
        try:
            return dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is missing or torn: {error}") from error

    def _open(self, rank: int, stack: ExitStack) -> Any:
        path = self.folder / f"shard_{rank}.safetensors"
        try:
            return stack.enter_context(safe_open(path, framework="pt"))
        except Exception as error:  # safetensors raises its own type for a torn header, OSError for a missing file
            raise CheckpointError(f"{path} is missing or torn: {error}") from error


@contextmanager
def open_shards(folder: Path) -> Iterator[CheckpointReader]:
    """Open a checkpoint; its files are closed on exit. Raises CheckpointError for a missing or incomplete file."""
    with ExitStack() as stack:
        yield CheckpointReader(folder, stack)


def _parse(piece: dict[str, Any]) -> ParameterSlice:
    return ParameterSlice(tuple(map(int, piece["shape"])), str(piece["dtype"]), int(piece["start"]), int(piece["stop"]))


def _describe_parameter(kind: tuple[tuple[int, ...], str] | None) -> str:
    return "absent" if kind is None else f"{kind[1]} {list(kind[0])}"
