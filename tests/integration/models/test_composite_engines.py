"""Engines that serve a composite checkpoint as a text model: their log-probs equal the learner's, also after a sync."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config.schema import LoraConfig
from skyrl_train.models.export import export_adapter
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.lora import LoraAdapters
from skyrl_train.testing.tiny_models import byte_tokenizer
from tests.support.engine_harness import TOLERANCE, BackgroundLoop, EngineHarness, largest_difference
from tests.support.multimodal_models import save_composite
from tests.support.tiny_adapters import fill_adapters

from .agreement import PROMPTS, assert_agrees_with_the_learner, learners_logprobs
from .table import COMPOSITES, composite
from .test_conformance_models import start_engine, uninitialized_memory_is_nan

IN_CI = (("Gemma 3", "transformers"), ("Qwen2.5-VL", "transformers"))


def cells() -> list[Any]:
    """Return (composite, engine) of the cells that the table lists as served."""
    parameters = []
    for row in COMPOSITES:
        for engine in row.engines:
            marks = [pytest.mark.slow] if engine != "transformers" else []
            marks += [] if (row.name, engine) in IN_CI else [pytest.mark.on_demand]
            parameters.append(pytest.param(row.name, engine, id=f"{row.name}-{engine}", marks=marks))
    return parameters


@pytest.fixture(scope="module")
def loop() -> Iterator[BackgroundLoop]:
    loop = BackgroundLoop()
    yield loop
    loop.close()


@pytest.fixture(scope="module")
def bench(
    name: str, engine: str, loop: BackgroundLoop, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineHarness]:
    folder = tmp_path_factory.mktemp("model")
    row = composite(name)
    if engine == "vllm":
        pytest.importorskip("torchvision", reason="vLLM's classes of composites import it")
    path = save_composite(folder / "model", row.kind, **row.shape)
    served = start_engine(engine, path)
    yield EngineHarness(served, load_causal_lm(path, dtype=torch.float32), loop, folder)
    loop.run(served.close())


@pytest.mark.parametrize(("name", "engine"), cells(), scope="module")
def test_engine_serves_the_language_model_of_a_composite(
    name: str, engine: str, bench: EngineHarness, tmp_path: Path
) -> None:
    assert_agrees_with_the_learner(bench)
    row = composite(name)
    other = save_composite(tmp_path / "other", row.kind, seed=5, **row.shape)
    with uninitialized_memory_is_nan():
        bench.run(bench.publish(load_causal_lm(other, dtype=torch.float32)))
    assert_agrees_with_the_learner(bench)


def test_engine_serves_exported_adapter_of_a_composite(loop: BackgroundLoop, tmp_path: Path) -> None:
    path = save_composite(tmp_path / "model", "gemma3")
    model = load_causal_lm(path, dtype=torch.float32)
    adapters = LoraAdapters(model, LoraConfig(rank=4, alpha=8), "trainer.policy.model.lora")
    fill_adapters(model)
    trained = (pair for pair in model.named_parameters() if ".lora_" in pair[0])
    tensors = dict(adapters.to_peft(name, tensor.detach()) for name, tensor in adapters.iter_unmerged(trained))
    export_adapter(adapters, tensors, byte_tokenizer(), tmp_path / "adapter", base=path)
    engine = start_engine("transformers", path)
    bench = EngineHarness(engine, model, loop, tmp_path)
    bench.run(engine.load_adapter("mine", str(tmp_path / "adapter")))
    request = bench.request(PROMPTS[0], max_tokens=24, adapter="mine")
    (completion,) = bench.generate(request)
    expected = learners_logprobs(LogprobModel(model), request, completion)
    assert largest_difference(completion.full_logprobs.tolist(), expected) <= TOLERANCE
    loop.run(engine.close())
