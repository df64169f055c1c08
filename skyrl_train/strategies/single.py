"""A strategy for one process: no process group, no sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from skyrl_train.config.schema import DeepSpeedConfig, FSDPConfig, OptimizerConfig
from skyrl_train.errors import ConfigError
from skyrl_train.strategies.base import Strategy, get_widest_dtype
from skyrl_train.strategies.materialize import materialize_full


class SingleStrategy(Strategy):
    """A strategy with one rank that holds the full model.

    If the compute dtype is narrower than the parameters', autocast uses it; parameters and gradients keep their dtype.
    """

    def __init__(
        self,
        *,
        optimizer_config: OptimizerConfig | None,
        fsdp_config: FSDPConfig | None = None,
        deepspeed_config: DeepSpeedConfig | None = None,
        device: torch.device | str = "cpu",
        compute_dtype: torch.dtype = torch.float32,
        rank: int = 0,
        world_size: int = 1,
    ):
        """Take the settings of all strategies; those of FSDP and DeepSpeed are not used.

        Args:
            optimizer_config: Optimizer settings; None for a frozen model.
            fsdp_config: Not used.
            deepspeed_config: Not used.
            device: Device of the model.
            compute_dtype: Dtype of activations and matrix products.
            rank: Must be 0.
            world_size: Must be 1.

        Raises:
            ConfigError: `world_size` is not 1.
        """
        if world_size != 1:
            raise ConfigError(
                f"trainer.strategy='single' runs one rank, got {world_size}. Use one rank, or set "
                "trainer.strategy=fsdp2."
            )
        super().__init__(optimizer_config, device, rank, world_size)
        self.compute_dtype = compute_dtype

    def prepare(self, model: nn.Module, total_steps: int | None) -> nn.Module:
        materialize_full(model)
        model.to(self.device)
        if self.compute_dtype.itemsize < get_widest_dtype(model).itemsize:
            compute: Any = torch.autocast(self.device.type, dtype=self.compute_dtype)
            model.forward = compute(model.forward)  # type: ignore[method-assign]
        self._register_module(model, total_steps)
        return model
