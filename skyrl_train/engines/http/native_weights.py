"""Weights for a server that loads them from a folder: a Hugging Face checkpoint written bucket by bucket."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.errors import WeightSyncError
from skyrl_train.models.composite import checkpoint_config
from skyrl_train.models.export import name_files, save_checkpoint_tensors
from skyrl_train.weight_sync.store import refuse_adapter
from skyrl_train.weight_sync.wire import AdapterSpec


class CheckpointFolder:
    """A WeightStore that writes a folder per sync, under a temporary name until it is complete."""

    def __init__(
        self,
        model: PreTrainedModel,
        root: Path,
        tokenizer: Any,
        hand_over: Callable[[str], None],
    ):
        """`model`: on the meta device. `root`: a folder that nothing else uses.

        `hand_over` makes the server load a folder, and returns once it has.
        """
        self._model = model
        self._layout = dict(model.named_parameters(remove_duplicate=False))
        self._root = root
        self._tokenizer = tokenizer
        self._hand_over = hand_over
        self._count = 0
        self._files: list[list[str]] = []
        """Names of the tensors in each file written."""
        self._bytes = 0

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        refuse_adapter(adapter)
        return self._layout

    def held(self, name: str) -> None:
        """None: the server's tensors cannot be accessed."""
        return None

    @property
    def _unfinished(self) -> Path:
        return self._root / "unfinished"

    def start(self) -> None:
        self._files, self._bytes = [], 0
        try:
            shutil.rmtree(self._unfinished, ignore_errors=True)
            self._unfinished.mkdir(parents=True)
            checkpoint_config(self._model).save_pretrained(self._unfinished)
            self._tokenizer.save_pretrained(self._unfinished)
        except OSError as error:
            raise self._failed(error) from error

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        path = self._unfinished / f"part-{len(self._files)}.safetensors"
        try:
            # Servers silently skip experts under transformers' own names, so they get the checkpoint's names.
            self._files.append(save_checkpoint_tensors(self._model, dict(tensors), path))
        except (OSError, SafetensorError) as error:
            raise self._failed(error) from error
        self._bytes += sum(tensor.nbytes for _, tensor in tensors)

    def finish(self) -> None:
        self._count += 1
        done = self._root / f"weights_{self._count:06d}"
        try:
            name_files(self._unfinished, self._files, self._bytes)
            shutil.rmtree(done, ignore_errors=True)
            self._unfinished.rename(done)
        except OSError as error:
            raise self._failed(error) from error
        self._hand_over(str(done.resolve()))
        for old in self._root.iterdir():
            if old != done:
                shutil.rmtree(old, ignore_errors=True)

    def _failed(self, error: Exception) -> WeightSyncError:
        return WeightSyncError(
            f"weights for a server could not be written to {self._root}: {error}; set generator.weight_sync_folder."
        )
