from __future__ import annotations

import pytest

from skyrl_train.config.inert import ROWS
from skyrl_train.config.keys import all_keys
from skyrl_train.config.prepare import prepare


def warnings(*overrides: str) -> list[str]:
    return prepare(overrides, has_accelerator=False).warnings


def test_defaults_warn_about_nothing_also_when_spelt_out():
    assert warnings() == []
    assert warnings("generator.async_engine=true", "trainer.use_sample_packing=true", "trainer.bf16=true") == []


@pytest.mark.parametrize(
    "override",
    [
        "generator.async_engine=false",
        "generator.batched=true",
        "generator.vllm_v1_disable_multiproc=false",
        "generator.gpu_memory_utilization=0.5",
        "trainer.use_sample_packing=false",
        "trainer.policy.megatron_config.ddp_config.overlap_grad_reduce=true",
        "trainer.policy.megatron_config.transformer_config_kwargs.recompute_num_layers=2",
        "trainer.algorithm.cispo.cispo_eps_clip_high=4.0",
        "trainer.algorithm.gamma=0.9",
        "trainer.algorithm.entropy_loss_coef=0.1",
        "trainer.critic.optimizer_config.lr=0.1",
        "trainer.policy.model.lora.alpha=32",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.placement.ref_num_gpus_per_node=2",
        "environment.skyrl_gym.search.topk=5",
        "generator.sampling_params.logprobs=null",
    ],
)
def test_key_without_effect_is_named_once_with_what_to_use(override: str):
    (line,) = warnings(override)
    section, _, advice = line.partition(" has no effect here. ")
    assert override.startswith(section.partition("=")[0])
    assert advice.endswith(".")


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.algorithm.use_entropy_loss=true", "trainer.algorithm.entropy_loss_coef=0.1"],
        ["trainer.algorithm.loss_reduction=seq_mean_token_sum_norm", "trainer.algorithm.max_seq_len=100"],
        ["trainer.placement.ref_num_gpus_per_node=2", "trainer.placement.policy_num_gpus_per_node=2"],
        [
            "trainer.placement.ref_num_nodes=2",
            "trainer.placement.colocate_all=false",
            "trainer.placement.colocate_policy_ref=false",
        ],
        [
            "trainer.algorithm.cispo.cispo_eps_clip_high=4.0",
            "trainer.algorithm.policy_loss_type=cispo",
            "trainer.plugins=[mine]",
        ],
        ["trainer.epochs=3", "generator.n_samples_per_prompt=8"],
    ],
)
def test_key_with_effect_is_not_named(overrides: list[str]):
    assert warnings(*overrides) == []


def test_rows_name_keys_that_exist():
    assert not {key for row in ROWS for key in row.keys} - set(all_keys())
