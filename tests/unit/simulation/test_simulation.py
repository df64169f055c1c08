"""Engines and learners that only wait take as long as they should, and say which weights sampled what."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.config.hydra import CONFIG_FILE, save_resolved
from skyrl_train.config.schema import Config
from skyrl_train.data.arrays import token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from skyrl_train.entrypoints.simulate import _timings, main, splits
from skyrl_train.errors import ConfigError, DataError, EngineError, RolloutsFailed
from skyrl_train.simulation import virtual_time
from skyrl_train.simulation.engine import SimulatedEngine
from skyrl_train.simulation.fit import fit
from skyrl_train.simulation.run import Split, build_run, simulate
from skyrl_train.simulation.timings import EngineTimings, LearnerTimings, Lengths, Timings
from tests.support.pages import Command, documented, snippets

STEP_S, ALIKE = 0.5, 0.25
EVEN = Timings(
    engine=EngineTimings(decode_s=0.1, decode_per_sequence_s=0.0, prefill_tokens_per_s=1e9),
    learner=LearnerTimings(0.0, 0.0, step_s=6.4),
    sync_s=0.0,
    response=Lengths(64.0, 0.0),
)
"""64 tokens of a tenth of a second each, and as long for an update."""


def config(prompts: int = 4, samples: int = 4) -> Config:
    cfg = Config()
    cfg.trainer.train_batch_size, cfg.generator.n_samples_per_prompt = prompts, samples
    return cfg


def request(name: str, tokens: int, prompt: int = 1) -> SampleRequest:
    return SampleRequest(name, token_array((0,) * prompt), SamplingParams(max_tokens=tokens), 0)


def engine(**timings: float) -> SimulatedEngine:
    given = {"decode_s": STEP_S, "prefill_tokens_per_s": 1e9} | timings
    return SimulatedEngine(lambda one: one.sampling.max_tokens, EngineTimings(**given), name="e")  # type: ignore[arg-type]


def test_hours_pass_at_once_and_a_wait_that_nothing_ends_is_an_error(monkeypatch: pytest.MonkeyPatch):
    async def wait() -> float:
        await asyncio.gather(*(asyncio.sleep(3600.0 * hours) for hours in range(100)))
        return asyncio.get_running_loop().time()

    assert virtual_time.run(wait()) == pytest.approx(99 * 3600)
    monkeypatch.setattr(virtual_time, "_THREAD_S", 0.1)
    with pytest.raises(virtual_time.Deadlock):
        virtual_time.run(asyncio.Event().wait())


def test_a_run_in_which_samplers_find_nothing_ends_as_a_real_one_does():
    cfg = config()
    cfg.trainer.algorithm.dynamic_sampling.type = "filter"
    cfg.trainer.algorithm.dynamic_sampling.max_sample_batches = 3
    with pytest.raises(RolloutsFailed, match="found 0 groups with different rewards among 12 prompts"):
        simulate(cfg, replace(EVEN, pass_rate=0.0), Split(1, 1), 4)


def test_sides_that_share_a_machine_slow_each_other_down_only_while_both_work():
    cfg = config()
    cfg.trainer.fully_async.enabled = True
    beside = replace(
        EVEN,
        engine=replace(EVEN.engine, beside_learner=1.5),
        learner=replace(EVEN.learner, beside_engines=1.25),
    )
    work_s = 6.4
    update_s = work_s * 1.25
    left_s = work_s - update_s / 1.5  # of a batch when an update ends; half of it was done while the last step waited
    for timings, synchronous_s, ahead_s in ((EVEN, 2 * work_s, work_s), (beside, 2 * work_s, update_s + left_s / 2)):
        assert 3600 / simulate(cfg, timings, Split(1, 1), 12).steps_per_hour == pytest.approx(synchronous_s, rel=0.02)
        found = 3600 / simulate(cfg, timings, Split(1, 1, staleness=1), 12).steps_per_hour
        assert found == pytest.approx(ahead_s, rel=0.02)


def test_an_engine_whose_pace_changes_goes_on_where_it_was():
    async def run() -> float:
        one = engine()
        asked = asyncio.ensure_future(one.generate([request("a", 10)]))
        await asyncio.sleep(4 * STEP_S)
        one.at_pace(2.0)
        await asyncio.sleep(3 * 2 * STEP_S)
        one.at_pace(1.0)
        await asked
        return asyncio.get_running_loop().time()

    assert virtual_time.run(run()) == pytest.approx((4 + 6 + 3) * STEP_S)


def test_sequences_share_their_steps_and_new_ones_slow_the_others_down():
    async def run() -> list[float]:
        one = engine(decode_per_sequence_s=ALIKE, max_num_seqs=2)
        ends = []

        async def ask(name: str, tokens: int) -> None:
            await one.generate([request(name, tokens)])
            ends.append(asyncio.get_running_loop().time())

        await asyncio.gather(ask("a", 4), ask("b", 8), ask("waits", 4))
        return ends

    both, alone = STEP_S + 2 * ALIKE, STEP_S + ALIKE
    assert virtual_time.run(run()) == pytest.approx([4 * both, 8 * both, 8 * both], abs=1e-6)
    assert alone < both


def test_a_prompt_is_read_once_for_its_group_before_the_first_step():
    async def run() -> float:
        one = engine(prefill_tokens_per_s=10.0)
        await one.generate([replace(request(str(n), 2, prompt=20), group="g") for n in range(3)])
        return asyncio.get_running_loop().time()

    assert virtual_time.run(run()) == pytest.approx(20 / 10 + 2 * STEP_S)


@pytest.mark.parametrize("mode", ["keep", "retract", "abort"])
def test_tokens_have_the_version_that_sampled_them(mode: str):
    async def run() -> tuple[Completion, float]:
        one = engine(prefill_tokens_per_s=1.0)
        asked = asyncio.ensure_future(one.generate([request("a", 10, prompt=1)]))
        await asyncio.sleep(1.0 + 4 * STEP_S + 0.1)
        await one.pause(mode)
        await asyncio.sleep(100.0)
        await one.commit_weights(7)
        await one.resume()
        (completion,) = await asked
        return completion, asyncio.get_running_loop().time()

    completion, ended = virtual_time.run(run())
    spans = [(span.start, span.stop, span.version) for span in completion.versions]
    if mode == "abort":
        assert (completion.stop_reason, spans) == ("abort", [(0, 4, 0)])
        return
    assert spans == [(0, 4, 0), (4, 10, 7)]
    read_again = 5.0 if mode == "retract" else 0.0  # the prompt and four tokens
    assert ended == pytest.approx(1.0 + 10 * STEP_S + 100.0 + read_again)


def test_a_dead_engine_fails_what_it_had_and_what_comes():
    async def run() -> None:
        one = engine()
        asked = asyncio.ensure_future(one.generate([request("a", 10)]))
        await asyncio.sleep(1.0)
        one.die()
        for call in (asked, one.generate([request("b", 1)]), one.health()):
            with pytest.raises(EngineError, match="e "):
                await call

    virtual_time.run(run())


def test_a_step_takes_both_or_the_longer_of_the_two():
    hourly = {ahead: simulate(config(), EVEN, Split(1, 1, ahead), 12) for ahead in (0, 1)}
    assert hourly[0].steps_per_hour == pytest.approx(3600 / 12.8, rel=0.01)
    assert hourly[1].steps_per_hour == pytest.approx(3600 / 6.4, rel=0.01)
    assert (hourly[0].engines_busy, hourly[0].trainer_busy) == pytest.approx((0.5, 0.5), abs=0.01)
    assert (hourly[1].engines_busy, hourly[1].trainer_busy) == pytest.approx((1.0, 1.0), abs=0.01)
    assert (hourly[0].staleness, hourly[1].staleness) == (0.0, 1.0)


def test_a_run_is_the_same_every_time():
    timings = replace(EVEN, response=Lengths(64.0, 1.0), engine=replace(EVEN.engine, failures_per_hour=60.0))
    assert simulate(config(), timings, Split(2, 1, 2), 8) == simulate(config(), timings, Split(2, 1, 2), 8)


def save_simulated_run(folder: Path, cfg: Config, timings: Timings) -> None:
    """The metrics and the configuration of a synchronous run of two engines, as a real one leaves them."""

    async def rows() -> list[dict[str, float]]:
        built = build_run(cfg, timings, Split(2, 1), 12)
        await built.trainer.fit()
        await built.client.close()
        return [dict(one.row) for one in built.moments]

    cfg.generator.num_inference_engines, cfg.trainer.placement.colocate_all = 2, False
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in virtual_time.run(rows())))
    save_resolved(cfg, folder / CONFIG_FILE)


def test_what_a_run_shows_is_fitted(tmp_path: Path):
    """The metrics of a simulated run give the timings back that it was simulated with."""
    timings = replace(
        EVEN,
        engine=replace(EVEN.engine, decode_per_sequence_s=0.01),
        learner=LearnerTimings(update_s_per_token=0.002, step_s=1.5),
        response=Lengths(16.0, 0.7),  # so that a token stands for itself
        prompt_tokens=0,
        sync_s=3.0,
    )
    cfg = config(prompts=16)
    save_simulated_run(tmp_path, cfg, timings)
    found = fit(tmp_path)
    assert found.engine.decode_s == pytest.approx(0.1, rel=0.1)
    assert found.engine.decode_per_sequence_s == pytest.approx(0.01, rel=0.15)
    assert found.sync_s == pytest.approx(3.0)
    assert found.response.mean == pytest.approx(16.0, rel=0.1)
    predicted = simulate(cfg, found, Split(2, 1), 12).steps_per_hour
    assert predicted == pytest.approx(simulate(cfg, timings, Split(2, 1), 12).steps_per_hour, rel=0.15)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(DataError, match="0 steps after the first"):
        fit(tmp_path)


def test_how_long_answers_took_tells_decode_steps_apart_from_sequences(tmp_path: Path):
    """Where the longest answer of each step is as long as it may be, and no step takes quite what it should."""
    timings = replace(
        EVEN,
        engine=replace(EVEN.engine, decode_per_sequence_s=0.0002),
        response=Lengths(16.0, 0.7),
        prompt_tokens=0,
    )
    cfg = config(prompts=64)
    cfg.trainer.placement.colocate_all = False
    cfg.generator.sampling_params.max_generate_length = 40

    async def rows() -> list[dict[str, float]]:
        built = build_run(cfg, timings, Split(1, 1), 12)
        await built.trainer.fit()
        await built.client.close()
        return [dict(one.row) for one in built.moments]

    noise = cycle((0.9, 1.0, 1.1))
    told = [row | {"timing/generate_s": row["timing/generate_s"] * next(noise)} for row in virtual_time.run(rows())]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in told))
    save_resolved(cfg, tmp_path / CONFIG_FILE)
    fitted = fit(tmp_path)
    found = fitted.engine
    assert fitted.response.sigma == pytest.approx(0.7, rel=0.1)
    assert fitted.response.mean == pytest.approx(16.0, rel=0.05)
    assert found.decode_s == pytest.approx(0.1, rel=0.05)
    assert found.decode_per_sequence_s == pytest.approx(0.0002, rel=0.15)


def test_what_cannot_be_fitted_is_named(tmp_path: Path):
    row = {"timing/generate_s": 1.0, "response/mean_tokens": 1.0, "response/max_tokens": 9.0, "rollouts/tokens": 16.0}
    row |= {"rollouts/trajectories": 16.0, "timing/update_s": 1.0, "timing/step_s": 2.0}
    alike = [{"step": step, **row} for step in range(5)]
    differ = [one | {"rollouts/tokens": 16.0 + one["step"]} for one in alike]

    def refused(rows: list[dict[str, float]], **changed: Any) -> str:
        cfg = config()
        for name, value in changed.items():
            setattr(cfg.generator, name, value)
        save_resolved(cfg, tmp_path / CONFIG_FILE)
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        with pytest.raises(DataError) as caught:
            fit(tmp_path)
        return str(caught.value)

    assert "in each step alike" in refused(alike)
    assert "several turns" in refused([one | {"episode/max_turns": 2.0} for one in differ])
    assert "more sequences than run at a time" in refused(differ, max_num_seqs=8)
    assert "several accelerators" in refused(differ, inference_engine_tensor_parallel_size=2)
    for name in ("sampling/dropped", "sampling/cut"):
        assert "groups that no step trained on" in refused([one | {name: 2.0} for one in differ])
    assert "was asynchronous" in refused([one | {"async/staleness_max": 1.0} for one in differ])
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in differ))
    (tmp_path / CONFIG_FILE).write_text("trainer: {}\n")
    with pytest.raises(DataError, match=r"config\.yaml: is not what a run writes"):
        fit(tmp_path)


def test_what_nothing_is_trained_on_is_wasted():
    alive = replace(EVEN, response=Lengths(64.0, 0.5))
    cfg = config(prompts=8, samples=4)
    extra = simulate(cfg, alive, Split(2, 1, over_provisioning=1.0), 8)
    assert extra.wasted > 0.5, "the slower half, and what it had when it was cut"
    cfg.trainer.algorithm.dynamic_sampling.type = "filter"
    cfg.trainer.algorithm.dynamic_sampling.max_sample_batches = -1
    easy = simulate(cfg, replace(alive, pass_rate=0.98), Split(2, 1), 8)
    assert easy.wasted == pytest.approx(0.92, abs=0.03), "1 - 0.98^4 - 0.02^4 of the groups are useful"


def test_engines_that_fail_do_not_take_their_work_with_them():
    failing = replace(EVEN, engine=replace(EVEN.engine, failures_per_hour=60.0, start_s=1.0))
    calm, hostile = (simulate(config(), timings, Split(4, 1), 24) for timings in (EVEN, failing))
    assert hostile.engines_busy > 0.6 * calm.engines_busy
    assert hostile.wasted > 0 == calm.wasted


def test_fewer_steps_than_can_be_counted_are_refused():
    given = argparse.Namespace(steps=15, engines=None, slots=4, staleness=[0, 2], over_provisioning=[0.0])
    with pytest.raises(ConfigError, match="--steps 15: must be at least 16 with a staleness of 2"):
        splits(given)
    given.steps, given.engines = 16, [4]
    with pytest.raises(ConfigError, match="--engines 4: must be from 1 to 3"):
        splits(given)


def test_the_command_prints_a_table_and_draws_it(tmp_path: Path):
    (tmp_path / "timings.yaml").write_text("engine: {decode_s: 0.1}\nlearner: {step_s: 30}\nresponse: {mean: 100}\n")
    keys = ["device=cpu", "trainer.train_batch_size=8", "trainer.policy_mini_batch_size=8"]
    flags = ["--slots", "4", "--engines", "1,2", "--staleness", "0,1", "--steps", "10", "--over-provisioning", "0.5"]
    files = ["--timings", str(tmp_path / "timings.yaml"), "--png", str(tmp_path / "splits.png")]
    command = [sys.executable, "-m", "skyrl_train.entrypoints.cli", "simulate", *flags, *files, *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split("  ")[0] for line in lines[1:9]] == [
        *("4 colocated", "1 : 3", "1 : 3", "2 : 2", "2 : 2", "4 colocated", "1 : 3", "2 : 2")
    ]
    assert sum(line.endswith("<") for line in lines) == 1
    assert any(line.startswith("Fastest: ") for line in lines)
    assert (tmp_path / "splits.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "timings.yaml").write_text("engine: {decode: 0.1}\n")
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "decode" in refused.stderr and "Traceback" not in refused.stderr


@pytest.mark.parametrize("side", ["engine: {beside_learner: 0}", "learner: {beside_engines: .nan}"])
def test_nothing_is_faster_beside_the_other_side(side: str, tmp_path: Path):
    (tmp_path / "timings.yaml").write_text(f"{side}\n")
    with pytest.raises(ConfigError, match="must be at least 1"):
        _timings(argparse.Namespace(run=None, timings=tmp_path / "timings.yaml"))


@pytest.mark.on_demand
@pytest.mark.parametrize("command", documented("skyrl-train simulate "), ids=str)
def test_the_commands_of_the_page(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for text in snippets("docs/async.md", "yaml"):
        if name := re.match(r"# (\w+\.yaml)", text):
            (tmp_path / name[1]).write_text(text)
    spread = replace(EVEN, response=Lengths(16.0, 0.7))  # answers that are all as long do not tell what a step takes
    save_simulated_run(tmp_path / "ckpts" / "my_run", config(prompts=16), spread)
    main([os.path.expanduser(word) for word in command.words[2:]])
    assert "Fastest: " in capsys.readouterr().out
    assert (tmp_path / "splits.png").is_file() == ("--png" in command.words)
