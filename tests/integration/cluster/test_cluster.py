"""Slots, actors and the Ray cluster on a real Ray."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray import cloudpickle
from tensordict import TensorDict

from skyrl_train.cluster.actors import ActorProxy, spawn
from skyrl_train.cluster.placement import cpus_per_slot, reserve_pool
from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.cluster.stack_dumps import collect_stacks
from skyrl_train.config.predicates import count_slots
from skyrl_train.config.schema import GeneratorConfig, PlacementConfig
from skyrl_train.errors import ConfigError, DeadlineExceeded, WorkerDied
from skyrl_train.experiment.placement import RunPlacement, reserve_slots
from skyrl_train.learner.batch_sharding import StoredCall
from skyrl_train.learner.learner import BatchSizes, Learner, WorkerGroup
from skyrl_train.tensordict.wrappers.backends import RemoteTransformersWrapper
from tests.integration.cluster.subject import ValuesAsTuple
from tests.support.padded_reference import grouped_batch

SUBJECT = "tests.integration.cluster.subject:Subject"
CPUS = os.cpu_count() or 1
KINDS: dict[str, dict[str, Any]] = {
    "sync": {},
    "async": {"is_async": True},
    "child process": {"is_async": True, "in_child_process": True},
}
PRELOADED = "sched"
"""A module that no other test of this file imports."""
RAY_IDLE_WORKER_TIMEOUT_S = 3.0


@pytest.fixture(scope="module")
def ray_runtime() -> Iterator[None]:
    with Cluster(num_actors=CPUS, preload=[PRELOADED]):
        yield


@pytest.fixture
def cluster(ray_runtime: None) -> Iterator[Cluster]:
    """A run's cluster on the module's Ray. Its slots and actors end with the test."""
    with Cluster() as running:
        yield running


def start(
    cluster: Cluster,
    is_async: bool = False,
    deadline_s: float = 180.0,
    deadlines: dict[str, float] | None = None,
    in_child_process: bool = False,
    **kwargs: bool,
) -> ActorProxy:
    slots = reserve_pool(cluster, count=1, actors_per_slot=1, device="cpu", total_slots=8, deadline_s=10, key="test")
    return spawn(
        cluster, SUBJECT, kwargs, pool=slots, index=0, name="subject", is_async=is_async,
        deadline_s=deadline_s, deadlines=deadlines, in_child_process=in_child_process,
    )  # fmt: skip


def idle_workers() -> set[int]:
    children = psutil.Process().children(recursive=True)
    return {child.pid for child in children if "ray::IDLE" in " ".join(child.cmdline())}


def test_preloaded_workers_become_actors(cluster: Cluster):
    deadline = time.monotonic() + 60
    while len(workers := idle_workers()) < CPUS and time.monotonic() < deadline:
        time.sleep(0.1)
    slots = reserve_pool(
        cluster, count=CPUS, actors_per_slot=1, device="cpu", total_slots=CPUS, deadline_s=10, key="test"
    )
    time.sleep(RAY_IDLE_WORKER_TIMEOUT_S)
    kwargs: dict[str, Any] = {"pool": slots, "name": "subject", "deadline_s": 60.0}
    subjects = [spawn(cluster, SUBJECT, {}, index=index, is_async=index == 0, **kwargs) for index in range(CPUS)]

    async def run() -> list[tuple[int, bool]]:
        return list(await asyncio.gather(*(subject.process(PRELOADED) for subject in subjects)))

    assert set(asyncio.run(run())) == {(worker, True) for worker in workers}


@pytest.mark.parametrize(
    "event",
    [
        "part dies",
        "part fails",
        "owner dies",
        *(pytest.param(event, marks=pytest.mark.on_demand) for event in ("part exits", "owner is killed")),
    ],
)
def test_linked_processes_end_together(cluster: Cluster, event: str, caplog: pytest.LogCaptureFixture):
    async def run() -> None:
        owner, part = (start(cluster, is_async=True) for _ in range(2))
        assert [await record.add(1, 2) for record in (owner, part)] == [3, 3]
        owner.link_lifetimes([part], cluster)
        waiting = asyncio.ensure_future((part if event.startswith("owner") else owner).wait(60.0))
        await asyncio.sleep(0.5)
        if event == "owner is killed":
            owner.kill()
        elif event.endswith("dies"):
            with pytest.raises(WorkerDied):
                await (part if event.startswith("part") else owner).die()
        else:
            await part.end(ValueError("of its own kind") if event == "part fails" else None)
        with pytest.raises(WorkerDied):
            await asyncio.wait_for(waiting, 20)

    asyncio.run(run())
    messages = [
        record.getMessage()
        for record in caplog.records
        if "because one of its processes is gone" in record.getMessage()
    ]
    assert len(messages) == event.startswith("part")


async def connected_ranks(cluster: Cluster, deadline_s: float) -> tuple[WorkerGroup, list[int]]:
    """Return two ranks with a common process group, and their process ids. Their imports take longer than a call's
    deadline.
    """
    slots = reserve_pool(cluster, count=2, actors_per_slot=1, device="cpu", total_slots=8, deadline_s=10, key="test")
    ranks = [
        spawn(
            cluster, "tests.integration.cluster.subject:Rank", {"rank": rank}, pool=slots, index=rank,
            name=f"policy rank {rank}", is_async=False, deadline_s=deadline_s, deadlines={"setup": 120.0},
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        await rank.get_attribute("rank", 120.0)
    address, port = await ranks[0].address()
    group = WorkerGroup(ranks)
    return group, await group.call_all("setup", address, port)


@pytest.mark.fault("F33")
@pytest.mark.defect("C4-rank-0-blamed-for-hang")
@pytest.mark.parametrize("stopped", [True, False])
def test_stall_report_names_the_late_rank(cluster: Cluster, tmp_path: Path, stopped: bool):
    async def run() -> tuple[DeadlineExceeded, int]:
        group, pids = await connected_ranks(cluster, deadline_s=3.0)
        if stopped:
            os.kill(pids[1], signal.SIGSTOP)
            assert await collect_stacks([group.workers[1].actor_id], 0.5) == {}  # the node answers too late
        learner = Learner(group, None, BatchSizes(1), stacks_file=tmp_path / "stacks.txt")
        with pytest.raises(DeadlineExceeded) as caught:
            await group.call_sharded("reduce", [(False, False), (True, False)])
        await learner.attach_stall_report(caught.value)
        return caught.value, pids[1]

    error, pid = asyncio.run(run())
    why = "had not reached the collective in which the other ranks waited"
    if stopped:
        why = f"does not respond (a signal such as SIGSTOP has stopped its process, {pid}, "
    assert f"did not finish within 3 s: policy rank 1 {why}" in str(error)
    assert str(tmp_path / "stacks.txt") in str(error)
    first, second = (tmp_path / "stacks.txt").read_text().split("=== policy rank 1")
    assert "in all_reduce" in first
    assert ("subject.py" in second) != stopped


@pytest.mark.fault("F33")
def test_death_is_raised_before_peer_errors(cluster: Cluster):
    async def run() -> None:
        group, _ = await connected_ranks(cluster, deadline_s=60.0)
        with pytest.raises(WorkerDied, match="policy rank 1 died during reduce"):
            await group.call_sharded("reduce", [(False, False), (False, True)])

    asyncio.run(run())


def test_ranks_read_shards_from_shared_memory(cluster: Cluster):
    """Use one shard of two values for two ranks, with arrays that are large enough for shared memory."""
    slots = reserve_pool(cluster, count=2, actors_per_slot=1, device="cpu", total_slots=8, deadline_s=10, key="test")
    kwargs: dict[str, Any] = {"pool": slots, "name": "subject", "is_async": False, "deadline_s": 60.0}
    group = WorkerGroup([spawn(cluster, SUBJECT, {}, index=index, **kwargs) for index in range(2)], parallel_size=2)
    batch = grouped_batch([(7, [5, 9, 3]), (4, [60_000])])
    plan: Any = ValuesAsTuple()
    stored = [group.put(batch.select([0, 2])), group.put(batch.select([3]))]
    results = asyncio.run(group.call_sharded("read_ids", [StoredCall(stored, plan)]))
    expected = [int(number) for rows in ([0, 2], [3]) for number in batch.select(rows).input_ids]
    assert results == [expected] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_calls_results_and_errors_cross_unchanged(cluster: Cluster, kind: str):
    subject = start(cluster, **KINDS[kind])

    async def run() -> None:
        assert await subject.add(2, b=3) == 5
        assert await subject.get_attribute("constant", 10.0) == 7
        large = await subject.add(np.zeros(1_000_000), b=1)
        assert large.sum() == large.size and (large.flags.writeable or kind == "sync")
        with pytest.raises(ConfigError, match=r"^key=3 is wrong$") as caught:
            await subject.raise_config_error()
        assert caught.value.raised_in == "subject.raise_config_error"  # type: ignore[attr-defined]
        assert "in raise_config_error" in str(caught.value.__cause__)
        with pytest.raises(AttributeError, match="no_such_method"):
            await subject.no_such_method()

    asyncio.run(run())
    subject = cloudpickle.loads(cloudpickle.dumps(subject))
    with ThreadPoolExecutor(2) as threads:  # other event loops
        list(threads.map(lambda _: asyncio.run(run()), range(2)))


@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_one_call_that_cannot_cross_spares_the_others(cluster: Cluster, kind: str):
    subject = start(cluster, **KINDS[kind])

    async def run() -> list[Any]:
        calls = (
            subject.add(1),
            subject.add(threading.Lock()),
            subject.lock(),
            subject.raise_unpicklable(),
            subject.add(2),
        )
        return list(await asyncio.gather(*calls, return_exceptions=True))

    first, argument, result, error, last = asyncio.run(run())
    assert (first, last) == (1, 2)
    assert "lock" in str(argument) and "lock" in str(result)
    assert str(error) == "LocalError: not importable"


@pytest.mark.parametrize("kind", list(KINDS)[1:])
def test_async_calls_start_in_order(cluster: Cluster, kind: str):
    subject = start(cluster, **KINDS[kind])

    async def run() -> list[int]:
        await asyncio.gather(*(subject.record(number) for number in range(500)))
        tasks = [asyncio.ensure_future(subject.record(500))]
        await asyncio.sleep(0)  # its message is sent alone
        tasks += [asyncio.ensure_future(subject.record(number)) for number in range(501, 1000)]
        return (await asyncio.gather(*tasks))[-1]

    assert asyncio.run(run()) == list(range(1000))


@pytest.mark.parametrize("killed", ["child", "actor"])
def test_actor_and_child_process_end_together(cluster: Cluster, killed: str):
    subject = start(cluster, is_async=True, in_child_process=True)
    semaphores: list[Path] = []

    async def run() -> tuple[psutil.Process, psutil.Process]:
        child = psutil.Process((await subject.process("sys"))[0])
        actor = child.parent()
        assert actor is not None
        semaphores.append(Path("/dev/shm") / f"sem.{(await subject.semaphore()).removeprefix('/')}")
        assert semaphores[0].exists()
        waiting = [asyncio.ensure_future(subject.wait(60.0)) for _ in range(2)]
        await asyncio.sleep(0.3)
        (child if killed == "child" else actor).kill()
        for task in waiting:
            why = f"its process {child.pid} ended with signal SIGKILL" if killed == "child" else ""
            with pytest.raises(WorkerDied, match=f"subject died during wait: {why}"):
                await asyncio.wait_for(task, 20)
        with pytest.raises(WorkerDied):
            await subject.add(1)
        return child, actor

    _, alive = psutil.wait_procs(asyncio.run(run()), timeout=20)
    assert not alive
    deadline = time.monotonic() + 20
    while semaphores[0].exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not semaphores[0].exists()


def test_failed_start_of_child_is_raised_or_repeated(cluster: Cluster):
    subject = start(cluster, is_async=True, in_child_process=True, fail=True)
    with pytest.raises(WorkerDied, match="no such model"):
        asyncio.run(subject.get_attribute("constant", 60.0))
    subject = start(cluster, is_async=True, in_child_process=True, restarts=True)
    assert asyncio.run(subject.process("sys"))[1]  # the second process has the variable that the first one asked for
    subject = start(cluster, is_async=True, in_child_process=True, exits=True)
    with pytest.raises(WorkerDied, match="ended with exit code 3"):
        asyncio.run(subject.get_attribute("constant", 60.0))


@pytest.mark.defect("stores-listen-on-all-interfaces")
def test_single_node_actors_listen_on_loopback(cluster: Cluster):
    subject = start(cluster)
    assert asyncio.run(subject.addresses()) == ("127.0.0.1", ray.util.get_node_ip_address())


READ_RAY_KEYS = """
import sys
from ray._raylet import GcsClient
print(GcsClient(address=sys.argv[1]).internal_kv_keys(b"", b"session"))
"""


def test_ray_requires_its_private_token(cluster: Cluster):
    token = Path.home() / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    address = ray.get_runtime_context().gcs_address
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    output, errors = {}, {}
    for mode in ("token", "disabled"):
        query = subprocess.run(
            [sys.executable, "-c", READ_RAY_KEYS, address],
            env=clean | {"RAY_AUTH_MODE": mode, "RAY_AUTH_TOKEN_PATH": str(token)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        output[mode], errors[mode] = query.stdout, query.stderr
    assert "session_name" in output["token"]
    assert output["disabled"] == "" and "auth_token" in errors["disabled"]


def test_async_actor_overlaps_calls(cluster: Cluster):
    subject = start(cluster, is_async=True)

    async def run() -> float:
        await subject.wait(0.0)
        begun = time.monotonic()
        await asyncio.gather(*(subject.wait(1.0) for _ in range(10)))
        return time.monotonic() - begun

    assert asyncio.run(run()) < 7.0


@pytest.mark.defect("many-calls-block-health-checks")
def test_pending_calls_do_not_delay_health_checks(cluster: Cluster):
    subject = start(cluster, is_async=True)

    async def run() -> None:
        await subject.add(1)
        pending = [asyncio.ensure_future(subject.wait(600.0)) for _ in range(3000)]
        await asyncio.sleep(0)  # the calls are sent now
        assert await subject.call_with_deadline(10.0, "add", 2) == 2
        for future in pending:
            future.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    asyncio.run(run())
    subject.kill()


def test_method_has_its_own_deadline(cluster: Cluster):
    subject = start(cluster, deadlines={"hang": 0.3})

    async def run() -> None:
        assert await subject.add(1) == 1
        with pytest.raises(DeadlineExceeded, match=r"subject\.hang did not finish within 0\.3 s"):
            await subject.hang()

    asyncio.run(run())
    subject.kill()


def test_timeouts_and_deaths_name_the_process(cluster: Cluster):
    hanging, dying, failing = start(cluster), start(cluster), start(cluster, fail=True)

    async def run() -> None:
        await hanging.add(1)
        with pytest.raises(DeadlineExceeded, match=r"subject\.hang did not finish within 0\.3 s"):
            await hanging.call_with_deadline(0.3, "hang")
        with pytest.raises(WorkerDied, match="subject died during die"):
            await dying.die()
        with pytest.raises(WorkerDied, match="no such model"):
            await failing.add(1)

    asyncio.run(run())
    hanging.kill()


@pytest.mark.fault("F05")
def test_excessive_demand_fails_immediately(cluster: Cluster):
    begun = time.monotonic()
    with pytest.raises(ConfigError, match=r"policy.*needs 2 GPUs.*has .* and 0 GPUs"):
        reserve_pool(cluster, count=2, actors_per_slot=1, device="cuda", total_slots=2, deadline_s=10, key="policy")
    occupied = reserve_pool(
        cluster, count=1, actors_per_slot=1, device="cpu", total_slots=1, deadline_s=10, key="first"
    )
    assert occupied.num_slots == 1
    with pytest.raises(ConfigError, match=r"engines: needs 64 bundles of 1 CPU.*not placed within 1 s.*colocate"):
        reserve_pool(cluster, count=64, actors_per_slot=1, device="cpu", total_slots=0, deadline_s=1, key="engines")
    assert time.monotonic() - begun < 20


def test_two_ranks_and_an_engine_fit_two_cores():
    assert 3 * cpus_per_slot(2.0, 3) <= 2.0
    assert cpus_per_slot(64.0, 3) == 1.0


def place_on(
    cluster: Cluster,
    placement: PlacementConfig,
    generator: GeneratorConfig,
    overlaps_training: bool = False,
    **roles: bool,
) -> RunPlacement:
    counts = count_slots(placement, generator, **roles)
    return reserve_slots(
        cluster, counts, placement, generator, device="cpu", deadline_s=10, overlaps_training=overlaps_training
    )


@pytest.mark.defect("learner-yields-threads-to-remote-engines")
def test_layouts_share_slots_only_when_colocated(cluster: Cluster):
    generator = GeneratorConfig(num_inference_engines=2)
    colocated = PlacementConfig(policy_num_gpus_per_node=2)
    with Cluster() as one_run:
        layout = place_on(one_run, colocated, generator, with_reference=True)
    assert layout.engines_colocated
    assert layout.policy and layout.engines and layout.reference
    assert layout.policy.pool is layout.engines.pool is layout.reference.pool
    assert layout.policy.pool.actors_per_slot == 3
    dedicated = PlacementConfig(colocate_all=False)
    with Cluster() as another_run:
        layout = place_on(another_run, dedicated, generator, overlaps_training=True)
    assert layout.policy and layout.engines
    assert (layout.policy.num_concurrent, layout.engines.num_concurrent) == (2, 1)
    with Cluster() as a_third:
        layout = place_on(a_third, dedicated, generator, overlaps_training=True, with_engines=False)
    assert layout.policy and layout.policy.num_concurrent == 0, "remote engines use none of these cores"
    layout = place_on(cluster, dedicated, generator, with_reference=True)
    assert not layout.engines_colocated
    assert layout.policy and layout.engines and layout.reference
    assert layout.policy.pool is not layout.engines.pool
    assert layout.policy.pool is layout.reference.pool
    assert layout.policy.num_concurrent == layout.engines.num_concurrent == 0, "they wait for each other"


def test_reward_model_shares_policy_slots_if_colocated(cluster: Cluster):
    generator = GeneratorConfig(num_inference_engines=1)
    colocated = PlacementConfig(policy_num_gpus_per_node=2, reward_num_gpus_per_node=3)
    with Cluster() as one_run:
        layout = place_on(one_run, colocated, generator, with_reward=True)
    assert layout.reward is layout.policy and layout.policy is not None
    assert layout.policy.pool.actors_per_slot == 3
    dedicated = PlacementConfig(colocate_all=False, reward_num_gpus_per_node=2)
    with Cluster() as one_run:
        layout = place_on(one_run, dedicated, generator, with_reward=True)
    assert layout.policy and layout.reward
    assert (layout.reward.count, layout.reward.pool.actors_per_slot, layout.policy.pool.actors_per_slot) == (2, 1, 1)
    with Cluster() as one_run:
        alone = place_on(one_run, colocated, generator, with_policy=False, with_reward=True)
    assert alone.policy is None and alone.reward and alone.engines
    assert alone.reward.pool is alone.engines.pool and alone.engines.pool.actors_per_slot == 2
    elsewhere = {"with_policy": False, "with_engines": False, "with_reward": True}
    layout = place_on(cluster, colocated, generator, **elsewhere)
    assert layout.reward and layout.reward.count == 3


@pytest.mark.defect("ray-folders-stay")
def test_closing_cluster_ends_processes_and_frees_slots():
    # In another process, because a driver has one cluster. The conftest checks for leftover processes.
    code = (
        "from pathlib import Path\n"
        "from skyrl_train.cluster.ray_cluster import Cluster\n"
        "import ray\n"
        "first, second = Cluster(), Cluster()\n"
        "first.connect()\n"
        "with second as cluster:\n"
        "    cluster.register_placement_group(ray.util.placement_group([{'CPU': 0.1}]))\n"
        "    assert cluster.num_cpus >= 1 and cluster.num_nodes == 1\n"
        "    first.__exit__(None, None, None)\n"
        "    assert ray.is_initialized()\n"
        "    folder = Path(ray._private.worker._global_node.get_temp_dir_path())\n"
        "    assert folder.is_dir() and second.failure() is None\n"
        "    assert folder.parent.stat().st_mode & 0o777 == 0o700, 'other users must not reach its sockets'\n"
        "assert not ray.is_initialized()\n"
        "assert not folder.parent.exists()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)


@pytest.mark.defect("ray-removes-sigterm-handler")
def test_sigterm_handler_survives_connecting_and_disconnecting():
    code = (
        "import os, signal\n"
        "from skyrl_train.cluster.ray_cluster import Cluster\n"
        "signal.signal(signal.SIGTERM, lambda number, frame: print('handled'))\n"
        "with Cluster():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "os.kill(os.getpid(), signal.SIGTERM)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "handled\nhandled\n")
    assert "SIGTERM" not in done.stderr, "Ray printed a stack trace"


@pytest.mark.defect("stopped-raylet-blocks-shutdown")
@pytest.mark.defect("stopped-raylet-reported-as-few-cpus")
def test_stopped_raylet_does_not_block_exit():
    code = (
        "import psutil\n"
        "from skyrl_train.cluster import placement, ray_cluster\n"
        "from skyrl_train.errors import ClusterLost\n"
        "ray_cluster._DISCONNECT_TIMEOUT_S, placement._PROBE_TIMEOUT_S = 3, 1\n"
        "with ray_cluster.Cluster() as cluster:\n"
        "    next(child for child in psutil.Process().children() if child.name() == 'raylet').suspend()\n"
        "    try:\n"
        "        slots = {'count': 1, 'actors_per_slot': 1, 'total_slots': 1}\n"
        "        placement.reserve_pool(cluster, **slots, device='cpu', deadline_s=1, key='slots=1')\n"
        "    except ClusterLost as lost:\n"
        "        assert 'a raylet does not respond' in str(lost)\n"
        "    else:\n"
        "        raise AssertionError('placed')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Ray's processes do not respond: killing them after 3 s" in done.stderr


def test_existing_connection_stays_open(cluster: Cluster):
    with Cluster() as inner:
        start(inner)
    assert ray.is_initialized()


@pytest.mark.defect("D21")
def test_wrapper_of_engine_in_actor(cluster: Cluster, tiny_model_path: str):
    """The settings are known in the driver; prompts and responses are sent."""
    settings: Any = {
        "input_mode": "text",
        "inplace": False,
        "generate_kwargs": {"max_new_tokens": 3, "ignore_eos": True},
    }
    wrapper = RemoteTransformersWrapper(tiny_model_path, **settings)
    try:
        assert wrapper.in_keys == [("text", "prompt")]
        out = wrapper(TensorDict(text=["hello", "hi"], batch_size=(2,)))
        assert [len(row) for row in out.get(("tokens", "response"), as_list=True)] == [3, 3]
        scored = wrapper.get_new_version(generate=False)(TensorDict(text=["hello"], batch_size=(1,)))
        assert len(scored[0]["log_probs"].full) == 5
    finally:
        wrapper.close()
