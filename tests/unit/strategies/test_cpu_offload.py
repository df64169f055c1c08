"""Copies to host memory and back, with fake streams that do nothing until they are waited for."""

from __future__ import annotations

import importlib.util
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
from skyrl_train.data.host_memory import MIN_PINNED_BYTES
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.strategies import base
from skyrl_train.strategies.base import Strategy
from skyrl_train.strategies.cpu_offload import CpuOffloader
from skyrl_train.strategies.fsdp2 import FSDP2Strategy
from skyrl_train.strategies.single import SingleStrategy
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.padded_reference import ragged_batch

CPU = torch.device("cpu")
LARGE = MIN_PINNED_BYTES // 4


class FakeStream:
    """Queued work that runs when the stream is waited for."""

    def __init__(self) -> None:
        self.queue: list[Callable[[], Any]] = []

    def wait_stream(self, other: FakeStream) -> None:
        self.queue.append(other.synchronize)

    def synchronize(self) -> None:
        queue, self.queue = self.queue, []
        for task in queue:
            task()


class FakeStreams(TorchFunctionMode):
    """A mode that queues non-blocking copies on the current stream, as an accelerator does."""

    def __init__(self) -> None:
        super().__init__()
        self.current = FakeStream()
        self.created: list[FakeStream] = []

    def new(self, device: Any) -> FakeStream:
        self.created.append(FakeStream())
        return self.created[-1]

    @contextmanager
    def use(self, stream: FakeStream) -> Iterator[None]:
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


class FakeOffloader(CpuOffloader):
    """An offloader for a fake accelerator "cuda": all host memory except the buffers counts as its memory."""

    def __init__(self, device: torch.device = CPU):
        super().__init__(device)
        self.buffers: list[Tensor] = []

    def device_type(self, tensor: Tensor) -> str:
        return "cpu" if any(tensor.data_ptr() == buffer.data_ptr() for buffer in self.buffers) else "cuda"

    _device_type = device_type

    def _buffer(self, name: Hashable, tensor: Tensor) -> Tensor:
        self.buffers.append(super()._buffer(name, tensor))
        return self.buffers[-1]


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStreams]:
    with FakeStreams() as streams:
        monkeypatch.setattr(torch.cuda, "Stream", streams.new)
        monkeypatch.setattr(torch.cuda, "stream", streams.use)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: streams.current)
        yield streams


def test_offloaded_copy_includes_pending_writes(streams: FakeStreams):
    offloader, tensor = FakeOffloader(), torch.zeros(LARGE)
    tensor.copy_(torch.ones(LARGE), non_blocking=True)  # a running optimizer step
    copy = offloader.move({"a": tensor}, "cpu")["a"]
    tensor.fill_(7.0)  # freed and reused
    assert copy.unique().tolist() == [1.0]


def test_onload_blocks_the_stream_not_the_host(streams: FakeStreams):
    offloader = FakeOffloader()
    back = offloader.move(offloader.move({"a": torch.ones(LARGE)}, "cpu"), "cuda")["a"].fill_(0.0)
    read = torch.empty(LARGE)
    read.copy_(back, non_blocking=True)
    streams.current.synchronize()
    assert read.unique().tolist() == [1.0]


def test_onload_waits_for_previous_users_of_memory(streams: FakeStreams):
    offloader, done = FakeOffloader(), []
    offloaded = offloader.move({"a": torch.ones(LARGE)}, "cpu")
    streams.current.queue.append(lambda: done.append("a running matrix product"))
    offloader.move(offloaded, "cuda")
    assert not done
    (offload_stream,) = streams.created
    offload_stream.synchronize()
    assert done


def test_large_tensors_keep_their_buffers(streams: FakeStreams):
    offloader = FakeOffloader()
    tensors = {"a": torch.ones(LARGE), "b": torch.ones(LARGE + 1), "step": torch.tensor(3.0)}
    addresses: dict[str, set[int]] = {name: set() for name in tensors}
    for _ in range(3):
        offloaded = offloader.move(tensors, "cpu")
        for name, copy in offloaded.items():
            addresses[name].add(copy.data_ptr())
        tensors = offloader.move(offloaded, "cuda")
        streams.current.synchronize()
    assert len(addresses["a"]) == len(addresses["b"]) == 1
    assert [tensor.unique().tolist() for tensor in tensors.values()] == [[1.0], [1.0], [3.0]]


def test_tensors_in_place_are_not_copied(streams: FakeStreams):
    offloader, tensors = FakeOffloader(), {"a": torch.ones(LARGE)}
    assert offloader.move(tensors, "cuda")["a"] is tensors["a"]
    offloaded = offloader.move(tensors, "cpu")
    assert offloader.move(offloaded, "cpu")["a"] is offloaded["a"]


# -- strategies that use the offloader --------------------------------------------------------------------------------


HAS_BITSANDBYTES = importlib.util.find_spec("bitsandbytes") is not None


@pytest.fixture(params=["single", "fsdp2", "muon", "adamw_8bit"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[], Strategy]]:
    if request.param == "adamw_8bit" and not HAS_BITSANDBYTES:
        pytest.skip("bitsandbytes is not installed")
    optimizer = request.param if request.param in ("muon", "adamw_8bit") else "adamw"

    def make() -> Strategy:
        settings: dict[str, Any] = {
            "optimizer_config": OptimizerConfig(name=optimizer, lr=1e-2),
            "fsdp_config": FSDPConfig(),
            "device": "cpu",
        }
        kind = FSDP2Strategy if request.param == "fsdp2" else SingleStrategy
        strategy = kind(**settings, rank=0, world_size=1)
        strategy.prepare(LogprobModel(tiny_model()), 10)
        return strategy

    if request.param == "fsdp2":  # a fake group of one rank
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield make
    if request.param == "fsdp2":
        dist.destroy_process_group()


def update(strategy: Any, seed: int) -> dict[str, float]:
    batch = ragged_batch([5, 8, 6], seed=seed)
    scores = strategy.module(strategy.module.lay_out(batch))
    strategy.backward(-scores.logprobs.sum(), is_last_micro_batch=True)
    metrics: dict[str, float] = strategy.step()
    return metrics


def devices(strategy: Strategy, offloader: FakeOffloader) -> tuple[set[str], set[str]]:
    """Return the device types of parameters and of the optimizer's moments; a shard shares their memory."""
    tensors = strategy.get_checkpoint_shard().tensors
    parameters = {offloader.device_type(tensor) for key, tensor in tensors.items() if key.startswith("param/")}
    state = {
        offloader.device_type(tensor) for key, tensor in tensors.items() if not key.startswith(("param/", "step/"))
    }
    return parameters, state


@pytest.mark.defect("engines-wake-beside-optimizer")
def test_offloaded_model_trains_like_its_twin(
    make: Callable[[], Strategy], monkeypatch: pytest.MonkeyPatch, streams: FakeStreams
):
    strategy, twin = make(), make()
    emptied: list[tuple[set[str], set[str]]] = []
    offloader = FakeOffloader()
    monkeypatch.setattr(base, "CpuOffloader", lambda device: offloader)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(devices(strategy, offloader)))
    assert update(strategy, 0) == (first_update := update(twin, 0))
    assert first_update["grad_norm"] > 1e-3
    monkeypatch.setattr(strategy, "device", torch.device("cuda"))  # tensors move from now on
    strategy.onload_parameters_only()
    assert devices(strategy, offloader) == ({"cuda"}, {"cpu"})
    strategy.offload()
    assert devices(strategy, offloader) == ({"cpu"}, {"cpu"})
    strategy.onload_parameters_only()
    assert devices(strategy, offloader) == ({"cuda"}, {"cpu"})
    strategy.onload()
    assert devices(strategy, offloader) == ({"cuda"}, {"cuda"})
    assert emptied == [({"cuda"}, {"cpu"}), ({"cpu"}, {"cpu"}), ({"cuda"}, {"cpu"})], (
        "the cache is emptied after each move"
    )
    streams.current.synchronize()
    monkeypatch.setattr(strategy, "device", CPU)
    assert update(strategy, 1) == update(twin, 1)
    for (name, tensor), (_, expected) in zip(strategy.full_parameters(), twin.full_parameters(), strict=True):
        assert torch.equal(tensor, expected), name
