"""Part 17: speed of updates of 1.5B parameters, alone and beside a sleeping engine, and the engine's wake-up time."""

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
from tests.gpu_check.decoding import random_prompts
from tests.gpu_check.engines import load_engine
from tests.gpu_check.report import Report, Setting
from tests.gpu_check.training import TOY, Shape, Variant, measure

QWEN25_15B = Shape(1536, 8960, 28, 12, 2, 128, 151_936)
"""Sizes of Qwen2.5-1.5B, but with the query and key norms of Qwen3."""
REQUESTS = 64


def run(setting: Setting, report: Report) -> None:
    """Measure updates without an engine, then beside a sleeping one, then wake the engine up.

    Raises:
        Missing: vLLM is not installed.
        RuntimeError: The engine's process ended early.
    """
    load_engine(ENGINES["vllm"])
    shape, length, steps = (TOY, 256, 2) if setting.toy else (QWEN25_15B, 8192, 3)
    with tempfile.TemporaryDirectory() as folder:
        report.note("parameters", shape.save(Path(folder)))
        speed_alone, peak_alone = measure(folder, setting.device, Variant(True), length, steps)
        context = multiprocessing.get_context("spawn")
        connection, engine_connection = context.Pipe()
        engine = context.Process(target=serve, args=(engine_connection, folder, setting))
        engine.start()
        engine_connection.close()
        try:
            connection.recv()  # the engine has sampled, and now sleeps
            speed_beside, peak_beside = measure(folder, setting.device, Variant(True), length, steps)
            connection.send("wake up")
            wake_up_s, sampling_speed = connection.recv()
        except EOFError as error:
            raise RuntimeError("the engine's process ended; see its output above") from error
        finally:
            engine.kill()
            engine.join()
    report.note("updates alone: tok/s", speed_alone)
    report.note("updates beside a sleeping engine: tok/s", speed_beside)
    if not setting.toy:
        report.note("peak GiB of the trainer: alone, beside an engine", f"{peak_alone:.3g}, {peak_beside:.3g}")
        report.at_least("speed beside an engine / alone", speed_beside / speed_alone, 0.95)
    report.note("wake-up of the engine, s", wake_up_s)
    report.note(f"{REQUESTS} requests after the wake-up: tok/s", sampling_speed)


def serve(connection: Connection, path: str, setting: Setting) -> None:
    """Run the engine's process: sample, sleep, wait for a message, wake up and sample again."""
    arguments = {"device": setting.device, "max_num_seqs": REQUESTS, "max_model_len": 1024}
    arguments |= {"dtype": "float32"} if setting.toy else {"dtype": "bfloat16", "gpu_memory_utilization": 0.4}
    engine, new = load_engine(ENGINES["vllm"])(path, **arguments), 8 if setting.toy else 256
    sampling = SamplingParams(max_tokens=new, ignore_eos=True)

    def requests(run: int) -> list[SampleRequest]:
        return [
            SampleRequest(f"{run}-{seed}", to_token_array(ids), sampling, seed)
            for seed, ids in enumerate(random_prompts(REQUESTS, run))
        ]

    with asyncio.Runner() as runner:
        runner.run(engine.generate(requests(0)))
        runner.run(engine.sleep(1))
        connection.send("asleep")
        connection.recv()
        start = time.perf_counter()
        runner.run(engine.wake_up())
        awake = time.perf_counter()
        runner.run(engine.generate(requests(1)))
        connection.send((awake - start, REQUESTS * new / (time.perf_counter() - awake)))
        runner.run(engine.close())
