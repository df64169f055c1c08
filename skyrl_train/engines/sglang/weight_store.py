"""Loads full Hugging Face tensors into SGLang's model, which shards, fuses and casts them. Imports SGLang lazily.

SGLang silently skips tensors with unknown names, so tensors have the names that it read from the checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError, WeightSyncError
from skyrl_train.models.loading import list_checkpoint_names, to_checkpoint_tensors
from skyrl_train.weight_sync.buckets import ALIGNMENT
from skyrl_train.weight_sync.protocol import AdapterSpec
from skyrl_train.weight_sync.receiver import reject_adapter


class SGLangWeightStore:
    """A WeightStore. SGLang takes tensors only between begin and end of an update, during which nothing runs."""

    def __init__(
        self,
        model: PreTrainedModel,
        manager: Any,
        call: Callable[[Coroutine[Any, Any, Any]], Any],
        halt: Callable[[], Coroutine[Any, Any, None]],
        *,
        ranks: int,
    ):
        """`model`: on the meta device. `manager`: SGLang's. `call` runs a coroutine on its loop, from another thread.

        `halt` pauses running requests. `ranks`: the number of processes, each of which gets its own handle of a bucket.
        """
        self._model = model
        self._layout = dict(model.named_parameters(remove_duplicate=False))
        self._manager = manager
        self._call = call
        self._halt = halt
        self._ranks = ranks
        self._open = False
        self._memory: Tensor | None = None
        """uint8, shared between processes (CPU); reused, as SGLang has read a bucket before the next is written."""

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        reject_adapter(adapter)
        return self._layout

    def loaded_tensor(self, name: str) -> None:
        """None: SGLang fuses and shards tensors."""
        return None

    def start(self) -> None:
        """See WeightStore; also works after an update that was not finished."""
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        self._call(self._halt())
        if self._open:
            self.finish()
        self._succeed("begin_weight_update", BeginWeightUpdateReqInput())
        self._open = True

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        bucket = self._bucket(to_checkpoint_tensors(self._model, dict(tensors)).items(), tensors[0][1].device)
        handles = [MultiprocessingSerializer.serialize(bucket) for _ in range(self._ranks)]
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=handles, load_format="flattened_bucket", flush_cache=False
        )
        self._succeed("update_weights_from_tensor", update)

    def finish(self) -> None:
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._open = False
        self._memory = None
        self._succeed("end_weight_update", EndWeightUpdateReqInput())

    def _succeed(self, what: str, request: Any) -> None:
        """Bypasses the manager's own locks, which would wait for paused requests."""
        for answer in self._call(getattr(self._manager, f"{what}_communicator")(request)):
            if not answer.success:
                raise WeightSyncError(f"SGLang refused {what}: {answer.message}")

    def _bucket(self, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> dict[str, Any]:
        """The tensors, packed into memory that SGLang's processes can read, in the form that its loader expects."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata as Place

        places, used = [], 0
        for name, tensor in tensors:
            size = tensor.nbytes
            places.append(Place(name, tensor.shape, tensor.dtype, start_idx=used, end_idx=used + size, numel=size))
            used += -(-size // ALIGNMENT) * ALIGNMENT
        buffer = self._buffer(used, device)
        for place, (_, tensor) in zip(places, tensors, strict=True):
            buffer[place.start_idx : place.end_idx].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return {"flattened_tensor": buffer, "metadata": places}

    def _buffer(self, size: int, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=device)
        if self._memory is None or self._memory.numel() < size:
            storage = torch.UntypedStorage._new_shared(size)  # type: ignore[call-overload]
            self._memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        return self._memory[:size]


def check_names(path: str, model: PreTrainedModel) -> None:
    """Raises ConfigError if the checkpoint that SGLang loads lacks a tensor of a sync."""
    held = list_checkpoint_names(path)
    sent = to_checkpoint_tensors(model, dict(model.named_parameters()))
    if held and (unknown := [name for name in sent if name not in held]):
        raise ConfigError(
            f"{path!r} holds no {unknown[0]!r} (and {len(unknown) - 1} more), the name by which a weight sync sends it "
            "to SGLang, which skips names it does not know: save the model anew with transformers' save_pretrained."
        )
