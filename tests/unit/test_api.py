from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
import time
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skyrl_train.api import TrainingResult, _run_blocking, check, load_config, read_rollouts, train
from skyrl_train.entrypoints.main_generate import EvaluationExp
from skyrl_train.errors import ClusterLost, ConfigError, DataError, WorkerDied
from skyrl_train.experiment.base import Experiment
from skyrl_train.report.rollout_files import step_file
from skyrl_train.testing.synthetic_rollouts import synthetic_rollouts, synthetic_run

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "rollouts.md"


class Size(IntEnum):
    SMALL = 3


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("trainer.max_steps", 5, 5),
        ("trainer.max_steps", Size.SMALL, 3),
        ("trainer.max_steps", np.int64(4), 4),
        ("trainer.policy.optimizer_config.lr", np.float64(1e-4), 1e-4),
        ("trainer.algorithm.use_kl_loss", np.bool_(False), False),
        ("trainer.policy.optimizer_config.adam_betas", (0.8, 0.9), (0.8, 0.9)),
        ("trainer.project_name", "it's, [odd] {text}: a=b \\\\ \"", "it's, [odd] {text}: a=b \\\\ \""),
        ("trainer.ckpt_path", Path("/some where/run"), "/some where/run"),
        ("trainer.algorithm.value_clip", None, None),
        ("generator.engine_init_kwargs", {"max_model_len": 512, "nested": {"a-1": None}}, None),
        ("data.train_data", ["one.jsonl", "a,b.parquet"], ("one.jsonl", "a,b.parquet")),
    ],
)
def test_python_values_pass_through_hydra(key: str, value: Any, expected: Any):
    actual: Any = load_config({key: value})
    for name in key.split("."):
        actual = getattr(actual, name)
    assert actual == (value if isinstance(value, dict) else expected)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"trainer.max_steps": {1, 2}}, "not set"),
        ({"trainer.project_name": b"bytes"}, "not bytes"),
        ({"generator.engine_init_kwargs": {"a,b": 1}}, "the name 'a,b'"),
        ({"generator.engine_init_kwargs": {None: 1}}, "the name None"),
        (["--help"], "Pass flags as arguments"),
        ([3], "3: must be a string"),
    ],
)
def test_unsupported_override_values_are_rejected(overrides: Any, message: str):
    with pytest.raises(ConfigError, match=message):
        load_config(overrides)


def test_one_text_is_one_override():
    assert load_config("trainer.max_steps=7").trainer.max_steps == 7


def test_train_rejects_experiment_that_overrides_run():
    with pytest.raises(ConfigError, match="EvaluationExp overrides run"):
        train(load_config(), EvaluationExp)


def test_check_lists_everything_that_is_missing():
    with pytest.raises(ConfigError) as refused:
        check(load_config({"data.train_data": ["/none/a.jsonl"], "trainer.policy.model.path": "/none/model"}))
    assert "/none/a.jsonl" in str(refused.value) and "/none/model" in str(refused.value)


async def answer(ended: list[str], seconds: float = 0.01) -> str:
    try:
        await asyncio.sleep(seconds)
        return threading.current_thread().name
    finally:
        ended.append("ended")


def test_without_event_loop_runs_in_callers_thread():
    assert _run_blocking(answer([])) == threading.current_thread().name

    async def fail() -> None:
        raise ConfigError("mine")

    with pytest.raises(ConfigError, match="mine") as failed:
        _run_blocking(fail())
    assert failed.value.__context__ is None


def test_with_event_loop_runs_in_thread():
    async def cell() -> str:
        return _run_blocking(answer([]))

    assert asyncio.run(cell()) == "skyrl-train"


class TimeLimit(Exception):
    """Exception that a notebook raises when a cell takes too long."""


@pytest.mark.parametrize("kind", [KeyboardInterrupt, TimeLimit])
def test_interrupted_cell_ends_task_first(kind: type[BaseException]):
    ended: list[str] = []

    def interrupt(number: int, frame: Any) -> None:
        raise kind

    async def interrupted() -> str:
        os.kill(os.getpid(), signal.SIGUSR1)  # handled by the main thread, which waits
        return await answer(ended, 60.0)

    async def cell() -> str:
        return _run_blocking(interrupted())

    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        began = time.monotonic()
        with pytest.raises(kind):
            asyncio.run(cell())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert ended == ["ended"]
    assert time.monotonic() - began < 20


@pytest.mark.defect("api-error-lacks-advice")
def test_train_raises_root_cause(monkeypatch: pytest.MonkeyPatch):
    class Cluster:
        left = 0

        def __enter__(self) -> Cluster:
            return self

        def __exit__(self, *_: object) -> None:
            self.left += 1

        def failure(self) -> ClusterLost:
            return ClusterLost("Ray's gcs_server (process 7) died")

        async def wait_until_lost(self) -> ClusterLost:
            await asyncio.Event().wait()
            raise AssertionError

    class OwnRun(Experiment):
        def __init__(self, cfg: Any):
            self.cluster: Any = Cluster()
            experiments.append(self)

        def session(self) -> Any:
            raise WorkerDied("rank 0 died, which follows from it")

    experiments: list[Experiment] = []
    monkeypatch.setattr("skyrl_train.api.find_missing_resources", lambda cfg, uses: [])
    with pytest.raises(ClusterLost, match="gcs_server"):
        train(load_config(["device=cpu"]), OwnRun)
    assert vars(experiments[0])["cluster"].left == 1


def test_rollouts_of_a_run_are_a_dataset(tmp_path: Path):
    synthetic_run(tmp_path, 3, 16)
    dataset = read_rollouts(tmp_path)
    assert dataset.num_rows == 48 and dataset.unique("step") == [1, 2, 3]
    subset = TrainingResult(tmp_path, 3).rollouts(steps=[2], columns=["uid", "old_logprobs"])
    assert subset.column_names == ["uid", "old_logprobs"]
    assert subset[5]["old_logprobs"] == synthetic_rollouts(16, 2)["old_logprobs"][5].as_py()
    assert len(subset.to_pandas()) == 16


def test_rollouts_that_cannot_be_read_are_explained(tmp_path: Path):
    with pytest.raises(DataError, match="this folder has no rollouts"):
        read_rollouts(tmp_path)
    synthetic_run(tmp_path, 1, 4)
    with pytest.raises(ConfigError, match=r"not columns of rollouts\. Choose from step, uid"):
        read_rollouts(tmp_path, columns=["reward", "tokens"])
    step_file(tmp_path, 1).write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match="its rollouts cannot be read"):
        read_rollouts(tmp_path)


def test_the_snippets_of_the_page_of_rollouts_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    synthetic_run(tmp_path / "runs" / "a", 2, 16)
    monkeypatch.chdir(tmp_path)
    snippets = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(snippets) == 3
    scope: dict[str, Any] = {}
    for snippet in snippets:
        scope = {}
        exec(snippet, scope)
    said = capsys.readouterr().out
    assert "mean" in said and "'<end>' True -" in said
    advantages = scope["frame"].groupby("group").advantage
    assert advantages.std().min() > 0.01 and advantages.sum().abs().max() < 1e-5
