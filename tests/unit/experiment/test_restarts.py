"""Failures after which a run restarts, how often it does, and how it is scaled down to the remaining nodes."""

from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, cast

import pytest

from skyrl_train.cluster.capacity import NodeCapacity
from skyrl_train.config.hydra import load_preset
from skyrl_train.config.keys import replace_value
from skyrl_train.config.predicates import RunComponents, count_run_slots
from skyrl_train.config.schema import Config
from skyrl_train.engines.target_count import ENGINES_FILE, write_target
from skyrl_train.entrypoints.engines import change_target_count
from skyrl_train.errors import (
    ClusterLost,
    ConfigError,
    EngineError,
    EnginesLost,
    InsufficientResources,
    RewardModelLost,
    WorkerDied,
)
from skyrl_train.experiment.restarts import fits_on_nodes, raise_lost_ranks, smaller_configs, with_restarts
from skyrl_train.storage.uris import resolve_local_folder
from skyrl_train.trainer.run_folder import LOCK_FILE, RunFolder


class EndedRun:
    """The part of an experiment that restarts use. Each attempt ends with the next of `errors`, then succeeds."""

    def __init__(self, errors: list[BaseException], allowed: int):
        self.config = replace_value(Config(), "trainer.restarts", allowed)
        self.attempts, self.errors = 0, errors
        self.causes: list[str] = []
        self.cluster, self.is_ray_client = self, False
        self.modes: list[str] = []
        """trainer.resume_mode of each further attempt."""

    async def prepare_restart(self, next_config: Config, configured: Config, cause: str) -> Config:
        self.causes.append(cause)
        self.modes.append(next_config.trainer.resume_mode)
        return next_config

    def failure(self) -> None:
        """Return None: none of Ray's own processes has died."""

    async def attempt(self) -> str:
        self.attempts += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the default folder of runs is relative


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def run(experiment: EndedRun) -> str:
    return asyncio.run(attempts(experiment, experiment.attempt))


def attempts(experiment: EndedRun, attempt: Callable[[], Awaitable[str]]) -> Coroutine[Any, Any, str]:
    return with_restarts(attempt, experiment.config, cast(Any, experiment), experiment.prepare_restart)


def test_lost_rank_restarts_as_often_as_configured():
    died = WorkerDied("learner 2 died during update: its node 10.0.0.7 was lost.")
    engines_lost = caused(EnginesLost("no engine is left"), InsufficientResources("a node was lost"))
    reward_model_lost = RewardModelLost("reward model 0.score did not finish within 5 s")
    experiment = EndedRun([died, engines_lost, reward_model_lost], allowed=3)
    assert run(experiment) == "done"
    assert experiment.causes == [
        f"WorkerDied: {died}",
        "EnginesLost: no engine is left",
        f"RewardModelLost: {reward_model_lost}",
    ]
    experiment = EndedRun([died, ClusterLost("a node died"), died], allowed=2)
    with pytest.raises(WorkerDied):
        run(experiment)
    assert (experiment.attempts, len(experiment.causes)) == (3, 2)


@pytest.mark.parametrize("error", [ConfigError("k=1"), RuntimeError("a bug"), EnginesLost("restarts are spent")])
def test_other_errors_end_the_run(error: Exception):
    experiment = EndedRun([error], allowed=5)
    with pytest.raises(type(error)):
        run(experiment)
    assert (experiment.attempts, experiment.causes) == (1, [])


@pytest.mark.defect("restart-loses-stop-request")
def test_stopped_run_does_not_restart():
    """An update is finished before the run stops, and may lose a rank."""
    experiment = EndedRun([], allowed=2)

    async def attempt() -> str:
        experiment.attempts += 1
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise WorkerDied("learner 1 died") from None
        return "done"

    async def stopped() -> None:
        work = asyncio.ensure_future(attempts(experiment, attempt))
        await asyncio.sleep(0)
        work.cancel()
        with pytest.raises(WorkerDied):
            await asyncio.wait_for(work, 10)

    asyncio.run(stopped())
    assert (experiment.attempts, experiment.causes) == (1, [])


def test_run_behind_ray_client_does_not_restart():
    experiment = EndedRun([WorkerDied("learner 0 died")], allowed=2)
    experiment.is_ray_client = True
    with pytest.raises(WorkerDied):
        run(experiment)
    assert experiment.causes == []


def test_no_restart_unless_configured():
    experiment = EndedRun([WorkerDied("learner 0 died")], allowed=0)
    with pytest.raises(WorkerDied):
        run(experiment)
    assert experiment.causes == []


class Ranks:
    def __init__(self, responsive: bool):
        self.responsive, self.num_pings = responsive, 0

    async def is_responsive(self, timeout_s: float) -> bool:
        self.num_pings += 1
        return self.responsive


async def fails(ranks: Ranks, allowed: int, error: Exception) -> None:
    async with raise_lost_ranks(cast(Any, ranks), allowed):
        raise error


def test_errors_with_unresponsive_rank_become_worker_died():
    with pytest.raises(WorkerDied, match="does not respond, after EngineError: the sender is gone"):
        asyncio.run(fails(Ranks(responsive=False), 1, EngineError("the sender is gone")))
    with pytest.raises(EngineError):
        asyncio.run(fails(Ranks(responsive=True), 1, EngineError("a real one")))
    not_pinged = Ranks(responsive=False)
    with pytest.raises(EngineError):
        asyncio.run(fails(not_pinged, 0, EngineError("no restarts are configured")))
    assert not_pinged.num_pings == 0


@pytest.mark.parametrize("address", [False, True])
@pytest.mark.parametrize("mode", ["none", "from_path", "latest"])
def test_restart_resumes_from_own_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, address: bool):
    """Until it has a checkpoint of its own the run begins as before: `from_path` may leave newer ones behind."""
    monkeypatch.setenv("SKYRL_CACHE", str(tmp_path / "cache"))
    path = "s3://bucket/run" if address else str(tmp_path / "run")
    latest = resolve_local_folder(path) / "latest_ckpt_global_step.txt"
    latest.parent.mkdir(parents=True)
    latest.write_text("30")

    class Commits(EndedRun):
        async def attempt(self) -> str:
            if self.attempts == 1:
                os.utime(latest, ns=(0, latest.stat().st_mtime_ns + 1))
            return await super().attempt()

    experiment = Commits([WorkerDied("before a commit"), WorkerDied("after one")], allowed=2)
    experiment.config = replace_value(experiment.config, "trainer.ckpt_path", path)
    experiment.config = replace_value(experiment.config, "trainer.resume_mode", mode)
    assert run(experiment) == "done"
    assert experiment.modes == [mode, "latest"]


@pytest.mark.defect("restart-forgets-added-engines")
def test_restart_uses_latest_target_count(
    tmp_path: Path,
):
    """If one of three engines had no room after the first restart, the second restart tries all three again."""
    numbers: list[int] = []

    class Announces(EndedRun):
        """Writes its number of engines when it begins. A user asks the first attempt for three."""

        async def attempt(self) -> str:
            if self.attempts < 2:
                write_target(tmp_path, self.config.generator.num_inference_engines)
            if not self.attempts:
                write_target(tmp_path, 3)
            return await super().attempt()

        async def prepare_restart(self, next_config: Config, configured: Config, cause: str) -> Config:
            numbers.append(next_config.generator.num_inference_engines)
            assert configured.generator.num_inference_engines == 1
            self.config = replace_value(next_config, "generator.num_inference_engines", min(2, numbers[-1]))
            return self.config

    experiment = Announces([WorkerDied("one"), WorkerDied("two"), WorkerDied("three")], allowed=3)
    experiment.config = replace_value(experiment.config, "trainer.ckpt_path", str(tmp_path))
    experiment.config = replace_value(experiment.config, "trainer.placement.colocate_all", False)
    assert run(experiment) == "done"
    assert numbers == [3, 3, 3]
    write_target(tmp_path, 7)  # of an earlier run
    fixed = Announces([WorkerDied("before it began")], allowed=1)
    fixed.attempts, fixed.config = 2, replace_value(experiment.config, "generator.num_inference_engines", 1)
    assert run(fixed) == "done"
    assert numbers[3:] == [1]


@pytest.mark.defect("run-folder-unlocked-between-attempts")
def test_folder_stays_locked_between_attempts(
    tmp_path: Path,
):
    folder = tmp_path / "run"
    refusals: list[str] = []

    class InItsFolder(EndedRun):
        async def attempt(self) -> str:
            if self.attempts == 1:
                return await super().attempt()  # fails before it enters the folder
            with RunFolder(folder, {}, True):
                (folder / "config.yaml").write_text(
                    "{trainer: {placement: {colocate_all: false}}, generator: {run_engines_locally: true}}"
                )
                write_target(folder, 1)
                return await super().attempt()

        async def prepare_restart(self, next_config: Config, configured: Config, cause: str) -> Config:
            with pytest.raises(ConfigError, match="still starting") as refusal:
                change_target_count(folder, 1)
            with (folder / LOCK_FILE).open() as another, pytest.raises(BlockingIOError):
                fcntl.flock(another, fcntl.LOCK_SH | fcntl.LOCK_NB)
            refusals.append(str(refusal.value))
            return next_config

    experiment = InItsFolder([WorkerDied("one"), WorkerDied("two"), WorkerDied("three")], allowed=3)
    experiment.config = replace_value(experiment.config, "trainer.ckpt_path", str(folder))
    assert run(experiment) == "done"
    assert len(refusals) == 3
    assert (folder / ENGINES_FILE).exists()
    with RunFolder(folder, {}, True):
        pass  # the folder is unlocked in the end


def configured(*overrides: str) -> Config:
    """Return a run with four ranks and two engines on separate slots."""
    return load_preset(
        [
            "device=cpu",
            "data.train_data=[rows.jsonl]",
            "generator.backend=transformers",
            "generator.model_dtype=float32",
            "generator.weight_sync_backend=gloo",
            "trainer.bf16=false",
            "trainer.flash_attn=false",
            "trainer.placement.colocate_all=false",
            "trainer.placement.policy_num_gpus_per_node=4",
            "generator.num_inference_engines=2",
            *overrides,
        ]
    )


def shapes(
    config: Config, components: RunComponents | None = None, num_added_engines: int = 0
) -> list[tuple[int, int]]:
    found = list(smaller_configs(config, components or RunComponents(), lambda one: True, num_added_engines))
    assert found[0] is config, "what is configured comes first"
    slots = [count_run_slots(one, components or RunComponents()) for one in found]
    return [(one.policy, one.engines) for one in slots]


def test_fewest_slots_are_given_up():
    assert shapes(configured()) == [(4, 2), (3, 2), (4, 1), (2, 2), (3, 1), (1, 2), (2, 1), (1, 1)]


def test_ranks_stay_multiple_of_parallel_group():
    pairs = shapes(configured("trainer.policy.sequence_parallel_size=2", "generator.num_inference_engines=1"))
    assert pairs == [(4, 1), (2, 1)]


def test_run_without_engines_gives_up_ranks():
    assert shapes(configured(), RunComponents(val_data=False, engines=False, rewards=False)) == [
        (4, 0),
        (3, 0),
        (2, 0),
        (1, 0),
    ]


def test_added_engines_are_given_up_first():
    assert shapes(configured("generator.num_inference_engines=4"), num_added_engines=2)[:5] == [
        (4, 4),
        (4, 3),
        (4, 2),
        (3, 2),
        (4, 1),
    ]


@pytest.mark.defect("no-room-for-environment-hosts-after-restart")
@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        (3, (4, 2, 3)),
        (2, (4, 2, 2)),
        (1, (2, 2, 1)),
    ],
)
def test_environment_hosts_are_given_up_before_ranks(nodes: int, wanted: tuple[int, int, int]):
    """Each node has room for a host and four slots of a full CPU."""
    config = configured("environment.hosts=3", "environment.host_cpus=2", "environment.host_resources={games: 1}")
    free = [NodeCapacity({"CPU": 6.0, "games": 1.0}) for _ in range(nodes)]
    found = next(
        smaller_configs(config, RunComponents(), lambda one: fits_on_nodes(one, RunComponents(), free, cpus=24.0))
    )
    slots = count_run_slots(found, RunComponents())
    assert (slots.policy, slots.engines, found.environment.hosts) == wanted


@pytest.mark.parametrize(("nodes", "fit"), [(1, False), (2, True)])
def test_engine_fits_one_node_or_several(nodes: int, fit: bool):
    config = configured(
        "generator.backend=vllm",
        "generator.num_inference_engines=1",
        "generator.inference_engine_tensor_parallel_size=4",
        f"trainer.placement.nodes_per_engine={nodes}",
    )
    free = [NodeCapacity({"CPU": cpus}) for cpus in (3.0, 3.0, 2.0)]
    assert fits_on_nodes(config, RunComponents(), free, cpus=9.0) == fit


def test_slots_share_the_cpus_that_hosts_leave():
    config = configured("environment.hosts=1", "environment.host_cpus=2")
    assert fits_on_nodes(config, RunComponents(), [NodeCapacity({"CPU": 6.0})], cpus=6.0)
    assert not fits_on_nodes(config, RunComponents(), [NodeCapacity({"CPU": 2.0})], cpus=2.0), "hosts leave no CPU"
    sft = RunComponents(val_data=False, engines=False, rewards=False)
    assert fits_on_nodes(config, sft, [NodeCapacity({"CPU": 2.0})], cpus=2.0), "fine-tuning starts no hosts"
