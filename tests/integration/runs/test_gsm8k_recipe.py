"""SkyRL's SGLang guide on the real GSM8K: its command and its file with other paths and sizes, for every engine."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model

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


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A qwen3 with heads of 32, which vLLM wants on a CPU."""
    return str(save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


def command_of_the_guide(gsm8k: Path, model: str, backend: str) -> list[str]:
    """What it passes to main_base, but for the two paths."""
    return [
        "trainer.algorithm.advantage_estimator=grpo",
        f"data.train_data=['{gsm8k}/train.parquet']",
        f"data.val_data=['{gsm8k}/validation.parquet']",
        f"trainer.policy.model.path={model}",
        "trainer.placement.colocate_all=true",
        "trainer.strategy=fsdp",
        f"generator.backend={backend}",
        "generator.run_engines_locally=true",
        "generator.async_engine=false",
        "generator.batched=true",
        "environment.env_class=gsm8k",
        "trainer.logger=wandb",
        f"trainer.project_name=gsm8k_{backend}",
    ]


FILE_OF_THE_GUIDE = """
defaults:
  - ppo_base_config

generator:
  backend: "{backend}"
  async_engine: false
  num_inference_engines: 1
  inference_engine_tensor_parallel_size: 1
  model_dtype: "bfloat16"
  run_engines_locally: true
  weight_sync_backend: "nccl"
  batched: true
  n_samples_per_prompt: 5

  sampling_params:
    max_new_tokens: 64
    temperature: 1.0
    top_p: 1.0
    top_k: -1

trainer:
  policy:
    model:
      path: "{model}"
  strategy: "fsdp"

environment:
  env_class: "gsm8k"
"""


def sizes(folder: Path) -> list[str]:
    """Two small steps, every sync proven."""
    return [
        "trainer.train_batch_size=16",
        "trainer.policy_mini_batch_size=16",
        "trainer.max_steps=2",
        "trainer.max_prompt_length=1024",
        "trainer.eval_before_train=false",
        "generator.max_num_seqs=32",
        "generator.weight_sync_check=probe",
        f"trainer.ckpt_path={folder / 'ckpts'}",
        f"trainer.export_path={folder / 'exports'}",
    ]


def assert_trained(folder: Path, samples: int) -> None:
    """Two steps of 16 prompts and an evaluation, with the weights of each step in the engine."""
    found = metrics_of(folder)
    assert set(found) == {1, 2}
    for step in (1, 2):
        assert found[step]["rollouts/trajectories"] == 16 * samples
        assert found[step]["rollout/logprob_diff_max"] <= 1e-4
        assert found[step]["weights/version"] == step
        assert found[step]["weights/probe_gap"] <= 1e-4
        assert found[step]["policy/kl"] >= 0.0
    assert found[2]["eval/openai/gsm8k/num_failed"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sglang", "vllm", "transformers"])
def test_the_command_of_the_guide_trains(run: Run, gsm8k: Path, model: str, tmp_path: Path, backend: str):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: scripts/cpu_engines does")
    run(
        "main_base",
        *command_of_the_guide(gsm8k, model, backend),
        *sizes(tmp_path),
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=64",
        WANDB_MODE="offline",
    )
    assert_trained(tmp_path, samples=4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sglang"])
def test_the_configuration_file_of_the_guide_trains(run: Run, gsm8k: Path, model: str, tmp_path: Path, backend: str):
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: scripts/cpu_engines does")
    (tmp_path / "guide.yaml").write_text(FILE_OF_THE_GUIDE.format(backend=backend, model=model))
    run(
        "main_base",
        "--config-dir",
        str(tmp_path),
        "--config-name",
        "guide",
        f"data.train_data=['{gsm8k}/train.parquet']",
        f"data.val_data=['{gsm8k}/validation.parquet']",
        *sizes(tmp_path),
    )
    assert_trained(tmp_path, samples=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["trainer.placement.policy_num_gpus_per_node=2", "generator.num_inference_engines=2"],
        ["trainer.placement.colocate_all=false"],
    ],
    ids=["two-ranks-two-engines", "apart"],
)
def test_the_recipe_trains_in_other_layouts(
    run: Run, gsm8k: Path, tiny_model_path: str, tmp_path: Path, layout: list[str]
):
    run(
        "main_base",
        *command_of_the_guide(gsm8k, tiny_model_path, "transformers"),
        *sizes(tmp_path),
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=64",
        "trainer.logger=console",
        *layout,
    )
    assert_trained(tmp_path, samples=4)
