"""Configurations of the runs, which take seconds and have short deadlines and frequent checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from skyrl_train.environments.tasks.arithmetic import generate
from tests.chaos.campaign import CHECKPOINT_INTERVAL, PROMPTS, STEPS

ASYNCHRONOUS = "asynchronous"
KINDS = {
    "two_engines": ["generator.num_inference_engines=2"],
    "two_ranks": ["trainer.placement.policy_num_gpus_per_node=2", "generator.num_inference_engines=2"],
    "external_engine": [
        "generator.run_engines_locally=false",
        "generator.remote_inference_engine_urls=['{engine}']",
        "generator.weight_sync_check=probe",
    ],
    "async_checkpoint": ["trainer.async_checkpoint=true"],
    ASYNCHRONOUS: ["--config-name=async", "generator.num_inference_engines=2"],
    "vllm": ["generator.backend=vllm", "trainer.timeouts.engine_start_s=180"],
    "sglang": ["generator.backend=sglang", "trainer.timeouts.engine_start_s=180"],
}


def write_data(folder: Path) -> Path:
    """Write training data for environments that misbehave on request to a file in the folder, and return the file."""
    rows = [row | {"env_class": "mischievous"} for row in generate(PROMPTS, 2, 9, 0, "train")]
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def make_overrides(kind: str, data: Path, model: str, engine: str = "") -> Callable[[Path], list[str]]:
    """Return a function that returns the overrides of a run in a given folder.

    Args:
        kind: Key of KINDS.
        data: File of training data.
        model: Path of the model.
        engine: Address (host:port) of an external engine, for the kind that has one.
    """

    def overrides(folder: Path) -> list[str]:
        return [
            f"data.train_data=['{data}']",
            f"data.val_data=['{data}']",
            f"trainer.policy.model.path={model}",
            f"trainer.ckpt_path={folder / 'ckpts'}",
            f"trainer.export_path={folder / 'exports'}",
            "trainer.logger=console",
            "trainer.plugins=[chaos_plugin]",
            "trainer.train_batch_size=4",
            "trainer.policy_mini_batch_size=2",
            "trainer.max_tokens_per_microbatch=2048",
            "trainer.policy.optimizer_config.lr=1e-3",
            "trainer.algorithm.use_kl_loss=false",
            f"trainer.ckpt_interval={CHECKPOINT_INTERVAL}",
            f"trainer.max_steps={STEPS}",
            f"trainer.hf_save_interval={STEPS}",
            "trainer.epochs=20",
            "trainer.eval_interval=4",
            "trainer.eval_before_train=false",
            "trainer.max_failed_fraction=0.9",
            "trainer.dump_data_batch=true",
            "trainer.timeouts.engine_start_s=90",
            "trainer.timeouts.rendezvous_s=30",
            "trainer.timeouts.rollout_s=10",
            "trainer.timeouts.environment_step_s=5",
            "trainer.timeouts.update_s=30",
            "trainer.timeouts.weight_sync_s=30",
            "trainer.timeouts.checkpoint_s=60",
            "generator.max_engine_restarts=20",
            "generator.n_samples_per_prompt=4",
            "generator.eval_n_samples_per_prompt=1",
            "generator.sampling_params.max_generate_length=16",
            "environment.env_class=mischievous",
            "environment.skyrl_gym.max_env_workers=1",
            *(override.format(engine=engine) for override in KINDS[kind]),
        ]

    return overrides
