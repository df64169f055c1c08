"""The inference engines of a run: starting, restarting and adding them while the run trains, and serving them over
HTTP.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from skyrl_train.aio import gather_all
from skyrl_train.cluster.actors import ActorProxy, spawn
from skyrl_train.cluster.placement import (
    await_unless_node_lost,
    find_free_address,
    locate_gpus,
    reserve_additional_pool,
    visible_devices,
    wait_for_rescheduling,
)
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.config.choices import ENGINES, ENGINES_IN_CHILD_PROCESSES, WORKER_NODES
from skyrl_train.config.drafts import get_speculative_config
from skyrl_train.config.local_checks import INSTALL_COMMANDS
from skyrl_train.config.predicates import RunComponents, count_slots, environment_host_cpus, prefers_adapter_sync
from skyrl_train.config.schema import Config, GeneratorConfig, TimeoutsConfig
from skyrl_train.engines.client import EngineClient, engine_index, engine_name
from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.http.native import NativeEngine
from skyrl_train.engines.http.native_servers import SGLangServer, VLLMServer
from skyrl_train.engines.http.remote import RemoteEngine, is_skyrl_server
from skyrl_train.engines.http.server import ENDPOINT_LISTENER, HttpEndpoint
from skyrl_train.engines.sampling_params import check_supported, parse_sampling_params
from skyrl_train.engines.startup import describe_startup
from skyrl_train.engines.target_count import ENGINES_FILE, fixed_count_reason, write_target
from skyrl_train.errors import ClusterLost, ConfigError, EngineError, EnginesLost, SkyRLError
from skyrl_train.experiment.memory_plan import CacheLimit
from skyrl_train.experiment.placement import (
    RolePlacement,
    RunPlacement,
    reserve_slots,
    threads_per_process,
    weight_folder,
)
from skyrl_train.listeners import API_KEY_ENV

_log = logging.getLogger(__name__)
_NATIVE_SERVERS = {"vllm": VLLMServer, "sglang": SGLangServer}
"""Backends with an HTTP server of their own -> the adapter for that server."""
_VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that vLLM accepts for max_lora_rank."""
_POLL_INTERVAL_S = 5.0
"""Seconds between health checks of engines that serve without a trainer."""
_CLOSE_TIMEOUT_S = 10.0
"""Seconds for a leaving engine to clean up before it is killed."""


def require_installed(backend: str) -> None:
    """Check that the package of an engine backend is installed. Backends without an own package pass.

    Args:
        backend: Value of generator.backend, such as "vllm".

    Raises:
        ConfigError: The package is not installed. The message has the command that installs it.
    """
    if backend in INSTALL_COMMANDS and importlib.util.find_spec(backend) is None:
        raise ConfigError(f"generator.backend={backend!r} is not installed: {INSTALL_COMMANDS[backend]}.")


async def build_engines(
    cluster: Cluster, generator: GeneratorConfig, timeouts: TimeoutsConfig, role_placement: RolePlacement, device: str
) -> list[ActorProxy]:
    """Start all engines in parallel and wait until they have loaded their weights.

    Args:
        cluster: Cluster of the run.
        generator: The settings of the engines.
        timeouts: Deadlines of the start and of calls.
        role_placement: Slots of the engines, one per engine or per rank of an engine.
        device: "cuda" or "cpu".

    Returns:
        Proxies of the engines' actors, in the order of their indices.

    Raises:
        EngineError: An engine's process died or its start failed.
        DeadlineExceeded: An engine was not ready within timeouts.engine_start_s.
        ClusterLost: A node of an engine was lost.
    """
    starts = (
        build_engine(index, cluster, generator, timeouts, role_placement, device)
        for index in range(role_placement.count)
    )
    return await gather_all(starts)


async def build_engine(
    index: int,
    cluster: Cluster,
    generator: GeneratorConfig,
    timeouts: TimeoutsConfig,
    role_placement: RolePlacement,
    device: str,
    *,
    member_index: int | None = None,
) -> ActorProxy:
    """Start an engine on its slots and wait until it has loaded its weights. Kills its processes if the start fails.

    Args:
        index: The engine's number in the run.
        cluster: The cluster.
        generator: The settings of the engines.
        timeouts: The deadlines of calls.
        role_placement: The slots of the engines.
        device: "cuda" or "cpu".
        member_index: The engine's position within `role_placement`; None if it is `index`.

    Returns:
        A proxy of the engine's actor.

    Raises:
        EngineError: The engine's process died or its start failed.
        DeadlineExceeded: The engine was not ready within timeouts.engine_start_s.
        ClusterLost: A node of the engine was lost.
    """
    pool, indices = role_placement.pool, _slot_indices(index, role_placement, member_index)
    kwargs = engine_kwargs(generator, device, f"{generator.backend} {index}")
    kwargs |= {
        "threads": threads_per_process(cluster, role_placement, device),
        "slot": index * role_placement.slots_per_member,
    }
    if role_placement.nodes_per_member > 1:
        free_address = find_free_address(cluster, pool, indices[0], timeouts.engine_start_s)
        host, port = await await_unless_node_lost(free_address, pool, indices[:1])
        kwargs |= {"nnodes": role_placement.nodes_per_member, "master_addr": host, "master_port": port}
    started: list[ActorProxy] = []
    begin = time.monotonic()
    try:
        for node, (share, devices) in enumerate(
            await _slots_by_node(indices, generator, timeouts, role_placement, device)
        ):
            target = WORKER_NODES[generator.backend] if node else ENGINES[generator.backend]
            process = spawn(
                cluster,
                target,
                kwargs | ({"node_rank": node} if node else {}),
                pool=pool,
                index=share[0],
                name=f"{engine_name(index)} node {node}" if node else engine_name(index),
                is_async=True,
                deadline_s=timeouts.rollout_s + timeouts.weight_sync_s,
                deadlines={"generate": math.inf},  # the client watches its progress
                death_error=EngineError,
                devices=devices,
                in_child_process=target in ENGINES_IN_CHILD_PROCESSES,
            )
            started.append(process)
        ready = gather_all(process.get_attribute("capabilities", timeouts.engine_start_s) for process in started)
        capabilities, *_ = await await_unless_node_lost(ready, pool, indices)
        ready_s = time.monotonic() - begin
        phases = await started[0].get_attribute("startup_phases", timeouts.engine_start_s)
    except BaseException:
        for process in started:
            process.kill()  # an engine that has not started still occupies its slots
        raise
    _log.info("%s %s.", engine_name(index), describe_startup(ready_s, phases))
    engine, *others = started
    if others:
        engine.link_lifetimes(others, cluster)
    # The ranks of a run that began on one node rendezvous on loopback, which an engine on a later node cannot reach.
    engine.cache_attributes(capabilities=replace(capabilities, other_machine=not cluster.is_single_node))
    return engine


async def _slots_by_node(
    indices: range, generator: GeneratorConfig, timeouts: TimeoutsConfig, role_placement: RolePlacement, device: str
) -> list[tuple[range, str | None]]:
    """Return an engine's slots on each of its nodes, with CUDA_VISIBLE_DEVICES where Ray does not set it.

    Ray only sets it for the bundle that an actor runs in, so it is None if that bundle holds all slots of the node.
    """
    size = role_placement.slots_per_member // role_placement.nodes_per_member
    shares = [indices[begin : begin + size] for begin in range(0, role_placement.slots_per_member, size)]
    if device != "cuda" or size <= role_placement.pool.slots_per_bundle:
        return [(share, None) for share in shares]
    key = f"generator.inference_engine_tensor_parallel_size={generator.inference_engine_tensor_parallel_size}"
    gpus = locate_gpus(role_placement.pool, indices, timeouts.engine_start_s)
    locations = await await_unless_node_lost(gpus, role_placement.pool, indices)
    next_locations = iter(locations)
    return [(share, visible_devices([next(next_locations) for _ in share], key)) for share in shares]


def _slot_indices(index: int, role_placement: RolePlacement, member_index: int | None) -> range:
    """Return the slots of an engine: see build_engine."""
    first = (index if member_index is None else member_index) * role_placement.slots_per_member
    return range(first, first + role_placement.slots_per_member)


async def connect_engine(url: str, cfg: Config) -> RemoteEngine | NativeEngine:
    """Connect to an engine that runs elsewhere, behind skyrl_train.entrypoints.serve or a server of vLLM or SGLang.

    Raises:
        ConfigError: SKYRL_API_KEY is not set, or the server is not of a kind that generator.backend names.
        DeadlineExceeded: The server did not answer within timeouts.engine_start_s.
        EngineError: The server does not behave as its backend's servers do.
    """
    token, generator, timeouts = os.environ.get(API_KEY_ENV), cfg.generator, cfg.trainer.timeouts
    if not token:
        raise ConfigError(
            f"generator.run_engines_locally=false: set the environment variable {API_KEY_ENV} to the servers' token."
        )
    deadline_s = timeouts.rollout_s + timeouts.weight_sync_s
    connection = Connection(url, token, name=url)
    if await is_skyrl_server(connection, timeouts.engine_start_s):
        return await RemoteEngine(url, token, name=url, deadline_s=deadline_s).connect(timeouts.engine_start_s)
    if generator.backend not in _NATIVE_SERVERS:
        raise ConfigError(
            f"generator.remote_inference_engine_urls: the server at {url} is not skyrl_train.entrypoints.serve. For "
            f"servers of vLLM or SGLang set generator.backend to vllm or sglang; it is {generator.backend!r}."
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


def engine_generator_config(cfg: Config, cache_limit: CacheLimit | None = None) -> GeneratorConfig:
    """Return the `generator` section, extended for the run's own engines.

    Adds the size of the KV cache, keeps_routing for trainer.moe_routing_replay=rollout and, for vLLM engines that
    receive the policy's adapter, max_lora_rank. Values in generator.engine_init_kwargs take precedence.
    """
    generator, rank = cfg.generator, cfg.trainer.policy.model.lora.rank
    if cache_limit is not None:
        size = {"vllm": ("kv_cache_memory_bytes", cache_limit.size), "sglang": ("max_total_tokens", cache_limit.tokens)}
        cache = dict([size[generator.backend]])
        generator = replace(generator, engine_init_kwargs=cache | generator.engine_init_kwargs)
    if cfg.trainer.moe_routing_replay == "rollout":
        generator = replace(generator, engine_init_kwargs={"keeps_routing": True} | generator.engine_init_kwargs)
    max_lora_rank = next((accepted for accepted in _VLLM_LORA_RANKS if accepted >= rank), None)
    if generator.backend != "vllm" or max_lora_rank is None or not prefers_adapter_sync(cfg):
        return generator
    return replace(generator, engine_init_kwargs={"max_lora_rank": max_lora_rank} | generator.engine_init_kwargs)


def server_urls(generator: GeneratorConfig) -> list[str]:
    """Return the URLs of the engines for generator.run_engines_locally=false."""
    return list(generator.external_server_urls or generator.remote_inference_engine_urls)


def engine_kwargs(generator: GeneratorConfig, device: str, name: str) -> dict[str, Any]:
    """Return the constructor arguments of an engine.

    Args:
        generator: The settings of the engines; its engine_init_kwargs take precedence.
        device: "cuda" or "cpu".
        name: The engine's name in messages.
    """
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
    if generator.backend == "vllm" and (drafts := get_speculative_config(generator)) is not None:
        common["speculative_config"] = drafts
    return common | generator.engine_init_kwargs


def build_client(engines: Sequence[Any], generator: GeneratorConfig, timeouts: TimeoutsConfig) -> EngineClient:
    """Return one client for all engines.

    The client sends each of the run's own engines at most twice as many calls as its batch holds.

    Args:
        engines: The started engines.
        generator: The settings of the engines and of sampling.
        timeouts: Deadlines. A call may take at most rollout_s.

    Raises:
        UnsupportedParameter: An engine does not support a configured sampling parameter.
    """
    for key in ("sampling_params", "eval_sampling_params"):
        sampling = parse_sampling_params(getattr(generator, key), f"generator.{key}")
        for engine in engines:
            check_supported(sampling, engine.capabilities)
    max_num_seqs = generator.engine_init_kwargs.get("max_num_seqs", generator.max_num_seqs)
    # The batch size of servers that run elsewhere is unknown.
    max_calls = 2 * int(max_num_seqs) if generator.run_engines_locally else None
    return EngineClient(engines, deadline_s=timeouts.rollout_s, max_calls=max_calls)


# -- engines that are started while the run trains


class EngineLauncher:
    """Starts, restarts and stops the engines of a run.

    The first engines run on slots of the run's placement. Engines that are added later get placement groups of their
    own. Engines that run elsewhere have no slots; the launcher connects to them.
    """

    def __init__(self, cfg: Config, cluster: Cluster, placement: RunPlacement, cache_limit: CacheLimit | None = None):
        """Create the launcher.

        Args:
            cfg: The configuration.
            cluster: The cluster.
            placement: The slots of every role.
            cache_limit: Size of the engines' KV caches; None for what fits into their share of the accelerators.
        """
        self._cfg = cfg
        self._cache_limit = cache_limit
        self._cluster = cluster
        self._num_slots = placement.num_slots
        self._initial = placement.engines
        self._added: dict[int, RolePlacement] = {}

    async def start_all(self) -> Sequence[Any]:
        """Start the run's own engines on their slots, or connect to engines that run elsewhere.

        Returns:
            The engines, ready for requests, in order of their index.

        Raises:
            ConfigError: An engine cannot be started or connected to as configured.
            EngineError: The start of an engine failed.
            DeadlineExceeded: An engine was not ready within timeouts.engine_start_s.
        """
        cfg, generator = self._cfg, engine_generator_config(self._cfg, self._cache_limit)
        if self._initial is None:
            return await gather_all(connect_engine(url, cfg) for url in server_urls(generator))
        return await build_engines(self._cluster, generator, cfg.trainer.timeouts, self._initial, cfg.device)

    async def restart(self, name: str, wait_for_node: bool) -> Any:
        """Start a dead engine again on its slots, which Ray moves to another node if theirs was lost.

        Reconnects if the engine runs elsewhere. Tries twice, because Ray may detect a lost node only during the first
        start.

        Args:
            name: The engine's name.
            wait_for_node: True to wait up to timeouts.placement_s for the slots to be moved; False to fail at once.

        Raises:
            InsufficientResources: No node has room for the slots.
        """
        if self._initial is None:
            return await connect_engine(name, self._cfg)  # restarting a server is up to its operator
        role_placement, member_index = self._placement_of(name)
        indices = _slot_indices(engine_index(name), role_placement, member_index)
        wait_s = self._cfg.trainer.timeouts.placement_s if wait_for_node else 0.0
        if not self._cluster.is_single_node:
            await wait_for_rescheduling(role_placement.pool, indices, wait_s)
        try:
            return await self._build(name)
        except ClusterLost:
            await wait_for_rescheduling(role_placement.pool, indices, wait_s)
        return await self._build(name)

    async def start(self, name: str) -> ActorProxy:
        """Reserve slots for an additional engine if it needs them, and start it. Releases them if the start fails.

        Raises:
            ConfigError: The cluster has no room.
        """
        assert self._initial is not None, "engines that run elsewhere are not started"
        index = engine_index(name)
        if index >= self._initial.count:
            trainer = self._cfg.trainer
            pool = await reserve_additional_pool(
                self._cluster,
                self._initial.pool,
                count=self._initial.slots_per_member,
                total_slots=self._num_slots + (len(self._added) + 1) * self._initial.slots_per_member,
                deadline_s=trainer.timeouts.placement_s,
                labels=trainer.placement.engine_node_labels,
                reserved_cpus=environment_host_cpus(self._cfg, RunComponents()),
            )
            self._added[index] = replace(self._initial, pool=pool)
        try:
            return await self._build(name)
        except BaseException:
            self._release_slots(name)
            raise

    async def stop(self, name: str, engine: ActorProxy) -> None:
        """Close an engine, kill its process and release the slots that were reserved for it alone.

        Waits at most 10 s for the engine to clean up. Slots with which the run began remain reserved.
        """
        try:
            with suppress(SkyRLError, ConnectionError):
                await engine.call_with_deadline(_CLOSE_TIMEOUT_S, "close")
        finally:
            engine.kill()
            self._release_slots(name)

    async def _build(self, name: str) -> ActorProxy:
        cfg, (role_placement, member_index) = self._cfg, self._placement_of(name)
        generator, timeouts = engine_generator_config(cfg, self._cache_limit), cfg.trainer.timeouts
        return await build_engine(
            engine_index(name),
            self._cluster,
            generator,
            timeouts,
            role_placement,
            cfg.device,
            member_index=member_index,
        )

    def _placement_of(self, name: str) -> tuple[RolePlacement, int | None]:
        """Return the slots that an engine runs on and its position among them: see build_engine."""
        added = self._added.get(engine_index(name))
        if added is not None:
            return added, 0
        assert self._initial is not None
        return self._initial, None

    def _release_slots(self, name: str) -> None:
        added = self._added.pop(engine_index(name), None)
        if added is not None:
            self._cluster.release_placement_group(added.pool.placement_group)


def init_target_file(cfg: Config, folder: Path) -> None:
    """Write the number of engines to engines.json in the run's folder, where `skyrl-train engines` can change it.

    Overwrites the number of an earlier run. Deletes the file if the number cannot change.
    """
    if engine_count_fixed_reason(cfg) is None:
        write_target(folder, cfg.generator.num_inference_engines)
    else:
        (folder / ENGINES_FILE).unlink(missing_ok=True)


def engine_count_fixed_reason(cfg: Config) -> str | None:
    """Return why the number of engines cannot change and what to do about it; None if it can change."""
    return fixed_count_reason(
        colocate_all=cfg.trainer.placement.colocate_all, run_engines_locally=cfg.generator.run_engines_locally
    )


# -- over HTTP


def build_endpoint(cfg: Config, engine: Any, tokenizer: Any, *, control: bool) -> HttpEndpoint:
    """Return the HTTP endpoint of an engine or a client. Enter it on the event loop that they run on.

    The token comes from the environment variable SKYRL_API_KEY, never from the configuration, which is saved and
    printed.

    Args:
        cfg: The configuration; generator.http_endpoint_* name host and port.
        engine: The engine or client to serve.
        tokenizer: The policy's tokenizer.
        control: True if requests with the token may also pause engines and change their weights.

    Raises:
        ConfigError: Other machines can reach the host, and there is no token.
    """
    generator = cfg.generator
    return HttpEndpoint(
        engine,
        tokenizer,
        model_name=generator.served_model_name or generator.model_name,
        host=generator.http_endpoint_host,
        port=generator.http_endpoint_port,
        token=os.environ.get(API_KEY_ENV),
        deadline_s=cfg.trainer.timeouts.rollout_s,
        default_max_tokens=generator.sampling_params.max_generate_length,
        chat_template_kwargs=dict(generator.chat_template_kwargs),
        control=control,
    )


def check_endpoint(cfg: Config) -> None:
    """Check the address of the HTTP endpoint before the engines start, which takes minutes. Does nothing if it is off.

    Raises:
        ConfigError: The address is in use, or other machines can reach it and there is no token.
    """
    generator = cfg.generator
    if generator.enable_http_endpoint:
        ENDPOINT_LISTENER.check_token(os.environ.get(API_KEY_ENV), generator.http_endpoint_host)
        ENDPOINT_LISTENER.check_address(generator.http_endpoint_host, generator.http_endpoint_port)


def print_endpoint(endpoint: HttpEndpoint) -> None:
    """Print one line with the endpoint's address and where to find the token, never the token itself."""
    token = f"in {endpoint.token_file}" if endpoint.token_file else f"the value of {API_KEY_ENV}"
    print(f"Serving {endpoint.model_name} at {endpoint.url}/v1; the token is {token}.", flush=True)


@asynccontextmanager
async def run_endpoint(cfg: Config, client: EngineClient, tokenizer: Any) -> AsyncIterator[None]:
    """Serve the run's engines over HTTP, for sampling only, while the body runs. Does nothing if that is off.

    Args:
        cfg: The configuration; generator.enable_http_endpoint turns it on.
        client: Client of the engines.
        tokenizer: Tokenizer for OpenAI's routes.

    Raises:
        ConfigError: The server cannot listen at the configured address, or the token is missing or invalid.
    """
    if not cfg.generator.enable_http_endpoint:
        yield
        return
    async with build_endpoint(cfg, client, tokenizer, control=False) as endpoint:
        print_endpoint(endpoint)
        yield


@asynccontextmanager
async def serve_engines(
    cfg: Config, cluster: Cluster, tokenizer: Any, build_client: Callable[[Sequence[Any]], EngineClient]
) -> AsyncIterator[EngineClient]:
    """Start the cluster, the engines and their endpoint without a trainer; yield the client of the engines.

    A single engine is served directly, so that a trainer elsewhere can send it weights. Several engines are served
    through their client, without the routes for a single engine.

    Args:
        cfg: The configuration.
        cluster: The cluster, which is connected while the body runs.
        tokenizer: The policy's tokenizer.
        build_client: Returns the client of the started engines.

    Raises:
        ConfigError: The backend is not installed, the address cannot be used, or the cluster has too few resources.
    """
    trainer, generator = cfg.trainer, cfg.generator
    check_endpoint(cfg)
    require_installed(generator.backend)
    with cluster:
        placement, deadline_s = trainer.placement, trainer.timeouts.placement_s
        counts = count_slots(placement, generator, with_policy=False)
        run_placement = reserve_slots(cluster, counts, placement, generator, device=cfg.device, deadline_s=deadline_s)
        assert run_placement.engines is not None
        engines = await build_engines(cluster, generator, trainer.timeouts, run_placement.engines, cfg.device)
        client = build_client(engines)
        served = engines[0] if len(engines) == 1 else client
        async with build_endpoint(cfg, served, tokenizer, control=True) as endpoint:
            print_endpoint(endpoint)
            yield client


async def wait_until_all_dead(client: EngineClient, poll_interval_s: float = _POLL_INTERVAL_S) -> NoReturn:
    """Wait until every engine is dead, then raise EnginesLost with the causes.

    An engine that hangs counts as dead after rollout_s.

    Args:
        client: The client of the engines.
        poll_interval_s: Seconds between health checks.
    """
    while client.engines:
        await asyncio.sleep(poll_interval_s)
        with suppress(SkyRLError):  # the client records which engines died, and why
            await client.health()
    causes = "; ".join(f"{name}: {reason}" for name, reason in client.dead_engines.items())
    raise EnginesLost(f"No engine is alive, so nothing can be served. {causes}")
