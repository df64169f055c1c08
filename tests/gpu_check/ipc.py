"""Parts 4 and 5: the `ipc` route between two processes on one device.

Both ends queue their copies behind waiting kernels. This reveals a page that is read before it was filled, or filled
before it was read: the tensors of every version differ, and the engine reports its contents.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import psutil
import torch
from torch import Tensor

from skyrl_train.weight_sync.buckets import fingerprint, plan_buckets
from skyrl_train.weight_sync.protocol import Bucket
from skyrl_train.weight_sync.receiver import InPlaceWeightStore, WeightReceiver
from skyrl_train.weight_sync.sender import WeightSender
from tests.gpu_check.report import Report, Setting

DELAY_CYCLES = 5_000_000
"""Cycles of a waiting kernel: about 3 ms, which is long compared with the microseconds between two processes."""
ENGINE_DELAY_FACTOR = 8
"""Factor of the engine's delay relative to the trainer's. With equal delays, a page filled too early goes unnoticed."""
SYNCS, WARM_UP_SYNCS = 200, 20
"""Number of syncs, and the number after which memory must not grow."""
LEAK_MIB = 64.0
Shapes = Mapping[str, tuple[int, ...]]


def delay_queue(device: str, times: int = 1) -> None:
    """Delay all work that is queued on the device from now on. Do nothing on a CPU."""
    if device == "cuda":
        torch.cuda._sleep(times * DELAY_CYCLES)  # type: ignore[no-untyped-call]


def zeros(shapes: Shapes, device: str) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


class LateCopyStore(InPlaceWeightStore):
    """A weight store that queues copies of its input and cannot return loaded tensors, like vLLM's."""

    def __init__(self, tensors: dict[str, Tensor], device: str):
        super().__init__(lambda: tensors)
        self._device = device

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        delay_queue(self._device, ENGINE_DELAY_FACTOR)
        super().load([(name, tensor.clone()) for name, tensor in tensors])

    def loaded_tensor(self, name: str) -> None:
        return None


def serve(connection: Connection, shapes: Shapes, device: str, delayed: bool) -> None:
    """Run the engine's process: execute calls of its receiver until None arrives."""
    torch.set_num_threads(1)
    tensors = zeros(shapes, device)
    store = LateCopyStore(tensors, device) if delayed else InPlaceWeightStore(lambda: tensors)
    receiver = WeightReceiver(store, "engine", device)
    calls = {
        "fingerprints": lambda: {name: fingerprint(tensor) for name, tensor in tensors.items()},
        "memory": lambda: used_memory(device),
    }
    while (call := connection.recv()) is not None:
        method, arguments = call
        try:
            connection.send((None, (calls.get(method) or getattr(receiver, method))(*arguments)))
        except Exception as error:
            connection.send((f"{type(error).__name__}: {error}", None))


def used_memory(device: str) -> float:
    """Return the MiB in use on the whole GPU, because no process owns mapped memory. On a CPU, count this process."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    return float(psutil.Process().memory_info().rss) / 2**20


class Engine:
    """A context manager of the engine's process."""

    def __init__(self, shapes: Shapes, device: str, delayed: bool):
        context = multiprocessing.get_context("spawn")
        self._connection, engine_connection = context.Pipe()
        self._process = context.Process(target=serve, args=(engine_connection, shapes, device, delayed), daemon=True)
        self._process.start()
        engine_connection.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the engine's process. Raises RuntimeError with the method's error."""
        self._connection.send((method, arguments))
        error, answer = self._connection.recv()
        if error is not None:
            raise RuntimeError(error)
        return answer


class Trainer:
    """A trainer rank whose float32 tensors differ between all versions."""

    sender_type = WeightSender

    def __init__(self, shapes: Shapes, device: str, bucket_bytes: int, delayed: bool):
        generator = torch.Generator().manual_seed(0)
        self._base = {name: torch.randn(shape, generator=generator).to(device) for name, shape in shapes.items()}
        self.version = 0
        self._device, self._delayed = device, delayed
        self.sender = self.sender_type(
            self.parameters, wire_dtype="bfloat16", bucket_bytes=bucket_bytes, rank=0, device=device
        )

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._base.items():
            if self._delayed:
                delay_queue(self._device)
                tensor = tensor * (1 + self.version / 64)  # queued, as a gathered shard is
            yield name, tensor

    def connect(self, engine: Engine) -> None:
        self.sender.connect("ipc", "", 2, 60.0)
        engine.call("connect", "ipc", "", 1, 2, 60.0)

    def sync(self, engine: Engine) -> dict[str, int]:
        """Send the next version. Return the fingerprints that the engine must have afterwards, by tensor."""
        self.version += 1
        manifest = self.sender.prepare_manifest(self.version)
        engine.call("begin", manifest)
        send_overlapped(plan_buckets(manifest), self.sender.send, partial(engine.call, "receive"))
        engine.call("commit", self.version)
        self.sender.mark_delivered(self.version)
        return {spec.name: spec.fingerprint for spec in manifest.tensors}


def send_overlapped(
    buckets: Sequence[Bucket], send: Callable[[int], Bucket | None], receive: Callable[[Any], Any]
) -> None:
    """Fill one page while engines read the other, and then exchange them, as in weight_sync/sync.py."""
    sent = send(buckets[0].index)
    for following in [*buckets[1:], None]:
        next_sent = None if following is None else send(following.index)
        receive(sent)
        sent = next_sent


def run(setting: Setting, report: Report) -> None:
    """Sync a small model in four buckets over two pages, and compare each loaded version with the sent one."""
    side = 64 if setting.toy else 1024
    shapes = {f"layer.{index}.weight": (side, side) for index in range(8)}
    trainer = Trainer(shapes, setting.device, 2 * side * side * 2, delayed=True)
    with Engine(shapes, setting.device, delayed=True) as engine:
        sync_repeatedly(trainer, engine, report)
    trainer.sender.close()


def sync_repeatedly(trainer: Trainer, engine: Engine, report: Report) -> None:
    trainer.connect(engine)
    failures, memory_before = [], 0.0
    for index in range(SYNCS):
        try:
            sent = trainer.sync(engine)
            if engine.call("fingerprints") != sent:
                failures.append(f"{index}: the engine has other weights than the trainer sent")
        except RuntimeError as error:
            failures.append(f"{index}: {error}")
        if index == WARM_UP_SYNCS:
            memory_before = engine.call("memory")
    report.note(f"failed syncs of {SYNCS}", f"{len(failures)} {'; '.join(failures[:2])}".strip(), "0", not failures)
    growth = engine.call("memory") - memory_before
    report.at_most(f"memory growth after {WARM_UP_SYNCS} syncs", growth, LEAK_MIB, "MiB")


def run_large(setting: Setting, report: Report) -> None:
    """Measure a complete sync of Qwen2.5-1.5B's tensors: manifest, fingerprints, transfer, load and commit."""
    shapes = qwen(64, 128, 2, 320) if setting.toy else qwen(1536, 8960, 28, 151_936)
    trainer = Trainer(shapes, setting.device, 1 << 28, delayed=False)
    with Engine(shapes, setting.device, delayed=False) as engine:
        trainer.connect(engine)
        seconds = []
        for _ in range(4):
            start = time.perf_counter()
            sent = trainer.sync(engine)
            seconds.append(time.perf_counter() - start)
        same = engine.call("fingerprints") == sent
        report.note("the engine has the sent weights", same, "True", same)
    size = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    report.note("bytes on the wire", size)
    report.note("first sync, s", seconds[0])
    median = statistics.median(seconds[1:])
    report.note("GB/s", size / median / 1e9)
    report.at_most("median of three more", median, 60.0 if setting.toy else 1.0, "s")
    trainer.sender.close()


def qwen(hidden: int, intermediate: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a Qwen2.5 with tied embeddings. Keys and values have a sixth of the hidden size."""
    kv_size = hidden // 6
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(layers):
        layer = f"model.layers.{index}"
        for name, rows in (("q", hidden), ("k", kv_size), ("v", kv_size)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = (intermediate, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,)}
