"""Runs on four Ray nodes: one of each kind is lost, and the run behaves as docs/guides/clusters.md says."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from skyrl_train.cluster.addresses import free_address
from skyrl_train.entrypoints.engines import main as engines
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.ray_nodes import RayNodes, ray_nodes

from .conftest import command, metrics_of

HEAD = 0
TRAINER, ENGINE = {"role": "trainer"}, {"role": "engine"}
APART = [
    "device=cpu",
    "trainer.epochs=4",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=0",
    "trainer.ckpt_interval=1",
    "trainer.placement.colocate_all=false",
    "trainer.placement.node_labels={role: trainer}",
    "trainer.placement.engine_node_labels={role: engine}",
    "trainer.placement.engine_strategy=SPREAD",
    "generator.num_inference_engines=2",
    "generator.weight_sync_check=probe",
]
"""Overrides of a run whose trainer and engines have separate nodes."""


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    """The driver's node, two for the trainer (1 and 2) and two for engines (3 and 4)."""
    with ray_nodes([{}] * 4, cpus=2, labels=[TRAINER, TRAINER, ENGINE, ENGINE]) as running:
        yield running


def run_and_lose(
    nodes: RayNodes,
    overrides: list[str],
    folder: Path,
    lost: int | Callable[[], int] | None,
    expect: int = 0,
    cwd: Path | None = None,
) -> str:
    """Return a run's output. A node is killed after the second step.

    Args:
        nodes: The cluster.
        overrides: The arguments of the run.
        folder: The run's folder is `ckpts` in it.
        lost: The node to kill, or a function that returns it at that time; None to kill none.
        expect: The expected exit status.
        cwd: The working folder of the driver.
    """
    metrics, log = folder / "ckpts" / "metrics.jsonl", folder / "run.log"
    deadline = time.monotonic() + 500
    with log.open("w") as output:
        driver = subprocess.Popen(
            command("main_base", overrides), stdout=output, stderr=output, cwd=cwd, env=os.environ | nodes.environment
        )
    try:
        while driver.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
            if lost is not None and metrics.exists() and re.search(r'"step": 2,', metrics.read_text()):
                nodes.kill(lost() if callable(lost) else lost)
                lost = None
    finally:
        driver.kill()
        driver.wait()
    assert driver.returncode == expect, log.read_text()[-6000:]
    return log.read_text()


def wait_until(driver: subprocess.Popen[bytes], pattern: str, file: Path, log: Path) -> None:
    """Wait until a pattern is in a file."""
    deadline = time.monotonic() + 240
    while not (file.exists() and re.search(pattern, file.read_text())):
        assert driver.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.1)


@pytest.mark.on_demand
@pytest.mark.slow
def test_engine_of_lost_node_restarts_elsewhere(small: Callable, nodes: RayNodes, tmp_path: Path):  # type: ignore[type-arg]
    overrides = [*small(tmp_path), *APART, "trainer.max_steps=5", "trainer.placement.policy_num_gpus_per_node=2"]
    output = run_and_lose(nodes, overrides, tmp_path, lost=3)
    assert re.search(r"engine \d died \(.*its node .* was lost.* and was restarted with the current weights", output)
    rows = metrics_of(tmp_path)
    assert set(rows) == set(range(6))
    assert rows[5]["engines/restarts"] == 1
    assert rows[5]["rollouts/failed"] == 0
    assert rows[5]["rollout/logprob_diff_max"] <= 1e-4


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_multi_node_engine_restarts_after_node_loss(
    small: Callable[[Path], list[str]], nodes: RayNodes, tmp_path: Path, rank: int
):
    """The scheduler runs with rank 0."""
    overrides = [
        *small(tmp_path),
        *APART,
        f"trainer.policy.model.path={save_tiny_model(tmp_path / 'qwen3', 'qwen3')}",
        "trainer.max_steps=5",
        "generator.backend=vllm",
        "generator.num_inference_engines=1",
        "generator.inference_engine_tensor_parallel_size=2",
        "trainer.placement.nodes_per_engine=2",
    ]

    def node_of_rank() -> int:
        titles = {node: [" ".join(process.cmdline()) for process in nodes.processes(node)] for node in (3, 4)}
        prefix = f"VLLM::Worker_TP{rank}"
        (node,) = [node for node in titles if any(title.startswith(prefix) for title in titles[node])]
        return node

    before = {*Path("/dev/shm").glob("psm_*")}
    output = run_and_lose(nodes, overrides, tmp_path, lost=node_of_rank)
    for file in {*Path("/dev/shm").glob("psm_*")} - before:  # left by vLLM on the killed node
        file.unlink()
    ended = (
        r"Killing engine 0, because one of its processes is gone: "
        r"engine 0 node 1 died during wait_until_exit: its node .* was lost"
    )
    assert bool(re.search(ended, output)) == (rank == 1), output[-4000:]
    assert re.search(r"engine 0 died .* and was restarted with the current weights", output), output[-4000:]
    assert "Traceback" not in output
    rows = metrics_of(tmp_path)
    assert set(rows) == set(range(6))
    assert rows[5]["engines/restarts"] == 1
    assert rows[5]["rollouts/failed"] == 0
    assert rows[5]["rollout/logprob_diff_max"] <= 1e-4


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_lost_trainer_node_ends_or_restarts_run(
    small: Callable[[Path], list[str]],
    nodes: RayNodes,
    tmp_path: Path,
    restarts: int,
):
    overrides = [*small(tmp_path), *APART, "trainer.max_steps=5", "trainer.placement.policy_num_gpus_per_node=4"]
    overrides.append(f"trainer.restarts={restarts}")
    output = run_and_lose(nodes, overrides, tmp_path, lost=2, expect=1 - restarts)
    assert re.search(rf"learner \d died during \w+: its node {nodes.addresses[2]} \(Ray's id \w+\) was lost", output)
    assert not list((tmp_path / "ckpts").glob("*.partial"))
    if restarts:
        assert "RESTART 1 of 1 (trainer.restarts)" in output
        assert "2 ranks (4 are configured) and 2 engines on the 4 remaining nodes" in output
        rows = metrics_of(tmp_path)
        assert set(rows) == set(range(6))
        assert (rows[5]["trainer/restarts"], rows[5]["trainer/ranks"]) == (1, 2)
    else:
        assert int((tmp_path / "ckpts" / "latest_ckpt_global_step.txt").read_text()) >= 1


@pytest.mark.on_demand
@pytest.mark.slow
def test_run_resumes_after_lost_head(easy: Callable, tmp_path: Path):  # type: ignore[type-arg]
    overrides = [*easy(tmp_path), "trainer.epochs=4", "trainer.max_steps=5", "trainer.ckpt_interval=1"]
    outputs = []
    for lost, expect in ((HEAD, 1), (None, 0)):
        with ray_nodes([{}] * 2) as nodes:
            outputs.append(run_and_lose(nodes, overrides, tmp_path, lost=lost, expect=expect))
    assert "Ray" in outputs[0] and "Traceback" not in outputs[0], outputs[0][-3000:]
    assert re.search(r"resumed at step [2-4] of 5", outputs[1])
    assert not list((tmp_path / "ckpts").glob("*.partial"))
    assert set(metrics_of(tmp_path)) == set(range(6))


@pytest.mark.defect("added-engines-use-loopback-address")
@pytest.mark.on_demand
@pytest.mark.slow
def test_engine_joins_on_later_node(easy: Callable[[Path], list[str]], tmp_path: Path):
    """All nodes are this machine, whose loopback reaches them all. So the test checks where rank 0 listens."""
    endless = ["device=cpu", "trainer.epochs=5000", "trainer.ckpt_interval=0", "trainer.placement.colocate_all=false"]
    folder, log = tmp_path / "ckpts", tmp_path / "run.log"
    with ray_nodes([], head_cpus=3) as nodes, log.open("w") as output:
        driver = subprocess.Popen(
            command("main_base", [*easy(tmp_path), *endless]),
            stdout=output,
            stderr=output,
            env=os.environ | nodes.environment,
        )
        try:
            wait_until(driver, '"step": 1,', folder / "metrics.jsonl", log)
            nodes.add(num_cpus=2)
            engines(["add", "2", str(folder)])  # the head has room for one engine, the new node for both
            wait_until(driver, "engine [12] joined(.|\n)*engine [12] joined", log, log)
            workers = [process for process in nodes.processes(0) if process.name().startswith("ray::_WorkerActor")]
            connections = [connection for worker in workers for connection in worker.net_connections()]
            assert nodes.addresses[0] in {each.laddr.ip for each in connections if each.status == "LISTEN"}
            assert any("AsyncWorkerActor" in process.name() for process in nodes.processes(1))
        finally:
            driver.terminate()
            driver.wait()


def server_of_client(nodes: RayNodes) -> psutil.Process:
    """Return the process on the head that serves the only client."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in nodes.host.children(recursive=True):
            with suppress(psutil.Error):
                if "--mode=specific-server" in process.cmdline():
                    return process
        time.sleep(0.02)
    raise AssertionError("no client connected")


@pytest.mark.defect("ray-client-run-ends-with-engine")
@pytest.mark.defect("ray-client-server-dies-in-fork")
@pytest.mark.on_demand
@pytest.mark.slow
def test_ray_client_driver_restarts_dead_engine(small: Callable[[Path], list[str]], tmp_path: Path):
    """The first server that the head starts for the client is killed, as happens now and then."""
    log, port = tmp_path / "run.log", free_address()[1]
    steps = ["device=cpu", "trainer.max_steps=40", "trainer.epochs=40", "trainer.eval_before_train=false"]
    with ray_nodes([], head_cpus=2, client_port=port) as nodes, log.open("w") as output:
        driver = subprocess.Popen(
            command("main_base", [*small(tmp_path), *steps]),
            stdout=output,
            stderr=output,
            env=os.environ | nodes.environment | {"RAY_ADDRESS": f"ray://{nodes.addresses[0]}:{port}"},
        )
        try:
            server_of_client(nodes).kill()
            wait_until(driver, '"step": 2,', tmp_path / "ckpts" / "metrics.jsonl", log)
            (engine,) = [process for process in nodes.processes(0) if "AsyncWorkerActor" in process.name()]
            engine.kill()
            assert driver.wait(timeout=120) == 0, log.read_text()[-6000:]
        finally:
            driver.kill()
            driver.wait()
    assert "server for this Ray client died; connecting again, attempt 2 of 4" in log.read_text()
    assert metrics_of(tmp_path)[40]["engines/restarts"] == 1


@pytest.mark.on_demand
@pytest.mark.slow
def test_gsm8k_recipe_trains_on_several_nodes(gsm8k_recipe: Path, nodes: RayNodes, tmp_path: Path):
    overrides = [
        "--config-dir=.",
        "--config-name=gsm8k",
        "data.train_data=[train.parquet]",
        "data.val_data=[validation.parquet]",
        f"trainer.policy.model.path={save_tiny_model(tmp_path / 'qwen3', 'qwen3')}",
        f"trainer.ckpt_path={tmp_path / 'ckpts'}",
        f"trainer.export_path={tmp_path / 'exports'}",
        *APART,
        "trainer.placement.strategy=SPREAD",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.logger=console",
        "trainer.train_batch_size=4",
        "trainer.policy_mini_batch_size=4",
        "trainer.max_prompt_length=1024",
        "trainer.max_steps=3",
        "generator.sampling_params.max_generate_length=16",
    ]
    run_and_lose(nodes, overrides, tmp_path, lost=None, cwd=gsm8k_recipe)
    last = metrics_of(tmp_path)[3]
    assert (last["weights/version"], last["rollouts/failed"]) == (3, 0)
    assert last["rollout/logprob_diff_max"] <= 1e-4


@pytest.mark.on_demand
@pytest.mark.slow
def test_checkpoint_of_four_ranks_resumes_with_fewer(easy: Callable, nodes: RayNodes, tmp_path: Path):  # type: ignore[type-arg]
    def overrides(folder: Path, ranks: int, steps: int) -> list[str]:
        shape = ["trainer.placement.strategy=SPREAD", f"trainer.placement.policy_num_gpus_per_node={ranks}"]
        return [*easy(folder), *APART, *shape, f"trainer.max_steps={steps}"]

    four = tmp_path / "4"
    four.mkdir()
    run_and_lose(nodes, overrides(four, 4, 2), four, lost=None)
    copies = {ranks: tmp_path / str(ranks) for ranks in (1, 2, 3)}
    for copy in copies.values():
        shutil.copytree(four, copy)
    run_and_lose(nodes, overrides(four, 4, 3), four, lost=None)
    expected = metrics_of(four)[3]
    assert expected["reward/mean"] > 0 < expected["reward/std"], "the rewards must differ"
    for ranks, folder in copies.items():
        assert "resumed at step 2 of 3" in run_and_lose(nodes, overrides(folder, ranks, 3), folder, lost=None)
        row = metrics_of(folder)[3]
        assert row["weights/version"] == 3
        for name in ("policy/loss", "policy/entropy", "policy/grad_norm", "reward/mean", "response/mean_tokens"):
            assert row[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (ranks, name)
