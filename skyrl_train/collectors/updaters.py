"""From the weights that are trained to the policy that samples."""

from __future__ import annotations

import asyncio
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

from skyrl_train.engines.base import InferenceEngine
from skyrl_train.errors import ConfigError
from skyrl_train.policies.loop import call
from skyrl_train.policies.wrapper import LLMWrapperBase
from skyrl_train.weight_sync.publish import WeightPublisher
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train.weight_sync.wire import Bucket, Manifest

Weights = nn.Module | LLMWrapperBase | TensorDictBase | Mapping[str, Tensor]
"""A model, a wrapper over one that scores, or tensors by Hugging Face name; a nested tensordict's keys are joined by
dots."""


class WeightUpdaterBase(ABC):
    """Brings weights to workers: whatever samples, each known by an id. Subclasses say how one worker gets them.

    With a collector registered no turn is sampled while weights change, and a push that reached all workers is a new
    version of its policy: a turn was sampled wholly by the weights whose version it carries.
    """

    def __init__(self) -> None:
        self.post_hooks: list[Callable[[], Any]] = []
        self._collector: weakref.ref[Any] | None = None

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """One that fits the policy; None where there is none."""
        engine = policy.engine if isinstance(policy, LLMWrapperBase) and policy.generate else None
        takes = engine is not None and "in_process" in engine.capabilities.weight_routes
        return EngineUpdater(engine) if engine is not None and takes else None

    def init(self, model_metadata: Any = None) -> None:  # noqa: B027 - there may be nothing to open
        """Open what is needed once the workers are there; `model_metadata` is what a subclass wants to know."""

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Called after every push."""
        self.post_hooks.append(hook)

    def register_collector(self, collector: Any) -> None:
        """Called by the collector whose policy is updated. ConfigError where there is another one."""
        known = self.collector
        if known is not None and known is not collector:
            raise ConfigError(f"{type(self).__name__} serves a collector already; make another one.")
        self._collector = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        return self._collector() if self._collector is not None else None

    def push_weights(self, policy_or_weights: Weights | None = None, worker_ids: Any = None) -> None:
        """Give weights (those of `_get_server_weights` by default) to all workers, or to some of them."""
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(given)
        everybody = self.all_worker_ids()
        chosen = everybody if worker_ids is None else worker_ids
        chosen = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str) else [chosen]
        if everybody is not None and (unknown := [one for one in chosen if one not in everybody]):
            raise ConfigError(f"worker_ids={unknown} are not among {list(everybody)}.")
        with self._no_sampling():
            for worker in chosen:
                self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
            if self.collector is not None and (everybody is None or set(everybody) <= set(chosen)):
                self.collector.increment_version()
        for hook in self.post_hooks:
            hook()

    __call__ = push_weights

    def all_worker_ids(self) -> Sequence[Any] | None:
        """None: there is one, and it has no id."""
        return None

    def close(self) -> None:
        """Leave what `init` opened."""
        self.post_hooks.clear()

    def _get_server_weights(self) -> Any:
        """The weights to push when none are given."""
        raise ConfigError(f"{type(self).__name__} knows no weights by itself: give a model or its tensors.")

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """What the workers need, of what was given."""
        return server_weights

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        """One worker has them when this returns."""

    def _no_sampling(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.collector is None else self.collector.no_sampling()


class EngineUpdater(WeightUpdaterBase):
    """To engines, each by a whole, proven sync (weight_sync/publish.py); an engine's id is its place in the list.

    Engines serve the collector's version numbers where those count, else the number of the push. A sync that fails
    leaves its engine torn: it serves nothing until the next one.
    """

    def __init__(
        self,
        engines: InferenceEngine | Sequence[InferenceEngine],
        *,
        source: Weights | None = None,
        route: str = "in_process",
        folder: str = "",
        wire_dtype: str = "float32",
        bucket_bytes: int = 1 << 28,
        timeout: float = 600.0,
    ):
        """source: what a push without weights sends, as it is then. route: `in_process` for engines of this process,
        `checkpoint` for others that see the same `folder`. timeout: seconds for one engine's sync."""
        super().__init__()
        if route not in ("in_process", "checkpoint"):
            raise ConfigError(f"route={route!r} is not one of ['checkpoint', 'in_process'].")
        if route == "checkpoint" and not folder:
            raise ConfigError("route='checkpoint' needs folder=, a folder that the engines see under the same path.")
        self.engines: list[InferenceEngine] = list(engines) if isinstance(engines, Sequence) else [engines]
        for engine in self.engines:
            if route not in engine.capabilities.weight_routes:
                allowed = sorted(engine.capabilities.weight_routes)
                raise ConfigError(
                    f"engine {engine.capabilities.name!r} has no weight route {route!r}; it has {allowed}."
                )
        self.source, self.timeout = source, timeout
        self._sender = _Sender(wire_dtype, bucket_bytes)
        self._publisher = WeightPublisher(
            self._sender, lambda: self.engines, route=route, deadline_s=timeout, folder=folder
        )
        self._pushes = 0

    def all_worker_ids(self) -> Sequence[int]:
        return range(len(self.engines))

    def push_weights(self, policy_or_weights: Weights | None = None, worker_ids: Any = None) -> None:
        """See WeightUpdaterBase. Raises WeightSyncError naming engine and tensor, DeadlineExceeded naming the phase."""
        self._pushes += 1
        super().push_weights(policy_or_weights, worker_ids)

    __call__ = push_weights

    def close(self) -> None:
        self._sender.disconnect_weights()

    def _get_server_weights(self) -> Weights:
        if self.source is None:
            raise ConfigError("EngineUpdater was made without source=: give a model or its tensors to push.")
        return self.source

    def _maybe_map_weights(self, server_weights: Weights) -> Mapping[str, Tensor]:
        return weights_of(server_weights)

    def _sync_weights_with_worker(self, *, worker_id: int, server_weights: Mapping[str, Tensor]) -> None:
        engine = self.engines[worker_id]
        self._sender.weights = server_weights
        try:
            # A connection of its own each time: a push that failed, or went to some workers, may come again.
            publishing = self._publisher.publish_to(engine, self._version())
            call(publishing, f"weights to engine {engine.capabilities.name!r}", self.timeout + 5.0)
        finally:
            self._sender.weights = {}

    def _version(self) -> int:
        live = None if self.collector is None else self.collector.policy_version
        return live + 1 if isinstance(live, int) else self._pushes


def weights_of(source: Weights) -> dict[str, Tensor]:
    """Tensors by name. ConfigError for what has none."""
    if isinstance(source, LLMWrapperBase):
        source = getattr(source, "network", source)
    if isinstance(source, TensorDictBase):
        leaves = dict(source.flatten_keys(".").items())
        source = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, nn.Parameter)} or leaves  # no buffers
    found = dict(source.named_parameters()) if isinstance(source, nn.Module) else source
    if not isinstance(found, Mapping) or not found:
        raise ConfigError(
            f"weights of {type(source).__name__}: give a module with parameters, a wrapper over one "
            "(TransformersWrapper(module, generate=False)), or tensors by name."
        )
    tensors = {name: tensor.detach() for name, tensor in found.items()}
    # A state_dict has tied tensors under all their names; engines know them under the first.
    first = {(tensor.data_ptr(), tensor.shape, tensor.dtype): name for name, tensor in reversed(tensors.items())}
    kept = set(first.values())
    return {name: tensor for name, tensor in tensors.items() if name in kept or not tensor.numel()}


class _Sender:
    """The trainer's side of a sync, for tensors that are whole and in this process: a `publish.TrainerRanks` of one."""

    def __init__(self, wire_dtype: str, bucket_bytes: int):
        self.weights: Mapping[str, Tensor] = {}
        self._sender = WeightSender(self._parameters, wire_dtype=wire_dtype, bucket_bytes=bucket_bytes, rank=0)

    def _parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.weights.items()

    async def all(self, method: str, *args: Any) -> list[Any]:
        return [await asyncio.to_thread(getattr(self, method), *args)]

    def connect_weights(self, route: str, address: str, world_size: int, timeout_s: float, apart: bool = False) -> None:
        self._sender.connect(route, address, world_size, timeout_s, apart)

    def manifest(self, version: int, rehearsal: bool = False) -> Manifest:
        return self._sender.manifest(version, rehearsal)

    def send_weights(self, index: int) -> Bucket | None:
        return self._sender.send(index)

    def weights_delivered(self, version: int) -> None:
        self._sender.delivered(version)

    def disconnect_weights(self) -> None:
        self._sender.disconnect()
