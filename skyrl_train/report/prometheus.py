"""Metrics in Prometheus's format, and the server of GET /metrics. No other module imports Prometheus's library.

Every run and every HTTP endpoint has its own registry, so that several in one process do not mix. The library's global
registry is not used. The server has a thread of its own in the run's driver.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import cache

import psutil
from aiohttp import hdrs, web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from skyrl_train.http_server import HttpServer, is_loopback_name, send
from skyrl_train.listeners import API_KEY_ENV, Listener, is_authorized, is_loopback
from skyrl_train.report.metric_catalog import DEPRECATED_NAMES, metric_of, names_to_write
from skyrl_train.report.progress_log import print_status
from skyrl_train.report.protocol import SampleRow, TrackerSetup

CONTENT_TYPE = CONTENT_TYPE_LATEST
_STEP, _TOTAL_STEPS, _RSS = "run/step", "run/total_steps", "process/resident_memory_bytes"
_OWN = {
    _STEP: "last finished step (steps)",
    _TOTAL_STEPS: "steps of the whole run; 0 for an evaluation (steps)",
    _RSS: "memory of the run's driver (bytes)",
}
"""Metrics that only Prometheus has -> their help."""
_OTHER = "skyrl_other"
_NAMES = (
    (re.compile(r"eval/(?P<source>.+)/(?P<metric>[a-z0-9_]+)", re.DOTALL), "skyrl_eval_{metric}"),
    (re.compile(r"rollouts/failed/(?P<kind>.+)", re.DOTALL), "skyrl_rollouts_failed_by_kind"),
    (
        re.compile(r"(?!eval/|rollouts/failed_by_kind)(?P<family>[a-z0-9]+)/(?P<metric>[a-z0-9_]+)"),
        "skyrl_{family}_{metric}",
    ),
    (re.compile(r"(?P<name>.*)", re.DOTALL), _OTHER),
)
"""Pattern of a metric's name -> template of its Prometheus name.

No two metrics get the same Prometheus name with the same labels.
"""
_LABELS = ("source", "kind", "name")
_REQUESTS_IN_PROGRESS = "skyrl_http_requests_in_progress"
_BUCKET_BOUNDS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Bounds of the histogram's buckets in seconds, for requests from a health check to a whole episode."""


@cache
def prometheus_name(metric: str) -> tuple[str, Mapping[str, str]]:
    """Return (name, labels) of a metric in Prometheus.

    `reward/mean` becomes `skyrl_reward_mean`. Data sources of `eval/*` and kinds of `rollouts/failed/*` become labels.
    Any other name that is not two parts of lower-case letters, digits and underscores with a slash between them becomes
    the label `name` of `skyrl_other`.
    """
    matches = ((pattern.fullmatch(metric), template) for pattern, template in _NAMES)
    parts, template = next((match.groupdict(), template) for match, template in matches if match)
    return template.format(**parts), {label: parts[label] for label in _LABELS if label in parts}


@cache
def _help_of(metric: str) -> str:
    """Return the description of a metric with its unit."""
    if metric in _OWN:
        return _OWN[metric]
    if metric in DEPRECATED_NAMES:
        current = DEPRECATED_NAMES[metric]
        name = prometheus_name(current)[0] if "/" in current else current
        return f"deprecated name of {name}, removed in the next release"
    if prometheus_name(metric)[0] == _OTHER:
        return "metrics whose names Prometheus does not accept; the label `name` holds them"
    known = metric_of(metric)
    return f"{known.description} ({known.unit})" if known else "metric of the run's own code"


class _LatestMetrics(Collector):
    """A collector of the newest value of every metric."""

    def __init__(self) -> None:
        self.values: Mapping[str, float] = {}
        """Newest value by metric. Assign a new mapping instead of changing it, because another thread reads it."""
        self._process = psutil.Process()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in {**self.values, _RSS: self._process.memory_info().rss}.items():
            name, labels = prometheus_name(metric)
            family = families.setdefault(name, GaugeMetricFamily(name, _help_of(metric), labels=list(labels)))
            family.add_metric(list(labels.values()), value)
        yield from families.values()


class PrometheusTracker:
    """A tracker that serves the newest value of every metric at `trainer.metrics_host` and `trainer.metrics_port`."""

    def __init__(self, setup: TrackerSetup):
        """Start the server, which runs until `close`, and print its address.

        Raises:
            ConfigError: If the address is in use, or other machines can reach it and SKYRL_API_KEY holds no token.
        """
        self._latest = _LatestMetrics()
        registry = CollectorRegistry()
        registry.register(self._latest)
        trainer = setup.config["trainer"]
        host, port = trainer["metrics_host"], trainer["metrics_port"]
        self._server = MetricsServer(host, port, lambda: generate_latest(registry), CONTENT_TYPE)
        self.url = self._server.url
        print_status("metrics", self.url)

    def begin(self, step: int, total_steps: int) -> None:
        """Drop the metrics of an earlier attempt, and serve `step` and `total_steps`."""
        self._latest.values = {_STEP: step, _TOTAL_STEPS: total_steps}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Replace the served values by those of a step. Metrics that the step lacks keep their last value."""
        values = {name: float(value) for name, value in metrics.items() if name not in _OWN}
        self._latest.values = {**self._latest.values, **values, _STEP: step}

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Do nothing: Prometheus stores numbers only."""

    def close(self) -> None:
        """Stop the server and free its port."""
        self._server.close()


class RequestMetrics:
    """Counters of an HTTP endpoint: requests, latencies and tokens. Not thread-safe: use it in one event loop only."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("skyrl_http_requests", "answered requests", ["route", "status"], registry=registry)
        self._in_progress = [
            Gauge(
                name,
                "requests without an answer" if name == _REQUESTS_IN_PROGRESS else _help_of(name),
                ["route"],
                registry=registry,
            )
            for name in names_to_write(_REQUESTS_IN_PROGRESS)
        ]
        self._seconds = Histogram(
            "skyrl_http_request_seconds",
            "time from a request to its answer (s)",
            ["route"],
            buckets=_BUCKET_BOUNDS_S,
            registry=registry,
        )
        self._prompt = Counter(
            "skyrl_http_prompt_tokens", "prompt tokens; a prompt with n samples counts once", registry=registry
        )
        self._completion = Counter("skyrl_http_completion_tokens", "tokens sampled for requests", registry=registry)
        self._engine = Gauge("skyrl_engine_requests", "requests in all engines", ["state"], registry=registry)

    def on_request_start(self, route: str) -> None:
        """Count a request to `route` as in progress. Every call needs a later `on_request_end`."""
        for gauge in self._in_progress:
            gauge.labels(route).inc()

    def on_request_end(self, route: str, status: int, seconds: float) -> None:
        """Count a request to `route` as answered with HTTP `status`, `seconds` after it arrived."""
        for gauge in self._in_progress:
            gauge.labels(route).dec()
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def count_prompt_tokens(self, prompt_tokens: int) -> None:
        """Add to the number of prompt tokens received."""
        self._prompt.inc(prompt_tokens)

    def count_completion_tokens(self, completion_tokens: int) -> None:
        """Add to the number of tokens sampled for requests."""
        self._completion.inc(completion_tokens)

    def text(self, **requests_by_state: int) -> bytes:
        """Return all counters in Prometheus's text format.

        Args:
            requests_by_state: Requests in all engines by state, such as `running=3, waiting=0`. Replaces the states of
                the last call; pass nothing if the engines do not report them.
        """
        self._engine.clear()
        for state, requests in requests_by_state.items():
            self._engine.labels(state).set(requests)
        return generate_latest(self._registry)


# -- the server --------------------------------------------------------------------------------------------------------

METRICS_LISTENER = Listener("/metrics of the run", "trainer.metrics_host", "trainer.metrics_port")
PATH = "/metrics"
MAX_CONNECTIONS = 64
"""Maximum number of concurrent connections. Each takes a file descriptor of the run's driver."""
_log = logging.getLogger(__name__)


def check_metrics_address(host: str, port: int | None) -> None:
    """Check that the metrics server can listen at an address.

    Args:
        host: Value of `trainer.metrics_host`.
        port: Value of `trainer.metrics_port`. None, which means no server, passes.

    Raises:
        ConfigError: If the port is in use, or other machines can reach the host and SKYRL_API_KEY holds no token.
    """
    if port is not None:
        _token_for(host)
        METRICS_LISTENER.check_address(host, port)


class MetricsServer:
    """An HTTP server, in a thread of its own, for GET /metrics.

    On a loopback address, every user of this machine may read the metrics; the Host header must name this machine, so
    that pages of other sites cannot. On any other address, clients must send the token of SKYRL_API_KEY.
    """

    def __init__(self, host: str, port: int, text: Callable[[], bytes], content_type: str):
        """Start the server.

        Args:
            host: Address to listen at.
            port: Port to listen at; 0 takes a free one. `url` has the address in use.
            text: Function that returns the body of an answer. It is called for every request, in the server's thread.
            content_type: Content type of the answers.

        Raises:
            ConfigError: If the port is in use, or other machines can reach the host and SKYRL_API_KEY holds no token.
        """
        self._token = _token_for(host)
        self._text, self._content_type = text, content_type
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(PATH, self._metrics)
        self._server = HttpServer(app, drain_s=0.0, max_connections=MAX_CONNECTIONS)
        opened: Future[asyncio.AbstractEventLoop] = Future()
        self._closing = asyncio.Event()
        serve = self._serve(host, port, opened)
        self._thread = threading.Thread(target=asyncio.run, args=(serve,), name="metrics server", daemon=True)
        self._thread.start()
        try:
            self._loop = opened.result()
        except OSError as error:
            self._thread.join()
            raise METRICS_LISTENER.address_error(host, port, error) from error
        self.url = self._server.url + PATH

    def close(self) -> None:
        """Close all connections and wait until the port is free. A second call does nothing."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._closing.set)
            self._thread.join()

    async def _serve(self, host: str, port: int, opened: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            await self._server.listen(host, port)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(asyncio.get_running_loop())
        await self._closing.wait()
        await self._server.close()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            response = _answer(error.status, f"{error.reason}: this server answers GET {PATH} only.")
        except Exception:
            _log.info("GET %s failed", PATH, exc_info=True)
            response = _answer(500, "The metrics could not be read; see the run's log.")
        await send(request, response)
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self._token is None:
            if is_loopback_name(request.headers.get(hdrs.HOST, "")):
                return None
            return _answer(403, "Use http://127.0.0.1 or http://localhost: other host names are refused.")
        if is_authorized(request.headers.get(hdrs.AUTHORIZATION, ""), self._token):
            return None
        return _answer(401, f"Send the header 'Authorization: Bearer <token>' with the token of {API_KEY_ENV}.")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._text(), headers={hdrs.CONTENT_TYPE: self._content_type})


def _answer(status: int, text: str) -> web.Response:
    headers = {hdrs.WWW_AUTHENTICATE: "Bearer"} if status == 401 else {}
    return web.Response(status=status, text=f"{text}\n", content_type="text/plain", headers=headers)


def _token_for(host: str) -> str | None:
    """Return the token that clients must send; None on loopback, where every user of this machine may read.

    Raises ConfigError for any other host if SKYRL_API_KEY holds no token.
    """
    if is_loopback(host):
        return None
    token = os.environ.get(API_KEY_ENV)
    METRICS_LISTENER.check_token(token, host)
    return token
