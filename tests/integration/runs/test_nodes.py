"""Runs over four Ray nodes: one of each kind is lost, and what docs/multi_node.md says happens."""

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
"""Of a run whose trainer and engines have nodes of their own."""


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    """The driver's, two for the trainer (1 and 2) and two for engines (3 and 4)."""
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
    """A run's output; node `lost`, or what it says then, is killed after the second step."""
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


def until(driver: subprocess.Popen[bytes], pattern: str, file: Path, log: Path) -> None:
    """Wait until this is in the file."""
    deadline = time.monotonic() + 240
    while not (file.exists() and re.search(pattern, file.read_text())):
        assert driver.poll() is None and time.monotonic() < deadline, log.read_text()[-6000:]
        time.sleep(0.1)


@pytest.mark.on_demand
@pytest.mark.slow
def test_a_lost_engine_s_node_costs_a_restart_elsewhere(small: Callable, nodes: RayNodes, tmp_path: Path):  # type: ignore[type-arg]
    overrides = [*small(tmp_path), *APART, "trainer.max_steps=5", "trainer.placement.policy_num_gpus_per_node=2"]
    said = run_and_lose(nodes, overrides, tmp_path, lost=3)
    assert re.search(r"engine \d died \(.*its node .* was lost.* and was restarted with the current weights", said)
    found = metrics_of(tmp_path)
    assert set(found) == set(range(6))
    assert found[5]["engines/restarts"] == 1
    assert found[5]["rollouts/failed"] == 0
    assert found[5]["rollout/logprob_diff_max"] <= 1e-4


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_an_engine_over_two_nodes_trains_and_is_started_again_when_either_is_lost(
    small: Callable[[Path], list[str]], nodes: RayNodes, tmp_path: Path, rank: int
):
    """The scheduler is where rank 0 is."""
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

    def of_rank() -> int:
        titles = {at: [" ".join(one.cmdline()) for one in nodes.processes(at)] for at in (3, 4)}
        (node,) = [at for at in titles if any(one.startswith(f"VLLM::Worker_TP{rank}") for one in titles[at])]
        return node

    before = {*Path("/dev/shm").glob("psm_*")}
    said = run_and_lose(nodes, overrides, tmp_path, lost=of_rank)
    for left in {*Path("/dev/shm").glob("psm_*")} - before:  # vLLM's, of a node that lost its power
        left.unlink()
    ended = r"engine 0 is ended, as a part of it is gone: engine 0 node 1 died during ended: its node .* was lost"
    assert bool(re.search(ended, said)) == (rank == 1), said[-4000:]
    assert re.search(r"engine 0 died .* and was restarted with the current weights", said), said[-4000:]
    assert "Traceback" not in said
    found = metrics_of(tmp_path)
    assert set(found) == set(range(6))
    assert found[5]["engines/restarts"] == 1
    assert found[5]["rollouts/failed"] == 0
    assert found[5]["rollout/logprob_diff_max"] <= 1e-4


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("restarts", [0, 1])
def test_a_lost_trainer_s_node_ends_the_run_or_starts_it_again_on_what_is_left(
    small: Callable[[Path], list[str]],
    nodes: RayNodes,
    tmp_path: Path,
    restarts: int,
):
    overrides = [*small(tmp_path), *APART, "trainer.max_steps=5", "trainer.placement.policy_num_gpus_per_node=4"]
    overrides.append(f"trainer.restarts={restarts}")
    said = run_and_lose(nodes, overrides, tmp_path, lost=2, expect=1 - restarts)
    assert re.search(rf"learner \d died during \w+: its node {nodes.addresses[2]} \(Ray's id \w+\) was lost", said)
    assert not list((tmp_path / "ckpts").glob("*.partial"))
    if restarts:
        assert "RESTART 1 of the 1 of trainer.restarts" in said
        assert "2 ranks (4 are configured) and 2 engines on the 4 nodes that are left" in said
        found = metrics_of(tmp_path)
        assert set(found) == set(range(6))
        assert (found[5]["trainer/restarts"], found[5]["trainer/ranks"]) == (1, 2)
    else:
        assert int((tmp_path / "ckpts" / "latest_ckpt_global_step.txt").read_text()) >= 1


@pytest.mark.on_demand
@pytest.mark.slow
def test_a_lost_head_ends_the_run_and_the_same_command_resumes_it(easy: Callable, tmp_path: Path):  # type: ignore[type-arg]
    overrides = [*easy(tmp_path), "trainer.epochs=4", "trainer.max_steps=5", "trainer.ckpt_interval=1"]
    said = []
    for lost, expect in ((HEAD, 1), (None, 0)):
        with ray_nodes([{}] * 2) as nodes:
            said.append(run_and_lose(nodes, overrides, tmp_path, lost=lost, expect=expect))
    assert "Ray" in said[0] and "Traceback" not in said[0], said[0][-3000:]
    assert re.search(r"resumed at step [2-4] of 5", said[1])
    assert not list((tmp_path / "ckpts").glob("*.partial"))
    assert set(metrics_of(tmp_path)) == set(range(6))


@pytest.mark.defect("newcomers-on-other-nodes-are-told-loopback")
@pytest.mark.on_demand
@pytest.mark.slow
def test_an_engine_joins_on_a_node_that_came_after_the_run_began_on_one(
    easy: Callable[[Path], list[str]], tmp_path: Path
):
    """All nodes are this machine, whose loopback leads to every one: where rank 0 listens is what counts."""
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
            until(driver, '"step": 1,', folder / "metrics.jsonl", log)
            nodes.add(num_cpus=2)
            engines(["add", "2", str(folder)])  # the head has room for one, the new node for both
            until(driver, "engine [12] joined(.|\n)*engine [12] joined", log, log)
            workers = [one for one in nodes.processes(0) if one.name().startswith("ray::_WorkerActor")]
            listening = {one.laddr.ip for rank in workers for one in rank.net_connections() if one.status == "LISTEN"}
            assert nodes.addresses[0] in listening
            assert any("AsyncShell" in one.name() for one in nodes.processes(1))
        finally:
            driver.terminate()
            driver.wait()


def server_of_client(nodes: RayNodes) -> psutil.Process:
    """The process of the head that serves the one client there is."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in nodes.host.children(recursive=True):
            with suppress(psutil.Error):
                if "--mode=specific-server" in process.cmdline():
                    return process
        time.sleep(0.02)
    raise AssertionError("no client came")


@pytest.mark.defect("an-engine-s-death-ends-a-run-behind-a-ray-client")
@pytest.mark.defect("a-client-s-server-died-as-it-was-forked")
@pytest.mark.on_demand
@pytest.mark.slow
def test_a_driver_behind_a_ray_client_trains_and_starts_an_engine_again(
    small: Callable[[Path], list[str]], tmp_path: Path
):
    """Nor does the first server that the head starts for it live, as now and then one does not."""
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
            until(driver, '"step": 2,', tmp_path / "ckpts" / "metrics.jsonl", log)
            (engine,) = [one for one in nodes.processes(0) if "AsyncShell" in one.name()]
            engine.kill()
            assert driver.wait(timeout=120) == 0, log.read_text()[-6000:]
        finally:
            driver.kill()
            driver.wait()
    assert "server for this Ray client died; asking for another, 2 of 4" in log.read_text()
    assert metrics_of(tmp_path)[40]["engines/restarts"] == 1


@pytest.mark.on_demand
@pytest.mark.slow
def test_the_gsm8k_recipe_over_nodes(gsm8k_recipe: Path, nodes: RayNodes, tmp_path: Path):
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
def test_a_run_saved_by_four_ranks_resumes_with_one_two_and_three(easy: Callable, nodes: RayNodes, tmp_path: Path):  # type: ignore[type-arg]
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
    wanted = metrics_of(four)[3]
    assert wanted["reward/mean"] > 0 < wanted["reward/std"], "something to learn from"
    for ranks, folder in copies.items():
        assert "resumed at step 2 of 3" in run_and_lose(nodes, overrides(folder, ranks, 3), folder, lost=None)
        got = metrics_of(folder)[3]
        assert got["weights/version"] == 3
        for name in ("policy/loss", "policy/entropy", "policy/grad_norm", "reward/mean", "response/mean_tokens"):
            assert got[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6), (ranks, name)
