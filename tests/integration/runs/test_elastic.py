"""Engines that join and leave a run during training, which does not change the result of the training."""

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
DEDICATED = ["trainer.placement.colocate_all=false", f"trainer.max_steps={STEPS}", "trainer.epochs=6"]


class Elastic(Experiment):
    """An experiment that adds an engine after step 1, removes it after step 3, and adds one again after step 5.

    The following step starts once the change is complete.
    """

    engine_names: ClassVar[dict[int, list[str]]]
    """Step -> names of the engines when its weights are published."""
    sampled: ClassVar[list[int]]
    """Number of tokens that each engine has sampled before the new one is removed."""
    commands: ClassVar[dict[int, str]]
    """Step -> subcommand of `skyrl-train engines` to run after the step."""
    new_engine_dies: ClassVar[bool]

    def build_trainer(self, running: Any, schedule: Any = None) -> Any:
        trainer = super().build_trainer(running, schedule)
        publish, client, folder = trainer.publisher.publish, running.client, str(self.config.trainer.ckpt_path)

        async def publish_and_scale(version: int) -> dict[str, float]:
            if version - 1 in self.commands:
                await wait_until(lambda: len(client.engine_names) == engine_processes() == read_target(Path(folder)))
            if version == 2 and self.new_engine_dies:
                client.engines[1].kill()
                await wait_until(lambda: engine_processes() == 1)
                await client.health()
                assert list(client.dead_engines) == ["engine 1"]
                client.start_restart()
                await wait_until(lambda: len(client.engines) == 2)
            if version == 3:
                type(self).sampled = [health.generated_tokens for health in await client.health()]
            values = await publish(version)
            if version in self.commands:
                await asyncio.to_thread(engines, [self.commands[version], "1", folder])
            self.engine_names[version] = list(client.engine_names)
            return values  # type: ignore[no-any-return]

        trainer.publisher.publish = publish_and_scale  # type: ignore[method-assign]
        return trainer


async def wait_until(done: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not done():
            await asyncio.sleep(0.05)


def engine_processes() -> int:
    count = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):  # the process may have ended
            count += "_AsyncWorkerActor" in " ".join(process.cmdline())
    return count


def batches(folder: Path) -> list[tuple[Any, list[str]]]:
    dumped = folder / "exports" / "dumped_data"
    return [read_batch(dumped / f"global_step_{step}_training_input.safetensors") for step in range(1, STEPS + 1)]


def run_elastic(overrides: list[str], capsys: pytest.CaptureFixture[str], *, once: bool, dies: bool = False) -> str:
    """Run the experiment and return its output. With `once` no engine is added after step 5."""
    Elastic.engine_names, Elastic.new_engine_dies = {}, dies
    Elastic.commands = {1: "add", 3: "remove"} | ({} if once else {5: "add"})
    launch_experiment(Elastic, overrides)
    return capsys.readouterr().out


@pytest.mark.on_demand
def test_elastic_run_is_bitwise_identical(
    run: Run, easy: Callable[[Path], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    options = [*DEDICATED, "trainer.dump_data_batch=true", "generator.weight_sync_check=probe"]
    plain, changing = tmp_path / "plain", tmp_path / "changing"
    run("main_base", *easy(plain), *options)
    output = run_elastic([*easy(changing), *options], capsys, once=True)
    assert [len(Elastic.engine_names[step]) for step in range(STEPS + 1)] == [1, 1, 2, 2, 1, 1, 1]
    assert "engine 1 joined with the current weights in" in output
    assert "engine 1 left after" in output
    assert "all its requests finished: 1 now" in output
    assert all(tokens > 0 for tokens in Elastic.sampled)
    assert read_target(changing / "ckpts") == 1
    rows, elastic_rows = metrics_of(plain), metrics_of(changing)
    assert [elastic_rows[step]["engines/count"] for step in range(STEPS + 1)] == [1, 1, 2, 2, 1, 1, 1]
    for step in range(1, STEPS + 1):
        assert elastic_rows[step]["weights/version"] == step
        trained = {name: value for name, value in rows[step].items() if name.startswith(("policy/", "reward/"))}
        assert len(trained) > 5
        assert trained == {name: elastic_rows[step][name] for name in trained}
    for (batch, uids), (elastic_batch, same_uids) in zip(batches(plain), batches(changing), strict=True):
        assert uids == same_uids
        assert batch.input_ids.equal(elastic_batch.input_ids)
        assert batch.advantages.equal(elastic_batch.advantages)


@pytest.mark.on_demand
@pytest.mark.parametrize("dies", [False, True], ids=["lives", "dies"])
def test_elastic_async_run_uses_each_prompt_once(
    dies: bool,
    ray_of_all_runs: None,
    easy: Callable[[Path], list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """Two CPUs have room for one new engine, so the last one can only start if the first one was removed."""
    output = run_elastic(
        ["--config-name=async", *easy(tmp_path), *DEDICATED, "trainer.dump_data_batch=true",
         "generator.weight_sync_check=probe", "generator.sampling_params.max_generate_length=48"],
        capsys, once=False, dies=dies,
    )  # fmt: skip
    assert [len(Elastic.engine_names[step]) for step in range(STEPS + 1)] == [1, 1, 2, 2, 1, 1, 2]
    assert output.count("engine 1 joined") == 2
    assert output.count("engine 1 left") == 1
    rows = metrics_of(tmp_path)
    assert rows[STEPS]["engines/restarts"] == dies
    assert max(rows[step]["async/staleness_max"] for step in range(1, STEPS + 1)) <= 1
    assert all(rows[step]["rollouts/failed"] == 0 for step in range(1, STEPS + 1))
    uids = [uids for _, uids in batches(tmp_path)]
    for epoch in (uids[:2], uids[2:4], uids[4:]):
        assert list(Counter(uid for step in epoch for uid in step).values()) == [4] * 8
