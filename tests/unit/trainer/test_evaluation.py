from __future__ import annotations

import asyncio
import json
import statistics
from collections.abc import Awaitable, Callable
from itertools import combinations
from pathlib import Path

import pytest

from skyrl_train.data.messages import Prompt
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.data.trajectory import TrajectoryGroup
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import EnginesLost, RolloutsFailed
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.trainer.evaluation import MAX_SOURCE_LENGTH, MAX_SOURCES, OTHER_SOURCES, Evaluator, pass_at_k
from tests.support.disk_limits import limit_file_size
from tests.support.trajectories import trajectory_from


def rollout_of(rewards: dict[str, list[float | None]], error: str = "timeout"):  # type: ignore[no-untyped-def]
    """Return a rollout function with fixed rewards; None is an episode that failed with `error`."""

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        rows = []
        for sample, reward in enumerate(rewards[prompt.uid]):
            row = trajectory_from(prompt, sample, [1], [2], [1], [0.0], [], reward or 0.0, "stop", 1.0, text="\x1b[31m")
            if reward is None:
                row.fail(error, "it took too long")
            rows.append(row)
        return TrajectoryGroup(prompt, rows)

    return rollout


def test_metrics_per_source_count_failures_as_zero(tmp_path: Path):
    prompts = [
        Prompt("a", [], "x", data_source="one/x"),
        Prompt("b", [], "x", data_source="one/x"),
        Prompt("c", [], "x"),
    ]
    rewards: dict[str, list[float | None]] = {"a": [1.0, 0.0], "b": [0.0, None], "c": [1.0, 1.0]}
    metrics = asyncio.run(Evaluator(rollout_of(rewards), prompts, eval_batch_size=2, dump_folder=tmp_path).run(step=7))
    assert metrics["eval/one/x/avg_score"] == 0.25
    assert metrics["eval/one/x/pass_at_2"] == 0.5
    assert metrics["eval/one/x/num_failed"] == 1
    assert metrics["eval/unknown/avg_score"] == 1.0
    assert metrics["eval/all/avg_score"] == pytest.approx(0.5)
    dumped = tmp_path / "global_step_7_evals" / "one%2Fx.jsonl"
    assert [json.loads(line)["reward"] for line in dumped.read_text().splitlines()] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("samples", [1, 2, 5, 8])
def test_pass_at_k_counts_all_choices(samples: int):
    for passed in range(samples + 1):
        outcomes = [sample < passed for sample in range(samples)]
        for k in range(1, samples + 1):
            choices = list(combinations(outcomes, k))
            assert pass_at_k(samples, passed, k) == pytest.approx(sum(map(any, choices)) / len(choices))


def test_evaluation_reports_several_k_with_errors():
    rewards: dict[str, list[float | None]] = {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0, 1.0, 1.0, None], "c": [0.0] * 4}
    prompts = [Prompt(uid, [], "x", data_source="math") for uid in rewards]
    metrics = asyncio.run(Evaluator(rollout_of(rewards), prompts, eval_batch_size=3, dump_folder=None).run(step=0))
    each = {"avg_score": [0.25, 0.75, 0.0], "pass_at_1": [0.25, 0.75, 0.0], "pass_at_2": [0.5, 1.0, 0.0]}
    each["pass_at_4"] = [1.0, 1.0, 0.0]
    expected = {f"eval/math/{name}": statistics.fmean(values) for name, values in each.items()}
    expected |= {f"eval/math/{name}_stderr": statistics.stdev(values) / 3**0.5 for name, values in each.items()}
    assert metrics == pytest.approx(expected | {"eval/math/num_failed": 1.0})


def test_sources_may_differ_in_samples():
    rewards: dict[str, list[float | None]] = {"a": [1.0, 0.0, 0.0, 0.0], "b": [1.0]}
    prompts = [Prompt("a", [], "x", data_source="aime"), Prompt("b", [], "x", data_source="math")]
    metrics = asyncio.run(Evaluator(rollout_of(rewards), prompts, eval_batch_size=2, dump_folder=None).run(step=0))
    assert {name for name in metrics if name.startswith("eval/all/pass")} == {
        "eval/all/pass_at_1",
        "eval/all/pass_at_1_stderr",
    }
    assert metrics["eval/aime/pass_at_4"] == 1.0 and metrics["eval/all/avg_score"] == pytest.approx(0.625)


@pytest.mark.defect("dumped-evaluations-show-secrets")
def test_dumped_texts_are_redacted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    secret = "canary-of-a-token"
    monkeypatch.setenv("HF_TOKEN", secret)
    parts = [{"type": "text", "text": f"and {secret}"}]
    prompt = Prompt("a", [{"role": "user", "content": f"print {secret}"}, {"role": "user", "content": parts}], "x")

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        shown = trajectory_from(
            prompt, 0, [1], [2], [1], [0.0], [], 1.0, "stop", 1.0, text=f"tool: HF_TOKEN={secret}\n"
        )
        failed = trajectory_from(prompt, 1, [1], [2], [1], [0.0], [], 1.0, "stop", 1.0)
        failed.fail("tool", f"no access with {secret}")
        return TrajectoryGroup(prompt, [shown, failed])

    asyncio.run(Evaluator(rollout, [prompt], eval_batch_size=1, dump_folder=tmp_path).run(step=3))
    (file,) = tmp_path.rglob("*.jsonl")
    assert secret not in file.read_text()
    first, second = map(json.loads, file.read_text().splitlines())
    assert [message["content"] for message in first["prompt"]] == [
        "print <HF_TOKEN>",
        [{"type": "text", "text": "and <HF_TOKEN>"}],
    ]
    assert (first["response"], second["response"]) == ("tool: HF_TOKEN=<HF_TOKEN>\n", "no access with <HF_TOKEN>")
    assert (first["reward"], first["uid"], second["error"]) == (1.0, "a", "tool")


def test_mostly_failed_evaluation_raises(tmp_path: Path):
    prompts = [Prompt("a", [], "x")]
    rollout = rollout_of({"a": [None, None, 1.0]})
    for folder, place in ((None, "trainer.dump_eval_results=false"), (tmp_path, f"see {tmp_path}/global_step_0_evals")):
        evaluator = Evaluator(rollout, prompts, 1, folder, max_failed_fraction=0.5)
        with pytest.raises(RolloutsFailed, match=f"2 of 3 .timeout x 2.*{place}.*timeout: it took too long .row a"):
            asyncio.run(evaluator.run(0))


def test_first_failure_of_each_kind_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    prompt = Prompt("a", [], "x", source="data.jsonl")
    rollout = rollout_of({"a": [None, None, 1.0]})
    evaluator = Evaluator(rollout, [prompt], 1, tmp_path, env_try_overrides=["trainer.plugins=[mine]"])
    for step in range(2):
        asyncio.run(evaluator.run(step))
    (record,) = caplog.records
    message = "evaluation at step 0: 2 of 3 episodes failed and count as reward 0. timeout: it took too long (row a"
    assert record.message.startswith(message)
    assert record.message.endswith("env try x --data data.jsonl --row 0 'trainer.plugins=[mine]'`.")
    lines = (tmp_path / "global_step_0_evals" / "unknown.jsonl").read_text().splitlines()
    assert [json.loads(line)["detail"] for line in lines] == ["it took too long"] * 2 + [""]


@pytest.mark.defect("truncated-evaluations-not-reported")
@pytest.mark.parametrize("error", ["deadline", "timeout"])
def test_evaluation_warns_of_episodes_beyond_deadline(error: str, caplog: pytest.LogCaptureFixture):
    asyncio.run(Evaluator(rollout_of({"a": [None, 1.0]}, error), [Prompt("a", [], "x")], 1, None).run(7))
    warning = "evaluation at step 7: 1 of 2 episodes exceeded trainer.timeouts.rollout_s and count as reward 0."
    assert [warning in record.message for record in caplog.records] == [error == "deadline"]


@pytest.mark.defect("failed-evaluation-keeps-running")
def test_first_error_cancels_the_evaluation():
    running: set[str] = set()

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        running.add(prompt.uid)
        try:
            await asyncio.sleep(0.01 if prompt.uid == "1" else 60)
            raise EnginesLost("engine 0 died")
        finally:
            await asyncio.sleep(0)  # the evaluation must also wait for the clean-up
            running.remove(prompt.uid)

    async def run() -> None:
        with pytest.raises(EnginesLost, match="engine 0 died"):
            await Evaluator(rollout, [Prompt(str(i), [], "x") for i in range(3)], 3, None).run(0)
        assert running == set()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


@pytest.mark.defect("C8-evaluation-counted-in-next-step")
def test_evaluation_does_not_affect_later_engine_metrics():
    engine = ScriptedEngine()
    client = EngineClient([engine], deadline_s=60.0)

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        request = SampleRequest(prompt.uid, to_token_array((1, 2, 3)), SamplingParams(max_tokens=4), 0)
        (completion,) = await client.generate([request])
        ids = completion.token_ids.tolist()
        row = trajectory_from(prompt, 0, [1], ids, [1] * len(ids), [0.0] * len(ids), [], 1.0, "stop", 1.0)
        return TrajectoryGroup(prompt, [row])

    async def run(on_done: Callable[[], Awaitable[None]] | None = None) -> float:
        prompts = [Prompt(str(i), [], "x") for i in range(4)]
        await Evaluator(rollout, prompts, 4, None, on_rollouts_done=on_done).run(0)
        return (await client.metrics())["engines/tokens_per_s"]

    assert asyncio.run(run()) > 0
    engine.calls.clear()
    assert asyncio.run(run(client.reset_statistics)) == 0
    assert engine.calls[-3:-1] == ["reset_prefix_cache", "health"], "the prefix cache has no prompt of the evaluation"


def test_evaluation_runs_one_batch_at_a_time():
    running = max_running = 0

    async def rollout(prompt: Prompt, position: int) -> TrajectoryGroup:
        nonlocal running, max_running
        running += 1
        max_running = max(max_running, running)
        await asyncio.sleep(0)
        running -= 1
        return TrajectoryGroup(prompt, [trajectory_from(prompt, 0, [1], [2], [1], [0.0], [], 1.0, "stop", 1.0)])

    prompts = [Prompt(str(i), [], "x") for i in range(7)]
    asyncio.run(Evaluator(rollout, prompts, eval_batch_size=3, dump_folder=None).run(0))
    assert max_running == 3


def test_full_disk_leaves_no_partial_dump(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    with limit_file_size(None, 50):
        asyncio.run(Evaluator(rollout_of({"a": [0.5]}), [Prompt("a", [], "x")], 1, dump_folder=tmp_path).run(step=1))
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "could not be written" in caplog.text


def test_each_source_has_separate_dump_and_metrics(tmp_path: Path):
    long = "é" * 100  # each is 6 characters in a file name
    sources = ["math/500", "math 500", "math_500", "math%2F500", "all", "source_all", long, f"{long}y", "\ud83d", "é"]
    prompts = [Prompt(str(number), [], "x", data_source=source) for number, source in enumerate(sources)]
    rewards: dict[str, list[float | None]] = {str(number): [float(number)] for number in range(len(sources))}
    metrics = asyncio.run(Evaluator(rollout_of(rewards), prompts, eval_batch_size=4, dump_folder=tmp_path).run(step=0))
    files = [path.read_text().splitlines() for path in tmp_path.rglob("*.jsonl")]
    assert sorted(json.loads(line)["uid"] for (line,) in files) == [str(number) for number in range(len(sources))]
    names = {name: value for name, value in metrics.items() if name.endswith("/avg_score")}
    assert names.pop("eval/all/avg_score") == 4.5
    assert sorted(names.values()) == [float(number) for number in range(len(sources))]


def test_a_source_named_all_is_not_all_sources():
    metrics = asyncio.run(
        Evaluator(rollout_of({"a": [0.5]}), [Prompt("a", [], "x", data_source="all")], 1, None).run(0)
    )
    assert metrics["eval/source_all/avg_score"] == 0.5 and "eval/all/avg_score" not in metrics


@pytest.mark.defect("unbounded-data-source-metrics")
def test_sources_beyond_the_limits_share_metrics(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    sources = ["x" * (MAX_SOURCE_LENGTH + 1), OTHER_SOURCES, *map(str, range(MAX_SOURCES)), "0"]
    prompts = [Prompt(str(number), [], "x", data_source=source) for number, source in enumerate(sources)]
    rewards: dict[str, list[float | None]] = {prompt.uid: [1.0] for prompt in prompts}
    evaluator = Evaluator(rollout_of(rewards), prompts, eval_batch_size=400, dump_folder=tmp_path)
    for step in range(2):
        metrics = asyncio.run(evaluator.run(step))
    evaluated = {name.split("/")[1] for name in metrics}
    expected = {OTHER_SOURCES, f"source_{OTHER_SOURCES}", "all", *map(str, range(MAX_SOURCES - 1))}
    assert evaluated == expected and set(metrics.values()) == {0.0, 1.0}
    files = {file.stem: len(file.read_text().splitlines()) for file in tmp_path.glob("*1_evals/*.jsonl")}
    assert files.keys() == expected - {"all"}
    assert (files[OTHER_SOURCES], files["0"], files["1"]) == (2, 2, 1)
    assert caplog.text.count(f"such as {'x' * MAX_SOURCE_LENGTH}, are evaluated together") == 1
