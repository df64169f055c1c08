"""Weight syncs from this process to the engines of wrappers, like those of a single-rank trainer without Ray."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from skyrl_train.cluster.addresses import free_address
from skyrl_train.engines.base import InferenceEngine
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.weight_sync.sender import WeightSender, WeightSenderMixin
from skyrl_train.weight_sync.sync import WeightSync

Source: TypeAlias = nn.Module | LLMWrapperBase | TensorDictBase | Mapping[str, Tensor]
"""A model, a wrapper over one, or tensors by Hugging Face name; a nested tensordict's keys are joined by
dots. Of `TensorDict.from_module(model)`, only parameters are used. A copy of it (`.data`, `.cpu()`) no longer
distinguishes parameters from buffers, or a tied head from its embedding: remove the tensors that the engine does not
have, or pass the model."""
_LEAVING_S = 10.0
Metadata: TypeAlias = Mapping[str, tuple[torch.dtype, torch.Size]]


class ModelWeights(Mapping[str, Tensor]):
    """A module's parameters by checkpoint name; peft's LoRA adapters are merged into the tensors that are read.

    The module is neither changed nor copied: each tensor is merged when it is read.
    """

    def __init__(self, module: nn.Module):
        """Index the parameters. Raises ConfigError for adapters that cannot be merged by addition (DoRA, biases)."""
        self._read: dict[str, Callable[[], Tensor]] = {}
        self.shapes: dict[str, torch.Size] = {}
        for name, parameter in module.named_parameters():
            if "lora_" in name or ".original_module." in name:
                continue
            layer, held, kind = name.rpartition(".base_layer.")
            plain = (f"{layer}.{kind}" if held else name).removeprefix("base_model.model.")
            plain = plain.replace(".modules_to_save.default.", ".")
            self.shapes[plain] = parameter.shape
            if held and kind == "weight":
                adapted = module.get_submodule(layer)
                for option in ("use_dora", "lora_bias", "lora_variant"):
                    if any((getattr(adapted, option, None) or {}).values()):
                        raise ConfigError(
                            f"{layer} has an adapter with {option}, which cannot be merged into the weight. Train "
                            "without it."
                        )
                self._read[plain] = lambda adapted=adapted, weight=parameter: _merged(adapted, weight)  # type: ignore[misc]
            else:
                self._read[plain] = parameter.detach

    def __getitem__(self, name: str) -> Tensor:
        return self._read[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._read)

    def __len__(self) -> int:
        return len(self._read)


def weights_of(source: Source | Iterable[tuple[str, Tensor]]) -> Mapping[str, Tensor]:
    """Return a source's tensors by checkpoint name; a tensor with two names (a tied head) is included once.

    Raises ConfigError for a source without weights.
    """
    if isinstance(source, LLMWrapperBase):
        source = source.model if isinstance(source.model, nn.Module) else source
    if isinstance(source, TensorDictBase):
        leaves = dict(source.flatten_keys(".").items())
        source = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, nn.Parameter)} or leaves  # no buffers
    found: Any = ModelWeights(source) if isinstance(source, nn.Module) else source
    if isinstance(found, Iterable) and not isinstance(found, Mapping | str):
        found = dict(found)
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(
            f"{type(source).__name__} has no weights: give a module with parameters, a wrapper over one "
            "(TransformersWrapper), or tensors by name."
        )
    if isinstance(found, ModelWeights):
        return found
    # A state_dict has tied tensors under all their names; engines have them under the first.
    names = list(found)[::-1]
    first = {(found[name].data_ptr(), found[name].shape, found[name].dtype): name for name in names}
    kept = set(first.values())
    return {name: tensor.detach() for name, tensor in found.items() if name in kept or not tensor.numel()}


def get_model_metadata(source: Source) -> dict[str, tuple[torch.dtype, torch.Size]]:
    """Return (dtype, shape) of every tensor that a sync of the source sends, by checkpoint name.

    A tied head is included once, and LoRA adapters belong to the tensors into which they are merged.
    """
    return {name: (tensor.dtype, tensor.shape) for name, tensor in weights_of(source).items()}


def check_metadata(weights: Mapping[str, Tensor], metadata: Metadata) -> None:
    """Raise ConfigError naming the first tensor that differs from the announced metadata."""
    sent = weights.shapes if isinstance(weights, ModelWeights) else {name: one.shape for name, one in weights.items()}
    expected = {name: shape for name, (_, shape) in metadata.items()}
    for name in expected | sent:
        has, wants = (f"shape {list(some[name])}" if name in some else "no such tensor" for some in (sent, expected))
        if has != wants:
            advice = "Take model_metadata from the same model."
            raise ConfigError(f"{name}: the policy has {has}, but model_metadata has {wants}. {advice}")


class WeightPusher(WeightSenderMixin):
    """Complete, verified syncs (weight_sync/sync.py) of tensors in this process to some engines.

    A failed sync leaves the engine partially loaded: it serves no requests until a sync succeeds.
    """

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        *,
        route: str = "in_process",
        address: tuple[str, int | None] = ("127.0.0.1", None),
        folder: str = "",
        wire_dtype: str = "float32",
        bucket_bytes: int = 1 << 28,
        timeout: float = 600.0,
    ):
        """Prepare syncs to `engines`.

        Args:
            engines: Engines that receive every sync.
            route: One of weight_sync's routes.
            address: Host and port of the group of route "broadcast"; a port of None means a free one.
            folder: Folder of route "checkpoint".
            wire_dtype: Data type of the sent tensors.
            bucket_bytes: Size of the buckets in which tensors are sent.
            timeout: Seconds for a sync.
        """
        self._engines, self._timeout, self._route, self._address = list(engines), timeout, route, address
        self._weights: Mapping[str, Tensor] = {}
        self.sender = WeightSender(
            lambda: iter(self._weights.items()), wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, rank=0
        )
        self._sync = WeightSync(self, lambda: self._engines, route=route, deadline_s=timeout, folder=folder)
        self._lock = threading.Lock()

    def push(self, weights: Mapping[str, Tensor], version: int | None = None) -> int:
        """Send the weights to all engines and return the version that they now serve.

        Args:
            weights: Tensors by checkpoint name.
            version: Version of the weights; None for the highest version of the engines + 1.

        Raises:
            WeightSyncError: Weights did not arrive intact. The message names the engine and the tensor.
            DeadlineExceeded: The sync took too long. The message names its phase.
        """

        async def sync() -> int:
            chosen = version
            if chosen is None:
                health = await asyncio.gather(*(engine.health() for engine in self._engines))
                chosen = max(one.version for one in health) + 1
            await self._sync.sync_all(chosen)
            return chosen

        with self._lock:
            self._weights = weights
            try:
                return call(sync(), "a sync of weights", self._timeout + 5.0)
            finally:
                self._weights = {}

    def close(self) -> None:
        """Leave the process group on both sides; otherwise an engine would keep listening for it."""
        self.disconnect_weights()
        if self._route == "broadcast":
            for engine in self._engines:
                with suppress(SkyRLError):  # an engine that is gone has left anyway
                    call(engine.connect_weights("in_process", "", 1, 2, _LEAVING_S), "leaving a group", _LEAVING_S)

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of this trainer's only rank, which the pusher itself is."""
        return [await asyncio.to_thread(getattr(self, method), *args)]

    def address(self, other_machines: bool = False) -> tuple[str, int]:
        """Return the address that the user gave, for local and remote peers alike."""
        host, port = self._address
        return free_address(host) if port is None else (host, port)


@torch.no_grad()
def _merged(layer: Any, weight: Tensor) -> Tensor:
    """W + s B A for the adapters that are active and not yet merged into W."""
    active = () if layer.disable_adapters else layer.active_adapters
    result = weight.detach()
    for adapter in active:
        if adapter in layer.scaling and adapter not in layer.merged_adapters:
            change = layer.get_delta_weight(adapter)
            result = result.to(change.dtype) + change
    return result
