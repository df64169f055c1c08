"""Scripts as SkyRL's users write them: its import lines, `@hydra.main`, and the experiment inside a Ray task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.skyrl.batches import TrainingInputBatch
from skyrl_train.testing.tiny_models import byte_tokenizer
from skyrl_train.trainer.batch_dump import read_batch
from tests.support.doc_pages import snippets

from .conftest import ONE_PROCESS, metrics_of

SCRIPTS = Path(__file__).parent / "skyrl_scripts"
TWO_STEPS = ["trainer.max_steps=2", "trainer.ckpt_interval=0", "trainer.eval_before_train=false"]

Script = Callable[..., tuple[dict[int, dict[str, Any]], str]]


@pytest.fixture
def script(small: Callable[[Path], list[str]], tmp_path: Path) -> Script:
    """Run a script for two steps; return its rows of metrics and its output."""

    def run(name: str, *overrides: str, expect: int = 0) -> tuple[dict[int, dict[str, Any]], str]:
        overrides_by_key = {text.partition("=")[0]: text for text in (*small(tmp_path), *TWO_STEPS, *overrides)}
        keys = list(overrides_by_key.values())
        done = subprocess.run(
            [sys.executable, str(SCRIPTS / name), *keys],
            cwd=tmp_path,
            env={name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            capture_output=True,
            text=True,
            timeout=300,
        )
        output = done.stdout + done.stderr
        assert done.returncode == expect, output[-8000:]
        return metrics_of(tmp_path) if expect == 0 else {}, output

    return run


@pytest.mark.on_demand
@pytest.mark.slow
def test_own_generator_with_rewards_by_token(script: Script):
    rows, _ = script("own_generator.py", "+generator.my_rewards=by_token")
    assert set(rows) == {0, 1, 2}
    for step in (1, 2):
        assert rows[step]["generate/batch"] == 16  # 4 prompts x 4 samples in one call
        assert rows[step]["generate/step"] == step
        assert rows[step]["reward/mean"] > 1  # a sum over tokens
        assert rows[step]["policy/grad_norm"] > 0
        assert rows[step]["mismatch/kl"] < 1e-3  # the engines' log-probs are those of the trainer


@pytest.mark.on_demand
@pytest.mark.slow
def test_documented_script_trains(script: Script, tmp_path: Path):
    """Run the script of docs/guides/from_skyrl.md unchanged; the scripts in skyrl_scripts have its parts."""
    (tmp_path / "page.py").write_text(snippets("docs/guides/from_skyrl.md")[0])
    rows, _ = script(str(tmp_path / "page.py"))
    assert set(rows) == {0, 1, 2} and rows[2]["rollouts/failed"] == 0


@pytest.mark.on_demand
@pytest.mark.slow
def test_own_loss_reaches_ranks(script: Script):
    rows, _ = script("own_loss.py", "trainer.algorithm.policy_loss_type=my_reinforce")
    assert rows[2]["policy/clip_ratio"] == 0.25  # the value that the function returns


@pytest.mark.on_demand
def test_own_estimator_reaches_the_task(script: Script):
    rows, _ = script("own_estimator.py", "trainer.algorithm.advantage_estimator=simple_baseline")
    assert rows[2]["advantages/mean"] == pytest.approx(0.5)


@pytest.mark.on_demand
@pytest.mark.slow
def test_own_environment_of_the_gym_package(script: Script, tmp_path: Path):
    data = [{"prompt": [{"role": "user", "content": f"say {number}"}]} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    rows, _ = script(
        "own_environment.py",
        f"data.train_data=['{tmp_path / 'rows.jsonl'}']",
        "environment.env_class=shout",
        "+environment.skyrl_gym.shout.bonus=10",
        "generator.max_turns=2",
        ONE_PROCESS,
    )
    assert rows[2]["episode/turns"] == 2
    assert rows[2]["environment/capitals"] > 0 and rows[2]["reward/mean"] > 0


@pytest.mark.slow
def test_own_experiment_replaces_data_tracker_and_generator(script: Script, tmp_path: Path):
    rows, _ = script("own_experiment.py", "trainer.dump_data_batch=true")
    logged = [json.loads(line) for line in (tmp_path / "exports" / "mine.jsonl").read_text().splitlines()]
    assert [row["step"] for row in logged] == [0, 1, 2]
    assert logged[2]["reward/mean"] == rows[2]["reward/mean"]
    samples = (tmp_path / "ckpts" / "samples.jsonl").read_text()
    assert "+ 2 = ?" in samples
    assert rows[2]["rollouts/trajectories"] == 16 and rows[2]["rollouts/failed"] == 0
    dumped = tmp_path / "exports" / "dumped_data" / "global_step_2_training_input.safetensors"
    batch, uids = read_batch(dumped)
    assert len(set(uids)) == 4 and all(uid.startswith("row-") for uid in uids)
    assert "+ 2 = ? Please." in byte_tokenizer().decode(batch.input_ids[: batch.prompt_lengths[0]].tolist())
    first = batch.offsets[:-1] + batch.prompt_lengths
    assert not batch.loss_mask[first].any() and batch.loss_mask[first + 1].all()


@pytest.mark.on_demand
@pytest.mark.slow
def test_own_trainer_changes_masks_and_rewards(script: Script, tmp_path: Path):
    rows, _ = script(
        "own_trainer.py",
        "trainer.algorithm.advantage_estimator=no_op",
        "trainer.algorithm.use_kl_in_reward=true",
        "trainer.algorithm.policy_loss_type=importance_sampling",
    )
    assert rows[2]["mine/longest"] <= 16 and rows[2]["mine/uids"] == 4 and rows[2]["mine/step"] == 2
    assert (tmp_path / "ckpts" / "notes.txt").read_text() == "before\nafter step 2\n"
    assert rows[1]["advantages/abs_max"] < 1e-5  # the teacher is the policy itself, before its first update
    assert rows[2]["advantages/abs_max"] > 1e-5


@pytest.mark.on_demand
@pytest.mark.slow
def test_own_trainer_overrides_every_method_of_a_step(script: Script, tmp_path: Path):
    keys = [
        "trainer.max_steps=1",
        "trainer.resume_mode=latest",
        "trainer.epochs=1",
        "trainer.train_batch_size=24",
        "trainer.policy_mini_batch_size=12",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.update_ref_every_epoch=true",
        "trainer.ckpt_interval=1",
        "trainer.hf_save_interval=1",
        "trainer.dump_data_batch=true",
        "generator.n_samples_per_prompt=2",
        "generator.sampling_params.max_generate_length=8",
    ]
    script("own_hooks.py", *keys)
    rows, _ = script("own_hooks.py", *keys, "trainer.max_steps=2", "trainer.epochs=2")
    file = tmp_path / "exports" / "notes.jsonl"
    notes = [json.loads(line) for line in file.read_text().splitlines()]
    noted = [(note["name"], note["step"]) for note in notes]
    called = [
        "generate",
        "convert_to_training_input",
        "fwd_logprobs_values_reward",
        "compute_advantages_and_returns",
        "dump_data",
        "train_critic_and_policy",
        "update_ref_with_policy",
    ]
    expected = []
    for number in (1, 2):
        expected += [("train", 1), ("load_checkpoints", 0)]
        expected += [(name, number) for name in (*called, "eval", "save_models", "save_checkpoints")]
    assert noted == expected
    notes_by_name = {name: [note for note in notes if note["name"] == name] for name, _ in noted}
    checkpoint = str(tmp_path / "ckpts" / "global_step_1")
    assert [(note["folder"], note["seen"]) for note in notes_by_name["load_checkpoints"]] == [
        (None, 0),
        (checkpoint, 48),
    ]
    assert notes_by_name["save_checkpoints"][0]["folder"] == checkpoint
    assert [note["scored"] for note in notes_by_name["convert_to_training_input"]] == [False, False]
    assert [note["scored"] for note in notes_by_name["fwd_logprobs_values_reward"]] == [True, True]
    assert {(note["phase"], note["count"]) for note in notes_by_name["generate"]} == {("train", 48)}
    assert [note["reward"] for note in notes_by_name["compute_advantages_and_returns"]] == [1.5, 1.5]
    assert rows[2]["mine/seen"] == 96 and rows[2]["mine/grad_norm"] > 0 and rows[2]["eval/mine"] == 1
    timed = json.loads((tmp_path / "ckpts" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < timed["timing/own_update"] <= timed["timing/update_s"]
    folder = tmp_path / "exports"
    data = TrainingInputBatch().load(folder / "dumped_data" / "global_step_2_training_input.pkl")
    assert len(data) == 48 and not data["loss_mask"][:, 0].any() and data["loss_mask"][:, 1:].any()
    assert notes_by_name["train_critic_and_policy"][1]["trained"] == data["loss_mask"].sum()
    assert sorted(path.name for path in folder.glob("global_step_*")) == ["global_step_1", "global_step_2"]


def test_mistake_is_reported_before_ray_starts(script: Script):
    _, output = script("own_loss.py", "trainer.algorithm.eps_clip_lo=0.1", expect=2)
    assert "Did you mean trainer.algorithm.eps_clip_low?" in output and "Traceback" not in output
