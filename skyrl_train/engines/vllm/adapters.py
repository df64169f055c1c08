"""LoRA adapters of the vLLM engine: private copies, kept as long as a request uses them. Imports vLLM: see vllm.py."""

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

from skyrl_train.engines.adapter_folder import read_adapter
from skyrl_train.errors import EngineError
from skyrl_train.models.loading import meta_model
from skyrl_train.models.lora import adapted_linears

_SYNCED = 1
"""vLLM's number for what weight syncs bring: requests under way go on with what is loaded under it."""
_FILES = ("adapter_config.json", "adapter_model.safetensors")


class VLLMAdapters:
    """Close it: it owns a folder.

    vLLM keeps few adapters in memory and reads one again, from its folder, when a request needs it: a folder that was
    changed or deleted meanwhile would end everything under way.
    """

    def __init__(self, engine: LLMEngine, name: str):
        self._engine = engine
        self._name = name
        self._folder: TemporaryDirectory[str] | None = None
        self._linears: dict[str, nn.Linear] | None = None
        """What adapters may change."""
        self._added = _SYNCED
        self._retired: list[LoRARequest] = []
        """Replaced or dropped, but of use to a request under way."""
        self.loaded: dict[str, LoRARequest] = {}
        self.synced: LoRARequest | None = None
        """The adapter that the last weight sync brought: of requests that name none."""
        self._synced_name = f"weight sync {uuid4()}"  # to vLLM two adapters of one name are one: it is nobody's
        self.coming = False
        """The sync under way brings one."""

    @property
    def synced_folder(self) -> str:
        """Where weight syncs leave it; empty without room for adapters."""
        if self._engine.vllm_config.lora_config is None:
            return ""
        return str(Path(self._own_folder()) / "synced")

    def serve_synced(self) -> None:
        """What the sync that just ended left in `synced_folder`, if it brought one. Raises EngineError."""
        self.synced = None
        if not self.coming:
            return
        self._load(LoRARequest(self._synced_name, _SYNCED, self.synced_folder, load_inplace=True))
        self.synced = LoRARequest(self._synced_name, _SYNCED, self.synced_folder)

    def copy(self, name: str, path: str) -> str:
        """A folder with what vLLM reads, checked: vLLM itself loads tensors that are missing, or of another rank than
        announced, without a word. May run on any thread. Raises EngineError."""
        if self._linears is None:
            self._linears = adapted_linears(meta_model(self._engine.model_config.model, torch.float32))
        read_adapter(path, self._linears, adapter=name, engine=self._name)
        copied = mkdtemp(dir=self._own_folder())
        for file in _FILES:
            shutil.copyfile(Path(path) / file, Path(copied) / file)
        return copied

    def add(self, name: str, copied: str) -> None:
        """Serve what `copy` made, in place of an earlier `name`. Raises EngineError."""
        self._added += 1
        request = LoRARequest(name, self._added, copied)
        try:
            self._load(request)
        except EngineError:
            shutil.rmtree(copied)
            raise
        self.drop(name)
        self.loaded[name] = request

    def drop(self, name: str) -> None:
        """Requests under way go on with it; one that is not here is ignored."""
        old = self.loaded.pop(name, None)
        if old is not None:
            self._retired.append(old)

    def forget_unused(self, used: Iterable[LoRARequest | None]) -> None:
        """Give up what was dropped and is not in `used`: the adapters of requests under way."""
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
