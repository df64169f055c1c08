from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import skyrl_train
from skyrl_train.algorithms.advantages import get_comparison_scope
from skyrl_train.algorithms.registry import (
    advantage_estimators,
    get_keyword_parameters,
    kl_estimators,
    policy_losses,
    reductions,
    sft_losses,
)
from skyrl_train.algorithms.token_selection import get_token_selector
from skyrl_train.config import predicates
from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, POLICY_LOSSES, SFT_LOSSES
from skyrl_train.config.keys import Key, all_keys, value_keys
from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.sanity_warnings import CLIPPING_LOSSES, EFFECT_CONDITIONS, IGNORED_KEYS, get_conditions
from skyrl_train.errors import ConfigError

PACKAGE = Path(skyrl_train.__file__).parent
SKYRL_KEYS = Path(__file__).with_name("skyrl_keys.tsv")


CLIPPED = sorted(CLIPPING_LOSSES)
UNCLIPPED = sorted(POLICY_LOSSES.keys() - set(CLIPPING_LOSSES))


def get_warnings(*overrides: str) -> list[str]:
    return prepare_config(overrides, has_accelerator=False).warnings


def test_defaults_cause_no_warning():
    assert get_warnings() == []
    assert get_warnings("generator.async_engine=true", "trainer.use_sample_packing=true", "trainer.bf16=true") == []


def test_defaults_of_explicit_device_cause_no_warning():
    assert prepare_config(["device=cuda"], has_accelerator=False, is_elsewhere=True).warnings == []
    assert prepare_config(["device=cpu"], has_accelerator=True).warnings == []


SAMPLES = "generator.eval_n_samples_per_prompt=4"
STOP, EVALUATION_STOP = "generator.sampling_params.stop=['</a>',b]", "generator.eval_sampling_params.stop"


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        ((SAMPLES,), ["eval_n_samples_per_prompt=4", "temperature=0.0: all samples of a prompt are equal"]),
        ((SAMPLES, "generator.eval_sampling_params.temperature=0.6"), []),
        ((SAMPLES, "data.val_data=[]"), []),
        ((STOP,), ["stop=null does not contain ['</a>', 'b'] of generator.sampling_params.stop"]),
        ((STOP, f"{EVALUATION_STOP}=[b,c]"), ["stop=['b', 'c'] does not contain ['</a>'] of"]),
        ((STOP, f"{EVALUATION_STOP}=[c,b,'</a>']"), []),
        ((STOP, "data.val_data=[]"), []),
    ],
)
def test_misleading_evaluation_settings_warn(overrides: tuple[str, ...], parts: list[str]):
    lines = get_warnings(*overrides)
    assert len(lines) == bool(parts) and all(part in line for line in lines for part in parts)


@pytest.mark.parametrize(
    "override",
    [
        "generator.async_engine=false",
        "generator.batched=true",
        "generator.step_wise_trajectories=true",
        "generator.use_conversation_multi_turn=false",
        "generator.rate_limit.max_concurrency=4",
        "generator.max_num_batched_tokens=16",
        "trainer.policy.optimizer_config.offload_after_step=false",
        "trainer.log_path=/x",
        "trainer.policy.fsdp_config.cpu_offload=true",
        "generator.vllm_v1_disable_multiproc=false",
        "generator.gpu_memory_utilization=0.5",
        "trainer.use_sample_packing=false",
        "trainer.policy.megatron_config.ddp_config.overlap_grad_reduce=true",
        "trainer.policy.megatron_config.transformer_config_kwargs.recompute_num_layers=2",
        "trainer.algorithm.cispo.cispo_eps_clip_high=4.0",
        "trainer.algorithm.gamma=0.9",
        "trainer.algorithm.dynamic_sampling.max_sample_batches=3",
        "trainer.algorithm.overlong_buffer.penalty_factor=0.5",
        "trainer.algorithm.entropy_loss_coef=0.1",
        "trainer.critic.optimizer_config.lr=0.1",
        "trainer.policy.model.lora.alpha=32",
        "trainer.policy.model.lora.lora_sync_path=/x",
        "trainer.fully_async.max_staleness_steps=1",
        "trainer.placement.ref_num_gpus_per_node=2",
        "trainer.placement.reward_num_nodes=2",
        "trainer.reward.coef=0.5",
        "trainer.reward.model_config_kwargs.max_position_embeddings=8192",
        "environment.skyrl_gym.search.topk=5",
        "generator.sampling_params.logprobs=null",
        "generator.fully_sharded_loras=true",
    ],
)
def test_ineffective_key_warns_once_with_advice(override: str):
    (line,) = get_warnings(override)
    section, _, advice = line.partition(" has no effect. ")
    assert override.startswith(section.partition("=")[0])
    assert advice.endswith(".")


@pytest.mark.parametrize(
    ("setting", "override"),
    [
        ("generator.backend=vllm", "generator.gpu_memory_utilization=0.5"),
        ("generator.rate_limit.enabled=true", "generator.batched=true"),
        ("trainer.algorithm.dynamic_sampling.type=filter", "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.5"),
        ("generator.run_engines_locally=false", "generator.num_inference_engines=3"),
        ("trainer.algorithm.use_kl_loss=false", "trainer.update_ref_every_epoch=true"),
        ("trainer.strategy=single", "trainer.critic.fsdp_config.fsdp_size=1"),
        ("trainer.strategy=deepspeed", "trainer.policy.fsdp_config.fsdp_size=1"),
        ("trainer.strategy=fsdp2", "trainer.policy.deepspeed_config.zero_stage=2"),
        ("trainer.strategy=deepspeed", "trainer.ref.deepspeed_config.offload_optimizer=true"),
        ("trainer.policy.optimizer_config.name=adamw_8bit", "trainer.policy.optimizer_config.momentum=0.9"),
        ("trainer.policy.model.lora.rank=8", "trainer.policy.model.lora.lora_sync_path=/x"),
        ("trainer.reward.model.path=/r", "trainer.placement.reward_num_gpus_per_node=2"),
        ("trainer.algorithm.advantage_estimator=rloo", "trainer.algorithm.grpo_norm_by_std=false"),
        *((f"trainer.algorithm.policy_loss_type={loss}", "trainer.algorithm.eps_clip_low=0.1") for loss in UNCLIPPED),
        ("trainer.algorithm.policy_loss_type=cispo", "trainer.algorithm.eps_clip_high=0.28"),
        ("trainer.algorithm.use_kl_loss=false", "trainer.algorithm.kl_loss_coef=0.1"),
        ("trainer.algorithm.use_kl_loss=false", "trainer.algorithm.kl_estimator_type=k1"),
        ("trainer.algorithm.kl_loss_coef=0.0", "trainer.algorithm.kl_estimator_type=k1"),
        ("trainer.algorithm.use_kl_loss=false", "trainer.ref.model.path=x"),
        ("trainer.algorithm.kl_loss_coef=0.0", "trainer.ref.fsdp_config.cpu_offload=true"),
    ],
)
def test_key_ineffective_with_other_setting_warns(setting: str, override: str):
    (line,) = get_warnings(setting, override)
    assert line.startswith(f"{override} has no effect. ")


@pytest.mark.parametrize(
    "overrides",
    [
        ["generator.max_turns=3", "generator.batched=true", "generator.step_wise_trajectories=true"],
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
        [
            "trainer.algorithm.advantage_estimator=gae",
            "trainer.critic.model.path=/x",
            "trainer.critic.optimizer_config.lr=0.1",
            "trainer.algorithm.gamma=0.9",
            "trainer.algorithm.lambd=0.9",
            "trainer.placement.critic_num_gpus_per_node=2",
            "trainer.placement.colocate_all=false",
        ],
        ["trainer.algorithm.advantage_estimator=reinforce++", "trainer.algorithm.gamma=0.9"],
        ["trainer.update_ref_every_epoch=true"],
        ["trainer.policy.model.lora.rank=8", "trainer.policy.model.lora.alpha=32"],
        ["trainer.strategy=deepspeed", "trainer.policy.deepspeed_config.zero_stage=2"],
        [
            "trainer.reward.model.path=/r",
            "trainer.reward.coef=0.5",
            "trainer.reward.model_config_kwargs.max_position_embeddings=8192",
            "trainer.placement.reward_num_gpus_per_node=2",
            "trainer.placement.colocate_all=false",
        ],
        ["trainer.ref.model.path=x", "trainer.algorithm.kl_loss_coef=0.1", "trainer.algorithm.kl_estimator_type=k1"],
        ["trainer.algorithm.use_kl_loss=false", "trainer.policy.model.path=x"],  # the reference's path follows it
        [
            "trainer.algorithm.use_kl_loss=false",
            "trainer.ref.model.path=x",
            "trainer.algorithm.sft.loss_type=minor_sft",
            "trainer.algorithm.loss_reduction=sequence_mean",
        ],
        [
            "trainer.algorithm.use_kl_loss=false",
            "trainer.ref.model.path=x",
            "trainer.algorithm.advantage_estimator=distillation",
        ],
        *([f"trainer.algorithm.policy_loss_type={loss}", "trainer.algorithm.eps_clip_low=0.1"] for loss in CLIPPED),
        [
            "trainer.plugins=[mine]",
            "trainer.algorithm.policy_loss_type=mine",
            "trainer.algorithm.eps_clip_low=0.1",
            "trainer.algorithm.sapo.tau_pos=2.0",
        ],
        ["generator.weight_sync_check=probe"],
        ["generator.weight_sync_check=off"],
        ["trainer.algorithm.dynamic_sampling.type=replace", "trainer.algorithm.dynamic_sampling.min_replace_ratio=0.5"],
        ["trainer.algorithm.overlong_buffer.len=8", "trainer.algorithm.overlong_buffer.penalty_factor=0.5"],
        ["trainer.epochs=3", "generator.n_samples_per_prompt=8"],
    ],
)
def test_effective_key_causes_no_warning(overrides: list[str]):
    assert get_warnings(*overrides) == []


def test_replaced_tis_bound_warns():
    overrides = ["trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=3.0"]
    assert get_warnings(*overrides) == []
    (line,) = get_warnings(*overrides, "trainer.algorithm.off_policy_correction.tis_ratio_type=token")
    assert line.startswith("trainer.algorithm.tis_imp_ratio_cap=3.0 has no effect. ")


@pytest.mark.parametrize(("takes_values", "is_named"), [(True, False), (False, True)])
def test_registered_estimator_signature_decides_critic_warning(takes_values: bool, is_named: bool):
    def with_values(rewards: Any, group_ids: Any, valid: Any, *, values: Any = None) -> Any: ...

    def without(rewards: Any, group_ids: Any, valid: Any) -> Any: ...

    estimator: Callable[..., Any] = with_values if takes_values else without
    advantage_estimators.register("mine")(estimator)
    try:
        own = ["trainer.algorithm.advantage_estimator=mine", "trainer.critic.model.path=/x"]
        found = prepare_config(own, has_accelerator=False, has_user_code=True).warnings
    finally:
        advantage_estimators.unregister("mine")
    assert [line.partition("=")[0] for line in found] == ["trainer.critic.model.path"] * is_named


def test_predicate_tables_match_signatures():
    def asks(function: Any, name: str) -> bool:
        return function is not None and name in get_keyword_parameters(function)

    losses = {name: policy_losses.get(name) for name in POLICY_LOSSES}
    for bound in ("eps_clip_low", "eps_clip_high"):
        clipping = {name for name, f in losses.items() if asks(f, bound) or asks(get_token_selector(f), bound)}
        assert clipping == set(CLIPPING_LOSSES)
    estimators = {name: advantage_estimators.get(name) for name in ADVANTAGE_ESTIMATORS}
    assert {name for name, f in estimators.items() if asks(f, "ref_logprobs")} == predicates.REFERENCE_ESTIMATORS
    assert {name for name, f in estimators.items() if asks(f, "values")} == predicates.CRITIC_ESTIMATORS
    assert {name for name, f in estimators.items() if get_comparison_scope(f) == "group"} == predicates.GROUP_ESTIMATORS
    assert {name for name, f in estimators.items() if asks(f, "grpo_norm_by_std")} == {"grpo"}
    assert {
        name for name in SFT_LOSSES if asks(sft_losses.get(name), "ref_logprobs")
    } == predicates.REFERENCE_SFT_LOSSES


def get_algorithm_keywords() -> set[str]:
    """Return the keywords of all losses, token selectors, estimators and reductions."""
    registries = (policy_losses, sft_losses, advantage_estimators, kl_estimators, reductions)
    functions = [registry.get(name) for registry in registries for name in registry.names()]
    chosen = [get_token_selector(function) for function in functions]
    return {name for function in (*functions, *filter(None, chosen)) for name in get_keyword_parameters(function)}


def read_source() -> str:
    """Return the source that may read the configuration: the package without config and testing."""
    modules = [
        path for path in PACKAGE.rglob("*.py") if not {"config", "testing"} & set(path.relative_to(PACKAGE).parts)
    ]
    modules.append(PACKAGE / "config" / "predicates.py")  # read on behalf of `experiment`
    return "\n".join(path.read_text() for path in modules)


def expand_sections(names: set[str]) -> list[str]:
    """Return the named keys and the keys in named sections."""
    return [key for key in value_keys() if any(f"{key}.".startswith(f"{name}.") for name in names)]


def has_condition(key: Key) -> bool:
    return bool(get_conditions(key.name)) or (key.metadata.choices is not None and len(key.metadata.choices) == 1)


def test_every_key_is_read_or_explained():
    read = set(re.findall(r"\.([A-Za-z_]\w*)", read_source())) | get_algorithm_keywords()
    explained = {name for name, key in all_keys().items() if has_condition(key)} | IGNORED_KEYS.keys()
    explained.add("generator.weight_sync_backend")  # only what the device has is accepted
    assert [
        key for key in set(value_keys()).difference(expand_sections(explained)) if key.rpartition(".")[2] not in read
    ] == []


def test_ignored_keys_belong_to_skyrl():
    assert IGNORED_KEYS.keys() <= all_keys().keys()
    theirs = [line.partition("\t")[0] for line in SKYRL_KEYS.read_text().splitlines()[1:]]
    unknown = [
        key
        for key in expand_sections(set(IGNORED_KEYS))
        if not any(f"{name}.".startswith(f"{key}.") for name in theirs)
    ]
    assert unknown == []


def test_ignored_keys_are_never_read():
    read = set(re.findall(r"(?=\b(\w+)\.(\w+))", read_source()))
    names = {name for _, name in read}
    same_name = {"enable", "logprobs", "model_config_kwargs", "ranks"}  # attributes of something else, too
    for section, name in (key.split(".")[-2:] for key in expand_sections(set(IGNORED_KEYS))):
        assert (section, name) not in read
        assert name not in names or name in same_name


def test_conditions_belong_to_keys_that_are_not_ignored():
    assert [key for key in {*IGNORED_KEYS, *expand_sections(set(IGNORED_KEYS))} if get_conditions(key)] == []
    assert all(need.advice.endswith(".") and all_keys().keys() >= set(need.keys) for need in EFFECT_CONDITIONS)


def test_vllm_expert_parallel_size_is_validated():
    key = "generator.inference_engine_expert_parallel_size"
    with pytest.raises(ConfigError, match=rf"{key}.*1 or generator\.inference_engine_tensor_parallel_size"):
        get_warnings("generator.backend=vllm", f"{key}=3")


@pytest.mark.parametrize(
    ("on", "bound"),
    [
        ("tis_ratio_type=token", "sequence_tis_ratio_clip_high=3"),
        ("tis_ratio_type=sequence", "token_tis_ratio_clip_high=3"),
        ("sequence_mask_metric=product", "geo_mask_high=1.1"),
        ("sequence_mask_metric=geometric", "product_mask_low=0.4"),
    ],
)
def test_bound_of_inactive_correction_warns(on: str, bound: str):
    section = "trainer.algorithm.off_policy_correction."
    (line,) = get_warnings(section + on, section + bound)
    assert bound.partition("=")[0] in line


def test_bound_with_use_tis_warns():
    beside = "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high=5"
    (line,) = get_warnings("trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=3.0", beside)
    assert "tis_imp_ratio_cap" in line


def test_unusual_number_is_accepted_with_a_warning():
    assert get_warnings("trainer.policy.optimizer_config.lr=1", "generator.max_turns=2") == [
        "trainer.policy.optimizer_config.lr=1.0 is unusual. Most runs use 1e-09 to 0.1. Check the number."
    ]
    (line,) = get_warnings("generator.sampling_params.temperature=10")
    assert line.startswith("generator.sampling_params.temperature=10.0 is unusual.")


@pytest.mark.parametrize("value", ["0", "0.01"])
def test_zero_and_usual_numbers_cause_no_warning(value: str):
    assert get_warnings(f"trainer.policy.optimizer_config.lr={value}") == []


def test_defaults_are_usual():
    for name, key in value_keys().items():
        if (usual := key.metadata.typical_range) is not None and not str(key.default).startswith("${"):
            assert key.default == 0 or key.default in usual, name
