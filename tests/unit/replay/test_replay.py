"""Replays of rollouts that are small enough to work out by hand."""

from __future__ import annotations

import asyncio
import functools
import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torch import Tensor

from skyrl_train.algorithms.registry import advantage_estimators
from skyrl_train.config.hydra import load, save_resolved
from skyrl_train.config.keys import with_value_at
from skyrl_train.config.schema import Config
from skyrl_train.entrypoints import replay as command
from skyrl_train.environments.registry import environments
from skyrl_train.errors import ConfigError
from skyrl_train.replay.answer import Answer
from skyrl_train.replay.report import SHOWN
from skyrl_train.replay.run import Question, replay
from skyrl_train.report.rollout_files import COLUMNS, write_rollouts

OWN = (
    *("trainer.train_batch_size=2", "trainer.policy_mini_batch_size=2", "generator.n_samples_per_prompt=4"),
    *("trainer.algorithm.use_kl_loss=false", "trainer.algorithm.advantage_estimator=dr_grpo", "device=cpu"),
)
PAGE = Path(__file__).parents[3] / "docs" / "replay.md"
REWARDS = ((1.0, 0.0, 0.0, 0.0), (0.5, 1.0, 1.0, 0.5))
LENGTHS = ((1, 2, 2, 2), (1, 1, 3, 4))
"""Response tokens of two groups of four: 16 altogether."""


ALGORITHM = "trainer.algorithm"
KEPT_ALL = {"trainer.keep_rollouts": "all"}
CORRECTION = f"{ALGORITHM}.off_policy_correction"


@functools.cache
def own_config() -> Config:
    return load(OWN)


def of_run(values: dict[str, Any]) -> Config:
    """The configuration of the run with these values."""
    config = own_config()
    for key, value in values.items():
        config = with_value_at(config, key, value)
    return config


def centred(rewards: tuple[float, ...]) -> list[float]:
    return [reward - sum(rewards) / len(rewards) for reward in rewards]


def row(group: int, sample: int, **changed: Any) -> dict[str, Any]:
    """A kept sample of one turn, as a run with Dr. GRPO keeps it; engine and trainer agree unless `changed`."""
    length, reward = LENGTHS[group][sample], REWARDS[group][sample]
    messages = [{"role": "user", "content": f"question {group}"}, {"role": "assistant", "content": "x" * length}]
    turn = {"start": 0, "stop": length, "reward": reward, "stop_reason": "stop", "min_version": 0, "max_version": 0}
    return {
        **{"step": 1, "uid": str(group), "group": group, "sample": sample, "data_source": "made", "env_class": "gsm8k"},
        **{"reward": reward, "status": "ok", "stop_reason": "stop", "temperature": 1.0, "env_metrics": "{}"},
        **{"min_version": 0, "max_version": 0, "prompt_tokens": 1, "response_tokens": length, "detail": ""},
        "turns": [turn | {"mean_version": 0.0, "running_s": 0.0}],
        "messages": json.dumps(messages),
        "text": "x" * length,
        "env_extras": json.dumps({"reward_spec": {"method": "rule", "ground_truth": str(group)}}),
        "prompt_ids": [9],
        "response_ids": [7] * length,
        "loss_spans": [{"start": 0, "stop": length}],
        "scored_spans": [{"start": 0, "stop": length}],
        "restarts": [],
        "rollout_logprobs": [-1.0] * length,
        "old_logprobs": [-1.0] * length,
        "advantages": [centred(REWARDS[group])[sample]] * length,
        "token_rewards": [0.0] * (length - 1) + [reward],
        **changed,
    }


def rows(**changed: Any) -> list[dict[str, Any]]:
    """All eight; `changed`: columns of the first."""
    return [row(g, s, **(changed if (g, s) == (0, 0) else {})) for g in range(2) for s in range(4)]


@pytest.fixture
def ask(tmp_path: Path) -> Callable[..., Answer]:
    """Replay these rows as a run of the configuration `own`, and as one with these values `changed`."""

    def asked(
        given: list[dict[str, Any]],
        changed: dict[str, Any] | None = None,
        *,
        own: dict[str, Any] | None = None,
        reward: str | None = None,
        without: tuple[str, ...] = (),
    ) -> Answer:
        table = pa.Table.from_pylist(given, COLUMNS).drop_columns(["trained", *without])
        write_rollouts(tmp_path, 1, table)
        question = Question(tmp_path, of_run(own or {}), of_run({**(own or {}), **(changed or {})}), reward)
        return asyncio.run(replay(question))

    return asked


def of(answer: Answer, column: str) -> list[Any]:
    return answer.samples[0][column].to_pylist()


def test_a_runs_own_numbers_come_out_again_and_one_bit_that_is_other_is_found(ask: Callable[..., Answer]):
    same = ask(rows())
    assert (same.tokens, same.differing_tokens) == (16, 0)
    assert of(same, "advantage_old") == [0.75, -0.25, -0.25, -0.25, -0.25, 0.25, 0.25, -0.25]
    assert same.new == [] and "reward_new" in same.samples[0].column_names
    for towards in (0, 1):
        other = np.nextafter(np.float32(0.75), np.float32(towards))
        assert ask(rows(advantages=[other])).differing_tokens == 1


def test_what_the_run_recorded_is_compared_where_all_of_the_step_was_kept(ask: Callable[..., Answer], tmp_path: Path):
    row = {"step": 1, "rollouts/trajectories": 8, "advantages/abs_max": 0.75, "advantages/abs_mean": 0.3}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    answer = ask(rows())
    assert answer.recorded == 2 and answer.differing_metrics == {"advantages/abs_mean": 1}
    sampled = {"rollouts/trajectories": 8 + 5 * 2, "sampling/dropped": 3, "sampling/repeated": 1}  # 5 samples a prompt
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | sampled) + "\n")
    assert ask(rows(), own={"generator.n_samples_per_prompt": 5}).recorded == 2
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row | {"rollouts/trajectories": 9}) + "\n")
    partly = ask(rows())
    assert partly.recorded == 0 and "keep_rollouts=all" in partly.notes["sample"]


def test_advantages_of_other_estimators(ask: Callable[..., Answer]):
    leave_one_out = ask(rows(), {f"{ALGORITHM}.advantage_estimator": "rloo"})
    expected = [value * 4 / 3 for rewards in REWARDS for value in centred(rewards)]
    assert of(leave_one_out, "advantage_new") == pytest.approx(expected, rel=1e-6)

    normed = ask(rows(), {f"{ALGORITHM}.advantage_estimator": "grpo"})
    deviations = [0.5, math.sqrt(4 * 0.0625 / 3)]
    expected = [value / (std + 1e-6) for r, std in zip(REWARDS, deviations, strict=True) for value in centred(r)]
    assert of(normed, "advantage_new") == pytest.approx(expected, rel=1e-6)

    # Every token's return is its sample's reward; over all 16 tokens it has mean 8.5 / 16.
    plus = ask(rows(), {f"{ALGORITHM}.advantage_estimator": "reinforce++"})
    lengths, rewards = [x for r in LENGTHS for x in r], [x for r in REWARDS for x in r]
    of_tokens = np.repeat(rewards, lengths)
    expected = (np.asarray(rewards) - of_tokens.mean()) / of_tokens.std(ddof=1)
    assert of(plus, "advantage_new") == pytest.approx(expected.tolist(), rel=1e-6)


def test_a_reduction_shows_in_what_samples_weigh(ask: Callable[..., Answer]):
    advantages = [value for rewards in REWARDS for value in centred(rewards)]
    lengths = [x for r in LENGTHS for x in r]
    by_token = [a * length / 16 for a, length in zip(advantages, lengths, strict=True)]
    by_sample = [a / 8 for a in advantages]
    answer = ask(rows(), {f"{ALGORITHM}.loss_reduction": "sequence_mean"})
    assert of(answer, "push_old") == pytest.approx(by_token, rel=1e-5)
    assert of(answer, "push_new") == pytest.approx(by_sample, rel=1e-5)
    old, new = answer.old[0], answer.new[0]
    assert old["pushes/up"] == pytest.approx(sum(x for x in by_token if x > 0), rel=1e-5)
    assert new["pushes/down"] == pytest.approx(0.125 * (3 * 0.25 + 2 * 0.25), rel=1e-5)
    longest = sum(map(abs, (by_token[6], by_token[7])))  # the two of 3 and 4 tokens
    assert old["pushes/on_longest_quarter"] == pytest.approx(longest / sum(map(abs, by_token)), rel=1e-5)
    sizes = np.abs(by_sample)
    assert new["pushes/effective_samples"] == pytest.approx(sizes.sum() ** 2 / (8 * (sizes**2).sum()), rel=1e-5)
    one, other = (np.repeat(np.divide(x, lengths), lengths) for x in (by_token, by_sample))
    cosine = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert answer.cosines == [pytest.approx(cosine, rel=1e-5)]


def test_mini_batches_of_one_prompt_weigh_by_themselves(ask: Callable[..., Answer]):
    answer = ask(rows(), {"trainer.policy_mini_batch_size": 1})
    advantages = [value for rewards in REWARDS for value in centred(rewards)]
    lengths, tokens = [x for r in LENGTHS for x in r], [7] * 4 + [9] * 4
    expected = [a * length / n for a, length, n in zip(advantages, lengths, tokens, strict=True)]
    assert of(answer, "push_new") == pytest.approx(expected, rel=1e-5)


def test_a_correction_truncates_masks_and_weighs(ask: Callable[..., Answer]):
    # The first sample's only token is three times as likely for the trainer as for the engine.
    kept = rows(old_logprobs=[-1.0 + math.log(3)])
    answer = ask(kept, {f"{CORRECTION}.tis_ratio_type": "token", f"{CORRECTION}.token_tis_ratio_clip_high": 2.0})
    assert of(answer, "importance_weight_new") == [2, 1, 1, 1, 1, 1, 1, 1]
    assert of(answer, "push_new")[0] == pytest.approx(2 * of(answer, "push_old")[0], rel=1e-6)
    assert answer.new[0]["correction/truncated_tokens"] == 1 / 16
    assert answer.new[0]["importance_weights/mean"] == pytest.approx(17 / 16)

    masks = ask(kept, {f"{CORRECTION}.token_mask_is_threshold_high": 2.5})
    assert masks.new[0]["tokens/masked"] == 1 / 16 and masks.new[0]["tokens/trained"] == 15
    assert of(masks, "push_new")[0] == 0 and of(masks, "trained_tokens_new")[0] == 0


def test_tokens_that_the_run_itself_masked_count_again(ask: Callable[..., Answer]):
    """Of a run with a correction the kept mask is that after it, and so are advantages."""
    masks = {f"{CORRECTION}.token_mask_is_threshold_high": 2.5}
    kept = rows(old_logprobs=[-1.0 + math.log(3)], loss_spans=[])
    answer = ask(kept, {f"{CORRECTION}.token_mask_is_threshold_high": 3.5}, own=masks)
    assert (answer.tokens, answer.differing_tokens) == (15, 0)
    assert of(answer, "trained_tokens_old")[0] == 0 and of(answer, "trained_tokens_new")[0] == 1


def test_files_of_before_scored_spans_have_the_loss_that_corrections_left(ask: Callable[..., Answer]):
    answer = ask(rows(), without=("scored_spans",))
    assert (answer.tokens, answer.differing_tokens, answer.old[0]["tokens/trained"]) == (16, 0, 16)
    assert "scored_spans" not in answer.notes
    masks = {f"{CORRECTION}.token_mask_is_threshold_high": 2.5}
    kept = rows(old_logprobs=[-1.0 + math.log(3)], loss_spans=[])
    answer = ask(kept, own=masks, without=("scored_spans",))
    assert (answer.tokens, answer.differing_tokens) == (15, 0) and "scored_spans" in answer.notes
    assert "scored_spans" not in ask(kept, own=masks).notes


@pytest.mark.defect("a-step-without-metrics-differed")
def test_advantages_normalised_over_a_step_are_compared_if_all_of_it_was_kept(
    ask: Callable[..., Answer], tmp_path: Path
):
    own = {f"{ALGORITHM}.advantage_batch_normalize": True}
    assert ask(rows(), own=own | KEPT_ALL).differing_tokens == 16
    unknown = ask(rows(), own=own)  # a step that was interrupted has no metrics
    assert unknown.tokens == 0 and "keep_rollouts=all" in unknown.notes["sample"]
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollouts/trajectories": 9}) + "\n")
    assert ask(rows(), own=own).tokens == 0
    assert ask(rows()).tokens == 16, "those of samples compare a group's"


def test_ones_own_advantages_may_compare_a_step_and_are_compared_if_all_of_it_was_kept(
    ask: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def of_the_step(rewards: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
        return rewards - rewards.mean()

    monkeypatch.setitem(advantage_estimators._items, "of_the_step", of_the_step)
    own = {f"{ALGORITHM}.advantage_estimator": "of_the_step"}
    assert ask(rows(), own=own | KEPT_ALL).tokens == 16
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "rollouts/trajectories": 9}) + "\n")
    assert ask(rows(), own=own).tokens == 0


def test_clipping_is_none_in_the_first_pass_and_shown_for_the_gap_to_the_engine(ask: Callable[..., Answer]):
    up, down = math.log(3), -math.log(3)
    above = rows(old_logprobs=[-1.0 + up])  # advantage 0.75: clipped above 1.2
    below = rows(old_logprobs=[-1.0 + down])  # and not below 0.8, from where it is pushed back
    found = [ask(kept).old[0] for kept in (above, below)]
    assert [numbers["clipped/first_pass"] for numbers in found] == [0, 0]
    assert [numbers["clipped/engine_gap"] for numbers in found] == [1 / 16, 0]
    # A loss with its trust region around the engine's policy clips it now: e^-1 * 3 - e^-1 > 0.2, and A pushes further.
    region = {"policy_loss_type": "dppo_tv", "dppo.delta_low": 0.2, "dppo.delta_high": 0.2}
    around = ask(above, {f"{ALGORITHM}.{key}": value for key, value in region.items()}).new[0]
    assert around["clipped/first_pass"] == 1 / 16 and "clipped/engine_gap" not in around


def test_without_the_trainers_log_probs_a_correction_is_refused_and_the_rest_said(ask: Callable[..., Answer]):
    kept = [one | {"old_logprobs": None} for one in rows()]
    answer = ask(kept)
    assert answer.differing_tokens == 0 and answer.tokens == 16
    assert "old_logprobs" in answer.notes and "clipped/engine_gap" not in answer.old[0]
    with pytest.raises(ConfigError, match=r"the off-policy correction of .* need old_logprobs"):
        ask(kept, {f"{CORRECTION}.tis_ratio_type": "token"})


def test_advantages_of_a_critic_are_the_kept_ones_and_cannot_be_had_for_a_run_without(ask: Callable[..., Answer]):
    critic = {f"{ALGORITHM}.advantage_estimator": "gae", "trainer.critic.model.path": "x"}
    kept = [one | {"advantages": [0.5] * one["response_tokens"]} for one in rows()]
    answer = ask(kept, {f"{ALGORITHM}.loss_reduction": "sequence_mean"}, own=critic)
    assert of(answer, "advantage_new") == of(answer, "advantage_old") == [0.5] * 8
    assert "values" in answer.notes and answer.tokens == 0
    with pytest.raises(ConfigError, match="need values"):
        ask(rows(), critic)


FUNCTIONS = """
import asyncio, time

async def swapped(response, *, turn_rewards, ground_truth, messages, answers):
    assert answers == [response] and messages[-1]["content"] == response
    assert messages[0]["content"] == f"question {ground_truth}"
    await asyncio.sleep(0)
    return 1.0 - turn_rewards[0]

def equal(response):
    return 0.25

def failing(response, *, extras, prompt):
    if prompt[0]["content"] == "question 1":
        return 0.5
    assert extras["reward_spec"]["ground_truth"] == "0"
    if len(response) == 1:
        raise ValueError("no \\x1b[31mreward")
    return float("nan")

def hanging(response, *, prompt):
    time.sleep(60 if prompt[0]["content"] == "question 1" and len(response) == 4 else 0)
    return 1.0

def wrong(response, *, colour):
    return 0.0
"""


@pytest.fixture
def functions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "functions_of_a_replay.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_function_of_ones_own_scores_and_is_compared(ask: Callable[..., Answer], functions: None):
    answer = ask(rows(), reward="functions_of_a_replay:swapped")
    assert of(answer, "reward_new") == [0, 1, 1, 1, 0.5, 0, 0, 0.5]
    assert of(answer, "advantage_new") == [-0.75, 0.25, 0.25, 0.25, 0.25, -0.25, -0.25, 0.25]
    assert answer.rewards is not None
    found = answer.rewards.numbers()
    assert found["mean"] == {"old": 0.5, "new": 0.5} and found["correlation"] == pytest.approx(-1)
    assert found["changed"] == 6 and found["largest_change"] == 1
    assert found["passes"] == {"pass_to_pass": 0, "pass_to_fail": 3, "fail_to_pass": 3, "fail_to_fail": 2}
    assert found["groups"]["both_vary"] == 2 and answer.cosines == [pytest.approx(-1)]


def test_groups_without_variance_and_failures_are_counted_and_failed_samples_teach_nothing(
    ask: Callable[..., Answer], functions: None
):
    failed = rows(status="failed", error="timeout", reward=0.0, advantages=[0.0])
    equal = ask(failed, reward="functions_of_a_replay:equal")
    assert equal.rewards is not None
    found = equal.rewards.numbers()
    assert found["failed_in_run"] == 1 and found["samples"] == 7 and found["correlation"] is None
    assert found["groups"] == {"both_vary": 0, "variance_vanished": 1, "variance_appeared": 0, "neither_varies": 1}
    assert equal.new[0]["groups/without_push"] == 1 and of(equal, "reward_new")[0] is None

    failing = ask(rows(), reward="functions_of_a_replay:failing")
    assert failing.rewards is not None
    assert failing.rewards.numbers()["failures"] == {"bad_reward": 3, "ValueError": 1}
    assert of(failing, "error_new") == ["ValueError", *["bad_reward"] * 3, *[None] * 4]
    assert of(failing, "trained_tokens_new") == [0, 0, 0, 0, 1, 1, 3, 4]


def test_a_function_that_hangs_costs_one_sample_and_one_that_cannot_be_called_is_refused(
    ask: Callable[..., Answer], functions: None
):
    answer = ask(rows(), {"trainer.timeouts.environment_step_s": 1.0}, reward="functions_of_a_replay:hanging")
    assert answer.rewards is not None
    assert answer.rewards.numbers()["failures"] == {"timeout": 1} and len(answer.rewards.new) == 7
    for reward, reason in (
        ("functions_of_a_replay:wrong", "asks for colour"),
        ("functions_of_a_replay:absent", "has no 'absent'"),
        ("nowhere_at_all:f", "cannot be imported"),
        ("unheard_of", "unknown environment 'unheard_of'|Unknown environment 'unheard_of'"),
    ):
        with pytest.raises(ConfigError, match=reason):
            ask(rows(), reward=reward)


GREETING = """
from skyrl_train.environments.base import StepOutput, TextEnv

class Greeting(TextEnv):
    def init(self, prompt):
        return [{"role": "system", "content": "hello"}, *prompt], {}

    def step(self, action):
        done = self.extras["max_turns"] == 1
        return StepOutput([] if done else [{"role": "user", "content": "more"}], len(action) / 4, done)
"""


def test_environments_get_the_rows_of_the_data_and_an_episode_that_goes_otherwise_is_counted(
    ask: Callable[..., Answer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "greeting_of_a_replay.py").write_text(GREETING)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(environments.table, "greeting", "greeting_of_a_replay:Greeting")
    asked = [{"role": "user", "content": "question 0"}]
    data = tmp_path / "rows.jsonl"
    row_of_data = {"prompt": asked, "env_class": "greeting", "reward_spec": {"method": "rule", "ground_truth": "0"}}
    data.write_text(json.dumps(row_of_data) + "\n")
    said = json.dumps([{"role": "system", "content": "hello"}, *asked, {"role": "assistant", "content": "x"}])
    kept = [one | {"env_class": "greeting", "messages": said} for one in rows()[:4]]
    known = {"data.train_data": (str(data),), "generator.max_turns": 1}

    def differing(**more: Any) -> tuple[int, list[float]]:
        answer = ask(kept, known | more, reward="own")
        assert answer.rewards is not None
        return answer.rewards.differing, answer.rewards.new

    assert differing() == (0, [0.25] * 4)
    # Without the row, its opening is opened once more; with more turns allowed, the environment goes on.
    assert differing(**{"data.train_data": ()}) == (4, [0.25] * 4)
    assert differing(**{"generator.max_turns": 2}) == (4, [0.25] * 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run's folder, whose name a terminal would obey. Commands read each of its configurations once."""
    folder = tmp_path_factory.mktemp("replay") / "run\x1b[31m"
    write_rollouts(folder, 1, pa.Table.from_pylist(rows(), COLUMNS).drop_columns("trained"))
    save_resolved(own_config(), folder / "config.yaml")
    once = functools.cache(lambda path, overrides, real=command._prepared: real(path, overrides))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "_prepared", lambda path, overrides: once(path, tuple(overrides)))
        yield folder


def test_the_command_prints_a_table_that_a_terminal_does_not_obey(
    run: Path, functions: None, capsys: pytest.CaptureFixture[str]
):
    command.main([str(run), "--reward", "functions_of_a_replay:failing", "--advantage", "rloo"])
    said = capsys.readouterr().out
    assert "\x1b" not in said and "all as in the run, bit for bit" in said
    assert "dr_grpo, regular, token_mean -> rloo, regular, token_mean" in said
    assert "could not be scored: 4 (bad_reward 3, ValueError 1)" in said
    for wrong, reason in (
        ([str(run.parent)], "has no config.yaml"),
        ([str(run), "--steps", "7-9"], "none of these is among the kept ones, 1"),
        ([str(run), "--advantage", "rlo"], "Did you mean 'rloo'"),
    ):
        with pytest.raises(SystemExit) as ended:
            command.main(wrong)
        assert ended.value.code == 2 and reason in capsys.readouterr().err


def test_the_commands_and_the_function_of_the_page(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    page = PAGE.read_text()
    (function,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "my_module.py").write_text(function)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (block,) = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in block.replace("\\\n", " ").splitlines()]
    assert len(commands) == 5
    said = []
    for words in commands:
        assert words[:3] == ["skyrl-train", "replay", "RUN"]
        command.main([str(run), *words[3:]])
        said.append(capsys.readouterr().out)
    assert "scored with own: 8 samples" in said[1] and "scored with my_module:my_reward: 8 samples" in said[2]
    assert "rloo, gspo, token_mean" in said[3] and "regular, sequence_mean" in said[4]
    found = json.loads(Path("all.json").read_text())
    assert found["own"]["differing_tokens"] == 0 and found["by_step"][0]["new"]["tokens/trained"] == 16
    assert pq.read_table("samples.parquet")["push_new"].to_pylist()[0] == pytest.approx(0.75 / 8)
    wanted = set(re.findall(r"`((?:advantages|groups|tokens|importance_weights|clipped|pushes)/\w+)`", page))
    assert wanted <= {*SHOWN, *found["update"]["old"]}
