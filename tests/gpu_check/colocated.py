"""Part 17: updates of 1.5B parameters, alone and beside a sleeping engine, and the time to switch between them."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from skyrl_train.config.choices import ENGINES
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from tests.gpu_check.decoding import prompts
from tests.gpu_check.engines import load_engine
from tests.gpu_check.report import Report, Setting
from tests.gpu_check.training import TOY, Shape, measure

QWEN25_15B = Shape(1536, 8960, 28, 12, 2, 128, 151_936)
"""Qwen2.5-1.5B's sizes, with Qwen3's norms of heads."""
REQUESTS = 64


def run(setting: Setting, report: Report) -> None:
    """Raises Missing where vLLM is not installed."""
    load_engine(ENGINES["vllm"])
    shape, length, steps = (TOY, 256, 2) if setting.toy else (QWEN25_15B, 8192, 3)
    with tempfile.TemporaryDirectory() as folder:
        report.note("parameters", shape.save(Path(folder)))
        alone, most = measure(folder, setting.device, True, length, steps)
        context = multiprocessing.get_context("spawn")
        here, there = context.Pipe()
        engine = context.Process(target=serve, args=(there, folder, setting))
        engine.start()
        there.close()
        try:
            here.recv()  # it has served, and sleeps
            beside, most_beside = measure(folder, setting.device, True, length, steps)
            here.send("wake up")
            woken, speed = here.recv()
        except EOFError as error:
            raise RuntimeError("the engine's process ended; see its output above") from error
        finally:
            engine.kill()
            engine.join()
    report.note("updates alone: tok/s", alone)
    report.note("updates beside an engine asleep: tok/s", beside)
    if not setting.toy:
        report.note("peak GiB of the trainer: alone, beside", f"{most:.3g}, {most_beside:.3g}")
        report.at_least("beside / alone", beside / alone, 0.95)
    report.note("the engine woken, s", woken)
    report.note(f"{REQUESTS} requests after that: tok/s", speed)


def serve(connection: Connection, path: str, setting: Setting) -> None:
    """An engine that samples, sleeps, and on a word wakes up and samples again."""
    given = {"device": setting.device, "max_num_seqs": REQUESTS, "max_model_len": 1024}
    more = {"dtype": "float32"} if setting.toy else {"dtype": "bfloat16", "gpu_memory_utilization": 0.4}
    engine, new = load_engine(ENGINES["vllm"])(path, **given, **more), 8 if setting.toy else 256
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)

    def requests(run: int) -> list[SampleRequest]:
        return [
            SampleRequest(f"{run}-{seed}", to_token_array(ids), sampling, seed)
            for seed, ids in enumerate(prompts(REQUESTS, run))
        ]

    with asyncio.Runner() as runner:
        runner.run(engine.generate(requests(0)))
        runner.run(engine.sleep(1))
        connection.send("asleep")
        connection.recv()
        start = time.perf_counter()
        runner.run(engine.wake_up())
        woken = time.perf_counter()
        runner.run(engine.generate(requests(1)))
        connection.send((woken - start, REQUESTS * new / (time.perf_counter() - woken)))
        runner.run(engine.close())
