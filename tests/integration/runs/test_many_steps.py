"""A run of many steps takes no more memory and no more descriptors than one of few."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from .conftest import command, metrics_of

EARLY, LATE = 50, 200
ROLES = {"driver": "main_base", "engine": "ray::_AsyncShell", "learner": "ray::_Shell"}
MOST = 1.02


def look(driver: subprocess.Popen[bytes]) -> dict[str, tuple[float, int]]:
    """Role -> (MiB of memory of its own, open descriptors)."""
    root = psutil.Process(driver.pid)
    found = {}
    for process in [root, *root.children(recursive=True)]:
        title = " ".join(process.cmdline())
        for role, part in ROLES.items():
            if part in title and (role != "driver" or process == root):
                found[role] = (process.memory_info().rss / 2**20, process.num_fds())
    return found


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.parametrize("backend", ["transformers", "vllm", "sglang"])
def test_memory_and_descriptors_do_not_grow(small: Callable[[Path], list[str]], tmp_path: Path, backend: str):
    steps = [
        "trainer.train_batch_size=2",
        "trainer.policy_mini_batch_size=2",
        "generator.n_samples_per_prompt=2",
        "generator.sampling_params.max_generate_length=8",
        "trainer.eval_before_train=false",
        "trainer.ckpt_interval=20",
        "trainer.max_ckpts_to_keep=2",
        f"trainer.max_steps={LATE + 1}",
        f"trainer.epochs={LATE + 1}",
    ]
    driver = subprocess.Popen(
        command("main_base", [*small(tmp_path), *steps, f"generator.backend={backend}"]),
        stdout=(tmp_path / "log").open("w"),
        stderr=subprocess.STDOUT,
        env=os.environ | {"RAY_ADDRESS": "local"},
    )
    seen: dict[int, dict[str, tuple[float, int]]] = {}
    try:
        while driver.poll() is None and LATE not in seen:
            time.sleep(0.02)
            last = max(metrics_of(tmp_path), default=0) if (tmp_path / "ckpts" / "metrics.jsonl").exists() else 0
            for step in (EARLY, LATE):
                if last >= step and step not in seen:
                    seen[step] = look(driver)
        assert driver.wait(120) == 0, (tmp_path / "log").read_text()[-3000:]
    finally:
        driver.kill()
        driver.wait()
    assert set(seen[EARLY]) == set(seen[LATE]) == set(ROLES)
    for role in ROLES:
        (memory, descriptors), (later, more) = seen[EARLY][role], seen[LATE][role]
        assert later <= MOST * memory, f"{role}: {memory:.1f} MiB after {EARLY} steps, {later:.1f} after {LATE}"
        assert more <= descriptors, f"{role}: {descriptors} descriptors after {EARLY} steps, {more} after {LATE}"
