"""GRPO that replays the experts that vLLM's V2 model runner chose, in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.vllm_v2 import ENVIRONMENT

from .conftest import REPOSITORY, command, metrics_of

START = "from tests.support import vllm_v2\nvllm_v2.enable()\n"
"""Runs in every process of the run: engines are actors, which import vLLM themselves."""


@pytest.mark.slow
@pytest.mark.on_demand
@pytest.mark.skipif(find_spec("vllm") is None or find_spec("triton") is None, reason="needs vLLM and Triton")
def test_routing_of_vllm_is_replayed_across_ranks(easy: Callable[[Path], list[str]], tmp_path: Path) -> None:
    (tmp_path / "start").mkdir()
    (tmp_path / "start" / "sitecustomize.py").write_text(START)
    model = save_tiny_model(tmp_path / "model", "qwen3_moe")
    overrides = [
        *easy(tmp_path),
        f"trainer.policy.model.path={model}",
        "trainer.max_steps=2",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.policy.sequence_parallel_size=2",
        "trainer.moe_routing_replay=rollout",
        "generator.backend=vllm",
        "generator.model_dtype=float32",
        "generator.weight_sync_check=probe",
    ]
    paths = os.pathsep.join([str(tmp_path / "start"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": paths}
    done = subprocess.run(
        command("main_base", overrides), env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = metrics_of(tmp_path)
    for step in (1, 2):
        assert rows[step]["weights/probe_gap"] <= 1e-4
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4
        assert rows[step]["policy/grad_norm"] > 0
