from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.environments.tasks.arithmetic import generate

Run = Callable[..., subprocess.CompletedProcess[str]]


def command(entrypoint: str, overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", f"skyrl_train.entrypoints.{entrypoint}", *overrides]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """An entrypoint as a user starts it; fails with its output when it does not exit with 0 (or `expect`)."""

    def start(entrypoint: str, *overrides: str, expect: int = 0, **env: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            command(entrypoint, list(overrides)),
            cwd=tmp_path,
            env=os.environ | env,
            capture_output=True,
            text=True,
            timeout=560,
            check=False,
        )
        assert done.returncode == expect, done.stdout[-4000:] + done.stderr[-6000:]
        return done

    return start


@pytest.fixture(scope="session")
def arithmetic(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """train.jsonl (24 problems) and validation.jsonl (8)."""
    folder = tmp_path_factory.mktemp("arithmetic")
    for split, count in (("train", 24), ("validation", 8)):
        rows = generate(count, 2, 9, 0, split)
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def small(arithmetic: Path, tiny_model_path: str) -> Callable[[Path], list[str]]:
    """Overrides of a run of seconds: 4 prompts x 4 samples, 16 tokens, one evaluation before and one after.

    No reference model, which is a process more to start; tests of it say `trainer.algorithm.use_kl_loss=true`.
    """

    def overrides(folder: Path) -> list[str]:
        return [
            f"data.train_data=['{arithmetic / 'train.jsonl'}']",
            f"data.val_data=['{arithmetic / 'validation.jsonl'}']",
            f"trainer.policy.model.path={tiny_model_path}",
            f"trainer.ckpt_path={folder / 'ckpts'}",
            f"trainer.export_path={folder / 'exports'}",
            "trainer.logger=console",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=4",
            "trainer.max_tokens_per_microbatch=2048",
            "trainer.policy.optimizer_config.lr=1e-3",
            "trainer.algorithm.use_kl_loss=false",
            "trainer.ckpt_interval=2",
            "trainer.eval_interval=100",
            "generator.n_samples_per_prompt=4",
            "generator.sampling_params.max_generate_length=16",
            "environment.env_class=arithmetic",
        ]

    return overrides


LOWER_CASE = """
from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.environments.registry import register


class LowerCaseEnv(BaseTextEnv):
    def step(self, action):
        reward = sum(c.isascii() and c.islower() for c in action) / max(len(action), 1)
        return BaseTextEnvStepOutput(observations=[], reward=reward, done=True, metadata={})


register("lower_case", "lower_case_plugin:LowerCaseEnv")
"""


@pytest.fixture
def easy(small: Callable[[Path], list[str]]) -> Callable[[Path], list[str]]:
    """`small` with a task that a random model gets rewards in: the share of lower-case letters in what it writes.

    The folder must be on PYTHONPATH.
    """

    def overrides(folder: Path) -> list[str]:
        (folder / "lower_case_plugin.py").write_text(LOWER_CASE)
        rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [
            *(one for one in small(folder) if not one.startswith(("environment.", "data."))),
            f"data.train_data=['{folder / 'rows.jsonl'}']",
            "data.val_data=[]",
            "environment.env_class=lower_case",
            "trainer.plugins=[lower_case_plugin]",
            "trainer.eval_before_train=false",
            "trainer.eval_interval=0",
        ]

    return overrides


def metrics_of(folder: Path) -> dict[int, dict[str, Any]]:
    """metrics.jsonl by step, without what a clock decides."""
    found: dict[int, dict[str, Any]] = {}
    for line in (folder / "ckpts" / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        found.setdefault(row["step"], {}).update(
            {
                k: v
                for k, v in row.items()
                if not k.startswith(("timing/", "throughput/", "engines/tokens_per_s", "time", "memory/"))
            }
        )
    return found
