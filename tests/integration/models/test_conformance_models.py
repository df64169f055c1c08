"""Cells of the engines: on a CPU, their log-probs equal the learner's, before and after a weight sync.

One cell is in tests/integration/engines/test_conformance_learner.py, with other tests of an engine that runs there.
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
from .cells import make, rejected_cells, save, supported_cells
from .table import ENGINES, column as column_of

ELSEWHERE = [("Qwen3", "sglang")]
ENGINE_CLASSES = {
    "transformers": "skyrl_train.engines.transformers.engine:TransformersEngine",
    "vllm": "skyrl_train.engines.vllm.engine:VLLMEngine",
    "sglang": "skyrl_train.engines.sglang.engine:SGLangEngine",
}


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


def start_engine(kind: str, path: str, dtype: str = "float32") -> Any:
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed; scripts/cpu_engines installs it")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of third-party packages at import
        options = {"dtype": dtype, "device": "cpu", "max_num_seqs": 4, "max_model_len": 256, "threads": 1}
        return load_object(ENGINE_CLASSES[kind])(model=path, name="table-engine", **options)


def make_with_engine(engine: Any, name: str, seed: int = 0) -> PreTrainedModel:
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
    """Start one engine per module: the first vLLM of a process may keep a port until the process ends."""
    folder = tmp_path_factory.mktemp("model")
    engine = start_engine(column, save(name, folder / "model"))
    yield EngineHarness(engine, make_with_engine(engine, name), loop, folder)
    loop.run(engine.close())


@contextmanager
def uninitialized_memory_is_nan() -> Iterator[None]:
    """Fill uninitialized memory of this process with NaN, so that weights that a sync leaves out are noticed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of operations that are not deterministic
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("name", "column"), supported_cells(*ENGINES, elsewhere=ELSEWHERE), scope="module")
def test_logprobs_equal_the_learner_after_sync(name: str, column: str, bench: EngineHarness):
    assert_agrees_with_the_learner(bench)
    with uninitialized_memory_is_nan():
        bench.run(bench.publish(make_with_engine(bench.engine, name, seed=5)))
    assert_agrees_with_the_learner(bench)


@pytest.mark.parametrize(("name", "column"), rejected_cells(*ENGINES))
def test_unsupported_model_is_rejected(name: str, column: str, tmp_path: Path):
    with pytest.raises((ConfigError, EngineError), match=column_of(column).refused[name].message):
        start_engine(column, save(name, tmp_path / "model"))
