"""vLLM engines with the names of TorchRL's workers; vLLMWrapper accepts each of them as its model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torchrl.modules.llm.backends import RLvLLMEngine

from skyrl_train.config.choices import ENGINES
from skyrl_train.errors import ConfigError
from skyrl_train.registry import load_object
from skyrl_train.tensordict.wrappers.engine_view import EngineView

KIND = "vllm"
VISIBLE = "CUDA_VISIBLE_DEVICES"


class vLLMWorker(EngineView, RLvLLMEngine):  # type: ignore[misc]
    """An engine whose weights may arrive tensor by tensor: it loads them once the model's last tensor has arrived."""

    def update_weight_broadcast(self, name: str, dtype: torch.dtype | str, shape: Sequence[int]) -> None:
        """Receive one tensor from the group, as `update_weights_from_distributed` does; an older name of TorchRL."""
        self.update_weights_from_distributed(name, dtype, shape)


class LLMOnDevice(vLLMWorker):
    """A vLLM engine in this process, on chosen accelerators; `initialize` loads the model."""

    def __init__(
        self,
        model: str,
        *,
        bundle_indices: Sequence[int] | None = None,
        dtype: str = "float32",
        timeout: float = 600.0,
        **options: Any,
    ):
        """Store the settings without loading the model; see make_vllm_worker.

        `bundle_indices` are accelerators of this machine, one rank each; the first visible ones by default. Raises
        ConfigError for accelerators that do not exist.
        """
        super().__init__(None, model, dtype=dtype, timeout=timeout)
        self._indices = None if bundle_indices is None else check_devices(bundle_indices)
        self._options = options

    def initialize(self) -> None:
        """Start the engine, and return once its model is loaded; see `choose_devices` for errors."""
        if self._engine is not None:
            return
        options = {"device": "cuda" if torch.cuda.is_available() else "cpu", **self._options}
        if self._indices is not None:
            choose_devices(self._indices)
            options.setdefault("tensor_parallel_size", len(self._indices))
        self._engine = load_object(ENGINES[KIND])(self.model_path, dtype=self.dtype, **options)


def make_vllm_worker(
    *,
    model_name: str,
    devices: Sequence[int | torch.device] | None = None,
    num_devices: int | None = None,
    make_ray_worker: bool = True,
    enforce_eager: bool = False,
    enable_fp32_output: bool = False,
    dtype: str = "float32",
    timeout: float = 600.0,
    **options: Any,
) -> vLLMWorker:
    """Start vLLM in a Ray actor or, with make_ray_worker=False, in this process.

    Args:
        model_name: Path or hub name.
        devices: Indices of accelerators visible to this process. For an actor, Ray chooses; others are a ConfigError.
        num_devices: Number of accelerators, wherever they are free; 1 by default. An alternative to `devices`.
        make_ray_worker: True for an actor, which needs a running Ray.
        enforce_eager: Do not use CUDA graphs.
        enable_fp32_output: Require float32 logits, which need dtype="float32". Log-probs are always float32.
        dtype: Data type of the model.
        timeout: Seconds for loading the model in an actor, and for a weight sync.
        options: Arguments of VLLMEngine and vLLM.

    Returns:
        The worker, with its model loaded. Close it when done.

    Raises:
        ConfigError: (a ValueError) For missing devices or contradictory arguments.
        RuntimeError: If an actor is requested and Ray is not running.
    """
    if num_devices is not None and (num_devices < 1 or devices is not None):
        raise ConfigError(f"num_devices={num_devices} must be at least 1, and cannot be given with devices={devices}.")
    if enable_fp32_output and dtype != "float32":
        raise ConfigError(f"enable_fp32_output=True needs dtype='float32', got dtype={dtype!r}.")
    indices = None if devices is None else check_devices(devices)
    ranks = len(indices) if indices is not None else num_devices or 1
    options = {"enforce_eager": enforce_eager, "tensor_parallel_size": ranks, **options}
    if not make_ray_worker:
        local = LLMOnDevice(model_name, bundle_indices=indices, dtype=dtype, timeout=timeout, **options)
        local.initialize()
        return local
    from skyrl_train.tensordict.wrappers.ray_engine import engine_in_actor

    wanted = None if indices is None else [accelerators()[index] for index in indices]
    resources: dict[str, Any] = {"ranks": ranks, "devices": wanted, "deadline_s": timeout}
    options = {"model": model_name, "dtype": dtype, **options}
    engine, closing = engine_in_actor(ENGINES[KIND], options, name=f"{KIND} worker", **resources)
    return vLLMWorker(engine, model_name, dtype=dtype, timeout=timeout, closing=closing)


def check_devices(devices: Sequence[int | torch.device]) -> list[int]:
    """Return the indices of accelerators. Raises ConfigError for an empty list, duplicates or nonexistent ones."""
    indices = [one.index or 0 if isinstance(one, torch.device) else one for one in devices]
    count = len(accelerators())
    if not indices or len(set(indices)) != len(indices) or not all(0 <= index < count for index in indices):
        raise ConfigError(
            f"devices={indices} must be distinct indices, from 0, of the {count} accelerators of this machine."
        )
    return indices


@cache
def accelerators() -> tuple[str, ...]:
    """Return the initial entries of CUDA_VISIBLE_DEVICES; cached, so that indices keep their meaning after a choice."""
    there = torch.cuda.device_count()
    named = os.environ.get(VISIBLE)
    return tuple(map(str, range(there))) if named is None else tuple(map(str.strip, named.split(",")))[:there]


def choose_devices(indices: Sequence[int]) -> None:
    """Make only these accelerators visible. Raises ConfigError if torch already uses others."""
    wanted = [accelerators()[index] for index in indices]
    visible = [one.strip() for one in os.environ.get(VISIBLE, ",".join(accelerators())).split(",")]
    if visible[: len(wanted)] == wanted:
        return
    if torch.cuda.is_initialized():
        raise ConfigError(f"devices={list(indices)}: torch already uses other accelerators. Use make_ray_worker=True.")
    os.environ[VISIBLE] = ",".join(wanted)
