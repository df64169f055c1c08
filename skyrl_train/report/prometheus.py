"""Numbers as Prometheus reads them, and GET /metrics for a scraper. No other module imports Prometheus's library.

A run and an HTTP endpoint each have a registry of their own, so several in a process do not meet; the library's global
one is not touched. The server runs in a thread of the run's driver that costs no more whatever clients do.
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
from skyrl_train.report.metric_catalog import metric_of
from skyrl_train.report.progress_log import print_status
from skyrl_train.report.protocol import SampleRow, TrackerSetup

CONTENT_TYPE = CONTENT_TYPE_LATEST
_STEP, _TOTAL_STEPS, _RSS = "run/step", "run/total_steps", "process/resident_memory_bytes"
_OWN = {
    _STEP: "the last finished step (steps)",
    _TOTAL_STEPS: "steps of the whole run; 0: an evaluation (steps)",
    _RSS: "memory of the run's driver (bytes)",
}
"""What only a scraper is told -> help."""
_OTHER = "skyrl_other"
_NAMES = (
    (re.compile(r"eval/(?P<source>.+)/(?P<what>[a-z0-9_]+)", re.DOTALL), "skyrl_eval_{what}"),
    (re.compile(r"rollouts/failed/(?P<kind>.+)", re.DOTALL), "skyrl_rollouts_failed_by_kind"),
    (re.compile(r"(?!eval/|rollouts/failed_by_kind)(?P<of>[a-z0-9]+)/(?P<what>[a-z0-9_]+)"), "skyrl_{of}_{what}"),
    (re.compile(r"(?P<name>.*)", re.DOTALL), _OTHER),
)
"""Forms of a metric's name -> the one for Prometheus. No two metrics become the same one with the same labels."""
_LABELS = ("source", "kind", "name")
_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
"""Bounds of the histogram: from a health check to an episode."""


@cache
def prometheus_name(metric: str) -> tuple[str, Mapping[str, str]]:
    """The name and the labels of a metric: reward/mean is skyrl_reward_mean; sources of evaluations are labels.

    A name that is not two parts of lower-case letters, digits and underscores is a label of `skyrl_other`.
    """
    matches = ((pattern.fullmatch(metric), template) for pattern, template in _NAMES)
    words, template = next((found.groupdict(), template) for found, template in matches if found)
    return template.format(**words), {label: words[label] for label in _LABELS if label in words}


@cache
def _help_of(metric: str) -> str:
    """What the metric is, and its unit."""
    if metric in _OWN:
        return _OWN[metric]
    if prometheus_name(metric)[0] == _OTHER:
        return "numbers whose names Prometheus does not take: the label has them"
    known = metric_of(metric)
    return f"{known.description} ({known.unit})" if known else "a number of the run's own code"


class _LatestMetrics(Collector):
    """The newest value of every metric."""

    def __init__(self) -> None:
        self.values: Mapping[str, float] = {}
        """Replaced as a whole, since another thread reads it."""
        self._process = psutil.Process()

    def collect(self) -> Iterator[GaugeMetricFamily]:
        families: dict[str, GaugeMetricFamily] = {}
        for metric, value in {**self.values, _RSS: self._process.memory_info().rss}.items():
            name, labels = prometheus_name(metric)
            family = families.setdefault(name, GaugeMetricFamily(name, _help_of(metric), labels=list(labels)))
            family.add_metric(list(labels.values()), value)
        yield from families.values()


class PrometheusTracker:
    """Serves the newest value of every number at trainer.metrics_host and metrics_port, until the run ends.

    Raises ConfigError for an address that is in use, or that others can reach without a token.
    """

    def __init__(self, setup: TrackerSetup):
        self._numbers = _LatestMetrics()
        registry = CollectorRegistry()
        registry.register(self._numbers)
        trainer = setup.config["trainer"]
        host, port = trainer["metrics_host"], trainer["metrics_port"]
        self._server = MetricsServer(host, port, lambda: generate_latest(registry), CONTENT_TYPE)
        self.url = self._server.url
        print_status("metrics", self.url)

    def begin(self, step: int, total_steps: int) -> None:
        self._numbers.values = {_STEP: step, _TOTAL_STEPS: total_steps}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        news = {name: float(value) for name, value in metrics.items() if name not in _OWN}
        self._numbers.values = {**self._numbers.values, **news, _STEP: step}

    def samples(self, rows: Sequence[SampleRow], step: int) -> None:
        """Does nothing: completions are in samples.jsonl."""

    def close(self) -> None:
        self._server.close()


class RequestMetrics:
    """What an HTTP endpoint counts. For one event loop: nothing else may call it."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self._requests = Counter("skyrl_http_requests", "answered requests", ["route", "status"], registry=registry)
        self._in_progress = Gauge(
            "skyrl_http_requests_under_way", "requests without an answer", ["route"], registry=registry
        )
        self._seconds = Histogram(
            "skyrl_http_request_seconds", "from request to answer (s)", ["route"], buckets=_SECONDS, registry=registry
        )
        self._prompt = Counter("skyrl_http_prompt_tokens", "tokens of prompts, once for n samples", registry=registry)
        self._completion = Counter("skyrl_http_completion_tokens", "tokens sampled for requests", registry=registry)
        self._engine = Gauge("skyrl_engine_requests", "requests in all engines", ["state"], registry=registry)

    def on_request_start(self, route: str) -> None:
        self._in_progress.labels(route).inc()

    def on_request_end(self, route: str, status: int, seconds: float) -> None:
        self._in_progress.labels(route).dec()
        self._requests.labels(route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def count_prompt_tokens(self, prompt_tokens: int) -> None:
        self._prompt.inc(prompt_tokens)

    def count_completion_tokens(self, completion_tokens: int) -> None:
        self._completion.inc(completion_tokens)

    def text(self, **engine: int) -> bytes:
        """All of it in Prometheus's text format. `engine`: running=..., waiting=..., where the engines tell."""
        self._engine.clear()
        for state, requests in engine.items():
            self._engine.labels(state).set(requests)
        return generate_latest(self._registry)


# -- the server --------------------------------------------------------------------------------------------------------

METRICS_LISTENER = Listener("/metrics of the run", "trainer.metrics_host", "trainer.metrics_port")
PATH = "/metrics"
MAX_CONNECTIONS = 64
"""At the same time: few scrape a run, which needs its descriptors itself."""
_log = logging.getLogger(__name__)


def check_metrics_address(host: str, port: int | None) -> None:
    """Raises ConfigError for an address that needs a token and has none, or that is in use; None listens nowhere."""
    if port is not None:
        _token_for(host)
        METRICS_LISTENER.check_address(host, port)


class MetricsServer:
    """Answers with `text()`, made anew each time. Port 0: any free one.

    On loopback everybody on this machine gets it, but not the pages of other sites: the request must name this machine.
    At an address that other machines reach, only those who send the token of SKYRL_API_KEY get it. Raises ConfigError
    as `check_metrics_address` does.
    """

    def __init__(self, host: str, port: int, text: Callable[[], bytes], content_type: str):
        self._token = _token_for(host)
        self._text, self._content_type = text, content_type
        app = web.Application(middlewares=[self._guard])
        app.router.add_get(PATH, self._metrics)
        self._server = HttpServer(app, drain_s=0.0, max_connections=MAX_CONNECTIONS)
        opened: Future[asyncio.AbstractEventLoop] = Future()
        self._ends = asyncio.Event()
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
        """End all connections; the port is free afterwards. Closing twice is harmless."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._ends.set)
            self._thread.join()

    async def _serve(self, host: str, port: int, opened: Future[asyncio.AbstractEventLoop]) -> None:
        try:
            await self._server.listen(host, port)
        except BaseException as error:
            opened.set_exception(error)
            return
        opened.set_result(asyncio.get_running_loop())
        await self._ends.wait()
        await self._server.close()

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        try:
            response = self._refusal(request) or await handler(request)
        except web.HTTPException as error:
            response = _answer(error.status, f"{error.reason}: there is GET {PATH}.")
        except Exception:
            _log.info("%s could not be answered", PATH, exc_info=True)
            response = _answer(500, "The numbers could not be read; the run's log says why.")
        await send(request, response)
        return response

    def _refusal(self, request: web.Request) -> web.Response | None:
        if self._token is None:
            if is_loopback_name(request.headers.get(hdrs.HOST, "")):
                return None
            return _answer(403, "Ask at 127.0.0.1 or localhost: other names may be another site's.")
        if is_authorized(request.headers.get(hdrs.AUTHORIZATION, ""), self._token):
            return None
        return _answer(401, f"Send the header 'Authorization: Bearer <token>' with the token of {API_KEY_ENV}.")

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._text(), headers={hdrs.CONTENT_TYPE: self._content_type})


def _answer(status: int, text: str) -> web.Response:
    headers = {hdrs.WWW_AUTHENTICATE: "Bearer"} if status == 401 else {}
    return web.Response(status=status, text=f"{text}\n", content_type="text/plain", headers=headers)


def _token_for(host: str) -> str | None:
    """None on loopback: whoever is on this machine may read. Raises ConfigError for other hosts without a token."""
    if is_loopback(host):
        return None
    token = os.environ.get(API_KEY_ENV)
    METRICS_LISTENER.check_token(token, host)
    return token
