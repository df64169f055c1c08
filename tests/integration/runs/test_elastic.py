"""Engines join a run and leave it while it trains: nothing of what it learns changes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest

from skyrl_train.engines.target_count import read_target
from skyrl_train.entrypoints.engines import main as engines
from skyrl_train.experiment.base import Experiment, launch_experiment
from skyrl_train.trainer.batch_dump import read_batch
from tests.integration.runs.conftest import Run, metrics_of

STEPS = 6
APART = ["trainer.placement.colocate_all=false", f"trainer.max_steps={STEPS}", "trainer.epochs=6"]


class Elastic(Experiment):
    """Asks for an engine more after its first step, for one fewer two steps later, and for one more after the fifth.

    The step after each begins once that is done.
    """

    seen: ClassVar[dict[int, list[str]]]
    """Step -> the names of its engines when its weights are live."""
    sampled: ClassVar[list[int]]
    """Tokens that each engine has sampled when the newcomer is about to leave."""
    asks: ClassVar[dict[int, str]]
    newcomer_dies: ClassVar[bool]

    def build_trainer(self, running: Any, schedule: Any = None) -> Any:
        trainer = super().build_trainer(running, schedule)
        publish, client, folder = trainer.publisher.publish, running.client, str(self.config.trainer.ckpt_path)

        async def steered(version: int) -> dict[str, float]:
            if version - 1 in self.asks:
                await until(lambda: len(client.names) == engine_processes() == read_target(Path(folder)))
            if version == 2 and self.newcomer_dies:
                client.engines[1].kill()
                await until(lambda: engine_processes() == 1)
                await client.health()
                assert list(client.dead) == ["engine 1"]
                client.start_restart()
                await until(lambda: len(client.engines) == 2)
            if version == 3:
                type(self).sampled = [one.generated_tokens for one in await client.health()]
            values = await publish(version)
            if version in self.asks:
                await asyncio.to_thread(engines, [self.asks[version], "1", folder])
            self.seen[version] = list(client.names)
            return values  # type: ignore[no-any-return]

        trainer.publisher.publish = steered  # type: ignore[method-assign]
        return trainer


async def until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.05)


def engine_processes() -> int:
    found = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            found += "_AsyncWorkerActor" in " ".join(process.cmdline())
    return found


def batches(folder: Path) -> list[tuple[Any, list[str]]]:
    dumped = folder / "exports" / "dumped_data"
    return [read_batch(dumped / f"global_step_{step}_training_input.safetensors") for step in range(1, STEPS + 1)]


def elastic(overrides: list[str], capsys: pytest.CaptureFixture[str], *, once: bool, dies: bool = False) -> str:
    """Run, and what it said. `once`: the last engine is not asked for."""
    Elastic.seen, Elastic.newcomer_dies = {}, dies
    Elastic.asks = {1: "add", 3: "remove"} | ({} if once else {5: "add"})
    launch_experiment(Elastic, overrides)
    return capsys.readouterr().out


@pytest.mark.on_demand
def test_elastic_run_is_bitwise_identical(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = [*APART, "trainer.dump_data_batch=true", "generator.weight_sync_check=probe"]
    plain, changing = tmp_path / "plain", tmp_path / "changing"
    run("main_base", *easy(plain), *options)
    said = elastic([*easy(changing), *options], capsys, once=True)
    assert [len(Elastic.seen[step]) for step in range(STEPS + 1)] == [1, 1, 2, 2, 1, 1, 1]
    assert "engine 1 joined with the current weights in" in said
    assert "engine 1 left after" in said
    assert "all its requests finished: 1 now" in said
    assert all(tokens > 0 for tokens in Elastic.sampled)
    assert read_target(changing / "ckpts") == 1
    rows, others = metrics_of(plain), metrics_of(changing)
    assert [others[step]["engines/count"] for step in range(STEPS + 1)] == [1, 1, 2, 2, 1, 1, 1]
    for step in range(1, STEPS + 1):
        assert others[step]["weights/version"] == step
        learnt = {name: value for name, value in rows[step].items() if name.startswith(("policy/", "reward/"))}
        assert len(learnt) > 5
        assert learnt == {name: others[step][name] for name in learnt}
    for (one, uids), (other, same_uids) in zip(batches(plain), batches(changing), strict=True):
        assert uids == same_uids
        assert one.input_ids.equal(other.input_ids)
        assert one.advantages.equal(other.advantages)


@pytest.mark.on_demand
@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_elastic_async_run_uses_each_prompt_once(
    dies: bool,
    ray_of_all_runs: None,
    easy: Callable[[Path], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """That the last newcomer finds room shows that the first one's was given back: two cores have it for one."""
    said = elastic(
        ["--config-name=async", *easy(tmp_path), *APART, "trainer.dump_data_batch=true",
         "generator.weight_sync_check=probe", "generator.sampling_params.max_generate_length=48"],
        capsys, once=False, dies=dies,
    )  # fmt: skip
    assert [len(Elastic.seen[step]) for step in range(STEPS + 1)] == [1, 1, 2, 2, 1, 1, 2]
    assert said.count("engine 1 joined") == 2
    assert said.count("engine 1 left") == 1
    rows = metrics_of(tmp_path)
    assert rows[STEPS]["engines/restarts"] == dies
    assert max(rows[step]["async/staleness_max"] for step in range(1, STEPS + 1)) <= 1
    assert all(rows[step]["rollouts/failed"] == 0 for step in range(1, STEPS + 1))
    uids = [uids for _, uids in batches(tmp_path)]
    for epoch in (uids[:2], uids[2:4], uids[4:]):
        assert list(Counter(uid for step in epoch for uid in step).values()) == [4] * 8
