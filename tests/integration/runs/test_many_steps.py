"""A run of many steps takes no more memory and no more descriptors than one of few."""

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
MOST = 1.02
ENVIRONMENT = {
    "RAY_ADDRESS": "local",
    # oneDNN keeps the kernels it compiled for the last 1024 shapes, which fill within the first 150 steps.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "0",
}

Looks = dict[tuple[int, str], tuple[float, int]]


def look(driver: subprocess.Popen[bytes]) -> Looks:
    """(Process, its role) -> (MiB of memory of its own, open descriptors)."""
    root = psutil.Process(driver.pid)
    found = {}
    for process in [root, *root.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            role = next((role for role in ROLES if role in title), None)
            if role is not None and (role != "main_base" or process == root):
                found[process.pid, role] = (process.memory_info().rss / 2**20, process.num_fds())
    return found


def least(looks: list[Looks]) -> Looks:
    """What a process held at its quietest: a connection or a file that is open for a moment is not growth."""
    every = set.intersection(*(set(each) for each in looks))
    return {key: (min(each[key][0] for each in looks), min(each[key][1] for each in looks)) for key in every}


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("backend", ["transformers", "vllm", "sglang"])
def test_memory_and_descriptors_do_not_grow(small: Callable[[Path], list[str]], tmp_path: Path, backend: str):
    steps = [
        f"trainer.policy.model.path={save_tiny_model(tmp_path / 'model', kind='qwen3')}",  # a head's size vLLM has
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
    looks: dict[int, list[Looks]] = {EARLY: [], LATE: []}
    try:
        while driver.poll() is None:
            time.sleep(0.05)
            last = rows.read_text().count("\n") - 1 if rows.exists() else 0  # step 0 has a row, too
            for step in looks:
                if step <= last < step + WINDOW:
                    looks[step].append(look(driver))
        assert driver.wait() == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        driver.kill()
        driver.wait()
    early, late = least(looks[EARLY]), least(looks[LATE])
    assert set(early) == set(late)
    assert {"main_base", "ray::_WorkerActor", "ray::_AsyncWorkerActor"} <= {role for _, role in early}
    for process, (memory, descriptors) in early.items():
        later, more = late[process]
        assert later <= MOST * memory, f"{process}: {memory:.1f} MiB after {EARLY} steps, {later:.1f} after {LATE}"
        assert more <= descriptors, f"{process}: {descriptors} descriptors after {EARLY} steps, {more} after {LATE}"
