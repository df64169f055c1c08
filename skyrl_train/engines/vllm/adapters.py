"""LoRA adapters of the vLLM engine: private copies that exist while requests use them. Imports vLLM: see engine.py."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from uuid import uuid4

import torch
from torch import nn
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest
from vllm.v1.engine.llm_engine import LLMEngine

from skyrl_train.engines.peft_adapter import read_adapter
from skyrl_train.errors import EngineError
from skyrl_train.models.loading import load_meta_model
from skyrl_train.models.lora import get_adaptable_linears, get_exported_names

_SYNCED = 1
"""vLLM's id of the adapter from weight syncs. Running requests continue with the adapter that is loaded under it."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")


class VLLMAdapters:
    """The LoRA adapters that are loaded into vLLM. It owns a folder of copies, so callers must close it.

    vLLM keeps few adapters in memory and reads the others from their folders again when a request needs them. All
    running requests would fail if such a folder had been changed or deleted in the meantime, hence the copies.
    """

    def __init__(self, engine: LLMEngine, name: str):
        """Create a registry without adapters.

        Args:
            engine: vLLM's engine.
            name: The engine's name, for error messages.
        """
        self._engine = engine
        self._name = name
        self._folder: TemporaryDirectory[str] | None = None
        self._linears: dict[str, nn.Linear] | None = None
        """Layers that adapters may change, by their names in adapter files; None before the first use."""
        self._last_id = _SYNCED
        self._retired: list[LoRARequest] = []
        """Adapters that were replaced or removed, and that running requests may still use."""
        self.loaded: dict[str, LoRARequest] = {}
        self.synced: LoRARequest | None = None
        """The adapter of the last weight sync, which applies to requests that name none."""
        self._synced_name = f"weight sync {uuid4()}"  # Unique, because vLLM identifies adapters by name.
        self.sync_has_adapter = False
        """True if the current weight sync includes an adapter."""

    @property
    def synced_folder(self) -> str:
        """The folder for the adapter of weight syncs; empty if LoRA is off in this engine."""
        if self._engine.vllm_config.lora_config is None:
            return ""
        return str(Path(self._own_folder()) / "synced")

    def serve_synced(self) -> None:
        """Load the adapter that the workers wrote to `synced_folder`, if the sync includes one.

        Raises:
            EngineError: vLLM rejects the adapter.
        """
        self.synced = None
        if not self.sync_has_adapter:
            return
        self._load(LoRARequest(self._synced_name, _SYNCED, self.synced_folder, load_inplace=True))
        self.synced = LoRARequest(self._synced_name, _SYNCED, self.synced_folder)

    def copy(self, name: str, path: str) -> str:
        """Check an adapter and copy the files that vLLM reads. Any thread may call this.

        The check is necessary because vLLM silently accepts missing tensors and wrong ranks.

        Args:
            name: Name of the adapter, for error messages.
            path: The folder that peft's `save_pretrained` wrote.

        Returns:
            The folder of the copy.

        Raises:
            EngineError: The folder cannot be read, or an option or a tensor does not fit the model.
        """
        if self._linears is None:
            model = load_meta_model(self._engine.model_config.model, torch.float32)
            names = get_exported_names(model)
            self._linears = {names[layer]: linear for layer, linear in get_adaptable_linears(model).items()}
        read_adapter(path, self._linears, adapter=name, engine=self._name)
        folder = mkdtemp(dir=self._own_folder())
        for file in _FILES:
            shutil.copyfile(Path(path) / file, Path(folder) / file)
        return folder

    def add(self, name: str, folder: str) -> None:
        """Load an adapter into vLLM. It replaces an earlier adapter of the same name for new requests.

        Args:
            name: Name of the adapter.
            folder: The folder that `copy` returned. It is deleted if vLLM rejects the adapter.

        Raises:
            EngineError: vLLM rejects the adapter.
        """
        self._last_id += 1
        request = LoRARequest(name, self._last_id, folder)
        try:
            self._load(request)
        except EngineError:
            shutil.rmtree(folder)
            raise
        self.remove(name)
        self.loaded[name] = request

    def remove(self, name: str) -> None:
        """Stop serving an adapter to new requests. Running requests finish with it. Unknown names are ignored."""
        adapter = self.loaded.pop(name, None)
        if adapter is not None:
            self._retired.append(adapter)

    def forget_unused(self, used: Iterable[LoRARequest | None]) -> None:
        """Unload removed adapters that no request uses any more, and delete their folders.

        Args:
            used: The adapters of running requests. None among them is ignored.
        """
        if not self._retired:
            return
        used_ids = {adapter.lora_int_id for adapter in used if adapter is not None}
        unused = [adapter for adapter in self._retired if adapter.lora_int_id not in used_ids]
        self._retired = [adapter for adapter in self._retired if adapter.lora_int_id in used_ids]
        for adapter in unused:
            self._engine.remove_lora(adapter.lora_int_id)
            shutil.rmtree(adapter.lora_path)

    def _load(self, request: LoRARequest) -> None:
        try:
            self._engine.add_lora(request)
        except (ValueError, RuntimeError, OSError, KeyError, LoRAAdapterNotFoundError) as error:
            name = request.lora_name
            raise EngineError(f"Engine {self._name!r}: vLLM rejects adapter {name!r}: {error}") from error

    def _own_folder(self) -> str:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="adapters-")
        return self._folder.name

    def close(self) -> None:
        """Delete the folder with all copies."""
        if self._folder is not None:
            self._folder.cleanup()
