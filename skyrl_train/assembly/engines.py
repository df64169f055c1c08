"""The inference engines and their client, from configuration."""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_train.assembly.layout import RoleSlots
from skyrl_train.assembly.learner import threads_per_process
from skyrl_train.assembly.sync_choices import wants_adapter
from skyrl_train.cluster.actors import Remote, spawn
from skyrl_train.cluster.placement import free_address_of, placed_again, places_of, unless_lost, visible_devices
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.choices import ENGINES, WORKER_NODES
from skyrl_train.config.machine import INSTALL
from skyrl_train.config.schema import Config, GeneratorConfig, TimeoutsConfig
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.http.native import NativeEngine
from skyrl_train.engines.http.native_servers import SGLangServer, VLLMServer
from skyrl_train.engines.http.remote import RemoteEngine, has_our_routes
from skyrl_train.engines.sampling import check_supported, normalise
from skyrl_train.errors import ClusterLost, ConfigError, EngineError
from skyrl_train.listening import API_KEY
from skyrl_train.storage.places import working_folder
from skyrl_train.tasks import gather_all

_NATIVE_SERVERS = {"vllm": VLLMServer, "sglang": SGLangServer}
"""Backends that have a server of their own."""


_VLLM_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for max_lora_rank."""


def require_installed(backend: str) -> None:
    """Raises ConfigError naming the extra to install, if the backend is not installed here."""
    if backend in INSTALL and importlib.util.find_spec(backend) is None:
        raise ConfigError(f"generator.backend={backend!r} is not installed: {INSTALL[backend]}.")


async def build_engines(
    cluster: Cluster, generator: GeneratorConfig, timeouts: TimeoutsConfig, role_slots: RoleSlots, device: str
) -> list[Remote]:
    """Start all engines at once and wait until they have loaded their weights."""
    starts = (
        build_engine(index, cluster, generator, timeouts, role_slots, device) for index in range(role_slots.count)
    )
    return await gather_all(starts)


async def build_engine(
    index: int,
    cluster: Cluster,
    generator: GeneratorConfig,
    timeouts: TimeoutsConfig,
    role_slots: RoleSlots,
    device: str,
    *,
    place: int | None = None,
) -> Remote:
    """Start engine `index` in its slots and wait until it has loaded its weights.

    `place`: which member of `role_slots` it is; None for the `index`-th.
    """
    slots, indices = role_slots.slots, _slots_of(index, role_slots, place)
    kwargs = engine_kwargs(generator, device, f"{generator.backend} {index}")
    kwargs |= {"threads": threads_per_process(cluster, role_slots, device), "slot": index * role_slots.stride}
    if role_slots.nodes > 1:
        asked = free_address_of(cluster, slots, indices[0], timeouts.engine_start_s)
        host, port = await unless_lost(asked, slots, indices[:1])
        kwargs |= {"nnodes": role_slots.nodes, "master_addr": host, "master_port": port}
    started: list[Remote] = []
    try:
        for node, (share, devices) in enumerate(await _shares(indices, generator, timeouts, role_slots, device)):
            process = spawn(
                cluster,
                WORKER_NODES[generator.backend] if node else ENGINES[generator.backend],
                kwargs | ({"node_rank": node} if node else {}),
                slots=slots,
                index=share[0],
                name=f"{engine_name(index)} node {node}" if node else engine_name(index),
                concurrent=True,
                deadline_s=timeouts.rollout_s + timeouts.weight_sync_s,
                deadlines={"generate": math.inf},  # the client watches its progress
                died=EngineError,
                devices=devices,
            )
            started.append(process)
        ready = gather_all(process.read("capabilities", timeouts.engine_start_s) for process in started)
        capabilities, *_ = await unless_lost(ready, slots, indices)
    except BaseException:
        for process in started:
            process.kill()  # an engine that has not started still occupies its slots
        raise
    engine, *others = started
    if others:
        engine.lives_with(others, cluster)
    # A run that began on one node has ranks that meet on loopback, to which an engine of a node that came later cannot.
    engine.know(capabilities=replace(capabilities, other_machine=not cluster.single_machine))
    return engine


async def build_engine_again(
    index: int,
    cluster: Cluster,
    generator: GeneratorConfig,
    timeouts: TimeoutsConfig,
    role_slots: RoleSlots,
    device: str,
    patience_s: float,
    *,
    place: int | None = None,
) -> Remote:
    """Start an engine that died in its slots, on another node if theirs was lost. Raises NoRoom if there is none.

    `patience_s`: how long a new node is waited for.

    Ray may not know yet that the node is lost: then the first start ends when it does.
    """
    indices = _slots_of(index, role_slots, place)
    if not cluster.single_machine:
        await placed_again(role_slots.slots, indices, patience_s)
    try:
        return await build_engine(index, cluster, generator, timeouts, role_slots, device, place=place)
    except ClusterLost:
        await placed_again(role_slots.slots, indices, patience_s)
    return await build_engine(index, cluster, generator, timeouts, role_slots, device, place=place)


async def _shares(
    indices: range, generator: GeneratorConfig, timeouts: TimeoutsConfig, role_slots: RoleSlots, device: str
) -> list[tuple[range, str | None]]:
    """The slots of an engine on each of its nodes, and which accelerators these are if Ray does not say it there."""
    size = role_slots.stride // role_slots.nodes
    shares = [indices[begin : begin + size] for begin in range(0, role_slots.stride, size)]
    if device != "cuda" or size <= role_slots.slots.together:
        return [(share, None) for share in shares]
    key = f"generator.inference_engine_tensor_parallel_size={generator.inference_engine_tensor_parallel_size}"
    asked = places_of(role_slots.slots, indices, timeouts.engine_start_s)
    places = await unless_lost(asked, role_slots.slots, indices)
    found = iter(places)
    return [(share, visible_devices([next(found) for _ in share], key)) for share in shares]


def _slots_of(index: int, role_slots: RoleSlots, place: int | None) -> range:
    """The slots of engine `index`: see build_engine."""
    first = (index if place is None else place) * role_slots.stride
    return range(first, first + role_slots.stride)


async def connect_engine(url: str, cfg: Config) -> RemoteEngine | NativeEngine:
    """Connect to an engine that runs elsewhere: behind our server, or that of vLLM or SGLang (generator.backend).

    Raises ConfigError without a token or for an unknown kind of server, DeadlineExceeded if there is no answer in time,
    EngineError for a server that is not what its backend says.
    """
    token, generator, timeouts = os.environ.get(API_KEY), cfg.generator, cfg.trainer.timeouts
    if not token:
        raise ConfigError(f"generator.run_engines_locally=false: set {API_KEY} in the environment: the servers' token.")
    deadline_s = timeouts.rollout_s + timeouts.weight_sync_s
    connection = Connection(url, token, name=url)
    if await has_our_routes(connection, timeouts.engine_start_s):
        return await RemoteEngine(url, token, name=url, deadline_s=deadline_s).connect(timeouts.engine_start_s)
    if generator.backend not in _NATIVE_SERVERS:
        raise ConfigError(
            f"generator.remote_inference_engine_urls: what answers at {url} is not skyrl_train.entrypoints.serve. For "
            f"the servers of vLLM and SGLang set generator.backend, which is {generator.backend!r}."
        )
    engine = NativeEngine(
        _NATIVE_SERVERS[generator.backend](connection, deadline_s),
        model=generator.model_name,
        dtype=generator.model_dtype,
        device=cfg.device,
        folder=str(Path(weight_folder(cfg)) / "served"),
        max_num_seqs=generator.max_num_seqs,
    )
    return await engine.connect(timeouts.engine_start_s)


def engine_settings(cfg: Config) -> GeneratorConfig:
    """`generator`, extended by what the run's own engines need to take the policy's adapter, and to tell of experts."""
    generator, rank = cfg.generator, cfg.trainer.policy.model.lora.rank
    if cfg.trainer.moe_routing_replay == "rollout":
        generator = replace(generator, engine_init_kwargs={"keeps_routing": True} | generator.engine_init_kwargs)
    room = next((most for most in _VLLM_RANKS if most >= rank), None)
    if generator.backend != "vllm" or room is None or not wants_adapter(cfg):
        return generator
    return replace(generator, engine_init_kwargs={"max_lora_rank": room} | generator.engine_init_kwargs)


def weight_folder(cfg: Config) -> str:
    """The folder for weights on the "checkpoint" route."""
    return cfg.generator.weight_sync_folder or str(working_folder(cfg.trainer.ckpt_path) / "weight_sync")


def server_urls(generator: GeneratorConfig) -> list[str]:
    """The URLs of the engines, for run_engines_locally=false."""
    return list(generator.external_server_urls or generator.remote_inference_engine_urls)


def engine_name(index: int) -> str:
    return f"engine {index}"


def engine_index(name: str) -> int:
    """The index of the engine with this `engine_name`."""
    return int(name.removeprefix("engine "))


def engine_kwargs(generator: GeneratorConfig, device: str, name: str) -> dict[str, Any]:
    """The constructor arguments of an engine."""
    common = {
        "model": generator.model_name,
        "dtype": generator.model_dtype,
        "device": device,
        "max_num_seqs": generator.max_num_seqs,
        "name": name,
        "rope_scaling": generator.rope_scaling,
        "rope_theta": generator.rope_theta,
    }
    if generator.backend != "transformers":
        common |= {
            "tensor_parallel_size": generator.inference_engine_tensor_parallel_size,
            "pipeline_parallel_size": generator.inference_engine_pipeline_parallel_size,
            "expert_parallel_size": generator.inference_engine_expert_parallel_size,
            "enable_prefix_caching": generator.enable_prefix_caching,
            "enable_chunked_prefill": generator.enable_chunked_prefill,
            "max_num_batched_tokens": generator.max_num_batched_tokens,
            "enforce_eager": generator.enforce_eager,
            "gpu_memory_utilization": generator.gpu_memory_utilization,
            "batch_invariant": generator.batch_invariant,
        }
    return common | generator.engine_init_kwargs


def build_client(engines: Sequence[Any], generator: GeneratorConfig, timeouts: TimeoutsConfig) -> EngineClient:
    """One client for all engines. One of the run's own has at most twice the calls that fill its batch.

    Raises UnsupportedParameter for configured sampling that an engine does not support, ConfigError for
    weight_sync_only_changed with an engine that loads whole models only.
    """
    for key in ("sampling_params", "eval_sampling_params"):
        sampling = normalise(getattr(generator, key), f"generator.{key}")
        for engine in engines:
            check_supported(sampling, engine.capabilities)
    if generator.weight_sync_only_changed:
        for engine in engines:
            if not engine.capabilities.partial_weights:
                raise ConfigError(
                    f"generator.weight_sync_only_changed=true: the {generator.backend} engine loads whole models only; "
                    "leave it false."
                )
    batch = generator.engine_init_kwargs.get("max_num_seqs", generator.max_num_seqs)
    max_calls = 2 * int(batch) if generator.run_engines_locally else None  # others may run with another number
    return EngineClient(engines, deadline_s=timeouts.rollout_s, max_calls=max_calls)
