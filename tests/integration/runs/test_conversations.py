"""Two-turn episodes of a plugin's environment, from the command line to the training batch."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from skyrl_train.report.rollout_files import RolloutReader
from skyrl_train.report.rollout_views import RolloutViews
from skyrl_train.report.run_reader import RunReader
from skyrl_train.trainer.batch_dump import read_batch
from tests.support.rollout_examples import assert_rollouts_match_batch

from .conftest import Run, metrics_of

PLUGIN = """
from skyrl_train.environments.base import BaseTextEnv, BaseTextEnvStepOutput
from skyrl_train.environments.registry import register


class TwiceEnv(BaseTextEnv):
    def step(self, action):
        self.turns += 1
        reward = sum(c.isascii() and c.islower() for c in action) / max(len(action), 1)
        done = self.turns >= self.extras["max_turns"]
        messages = [] if done else [{"role": "user", "content": "again"}]
        return BaseTextEnvStepOutput(observations=messages, reward=reward, done=done, metadata={"turn": self.turns})


register("twice", "twice_plugin:TwiceEnv")
"""
REWRITING = (
    "{% for message in messages %}{% set again = message['role'] == 'assistant' and not loop.last %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + ('(earlier) ' if again else '') + message['content'] }}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""A template that marks earlier answers."""


@pytest.fixture
def twice(small: Callable[[Path], list[str]], plugins: Path, tmp_path: Path) -> list[str]:
    """Overrides of two steps with 4 prompts x 4 samples x 2 turns."""
    (plugins / "twice_plugin.py").write_text(PLUGIN)
    (tmp_path / "rewriting.jinja").write_text(REWRITING)
    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(override for override in small(tmp_path) if not override.startswith(("environment.", "data."))),
        f"data.train_data=['{tmp_path / 'rows.jsonl'}']",
        f"data.val_data=['{tmp_path / 'rows.jsonl'}']",
        "trainer.plugins=[twice_plugin]",
        "environment.env_class=twice",
        "generator.max_turns=2",
        "generator.max_input_length=120",
        "trainer.dump_data_batch=true",
        "trainer.keep_rollouts=all",
        "trainer.max_steps=2",
    ]


def dumped(folder: Path, step: int) -> Path:
    return folder / "exports" / "dumped_data" / f"global_step_{step}_training_input.safetensors"


def test_two_turns_form_one_sequence(run: Run, twice: list[str], tmp_path: Path):
    run("main_base", *twice, "generator.batched=true", "trainer.algorithm.advantage_estimator=reinforce++")
    rows = metrics_of(tmp_path)
    for step in (1, 2):
        assert rows[step]["episode/turns"] == rows[step]["environment/turn"] == 2
        assert rows[step]["rollouts/failed"] == 0
        assert rows[step]["rollouts/trajectories"] == 16
        # In fp32 on a CPU, the tokens trained on are those sampled, in the same context.
        assert rows[step]["rollout/logprob_diff_max"] < 1e-4
    assert "eval/unknown/avg_score" in rows[0]
    batch, uids = read_batch(dumped(tmp_path, 1))
    assert len(batch) == len(uids) == 16 and batch.episode_ids is None
    assert batch.token_rewards is not None
    rewarded = batch.sum_per_sequence((batch.token_rewards != 0).long())
    assert int(rewarded.max()) == 2, "each turn has its own reward"
    assert_rollouts_were_trained_on(tmp_path)


@pytest.mark.on_demand
def test_history_rewriting_template_needs_step_wise_trajectories(run: Run, twice: list[str], tmp_path: Path):
    template = [
        "generator.chat_template.source=file",
        f"generator.chat_template.name_or_path={tmp_path}/rewriting.jinja",
    ]
    refused = run("main_base", *twice, *template, expect=2)
    assert "generator.step_wise_trajectories=true" in refused.stderr
    assert not (tmp_path / "ckpts" / "metrics.jsonl").exists()

    run("main_base", *twice, *template, "generator.step_wise_trajectories=true")
    rows = metrics_of(tmp_path)
    assert rows[2]["rollouts/trajectories"] == 16 and rows[2]["episode/sequences"] == 2
    assert max(rows[step]["rollout/logprob_diff_max"] for step in (1, 2)) < 1e-4
    batch, uids = read_batch(dumped(tmp_path, 1))
    assert len(batch) == len(uids) == 32 and batch.episode_ids is not None
    assert batch.episode_ids.unique(return_counts=True)[1].tolist() == [2] * 16
    assert_rollouts_were_trained_on(tmp_path)


def assert_rollouts_were_trained_on(folder: Path) -> None:
    """Check that the rollouts saved in this folder are the batches that the run trained on."""
    files, views = RolloutReader(folder / "ckpts"), RolloutViews(folder / "ckpts")
    assert files.steps() == [1, 2]
    vocabulary = files.vocabulary()
    for step in files.steps():
        table = files.table([step])
        assert_rollouts_match_batch(table, *read_batch(dumped(folder, step)))
        for row in table.to_pylist():
            trained = np.array(row["trained"])
            gap = np.array(row["old_logprobs"])[trained] - np.array(row["rollout_logprobs"])[trained]
            assert len(gap) and np.abs(gap).max() < 1e-4, (
                "the file has the trainer's log-probs although the update is a single step"
            )
            opening, answer = json.loads(row["messages"])[:2]
            assert opening["content"].startswith("say ") and answer["role"] == "assistant"
            assert answer["content"] in row["text"] and len(row["turns"]) == 2
            asked = "".join(vocabulary[token] for token in row["prompt_ids"])
            assert f"<|im_start|>user\n{opening['content']}<|im_end|>" in asked
            shown = views.rollout(step, row["uid"], row["sample"])["tokens"]
            for name in ("advantages", "old_logprobs", "ref_logprobs"):
                expected = row[name] or [None] * len(row["response_ids"])
                numbers = np.array(shown[name][shown["prompt"] :], np.float32)
                assert np.array_equal(numbers, np.array(expected, np.float32), equal_nan=True)
            assert shown["trained"][shown["prompt"] :] == row["trained"]
    summary = RunReader(folder / "ckpts").summary()
    assert (summary["state"], summary["step"], summary["total_steps"]) == ("finished", 2, 2)
