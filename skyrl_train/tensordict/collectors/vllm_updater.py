"""TorchRL's vLLMUpdater, which sends the policy's weights to the engine that samples, and verifies their arrival.

Version 1 sends over a process group at an address (NCCL or gloo), to the engine of the collector's policy; version 2
is an EngineUpdater. LoRA adapters are merged in what is sent, without changing the policy. A push is one new version.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.collectors.weight_updaters import EngineUpdater, engines_of
from skyrl_train.tensordict.wrappers.weight_sync import (
    Metadata,
    Source,
    WeightPusher,
    check_metadata,
    get_model_metadata,
    weights_of,
)


class vLLMUpdaterV2(EngineUpdater):
    """An EngineUpdater that also accepts wrappers and workers in place of their engines, and has TorchRL's methods."""

    def __init__(self, vllm_engine: Any, *, dtype: str = "float32", timeout: float = 600.0):
        """Prepare syncs.

        Args:
            vllm_engine: An engine, wrapper or worker, or a list of them.
            dtype: Data type of the sent tensors; an engine casts them to its own.
            timeout: Seconds for each engine's sync.

        Raises:
            ConfigError: If one of them has no engine, or it cannot receive weights in this process.
        """
        given = list(vllm_engine) if isinstance(vllm_engine, Sequence) else [vllm_engine]
        super().__init__([engine for one in given for engine in engines_of(one)], wire_dtype=dtype, timeout=timeout)
        self.vllm_engine = vllm_engine
        self.vllm_tp_size = self.engines[0].capabilities.weight_ranks
        self.model_metadata: Metadata = given[0].get_model_metadata() if hasattr(given[0], "get_model_metadata") else {}
        """Name -> (dtype, shape) of the engine's tensors, if it knows them. A push does not need it."""

    get_model_metadata = staticmethod(get_model_metadata)

    def get_tp_size(self) -> int:
        """Return the number of ranks of an engine."""
        return self.vllm_tp_size

    def init(self, model_metadata: Metadata | None = None) -> None:
        """Set `model_metadata`, if it is given; there is no connection to open."""
        self.model_metadata = model_metadata or self.model_metadata

    def push_weights_from_transformers(self, transformers_model: Source) -> None:
        """Push the weights of a transformers model, as `push_weights` does; this is TorchRL's name for it."""
        self.push_weights(transformers_model)

    def push_weights_from_transformers_optimized(self, transformers_model: Source, batch_size: int = 50) -> None:
        """Do the same; tensors are always sent in buckets, as one version."""
        self.push_weights(transformers_model)


class vLLMUpdater(EngineUpdater):
    """An updater that sends the policy's weights over a process group: register a collector and call `init` first.

    vLLMUpdater(v2=True, vllm_engine=...) makes a vLLMUpdaterV2 instead.
    """

    get_model_metadata = staticmethod(get_model_metadata)

    def __new__(cls, *args: Any, v2: bool = False, vllm_engine: Any = None, **options: Any) -> Any:
        """Create an updater of version 1 or 2. Raises TypeError if arguments of both versions are mixed."""
        old = {"master_address", "master_port", "model_metadata", "vllm_tp_size"}
        if v2 and (vllm_engine is None or args or old & set(options)):
            raise TypeError(f"vLLMUpdater(v2=True) needs vllm_engine, and takes none of {sorted(old)}.")
        if vllm_engine is not None and not v2:
            raise TypeError("vllm_engine needs v2=True: vLLMUpdater(v2=True, vllm_engine=...).")
        return vLLMUpdaterV2(vllm_engine, **options) if v2 else super().__new__(cls)

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
        """Store the settings; `init` opens the group.

        Args:
            master_address: The policy's host; localhost by default.
            master_port: Port of the group; a free one by default.
            model_metadata: Name -> (dtype, shape) of the sent tensors (get_model_metadata of workers and servers).
                Names and shapes are checked.
            vllm_tp_size: Number of ranks of the engine, checked if given.
            v2: False; True makes a vLLMUpdaterV2 instead.
            vllm_engine: Only with v2=True.
            dtype: Data type of the sent tensors.
            timeout: Seconds for a sync.
        """
        self.master_address, self.master_port = master_address or "localhost", master_port
        self.model_metadata, self.vllm_tp_size = model_metadata, vllm_tp_size
        self.dtype, self.timeout = dtype, timeout
        self.engines, self._pushers = [], []

    def init(self, model_metadata: Metadata | None = None) -> None:
        """Prepare to send to the engine of the collector's policy.

        Raises RuntimeError without a collector or metadata, ConfigError if the engine has another number of ranks.
        """
        self.model_metadata = model_metadata or self.model_metadata
        if self.collector is None or self.model_metadata is None:
            missing = "a collector (register_collector)" if self.collector is None else "model_metadata"
            raise RuntimeError(f"vLLMUpdater.init needs {missing} first.")
        self.engines = engines_of(self.collector.policy)
        has = self.engines[0].capabilities
        if self.vllm_tp_size not in (None, has.weight_ranks):
            raise ConfigError(f"vllm_tp_size={self.vllm_tp_size}, but {has.name!r} has {has.weight_ranks} ranks.")
        self.close_group()
        options: dict[str, Any] = {"wire_dtype": self.dtype, "timeout": self.timeout}
        address = (self.master_address, self.master_port)
        self._pushers = [WeightPusher(self.engines, route="broadcast", address=address, **options)]

    def maybe_init_group(self) -> None:
        """Do what `init` does, unless it has been done; this is TorchRL's name for it."""
        if not self._pushers:
            self.init()

    def close_group(self) -> None:
        """Leave the process group, on this side and the engine's; does nothing before `init`."""
        while self._pushers:
            self._pushers.pop().close()

    def close(self) -> None:
        self.close_group()
        super().close()

    def _maybe_map_weights(self, server_weights: Source) -> Mapping[str, Tensor]:
        if not self._pushers or self.model_metadata is None:
            raise RuntimeError("vLLMUpdater has no process group yet: call init(model_metadata) before push_weights.")
        weights = weights_of(server_weights)
        check_metadata(weights, self.model_metadata)
        return weights
