from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from hypothesis import example, given, strategies as st

from skyrl_train.config.hydra import compose as hydra_compose, load_preset, parse_override, to_config
from skyrl_train.config.keys import union_members, value_keys
from skyrl_train.config.local_checks import resolve_device
from skyrl_train.config.schema import Config
from skyrl_train.config.section import Range, freeze
from skyrl_train.config.validate import PLUGIN_KEYS, validate
from skyrl_train.config.value_parsing import InvalidValue, convert_value
from tests.support.table_cases import check_each

RANGES: dict[str, Range] = {
    name: key.metadata.range for name, key in value_keys().items() if key.metadata.range is not None
}
CHOICES = {name: key.metadata.choices for name, key in value_keys().items() if key.metadata.choices is not None}
UNAVAILABLE = {
    name: key.metadata.unavailable_reason for name, key in value_keys().items() if key.metadata.unavailable_reason
}
EXPERT_ADAPTERS = [f"trainer.policy.model.lora.{key}" for key in ("rank=4", "target_parameters=[down_proj]")]
NAMES = [(key, name) for key, reasons in UNAVAILABLE.items() if isinstance(reasons, Mapping) for name in reasons]


def problems(*overrides: str) -> dict[str, str]:
    config, key_problems, _ = to_config(hydra_compose([parse_override(text).for_hydra for text in overrides]))
    assert key_problems == []
    return {problem.key: str(problem) for problem in validate(resolve_device(config, has_accelerator=False)[0])}


def with_value(key: str, value: Any) -> Config:
    """Return a configuration with one key set to a value of any type."""

    def put(section: Any, path: list[str]) -> Any:
        name, *rest = path
        return dataclasses.replace(section, **{name: put(getattr(section, name), rest) if rest else value})

    return put(defaults_on_cpu(), key.split("."))


def fits(value: object, key: str) -> bool:
    try:
        return convert_value(value, value_keys()[key].type_hint) == value
    except InvalidValue:
        return False


@functools.cache
def defaults_on_cpu() -> Config:
    return freeze(resolve_device(load_preset(), has_accelerator=False)[0])


def test_defaults_are_valid():
    assert problems() == {}


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["generator.backend=transformers"], "must be 1 with generator.backend=transformers"),
        (["generator.backend=vllm"], "must be a divisor of 1, the number of ranks of an engine"),
        (["generator.backend=vllm", "generator.inference_engine_tensor_parallel_size=3"], "a divisor of 3"),
        (["generator.backend=vllm", "generator.inference_engine_tensor_parallel_size=4"], None),
        (["generator.backend=vllm", "generator.inference_engine_pipeline_parallel_size=2"], "a divisor of 1"),
    ],
)
def test_engine_ranks_divide_evenly_over_nodes(overrides: list[str], expected: str | None):
    key = "trainer.placement.nodes_per_engine"
    message = problems("device=cuda", f"{key}=2", *overrides).get(key, "")
    assert expected in message if expected else not message


@pytest.mark.parametrize(("ranks", "nodes", "refused"), [(4, 2, True), (2, 2, False), (4, 4, False)])
def test_cpu_engine_has_one_rank_per_node(ranks: int, nodes: int, refused: bool):
    key = "trainer.placement.nodes_per_engine"
    config = resolve_device(
        load_preset([f"generator.inference_engine_tensor_parallel_size={ranks}", f"{key}={nodes}"]),
        has_accelerator=False,
        explicit_keys=["generator.backend"],
    )[0]
    messages = [str(problem) for problem in validate(config) if problem.key == key]
    assert [
        f"must be 1 or {ranks}, the number of ranks of an engine, with device=cpu" in message for message in messages
    ] == [True] * refused


@pytest.mark.parametrize(
    ("overrides", "key", "expected"),
    [
        (["method=ngram"], "method", ""),
        (["method=mtp"], "model", ""),
        (["method=eagle", "model=/models/head"], "model", ""),
        (["method=suffix"], "method", "only in its V1 model runner"),
        (["method=draft_model"], "model", "must be a draft model with method=draft_model"),
        (["method=mtp", "model=/models/head"], "model", "must be null with method=mtp"),
        (["method=ngram", "prompt_lookup_min=5"], "prompt_lookup_min", "must be at most generator.speculative.prompt_"),
        (["method=ngram", "num_speculative_tokens=0"], "num_speculative_tokens", "at least 1"),
        (["method=ngram", "generator.backend=sglang"], "method", "must be null with generator.backend=sglang"),
        (["method=ngram", "generator.backend=transformers"], "method", "Only vLLM engines verify drafts"),
        (["method=ngram", "generator.backend=transformers", "generator.run_engines_locally=false"], "method", ""),
    ],
)
def test_speculative_decoding_conflicts(overrides: list[str], key: str, expected: str):
    keys = [text if text.startswith("generator") else f"generator.speculative.{text}" for text in overrides]
    message = problems("device=cuda", "generator.backend=vllm", *keys).get(f"generator.speculative.{key}", "")
    assert expected in message if expected else not message


@pytest.mark.parametrize(
    ("options", "name", "expected"),
    [
        ("{method: eagle3, model: /models/head, num_speculative_tokens: 2}", "method", ""),
        ("{method: medusa, model: /models/head}", "method", "must be one of ngram, "),
        ("{method: draft_model, num_speculative_tokens: 2}", "model", "must be a draft model with method=draft_model"),
        ("{method: ngram, rejection_sample_method: synthetic}", "rejection_sample_method", "would not be exact"),
        ("{method: dspark, enable_adaptive_verification: true}", "enable_adaptive_verification", "would not be exact"),
        ("{method: ngram, backend: sglang}", "method", "must be null with generator.backend=sglang"),
        ("ngram", "", "must be a dictionary"),
    ],
)
def test_speculative_config_of_vllm_is_checked(options: str, name: str, expected: str):
    key = "generator.engine_init_kwargs.speculative_config"
    backend = "sglang" if "sglang" in options else "vllm"
    found = problems("device=cuda", f"generator.backend={backend}", f"+{key}={options}")
    message = found.get(f"{key}.{name}".rstrip("."), "")
    assert expected in message if expected else not message


def test_unchecked_arguments_for_drafts_are_refused():
    key = "generator.engine_init_kwargs.spec_method"
    found = problems("device=cuda", "generator.backend=vllm", f"+{key}=ngram")
    assert "must be left out" in found[key]
    assert "Set generator.speculative instead." in found[key]


def test_speculative_settings_are_given_once():
    key = "generator.engine_init_kwargs.speculative_config"
    found = problems("device=cuda", f"+{key}={{method: ngram}}", "generator.speculative.method=ngram")
    assert "must be left out with generator.speculative.method=ngram" in found[key]


def test_drafts_on_gpu_exclude_v1_model_runner(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    found = problems("device=cuda", "generator.backend=vllm", "generator.speculative.method=ngram")
    assert "must be null with VLLM_USE_V2_MODEL_RUNNER=0" in found["generator.speculative.method"]


@pytest.mark.parametrize(("runner", "refused"), [("0", True), ("1", False)])
def test_drafts_on_cpu_need_v2_model_runner(runner: str, refused: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    key, preset = "generator.speculative.method", load_preset(["generator.speculative.method=ngram"])
    config = resolve_device(preset, has_accelerator=False, explicit_keys=["generator.backend"])[0]
    messages = [str(problem) for problem in validate(config) if problem.key == key]
    assert ["must be null on a CPU" in message for message in messages] == [True] * refused


@pytest.mark.parametrize("name", ["nnodes", "node_rank", "master_addr", "master_port"])
def test_multi_node_engine_kwargs_are_rejected(name: str):
    messages_by_key = problems(f"generator.engine_init_kwargs={{{name}: 2}}")
    assert "Set trainer.placement.nodes_per_engine" in messages_by_key[f"generator.engine_init_kwargs.{name}"]


@pytest.mark.fault("F02")
@pytest.mark.parametrize(
    ("overrides", "key", "message"),
    [
        (["trainer.train_batch_size=-4"], "trainer.train_batch_size", "at least 1"),
        (
            ["generator.eval_sampling_params.temperature=0.001"],
            "generator.eval_sampling_params.temperature",
            "0 or at least 0.01",
        ),
        (
            ["generator.run_engines_locally=false", "generator.remote_inference_engine_urls=[]"],
            "generator.remote_inference_engine_urls",
            "at least one server",
        ),
        (
            ["generator.run_engines_locally=false", "generator.external_server_urls=['a:1','http://a:1/']"],
            "generator.external_server_urls",
            "a list of different servers",
        ),
        (
            ["trainer.metrics_port=8000", "generator.enable_http_endpoint=true"],
            "trainer.metrics_port",
            "another port than generator.http_endpoint_port",
        ),
        (["trainer.metrics_port=65536"], "trainer.metrics_port", "at most 65535"),
        (["trainer.policy.optimizer_config.lr=-1"], "trainer.policy.optimizer_config.lr", "at least 0"),
        (["trainer.policy.model.lora.rank=-1"], "trainer.policy.model.lora.rank", "at least 0"),
        (["trainer.policy.model.lora.dropout=0.1"], "trainer.policy.model.lora.dropout", "must be deterministic"),
        (
            ["trainer.policy.model.lora.init_method=pissa"],
            "trainer.policy.model.lora.init_method",
            "it changes the frozen weights",
        ),
        (
            ["trainer.critic.model.lora.init_method=gausian"],
            "trainer.critic.model.lora.init_method",
            "Did you mean 'gaussian'",
        ),
        (["generator.sampling_params.top_p=0"], "generator.sampling_params.top_p", "more than 0 and at most 1"),
        (["generator.sampling_params.top_p=1.5"], "generator.sampling_params.top_p", "more than 0 and at most 1"),
        (
            ["trainer.policy.optimizer_config.adam_betas=[0.9,1.0]"],
            "trainer.policy.optimizer_config.adam_betas",
            "less than 1",
        ),
        (
            ["trainer.policy.optimizer_config.adam_betas=[0.9]"],
            "trainer.policy.optimizer_config.adam_betas",
            "two numbers",
        ),
        (["trainer.timeouts.rollout_s=0"], "trainer.timeouts.rollout_s", "more than 0"),
        (["generator.chat_template.name_or_path=qwen4"], "generator.chat_template.name_or_path", "source=file"),
        (["generator.retokenize_chat_history=true"], "generator.retokenize_chat_history", "step_wise_trajectories"),
        (["generator.rate_limit.max_concurrency=0"], "generator.rate_limit.max_concurrency", "at least 1"),
        (["trainer.max_failed_fraction=1.1"], "trainer.max_failed_fraction", "at most 1"),
        (
            ["trainer.algorithm.kl_estimator_type=k4"],
            "trainer.algorithm.kl_estimator_type",
            "one of abs, k1, k1+, k2, k3",
        ),
        (
            ["trainer.algorithm.off_policy_correction.product_mask_low=3"],
            "trainer.algorithm.off_policy_correction.product_mask_low",
            "product_mask_high=2",
        ),
        (["trainer.algorithm.clip_cov.clip_cov_lb=9"], "trainer.algorithm.clip_cov.clip_cov_lb", "clip_cov_ub=5"),
        (
            ["trainer.algorithm.advantage_estimator=distillation"],
            "trainer.ref.model.path",
            "another model than the policy's",
        ),
        (
            [
                "trainer.algorithm.advantage_estimator=distillation",
                "trainer.ref.model.path=/t",
                "trainer.update_ref_every_epoch=true",
            ],
            "trainer.update_ref_every_epoch",
            "must not be replaced with the policy",
        ),
        (
            [
                "trainer.algorithm.advantage_estimator=distillation",
                "trainer.ref.model.path=/t",
                "trainer.algorithm.use_kl_in_reward=true",
                "trainer.algorithm.use_kl_loss=false",
            ],
            "trainer.algorithm.use_kl_in_reward",
            "does not read rewards",
        ),
        (["trainer.algorithm.sft.loss_type=minor_sft"], "trainer.algorithm.loss_reduction", "one value per sequence"),
        (
            ["environment.env_class=agent", "trainer.algorithm.loss_reduction=token_mean_legacy"],
            "trainer.algorithm.loss_reduction",
            "an episode of an agent may have several sequences",
        ),
        (["trainer.algorithm.use_tis=true"], "trainer.algorithm.tis_imp_ratio_cap", "more than 0 with use_tis=true"),
        (
            [
                "trainer.algorithm.use_tis=true",
                "trainer.algorithm.tis_imp_ratio_cap=2",
                "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence",
            ],
            "trainer.algorithm.use_tis",
            "false with off_policy_correction.tis_ratio_type=sequence",
        ),
        (
            [
                "trainer.algorithm.use_kl_in_reward=true",
                "trainer.algorithm.use_kl_loss=false",
                "trainer.algorithm.kl_ctrl.type=adaptive",
                "trainer.algorithm.kl_loss_coef=0",
            ],
            "trainer.algorithm.kl_loss_coef",
            "0 would remain 0",
        ),
        (["trainer.strategy=fdsp2"], "trainer.strategy", "Did you mean 'fsdp2'?"),
        (["trainer.logger=[console,wandbb]"], "trainer.logger", "Did you mean 'wandb'?"),
        (["generator.n_samples_per_prompt=1"], "generator.n_samples_per_prompt", "has no baseline"),
        (["trainer.algorithm.use_kl_in_reward=true"], "trainer.algorithm.use_kl_in_reward", "counted twice"),
        (["trainer.algorithm.advantage_estimator=gae"], "trainer.critic.model.path", "needs a critic"),
        (["trainer.train_batch_size=16"], "trainer.policy_mini_batch_size", "at most trainer.train_batch_size=16"),
        (["trainer.resume_mode=from_path"], "trainer.resume_path", "a checkpoint folder"),
        (["generator.sampling_params.temperature=0"], "generator.sampling_params.temperature", "more than 0"),
        (["trainer.strategy=single", "trainer.placement.policy_num_gpus_per_node=2"], "trainer.strategy", "fsdp2"),
        (
            [
                "trainer.strategy=single",
                "trainer.algorithm.advantage_estimator=gae",
                "trainer.critic.model.path=/x",
                "trainer.placement.colocate_all=false",
                "trainer.placement.critic_num_nodes=2",
            ],
            "trainer.strategy",
            "critic_num_gpus_per_node",
        ),
        (
            ["trainer.policy.sequence_parallel_size=2", "trainer.placement.policy_num_gpus_per_node=3"],
            "trainer.policy.sequence_parallel_size",
            "a divisor of 3, the number of ranks of the policy",
        ),
        (
            ["trainer.strategy=single", "trainer.ref.sequence_parallel_size=2"],
            "trainer.ref.sequence_parallel_size",
            "a divisor of 1, the number of ranks of the ref",
        ),
        (
            [
                "trainer.placement.colocate_all=false",
                "trainer.placement.policy_num_gpus_per_node=4",
                "trainer.placement.critic_num_gpus_per_node=2",
                "trainer.critic.sequence_parallel_size=4",
            ],
            "trainer.critic.sequence_parallel_size",
            "a divisor of 2, the number of ranks of the critic",
        ),
        (
            ["trainer.critic.tensor_parallel_size=2", "trainer.placement.policy_num_gpus_per_node=3"],
            "trainer.critic.tensor_parallel_size",
            "a divisor of 3, the number of ranks of the critic",
        ),
        (
            [
                "trainer.policy.tensor_parallel_size=2",
                "trainer.policy.fsdp_config.fsdp_size=4",
                "trainer.placement.policy_num_gpus_per_node=4",
            ],
            "trainer.policy.fsdp_config.fsdp_size",
            "-1 or a divisor of 2",
        ),
        *(
            (
                [*clash, f"trainer.{role}.tensor_parallel_size=2", "trainer.placement.policy_num_gpus_per_node=4"],
                f"trainer.{role}.tensor_parallel_size",
                f"1, or {only}",
            )
            for role, clash, only in (
                ("ref", ["trainer.strategy=deepspeed"], "trainer.strategy=fsdp2"),
                ("policy", ["trainer.policy.sequence_parallel_size=2"], "trainer.policy.sequence_parallel_size=1"),
                ("policy", ["trainer.policy.use_torch_compile=true"], "trainer.policy.use_torch_compile=false"),
                ("policy", EXPERT_ADAPTERS, "trainer.policy.model.lora.target_parameters=null"),
            )
        ),
        *(
            (
                [*clash, f"trainer.{role}.expert_parallel_size=2", "trainer.placement.policy_num_gpus_per_node=4"],
                key or f"trainer.{role}.expert_parallel_size",
                allowed,
            )
            for role, clash, key, allowed in (
                ("ref", ["trainer.strategy=deepspeed"], "", "1, or trainer.strategy=fsdp2"),
                ("policy", ["trainer.policy.use_torch_compile=true"], "", "1, or trainer.policy.use_torch_compile"),
                (
                    "critic",
                    ["trainer.critic.tensor_parallel_size=2"],
                    "",
                    "1, or trainer.critic.tensor_parallel_size=1",
                ),
                (
                    "policy",
                    ["trainer.policy.fsdp_config.fsdp_size=1"],
                    "trainer.policy.fsdp_config.fsdp_size",
                    "-1 or a multiple of 2",
                ),
            )
        ),
        *(
            ([*clash, "trainer.placement.policy_num_gpus_per_node=2", f"{key}={value}"], key, allowed)
            for key, value, clash, allowed in (
                ("trainer.moe_routing_replay", "rollout", ["generator.backend=sglang"], "null or old_policy, or gener"),
                (
                    "trainer.moe_routing_replay",
                    "rollout",
                    ["device=cuda", "generator.backend=sglang", "generator.enable_chunked_prefill=false"],
                    "null or old_policy, or generator.enable_chunked_prefill=true",
                ),
                (
                    "trainer.moe_routing_replay",
                    "rollout",
                    ["generator.run_engines_locally=false", "generator.external_server_urls=[http://127.0.0.1:8000]"],
                    "null or old_policy, or generator.run_engines_locally=true",
                ),
                (
                    "trainer.algorithm.router_aux_loss_coef",
                    "0.001",
                    ["trainer.policy.sequence_parallel_size=2"],
                    "0, or trainer.policy.sequence_parallel_size=1",
                ),
                (
                    "trainer.algorithm.router_aux_loss_coef",
                    "0.001",
                    ["trainer.strategy=deepspeed"],
                    "0, or trainer.strategy=fsdp2",
                ),
            )
        ),
        (
            [*EXPERT_ADAPTERS, "trainer.policy.model.lora.sync=adapter"],
            "trainer.policy.model.lora.sync",
            "auto or merged with trainer.policy.model.lora.target_parameters",
        ),
        (
            ["trainer.policy.expert_parallel_size=3", "trainer.placement.policy_num_gpus_per_node=4"],
            "trainer.policy.expert_parallel_size",
            "a divisor of 4, the number of ranks of the policy",
        ),
        (["trainer.policy.sequence_parallel_size=0"], "trainer.policy.sequence_parallel_size", "at least 1"),
        (["trainer.ref.deepspeed_config.zero_stage=1"], "trainer.ref.deepspeed_config.zero_stage", "at most 3"),
        (
            ["trainer.policy.deepspeed_config={zero_stage: 2, offload_parameters: true}"],
            "trainer.policy.deepspeed_config.offload_parameters",
            "false with zero_stage=2",
        ),
        (
            ["+trainer.critic.deepspeed_config.zero_optimization.stage=2"],
            "trainer.critic.deepspeed_config.zero_optimization.stage",
            "trainer.critic.deepspeed_config.zero_stage",
        ),
        (
            ["trainer.policy.optimizer_config.name=muon", "trainer.strategy=deepspeed"],
            "trainer.policy.optimizer_config.name",
            "adamw with trainer.strategy=deepspeed",
        ),
        (
            ["trainer.critic.optimizer_config.name=muon", "trainer.critic.model.lora.rank=4"],
            "trainer.critic.optimizer_config.name",
            "adamw or adamw_8bit with trainer.critic.model.lora.rank above 0",
        ),
        (
            [
                "trainer.policy.optimizer_config.name=adamw_8bit",
                "trainer.policy.tensor_parallel_size=2",
                "trainer.placement.policy_num_gpus_per_node=2",
            ],
            "trainer.policy.optimizer_config.name",
            "adamw or muon with trainer.policy.tensor_parallel_size above 1",
        ),
        (["generator.over_provisioning=-0.1"], "generator.over_provisioning", "at least 0"),
        (
            ["generator.over_provisioning=0.5", "trainer.fully_async.enabled=true"],
            "generator.over_provisioning",
            "0 with trainer.fully_async.enabled",
        ),
        (
            ["trainer.fully_async.enabled=true", "trainer.placement.colocate_all=true"],
            "trainer.placement.colocate_all",
            "false with trainer.fully_async.enabled",
        ),
        (["data.curriculum.max_pass_rate=1.5"], "data.curriculum.max_pass_rate", "at most 1"),
        (
            ["data.curriculum.min_pass_rate=0.5", "data.curriculum.max_pass_rate=0.25"],
            "data.curriculum.min_pass_rate",
            "at most data.curriculum.max_pass_rate=0.25",
        ),
        (
            ["trainer.algorithm.overlong_buffer.len=17", "generator.sampling_params.max_generate_length=16"],
            "trainer.algorithm.overlong_buffer.len",
            "at most generator.sampling_params.max_generate_length=16",
        ),
        (
            ["trainer.algorithm.dynamic_sampling.max_sample_batches=0"],
            "trainer.algorithm.dynamic_sampling.max_sample_batches",
            "at least 1, or -1 for no limit",
        ),
        (
            [
                "generator.n_samples_per_prompt=1",
                "trainer.algorithm.advantage_estimator=reinforce++",
                "trainer.algorithm.dynamic_sampling.type=filter",
            ],
            "generator.n_samples_per_prompt",
            "at least 2 with trainer.algorithm.dynamic_sampling.type",
        ),
        (
            [
                "generator.n_samples_per_prompt=1",
                "trainer.algorithm.advantage_estimator=reinforce++",
                "trainer.algorithm.zero_variance_filter=true",
            ],
            "generator.n_samples_per_prompt",
            "at least 2 with trainer.algorithm.zero_variance_filter",
        ),
        *(
            (
                ["trainer.policy.use_torch_compile=true", "trainer.strategy=deepspeed"],
                f"trainer.{role}.deepspeed_config.zero_stage",
                "2 with trainer.policy.use_torch_compile=true",
            )
            for role in ("policy", "ref", "critic")
        ),
        (["trainer.policy.record_memory=true"], "trainer.policy.record_memory", "memory/learner_peak_rss_gib"),
        (["environment.env_class=gsm8"], "environment.env_class", "Did you mean 'gsm8k'?"),
    ],
)
def test_wrong_value_or_combination_is_refused(overrides: list[str], key: str, message: str):
    assert message in problems(*overrides)[key]


@pytest.mark.fault("F02")
def test_every_problem_is_reported_at_once():
    messages_by_key = problems("trainer.train_batch_size=-4", "trainer.strategy=x", "generator.n_samples_per_prompt=1")
    assert {"trainer.train_batch_size", "trainer.strategy", "generator.n_samples_per_prompt"} <= set(messages_by_key)


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.use_kl_loss=false"],
        ["generator.eval_n_samples_per_prompt=1", "generator.n_samples_per_prompt=2"],
        ["trainer.policy.optimizer_config.lr=0"],
        ["trainer.train_batch_size=300"],
        ["trainer.strategy=fsdp", "trainer.placement.policy_num_gpus_per_node=2", "generator.num_inference_engines=2"],
        ["trainer.strategy=single", "trainer.max_steps=2", "data.val_data=[]"],
        ["trainer.policy.use_torch_compile=true", "trainer.dump_data_batch=true"],
        [
            "trainer.placement.policy_num_gpus_per_node=4",
            "generator.num_inference_engines=4",
            "trainer.policy.sequence_parallel_size=4",
            "trainer.ref.sequence_parallel_size=2",
        ],
        [
            "trainer.algorithm.dynamic_sampling.type=filter",
            "trainer.algorithm.dynamic_sampling.max_sample_batches=-1",
            "trainer.algorithm.overlong_buffer.len=512",
            "generator.apply_overlong_filtering=true",
            "generator.over_provisioning=0.25",
        ],
    ],
)
def test_good_combinations_are_accepted(overrides: list[str]):
    assert problems(*overrides) == {}


def test_critic_mini_batch_requires_critic():
    key = "trainer.critic_mini_batch_size"
    critic = ["trainer.critic.model.path=critic", "trainer.train_batch_size=256", f"{key}=512"]
    assert key not in problems(*critic)
    assert "at most trainer.train_batch_size=256" in problems(*critic, "trainer.algorithm.advantage_estimator=gae")[key]


def is_refused_by_name(key: str) -> None:
    assert value_keys()[key].default in CHOICES[key], "the default is available"
    other = next(value for value in (True, False, 7, "x", ["x"]) if fits(value, key) and value not in CHOICES[key])
    key_problems = [problem for problem in validate(with_value(key, other)) if problem.key == key]
    assert [problem.advice for problem in key_problems] == [UNAVAILABLE[key]]


def test_unavailable_settings_are_refused_by_name():
    check_each([key for key, reason in UNAVAILABLE.items() if isinstance(reason, str)], is_refused_by_name)


def is_refused_with_advice(choice: tuple[str, str]) -> None:
    key, name = choice
    assert name not in CHOICES[key]
    (problem,) = [problem for problem in validate(with_value(key, name)) if problem.key == key]
    assert "is not supported" in problem.advice


def test_unavailable_choices_say_what_to_use():
    check_each(NAMES, is_refused_with_advice)


@pytest.mark.parametrize("key", sorted(PLUGIN_KEYS))
def test_plugins_open_the_names_they_can_register(key: str):
    assert key in problems(f"{key}=mine")
    assert key not in problems(f"{key}=mine", "trainer.plugins=[my.module]")


def test_plugins_do_not_open_other_names():
    assert "trainer.strategy" in problems("trainer.strategy=mine", "trainer.plugins=[my.module]")


def boundary_numbers(key: str) -> Iterator[tuple[float, float]]:
    """Yield (last number inside, first number outside) for each bound of a key's range."""
    allowed, hint = RANGES[key], value_keys()[key].type_hint
    whole = int in union_members(hint) or hint in (list[int], dict[str, int])

    def next_to(end: float, towards: float) -> float:
        return int(end + math.copysign(1, towards)) if whole else math.nextafter(end, towards)

    for end, is_open, outside in (
        (allowed.low, allowed.exclusive_low, -math.inf),
        (allowed.high, allowed.exclusive_high, math.inf),
    ):
        if math.isfinite(end):
            yield (next_to(end, -outside), end) if is_open else (end, next_to(end, outside))


def range_problems(key: str, number: float) -> list[str]:
    default = value_keys()[key].default
    value = [number, number] if isinstance(default, list) else {"a": number} if isinstance(default, dict) else number
    value_problems = validate(with_value(key, value))
    return [str(problem) for problem in value_problems if problem.key == key and problem.allowed == str(RANGES[key])]


@pytest.mark.fault("F02")
def test_ranges_are_enforced_at_their_ends():
    def is_enforced(key: str) -> None:
        for inside, outside in boundary_numbers(key):
            assert range_problems(key, inside) == []
            assert range_problems(key, outside)

    check_each(RANGES, is_enforced)


def holds_its_default(key: str) -> None:
    default = value_keys()[key].default
    for number in default if isinstance(default, list | dict) else [default]:
        if isinstance(number, (int, float)):
            assert number in RANGES[key]
        else:
            assert number is None or number.startswith("${")


def test_ranges_contain_their_defaults():
    check_each(RANGES, holds_its_default)


def test_collectives_are_those_of_the_device():
    on_cuda = resolve_device(load_preset(["generator.weight_sync_backend=gloo"]), has_accelerator=True)[0]
    (problem,) = validate(on_cuda)
    assert str(problem).startswith("generator.weight_sync_backend=gloo: must be nccl with device=cuda.")


@pytest.mark.fault("F02")
def test_nan_is_rejected_for_every_number():
    for key, item in value_keys().items():
        if isinstance(item.default, float):
            assert key in {problem.key for problem in validate(with_value(key, float("nan")))}, key


junk = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.lists(st.integers(), max_size=3)
)


@given(st.sampled_from(sorted(value_keys())), junk)
@example("trainer.export_path", 0)
@example("generator.remote_inference_engine_urls", [0])
def test_validate_never_raises(key: str, value: object):
    for problem in validate(with_value(key, value)):
        assert "\n" not in str(problem)
