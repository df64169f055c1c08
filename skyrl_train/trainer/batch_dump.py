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
    """Writes one safetensors file per step. A failed write must not end the run: it warns once and writes no more."""

    def __init__(self, folder: Path):
        self._folder = Path(folder)
        self._is_on = True

    def write(self, step: int, batch: TrainBatch, uids: Sequence[str]) -> None:
        """Write the batch that `step` trains on and the `uids` [B] of its prompts; replaces a file of the same step."""
        if not self._is_on:
            return
        file = self._folder / f"global_step_{step}_training_input.safetensors"
        batch = replace(batch, advantages=batch.token_advantages, sequence_advantages=None)  # as it has always been
        present = {field.name: getattr(batch, field.name) for field in fields(batch)}
        tensors = {name: value.clone() for name, value in present.items() if value is not None}  # some may be the same
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with atomic_write(file, fsync=False) as handle:
                save_file(tensors, handle.name, metadata={"step": str(step), "uids": json.dumps(list(uids))})
        except (OSError, SafetensorError) as error:
            self._is_on = False
            _log.warning("trainer.dump_data_batch: %s cannot be written, and no more is tried (%r).", file, error)


def read_batch(file: Path | str) -> tuple[TrainBatch, list[str]]:
    """Read a file of `BatchDump`: the batch, and the uid of each sequence's prompt [B]."""
    with safe_open(file, framework="pt") as opened:
        uids: list[str] = json.loads(opened.metadata()["uids"])
    known = {field.name for field in fields(TrainBatch)}  # position_ids was one
    return TrainBatch(**{name: tensor for name, tensor in load_file(file).items() if name in known}), uids
