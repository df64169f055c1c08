"""The whole model in one process: no process group, no sharding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from skyrl_train.config.schema import DeepSpeedConfig, FSDPConfig, OptimizerConfig
from skyrl_train.errors import ConfigError
from skyrl_train.strategies.base import Strategy, widest_dtype
from skyrl_train.strategies.fill import fill_whole


class SingleStrategy(Strategy):
    """One rank. A compute dtype narrower than the parameters' is used by autocast; parameters and gradients stay."""

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
        if world_size != 1:
            raise ConfigError(f"trainer.strategy='single' runs one rank, got {world_size}; use trainer.strategy=fsdp2.")
        super().__init__(optimizer_config, device, rank, world_size)
        self.compute_dtype = compute_dtype

    def prepare(self, scorer: nn.Module, total_steps: int | None) -> nn.Module:
        fill_whole(scorer)
        scorer.to(self.device)
        if self.compute_dtype.itemsize < widest_dtype(scorer).itemsize:
            compute: Any = torch.autocast(self.device.type, dtype=self.compute_dtype)
            scorer.forward = compute(scorer.forward)  # type: ignore[method-assign]
        self._own(scorer, total_steps)
        return scorer
