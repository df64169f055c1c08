"""The weight store of the SGLang engine: it sends full Hugging Face tensors to SGLang's processes.

SGLang shards, fuses and casts the tensors. It silently skips tensors with unknown names, so the store renames tensors
to the names in the checkpoint. SGLang is imported lazily.
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
    """A WeightStore for SGLang, which accepts tensors only between the begin and the end of an update.

    No request runs during an update.
    """

    loads_separately = False

    def __init__(
        self,
        model: PreTrainedModel,
        manager: Any,
        call: Callable[[Coroutine[Any, Any, Any]], Any],
        halt: Callable[[], Coroutine[Any, Any, None]],
        *,
        ranks: int,
    ):
        """Create a store. Its methods block, so they must not run on SGLang's event loop.

        Args:
            model: The transformers model on the meta device, whose parameter names the tensors of a sync have.
            manager: SGLang's TokenizerManager.
            call: Runs a coroutine on SGLang's event loop and returns its result; called from another thread.
            halt: Pauses running requests.
            ranks: Number of SGLang's model processes. Each gets its own handle of a bucket.
        """
        self._model = model
        self._layout = dict(model.named_parameters(remove_duplicate=False))
        self._manager = manager
        self._call = call
        self._halt = halt
        self._ranks = ranks
        self._is_updating = False
        self._memory: Tensor | None = None
        """Shared memory for buckets on a CPU, uint8. It is reused, because SGLang has read a bucket before the next."""

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        """Return the model's tensors by Hugging Face name, on the meta device.

        Args:
            adapter: Adapter that the sync sends separately; must be None.

        Raises:
            WeightSyncError: The sync has an adapter, which SGLang does not support.
        """
        reject_adapter(adapter)
        return self._layout

    def loaded_tensor(self, name: str) -> None:
        """Return None: SGLang fuses and shards tensors, so the loaded tensor does not exist as such."""
        return None

    def start(self) -> None:
        """Pause running requests and begin an update, after ending an unfinished one.

        Raises:
            WeightSyncError: SGLang rejects the command.
        """
        from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

        self._call(self._halt())
        if self._is_updating:
            self.finish()
        self._send("begin_weight_update", BeginWeightUpdateReqInput())
        self._is_updating = True

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        """Load the tensors of one bucket into SGLang, and wait until SGLang has copied them, so that the caller may
        reuse their memory.

        Args:
            tensors: Pairs of a parameter's name in the engine's model and its values, all on one device.

        Raises:
            WeightSyncError: SGLang rejects the bucket.
        """
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        bucket = self._bucket(to_checkpoint_tensors(self._model, dict(tensors)).items(), tensors[0][1].device)
        handles = [MultiprocessingSerializer.serialize(bucket) for _ in range(self._ranks)]
        update = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=handles, load_format="flattened_bucket", flush_cache=False
        )
        self._send("update_weights_from_tensor", update)

    def finish(self) -> None:
        """End the update and release the shared memory.

        Raises:
            WeightSyncError: SGLang rejects the command.
        """
        from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

        self._is_updating = False
        self._memory = None
        self._send("end_weight_update", EndWeightUpdateReqInput())

    def _send(self, command: str, request: Any) -> None:
        # The manager's own methods take locks that would wait for paused requests.
        for result in self._call(getattr(self._manager, f"{command}_communicator")(request)):
            if not result.success:
                raise WeightSyncError(f"SGLang rejected {command}: {result.message}")

    def _bucket(self, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> dict[str, Any]:
        """Pack tensors into memory that SGLang's processes can read, in the form that its loader expects."""
        from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorMetadata as Metadata

        metadata, used = [], 0
        for name, tensor in tensors:
            size = tensor.nbytes
            metadata.append(Metadata(name, tensor.shape, tensor.dtype, start_idx=used, end_idx=used + size, numel=size))
            used += -(-size // ALIGNMENT) * ALIGNMENT
        buffer = self._buffer(used, device)
        for entry, (_, tensor) in zip(metadata, tensors, strict=True):
            buffer[entry.start_idx : entry.end_idx].view(tensor.dtype).view(tensor.shape).copy_(tensor)
        return {"flattened_tensor": buffer, "metadata": metadata}

    def _buffer(self, size: int, device: torch.device) -> Tensor:
        if device.type != "cpu":
            return torch.empty(size, dtype=torch.uint8, device=device)
        if self._memory is None or self._memory.numel() < size:
            storage = torch.UntypedStorage._new_shared(size)  # type: ignore[call-overload]
            self._memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        return self._memory[:size]


def check_names(path: str, model: PreTrainedModel) -> None:
    """Check that the checkpoint in a folder has every tensor name that weight syncs send to SGLang.

    A checkpoint without safetensors files passes.

    Args:
        path: Folder or hub name of the checkpoint that SGLang loads.
        model: The same model on the meta device.

    Raises:
        ConfigError: The checkpoint lacks a name. SGLang would silently skip that tensor in every sync.
    """
    names = list_checkpoint_names(path)
    sent = to_checkpoint_tensors(model, dict(model.named_parameters()))
    if names and (missing := [name for name in sent if name not in names]):
        others = f" and {len(missing) - 1} other tensors" if len(missing) > 1 else ""
        raise ConfigError(
            f"The checkpoint {path!r} lacks {missing[0]!r}{others}. Weight syncs send tensors to SGLang under these "
            "names, and SGLang skips names that its checkpoint lacks. Load the model with transformers, save it with "
            "save_pretrained, and use that checkpoint."
        )
