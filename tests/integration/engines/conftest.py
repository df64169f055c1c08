"""Every kind of engine behind one fixture: started when its first test comes, one at a time, alive across tests."""

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
from tests.support.engine_harness import MAX_MODEL_LEN, MAX_NUM_SEQS, BackgroundLoop, EngineHarness, save_as_base_model
from tests.support.native_servers import TOKEN, NativeServerProcess
from tests.support.reference_sampler import Reference
from tests.support.vllm_async_scheduling import enable_async_scheduling

# What is started: "transformers", the same behind HTTP, and with an untied head where a second start is cheap.
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformers": ("skyrl_train.engines.transformers.engine:TransformersEngine", {"threads": 1}),
    "vllm": ("skyrl_train.engines.vllm.engine:VLLMEngine", {"threads": 1, "max_lora_rank": 8}),
    "sglang": ("skyrl_train.engines.sglang.engine:SGLangEngine", {"threads": 1}),
}
NATIVE = {"native-vllm": VLLMServer, "native-sglang": SGLangServer}
"""Behind the servers that vLLM and SGLang bring themselves."""
OVERLAPPED = "overlapped-vllm"
"""vLLM with async scheduling, as on an accelerator."""
KINDS = [*(f"{layout}{engine}" for engine in ENGINES for layout in ("", "http-")), OVERLAPPED, *NATIVE]
UNTIED = ["untied-transformers", "untied-vllm", "untied-native-vllm", "untied-native-sglang"]
HEAD_STARTS = {"sglang": 0.4}
MOE = ["moe-transformers", "moe-vllm", "moe-sglang", "moe-native-vllm", "moe-native-sglang"]
"""A mixture of experts, which every package cuts in its own way: only for the test that weights arrive. Untied:
SGLang does not tie the head of one."""
_HEADS = ("untied", "moe")
_ROUTE_OF = {"vllm": "broadcast", "sglang": "ipc", "native-vllm": "checkpoint", "native-sglang": "broadcast"}
"""Where an engine's answers to what goes wrong on a route are looked at for every change."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests of weights also run with an untied head: which tensors are sent is another list. A test that names a
    `route` runs with every one that the kind has."""
    itself = any("started" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "started" not in metafunc.fixturenames or itself:
        return
    kinds = KINDS + (UNTIED if "weights" in metafunc.module.__name__ else [])
    if "wrappers" in metafunc.module.__name__:
        kinds = list(ENGINES)  # the others are the same to a wrapper
    arrival = metafunc.function.__name__ == "test_engine_serves_new_weights_after_every_sync"
    kinds += MOE if arrival else []
    routes = sorted(WEIGHT_ROUTES) if "route" in metafunc.fixturenames else [""]
    pairs = [(kind, route) for kind in kinds for route in routes if (kind[:5], route) != ("http-", "in_process")]
    with_steps_under_way = metafunc.function.__name__ == "test_pause_keep_continues_with_new_weights"
    marks = {pair: _marks(*pair, every_route=arrival, overlapped=with_steps_under_way) for pair in pairs}
    if routes == [""]:
        params = [pytest.param(kind, marks=marks[kind, route]) for kind, route in pairs]
        metafunc.parametrize("started", params, indirect=True, scope="package")
    else:
        params = [pytest.param(kind, route, marks=marks[kind, route]) for kind, route in pairs]
        metafunc.parametrize(("started", "route"), params, indirect=["started"], scope="package")


def _marks(kind: str, route: str, *, every_route: bool, overlapped: bool) -> list[pytest.MarkDecorator]:
    """Of the product of kinds and routes, what is enough for every change covers each kind and each route.

    HTTP in front of vLLM and SGLang is the code that is there in front of the transformers engine; their own servers
    load an untied head and experts with the code of the embedded engines; what goes wrong on a route is found by the
    receiver that all engines share, so that beside the transformers engine each has one route for it. Of vLLM with
    async scheduling it is the test that fails if a sync does not wait for the steps under way.
    """
    if "transformers" in kind:
        return []
    again = {f"{head}-{server}" for server in NATIVE for head in _HEADS}
    product = kind in {"http-vllm", "http-sglang", "untied-vllm", OVERLAPPED, *again}
    if product and not (kind == "untied-vllm" and every_route) and not (kind == OVERLAPPED and overlapped):
        return [pytest.mark.slow, pytest.mark.on_demand]
    if route and not every_route and route != _ROUTE_OF.get(kind, "checkpoint"):
        return [pytest.mark.slow, pytest.mark.on_demand]
    return [pytest.mark.slow]


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All tests of one engine, then those behind HTTP, then the next: each is started once."""
    places = [index for index, item in enumerate(items) if _kind(item)]
    ordered = sorted((items[index] for index in places), key=lambda item: [*KINDS, *UNTIED, *MOE].index(_kind(item)))
    for index, item in zip(places, ordered, strict=True):
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
    """Keeps the engine that was started last until another one is wanted: behind HTTP it is the same one."""

    def __init__(self, folder: Path):
        self.loop = BackgroundLoop()
        self.folder = folder
        self._current: StartedEngine | None = None
        self._process: NativeServerProcess | None = None
        self._patch = pytest.MonkeyPatch()

    def get(self, name: str, *, tied: bool, architecture: str) -> StartedEngine:
        wanted = f"{architecture}-{'' if tied else 'untied-'}{name}"
        if self._current is None or self._current.name != wanted:
            self._close_current()
            model = tiny_model(architecture, tied=tied)
            path = self.folder / wanted
            save_as_base_model(model, path)
            self._current = StartedEngine(wanted, self._start(name, str(path), adapters=architecture == "qwen3"), model)
        return self._current

    def _start(self, name: str, path: str, *, adapters: bool) -> InferenceEngine:
        """`adapters`: with room for some. vLLM's adapters for a mixture of experts need a GPU."""
        if name in NATIVE:
            return self._start_native(name, path)
        if name == OVERLAPPED:
            enable_async_scheduling(self._patch)
        place, options = ENGINES[name.removeprefix("overlapped-")]
        options = {key: value for key, value in options.items() if adapters or key != "max_lora_rank"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # other people's, when their packages are imported
            engine: InferenceEngine = load_object(place)(
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
    architecture = "qwen3_moe" if "moe" in layout else "qwen3"
    embedded = starter.get(name, tied=not {"untied", "moe"} & set(layout), architecture=architecture)
    if "http" not in layout:
        # A server counts a request before it has read it, SGLang's host before its process has.
        head_start_s = 0.5 if name in NATIVE else HEAD_STARTS.get(name, 0.2)
        yield EngineHarness(embedded.engine, embedded.model, starter.loop, starter.folder, head_start_s)
        return
    with starter.behind_http(embedded.engine) as remote:
        yield EngineHarness(remote, embedded.model, starter.loop, starter.folder, HEAD_STARTS.get(name, 0.2))


@pytest.fixture
def bench(started: EngineHarness) -> Iterator[EngineHarness]:
    """The engine whole, awake and running, as a test finds it and leaves it."""
    yield started
    started.run(started.restore())


@pytest.fixture
def reference(bench: EngineHarness) -> Reference:
    """What the engine must agree with; its weights are random."""
    return bench.serve(bench.random_model(0), "random")
