"""Engines behind HTTP: the endpoint of a run, and serving without a trainer."""

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
from skyrl_train.engines.http.server import ENDPOINT, HttpEndpoint
from skyrl_train.errors import EnginesLost, SkyRLError
from skyrl_train.listening import API_KEY

_POLL_S = 5.0
"""Seconds between health checks of engines that serve without a trainer."""


def build_endpoint(cfg: Config, engine: Any, tokenizer: Any, *, control: bool) -> HttpEndpoint:
    """The endpoint for an engine or a client; enter it on the event loop that they run on.

    `control`: whether requests with the token may also pause engines and change their weights. The token comes from
    SKYRL_API_KEY in the environment, never from the configuration, which is saved and printed. Raises ConfigError for a
    host that other machines can reach without a token.
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
    """Raises ConfigError for an address that needs a token and has none, or that is in use.

    To be called before the engines start, which takes minutes.
    """
    generator = cfg.generator
    if generator.enable_http_endpoint:
        ENDPOINT.check_token(os.environ.get(API_KEY), generator.http_endpoint_host)
        ENDPOINT.check_address(generator.http_endpoint_host, generator.http_endpoint_port)


def announce(endpoint: HttpEndpoint) -> None:
    """Print one line with the address and the place of the token, never the token itself."""
    token = f"in {endpoint.token_file}" if endpoint.token_file else f"that of {API_KEY}"
    print(f"Serving {endpoint.model_name} at {endpoint.url}/v1; the token is {token}.", flush=True)


@asynccontextmanager
async def endpoint_of_run(cfg: Config, client: EngineClient, tokenizer: Any) -> AsyncIterator[None]:
    """Serve the run's engines over HTTP, for sampling only, while inside; does nothing unless it is configured."""
    if not cfg.generator.enable_http_endpoint:
        yield
        return
    async with build_endpoint(cfg, client, tokenizer, control=False) as endpoint:
        announce(endpoint)
        yield


@asynccontextmanager
async def serving(
    cfg: Config, cluster: Cluster, tokenizer: Any, build_client: Callable[[Sequence[Any]], EngineClient]
) -> AsyncIterator[EngineClient]:
    """Start the cluster, the engines and their endpoint, without a trainer; yields the client of the engines.

    A single engine is served directly, so that a trainer elsewhere can send it weights. Several engines are served
    through their client, without the routes for a single engine.
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
        client = build_client(engines)
        served = engines[0] if len(engines) == 1 else client
        async with build_endpoint(cfg, served, tokenizer, control=True) as endpoint:
            announce(endpoint)
            yield client


async def until_none_lives(client: EngineClient, poll_s: float = _POLL_S) -> NoReturn:
    """Wait until every engine is dead, then raise EnginesLost with the causes.

    An engine that hangs counts as dead after rollout_s.
    """
    while client.engines:
        await asyncio.sleep(poll_s)
        with suppress(SkyRLError):  # the client records which engines died, and why
            await client.health()
    causes = "; ".join(f"{name}: {reason}" for name, reason in client.dead.items())
    raise EnginesLost(f"No engine is alive, so nothing is served any more. {causes}")
