"""The logs of a run, a file for each role, and the part of them on the terminal."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from .conftest import command

TALKATIVE = """
import json
import os
import sys
import warnings

import torch
import skyrl_train as sk
from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.environments.registry import register

updates = 0


@sk.register.policy_loss("talkative")
def talkative(logprobs, advantages, mask, *, eps_clip_low, eps_clip_high):
    global updates
    updates += 1
    print("a loss prints", updates, os.environ.get("SOME_API_KEY"))
    os.write(2, b"as a library's C code does\\n")
    if updates > int(os.environ.get("GOOD_UPDATES", "1000")):
        return logprobs / 0 // divide(mask), mask
    return -logprobs * advantages * mask, torch.zeros_like(mask)


def divide(mask):
    return len(mask) // 0


@sk.register.advantage("warning")
def warning(rewards, group_ids, valid, *, grpo_norm_by_std):
    if "GOOD_UPDATES" in os.environ:
        warnings.warn_explicit("a library would be outdated", UserWarning, json.__file__, 1)
        warnings.warn("a person should look at this")
    return torch.where(valid, rewards - rewards[valid].mean(), 0.0)


class Talks(BaseTextEnv):
    def step(self, action):
        print("an environment prints", os.environ.get("SOME_API_KEY"), file=sys.stderr)
        return BaseTextEnvStepOutput(observations=[], reward=float(len(action) % 3), done=True, metadata={})


register("talks", "talkative_plugin:Talks")
"""
SECRET = "5ecret-0f-a-user"


def test_each_role_logs_to_own_file(plugins: Path, small: Callable[[Path], list[str]], tmp_path: Path):
    (plugins / "talkative_plugin.py").write_text(TALKATIVE)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(f'{{"prompt": [{{"role": "user", "content": "say {i}"}}]}}\n' for i in range(24)))
    overrides = [
        *(override for override in small(tmp_path) if not override.startswith("data.")),
        f"data.train_data=['{data}']",
        "trainer.eval_before_train=false",
        "trainer.eval_interval=0",
        "trainer.plugins=[talkative_plugin]",
        "environment.env_class=talks",
        "trainer.algorithm.policy_loss_type=talkative",
        "trainer.algorithm.advantage_estimator=warning",
    ]

    env = os.environ | {"GOOD_UPDATES": "2", "SOME_API_KEY": SECRET}
    failed = subprocess.run(
        command("main_base", overrides), capture_output=True, text=True, env=env, timeout=400, check=False
    )
    assert failed.returncode == 1, failed.stderr
    logs = tmp_path / "ckpts" / "logs"
    line = TALKATIVE[: TALKATIVE.index("return len(mask) // 0")].count("\n") + 1
    ended, where, cause = failed.stderr.splitlines()[-3:]
    assert where == f"The traceback is in {logs / 'driver.log'}."
    assert ended == "The run ended in step 3 of 6."
    place = f"{plugins / 'talkative_plugin.py'}:{line} in divide"
    assert cause.startswith("learner 0.update: ZeroDivisionError: ") and cause.endswith(f" ({place})"), cause

    assert {path.name for path in logs.iterdir()} == {"driver.log", "environments.log", "learner_0.log", "engine_0.log"}
    driver, learner, environments = (
        (logs / f"{name}.log").read_text() for name in ("driver", "learner_0", "environments")
    )
    assert "Traceback (most recent call last)" in driver and "return len(mask) // 0" in driver
    assert re.search(r"^\S+ \S+ WARNING py.warnings: .*a library would be outdated", driver, re.MULTILINE)
    assert re.search(r"INFO skyrl_train.report.console: step 2/6 ", driver)
    assert learner.startswith("--- learner 0, process ")
    assert "a loss prints 1 <SOME_API_KEY>\nas a library's C code does\na loss prints 2 " in learner
    assert "an environment prints <SOME_API_KEY>\n" in environments
    output = failed.stdout + failed.stderr
    assert f"note: environments print to {logs / 'environments.log'}\n" in output
    assert "a person should look at this" in output
    only_in_logs = ("a loss prints", "an environment prints", "C code", "outdated", "(most recent call last)")
    for absent in (SECRET, "pid=", "_AsyncWorkerActor", *only_in_logs):
        assert absent not in output, output
