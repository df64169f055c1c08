"""From the weights that are trained to the policy that samples."""

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
    """Brings weights to workers: whatever samples, each known by an id. Subclasses say how one worker gets them.

    With a collector registered no turn is sampled while weights change, and a push that reached any worker, also one
    that failed at a later one, is a new version of its policy: no weights sample under a number that others had.
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

    def push_weights(self, policy_or_weights: Source | None = None, worker_ids: Any = None) -> None:
        """Give weights (those of `_get_server_weights` by default) to all workers, or to some of them."""
        given = self._get_server_weights() if policy_or_weights is None else policy_or_weights
        weights = self._maybe_map_weights(given)
        everybody = self.all_worker_ids()
        chosen = everybody if worker_ids is None else worker_ids
        chosen = list(chosen) if isinstance(chosen, Sequence) and not isinstance(chosen, str) else [chosen]
        if everybody is not None and (unknown := [one for one in chosen if one not in everybody]):
            raise ConfigError(f"worker_ids={unknown} are not among {list(everybody)}.")
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

    Engines serve the collector's version numbers where those count, else the one after their own. A push raises
    WeightSyncError naming engine and tensor, DeadlineExceeded naming the phase: that engine is torn then, and serves
    nothing until the next one.
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
            raise ConfigError("EngineUpdater was made without source=: give a model or its tensors to push.")
        return self.source

    def _maybe_map_weights(self, server_weights: Source) -> Mapping[str, Tensor]:
        return weights_of(server_weights)

    def _sync_weights_with_worker(self, *, worker_id: int, server_weights: Mapping[str, Tensor]) -> None:
        self._pushers[worker_id].push(server_weights, next_version(self.collector))


def next_version(collector: Any) -> int | None:
    """The number that a collector's policy has after a push; None where it does not count them."""
    live = None if collector is None else collector.policy_version
    return live + 1 if isinstance(live, int) else None
