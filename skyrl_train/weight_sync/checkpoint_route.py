"""The `checkpoint` route: buckets as safetensors files in a folder that the trainer and all engines share."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_train.errors import WeightSyncError


class BucketFolder:
    """The trainer's end: one folder per version, deleted when the next one begins or the sender closes."""

    def __init__(self, folder: str):
        """Use a shared folder, in which nothing is created yet."""
        self._root = Path(folder)
        self._current: Path | None = None

    def write(self, version: int, index: int, tensors: Sequence[tuple[str, Tensor]]) -> str:
        """Write a bucket to a file and return its path.

        The first call for a version deletes the files of the previous version.

        Args:
            version: Version of the weights.
            index: Index of the bucket.
            tensors: Pairs of a parameter's name and its tensor.

        Raises:
            WeightSyncError: The file cannot be written.
        """
        folder = self._root / f"version_{version}"
        if folder != self._current:
            self.close()
            shutil.rmtree(folder, ignore_errors=True)
        path = folder / f"bucket_{index:05d}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._current = folder
            save_file({name: tensor.contiguous() for name, tensor in tensors}, path)
        except (OSError, SafetensorError) as error:
            raise WeightSyncError(f"bucket {index} could not be written to {path}: {error}") from error
        return str(path)

    def close(self) -> None:
        """Delete the folder of the current version."""
        if self._current is not None:
            shutil.rmtree(self._current, ignore_errors=True)
            self._current = None


def read_bucket(path: str, device: torch.device) -> dict[str, Tensor]:
    """Read a bucket: the engine's end. Return its tensors by name, on `device`.

    Raises:
        WeightSyncError: The file is missing or incomplete.
    """
    try:
        return load_file(path, device=str(device))
    except (OSError, SafetensorError) as error:
        raise WeightSyncError(f"{path} cannot be read: {error}") from error
