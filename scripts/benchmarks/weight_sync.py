"""GB per second of a weight sync by each route, beside a plain memory copy and a bare gloo broadcast of the same bytes.

    python scripts/benchmarks/weight_sync.py [--gb 0.1 1] [--threads N] [--bucket-gb 0.25] [--repeats N] [--json FILE]

Trainer and engine are two processes, as in a run; the engine holds plain tensors. Per route the median of the repeats
counts, with everything a sync does: manifest, both fingerprints, transfer, load, commit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import multiprocessing.pool
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from skyrl_train.engines.base import Capabilities, EngineHealth
from skyrl_train.weight_sync.publish import WeightPublisher
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.sender import WeightSender
from skyrl_train.weight_sync.store import InPlace
from skyrl_train.weight_sync.transport import BroadcastGroup

ROUTES = ("broadcast", "ipc", "checkpoint")


def tensors(gb: float, count: int, seed: int) -> dict[str, Tensor]:
    """`count` random fp32 tensors of `gb` GB in all."""
    generator = torch.Generator().manual_seed(seed)
    numel = int(gb * 1e9) // 4 // count
    return {f"layer.{index}.weight": torch.randn(numel, generator=generator) for index in range(count)}


def serve(connection: Connection, gb: float, count: int, threads: int) -> None:
    """The engine's process: calls what it is told to until told None."""
    torch.set_num_threads(threads)
    held = tensors(gb, count, seed=1)
    receiver = WeightReceiver(InPlace(lambda: held), "engine")
    groups: list[BroadcastGroup] = []
    buffer = torch.zeros(sum(tensor.nbytes for tensor in held.values()), dtype=torch.uint8)

    def bare_connect(address: str) -> None:
        groups.append(BroadcastGroup(address, 1, 2, "cpu", 60.0))

    def bare_receive() -> None:
        groups[0].broadcast(buffer)

    calls: dict[str, Callable[..., Any]] = {"bare_connect": bare_connect, "bare_receive": bare_receive}
    while (call := connection.recv()) is not None:
        method, arguments = call
        try:
            connection.send((None, calls.get(method, getattr(receiver, method, None))(*arguments)))  # type: ignore[misc]
        except Exception as error:
            connection.send((f"{type(error).__name__}: {error}", None))


class Engine:
    """The other process as a WeightTarget."""

    def __init__(self, gb: float, count: int, threads: int):
        context = multiprocessing.get_context("spawn")
        self._here, there = context.Pipe()
        self._process = context.Process(target=serve, args=(there, gb, count, threads), daemon=True)
        self._process.start()
        self.capabilities = Capabilities("engine")
        self._version = 0

    def call(self, method: str, *arguments: Any) -> Any:
        self._here.send((method, arguments))
        error, answer = self._here.recv()
        if error is not None:
            raise RuntimeError(error)
        return answer

    async def connect_weights(self, *arguments: Any) -> None:
        await asyncio.to_thread(self.call, "connect", *arguments)

    async def begin_weights(self, manifest: Any) -> None:
        await asyncio.to_thread(self.call, "begin", manifest)

    async def receive_weights(self, bucket: Any) -> None:
        await asyncio.to_thread(self.call, "receive", bucket)

    async def commit_weights(self, version: int) -> None:
        await asyncio.to_thread(self.call, "commit", version)
        self._version = version

    async def score(self, token_ids: Any, temperature: float = 1.0) -> list[list[float]]:
        return []

    async def health(self) -> EngineHealth:
        return EngineHealth("engine", self._version)

    def close(self) -> None:
        self._here.send(None)
        self._process.join()


class Trainer:
    """This process as the trainer's one rank."""

    def __init__(self, held: dict[str, Tensor], bucket_bytes: int):
        def parameters() -> Iterator[tuple[str, Tensor]]:
            yield from held.items()

        self.sender = WeightSender(parameters, wire_dtype="float32", bucket_bytes=bucket_bytes, rank=0)

    async def all(self, method: str, *arguments: Any) -> list[Any]:
        names = {
            "send_weights": "send",
            "connect_weights": "connect",
            "disconnect_weights": "disconnect",
            "weights_delivered": "delivered",
        }
        if method == "address":
            return [free_address()]
        return [await asyncio.to_thread(getattr(self.sender, names.get(method, method)), *arguments)]


def free_address() -> tuple[str, int]:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return "127.0.0.1", int(probe.getsockname()[1])


def timed(work: Callable[[], Any], repeats: int) -> float:
    """Median seconds; one more run before warms up."""
    seconds = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[1:])


def measure(gb: float, count: int, options: argparse.Namespace) -> dict[str, Any]:
    """Seconds of every way to move the same bytes."""
    held = tensors(gb, count, seed=0)
    size = sum(tensor.nbytes for tensor in held.values())
    flat = torch.cat(list(held.values())).view(torch.uint8)
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
            trainer = Trainer(held, int(options.bucket_gb * 1e9))
            publisher = WeightPublisher(trainer, lambda: [engine], route=route, deadline_s=600.0, folder=folder)

            with asyncio.Runner() as runner:

                def sync(publisher: WeightPublisher = publisher, runner: asyncio.Runner = runner) -> None:
                    nonlocal version
                    version += 1
                    runner.run(publisher.publish(version))

                seconds[route] = timed(sync, options.repeats)
            trainer.sender.disconnect()
    engine.close()
    return {"tensors": count, "bytes": size, "seconds": seconds}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, nargs="+", default=[0.1, 1.0])
    parser.add_argument(
        "--threads", type=int, default=max(1, torch.get_num_threads() // 2), help="of each of the two processes"
    )
    parser.add_argument("--bucket-gb", type=float, default=0.25)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
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
