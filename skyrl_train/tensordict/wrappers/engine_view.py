"""The common interface of TorchRL's engine classes: synchronous calls that inspect and update the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from skyrl_train.cluster.addresses import free_address
from skyrl_train.data.chat import encode_prompt
from skyrl_train.engines.base import Completion, InferenceEngine, SampleRequest
from skyrl_train.engines.sampling_params import check_supported
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import load_causal_lm, load_meta_model, load_tokenizer
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.outputs import decoded
from skyrl_train.tensordict.wrappers.parameters import Generation
from skyrl_train.tensordict.wrappers.requests import sample_requests
from skyrl_train.tensordict.wrappers.stateless_group import StatelessGroup, stateless_init_process_group
from skyrl_train.tensordict.wrappers.weight_sync import Source, WeightPusher, get_model_metadata, weights_of
from skyrl_train.weight_sync.protocol import dtype_of


class EngineView:
    """An engine with synchronous calls. Wrappers accept it in place of the engine; close it when they are done.

    Weights arrive complete and verified (weight_sync): a missing or altered tensor is rejected by name.
    """

    def __init__(
        self,
        engine: InferenceEngine | None,
        model: str,
        *,
        dtype: str = "float32",
        timeout: float = 600.0,
        closing: Callable[[], None] | None = None,
        tokenizer: Any = None,
    ):
        """View an engine.

        Args:
            engine: The engine, which `close` closes; None if a subclass starts it later.
            model: Path or hub name of the engine's model.
            dtype: Data type in which weights are sent.
            timeout: Seconds for a weight sync.
            closing: Called after the engine is closed, to free its resources.
            tokenizer: A tokenizer or its path; the model's by default.
        """
        self._engine = engine
        self.model_path, self.dtype, self.timeout = model, dtype, timeout
        self._closing, self._tokenizer = closing, tokenizer
        self._pusher: WeightPusher | None = None
        self._group: StatelessGroup | None = None
        self._arrived: dict[str, Tensor] = {}
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

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """The engines that receive every weight update."""
        return [self.engine]

    @property
    def tokenizer(self) -> Any:
        """The given tokenizer, or the model's, which is loaded at first use."""
        if self._tokenizer is None or isinstance(self._tokenizer, str):
            self._tokenizer = load_tokenizer(self._tokenizer or self.model_path)
        return self._tokenizer

    def get_tp_size(self) -> int:
        """Return the number of ranks of one engine."""
        return self.engines[0].capabilities.weight_ranks

    @cached_property
    def _metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        return get_model_metadata(load_meta_model(self.model_path, dtype_of(self.dtype)))

    def get_model_metadata(self) -> dict[str, tuple[torch.dtype, torch.Size]]:
        """Return (dtype, shape) of every tensor that a sync sends, by checkpoint name; a tied head is not listed."""
        return dict(self._metadata)

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache. A weight update does this, too."""
        for engine in self.engines:
            call(engine.reset_prefix_cache(), f"{self.model_path}: reset_prefix_cache", self.timeout)

    def _ids(self, prompt: str | Iterable[Any]) -> list[int]:
        """The token ids of a prompt: a text, or ids. Raises ConfigError if there are none."""
        ids = encode_prompt(self.tokenizer, prompt) if isinstance(prompt, str) else [int(one) for one in prompt]
        if not ids:
            raise ConfigError("A prompt has no tokens. Give prompts that are not empty.")
        return ids

    def _sample(
        self, rows: list[list[int]], generation: Generation, timeout: float | None, engine: InferenceEngine
    ) -> tuple[list[SampleRequest], list[Completion], list[str]]:
        """Requests, completions and their texts; the samples of a row are next to each other."""
        if not rows:
            raise ConfigError("There is no prompt. Give at least one.")
        check_supported(generation.sampling, engine.capabilities)
        requests = sample_requests(rows, generation, engine.capabilities)
        done = call(engine.generate(requests), f"{self.model_path}: generate", timeout or self.timeout)
        skips = generation.skip_special_tokens
        return requests, done, [decoded(self.tokenizer, one.token_ids.tolist(), skips) for one in done]

    # -- weight updates ---------------------------------------------------------------------------------------------

    def update_weights(self, weights: Source | Iterable[tuple[str, Tensor]], version: int | None = None) -> int:
        """Load a model's weights (merging LoRA), or tensors by name; return the version that is now served.

        Raises WeightSyncError naming the tensor, ConfigError for a source without weights.
        """
        if self._pusher is None:
            self._pusher = WeightPusher(self.engines, wire_dtype=self.dtype, timeout=self.timeout)
        served = self._pusher.push(weights_of(weights), version)
        self._synced = True
        return served

    def update_weight(self, name: str, weight: Tensor) -> None:
        """Store one tensor; once the last has arrived, load all of them. Raises ConfigError for an unknown name."""
        if name not in self._metadata:
            known = ", ".join(sorted(self._metadata)[:3])
            raise ConfigError(f"{name!r} is not a tensor of the model, which has {known}, ...")
        self._arrived[name] = weight
        if len(self._arrived) == len(self._metadata):
            arrived, self._arrived = self._arrived, {}
            self.update_weights(arrived)

    def check_weights_changed(self) -> bool:
        """True if a complete set of weights has been loaded since the start."""
        return self._synced

    def update_weights_from_tensor(self, named_tensors: Source | Iterable[tuple[str, Tensor]]) -> int:
        """Do what `update_weights` does; this is SGLang's name for it."""
        return self.update_weights(named_tensors)

    def update_weights_from_disk(self, model_path: str) -> int:
        """Load the weights in a Hugging Face folder of the same model, and return the version that is now served.

        Raises ConfigError if the folder's model cannot be loaded, WeightSyncError if it does not fit the engine's.
        """
        return self.update_weights(load_causal_lm(model_path, dtype=dtype_of(self.dtype), key="model_path"))

    # -- over a process group ---------------------------------------------------------------------------------------

    def get_master_address(self) -> str:
        """Return the host at which a process group forms by default."""
        return "127.0.0.1"

    def get_master_port(self) -> int:
        """Return the port at which a process group forms by default: a free one, which stays the same."""
        return self._port

    @cached_property
    def _port(self) -> int:
        return free_address(self.get_master_address())[1]

    def init_weight_update_group(
        self,
        master_address: str | None = None,
        master_port: int | str | None = None,
        rank_offset: int = 1,
        world_size: int = 2,
        device: torch.device | str | None = None,
    ) -> None:
        """Choose a process group for weight updates (NCCL on accelerators, gloo on CPUs).

        Without an address, this process is the trainer: the group forms between it and the engines at the next
        `update_weights`, which sends over it. Without any group, `update_weights` sends through Ray or memory.

        With the address of rank 0, the engine joins a trainer's group (`stateless_init_process_group`) whose rank 0
        sends tensors to `update_weights_from_distributed`. This blocks until all have joined. The whole engine is one
        member, however many accelerators it uses. A group that was joined before is left first.

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
        port = self.get_master_port() if master_port is None else int(master_port)
        if master_address is not None:
            join = stateless_init_process_group
            self._group = join(master_address, port, rank_offset, world_size, device, self.timeout)
            return
        options: dict[str, Any] = {"wire_dtype": self.dtype, "timeout": self.timeout}
        address = (self.get_master_address(), port)
        self._pusher = WeightPusher(self.engines, route="broadcast", address=address, **options)

    def update_weights_from_distributed(
        self,
        name: str | Sequence[str],
        dtype: torch.dtype | str | Sequence[torch.dtype | str],
        shape: Sequence[int] | Sequence[Sequence[int]],
        version: int | None = None,
    ) -> int | None:
        """Receive tensors from rank 0 of the group, one broadcast each, and load them once the last has arrived.

        Args:
            name: Checkpoint name of one tensor or, in the order in which rank 0 sends them, of all tensors.
            dtype: Data type of the tensor, or a list of data types.
            shape: Shape of the tensor, or a list of shapes.
            version: Version of the weights, for all tensors; None for the engine's last one + 1. It is returned.

        Raises:
            ConfigError: The lists differ in length, or the model has no such tensor.
            RuntimeError: No group is joined.
            WeightSyncError: A transfer failed, or the tensors do not fit the model.
        """
        if isinstance(name, str) and isinstance(dtype, str | torch.dtype):
            self.update_weight(name, self._received(dtype, shape))
            return None
        if isinstance(name, str) or isinstance(dtype, str | torch.dtype) or not len(name) == len(dtype) == len(shape):
            raise ConfigError("name, dtype and shape must be lists of the same length, with one entry for each tensor.")
        received = {one: self._received(d, s) for one, d, s in zip(name, dtype, shape, strict=True)}
        return self.update_weights(received, version)

    def destroy_weight_update_group(self) -> None:
        """Leave the group, on both sides; does nothing if there is none."""
        joined, self._group, self._pusher = (self._group, self._pusher), None, None
        for one in joined:
            if one is not None:
                one.close()

    def _received(self, dtype: Any, shape: Any) -> Tensor:
        if self._group is None:
            raise RuntimeError("No process group is joined. Call init_weight_update_group first.")
        kind = dtype if isinstance(dtype, torch.dtype) else dtype_of(str(dtype).removeprefix("torch."))
        return self._group.broadcast(torch.empty(tuple(shape), dtype=kind, device=self._group.device))

    # -- closing ----------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the engine. Safe to call twice."""
        self.destroy_weight_update_group()
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            call(engine.close(), "closing an engine", 60.0)
        finally:
            if self._closing is not None:
                self._closing()

    shutdown = close

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs to call the same engine. It has no part in the trainer's groups."""
        return {**self.__dict__, "_pusher": None, "_group": None, "_closing": None}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
