"""Updaters that send trained weights to the policy that samples."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from skyrl_train.engines.base import InferenceEngine
from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.tensordict.wrappers.weight_sync import Source, WeightPusher, weights_of


class WeightUpdaterBase(ABC):
    """An updater of the workers that sample, each identified by an id. Subclasses send the weights to one worker.

    With a registered collector, no turn is sampled while weights change. A push that reached any worker, even if it
    then failed at a later one, is a new version of the policy, so that different weights never have the same number.
    """

    def __init__(self) -> None:
        self.post_hooks: list[Callable[[], Any]] = []
        self._collector: weakref.ref[Any] | None = None

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Return an EngineUpdater if the policy is a wrapper that samples from an engine in this process, else None."""
        engine = policy.engine if isinstance(policy, LLMWrapperBase) and policy.generate else None
        takes = engine is not None and "in_process" in engine.capabilities.weight_routes
        return EngineUpdater(engine) if engine is not None and takes else None

    def init(self, model_metadata: Any = None) -> None:  # noqa: B027 - there may be nothing to open
        """Open connections once the workers are running; the meaning of `model_metadata` is up to the subclass."""

    def register_post_hook(self, hook: Callable[[], Any]) -> None:
        """Register a function that is called after every successful push."""
        self.post_hooks.append(hook)

    def register_collector(self, collector: Any) -> None:
        """Register the collector whose policy is updated, by a weak reference.

        Raises ConfigError if another one is registered.
        """
        known = self.collector
        if known is not None and known is not collector:
            raise ConfigError(f"{type(self).__name__} already serves a collector. Make another one.")
        self._collector = weakref.ref(collector)

    @property
    def collector(self) -> Any:
        """The registered collector, or None if there is none or it no longer exists."""
        return self._collector() if self._collector is not None else None

    def push_weights(self, policy_or_weights: Source | None = None, worker_ids: Any = None) -> None:
        """Send weights to all workers, or to those in `worker_ids`; blocks until they have arrived.

        By default, the updater's own source is sent. If a worker was reached, the collector's version is incremented,
        even if the push then fails. Raises ConfigError for unknown ids or without weights.
        """
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(given)
        known_ids = self.all_worker_ids()
        chosen = known_ids if worker_ids is None else worker_ids
        chosen = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str) else [chosen]
        if known_ids is not None and (unknown := [one for one in chosen if one not in known_ids]):
            raise ConfigError(f"worker_ids={unknown} are unknown; the workers are {list(known_ids)}.")
        with self._no_sampling():
            reached = False
            try:
                for worker in chosen:
                    self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
                    reached = True
            finally:
                if reached and self.collector is not None:
                    self.collector.increment_version()
        for hook in self.post_hooks:
            hook()

    __call__ = push_weights

    def all_worker_ids(self) -> Sequence[Any] | None:
        """Return the ids of all workers, or None if there is a single one without an id."""
        return None

    def close(self) -> None:
        """Close the connections that `init` opened, and forget the hooks."""
        self.post_hooks.clear()

    def _get_server_weights(self) -> Any:
        """Return the weights to push if none are given."""
        raise ConfigError(f"{type(self).__name__} has no source of weights. Give push_weights a model or its tensors.")

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """Convert the given weights to those that the workers need."""
        return server_weights

    @abstractmethod
    def _sync_weights_with_worker(self, *, worker_id: Any, server_weights: Any) -> None:
        """Send the weights to one worker; block until they have arrived."""

    def _no_sampling(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.collector is None else self.collector.no_sampling()


class EngineUpdater(WeightUpdaterBase):
    """An updater of engines, each by a complete, verified sync (weight_sync/sync.py). An id is an engine's index.

    Engines serve the collector's version numbers if it counts them, else their own incremented by one. A push raises
    WeightSyncError naming engine and tensor, or DeadlineExceeded naming the phase: that engine is then partially
    loaded, and serves no requests until a push succeeds.
    """

    def __init__(
        self,
        engines: InferenceEngine | Sequence[InferenceEngine],
        *,
        source: Source | None = None,
        route: str = "in_process",
        folder: str = "",
        wire_dtype: str = "float32",
        bucket_bytes: int = 1 << 28,
        timeout: float = 600.0,
    ):
        """Prepare syncs.

        Args:
            engines: One engine or several.
            source: Source whose current weights are sent by a push without weights.
            route: "in_process" for engines of this process, "checkpoint" for others with access to the same `folder`.
            folder: Folder of route "checkpoint".
            wire_dtype: Data type of the sent tensors.
            bucket_bytes: Size of the buckets in which tensors are sent.
            timeout: Seconds for one engine's sync.

        Raises:
            ConfigError: For an unknown route, one that an engine does not have, or a missing folder.
        """
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
        self.source = source
        options: dict[str, Any] = {"folder": folder, "wire_dtype": wire_dtype, "timeout": timeout}
        self._pushers = [
            WeightPusher([engine], route=route, bucket_bytes=bucket_bytes, **options) for engine in self.engines
        ]

    def all_worker_ids(self) -> Sequence[int]:
        return range(len(self.engines))

    def close(self) -> None:
        super().close()
        for pusher in self._pushers:
            pusher.close()

    def _get_server_weights(self) -> Source:
        if self.source is None:
            raise ConfigError("EngineUpdater has no source=. Give push_weights a model or its tensors.")
        return self.source

    def _maybe_map_weights(self, server_weights: Source) -> Mapping[str, Tensor]:
        return weights_of(server_weights)

    def _sync_weights_with_worker(self, *, worker_id: int, server_weights: Mapping[str, Tensor]) -> None:
        self._pushers[worker_id].push(server_weights, next_version(self.collector))


def next_version(collector: Any) -> int | None:
    """Return the version number of a collector's policy after a push, or None if it does not count versions."""
    live = None if collector is None else collector.policy_version
    return live + 1 if isinstance(live, int) else None
