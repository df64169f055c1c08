"""Engines behind HTTP: the endpoint of a run, and engines that do nothing but serve."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

from skyrl_train.assembly.engines import build_engines, require_installed
from skyrl_train.assembly.layout import place
from skyrl_train.cluster.runtime import Cluster
from skyrl_train.config.schema import Config
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.server import HttpEndpoint, check_address, checked_token
from skyrl_train.engines.http.wire import API_KEY
from skyrl_train.errors import EnginesLost, SkyRLError

_POLL_S = 5.0
"""How often engines that only serve are asked whether they are alive."""


def build_endpoint(cfg: Config, engine: Any, tokenizer: Any, *, control: bool) -> HttpEndpoint:
    """The endpoint over an engine or a client, to be entered on the loop that they run on.

    `control`: whether who holds the token may also pause engines and change their weights. The token is the
    environment's SKYRL_API_KEY, never a key of the configuration, which is saved and shown. Raises ConfigError for a
    host that other machines can reach without one.
    """
    generator = cfg.generator
    return HttpEndpoint(
        engine,
        tokenizer,
        model_name=generator.served_model_name or generator.model_name,
        host=generator.http_endpoint_host,
        port=generator.http_endpoint_port,
        token=os.environ.get(API_KEY),
        deadline_s=cfg.trainer.timeouts.rollout_s,
        default_max_tokens=generator.sampling_params.max_generate_length,
        chat_template_kwargs=dict(generator.chat_template_kwargs),
        control=control,
    )


def check_endpoint(cfg: Config) -> None:
    """Raises ConfigError for an address that needs a token and has none, or is taken: before engines take minutes to
    start."""
    generator = cfg.generator
    if generator.enable_http_endpoint:
        checked_token(os.environ.get(API_KEY), generator.http_endpoint_host)
        check_address(generator.http_endpoint_host, generator.http_endpoint_port)


def announce(endpoint: HttpEndpoint) -> None:
    """One line that says where, and where the token is: never the token itself."""
    token = f"in {endpoint.token_file}" if endpoint.token_file else f"that of {API_KEY}"
    print(f"Serving {endpoint.model_name} at {endpoint.url}/v1; the token is {token}.", flush=True)


@asynccontextmanager
async def endpoint_of_run(cfg: Config, client: EngineClient, tokenizer: Any) -> AsyncIterator[None]:
    """The run's engines over HTTP, for sampling only, as long as it lasts; nothing unless the configuration asks."""
    if not cfg.generator.enable_http_endpoint:
        yield
        return
    async with build_endpoint(cfg, client, tokenizer, control=False) as endpoint:
        announce(endpoint)
        yield


@asynccontextmanager
async def serving(
    cfg: Config, cluster: Cluster, tokenizer: Any, get_client: Callable[[Sequence[Any]], EngineClient]
) -> AsyncIterator[EngineClient]:
    """Cluster, engines and the endpoint over them, without a trainer; yields the client of the engines.

    One engine is served itself, so that a trainer elsewhere can send it weights; several are served as one, without
    the routes that concern a single engine.
    """
    trainer, generator = cfg.trainer, cfg.generator
    check_endpoint(cfg)
    require_installed(generator.backend)
    with cluster:
        layout = place(
            cluster,
            trainer.placement,
            generator,
            device=cfg.device,
            deadline_s=trainer.timeouts.placement_s,
            with_policy=False,
        )
        assert layout.engines is not None
        engines = await build_engines(cluster, generator, trainer.timeouts, layout.engines, cfg.device)
        client = get_client(engines)
        served = engines[0] if len(engines) == 1 else client
        async with build_endpoint(cfg, served, tokenizer, control=True) as endpoint:
            announce(endpoint)
            yield client


async def until_none_lives(client: EngineClient, poll_s: float = _POLL_S) -> NoReturn:
    """Raises EnginesLost with the causes once every engine is dead; an engine that hangs is after rollout_s."""
    while client.engines:
        await asyncio.sleep(poll_s)
        with suppress(SkyRLError):  # the client notes who died, and why
            await client.health()
    causes = "; ".join(f"{name}: {reason}" for name, reason in client.dead.items())
    raise EnginesLost(f"No engine is alive, so nothing is served any more. {causes}")
