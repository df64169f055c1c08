"""What every run's kept rollouts must give: its batches, bit for bit, and its own numbers when they are replayed."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from pathlib import Path

from skyrl_train.config.prepare import prepare
from skyrl_train.metrics import Metrics
from skyrl_train.replay.answer import Answer
from skyrl_train.replay.rows import read_step
from skyrl_train.replay.run import Question, replay
from skyrl_train.replay.update import Algorithm
from skyrl_train.report.rollout_files import RolloutFiles
from skyrl_train.trainer.batch_dump import read_batch

NOT_KEPT = {"values", "returns", "routing"}


def assert_replays(folder: Path) -> Answer:
    """For a run with trainer.keep_rollouts=all and trainer.dump_data_batch=true, in the folders `ckpts`, `exports`."""
    run = folder / "ckpts"
    cfg = prepare(["--config-dir", str(run), "--config-name", "config"], has_accelerator=True, own_code=True).config
    _assert_batches(run, folder / "exports", Algorithm.of(cfg))
    answer = asyncio.run(replay(Question(run, cfg, cfg, reward="own")))
    assert answer.tokens > 0 and answer.differing_tokens == 0
    assert answer.differing_metrics == {}
    assert answer.recorded >= 4
    assert answer.rewards is not None
    found = answer.rewards.numbers()
    assert found["samples"] == sum(map(len, answer.samples)) and found["changed"] == found["environment_differs"] == 0
    assert answer.new == answer.old, "the rewards are the same, and so is all that follows from them"
    assert all(abs(same - 1) < 1e-9 for same in answer.cosines)
    return answer


def _assert_batches(run: Path, exports: Path, algorithm: Algorithm) -> None:
    """A batch made again of kept rows is the one that its step trained on."""
    files = RolloutFiles(run)
    dumps = {int(file.name.split("_")[2]): file for file in exports.rglob("global_step_*_training_input.safetensors")}
    assert files.steps() == sorted(dumps)
    for step, file in dumps.items():
        dumped, uids = read_batch(file)
        kept = read_step(files, step)
        made = kept.batch()
        made = made.with_tokens(advantages=kept.advantages(made))
        for correct in algorithm.corrections:
            made = correct(made, Metrics())
        for name in {field.name for field in fields(dumped)} - NOT_KEPT:
            one, other = getattr(made, name), getattr(dumped, name)
            if name == "old_logprobs" and other is None:  # told by the update of the batch, a single step
                continue
            assert (one is None) == (other is None), f"step {step}: {name}"
            assert one is None or (one.dtype == other.dtype and one.equal(other)), f"step {step}: {name}"
        of_rows = [one.trajectory.prompt.uid for one in kept.rollouts for _ in one.trajectory.sequences()]
        assert of_rows == uids
