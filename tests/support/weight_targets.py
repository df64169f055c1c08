"""Both sides of a weight sync without Ray: trainer ranks and engines as objects of this process."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from skyrl_train.cluster.addresses import free_address
from skyrl_train.engines.base import Capabilities, EngineHealth
from skyrl_train.models.lora import get_adaptable_linears
from skyrl_train.weight_sync.protocol import AdapterSpec, Bucket, Manifest, adapter_names
from skyrl_train.weight_sync.receiver import InPlaceWeightStore, WeightReceiver
from skyrl_train.weight_sync.sender import LoraModel, WeightSender, WeightSenderMixin
from tests.support.tiny_adapters import TARGETS


class LocalTrainer(WeightSenderMixin):
    """One trainer rank with a model, the `TrainerRanks` of `WeightSync`."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        wire_dtype: str = "float32",
        bucket_bytes: int = 1 << 16,
        adapted: LoraModel | None = None,
        weight_sync_only_changed: bool = False,
    ):
        self.model = model
        self.updates = 0
        self.sender = WeightSender(
            self.parameters,
            wire_dtype=wire_dtype,
            bucket_bytes=bucket_bytes,
            rank=0,
            lora_model=adapted,
            weight_sync_only_changed=weight_sync_only_changed,
            num_optimizer_steps=lambda: self.updates,
        )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()

    def full_weights(self) -> PreTrainedModel:
        """Return the weights that engines must serve after a sync."""
        return self.model

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        return [await asyncio.to_thread(getattr(self, method), *args)]

    def address(self, other_machines: bool = False) -> tuple[str, int]:
        return free_address()


class AdaptedTrainer(LocalTrainer):
    """One trainer rank with a model and its adapter. With `adapter_only`, engines get the adapter separately."""

    def __init__(self, model: PreTrainedModel, *, rank: int = 4, scaling: float = 2.0, wire_dtype: str = "float32"):
        self.linears = {
            name: linear for name, linear in get_adaptable_linears(model).items() if name.rpartition(".")[2] in TARGETS
        }
        self.spec = AdapterSpec(rank, scaling, tuple(self.linears))
        self.tensors: dict[str, Tensor] = {}
        adapted = LoraModel(self.spec, self.separate)
        super().__init__(model, wire_dtype=wire_dtype, bucket_bytes=1 << 14, adapted=adapted)
        self.draw(0)

    def draw(self, seed: int) -> None:
        """Set another A and B, large enough to change samples."""
        generator = torch.Generator().manual_seed(seed)
        for layer, linear in self.linears.items():
            shapes = ((self.spec.rank, linear.in_features), (linear.out_features, self.spec.rank))
            for name, shape in zip(adapter_names(layer), shapes, strict=True):
                self.tensors[name] = 0.2 * torch.randn(shape, generator=generator)

    def separate(self, adapter_only: bool) -> Iterator[tuple[str, Tensor]]:
        if not adapter_only:
            yield from self.parameters()
        yield from self.tensors.items()

    @torch.no_grad()
    def full_weights(self) -> PreTrainedModel:
        """Return a copy with W + scaling · B A."""
        merged = copy.deepcopy(self.model)
        for layer in self.linears:
            down, up = (self.tensors[name] for name in adapter_names(layer))
            merged.get_parameter(f"{layer}.weight").add_(up @ down, alpha=self.spec.scaling)
        return merged


class FakeEngine:
    """A model that takes weights and scores tokens, without other parts of an engine."""

    def __init__(self, model: PreTrainedModel, name: str):
        self.model = model
        self.name = name
        self.capabilities = Capabilities(name)
        self.receiver = WeightReceiver(InPlaceWeightStore(lambda: dict(model.named_parameters())), name)

    async def connect_weights(self, route: str, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        await asyncio.to_thread(self.receiver.connect, route, address, rank, world_size, timeout_s)

    async def begin_weights(self, manifest: Manifest) -> None:
        await asyncio.to_thread(self.receiver.begin, manifest)

    async def receive_weights(self, bucket: Bucket) -> None:
        await asyncio.to_thread(self.receiver.receive, bucket)

    async def commit_weights(self, version: int) -> None:
        await asyncio.to_thread(self.receiver.commit, version)

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        return score(self.model, token_ids, temperature)

    async def health(self) -> EngineHealth:
        return EngineHealth(self.name, self.receiver.version, partially_loaded=self.receiver.partially_loaded)


@torch.no_grad()
def score(model: PreTrainedModel, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
    """Return log-probs (nats) of every token after its first, with one plain forward pass per sequence."""
    answers = []
    for ids in token_ids:
        tokens = torch.tensor([ids])
        logprobs = (model(tokens).logits[0, :-1].float() / temperature).log_softmax(-1)
        answers.append(logprobs.gather(-1, tokens[0, 1:, None])[:, 0].tolist())
    return answers
