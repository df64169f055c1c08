"""LoRA adapters of the vLLM engine: private copies, kept while a request uses them. Imports vLLM: see engine.py."""

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
"""vLLM's number for the adapter from weight syncs: running requests continue with what is loaded under it."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")


class VLLMAdapters:
    """The adapters loaded into vLLM. It owns a folder of copies, so it must be closed.

    vLLM keeps few adapters in memory and reads others again from their folders when a request needs them: if a folder
    was changed or deleted meanwhile, all running requests would fail.
    """

    def __init__(self, engine: LLMEngine, name: str):
        self._engine = engine
        self._name = name
        self._folder: TemporaryDirectory[str] | None = None
        self._linears: dict[str, nn.Linear] | None = None
        """The layers that adapters may change, by their names in adapters' files."""
        self._added = _SYNCED
        self._retired: list[LoRARequest] = []
        """Adapters that were replaced or dropped while a request may still use them."""
        self.loaded: dict[str, LoRARequest] = {}
        self.synced: LoRARequest | None = None
        """The adapter of the last weight sync, for requests that name none."""
        self._synced_name = f"weight sync {uuid4()}"  # unique, as vLLM identifies adapters by name
        self.sync_has_adapter = False
        """Whether the current sync brings an adapter."""

    @property
    def synced_folder(self) -> str:
        """The folder for the adapter of weight syncs; empty if the engine has no room for adapters."""
        if self._engine.vllm_config.lora_config is None:
            return ""
        return str(Path(self._own_folder()) / "synced")

    def serve_synced(self) -> None:
        """Load the adapter that the sync wrote to `synced_folder`, if it brought one. Raises EngineError."""
        self.synced = None
        if not self.sync_has_adapter:
            return
        self._load(LoRARequest(self._synced_name, _SYNCED, self.synced_folder, load_inplace=True))
        self.synced = LoRARequest(self._synced_name, _SYNCED, self.synced_folder)

    def copy(self, name: str, path: str) -> str:
        """Check an adapter and copy the files that vLLM reads; returns the copy's folder.

        vLLM itself silently accepts missing tensors and wrong ranks. May run on any thread. Raises EngineError.
        """
        if self._linears is None:
            model = load_meta_model(self._engine.model_config.model, torch.float32)
            names = get_exported_names(model)
            self._linears = {names[layer]: linear for layer, linear in get_adaptable_linears(model).items()}
        read_adapter(path, self._linears, adapter=name, engine=self._name)
        copied = mkdtemp(dir=self._own_folder())
        for file in _FILES:
            shutil.copyfile(Path(path) / file, Path(copied) / file)
        return copied

    def add(self, name: str, copied: str) -> None:
        """Serve the adapter in the folder that `copy` made; replaces an earlier `name`. Raises EngineError."""
        self._added += 1
        request = LoRARequest(name, self._added, copied)
        try:
            self._load(request)
        except EngineError:
            shutil.rmtree(copied)
            raise
        self.remove(name)
        self.loaded[name] = request

    def remove(self, name: str) -> None:
        """Forget an adapter for new requests; running ones continue with it. A name that is not loaded is ignored."""
        old = self.loaded.pop(name, None)
        if old is not None:
            self._retired.append(old)

    def forget_unused(self, used: Iterable[LoRARequest | None]) -> None:
        """Delete dropped adapters that are not in `used`, the adapters of running requests."""
        if not self._retired:
            return
        ids = {one.lora_int_id for one in used if one is not None}
        unused = [one for one in self._retired if one.lora_int_id not in ids]
        self._retired = [one for one in self._retired if one.lora_int_id in ids]
        for one in unused:
            self._engine.remove_lora(one.lora_int_id)
            shutil.rmtree(one.lora_path)

    def _load(self, request: LoRARequest) -> None:
        try:
            self._engine.add_lora(request)
        except (ValueError, RuntimeError, OSError, KeyError, LoRAAdapterNotFoundError) as error:
            name = request.lora_name
            raise EngineError(f"Engine {self._name!r}: vLLM does not take adapter {name!r}: {error}") from error

    def _own_folder(self) -> str:
        if self._folder is None:
            self._folder = TemporaryDirectory(prefix="adapters-")
        return self._folder.name

    def close(self) -> None:
        if self._folder is not None:
            self._folder.cleanup()
