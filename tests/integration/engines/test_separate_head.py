"""A head of its own in the weights, although config.json ties it to the embedding: engines serve what is trained."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.registry import load_object
from skyrl_train.weight_sync.publish import WeightPublisher
from tests.support.base_models import save_with_head
from tests.support.engine_bench import ENGINES, TOLERANCE, BackgroundLoop
from tests.support.weight_targets import LocalTrainer

IDS = [[5, 6, 30, 40, 50, 60, 70, 80]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["transformers", "vllm", "sglang"])
def test_separate_head_is_served_and_synced(kind: str, tmp_path: Path):
    if kind != "transformers" and importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    path = save_with_head(tmp_path, kind="llama", hidden_size=128)
    trained = load_causal_lm(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)

    async def scores() -> tuple[list[float], list[float], list[float], list[float]]:
        (before,) = await engine.score(IDS)
        await WeightPublisher(LocalTrainer(trained), lambda: [engine], route="in_process", deadline_s=60.0).publish(1)
        (after,) = await engine.score(IDS)
        reference = TransformersEngine(path)
        (expected,) = await reference.score(IDS)
        await WeightPublisher(LocalTrainer(trained), lambda: [reference], route="in_process", deadline_s=60.0).publish(
            1
        )
        (expected_after,) = await reference.score(IDS)
        await reference.close()
        return before, after, expected, expected_after

    place, options = ENGINES[kind]
    options = {key: value for key, value in options.items() if key != "max_lora_rank"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # other people's, when their packages are imported
        engine = load_object(place)(
            model=path, dtype="float32", device="cpu", max_num_seqs=4, max_model_len=128, name="separate", **options
        )
    loop = BackgroundLoop()
    try:
        before, after, expected, expected_after = loop.run(scores())
    finally:
        loop.run(engine.close())
        loop.close()
    assert before == pytest.approx(expected, abs=TOLERANCE)
    assert after == pytest.approx(expected_after, abs=TOLERANCE)
    assert max(abs(a - b) for a, b in zip(expected, expected_after, strict=True)) > 10 * TOLERANCE
