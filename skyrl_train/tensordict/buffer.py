"""TorchRL's replay buffer, with the storage and the sampler for rows of any length."""

from __future__ import annotations

from torchrl.data import (
    LazyStackStorage as LazyStackStorage,
    ReplayBuffer as ReplayBuffer,
    SamplerWithoutReplacement as SamplerWithoutReplacement,
)
