"""The common interface of TorchRL's engine classes: synchronous calls that inspect and update the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Self

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from skyrl_train.engines.base import InferenceEngine
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import load_causal_lm, load_meta_model
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.stateless_group import StatelessGroup, stateless_init_process_group
from skyrl_train.tensordict.wrappers.weight_sync import Source, WeightPusher, weights_of
from skyrl_train.weight_sync.protocol import dtype_of


class EngineView:
    """An engine with synchronous calls. Wrappers accept it in place of the engine; close it when they are done.

    However weights arrive, the engine gets them complete, checked and verified (weight_sync): a tensor that is missing,
    altered or of another shape is rejected by name.
    """

    def __init__(
        self,
        engine: InferenceEngine,
        model: str,
        *,
        dtype: str = "float32",
        timeout: float = 600.0,
        closing: Callable[[], None] | None = None,
    ):
        """View an engine.

        Args:
            engine: The engine, which `close` closes.
            model: Path or hub name of the engine's model.
            dtype: Data type in which weights are sent.
            timeout: Seconds for a weight sync.
            closing: Called after the engine is closed, to free its resources.
        """
        self._engine: InferenceEngine | None = engine
        self.model_path, self.dtype, self.timeout = model, dtype, timeout
        self._closing = closing
        self._pusher: WeightPusher | None = None
        self._group: StatelessGroup | None = None
        self._synced = False

    @property
    def engine(self) -> InferenceEngine:
        """The engine. Raises RuntimeError before it is started and after `close`."""
        if self._engine is None:
            raise RuntimeError(
                f"{type(self).__name__} of {self.model_path!r} has no engine: it was not started, or it was closed. "
                "Make a new one."
            )
        return self._engine

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return (dtype, shape) of every tensor that a sync sends, by checkpoint name; a tied head is not listed."""
        dtype = dtype_of(self.dtype)
        return {
            name: (one.dtype, one.shape) for name, one in load_meta_model(self.model_path, dtype).named_parameters()
        }

    def update_weights(self, weights: Source | Iterable[tuple[str, Tensor]], version: int | None = None) -> int:
        """Load a model's weights (merging LoRA), or tensors by name; return the version that is now served.

        Raises WeightSyncError naming the tensor, ConfigError for a source without weights.
        """
        known = isinstance(weights, nn.Module | LLMWrapperBase | TensorDictBase | Mapping)
        found: Any = weights if known or not isinstance(weights, Iterable) else dict(weights)
        if self._pusher is None:
            self._pusher = WeightPusher([self.engine], wire_dtype=self.dtype, timeout=self.timeout)
        served = self._pusher.push(weights_of(found), version)
        self._synced = True
        return served

    def update_weights_from_tensor(self, named_tensors: Source | Iterable[tuple[str, Tensor]]) -> int:
        """Load tensors by name, as `update_weights` does; this is SGLang's name for it.

        Returns:
            The version that the engine now serves.

        Raises:
            WeightSyncError: A tensor is missing, unknown or of another shape. The message names it.
            ConfigError: The source has no weights.
        """
        return self.update_weights(named_tensors)

    def update_weights_from_disk(self, model_path: str) -> int:
        """Load the weights in a Hugging Face folder of the same model, and return the version that is now served.

        Raises:
            ConfigError: The model in the folder cannot be loaded.
            WeightSyncError: It does not fit the engine's model.
        """
        return self.update_weights(load_causal_lm(model_path, dtype=dtype_of(self.dtype), key="model_path"))

    # -- from a process group ---------------------------------------------------------------------------------------

    def init_weight_update_group(
        self,
        master_address: str,
        master_port: int | str,
        rank_offset: int = 1,
        world_size: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        """Join the trainer's group (`stateless_init_process_group`), whose rank 0 has the weights.

        Blocks until all have joined.

        The whole engine is one member, however many accelerators it uses. A group that was joined before is left first.

        Args:
            master_address: Host of rank 0.
            master_port: Port of rank 0.
            rank_offset: Rank of this engine in the group.
            world_size: Number of members of the group.
            device: Device on which tensors are received; None for the first accelerator, or the CPU.

        Raises:
            ConfigError: The rank is not valid.
            WeightSyncError: The group did not form in time.
        """
        self.destroy_weight_update_group()
        self._group = stateless_init_process_group(
            master_address, master_port, rank_offset, world_size, device, self.timeout
        )

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[torch.dtype | str],
        shapes: Sequence[Sequence[int]],
        version: int | None = None,
    ) -> int:
        """Receive tensors from rank 0 of the group, one broadcast each, load them, and return the version that is now
        served.

        Args:
            names: Checkpoint names of the tensors, in the order in which rank 0 sends them.
            dtypes: Data types of the tensors, in the same order.
            shapes: Shapes of the tensors, in the same order.
            version: Version of the weights; None for the engine's last one + 1.

        Raises:
            ConfigError: The lists differ in length.
            RuntimeError: No group is joined.
            WeightSyncError: A transfer failed, or the tensors do not fit the model.
        """
        if isinstance(names, str) or not len(names) == len(dtypes) == len(shapes):
            raise ConfigError(
                "names, dtypes and shapes must be lists of the same length, with one entry for each tensor."
            )
        received = {name: self._received(d, s) for name, d, s in zip(names, dtypes, shapes, strict=True)}
        return self.update_weights(received, version)

    def destroy_weight_update_group(self) -> None:
        """Leave the trainer's group; does nothing if none was joined."""
        group, self._group = self._group, None
        if group is not None:
            group.close()

    def _received(self, dtype: torch.dtype | str, shape: Sequence[int]) -> Tensor:
        if self._group is None:
            raise RuntimeError("No process group is joined. Call init_weight_update_group first.")
        kind = dtype if isinstance(dtype, torch.dtype) else dtype_of(str(dtype).removeprefix("torch."))
        return self._group.broadcast(torch.empty(tuple(shape), dtype=kind, device=self._group.device))

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the engine. Safe to call twice."""
        self.destroy_weight_update_group()
        pusher, self._pusher = self._pusher, None
        if pusher is not None:
            pusher.close()
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            call(engine.close(), "closing an engine", 60.0)
        finally:
            if self._closing is not None:
                self._closing()

    shutdown = close

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
