"""Checkpoints with a separate head although config.json ties it to the embedding: engines serve the trained head."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path

import pytest
import torch

from skyrl_train.engines.base import InferenceEngine
from skyrl_train.engines.transformers.engine import TransformersEngine
from skyrl_train.models.loading import load_causal_lm
from skyrl_train.registry import load_object
from skyrl_train.weight_sync.sync import WeightSync
from tests.support.base_checkpoints import save_with_head
from tests.support.engine_harness import TOLERANCE, BackgroundLoop
from tests.support.weight_targets import LocalTrainer

ENGINES = {
    "vllm": "skyrl_train.engines.vllm.engine:VLLMEngine",
    "sglang": "skyrl_train.engines.sglang.engine:SGLangEngine",
}
IDS = [[5, 6, 30, 40, 50, 60, 70, 80]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["vllm", pytest.param("sglang", marks=pytest.mark.on_demand)])
def test_separate_head_is_served_and_synced(kind: str, tmp_path: Path):
    if importlib.util.find_spec(kind) is None:
        pytest.skip(f"{kind} is not installed")
    path = save_with_head(tmp_path, kind="llama", hidden_size=128)
    trained = load_causal_lm(path, dtype=torch.float32)
    with torch.no_grad():
        for parameter in trained.parameters():
            parameter.mul_(1.5)

    async def scores(engine: InferenceEngine) -> list[list[float]]:
        """Return log-probs before and after a sync."""
        (before,) = await engine.score(IDS)
        weight_sync = WeightSync(LocalTrainer(trained), lambda: [engine], route="in_process", deadline_s=60.0)
        await weight_sync.sync_all(1)
        (after,) = await engine.score(IDS)
        await engine.close()
        return [before, after]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of third-party packages on import
        engine = load_object(ENGINES[kind])(
            model=path, dtype="float32", device="cpu", max_num_seqs=4, max_model_len=128, name="separate", threads=1
        )
    loop = BackgroundLoop()
    before, after = loop.run(scores(engine))
    expected = loop.run(scores(TransformersEngine(path)))
    loop.close()
    assert before == pytest.approx(expected[0], abs=TOLERANCE)
    assert after == pytest.approx(expected[1], abs=TOLERANCE)
    assert expected[0] != pytest.approx(expected[1], abs=10 * TOLERANCE)
