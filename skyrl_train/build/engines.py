"""The inference engines and the one client in front of them, from configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from skyrl_train.build.layout import Seats
from skyrl_train.build.learner import threads_per_process
from skyrl_train.cluster.actors import Remote, spawn
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.choices import ENGINES
from skyrl_train.config.schema import GeneratorConfig, TimeoutsConfig
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.sampling import check_supported, normalise
from skyrl_train.errors import EngineError


async def build_engines(
    cluster: Cluster, generator: GeneratorConfig, timeouts: TimeoutsConfig, seats: Seats, device: str
) -> list[Remote]:
    """Start all engines at once and wait until they have loaded their weights."""
    engines = [
        spawn(
            cluster,
            ENGINES[generator.backend],
            engine_kwargs(generator, device, f"{generator.backend} {index}")
            | {"threads": threads_per_process(cluster, seats.count, device)},
            slots=seats.slots,
            index=index * seats.stride,
            name=f"engine {generator.backend} {index}",
            concurrent=True,
            deadline_s=timeouts.rollout_s + timeouts.weight_sync_s,
            died=EngineError,
        )
        for index in range(seats.count)
    ]
    capabilities = await asyncio.gather(*(engine.read("capabilities", timeouts.engine_start_s) for engine in engines))
    for engine, known in zip(engines, capabilities, strict=True):
        engine.know(capabilities=known)
    return engines


def engine_kwargs(generator: GeneratorConfig, device: str, name: str) -> dict[str, Any]:
    """What an engine is constructed with."""
    return {
        "model": generator.model_name,
        "dtype": generator.model_dtype,
        "device": device,
        "max_num_seqs": generator.max_num_seqs,
        "name": name,
        "rope_scaling": generator.rope_scaling,
        "rope_theta": generator.rope_theta,
        **generator.engine_init_kwargs,
    }


def build_client(engines: Sequence[Any], generator: GeneratorConfig, timeouts: TimeoutsConfig) -> EngineClient:
    """One client for all engines. Raises UnsupportedParameter for configured sampling that an engine cannot honour."""
    for key in ("sampling_params", "eval_sampling_params"):
        sampling = normalise(getattr(generator, key), f"generator.{key}")
        for engine in engines:
            check_supported(sampling, engine.capabilities)
    return EngineClient(engines, deadline_s=timeouts.rollout_s)
