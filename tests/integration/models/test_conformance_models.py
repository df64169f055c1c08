"""Cells of the engines: real ones on a CPU, whose log-probs are the learner's, before and after a weight sync.

One cell is in tests/integration/engines/test_conformance_learner.py, beside other tests of an engine that runs there.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from skyrl_train.errors import ConfigError, EngineError
from skyrl_train.registry import load_object
from tests.support.engine_harness import BackgroundLoop, EngineHarness

from .agreement import assert_agrees_with_the_learner
from .cells import green, make, red, save
from .table import ENGINES, column as column_of

ELSEWHERE = [("Qwen3", "sglang")]
PLACES = {
    "transformers": "skyrl_train.engines.transformers.engine:TransformersEngine",
    "vllm": "skyrl_train.engines.vllm.engine:VLLMEngine",
    "sglang": "skyrl_train.engines.sglang.engine:SGLangEngine",
}


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


def start(kind: str, path: str) -> Any:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed; scripts/cpu_engines installs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's, when their packages are imported
        options = {"dtype": "float32", "device": "cpu", "max_num_seqs": 4, "max_model_len": 256, "threads": 1}
        return load_object(PLACES[kind])(model=path, name="of-the-table", **options)


def make_beside(engine: Any, name: str, seed: int = 0) -> PreTrainedModel:
    """Return the model of a row, made in the process of a running engine.

    vLLM serves some rows with transformers' own classes, and changes these: they need its configuration afterwards.
    """
    config = getattr(getattr(engine, "llm_engine", None), "vllm_config", None)
    if config is None:
        return make(name, seed=seed)
    from vllm.config import set_current_vllm_config

    with set_current_vllm_config(config):
        return make(name, seed=seed)


@pytest.fixture(scope="module")
def bench(
    name: str, column: str, loop: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHarness]:
    """Of wider scope than a test: the first vLLM of a process may keep a port until that ends."""
    folder = tmp_path_factory.mktemp("model")
    engine = start(column, save(name, folder / "model"))
    yield EngineHarness(engine, make_beside(engine, name), loop, folder)
    loop.run(engine.close())


@contextmanager
def memory_is_not_a_number() -> Iterator[None]:
    """Within this process, memory that nothing was written to holds NaN: what a sync leaves out cannot go unnoticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "column"), green(*ENGINES, elsewhere=ELSEWHERE), scope="module")
def test_log_probs_are_the_learners_before_and_after_a_sync(name: str, column: str, bench: EngineHarness):
    assert_agrees_with_the_learner(bench)
    with memory_is_not_a_number():
        bench.run(bench.publish(make_beside(bench.engine, name, seed=5)))
    assert_agrees_with_the_learner(bench)


@pytest.mark.parametrize(("name", "column"), red(*ENGINES))
def test_a_model_that_an_engine_cannot_serve_is_refused(name: str, column: str, tmp_path: Path):
    with pytest.raises((ConfigError, EngineError), match=column_of(column).refused[name].message):
        start(column, save(name, tmp_path / "model"))
