"""TorchRL's vLLMUpdater: the policy's weights to the engine that samples, proven to have arrived.

Version 1 sends over a process group at an address (NCCL or gloo), to the engine of the collector's policy; version 2
is an EngineUpdater. A policy with LoRA adapters is sent merged and stays as it is. However many tensors and engines
there are, a push is one new version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from skyrl_train.engines.base import InferenceEngine
from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.collectors.weight_updaters import EngineUpdater, WeightUpdaterBase, next_version
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.tensordict.wrappers.engine_view import EngineView
from skyrl_train.tensordict.wrappers.weight_sync import Metadata, Source, WeightPusher, check_metadata, weights_of


class vLLMUpdaterV2(EngineUpdater):
    """An EngineUpdater that also takes wrappers and workers in place of their engines, and knows TorchRL's calls."""

    def __init__(self, vllm_engine: Any, *, dtype: str = "float32", timeout: float = 600.0):
        """`vllm_engine`: one or a list. `dtype` of what is sent; an engine casts it to its own. `timeout`: seconds for
        each engine's sync."""
        given = list(vllm_engine) if isinstance(vllm_engine, Sequence) else [vllm_engine]
        super().__init__([engine_of(one) for one in given], wire_dtype=dtype, timeout=timeout)

    def push_weights_from_transformers(self, transformers_model: Source) -> None:
        self.push_weights(transformers_model)

    def push_weights_from_transformers_optimized(self, transformers_model: Source, batch_size: int = 50) -> None:
        """The same: tensors always travel in buckets, and the version is theirs together."""
        self.push_weights(transformers_model)


class vLLMUpdater(WeightUpdaterBase):
    """vLLMUpdater(master_address, master_port, model_metadata, vllm_tp_size), or vLLMUpdater(v2=True, vllm_engine=...).

    The second is a vLLMUpdaterV2. Of the first, `register_collector` and `init` come before `push_weights`.
    """

    def __new__(cls, *args: Any, v2: bool = False, vllm_engine: Any = None, **options: Any) -> Any:
        """TypeError where arguments of both versions are mixed."""
        old = {"master_address", "master_port", "model_metadata", "vllm_tp_size"}
        if not v2:
            if vllm_engine is not None:
                raise TypeError("vllm_engine is an argument of vLLMUpdater(v2=True).")
            return super().__new__(cls)
        if args or old & set(options):
            raise TypeError(f"vLLMUpdater(v2=True) takes vllm_engine, none of {sorted(old)}.")
        if vllm_engine is None:
            raise TypeError("vLLMUpdater(v2=True) needs vllm_engine.")
        return vLLMUpdaterV2(vllm_engine, **options)

    def __init__(
        self,
        master_address: str | None = None,
        master_port: int | None = None,
        model_metadata: Metadata | None = None,
        vllm_tp_size: int | None = None,
        v2: bool = False,
        vllm_engine: Any = None,
        *,
        dtype: str = "float32",
        timeout: float = 600.0,
    ):
        """The group meets at `master_address` (localhost), where the policy is, and a free port unless one is given.

        `model_metadata`: name -> (dtype, shape) of what is sent (get_model_metadata of workers and servers); names and
        shapes are checked. `vllm_tp_size`: ranks of the engine, checked where given.
        """
        super().__init__()
        self.master_address, self.master_port = master_address or "localhost", master_port
        self.model_metadata, self.vllm_tp_size = model_metadata, vllm_tp_size
        self.dtype, self.timeout = dtype, timeout
        self._pusher: WeightPusher | None = None

    def init(self, model_metadata: Metadata | None = None) -> None:
        """Get ready to send to the engine of the collector's policy.

        RuntimeError without a collector or metadata, ConfigError where the engine has other ranks than said.
        """
        self.model_metadata = model_metadata or self.model_metadata
        if self.collector is None or self.model_metadata is None:
            missing = "a collector (register_collector)" if self.collector is None else "model_metadata"
            raise RuntimeError(f"vLLMUpdater.init needs {missing} first.")
        engine = engine_of(self.collector.get_policy_model())
        ranks = engine.capabilities.weight_ranks
        if self.vllm_tp_size not in (None, ranks):
            raise ConfigError(f"vllm_tp_size={self.vllm_tp_size}, but {engine.capabilities.name!r} has {ranks} ranks.")
        self.close_group()
        address = (self.master_address, self.master_port)
        self._pusher = WeightPusher(
            [engine], route="broadcast", address=address, wire_dtype=self.dtype, timeout=self.timeout
        )

    def close_group(self) -> None:
        pusher, self._pusher = self._pusher, None
        if pusher is not None:
            pusher.close()

    def close(self) -> None:
        super().close()
        self.close_group()

    def _maybe_map_weights(self, server_weights: Source) -> Mapping[str, Tensor]:
        if self._pusher is None or self.model_metadata is None:
            raise RuntimeError("vLLMUpdater has no process group yet: call init(model_metadata) before push_weights.")
        weights = weights_of(server_weights)
        check_metadata(weights, self.model_metadata)
        return weights

    def _sync_weights_with_worker(self, *, worker_id: Any = None, server_weights: Mapping[str, Tensor]) -> None:
        assert self._pusher is not None
        self._pusher.push(server_weights, next_version(self.collector))


def engine_of(model: Any) -> InferenceEngine:
    """What samples for a wrapper, a worker or a server; ConfigError for what has no engine."""
    found = model.engine if isinstance(model, LLMWrapperBase | EngineView) else model
    if not hasattr(found, "capabilities") or not hasattr(found, "begin_weights"):
        raise ConfigError(f"{type(model).__name__} has no inference engine to send weights to.")
    return found  # type: ignore[no-any-return]
