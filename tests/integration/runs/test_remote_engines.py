"""Remote engines: a run connects to the command `serve` by address and sends it its weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from skyrl_train.cluster.addresses import free_address

from .conftest import Run, metrics_of

TOKEN = "a-token-for-tests"
MESSAGES: Any = [{"role": "user", "content": "Say something."}]


@pytest.fixture
def server(tiny_model_path: str, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start `serve` with one transformers engine, wait until it serves, and yield its process and port."""
    _, port = free_address()
    overrides = [
        f"trainer.policy.model.path={tiny_model_path}",
        f"generator.http_endpoint_port={port}",
        "generator.served_model_name=tiny",
    ]
    with (tmp_path / "serve.err").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "skyrl_train.entrypoints.serve", *overrides],
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | {"SKYRL_API_KEY": TOKEN},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
        )
    assert process.stdout is not None
    try:
        last = f"Serving tiny at http://127.0.0.1:{port}/v1; the token is the value of SKYRL_API_KEY.\n"
        lines: list[str] = []
        while not (lines and lines[-1].startswith("Serving")):
            lines.append(process.stdout.readline())
            assert lines[-1], (tmp_path / "serve.err").read_text()
        assert lines[-1] == last
        assert TOKEN not in "".join(lines)
        yield process, port
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.slow
@pytest.mark.defect("group-signals-kill-ray-first")
@pytest.mark.parametrize("route", ["broadcast", pytest.param("checkpoint", marks=pytest.mark.on_demand)])
def test_serve_trains_with_a_run_and_stops_on_signal(
    run: Run,
    small: Callable[[Path], list[str]],
    server: tuple[subprocess.Popen[str], int],
    tmp_path: Path,
    route: str,
):
    process, port = server
    run(
        "main_base",
        *small(tmp_path),
        "generator.run_engines_locally=false",
        f"generator.remote_inference_engine_urls=['127.0.0.1:{port}']",
        "generator.weight_sync_check=probe",
        f"generator.weight_sync_route={route}",
        "trainer.eval_before_train=false",
        "trainer.max_steps=2",
        SKYRL_API_KEY=TOKEN,
    )
    rows = metrics_of(tmp_path)
    assert set(rows) == {0, 1, 2}
    for step in sorted(rows)[1:]:
        values = rows[step]
        assert values["weights/version"] == step
        assert values["weights/probe_gap"] <= 1e-4
        assert values["rollout/logprob_diff_max"] <= 1e-4

    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=TOKEN, max_retries=0) as client:
        answer = client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=8)
    assert answer.usage is not None and 0 < answer.usage.completion_tokens <= 8
    os.killpg(process.pid, signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    errors = (tmp_path / "serve.err").read_text()
    assert process.returncode == 0, errors
    assert TOKEN not in out + errors
