"""SkyRL's SGLang guide on the real GSM8K: its command and its file with other paths and sizes, for every engine."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.testing.tiny_models import save_tiny_model

from .conftest import Run, metrics_of
from .front_door import REPOSITORY, clean_environment, run_watched


def commands_of_the_readme() -> tuple[str, str]:
    """Return the two commands of the README's GSM8K chapter, unchanged: the data, and the training."""
    chapter = (REPOSITORY / "README.md").read_text().partition("\n## GRPO on GSM8K\n")[2]
    block = chapter.partition("```bash\n")[2].partition("```")[0].replace("\\\n", " ")
    data, training = (line for line in block.splitlines() if line.strip())
    return data.partition(" # ")[0], training


@pytest.fixture(scope="session")
def home(gsm8k_jsonl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's home after the README's first command, with local input and a limited number of rows."""
    home = tmp_path_factory.mktemp("home")
    data, _ = commands_of_the_readme()
    command = ["bash", "-c", f"{data} --input {gsm8k_jsonl} --limit 64"]
    subprocess.run(command, cwd=REPOSITORY, env=clean_environment(home), check=True, timeout=120, capture_output=True)
    return home


@pytest.fixture(scope="session")
def gsm8k(home: Path) -> Path:
    """A folder with Parquet files as examples/gsm8k writes them, and 64 rows to evaluate on."""
    return home / "data" / "gsm8k"


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A qwen3 with heads of size 32, which vLLM requires on a CPU."""
    return str(save_tiny_model(tmp_path_factory.mktemp("qwen3"), "qwen3"))


def command_of_the_guide(gsm8k: Path, model: str, backend: str) -> list[str]:
    """Return the arguments that the guide passes to main_base, with other paths."""
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


def test_check_of_readme_command_reports_missing_data(home: Path, model: str, tmp_path: Path):
    """Run `uv run -m skyrl_train.entrypoints.check_config` with the README's arguments, as the README says."""
    _, training = commands_of_the_readme()
    command = f"{training.replace('main_base', 'check_config')} trainer.policy.model.path={model}"

    def check(where: Path) -> subprocess.CompletedProcess[str]:
        env = clean_environment(where)
        return subprocess.run(
            ["bash", "-c", command], cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60, check=False
        )

    done = check(home)
    assert (done.returncode, done.stdout) == (0, "config ok\n"), done.stderr
    done = check(tmp_path)
    assert done.returncode == 2
    for name in ("train", "validation"):
        message = f"{name}.parquet: must be a file that exists. The folder {tmp_path}/data/gsm8k does not exist"
        assert message in done.stderr


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
    """Return overrides for two small steps with a probe of every sync."""
    return [
        "trainer.train_batch_size=8",
        "trainer.policy_mini_batch_size=8",
        "trainer.max_steps=2",
        "trainer.max_prompt_length=1024",
        "trainer.eval_before_train=false",
        "generator.max_num_seqs=32",
        "generator.weight_sync_check=probe",
        f"trainer.ckpt_path={folder / 'ckpts'}",
        f"trainer.export_path={folder / 'exports'}",
    ]


def assert_trained(folder: Path, samples: int) -> None:
    """Check two steps of 8 prompts and an evaluation, with the weights of each step in the engine."""
    rows = metrics_of(folder)
    assert set(rows) == {0, 1, 2}
    for step in (1, 2):
        assert rows[step]["rollouts/trajectories"] == 8 * samples
        assert rows[step]["rollout/logprob_diff_max"] <= 1e-4
        assert rows[step]["weights/version"] == step
        assert rows[step]["weights/probe_gap"] <= 1e-4
        assert rows[step]["policy/kl"] >= 0.0
    assert rows[2]["eval/openai/gsm8k/num_failed"] == 0


CANARIES = {
    name: f"canary-{name.lower()}"
    for name in ("SLURM_JWT", "HF_TOKEN", "WANDB_API_KEY", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "MY_PASSWORD")
}
"""A user's secrets, which must not appear in a run's output and files."""


def assert_no_canary(output: str, folder: Path, home: Path) -> None:
    written = [file for root in (folder, home) for file in root.rglob("*") if file.is_file()]
    names = {file.name for file in written}
    assert {"config.yaml", "metrics.jsonl", "samples.jsonl", "model.safetensors", "auth_token"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert any(name.endswith(".wandb") for name in names)
    assert [file for file in written if b"canary-" in file.read_bytes()] == []
    assert "canary-" not in output


@pytest.mark.slow
@pytest.mark.parametrize(
    "backend", ["transformers", *(pytest.param(other, marks=pytest.mark.on_demand) for other in ("sglang", "vllm"))]
)
def test_readme_command_trains(home: Path, model: str, tmp_path: Path, backend: str):
    """Run the command as a user does: `uv run` in the repository with nothing in the environment."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed: scripts/cpu_engines does")
    _, training = commands_of_the_readme()
    changes = [
        f"trainer.policy.model.path={model}",
        f"generator.backend={backend}",
        *sizes(tmp_path),
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=64",
        "trainer.logger=[wandb,tensorboard]",
        "trainer.hf_save_interval=2",
    ]
    # No tracker of the run may need an account, and no engine the hub.
    env = clean_environment(home) | CANARIES
    done = run_watched(["bash", "-c", f"{training} {shlex.join(changes)}"], env, REPOSITORY)
    assert_no_canary(done.output, tmp_path, home)
    assert_trained(tmp_path, samples=4)
    assert done.site_prefixes == {sys.prefix}, "a process runs in another environment"
    assert len(done.workers) >= 3, "trainer, reference and engine have a worker each"
    for noise in ("Failed to load weights", "Token authentication", "repeated", "virtual environment", "Installed"):
        assert noise not in done.output, noise
    lines = done.output.splitlines()
    summary = [line for line in lines if line.startswith("test_run: ") and "nothing was learned" not in line]
    last = summary[-4:]
    assert last[0].endswith(f"2 of 2 steps, in {tmp_path / 'ckpts'}")
    assert "best evaluation: openai/gsm8k avg_score " in last[1]
    assert re.match(r"test_run: \d+ s in steps: generate \d+%, .*update \d+%", last[2])
    assert last[3].startswith("test_run: resume from step 2: the same command")
    assert any(line.startswith("step 1/2   reward ") for line in lines)
    assert any(line.startswith("wandb: offline, `wandb sync ") for line in lines)


@pytest.mark.filterwarnings("ignore:In 'guide'. Defaults list is missing")  # files of SkyRL have no _self_
@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sglang"])
def test_guide_configuration_file_trains(run: Run, gsm8k: Path, model: str, tmp_path: Path, backend: str):
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


@pytest.mark.on_demand
@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        ["trainer.placement.policy_num_gpus_per_node=2", "generator.num_inference_engines=2"],
        ["trainer.placement.colocate_all=false"],
    ],
    ids=["two-ranks-two-engines", "dedicated"],
)
def test_recipe_trains_in_other_placements(
    run: Run, gsm8k: Path, tiny_model_path: str, tmp_path: Path, placement: list[str]
):
    run(
        "main_base",
        *command_of_the_guide(gsm8k, tiny_model_path, "transformers"),
        *sizes(tmp_path),
        "generator.n_samples_per_prompt=4",
        "generator.sampling_params.max_generate_length=64",
        "trainer.logger=console",
        *placement,
    )
    assert_trained(tmp_path, samples=4)
