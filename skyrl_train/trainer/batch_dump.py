"""Training batches as files, for people to look into: what an update was given, token by token."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from skyrl_train.data.batch import TrainBatch

_log = logging.getLogger(__name__)


class BatchDump:
    """One safetensors file a step. The run is worth more: where a file cannot be written, there is one warning."""

    def __init__(self, folder: Path):
        self._folder = Path(folder)
        self._is_on = True

    def write(self, step: int, batch: TrainBatch, uids: Sequence[str]) -> None:
        """The batch that `step` trains on, `uids` [B] of its prompts; a file of the same step is replaced."""
        if not self._is_on:
            return
        file = self._folder / f"global_step_{step}_training_input.safetensors"
        present = {field.name: getattr(batch, field.name) for field in fields(batch)}
        tensors = {name: value.clone() for name, value in present.items() if value is not None}  # some may be the same
        beside = file.with_name(f".{file.name}.new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            save_file(tensors, beside, metadata={"step": str(step), "uids": json.dumps(list(uids))})
            beside.replace(file)
        except (OSError, SafetensorError) as error:
            self._is_on = False
            _log.warning("trainer.dump_data_batch: %s cannot be written, and no more is tried (%r).", file, error)


def read_batch(file: Path | str) -> tuple[TrainBatch, list[str]]:
    """A batch and the uid of each of its sequences' prompt [B], as `BatchDump` wrote them."""
    with safe_open(file, framework="pt") as opened:
        uids: list[str] = json.loads(opened.metadata()["uids"])
    return TrainBatch(**load_file(file)), uids
