"""Every recipe that SkyRL publishes: two steps at toy size through the module that it names."""

from __future__ import annotations

import importlib
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from skyrl_train.config.keys import canonical_key
from tests.unit.config.test_skyrl_recipes import ACCEPTED, Recipe

from .conftest import metrics_of

REPOSITORY = Path(__file__).parents[3]
SMALL_KEYS = [
    "device=cpu",
    "trainer.strategy=fsdp2",
    "trainer.epochs=1",
    "trainer.max_steps=2",
    "trainer.train_batch_size=2",
    "trainer.policy_mini_batch_size=2",
    "trainer.critic_mini_batch_size=2",
    "trainer.micro_train_batch_size_per_gpu=2",
    "trainer.micro_forward_batch_size_per_gpu=2",
    "trainer.max_prompt_length=256",
    "trainer.eval_before_train=false",
    "trainer.eval_interval=0",
    "trainer.ckpt_interval=0",
    "trainer.hf_save_interval=0",
    "trainer.resume_mode=none",
    "trainer.logger=console",
    "trainer.plugins=[]",
    "trainer.flash_attn=false",
    "trainer.policy.sequence_parallel_size=1",
    "trainer.ref.sequence_parallel_size=1",
    "trainer.critic.sequence_parallel_size=1",
    "trainer.policy.fsdp_config.fsdp_size=-1",
    "trainer.policy.optimizer_config.num_warmup_steps=0",
    "trainer.placement.policy_num_nodes=1",
    "trainer.placement.policy_num_gpus_per_node=1",
    "trainer.placement.ref_num_nodes=1",
    "trainer.placement.ref_num_gpus_per_node=1",
    "trainer.placement.critic_num_nodes=1",
    "trainer.placement.critic_num_gpus_per_node=1",
    "trainer.algorithm.overlong_buffer.len=4",
    # A tiny model ends no answer and solves nothing, so these filters would leave nothing to train on.
    "trainer.algorithm.dynamic_sampling.type=null",
    "trainer.algorithm.zero_variance_filter=false",
    "generator.apply_overlong_filtering=false",
    "generator.backend=transformers",
    "generator.run_engines_locally=true",
    "generator.num_inference_engines=1",
    "generator.inference_engine_tensor_parallel_size=1",
    "generator.inference_engine_pipeline_parallel_size=1",
    "generator.inference_engine_data_parallel_size=1",
    "generator.inference_engine_expert_parallel_size=1",
    "generator.weight_sync_backend=gloo",
    "generator.engine_init_kwargs={}",
    "generator.enable_http_endpoint=false",
    "generator.n_samples_per_prompt=2",
    "generator.eval_n_samples_per_prompt=1",
    "generator.sampling_params.max_generate_length=8",
    "generator.eval_sampling_params.max_generate_length=8",
    "generator.max_input_length=288",
    "generator.max_turns=1",
    "generator.step_wise_trajectories=false",
    "generator.retokenize_chat_history=false",
    "generator.max_num_seqs=8",
]
"""Overrides after a recipe's own keys, for sizes that a test does not need and hardware that this machine lacks."""
LEFT_OUT = (
    "data.",
    "environment.",
    "+environment.",
    "hydra.",
    "trainer.policy.megatron_config.",
    "trainer.ref.megatron_config.",
    "trainer.policy.model.path=",
    "trainer.ref.model.path=",
    "trainer.critic.model.path=",
    "trainer.ckpt_path=",
    "trainer.export_path=",
    "trainer.policy.model.lora.lora_sync_path=",
    "generator.inference_engine.",
    "generator.chat_template",
)
"""Keys of recipes that are dropped: rows name their environment, and the models are tiny."""


def own_keys(recipe: Recipe) -> list[str]:
    keys = [word for word in shlex.split(recipe.arguments) if not word.startswith(LEFT_OUT)]
    small = {key.partition("=")[0] for key in SMALL_KEYS}
    return [key for key in keys if canonical_key(key.lstrip("+").partition("=")[0]) not in small]


RUNNABLE = [recipe for recipe in ACCEPTED if (REPOSITORY / f"{recipe.module.replace('.', '/')}.py").is_file()]
EVALUATES = [recipe for recipe in RUNNABLE if recipe.module.endswith("main_generate")]
TRAINS = [recipe for recipe in RUNNABLE if recipe not in EVALUATES]


@pytest.mark.on_demand
@pytest.mark.parametrize("recipe", TRAINS, ids=[recipe.source for recipe in TRAINS])
def test_published_recipe_trains_through_own_module(
    recipe: Recipe,
    small: Callable[[Path], list[str]],
    tiny_model_path: str,
    ray_of_all_runs: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    prefixes = ("data.", "trainer.policy.model.path", "trainer.ckpt_path")
    paths = [override for override in small(tmp_path) if override.startswith(prefixes)]
    models = [f"trainer.{role}.model.path={tiny_model_path}" for role in ("ref", "critic")]
    keys = [*own_keys(recipe), *SMALL_KEYS, *paths, *models, f"trainer.export_path={tmp_path / 'exports'}"]
    keys.append(f"trainer.policy.model.lora.lora_sync_path={tmp_path / 'adapters'}")
    monkeypatch.syspath_prepend(str(REPOSITORY))
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY), prepend=":")
    monkeypatch.setattr(sys, "argv", [recipe.module, *keys])
    importlib.import_module(recipe.module).main()
    assert metrics_of(tmp_path)[2]["policy/optimizer_steps"] >= 1
