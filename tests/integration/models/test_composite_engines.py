"""Engines that serve a composite checkpoint as a text model: their log-probs are the learner's, also after a sync."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.models.loading import load_causal_lm
from tests.support.composites import save_composite
from tests.support.engine_bench import BackgroundLoop, Bench

from .agreement import assert_agrees_with_the_learner
from .table import COMPOSITES, composite
from .test_conformance_models import memory_is_not_a_number, start

IN_CI = (("Gemma 3", "transformers"), ("Qwen2.5-VL", "transformers"))


def cells() -> list[Any]:
    """(composite, engine) of what the table says is served."""
    found = []
    for row in COMPOSITES:
        for engine in row.engines:
            marks = [pytest.mark.slow] if engine != "transformers" else []
            marks += [] if (row.name, engine) in IN_CI else [pytest.mark.on_demand]
            found.append(pytest.param(row.name, engine, id=f"{row.name}-{engine}", marks=marks))
    return found


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def bench(name: str, engine: str, loop: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("model")
    row = composite(name)
    if engine == "vllm":
        pytest.importorskip("torchvision", reason="vLLM's classes of composites import it")
    path = save_composite(folder / "model", row.kind, **row.shape)
    served = start(engine, path)
    yield Bench(served, load_causal_lm(path, dtype=torch.float32), loop, folder)
    loop.run(served.close())


@pytest.mark.parametrize(("name", "engine"), cells(), scope="module")
def test_engine_serves_the_language_model_of_a_composite(name: str, engine: str, bench: Bench, tmp_path: Path) -> None:
    assert_agrees_with_the_learner(bench)
    row = composite(name)
    other = save_composite(tmp_path / "other", row.kind, seed=5, **row.shape)
    with memory_is_not_a_number():
        bench.run(bench.publish(load_causal_lm(other, dtype=torch.float32)))
    assert_agrees_with_the_learner(bench)
