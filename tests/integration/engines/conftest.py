"""A fixture for every kind of engine. One engine runs at a time, from its first test to its last."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from skyrl_train.engines.base import InferenceEngine
from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.http.native import NativeEngine
from skyrl_train.engines.http.native_servers import SGLangServer, VLLMServer
from skyrl_train.engines.http.remote import RemoteEngine
from skyrl_train.engines.http.server import HttpEndpoint
from skyrl_train.registry import load_object
from skyrl_train.testing.tiny_models import tiny_model
from skyrl_train.weight_sync.protocol import WEIGHT_ROUTES
from tests.support import vllm_v2
from tests.support.engine_harness import MAX_MODEL_LEN, MAX_NUM_SEQS, BackgroundLoop, EngineHarness, save_as_base_model
from tests.support.native_servers import TOKEN, NativeServerProcess
from tests.support.reference_sampler import Reference
from tests.support.vllm_async_scheduling import enable_async_scheduling

# Kinds are "transformers", "http-transformers" (behind HTTP), and "untied-transformers" (with an untied head).
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("skyrl_train.engines.transformers.engine:TransformersEngine", {"threads": 1}),
    "vllm": ("skyrl_train.engines.vllm.engine:VLLMEngine", {"threads": 1, "max_lora_rank": 8}),
    "sglang": ("skyrl_train.engines.sglang.engine:SGLangEngine", {"threads": 1}),
}
NATIVE = {"native-vllm": VLLMServer, "native-sglang": SGLangServer}
"""Engines behind vLLM's and SGLang's own servers."""
HYBRID = "hybrid-transformers"
"""A model with recurrent layers, whose states must be shared, kept and recomputed as keys and values are."""
OVERLAPPED = "overlapped-vllm"
"""vLLM with async scheduling, which is the default on accelerators."""
KINDS = [*(f"{layout}{engine}" for engine in ENGINES for layout in ("", "http-")), HYBRID, OVERLAPPED, *NATIVE]
UNTIED = ["untied-transformers", "untied-vllm", "untied-native-vllm", "untied-native-sglang"]
HEAD_STARTS = {"sglang": 0.4}
MOE = ["moe-transformers", "moe-vllm", "moe-sglang", "moe-native-vllm", "moe-native-sglang"]
"""Mixtures of experts, which every package shards differently. Only the test that weights arrive uses them. Their heads
are untied, because SGLang does not tie the head of a mixture of experts."""
_HEADS = ("untied", "moe")
V2_KINDS = ["vllm", OVERLAPPED, "untied-vllm", "moe-vllm"]
"""The only kinds in a process of vLLM's V2 model runner."""
if vllm_v2.is_requested():
    vllm_v2.enable()
_CI_ROUTES = {
    "http-transformers": "ipc",
    "vllm": "broadcast",
    "sglang": "ipc",
    "native-vllm": "checkpoint",
    "native-sglang": "broadcast",
}
"""The route on which every change tests an engine's failures."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize tests with engines, and tests with a `route` with the routes of each engine.

    Tests of weights also run with an untied head, because its list of tensors differs.
    """
    is_parametrized = any("started" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "started" not in metafunc.fixturenames or is_parametrized:
        return
    kinds = KINDS + (UNTIED if "weights" in metafunc.module.__name__ else [])
    if "wrappers" in metafunc.module.__name__:
        kinds = list(ENGINES)  # A wrapper treats the other kinds in the same way.
    tests_arrival = metafunc.function.__name__ == "test_engine_serves_new_weights_after_every_sync"
    kinds += MOE if tests_arrival else []
    routes = sorted(WEIGHT_ROUTES) if "route" in metafunc.fixturenames else [""]
    pairs = [(kind, route) for kind in kinds for route in routes if (kind[:5], route) != ("http-", "in_process")]
    tests_pending_steps = metafunc.function.__name__ == "test_pause_keep_continues_with_new_weights"
    pauses = "pauses" in metafunc.module.__name__
    marks = {
        pair: _marks(*pair, every_route=tests_arrival, overlapped=tests_pending_steps, pauses=pauses) for pair in pairs
    }
    # NativeEngine serves both kinds of servers with the same code: each tests a half of it in CI.
    if pauses:
        marks["native-sglang", ""].append(pytest.mark.on_demand)
    if "traffic" in metafunc.module.__name__:
        marks["native-vllm", ""].append(pytest.mark.on_demand)
    if vllm_v2.is_requested():
        pairs = [(kind, route) for kind, route in pairs if kind in V2_KINDS]
    if routes == [""]:
        params = [pytest.param(kind, marks=marks[kind, route]) for kind, route in pairs]
        metafunc.parametrize("started", params, indirect=True, scope="package")
    else:
        params = [pytest.param(kind, route, marks=marks[kind, route]) for kind, route in pairs]
        metafunc.parametrize(("started", "route"), params, indirect=["started"], scope="package")


def _marks(kind: str, route: str, *, every_route: bool, overlapped: bool, pauses: bool) -> list[pytest.MarkDecorator]:
    """Return the marks of a test with a kind of engine and a route. CI runs a subset that covers each of both.

    HTTP in front of vLLM and SGLang is the same code as in front of the transformers engine. Their own servers load an
    untied head and experts with the code of the embedded engines, and vLLM loads an untied head with each mixture of
    experts. Only the test that weights arrive depends on the head. All engines share the receiver that detects failures
    on a route, so each has one route for them in CI. vLLM with async scheduling runs the test that fails if a sync does
    not wait for pending steps.
    """
    if kind == HYBRID:  # all other tests depend on nothing that recurrent layers change
        return [] if pauses else [pytest.mark.on_demand]
    if "transformers" in kind:
        is_redundant = kind == "untied-transformers" or (route and route != _CI_ROUTES.get(kind, route))
        return [pytest.mark.on_demand] if is_redundant and not every_route else []
    native_heads = {f"{head}-{server}" for server in NATIVE for head in _HEADS}
    is_redundant = kind in {"http-vllm", "http-sglang", "untied-vllm", OVERLAPPED, *native_heads}
    if is_redundant and not (kind == OVERLAPPED and overlapped):
        return [pytest.mark.slow, pytest.mark.on_demand]
    if route and not every_route and route != _CI_ROUTES.get(kind, "checkpoint"):
        return [pytest.mark.slow, pytest.mark.on_demand]
    return [pytest.mark.slow]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Order the tests by engine, so that each engine starts once."""
    indices = [index for index, item in enumerate(items) if _kind(item)]
    ordered = sorted((items[index] for index in indices), key=lambda item: [*KINDS, *UNTIED, *MOE].index(_kind(item)))
    for index, item in zip(indices, ordered, strict=True):
        items[index] = item


def _kind(item: pytest.Item) -> str:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("started", "") if callspec else ""


@dataclass
class StartedEngine:
    name: str
    engine: InferenceEngine
    model: PreTrainedModel


class EngineStarter:
    """A starter that reuses the last engine until a test needs another one. HTTP runs in front of the same engine."""

    def __init__(self, folder: Path):
        self.loop = BackgroundLoop()
        self.folder = folder
        self._current: StartedEngine | None = None
        self._process: NativeServerProcess | None = None
        self._patch = pytest.MonkeyPatch()

    def get(self, name: str, *, tied: bool, architecture: str) -> StartedEngine:
        full_name = f"{architecture}-{'' if tied else 'untied-'}{name}"
        if self._current is None or self._current.name != full_name:
            self._close_current()
            model = tiny_model(architecture, tied=tied)
            path = self.folder / full_name
            save_as_base_model(model, path)
            engine = self._start(name, str(path), adapters=architecture == "qwen3")
            self._current = StartedEngine(full_name, engine, model)
        return self._current

    def _start(self, name: str, path: str, *, adapters: bool) -> InferenceEngine:
        # `adapters` turns LoRA on. In vLLM, LoRA for a mixture of experts needs a GPU.
        if name in NATIVE:
            return self._start_native(name, path)
        if name == OVERLAPPED:
            enable_async_scheduling(self._patch)
        class_path, options = ENGINES[name.removeprefix("overlapped-")]
        options = {key: value for key, value in options.items() if adapters or key != "max_lora_rank"}
        options |= vllm_v2.engine_options() if name.endswith("vllm") else {}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of third-party packages on import
            engine: InferenceEngine = load_object(class_path)(
                model=path,
                dtype="float32",
                device="cpu",
                max_num_seqs=MAX_NUM_SEQS,
                max_model_len=MAX_MODEL_LEN,
                name="conforming",
                **options,
            )
        if name.endswith("vllm"):
            core = engine.llm_engine.engine_core.engine_core  # type: ignore[attr-defined]
            assert (name == OVERLAPPED) == (core.batch_queue is not None)
        return engine

    def _start_native(self, name: str, path: str) -> InferenceEngine:
        kind = name.removeprefix("native-")
        self._process = NativeServerProcess(
            kind, path, log=self.folder / f"{name}.log", length=MAX_MODEL_LEN, seqs=MAX_NUM_SEQS
        )
        server = NATIVE[name](Connection(self._process.address, TOKEN, "conforming"), 60.0)
        engine = NativeEngine(
            server,
            model=path,
            dtype="float32",
            device="cpu",
            folder=str(self.folder / "native"),
            max_num_seqs=MAX_NUM_SEQS,
        )
        return self.loop.run(engine.connect(200.0))

    def _close_current(self) -> None:
        current, self._current = self._current, None
        process, self._process = self._process, None
        try:
            if current is not None:
                self.loop.run(current.engine.close())
        finally:
            self._patch.undo()
            if process is not None:
                process.stop()

    def close(self) -> None:
        self._close_current()
        self.loop.close()

    @contextmanager
    def behind_http(self, engine: InferenceEngine) -> Iterator[InferenceEngine]:
        endpoint = HttpEndpoint(engine, None, model_name="tiny", token="of-the-conformance-suite")
        self.loop.run(endpoint.__aenter__())
        try:
            remote = RemoteEngine(endpoint.url, endpoint.token, name="conforming")
            self.loop.run(remote.connect(30.0))
            yield remote
            self.loop.run(remote.close())
        finally:
            self.loop.run(endpoint.__aexit__(None, None, None))


@pytest.fixture(scope="package")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineStarter]:
    starter = EngineStarter(tmp_path_factory.mktemp("engines"))
    yield starter
    starter.close()


@pytest.fixture(scope="package")
def started(request: pytest.FixtureRequest, starter: EngineStarter) -> Iterator[EngineHarness]:
    *layout, package = request.param.split("-")
    if package != "transformers" and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed; scripts/cpu_engines installs it")
    name = "-".join([*({"native", "overlapped"} & set(layout)), package])
    architecture = {"moe": "qwen3_moe", "hybrid": "qwen3_5_text"}.get("".join(layout[:1]), "qwen3")
    embedded = starter.get(name, tied=not {"untied", "moe"} & set(layout), architecture=architecture)
    if "http" not in layout:
        # A server counts a request before its prefill, and SGLang's front end before its process receives it.
        head_start_s = 0.5 if name in NATIVE else HEAD_STARTS.get(name, 0.2)
        yield EngineHarness(embedded.engine, embedded.model, starter.loop, starter.folder, head_start_s)
        return
    with starter.behind_http(embedded.engine) as remote:
        yield EngineHarness(remote, embedded.model, starter.loop, starter.folder, HEAD_STARTS.get(name, 0.2))


@pytest.fixture
def bench(started: EngineHarness) -> Iterator[EngineHarness]:
    """The engine with complete weights, awake and not paused, before and after each test."""
    yield started
    started.run(started.restore())


@pytest.fixture
def reference(bench: EngineHarness) -> Reference:
    """The reference of random weights, which the engine serves."""
    return bench.serve(bench.random_model(0), "random")
