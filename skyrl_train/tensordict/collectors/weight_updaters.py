"""Updaters that send trained weights to the policy that samples."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from torch import Tensor
from torchrl.collectors import WeightUpdaterBase as TorchRLUpdater

from skyrl_train.engines.base import InferenceEngine
from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.tensordict.wrappers.weight_sync import Source, WeightPusher, weights_of

with warnings.catch_warnings():  # TorchRL calls its own base class deprecated, but its collectors still need it
    warnings.simplefilter("ignore", DeprecationWarning)

    class _Updater(TorchRLUpdater):  # type: ignore[misc]
        def __init_subclass__(cls, **options: Any) -> None:
            super(TorchRLUpdater, cls).__init_subclass__(**options)


class WeightUpdaterBase(_Updater):
    """An updater of the workers that sample, each identified by an id. Subclasses send the weights to one worker.

    With registered collectors, no turn is sampled while weights change. A push that reached any worker, even if it
    then failed at a later one, is a new version of the policy, so that different weights never have the same number.
    """

    source: Source | None = None
    """Source whose current weights are sent by a push without weights."""

    @classmethod
    def from_policy(cls, policy: Any) -> WeightUpdaterBase | None:
        """Return an EngineUpdater if the policy is a wrapper that samples from an engine in this process, else None."""
        engines = find_engines(policy) if isinstance(policy, LLMWrapperBase) and policy.generate else []
        takes = all("in_process" in engine.capabilities.weight_routes for engine in engines)
        return EngineUpdater(engines) if engines and takes else None

    @staticmethod
    def made(given: Any, policy: Any) -> Any:
        """Return the updater of a collector: `given`, what it makes (of the policy), or what suits the policy."""
        if given is None:
            return WeightUpdaterBase.from_policy(policy)
        if isinstance(given, TorchRLUpdater):
            return given
        return given(policy) if inspect.signature(given).parameters else given()

    def push_weights(self, policy_or_weights: Source | None = None, worker_ids: Any = None) -> None:
        """Send weights to all workers, or to those in `worker_ids`; blocks until they have arrived.

        By default, the updater's own source is sent. Raises ConfigError for unknown ids or without weights.
        """
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(given)
        known_ids = self.all_worker_ids()
        chosen = known_ids if worker_ids is None else worker_ids
        chosen = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str) else [chosen]
        if known_ids is not None and (unknown := [one for one in chosen if one not in known_ids]):
            raise ConfigError(f"worker_ids={unknown} are unknown; the workers are {list(known_ids)}.")
        collectors = [one for one in self.collectors or () if one is not None]
        with ExitStack() as paused:
            for collector in collectors:
                if hasattr(collector, "no_sampling"):
                    paused.enter_context(collector.no_sampling())
            reached = False
            try:
                for worker in chosen:
                    self._sync_weights_with_worker(worker_id=worker, server_weights=weights)
                    reached = True
            finally:
                for collector in collectors if reached else ():
                    collector.increment_version()
        for hook in self.post_hooks:
            hook()

    def close(self) -> None:
        """Close the connections that `init` opened, and forget the hooks."""
        self.post_hooks.clear()

    def next_version(self) -> int | None:
        """Return the version of the policy after a push, or None if no collector counts versions."""
        live = [getattr(one, "policy_version", None) for one in self.collectors or ()]
        numbers = [one for one in live if isinstance(one, int)]
        return max(numbers) + 1 if numbers else None

    def _get_server_weights(self) -> Any:
        """Return the weights to push if none are given."""
        if self.source is None:
            raise ConfigError(f"{type(self).__name__} has no source=. Give push_weights a model or its tensors.")
        return self.source

    def _maybe_map_weights(self, server_weights: Any) -> Any:
        """Convert the given weights to those that the workers need."""
        return server_weights

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_collector_wrs": None}


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
        if route not in ("in_process", "checkpoint"):
            raise ConfigError(f"route={route!r} is not one of ['checkpoint', 'in_process'].")
        if route == "checkpoint" and not folder:
            raise ConfigError("route='checkpoint' needs folder=, a folder that the engines see under the same path.")
        self.source, self.engines = source, list(engines) if isinstance(engines, Sequence) else [engines]
        for engine in self.engines:
            if route not in engine.capabilities.weight_routes:
                allowed = sorted(engine.capabilities.weight_routes)
                raise ConfigError(
                    f"engine {engine.capabilities.name!r} has no weight route {route!r}; it has {allowed}."
                )
        options: dict[str, Any] = {"folder": folder, "wire_dtype": wire_dtype, "timeout": timeout}
        options |= {"route": route, "bucket_bytes": bucket_bytes}
        self._pushers = [WeightPusher([engine], **options) for engine in self.engines]

    def all_worker_ids(self) -> Sequence[int]:
        """Return the indices of the engines."""
        return range(len(self._pushers))

    def close(self) -> None:
        super().close()
        for pusher in self._pushers:
            pusher.close()

    def _maybe_map_weights(self, server_weights: Source) -> Mapping[str, Tensor]:
        return weights_of(server_weights)

    def _sync_weights_with_worker(self, *, worker_id: int, server_weights: Mapping[str, Tensor]) -> None:
        self._pushers[worker_id].push(server_weights, self.next_version())


def find_engines(model: Any) -> list[InferenceEngine]:
    """Return the engines of a wrapper, worker or server, or `model` if it is one; an empty list for others."""
    held = (getattr(holder, "engines", None) for holder in (getattr(model, "model", None), model))
    found = next(filter(None, held), [getattr(model, "engine", model)])  # a wrapper's model may have several
    return list(found) if all(hasattr(one, "begin_weights") for one in found) else []


def engines_of(model: Any) -> list[InferenceEngine]:
    """Return what `find_engines` does. Raises ConfigError if there is none."""
    if engines := find_engines(model):
        return engines
    raise ConfigError(
        f"{type(model).__name__} has no inference engine to send weights to. Use a model that samples with an "
        "engine, such as vLLMWrapper."
    )
