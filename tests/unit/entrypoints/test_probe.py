"""The time budget of a probe, and its report; tests/integration/runs/test_probe.py takes a real one."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config.keys import get_value, replace_value
from skyrl_train.config.schema import Config
from skyrl_train.data.dataset import PromptDataset
from skyrl_train.data.messages import Prompt
from skyrl_train.entrypoints.plan_report import PROBE_HINT, DataStats, run_lines
from skyrl_train.entrypoints.probe import (
    LIMIT,
    MAX_SIZES,
    MAX_STEPS,
    STEPS_S,
    TIMINGS_S,
    MicroBatchTiming,
    ProbeResult,
    ProbeSchedule,
    as_temporary_run,
    probe,
    response_lengths,
    sizes_between,
    temporary_folder,
)
from skyrl_train.entrypoints.probe_report import best_timing, probe_lines
from skyrl_train.errors import ConfigError, EngineError, RunInterrupted
from tests.support.learner_specs import policy_batch
from tests.support.probe_steps import config, measured_step


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def sizes(
    seconds_a_prompt: float, prompts: int = 16, staleness: int = 0, first_s: float = 0.0
) -> tuple[list[int], ProbeSchedule]:
    """Return the steps that a probe takes, requested as the collector does, and the schedule in the end."""
    clock = Clock()
    schedule = ProbeSchedule(1000, prompts, 1, max_staleness_steps=staleness, clock=clock)
    steps: list[int] = []
    assert all(schedule.num_prompts_in_step(ahead) for ahead in range(staleness + 1))
    while len(steps) < schedule.total_steps:
        steps.append(schedule.num_prompts_in_step(len(steps)))
        clock.now += steps[-1] * seconds_a_prompt + (first_s if len(steps) == 1 else 0.0)
        schedule.num_prompts_in_step(len(steps) + staleness)
    return steps, schedule


def test_complete_steps_follow_a_part_until_time_ends():
    steps, schedule = sizes(0.1)
    assert steps == [2] + [16] * 8  # 0.2 s and 8 x 1.6 s
    assert schedule.measured() == list(range(2, 9))


def test_number_of_steps_is_limited():
    steps, schedule = sizes(0.001)
    assert len(schedule.measured()) == MAX_STEPS
    assert len(steps) == MAX_STEPS + 2


def test_slow_first_step_keeps_later_steps_complete():
    steps, _ = sizes(0.1, first_s=5.0)
    assert steps[:3] == [2, 2, 16]


def test_growing_parts_are_measured_if_time_is_short():
    steps, schedule = sizes(0.5, prompts=64)
    assert steps == [8, 8, 16]  # 4, 4 and 8 of the 20 s
    assert schedule.measured() == [1, 2]
    assert sum(steps) * 0.5 <= STEPS_S + TIMINGS_S


def test_slow_model_takes_minimum_of_steps():
    steps, schedule = sizes(60.0, prompts=8)
    assert steps == [1, 1, 2]  # two sizes, however long: a single one does not show how time grows
    assert schedule.measured() == [1, 2]


def test_asynchronous_steps_count_once_rollouts_are_ahead():
    steps, schedule = sizes(0.2, staleness=2)
    assert set(steps) == {16}
    assert schedule.measured() == list(range(3, len(steps)))
    assert len(schedule.measured()) >= 3


def test_asynchronous_steps_count_in_complete_bursts():
    """A burst is a slow step, then as many fast ones as rollouts run ahead."""
    for staleness in (1, 2, 4):
        steps, schedule = sizes(0.2, staleness=staleness)
        assert schedule.measured()[-1] == len(steps) - 1
        assert len(schedule.measured()) % (staleness + 1) == 0


@pytest.mark.parametrize(
    ("error", "logs", "kept"),
    [
        (None, True, False),
        (EngineError("died"), True, True),
        (EngineError("died"), False, False),
        (RunInterrupted(2), True, False),
        (KeyboardInterrupt(), True, False),
    ],
)
def test_folder_is_kept_for_logs_of_failures(error: BaseException | None, logs: bool, kept: bool):
    with suppress(EngineError, RunInterrupted, KeyboardInterrupt), temporary_folder() as folder:
        if logs:
            (folder / "run" / "logs").mkdir(parents=True)
        if error is not None:
            raise error
    assert folder.exists() == kept
    shutil.rmtree(folder, ignore_errors=True)


def test_masked_responses_have_full_length():
    """A response that was cut by a deadline is masked, but took its full length."""
    batch = policy_batch((9, 4, 12, 9))
    keep = torch.tensor([True, False, True, False])
    masked = batch.with_tokens(loss_mask=batch.loss_mask & batch.expand_to_tokens(keep))
    answers = (batch.lengths - batch.prompt_lengths).tolist()
    assert response_lengths(batch) == batch.sum_per_sequence(batch.loss_mask.long()).tolist()
    assert response_lengths(masked)[1::2] == answers[1::2]
    assert response_lengths(masked)[::2] == response_lengths(batch)[::2]
    assert min(answers) > 0


def test_sizes_span_longest_sequence_to_mini_batch():
    assert sizes_between(100, 900) == [128, 256, 512, 1024]
    assert sizes_between(128, 100) == [128]
    many = sizes_between(100, 100_000)
    assert len(many) <= MAX_SIZES and many[-1] == 1 << 17


def test_probe_writes_to_temporary_folder(tmp_path: Path):
    cfg = replace_value(Config(), "generator.weight_sync_folder", "/shared/weights")
    quiet = as_temporary_run(cfg, tmp_path)
    for key in ("trainer.ckpt_path", "trainer.export_path"):
        assert get_value(quiet, key).startswith(str(tmp_path))
    assert quiet.generator.weight_sync_folder == f"/shared/weights/{tmp_path.name}"
    assert (quiet.trainer.ckpt_interval, quiet.trainer.hf_save_interval, quiet.trainer.eval_interval) == (0, 0, 0)


def test_probe_refuses_remote_engines():
    with pytest.raises(ConfigError, match="run_engines_locally=false: a probe"):
        probe(replace_value(Config(), "generator.run_engines_locally", False))


def probed(cfg: Config, prompts: int, **changes: Any) -> ProbeResult:
    dataset = PromptDataset(tuple(Prompt(str(row), [], "any") for row in range(40)), 0)
    parts: dict[str, Any] = {
        "steps": [measured_step(prompts, {"response/truncated_fraction": 0.25})] * 3,
        "num_steps": 5,
        "steps_took_s": 12.5,
        "start_s": 30.0,
        "prompts": cfg.trainer.train_batch_size,
        "dataset": dataset,
        "eval_answers": 0,
        "responses": [10, 20, 30, 32],
        "timed_tokens": 1000,
        "timings": [
            MicroBatchTiming(None, 2.0, 1.0),
            MicroBatchTiming(512, 1.0, 1.5),
            MicroBatchTiming(1024, float("inf"), None),
        ],
    }
    return ProbeResult(**parts | changes)


def test_probe_report_shows_times_and_settings():
    cfg = config()
    cfg = replace_value(replace_value(cfg, "trainer.epochs", 2), "trainer.eval_interval", -1)
    text = "\n".join(probe_lines(cfg, probed(cfg, 8)))
    step_s = measured_step(8).row["timing/step_s"]
    for part in ("generate", "score", "update", "weight sync", "the rest", f"{step_s:.3g}", "25% reached the limit"):
        assert part in text
    assert f"the run: {(30 + 10 * step_s) / 60:.1f} minutes (30 s to start, 10 steps)" in text
    assert f"set {LIMIT}=512: 2.00 times as fast" in text
    assert "DOES NOT FIT: out of memory" in text
    assert "no other split" in text
    assert "scaled from" not in text
    assert "a step of 8 prompts, scaled from steps of 2" in "\n".join(probe_lines(cfg, probed(cfg, 2)))


def test_size_is_suggested_if_clearly_faster():
    configured = MicroBatchTiming(None, 1.0, 1.0)
    assert best_timing([configured, MicroBatchTiming(256, 0.98, 1.0)]) is configured
    assert best_timing([configured, MicroBatchTiming(256, 0.9, 1.0), MicroBatchTiming(512, 0.8, 1.0)]).limit == 512
    alone = probed(config(), 8, timings=[configured])
    assert f"{LIMIT}: no other size was tried" in "\n".join(probe_lines(config(), alone))


def test_plan_refers_to_probe_for_seconds():
    text = "\n".join(run_lines(config(), [], DataStats(40, 20.4)))
    assert text.count(PROBE_HINT) == 1
    assert "8 prompts x 5 samples x (20 per prompt, on average + up to 1,024 per answer)" in text
    assert "40 prompts, 8 per step, trainer.epochs=1" in text
    unknown = "\n".join(run_lines(config(), [], "not read"))
    assert "512 per prompt, the maximum, as the data are unknown: not read" in unknown
