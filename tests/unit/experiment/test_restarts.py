"""What a run begins again after, how often, and what it asks for when there is no room for all of it."""

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
    """An experiment as far as restarts know one: each attempt ends with the next of `errors`, then well."""

    def __init__(self, errors: list[BaseException], allowed: int):
        self.config = replace_value(Config(), "trainer.restarts", allowed)
        self.attempts, self.errors = 0, errors
        self.causes: list[str] = []
        self.cluster, self.is_ray_client = self, False
        self.modes: list[str] = []
        """How each further attempt is to resume."""

    async def prepare_restart(self, next_config: Config, configured: Config, cause: str) -> Config:
        self.causes.append(cause)
        self.modes.append(next_config.trainer.resume_mode)
        return next_config

    def failure(self) -> None:
        """Of Ray's own processes none has died."""

    async def attempt(self) -> str:
        self.attempts += 1
        if self.errors:
            raise self.errors.pop(0)
        return "done"


@pytest.fixture(autouse=True)
def in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # where the folders of runs are that name none


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def run(experiment: EndedRun) -> str:
    return asyncio.run(attempts(experiment, experiment.attempt))


def attempts(experiment: EndedRun, attempt: Callable[[], Awaitable[str]]) -> Coroutine[Any, Any, str]:
    return with_restarts(attempt, experiment.config, cast(Any, experiment), experiment.prepare_restart)


def test_a_lost_rank_is_begun_again_after_as_often_as_configured():
    died = WorkerDied("learner 2 died during update: its node 10.0.0.7 was lost.")
    homeless = caused(EnginesLost("no engine is left"), InsufficientResources("a node was lost"))
    unrewarded = RewardModelLost("reward model 0.score did not finish within 5 s")
    experiment = EndedRun([died, homeless, unrewarded], allowed=3)
    assert run(experiment) == "done"
    assert experiment.causes == [
        f"WorkerDied: {died}",
        "EnginesLost: no engine is left",
        f"RewardModelLost: {unrewarded}",
    ]
    experiment = EndedRun([died, ClusterLost("a node died"), died], allowed=2)
    with pytest.raises(WorkerDied):
        run(experiment)
    assert (experiment.attempts, len(experiment.causes)) == (3, 2)


@pytest.mark.parametrize("error", [ConfigError("k=1"), RuntimeError("a bug"), EnginesLost("restarts are spent")])
def test_what_is_no_lost_rank_ends_the_run_at_once(error: Exception):
    experiment = EndedRun([error], allowed=5)
    with pytest.raises(type(error)):
        run(experiment)
    assert (experiment.attempts, experiment.causes) == (1, [])


@pytest.mark.defect("a-stop-was-lost-in-a-restart")
def test_a_run_that_was_asked_to_stop_does_not_begin_again():
    """The update that is under way goes to its end first, and may lose a rank there."""
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


def test_a_run_behind_a_ray_client_does_not_begin_again():
    experiment = EndedRun([WorkerDied("learner 0 died")], allowed=2)
    experiment.is_ray_client = True
    with pytest.raises(WorkerDied):
        run(experiment)
    assert experiment.causes == []


def test_without_restarts_the_run_ends_as_ever():
    experiment = EndedRun([WorkerDied("learner 0 died")], allowed=0)
    with pytest.raises(WorkerDied):
        run(experiment)
    assert experiment.causes == []


class Ranks:
    def __init__(self, answer: bool):
        self.answer, self.asked = answer, 0

    async def answers(self, within_s: float) -> bool:
        self.asked += 1
        return self.answer


async def fails(ranks: Ranks, allowed: int, error: Exception) -> None:
    async with raise_lost_ranks(cast(Any, ranks), allowed):
        raise error


def test_what_follows_from_a_rank_that_does_not_answer_is_its_loss():
    with pytest.raises(WorkerDied, match="does not respond, after EngineError: the sender is gone"):
        asyncio.run(fails(Ranks(answer=False), 1, EngineError("the sender is gone")))
    with pytest.raises(EngineError):
        asyncio.run(fails(Ranks(answer=True), 1, EngineError("a real one")))
    unasked = Ranks(answer=False)
    with pytest.raises(EngineError):
        asyncio.run(fails(unasked, 0, EngineError("no restarts are configured")))
    assert unasked.asked == 0


@pytest.mark.parametrize("address", [False, True])
@pytest.mark.parametrize("mode", ["none", "from_path", "latest"])
def test_it_goes_on_from_what_it_has_committed_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str, address: bool
):
    """Until then it begins as it did: what `from_path` leaves behind is newer than where it went back to."""
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


@pytest.mark.defect("engines-that-were-added-are-forgotten")
def test_it_goes_on_with_the_number_of_engines_that_was_asked_for_meanwhile(
    tmp_path: Path,
):
    """Where one of three found no room after the first restart, all are looked for again after the second."""
    numbers: list[int] = []

    class Announces(EndedRun):
        """Writes how many engines it has when it begins, if it gets that far; somebody asks the first one for three."""

        async def attempt(self) -> str:
            if self.attempts < 2:
                write_target(tmp_path, self.config.generator.num_inference_engines)
            if not self.attempts:
                write_target(tmp_path, 3)
            return await super().attempt()

        async def start_over(self, next_config: Config, configured: Config, cause: str) -> Config:
            numbers.append(next_config.generator.num_inference_engines)
            assert configured.generator.num_inference_engines == 1
            self.config = replace_value(next_config, "generator.num_inference_engines", min(2, numbers[-1]))
            return self.config

    experiment = Announces([WorkerDied("one"), WorkerDied("two"), WorkerDied("three")], allowed=3)
    experiment.config = replace_value(experiment.config, "trainer.ckpt_path", str(tmp_path))
    experiment.config = replace_value(experiment.config, "trainer.placement.colocate_all", False)
    assert run(experiment) == "done"
    assert numbers == [3, 3, 3]
    write_target(tmp_path, 7)  # an earlier run's
    fixed = Announces([WorkerDied("before it began")], allowed=1)
    fixed.attempts, fixed.config = 2, replace_value(experiment.config, "generator.num_inference_engines", 1)
    assert run(fixed) == "done"
    assert numbers[3:] == [1]


@pytest.mark.defect("a-folder-was-free-between-attempts")
def test_between_two_attempts_the_folder_is_the_run_s_and_engines_are_asked_for_later(
    tmp_path: Path,
):
    folder = tmp_path / "run"
    looked: list[str] = []

    class InItsFolder(EndedRun):
        async def attempt(self) -> str:
            if self.attempts == 1:
                return await super().attempt()  # lost before it enters
            with RunFolder(folder, {}, True):
                (folder / "config.yaml").write_text(
                    "{trainer: {placement: {colocate_all: false}}, generator: {run_engines_locally: true}}"
                )
                write_target(folder, 1)
                return await super().attempt()

        async def start_over(self, next_config: Config, configured: Config, cause: str) -> Config:
            with pytest.raises(ConfigError, match="only starting") as later:
                change_target_count(folder, 1)
            with (folder / LOCK_FILE).open() as another, pytest.raises(BlockingIOError):
                fcntl.flock(another, fcntl.LOCK_SH | fcntl.LOCK_NB)
            looked.append(str(later.value))
            return next_config

    experiment = InItsFolder([WorkerDied("one"), WorkerDied("two"), WorkerDied("three")], allowed=3)
    experiment.config = replace_value(experiment.config, "trainer.ckpt_path", str(folder))
    assert run(experiment) == "done"
    assert len(looked) == 3
    assert (folder / ENGINES_FILE).exists()
    with RunFolder(folder, {}, True):
        pass  # it is free in the end


def configured(*overrides: str) -> Config:
    """Four ranks and two engines, apart."""
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


def test_the_fewest_slots_are_given_up_and_the_trainer_s_before_an_engine_s():
    assert shapes(configured()) == [(4, 2), (3, 2), (4, 1), (2, 2), (3, 1), (1, 2), (2, 1), (1, 1)]


def test_ranks_stay_a_multiple_of_what_shares_a_model_or_a_sequence():
    pairs = shapes(configured("trainer.policy.sequence_parallel_size=2", "generator.num_inference_engines=1"))
    assert pairs == [(4, 1), (2, 1)]


def test_a_run_without_engines_gives_up_ranks_alone():
    assert shapes(configured(), RunComponents(val_data=False, engines=False, rewards=False)) == [
        (4, 0),
        (3, 0),
        (2, 0),
        (1, 0),
    ]


def test_engines_that_were_added_meanwhile_are_given_up_before_ranks():
    assert shapes(configured("generator.num_inference_engines=4"), num_added_engines=2)[:5] == [
        (4, 4),
        (4, 3),
        (4, 2),
        (3, 2),
        (4, 1),
    ]


@pytest.mark.defect("hosts-of-environments-have-no-room-after-a-restart")
@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        (3, (4, 2, 3)),
        (2, (4, 2, 2)),
        (1, (2, 2, 1)),
    ],
)
def test_hosts_of_environments_need_room_too_and_are_given_up_before_ranks(nodes: int, wanted: tuple[int, int, int]):
    """Each node has room for a host, and for four slots of a whole CPU beside it."""
    config = configured("environment.hosts=3", "environment.host_cpus=2", "environment.host_resources={games: 1}")
    free = [NodeCapacity({"CPU": 6.0, "games": 1.0}) for _ in range(nodes)]
    found = next(
        smaller_configs(config, RunComponents(), lambda one: fits_on_nodes(one, RunComponents(), free, cpus=24.0))
    )
    slots = count_run_slots(found, RunComponents())
    assert (slots.policy, slots.engines, found.environment.hosts) == wanted


@pytest.mark.parametrize(("nodes", "fit"), [(1, False), (2, True)])
def test_an_engine_needs_a_node_for_itself_or_parts_of_several(nodes: int, fit: bool):
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
    assert not fits_on_nodes(config, RunComponents(), [NodeCapacity({"CPU": 2.0})], cpus=2.0), "they leave none"
    sft = RunComponents(val_data=False, engines=False, rewards=False)
    assert fits_on_nodes(config, sft, [NodeCapacity({"CPU": 2.0})], cpus=2.0), "fine-tuning starts no hosts"
