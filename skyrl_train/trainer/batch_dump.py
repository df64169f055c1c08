"""Training batches as files to inspect: the input of every update, token by token."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from skyrl_train.atomic_files import atomic_write
from skyrl_train.data.batch import TrainBatch

_log = logging.getLogger(__name__)


class BatchDump:
    """Writes one safetensors file per step. After a failed write it logs one warning and stops writing."""

    def __init__(self, folder: Path):
        """Write files to `folder`, which is created with the first file."""
        self._folder = Path(folder)
        self._is_enabled = True

    def write(self, step: int, batch: TrainBatch, uids: Sequence[str]) -> None:
        """Write the batch of a step, replacing a file of the same step. Never raises OSError.

        Args:
            step: The step that trains on the batch, for the name of the file.
            batch: The batch with everything that the update reads.
            uids: The uid of each sequence's prompt, [B].
        """
        if not self._is_enabled:
            return
        file = self._folder / f"global_step_{step}_training_input.safetensors"
        batch = replace(batch, advantages=batch.token_advantages, sequence_advantages=None)  # keeps the file format
        present = {field.name: getattr(batch, field.name) for field in fields(batch)}
        # safetensors rejects tensors that share memory, and fields of a batch may be the same tensor.
        tensors = {name: value.clone() for name, value in present.items() if value is not None}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(file, fsync=False) as handle:
                save_file(tensors, handle.name, metadata={"step": str(step), "uids": json.dumps(list(uids))})
        except (OSError, SafetensorError) as error:
            self._is_enabled = False
            _log.warning(
                "trainer.dump_data_batch: %s cannot be written (%r). No more batches are written.", file, error
            )


def read_batch(file: Path | str) -> tuple[TrainBatch, list[str]]:
    """Read a file of `BatchDump`.

    Returns:
        The batch, and the uid of each sequence's prompt, [B].

    Raises:
        OSError: The file cannot be read.
        SafetensorError: It is not a safetensors file.
    """
    with safe_open(file, framework="pt") as handle:
        uids: list[str] = json.loads(handle.metadata()["uids"])
    known = {field.name for field in fields(TrainBatch)}  # files of earlier versions have position_ids, too
    return TrainBatch(**{name: tensor for name, tensor in load_file(file).items() if name in known}), uids
