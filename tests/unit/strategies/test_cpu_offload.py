"""Copies to host memory and back, with streams that do nothing before somebody waits for them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from skyrl_train.config.schema import FSDPConfig, OptimizerConfig
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.strategies import base
from skyrl_train.strategies.base import Strategy
from skyrl_train.strategies.cpu_offload import MIN_PINNED_BYTES, CpuOffloader
from skyrl_train.strategies.fsdp2 import FSDP2Strategy
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.padded_reference import ragged_batch

CPU = torch.device("cpu")
LARGE = MIN_PINNED_BYTES // 4


class Stream:
    """Work that is queued, and done when somebody waits for it."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []

    def wait_stream(self, other: Stream) -> None:
        self.queue.append(other.synchronize)

    def synchronize(self) -> None:
        queue, self.queue = self.queue, []
        for work in queue:
            work()


class Streams(TorchFunctionMode):
    """Queues copies that do not block on the stream that is current, as an accelerator does."""

    def __init__(self) -> None:
        super().__init__()
        self.current = Stream()
        self.made: list[Stream] = []

    def new(self, device: Any) -> Stream:
        self.made.append(Stream())
        return self.made[-1]

    @contextmanager
    def use(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.copy_ and kwargs.get("non_blocking"):
            target, source = args
            self.current.queue.append(lambda: target.copy_(source))
            return target
        return func(*args, **kwargs)


class Pretended(CpuOffloader):
    """An accelerator "cuda" whose memory is the host's, except for the buffers."""

    def __init__(self, device: torch.device = CPU):
        super().__init__(device)
        self.kept: list[Tensor] = []
        self.pinned: list[Tensor] = []

    def place(self, tensor: Tensor) -> str:
        return "cpu" if any(tensor.data_ptr() == one.data_ptr() for one in self.kept) else "cuda"

    _place = place

    def _buffer(self, name: Hashable, tensor: Tensor) -> Tensor:
        self.kept.append(super()._buffer(name, tensor))
        return self.kept[-1]

    def _pin(self, buffer: Tensor) -> None:
        self.pinned.append(buffer)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[Streams]:
    with Streams() as streams:
        monkeypatch.setattr(torch.cuda, "Stream", streams.new)
        monkeypatch.setattr(torch.cuda, "stream", streams.use)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.current)
        yield streams


def test_what_leaves_is_complete_and_has_what_was_still_being_written(streams: Streams):
    host, tensor = Pretended(), torch.zeros(LARGE)
    tensor.copy_(torch.ones(LARGE), non_blocking=True)  # an optimizer step under way
    copy = host.move({"a": tensor}, "cpu")["a"]
    tensor.fill_(7.0)  # freed, and given to somebody else
    assert copy.unique().tolist() == [1.0]


def test_what_comes_back_is_waited_for_by_the_stream_and_not_by_the_host(streams: Streams):
    host = Pretended()
    back = host.move(host.move({"a": torch.ones(LARGE)}, "cpu"), "cuda")["a"].fill_(0.0)
    read = torch.empty(LARGE)
    read.copy_(back, non_blocking=True)
    streams.current.synchronize()
    assert read.unique().tolist() == [1.0]


def test_what_comes_back_waits_for_what_used_its_memory_before(streams: Streams):
    host, done = Pretended(), []
    away = host.move({"a": torch.ones(LARGE)}, "cpu")
    streams.current.queue.append(lambda: done.append("a matrix product under way"))
    host.move(away, "cuda")
    assert not done
    (own,) = streams.made
    own.synchronize()
    assert done


def test_buffers_are_pinned_once_and_small_tensors_are_not_worth_one(streams: Streams):
    host, tensors = Pretended(), {"a": torch.ones(LARGE), "b": torch.ones(LARGE + 1), "step": torch.tensor(3.0)}
    for _ in range(3):
        tensors = host.move(host.move(tensors, "cpu"), "cuda")
        streams.current.synchronize()
    assert [buffer.numel() for buffer in host.pinned] == [LARGE, LARGE + 1]
    assert [tensor.unique().tolist() for tensor in tensors.values()] == [[1.0], [1.0], [3.0]]


def test_what_is_there_is_not_copied(streams: Streams):
    host, tensors = Pretended(), {"a": torch.ones(LARGE)}
    assert host.move(tensors, "cuda")["a"] is tensors["a"]
    away = host.move(tensors, "cpu")
    assert host.move(away, "cpu")["a"] is away["a"]


# -- the strategies that move through it -----------------------------------------------------------------------------


@pytest.fixture(params=["single", "fsdp2"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Strategy]]:
    def make() -> Strategy:
        settings: dict[str, Any] = {
            "optimizer_config": OptimizerConfig(lr=1e-2),
            "fsdp_config": FSDPConfig(),
            "device": "cpu",
        }
        kind = SingleStrategy if request.param == "single" else FSDP2Strategy
        strategy = kind(**settings, rank=0, world_size=1)
        strategy.prepare(LogprobModel(tiny_model()), 10)
        return strategy

    if request.param == "fsdp2":  # of one rank, which asks nobody for anything
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield make
    if request.param == "fsdp2":
        dist.destroy_process_group()


def update(strategy: Any, seed: int) -> dict[str, float]:
    batch = ragged_batch([5, 8, 6], seed=seed)
    scores = strategy.module(batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    strategy.backward(-scores.logprobs.sum(), is_last_micro_batch=True)
    found: dict[str, float] = strategy.step()
    return found


def places(strategy: Strategy, host: Pretended) -> tuple[set[str], set[str]]:
    """Of parameters, and of the optimizer's state: a shard shares their memory."""
    tensors = strategy.get_checkpoint_shard().tensors
    parameters = {host.place(tensor) for key, tensor in tensors.items() if key.startswith("param/")}
    state = {host.place(tensor) for key, tensor in tensors.items() if not key.startswith("param/")}
    return parameters, state


@pytest.mark.defect("engines-woken-beside-the-optimizer")
def test_a_model_that_leaves_for_engines_and_a_sync_goes_on_as_its_twin_that_stayed(
    make: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch, streams: Streams
):
    strategy, twin = make(), make()
    emptied: list[tuple[set[str], set[str]]] = []
    host = Pretended()
    monkeypatch.setattr(base, "CpuOffloader", lambda device: host)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(places(strategy, host)))
    assert update(strategy, 0) == (moved := update(twin, 0))
    assert moved["grad_norm"] > 1e-3
    monkeypatch.setattr(strategy, "device", torch.device("cuda"))  # it moves from now on
    strategy.onload_parameters_only()
    assert places(strategy, host) == ({"cuda"}, {"cpu"})
    strategy.offload()
    assert places(strategy, host) == ({"cpu"}, {"cpu"})
    strategy.onload_parameters_only()
    assert places(strategy, host) == ({"cuda"}, {"cpu"})
    strategy.onload()
    assert places(strategy, host) == ({"cuda"}, {"cuda"})
    assert emptied == [({"cuda"}, {"cpu"}), ({"cpu"}, {"cpu"}), ({"cuda"}, {"cpu"})], "when there is something to empty"
    streams.current.synchronize()
    monkeypatch.setattr(strategy, "device", CPU)
    assert update(strategy, 1) == update(twin, 1)
    for (name, one), (_, other) in zip(strategy.full_parameters(), twin.full_parameters(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.defect("buffers-that-share-pages")
def test_no_two_buffers_share_a_page_which_can_be_pinned_once(streams: Streams):
    size = mmap.PAGESIZE
    tensors = {n: torch.empty(LARGE + 37 * n) for n in range(8)} | {8: torch.empty(300, 401, dtype=torch.bfloat16).t()}
    buffers = list(Pretended().move(tensors, "cpu").values())
    pages = [range(b.data_ptr() // size, (b.data_ptr() + b.nbytes - 1) // size + 1) for b in buffers]
    assert len({page for held in pages for page in held}) == sum(map(len, pages))
    assert buffers[-1].shape == (401, 300)
