"""Measure the speed of a weight sync by each route, compared with a memory copy and a plain gloo broadcast.

    python scripts/benchmarks/weight_sync.py [--gb 0.1 1] [--threads N] [--bucket-gb 0.25] [--repeats N] [--json FILE]
    python scripts/benchmarks/weight_sync.py --changed 0.02 [--gb 0.1] [--routes broadcast ipc checkpoint] ...
    python scripts/benchmarks/weight_sync.py --engines 1 2 4 8 [--gb 0.1] [--routes broadcast ipc checkpoint] ...

Trainer and engine are two processes, as in a run; the engine holds plain tensors. The result of a route is the median
of the repeats. It includes everything that a sync does: manifest, both fingerprints, transfer, load, commit.

With --changed, the script compares complete syncs of bfloat16 weights with syncs of this fraction of changed elements
(generator.weight_sync_only_changed), to an engine that applies changes in place and to one that keeps a copy.

With --engines, the script measures seconds and CPU-seconds of a sync to that many engines, each a process that only
receives. It also shows the additional time of the first sync, which connects all engines, and the bytes that the
trainer sends as a multiple of the model's size.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.pool
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from skyrl_train.cluster.addresses import free_address
from skyrl_train.engines.base import Capabilities, EngineHealth
from skyrl_train.weight_sync.broadcast import BroadcastGroup
from skyrl_train.weight_sync.protocol import AdapterSpec
from skyrl_train.weight_sync.receiver import InPlaceWeightStore, WeightReceiver
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train.weight_sync.sync import WeightSync

ROUTES = ("broadcast", "ipc", "checkpoint")
Row = dict[str, Any]


class CopyingStore(InPlaceWeightStore):
    """A store that hides its tensors, like that of an engine that fuses them."""

    def layout(self, adapter: AdapterSpec | None = None) -> Mapping[str, Tensor]:
        return {name: tensor.to("meta") for name, tensor in super().layout(adapter).items()}

    def loaded_tensor(self, name: str) -> None:
        return None


def tensors(gb: float, count: int, seed: int, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return `count` random tensors with a total size of `gb` GB."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(gb * 1e9) // dtype.itemsize // count
    return {f"layer.{index}.weight": torch.randn(numel, generator=generator).to(dtype) for index in range(count)}


def serve(connection: Connection, gb: float, count: int, threads: int, dtype: torch.dtype, in_place: bool) -> None:
    """Run the engine's process: execute the calls that it receives until it receives None."""
    torch.set_num_threads(threads)
    weights = tensors(gb, count, seed=1, dtype=dtype)
    store = (InPlaceWeightStore if in_place else CopyingStore)(lambda: weights)
    receiver = WeightReceiver(store, "engine")
    groups: list[BroadcastGroup] = []
    buffer = torch.zeros(sum(tensor.nbytes for tensor in weights.values()), dtype=torch.uint8)

    def bare_connect(address: str) -> None:
        groups.append(BroadcastGroup(address, 1, 2, "cpu", 60.0))

    def bare_receive() -> None:
        groups[0].broadcast(buffer)

    calls: dict[str, Callable[..., Any]] = {
        "bare_connect": bare_connect,
        "bare_receive": bare_receive,
        "ready": lambda: None,
    }
    while (call := connection.recv()) is not None:
        method, arguments = call
        try:
            connection.send((None, calls.get(method, getattr(receiver, method, None))(*arguments)))  # type: ignore[misc]
        except Exception as error:
            connection.send((f"{type(error).__name__}: {error}", None))


class Engine:
    """An engine in another process that receives weights."""

    def __init__(self, gb: float, count: int, threads: int, dtype: torch.dtype = torch.float32, in_place: bool = True):
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(
            target=serve, args=(child_end, gb, count, threads, dtype, in_place), daemon=True
        )
        self._process.start()
        self.capabilities = Capabilities("engine")
        self.version = 0

    def call(self, method: str, *arguments: Any) -> Any:
        self._connection.send((method, arguments))
        error, answer = self._connection.recv()
        if error is not None:
            raise RuntimeError(error)
        return answer

    @property
    def cpu_s(self) -> float:
        return cpu_s(self._process.pid)

    async def connect_weights(self, *arguments: Any) -> None:
        await asyncio.to_thread(self.call, "connect", *arguments)

    async def begin_weights(self, manifest: Any) -> None:
        await asyncio.to_thread(self.call, "begin", manifest)

    async def receive_weights(self, bucket: Any) -> None:
        await asyncio.to_thread(self.call, "receive", bucket)

    async def commit_weights(self, version: int) -> None:
        await asyncio.to_thread(self.call, "commit", version)
        self.version = version

    async def score(self, token_ids: Any, temperature: float = 1.0) -> list[list[float]]:
        return []

    async def health(self) -> EngineHealth:
        return EngineHealth("engine", self.version)

    def close(self) -> None:
        self._connection.send(None)
        self._process.join()


class Trainer:
    """The single rank of a trainer, in this process."""

    def __init__(
        self, weights: dict[str, Tensor], bucket_bytes: int, wire_dtype: str = "float32", only_changed: bool = False
    ):
        def parameters() -> Iterator[tuple[str, Tensor]]:
            yield from weights.items()

        self.sender = WeightSender(
            parameters,
            wire_dtype=wire_dtype,
            bucket_bytes=bucket_bytes,
            rank=0,
            weight_sync_only_changed=only_changed,
        )

    async def call_all(self, method: str, *arguments: Any) -> list[Any]:
        names = {
            "send_weights": "send",
            "connect_weights": "connect",
            "disconnect_weights": "disconnect",
            "mark_weights_delivered": "mark_delivered",
        }
        if method == "address":
            return [free_address()]
        return [await asyncio.to_thread(getattr(self.sender, names.get(method, method)), *arguments)]


def cpu_s(pid: int | None) -> float:
    """Return the user and system time of a process in seconds; None is this process."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def sent_bytes() -> int:
    """Return the bytes that this process has sent over its open TCP connections (tcpi_bytes_sent in Linux)."""
    total = 0
    for endpoint in psutil.Process().net_connections("tcp"):
        if endpoint.raddr:
            with socket.socket(fileno=os.dup(endpoint.fd)) as connection:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 232)
                total += int.from_bytes(info[200:208], sys.byteorder)
    return total


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Return the median seconds of `repeats` calls, after one call as a warm-up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure(gb: float, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the seconds of each way to move the same bytes."""
    weights = tensors(gb, count, seed=0)
    size = sum(tensor.nbytes for tensor in weights.values())
    flat = torch.cat(list(weights.values())).view(torch.uint8)
    copy = torch.empty_like(flat)
    engine = Engine(gb, count, options.threads)
    seconds = {"memory copy": timed(lambda: copy.copy_(flat), options.repeats)}
    address = "{}:{}".format(*free_address())
    with multiprocessing.pool.ThreadPool(1) as pool:
        joining = pool.apply_async(engine.call, ("bare_connect", address))
        group = BroadcastGroup(address, 0, 2, "cpu", 60.0)
        joining.get()

        def bare() -> None:
            receiving = pool.apply_async(engine.call, ("bare_receive",))
            group.broadcast(flat)
            receiving.get()

        seconds["bare gloo broadcast"] = timed(bare, options.repeats)
    version = 0
    for route in ROUTES:
        with tempfile.TemporaryDirectory() as folder:
            trainer = Trainer(weights, int(options.bucket_gb * 1e9))
            weight_sync = WeightSync(trainer, lambda: [engine], route=route, deadline_s=600.0, folder=folder)

            with asyncio.Runner() as runner:

                def sync(weight_sync: WeightSync = weight_sync, runner: asyncio.Runner = runner) -> None:
                    nonlocal version
                    version += 1
                    runner.run(weight_sync.sync_all(version))

                seconds[route] = timed(sync, options.repeats)
            trainer.sender.disconnect()
    engine.close()
    return {"tensors": count, "bytes": size, "seconds": seconds}


def measure_changes(gb: float, route: str, in_place: bool, options: argparse.Namespace) -> Row:
    """Measure complete syncs and syncs of changed elements by one route."""
    weights = tensors(gb, 100, seed=0, dtype=torch.bfloat16)
    engine = Engine(gb, 100, options.threads, torch.bfloat16, in_place)
    engine.call("ready")
    row: Row = {"route": route, "in_place": in_place, "changed": options.changed}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        for only_changed in (False, True):
            trainer = Trainer(weights, int(options.bucket_gb * 1e9), "bfloat16", only_changed)
            weight_sync = WeightSync(trainer, lambda: [engine], route=route, deadline_s=600.0, folder=folder)
            seconds = []
            for repeat in range(options.repeats + 1):
                for index, weight in enumerate(weights.values()):
                    generator = torch.Generator().manual_seed(100 * repeat + index)
                    mask = torch.rand(weight.shape, generator=generator) < options.changed
                    weight.view(torch.int16)[mask] ^= 1
                start = time.perf_counter()
                runner.run(weight_sync.sync_all(engine.version + 1))
                seconds.append(time.perf_counter() - start)
            what = "changes" if only_changed else "complete"
            row |= {f"{what}_s": statistics.median(seconds[1:]), f"{what}_bytes": weight_sync.metrics["weights/bytes"]}
            trainer.sender.close()
    engine.close()
    return row


def only_changes(options: argparse.Namespace) -> list[Row]:
    """Measure every route with both kinds of engines, and print a line for each."""
    rows = []
    for gb in options.gb:
        print(f"{gb:g} GB of bfloat16 in 100 tensors, {options.changed:.1%} of the elements changed")
        print(f"  {'route':12}{'engine':10}complete s  changes s  time  bytes")
        for route in options.routes:
            for in_place in (True, False):
                row = measure_changes(gb, route, in_place, options)
                rows.append(row)
                print(
                    f"  {route:12}{'in place' if in_place else 'copy':10}{row['complete_s']:10.3f} "
                    f"{row['changes_s']:10.3f} {row['changes_s'] / row['complete_s']:5.2f} "
                    f"{row['changes_bytes'] / row['complete_bytes']:6.3f}",
                    flush=True,
                )
    return rows


def measure_engines(engines: list[Engine], weights: dict[str, Tensor], route: str, options: argparse.Namespace) -> Row:
    """Measure syncs by one route to all of these engines."""
    size = sum(tensor.nbytes for tensor in weights.values())
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        # Each engine needs a thread that waits for it. The default pool is too small: some engines would never start.
        runner.get_loop().set_default_executor(ThreadPoolExecutor(len(engines) + 4))
        trainer = Trainer(weights, int(options.bucket_gb * 1e9))
        weight_sync = WeightSync(trainer, lambda: engines, route=route, deadline_s=600.0, folder=folder)
        seconds, trainers, others, sent = [], [], [], 0
        for _ in range(options.repeats + 1):
            version = engines[0].version + 1
            start, own, theirs = time.perf_counter(), cpu_s(None), sum(engine.cpu_s for engine in engines)
            before = sent_bytes()
            runner.run(weight_sync.sync_all(version))
            seconds.append(time.perf_counter() - start)
            trainers.append(cpu_s(None) - own)
            others.append(sum(engine.cpu_s for engine in engines) - theirs)
            sent = sent_bytes() - before
        trainer.sender.disconnect()
    median = statistics.median(seconds[1:])
    return {
        "engines": len(engines),
        "route": route,
        "bytes": size,
        "s": median,
        "first_more_s": seconds[0] - median,
        "trainer_cpu_s": statistics.median(trainers[1:]),
        "engine_cpu_s": statistics.median(others[1:]) / len(engines),
        "sent": sent / size,
    }


def to_many(options: argparse.Namespace) -> list[Row]:
    """Measure every number of engines with every route, and print a line for each."""
    rows = []
    for gb in options.gb:
        weights = tensors(gb, 100, seed=0)
        engines = [Engine(gb, 100, options.threads) for _ in range(max(options.engines))]
        for engine in engines:
            engine.call("ready")
        print(f"{gb:g} GB in 100 tensors; CPU-s of the trainer, and of each engine")
        print(f"  {'route':12}engines        s  CPU-s trainer  CPU-s engine  first sync, more s  sent / model")
        for route in options.routes:
            for number in options.engines:
                row = measure_engines(engines[:number], weights, route, options)
                rows.append(row)
                print(
                    f"  {route:12}{number:7d} {row['s']:8.3f} {row['trainer_cpu_s']:14.3f} {row['engine_cpu_s']:13.3f} "
                    f"{row['first_more_s']:19.3f} {row['sent']:13.2f}",
                    flush=True,
                )
        for engine in engines:
            engine.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument(
        "--threads", type=int, default=max(1, torch.get_num_threads() // 2), help="threads of each of the two processes"
    )
    parser.add_argument("--bucket-gb", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--engines", type=int, nargs="+", help="numbers of engines to sync to at once")
    parser.add_argument("--changed", type=float, help="fraction of changed elements, to measure syncs of these only")
    parser.add_argument(
        "--routes", nargs="+", choices=ROUTES, default=ROUTES, help="routes to measure with --engines or --changed"
    )
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.engines or options.changed:
        rows = to_many(options) if options.engines else only_changes(options)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))
        return
    cases = [(gb, 100) for gb in options.gb] + [(0.1, 1), (0.1, 1000)]
    results = []
    for gb, count in cases:
        result = measure(gb, count, options)
        results.append(result)
        print(f"{gb:g} GB in {count} tensors")
        bare = result["seconds"]["bare gloo broadcast"]
        for name, seconds in result["seconds"].items():
            speed = f"{result['bytes'] / seconds / 1e9:7.2f} GB/s  {seconds:8.4f} s"
            print(f"  {name:22} {speed}  {bare / seconds:6.0%} of the bare broadcast's speed", flush=True)
    one, many = (next(r for r in results if r["tensors"] == count) for count in (1, 1000))
    for route in ROUTES:
        ratio = many["seconds"][route] / one["seconds"][route]
        print(f"1,000 x 100 KB against one of 100 MB, {route}: {ratio:.2f} x the time")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
