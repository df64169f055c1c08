"""Memory and file descriptors of a run do not grow with its number of steps."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from skyrl_train.testing.tiny_models import save_tiny_model

from .conftest import command

EARLY, LATE = 50, 200
WINDOW = 10
ROLES = ("main_base", "ray::_WorkerActor", "ray::_AsyncWorkerActor", "VLLM::", "sglang::")
MAX_GROWTH = 1.02
ENVIRONMENT = {
    "RAY_ADDRESS": "local",
    # oneDNN caches compiled kernels for the last 1024 shapes; the cache fills within the first 150 steps.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
}

Usage = dict[tuple[int, str], tuple[float, int]]


def measure(driver: subprocess.Popen[bytes]) -> Usage:
    """Return (resident memory in MiB, open file descriptors) of each process, by (process id, role)."""
    root = psutil.Process(driver.pid)
    usage = {}
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            role = next((role for role in ROLES if role in title), None)
            if role is not None and (role != "main_base" or process == root):
                usage[process.pid, role] = (process.memory_info().rss / 2**20, process.num_fds())
    return usage


def minimum(samples: list[Usage]) -> Usage:
    """Return the minimum of each process, which ignores connections and files that are open for a moment."""
    keys = set.intersection(*(set(sample) for sample in samples))
    return {key: (min(sample[key][0] for sample in samples), min(sample[key][1] for sample in samples)) for key in keys}


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("backend", ["transformers", "vllm", "sglang"])
def test_memory_and_descriptors_do_not_grow(small: Callable[[Path], list[str]], tmp_path: Path, backend: str):
    steps = [
        f"trainer.policy.model.path={save_tiny_model(tmp_path / 'model', kind='qwen3')}",  # vLLM supports its head size
        f"generator.backend={backend}",
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "generator.n_samples_per_prompt=2",
        "generator.sampling_params.max_generate_length=8",
        "trainer.eval_before_train=false",
        "trainer.ckpt_interval=20",
        "trainer.max_ckpts_to_keep=2",
        f"trainer.max_steps={LATE + WINDOW + 1}",
        f"trainer.epochs={LATE + WINDOW + 1}",
    ]
    with (tmp_path / "log").open("w") as log:
        driver = subprocess.Popen(
            command("main_base", [*small(tmp_path), *steps]),
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | ENVIRONMENT,
        )
    rows = tmp_path / "ckpts" / "metrics.jsonl"
    samples: dict[int, list[Usage]] = {EARLY: [], LATE: []}
    try:
        while driver.poll() is None:
            time.sleep(0.05)
            last = rows.read_text().count("\n") - 1 if rows.exists() else 0  # step 0 has a row, too
            for step in samples:
                if step <= last < step + WINDOW:
                    samples[step].append(measure(driver))
        assert driver.wait() == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        driver.kill()
        driver.wait()
    early, late = minimum(samples[EARLY]), minimum(samples[LATE])
    assert set(early) == set(late)
    assert {"main_base", "ray::_WorkerActor", "ray::_AsyncWorkerActor"} <= {role for _, role in early}
    for process, (memory, descriptors) in early.items():
        late_memory, late_descriptors = late[process]
        assert late_memory <= MAX_GROWTH * memory, (
            f"{process}: {memory:.1f} MiB after {EARLY} steps, {late_memory:.1f} after {LATE}"
        )
        assert late_descriptors <= descriptors, (
            f"{process}: {descriptors} descriptors after {EARLY} steps, {late_descriptors} after {LATE}"
        )
