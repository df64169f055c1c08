"""Typical user mistakes: each error names the key, the value, what is allowed and what to do."""

from __future__ import annotations

import json
import time

import pytest

from skyrl_train.config.predicates import RunComponents
from skyrl_train.config.prepare import prepare_config
from skyrl_train.errors import ConfigError

LONGEST_S = 3.0
LR = "trainer.policy.optimizer_config.lr"
MISTAKES = {
    "trainer.lr=1e-6": f"trainer.lr=1e-06: unknown key. Did you mean {LR}?",
    "learning_rate=1e-6": f"Did you mean {LR}?",
    "trainer.epcohs=3": "trainer.epcohs=3: unknown key. Did you mean trainer.epochs?",
    "+trainer.max_new_tokens=9": "Did you mean generator.sampling_params.max_generate_length?",
    "trainer.epochs": "trainer.epochs: is not of the form key=value. Write trainer.epochs=VALUE.",
    "generator.backend=vlm": "generator.backend=vlm: must be one of sglang, transformers, vllm. Did you mean 'vllm'?",
    "trainer.strategy=fsdp3": "must be one of deepspeed, fsdp, fsdp2, megatron, single. Did you mean 'fsdp",
    "trainer.logger=wandbb": "must be one of console, mlflow, tensorboard, trackio, wandb. Did you mean 'wandb'?",
    "environment.env_class=gsm9k": "Did you mean 'gsm8k'?",
    "environment.env_class=weather": "A name of your own requires trainer.plugins=[the module that registers it].",
    "environment.skyrl_gym.weather.level=3": "Did you mean environment.skyrl_gym.own.weather.level?",
    "trainer.algorithm.advantage_estimator=gpro": "Did you mean 'grpo'?",
    "trainer.algorithm.kl_estimator_type=k9": "must be one of abs, k1, k1+, k2, k3",
    "trainer.policy.optimizer_config.scheduler=cosin": "Did you mean 'cosine'?",
    "trainer.train_batch_size=0": "trainer.train_batch_size=0: must be at least 1.",
    "trainer.train_batch_size=ten": "trainer.train_batch_size=ten: must be an integer.",
    f"{LR}=nan": f"{LR}=nan: must be a finite number.",
    "generator.sampling_params.temperature=-1": "must be 0 or at least 0.01.",
    "generator.sampling_params.top_p=1.5": "must be more than 0 and at most 1.",
    "generator.n_samples_per_prompt=1": "In a group of one sample grpo has no baseline, so all advantages are 0.",
    "generator.max_turns=0": "generator.max_turns=0: must be at least 1.",
    "trainer.resume_mode=yes": "must be one of from_path, latest, none.",
    "trainer.resume_mode=from_path": "trainer.resume_path=null: must be a checkpoint folder",
    "data.train_data=['nowhere.parquet']": "data.train_data=nowhere.parquet: must be a file that exists. /",
    "data.train_data=rows.csv": "must be a file that ends in .parquet, .json, .jsonl. Convert it",
    "trainer.policy.model.path=/no/such/model": "or its name on the hub. The folder /no/such does not exist.",
    "device=cuda": "must be cpu or auto on this machine. No NVIDIA device was found.",
    "trainer.placement.policy_num_gpus_per_node=640": "The run needs 640 shares of at least 0.1 CPUs",
    "trainer.fully_async.enabled=true": "colocate_all=true: must be false with trainer.fully_async.enabled.",
    "generator.batch_invariant=true": "must be false on a CPU.",
    "generator.inference_engine_tensor_parallel_size=3": "Raise generator.num_inference_engines instead.",
    "--multirun": "--multirun: is not supported. Start one run per setting",
}


@pytest.fixture(scope="module")
def valid_overrides(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return valid overrides."""
    folder = tmp_path_factory.mktemp("mistakes")
    rows, model = folder / "rows.jsonl", folder / "model"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "1 + 1?"}]}) + "\n")
    model.mkdir()
    (model / "config.json").write_text("{}")
    overrides = [f"data.train_data=['{rows}']", f"data.val_data=['{rows}']", f"trainer.policy.model.path={model}"]
    prepare_config(overrides, has_accelerator=False, components=RunComponents())
    return overrides


@pytest.mark.parametrize("mistake", MISTAKES)
def test_typical_mistake_gets_advice(mistake: str, valid_overrides: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    started = time.monotonic()
    with pytest.raises(ConfigError) as error:
        prepare_config([*valid_overrides, mistake], has_accelerator=False, components=RunComponents())
    assert time.monotonic() - started < LONGEST_S
    assert MISTAKES[mistake] in str(error.value), error.value
