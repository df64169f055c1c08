from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import pytest

from skyrl_train.config.hydra import load_preset, to_dict
from skyrl_train.config.keys import all_keys, get_value, value_keys
from skyrl_train.config.schema import Config
from skyrl_train.config.section import FrozenMapping, freeze

KEYS = Path(__file__).with_name("skyrl_keys.tsv")

NEW_KEYS = {
    "trainer.policy.language_model_only",
    "trainer.ref.language_model_only",
    "data.curriculum.max_pass_rate",
    "data.curriculum.min_pass_rate",
    "device",
    "environment.host_cpus",
    "environment.hosts",
    "environment.skyrl_gym.agent.command",
    "environment.skyrl_gym.agent.grader",
    "environment.skyrl_gym.agent.grader_timeout_s",
    "environment.skyrl_gym.agent.host",
    "environment.skyrl_gym.agent.max_calls",
    "environment.skyrl_gym.agent.max_concurrent_commands",
    "environment.skyrl_gym.agent.max_output_bytes",
    "environment.skyrl_gym.agent.max_tokens",
    "environment.skyrl_gym.agent.port",
    "environment.skyrl_gym.agent.public_url",
    "environment.skyrl_gym.agent.python",
    "environment.skyrl_gym.agent.reward",
    "environment.skyrl_gym.agent.run",
    "environment.skyrl_gym.agent.sandbox.i_know_this_runs_model_code_on_this_machine",
    "environment.skyrl_gym.agent.sandbox.image",
    "environment.skyrl_gym.agent.sandbox.kind",
    "environment.skyrl_gym.agent.sandbox.paths",
    "environment.skyrl_gym.agent.sandbox.run_args",
    "environment.skyrl_gym.agent.timeout_s",
    "environment.skyrl_gym.countdown.format_score",
    "environment.skyrl_gym.gsm8k.format_score",
    "environment.skyrl_gym.gsm8k.method",
    "environment.skyrl_gym.gsm8k_multi_turn.format_score",
    "environment.skyrl_gym.math.timeout",
    "environment.skyrl_gym.multiply.format_score",
    "environment.skyrl_gym.mini_swe.action_observation_template",
    "environment.skyrl_gym.mini_swe.command_timeout_s",
    "environment.skyrl_gym.mini_swe.format_error_template",
    "environment.skyrl_gym.mini_swe.grading_timeout_s",
    "environment.skyrl_gym.mini_swe.instance_template",
    "environment.skyrl_gym.mini_swe.max_output",
    "environment.skyrl_gym.mini_swe.system_template",
    "environment.skyrl_gym.mini_swe.test_timeout_s",
    "environment.skyrl_gym.mini_swe.traj_dir",
    "environment.skyrl_gym.ifeval.loose",
    "environment.skyrl_gym.ifeval.reward",
    "environment.skyrl_gym.openenv.action_key",
    "environment.skyrl_gym.openenv.base_url",
    "environment.skyrl_gym.openenv.max_response_bytes",
    "environment.skyrl_gym.openenv.observation_key",
    "environment.skyrl_gym.openenv.timeout",
    "environment.skyrl_gym.openenv.token_variable",
    "environment.skyrl_gym.reasoning_gym.partial_credit",
    "environment.skyrl_gym.reasoning_gym.tasks",
    "environment.skyrl_gym.verifiers.env_id",
    "environment.skyrl_gym.llm_as_a_judge.timeout",
    "environment.skyrl_gym.search.corpus",
    "environment.skyrl_gym.searchcode.corpus",
    "environment.skyrl_gym.searchcode.log_requests",
    "environment.skyrl_gym.searchcode.python_timeout",
    "environment.skyrl_gym.searchcode.search_url",
    "environment.skyrl_gym.searchcode.timeout",
    "environment.skyrl_gym.searchcode.topk",
    "environment.skyrl_gym.sandbox.i_know_this_runs_model_code_on_this_machine",
    "environment.skyrl_gym.sandbox.kind",
    "environment.skyrl_gym.tool_use.describe_tools",
    "environment.skyrl_gym.tool_use.dialect",
    "environment.skyrl_gym.tool_use.observation_role",
    "environment.skyrl_gym.tool_use.style",
    "environment.skyrl_gym.tool_use.tools",
    "environment.skyrl_gym.tool_use.tools_required",
    "environment.skyrl_gym.lcb.max_tests",
    "environment.skyrl_gym.lcb.test_timeout_s",
    "environment.skyrl_gym.lcb.timeout_s",
    "generator.batch_invariant",
    "generator.max_engine_restarts",
    "generator.over_provisioning",
    "generator.rate_limit.enabled",
    "generator.rate_limit.max_concurrency",
    "generator.rate_limit.trajectories_per_second",
    "generator.retokenize_chat_history",
    "generator.speculative.method",
    "generator.speculative.model",
    "generator.speculative.num_speculative_tokens",
    "generator.speculative.prompt_lookup_max",
    "generator.speculative.prompt_lookup_min",
    "generator.weight_sync_check",
    "generator.weight_sync_folder",
    "generator.weight_sync_only_changed",
    "generator.weight_sync_route",
    "trainer.algorithm.cispo.cispo_anchor",
    "trainer.algorithm.dppo.delta_high",
    "trainer.algorithm.dppo.delta_low",
    "trainer.algorithm.dppo.kl_threshold",
    "trainer.algorithm.dppo.tv_threshold",
    "trainer.algorithm.off_policy_correction.token_mask_eps_high",
    "trainer.algorithm.off_policy_correction.token_mask_eps_low",
    "trainer.algorithm.off_policy_correction.token_mask_is_threshold_high",
    "trainer.algorithm.off_policy_correction.token_mask_is_threshold_low",
    "trainer.algorithm.overlong_buffer.len",
    "trainer.algorithm.overlong_buffer.penalty_factor",
    "trainer.algorithm.sft.loss_type",
    "trainer.algorithm.sft.minor_beta",
    "trainer.console_samples",
    "trainer.console_samples_interval",
    "trainer.keep_rollouts",
    "trainer.keep_rollouts_gb",
    "trainer.critic.deepspeed_config.offload_optimizer",
    "trainer.critic.deepspeed_config.offload_parameters",
    "trainer.critic.deepspeed_config.zero_stage",
    "trainer.critic.fsdp_config.reduce_once",
    "trainer.critic.expert_parallel_size",
    "trainer.critic.optimizer_config.momentum",
    "trainer.critic.optimizer_config.name",
    "trainer.critic.tensor_parallel_size",
    "trainer.async_checkpoint",
    "trainer.fully_async.enabled",
    "trainer.fully_async.on_sync",
    "trainer.fully_async.sample_full_batch",
    "trainer.guards.equal_rewards_steps",
    "trainer.guards.max_cut_fraction",
    "trainer.guards.max_ratio",
    "trainer.guards.max_skipped_updates",
    "trainer.guards.stop",
    "trainer.max_failed_fraction",
    "trainer.metrics_host",
    "trainer.metrics_port",
    "trainer.placement.colocate_offload",
    "trainer.placement.engine_strategy",
    "trainer.placement.nodes_per_engine",
    "trainer.placement.strategy",
    "trainer.restarts",
    "trainer.max_steps",
    "trainer.algorithm.router_aux_loss_coef",
    "trainer.max_tokens_per_microbatch",
    "trainer.moe_routing_replay",
    "trainer.placement.reward_num_gpus_per_node",
    "trainer.placement.reward_num_nodes",
    "trainer.plugins",
    "trainer.policy.deepspeed_config.offload_optimizer",
    "trainer.policy.deepspeed_config.offload_parameters",
    "trainer.policy.deepspeed_config.zero_stage",
    "trainer.policy.expert_parallel_size",
    "trainer.policy.fsdp_config.reduce_once",
    "trainer.policy.model.lora.sync",
    "trainer.policy.optimizer_config.momentum",
    "trainer.policy.optimizer_config.name",
    "trainer.policy.model.lora.target_parameters",
    "trainer.critic.model.lora.target_parameters",
    "trainer.policy.tensor_parallel_size",
    "trainer.ref.deepspeed_config.offload_optimizer",
    "trainer.ref.deepspeed_config.offload_parameters",
    "trainer.ref.deepspeed_config.zero_stage",
    "trainer.ref.expert_parallel_size",
    "trainer.ref.fsdp_config.reduce_once",
    "trainer.ref.tensor_parallel_size",
    "trainer.profile_steps",
    "trainer.reward.coef",
    "trainer.reward.model.path",
    "trainer.share_prompt",
    "trainer.trace",
}


OTHER_DEFAULTS = {
    "generator.enforce_eager": False,
    "trainer.gradient_checkpointing": None,
    "trainer.micro_train_batch_size_per_gpu": None,
    "trainer.micro_forward_batch_size_per_gpu": None,
    **{f"trainer.{role}.fsdp_config.reshard_after_forward": None for role in ("policy", "ref", "critic")},
}
"""Keys whose default in SkyRL costs speed and changes nothing else."""


def skyrl_defaults() -> dict[str, object]:
    rows = [line.split("\t") for line in KEYS.read_text().splitlines()[1:]]
    return {key: text if text.startswith("$") else json.loads(text) for key, text in rows}


def test_every_skyrl_key_has_its_default():
    found = {key: get_value(Config(), key) for key in skyrl_defaults()}
    assert found == skyrl_defaults() | OTHER_DEFAULTS
    found_there = {name: key.metadata.skyrl_default for name, key in value_keys().items()}
    noted = {name: value for name, value in found_there.items() if value is not ...}
    assert noted == {key: skyrl_defaults()[key] for key in OTHER_DEFAULTS}


def test_new_keys_are_few_and_listed_here():
    free = [key for key, item in value_keys().items() if item.is_free_form]
    known = {key for key in skyrl_defaults() if not any(key.startswith(f"{prefix}.") for prefix in free)}
    new = set(value_keys()) - known - set(free)
    assert {key for key in new if not key.startswith("trainer.timeouts.")} == NEW_KEYS
    assert all(isinstance(value_keys()[key].default, float) for key in new - NEW_KEYS), "timeouts are seconds"


def test_frozen_config_cannot_be_changed_anywhere():
    config = freeze(Config())
    with pytest.raises(AttributeError, match=r"OptimizerConfig\.lr cannot be set: the configuration is frozen"):
        config.trainer.policy.optimizer_config.lr = 1.0
    with pytest.raises(AttributeError, match="frozen"):
        del config.trainer.seed
    with pytest.raises(AttributeError):
        config.data.train_data.append("x")
    with pytest.raises(TypeError, match="frozen"):
        config.generator.engine_init_kwargs["x"] = 1
    with pytest.raises(TypeError, match="frozen"):
        config.generator.engine_init_kwargs.update(x=1)
    with pytest.raises(TypeError, match="frozen"):
        config.generator.engine_init_kwargs |= {"x": 1}


def test_every_mutator_of_a_frozen_mapping_is_refused():
    mapping = FrozenMapping({"a": 1})
    reading = {"copy", "fromkeys", "get", "items", "keys", "values"}
    for name in {name for name in dir(dict) if not name.startswith("_")} - reading:
        with pytest.raises(TypeError, match="frozen"):
            getattr(mapping, name)()


def test_pickled_config_is_equal_and_still_frozen():
    config = load_preset(["+generator.engine_init_kwargs.a.b=[1,2]", "trainer.logger=[console,wandb]"])
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert copy.generator.engine_init_kwargs == {"a": {"b": (1, 2)}}
    with pytest.raises(AttributeError, match="frozen"):
        copy.trainer.placement.colocate_all = False


def test_replace_of_a_frozen_section_can_be_changed():
    changed = dataclasses.replace(freeze(Config()).trainer, seed=7)
    changed.epochs = 3
    assert (changed.seed, changed.epochs) == (7, 3)


def test_plain_has_every_leaf_and_only_plain_values():
    text = json.dumps(to_dict(freeze(Config())))
    content = json.loads(text)
    for key in value_keys():
        value = content
        for part in key.split("."):
            value = value[part]
    assert content == to_dict(Config())


def test_sections_and_leaves_have_distinct_names():
    sections = {key for key, item in all_keys().items() if item.is_section}
    assert sections
    assert sections.isdisjoint(value_keys())
