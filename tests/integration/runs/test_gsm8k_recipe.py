"""The recipe of SkyRL's SGLang guide on the real GSM8K, in three layouts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .conftest import Run, metrics_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "gsm8k" / "gsm8k_dataset.py"


@pytest.fixture(scope="session")
def gsm8k(gsm8k_jsonl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Parquet files as examples/gsm8k writes them; 64 rows to evaluate on."""
    folder = tmp_path_factory.mktemp("gsm8k")
    limit = ["--limit", "64"]
    command = [sys.executable, str(EXAMPLE), "--input", str(gsm8k_jsonl), "--output", str(folder), *limit]
    subprocess.run(command, check=True, timeout=120, capture_output=True)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["trainer.placement.colocate_all=true"],
        [
            "trainer.placement.colocate_all=true",
            "trainer.placement.policy_num_gpus_per_node=2",
            "generator.num_inference_engines=2",
        ],
        ["trainer.placement.colocate_all=false"],
    ],
    ids=["colocated", "two-ranks-two-engines", "apart"],
)
def test_the_recipe_trains_two_steps_and_evaluates(
    run: Run, gsm8k: Path, tiny_model_path: str, tmp_path: Path, layout: list[str]
):
    run(
        "main_base",
        'trainer.algorithm.advantage_estimator="grpo"',
        f"data.train_data=['{gsm8k}/train.parquet']",
        f"data.val_data=['{gsm8k}/validation.parquet']",
        f"trainer.policy.model.path={tiny_model_path}",
        "trainer.strategy=fsdp",
        "generator.backend=transformers",
        "generator.run_engines_locally=true",
        "generator.async_engine=false",
        "generator.batched=true",
        "environment.env_class=gsm8k",
        "trainer.logger=console",
        "trainer.train_batch_size=16",
        "trainer.policy_mini_batch_size=16",
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=64",
        "trainer.max_steps=2",
        "trainer.max_prompt_length=1024",
        "trainer.eval_before_train=false",
        "generator.weight_sync_check=probe",
        f"trainer.ckpt_path={tmp_path / 'ckpts'}",
        f"trainer.export_path={tmp_path / 'exports'}",
        *layout,
    )
    found = metrics_of(tmp_path)
    assert set(found) == {1, 2}
    for step in (1, 2):
        assert found[step]["rollouts/trajectories"] == 64
        assert found[step]["rollout/logprob_diff_max"] <= 1e-4
        assert found[step]["weights/version"] == step
        assert found[step]["policy/kl"] >= 0.0
    assert found[2]["eval/openai/gsm8k/num_failed"] == 0
