"""Strategies that keep the gradient of an update instead of taking the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from skyrl_train.learner.worker import LearnerSpec, LearnerWorker
from skyrl_train.models.pretrained_weights import PretrainedWeights
from skyrl_train.models.ragged_model import RaggedModel
from skyrl_train.strategies.fsdp2 import FSDP2Strategy
from skyrl_train.strategies.single import SingleStrategy
from tests.support.tiny_adapters import fill_adapters


class _Recording:
    recorded: dict[str, Tensor]

    def step(self) -> dict[str, float]:
        model: Any = self
        named = model.module.named_parameters()
        gradients = {model.module.hf_name(name): p.grad for name, p in named if p.grad is not None}
        self.recorded = {name: self._recorded(name, gradient) for name, gradient in gradients.items()}
        model.module.zero_grad()
        return {"grad_norm": 0.0}

    def _recorded(self, name: str, gradient: Tensor) -> Tensor:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()


class RecordingSingle(_Recording, SingleStrategy):
    """The `single` strategy. `recorded` holds the last update's gradients by Hugging Face name."""


class RecordingFSDP2(_Recording, FSDP2Strategy):
    """The `fsdp2` strategy. Gradients are gathered, so all ranks must step at the same time."""

    def step(self) -> dict[str, float]:
        self._reduce_replicated_grads()
        return super().step()

    def _recorded(self, name: str, gradient: Tensor) -> Tensor:
        return self._full_tensor(name, super()._recorded(name, gradient))


class RecordingWorker(LearnerWorker):
    """A LearnerWorker that returns those gradients. Adapters start at random, so that all of them have a gradient."""

    def __init__(
        self,
        spec: LearnerSpec,
        rank: int,
        world_size: int,
        chunk_bytes: int | None = None,
        backend: str | None = None,
    ):
        """chunk_bytes: size of the head's chunks; backend: of torch.compile; their own choice if None."""
        super().__init__(spec, rank, world_size)
        self._chunk_bytes = chunk_bytes
        torch.compiler.set_default_backend(backend)

    def _wrap_model(self, model: PreTrainedModel, pretrained: PretrainedWeights) -> RaggedModel:
        if self.adapters is not None:
            fill_adapters(model)
        ragged_model = super()._wrap_model(model, pretrained)
        if self._chunk_bytes is not None:
            ragged_model.chunk_bytes = self._chunk_bytes  # type: ignore[assignment]
        return ragged_model

    def graphs(self) -> int:
        """Return the number of graphs that torch.compile made in this process."""
        return int(counters["stats"]["unique_graphs"])

    def gradients(self) -> dict[str, Tensor]:
        recorded: dict[str, Tensor] = self.strategy.recorded
        return recorded
