"""Part 21: seconds of each stage of the switch between vLLM and a trainer that share a GPU.

Five rounds of generating, training and a weight sync with a probe, with the package's offload manager in each mode.
The trainer runs in a process of its own, as in a run. Then engines wake caches of three sizes.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from skyrl_train.algorithms.losses import clipped_surrogate
from skyrl_train.algorithms.policy_objective import PolicyObjective
from skyrl_train.config.choices import ENGINES, STRATEGIES
from skyrl_train.config.predicates import OffloadMode
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.learner.worker import LearnerWorker, MiniBatch
from skyrl_train.trainer.offload_manager import ColocatedOffloadManager
from skyrl_train.weight_sync.sync import WeightSync
from tests.gpu_check.engines import load_engine
from tests.gpu_check.report import Report, Setting
from tests.gpu_check.training import TOY, make_batch, release_memory
from tests.support.learner_specs import tiny_spec

ROUNDS = 5
MAX_SWITCH_S = 0.3
"""Seconds that the stages of a step may take together, without generating and the update, if little has to move."""
UTILIZATIONS = (0.1, 0.4, 0.8)
PROBE = [[5, 9, 77, 12]] * 4


class StageTimer:
    """The seconds of named stages. A stage ends when the device has finished its work."""

    def __init__(self, device: str):
        self._device = device
        self.seconds: dict[str, list[float]] = defaultdict(list)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        if self._device == "cuda":
            torch.cuda.synchronize()
        self.seconds[name].append(time.perf_counter() - start)

    def timed(self, name: str, call: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def run(*args: Any) -> Any:
            suffix = f" {'+'.join(args[0])}" if name == "wake up" and args else ""
            with self.stage(name + suffix):
                return await call(*args)

        return run


class RankProcess:
    """A rank of the trainer in a process of its own, as `TrainerRanks` and with the methods that move a Learner."""

    def __init__(self, path: str, setting: Setting, timer: StageTimer):
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=serve_rank, args=(theirs, path, setting.device), daemon=True)
        self._process.start()
        theirs.close()
        self._lock = asyncio.Lock()
        self.offload = timer.timed("offload", partial(self.call, "offload"))
        self.onload = timer.timed("onload", partial(self.call, "onload"))
        self.onload_weights_only = timer.timed("onload weights only", partial(self.call, "onload_parameters_only"))
        self.free_transient_memory = timer.timed("free unused memory", partial(self.call, "free_transient_memory"))

    async def call(self, method: str, *args: Any) -> Any:
        async with self._lock:
            self._connection.send((method, args))
            error, result = await asyncio.to_thread(self._connection.recv)
        if error is not None:
            raise RuntimeError(error)
        return result

    async def call_all(self, method: str, *args: Any) -> list[Any]:
        return [await self.call(method, *args)]

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


def serve_rank(connection: Connection, path: str, device: str) -> None:
    """Run the rank's process: execute calls until the connection is closed."""
    dtype = "float32" if device == "cpu" else "bfloat16"
    spec = tiny_spec(
        path,
        strategy=STRATEGIES["fsdp2"],
        device=device,
        dtype=dtype,
        model_dtype=dtype,
        objective=PolicyObjective(partial(clipped_surrogate, eps_clip_low=0.2, eps_clip_high=0.2)),
    )
    worker = LearnerWorker(spec, 0, 1)
    worker.setup(*worker.address())
    batch = make_batch(64, 0)
    work = MiniBatch([batch], 1, int(batch.loss_mask.sum()))
    while True:
        try:
            method, args = connection.recv()
        except EOFError:
            return
        try:
            result = worker.update(work) if method == "update" else getattr(worker, method)(*args)
            if device == "cuda":
                torch.cuda.synchronize()
            connection.send((None, result))
        except Exception as error:
            connection.send((f"{type(error).__name__}: {error}", None))


def run(setting: Setting, report: Report) -> None:
    """Measure the stages in each mode, and then the time to wake up caches of several sizes.

    Raises:
        Missing: vLLM is not installed.
    """
    load_engine(ENGINES["vllm"])
    with tempfile.TemporaryDirectory() as folder:
        report.note("parameters", TOY.save(Path(folder)))
        with asyncio.Runner() as runner:
            for utilization in UTILIZATIONS[-1:] if setting.toy else UTILIZATIONS:
                engine = start_engine(folder, setting, utilization)
                try:
                    if utilization == UTILIZATIONS[0] or setting.toy:
                        for mode in OffloadMode:
                            runner.run(measure(mode, engine, folder, setting, report))
                    seconds = runner.run(cache_seconds(engine, setting))
                    report.note(f"wake up a cache of {utilization:g} of the GPU, s", seconds)
                finally:
                    runner.run(engine.close())
                    del engine
                    release_memory(setting.device)


def start_engine(path: str, setting: Setting, utilization: float) -> Any:
    arguments = {"dtype": "float32"} if setting.toy else {"dtype": "bfloat16", "gpu_memory_utilization": utilization}
    return load_engine(ENGINES["vllm"])(
        path, device=setting.device, max_num_seqs=16, max_model_len=1024, enforce_eager=True, **arguments
    )


async def cache_seconds(engine: Any, setting: Setting) -> float:
    timer = StageTimer(setting.device)
    for _ in range(ROUNDS):
        await engine.sleep(1, True)
        with timer.stage("wake up"):
            await engine.wake_up()
    return statistics.median(timer.seconds["wake up"])


async def measure(mode: OffloadMode, engine: Any, path: str, setting: Setting, report: Report) -> None:
    """Report the median seconds of each stage in `mode`."""
    timer = StageTimer(setting.device)
    rank, client = RankProcess(path, setting, timer), engine_client(engine, timer)
    try:
        await rank.call("ping")
        if mode is not OffloadMode.NONE:
            await engine.sleep(2, mode is OffloadMode.KV_CACHE)
        manager = ColocatedOffloadManager(client, rank, mode, level=2)  # type: ignore[arg-type]
        sync = WeightSync(rank, lambda: [engine], route="ipc", deadline_s=60, memory=manager)
        version = (await engine.health()).version
        for number in range(ROUNDS + 1):
            async with manager.training():
                with timer.stage("update"):
                    await rank.call("update")
                await manager.prepare_sync()
                with timer.stage("publish"):
                    await sync.sync_all(version + number + 1)
                await manager.prepare_scoring()
                with timer.stage("score"):
                    await engine.score(PROBE)
            async with manager.generating():
                with timer.stage("generate"):
                    await engine.generate([request(number, index) for index in range(16)])
            if not number:
                timer.seconds.clear()  # the first round allocates and compiles
        await engine.wake_up()
    finally:
        rank.kill()
    report_stages(mode, timer, setting, report)


def report_stages(mode: OffloadMode, timer: StageTimer, setting: Setting, report: Report) -> None:
    medians = {name: statistics.median(seconds) for name, seconds in timer.seconds.items()}
    for name, seconds in medians.items():
        report.note(f"{mode}: {name}, s ({len(timer.seconds[name]) / ROUNDS:g} times a step)", seconds)
    switch = sum(sum(times) for name, times in timer.seconds.items() if name not in ("update", "generate")) / ROUNDS
    if setting.toy or mode is OffloadMode.ALL:
        report.note(f"{mode}: all stages of a step, s", switch)
    else:
        report.at_most(f"{mode}: all stages of a step, s", switch, MAX_SWITCH_S)


def request(number: int, index: int) -> SampleRequest:
    sampling = SamplingParams(max_tokens=16, ignore_eos=True)
    return SampleRequest(f"{number}-{index}", to_token_array([5, 9, 77, index + 1]), sampling, index)


def engine_client(engine: Any, timer: StageTimer) -> Any:
    """Return an object with the methods of an EngineClient that free and allocate memory."""

    class Client:
        sleep = staticmethod(timer.timed("sleep", engine.sleep))
        wake_up = staticmethod(timer.timed("wake up", engine.wake_up))

    return Client()
