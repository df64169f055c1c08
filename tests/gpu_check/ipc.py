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

LATE_CYCLES = 5_000_000
"""Cycles of a waiting kernel: about 3 ms, which is long beside the microseconds between two processes."""
READER = 8
"""Factor by which the engine's copies are later than the trainer's.

Otherwise a page filled too early goes unnoticed.
"""
SYNCS, SETTLED = 200, 20
"""Number of syncs, and the number after which memory must not grow."""
LEAK_MIB = 64.0
Shapes = Mapping[str, tuple[int, ...]]


def late(device: str, times: int = 1) -> None:
    """Delay all work that is queued from now on."""
    if device == "cuda":
        torch.cuda._sleep(times * LATE_CYCLES)  # type: ignore[no-untyped-call]


def zeros(shapes: Shapes, device: str) -> dict[str, Tensor]:
    return {name: torch.zeros(shape, dtype=torch.bfloat16, device=device) for name, shape in shapes.items()}


class CopiesLate(InPlaceWeightStore):
    """An engine that queues copies of its input and cannot report what it has loaded, like vLLM's."""

    def __init__(self, tensors: dict[str, Tensor], device: str):
        super().__init__(lambda: tensors)
        self._device = device

    def load(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        late(self._device, READER)
        super().load([(name, tensor.clone()) for name, tensor in tensors])

    def loaded_tensor(self, name: str) -> None:
        return None


def serve(connection: Connection, shapes: Shapes, device: str, delayed: bool) -> None:
    """Run the engine's process: answer calls of its receiver until it receives None."""
    torch.set_num_threads(1)
    tensors = zeros(shapes, device)
    store = CopiesLate(tensors, device) if delayed else InPlaceWeightStore(lambda: tensors)
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
    """Return MiB in use on the whole accelerator, because no process owns mapped memory; of this process on a CPU."""
    if device == "cuda":
        free, total = torch.cuda.mem_get_info()
        return (total - free) / 2**20
    return float(psutil.Process().memory_info().rss) / 2**20


class Engine:
    """The other process, as a context manager."""

    def __init__(self, shapes: Shapes, device: str, delayed: bool):
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, shapes, device, delayed), daemon=True)
        self._process.start()
        there.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.join()
        self._here.close()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method in the other process. Raises RuntimeError with its error."""
        self._here.send((method, arguments))
        error, answer = self._here.recv()
        if error is not None:
            raise RuntimeError(error)
        return answer


class Trainer:
    """One rank with float32 tensors that differ between all versions."""

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
                late(self._device)
                tensor = tensor * (1 + self.version / 64)  # queued, as a gathered shard is
            yield name, tensor

    def connect(self, engine: Engine) -> None:
        self.sender.connect("ipc", "", 2, 60.0)
        engine.call("connect", "ipc", "", 1, 2, 60.0)

    def sync(self, engine: Engine) -> dict[str, int]:
        """Send the next version. Return the fingerprints that the engine must have."""
        self.version += 1
        manifest = self.sender.prepare_manifest(self.version)
        engine.call("begin", manifest)
        overlapped(plan_buckets(manifest), self.sender.send, partial(engine.call, "receive"))
        engine.call("commit", self.version)
        self.sender.mark_delivered(self.version)
        return {spec.name: spec.fingerprint for spec in manifest.tensors}


def overlapped(cut: Sequence[Bucket], send: Callable[[int], Bucket | None], receive: Callable[[Any], Any]) -> None:
    """Fill one page while engines read the other, and then the first again, as in weight_sync/sync.py."""
    offered = send(cut[0].index)
    for following in [*cut[1:], None]:
        coming = None if following is None else send(following.index)
        receive(offered)
        offered = coming


def run(setting: Setting, report: Report) -> None:
    """Sync a small model in four buckets, with two pages in turn, and compare each version with the sent one."""
    side = 64 if setting.toy else 1024
    shapes = {f"layer.{index}.weight": (side, side) for index in range(8)}
    trainer = Trainer(shapes, setting.device, 2 * side * side * 2, delayed=True)
    with Engine(shapes, setting.device, delayed=True) as engine:
        stress(trainer, engine, report)
    trainer.sender.close()


def stress(trainer: Trainer, engine: Engine, report: Report) -> None:
    trainer.connect(engine)
    wrong, settled = [], 0.0
    for index in range(SYNCS):
        try:
            sent = trainer.sync(engine)
            if engine.call("fingerprints") != sent:
                wrong.append(f"{index}: other weights than were sent")
        except RuntimeError as error:
            wrong.append(f"{index}: {error}")
        if index == SETTLED:
            settled = engine.call("memory")
    report.note(f"syncs of {SYNCS} that went wrong", f"{len(wrong)} {'; '.join(wrong[:2])}".strip(), "0", not wrong)
    taken = engine.call("memory") - settled
    report.at_most(f"memory taken after the first {SETTLED}", taken, LEAK_MIB, "MiB")


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
        report.note("the engine has what was sent", same, "True", same)
    size = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    report.note("bytes on the wire", size)
    report.note("first sync, s", seconds[0])
    median = statistics.median(seconds[1:])
    report.note("GB/s", size / median / 1e9)
    report.at_most("median of three more", median, 60.0 if setting.toy else 1.0, "s")
    trainer.sender.close()


def qwen(hidden: int, intermediate: int, layers: int, vocabulary: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of a Qwen2.5 with tied embeddings, and keys and values of a sixth of the hidden size."""
    small = hidden // 6
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for index in range(layers):
        layer = f"model.layers.{index}"
        for name, rows in (("q", hidden), ("k", small), ("v", small)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, hidden)
            shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, hidden)
        for name in ("gate", "up"):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = (intermediate, hidden)
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, intermediate)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{name}.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,)}
