"""Members of SkyRL's classes that have no counterpart here, with the replacement of each."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import NoReturn

from skyrl_train.errors import ConfigError

DOCS_PAGE = "docs/guides/from_skyrl.md#programs"
_MODELS = (
    "the run builds the models of trainer.policy, trainer.critic and trainer.ref before it creates the trainer. Choose "
    "another model by its path, register another loss with register_policy_loss, and override "
    "fwd_logprobs_values_reward or train_critic_and_policy to work on the batch"
)
_SYNC = (
    "the run sends weights to the engines after every step, and puts engines to sleep and wakes them. Choose the "
    "route with generator.weight_sync_route, and put code that must run once into `train`, before super().train()"
)
_ROWS = (
    "return the rows from get_train_dataset and get_eval_dataset of the experiment. Their order follows from "
    "trainer.seed, and their number per step from trainer.train_batch_size"
)
_UPDATE = (
    "override train_critic_and_policy, and change data['advantages'] or data['loss_mask'] before super() is called"
)
_AHEAD = (
    "trainer.fully_async.* decides how far rollouts run ahead. Change what is trained on in "
    "postprocess_generator_output or convert_to_training_input"
)
_CALLBACKS = (
    "override train_critic_and_policy for the end of a step, save_checkpoints for a save, eval for an evaluation, and "
    "get_tracker of the experiment for what is logged"
)
_PROFILER = "trainer.profile_steps names the steps to profile"
_FILTER = (
    "set trainer.algorithm.dynamic_sampling, or mask groups in postprocess_generator_output with loss_masks of zeros"
)
_CHECKPOINTS = "override save_checkpoints; trainer.max_ckpts_to_keep says how many checkpoints are kept"
_STEPS = "the run counts steps: trainer.epochs and trainer.max_steps decide how many, trainer.resume_mode the first"
_BATCH = "batches are ragged and need no padding: no row is left out or added"

TRAINER_REPLACEMENTS: Mapping[str, str] = {
    "policy_model": _MODELS,
    "critic_model": _MODELS,
    "ref_model": _MODELS,
    "dispatch": _MODELS,
    "build_models": _MODELS,
    "train_dataloader": _ROWS,
    "eval_dataloader": _ROWS,
    "_build_train_dataloader_and_compute_training_steps": _ROWS,
    "pad_batch": _BATCH,
    "_remove_tail_data": _BATCH,
    "handle_dynamic_sampling": _FILTER,
    "_execute_forward_pass": "override fwd_logprobs_values_reward",
    "_skip_policy_forward": "the run computes log-probs only if something reads them",
    "_normalize_advantages": f"set trainer.algorithm.advantage_batch_normalize and loss_reduction, or {_UPDATE}",
    "_execute_training_step": _UPDATE,
    "_cleanup_old_checkpoints": _CHECKPOINTS,
    "init_weight_sync_state": _SYNC,
    "sync_policy_weights_to_inference_engines": _SYNC,
    "async_sync_policy_weights_to_inference_engines": _SYNC,
    "flush_pending_metrics": "the run logs the numbers in all_metrics with each step, the last one included",
    "add_callback": _CALLBACKS,
    "_fire": _CALLBACKS,
    "_build_callback_input": _CALLBACKS,
    "_profiler_start": _PROFILER,
    "_profiler_step": _PROFILER,
    "_profiler_stop": _PROFILER,
    "_torch_profiler_enabled": _PROFILER,
    "has_critic": "read self.cfg.trainer.algorithm.advantage_estimator: gae has a critic",
    "_get_dp_group_models": _MODELS,
    "_get_mesh_rank": _MODELS,
    "_run_training": _AHEAD,
    "_run_generate_loop": _AHEAD,
    "_run_generate_for_a_group_loop": _AHEAD,
    "_collect_generation_mini_batch": _AHEAD,
    "_drain_next_group": _AHEAD,
    "_should_keep_group": _FILTER,
    "convert_generation_group_mini_batch_to_training_input": "override convert_to_training_input",
}
"""Members of RayPPOTrainer and FullyAsyncRayPPOTrainer -> the replacement of each."""

SYNC_METHODS = (
    "postprocess_generator_output",
    "convert_to_training_input",
    "fwd_logprobs_values_reward",
    "apply_reward_kl_penalty",
    "compute_advantages_and_returns",
    "dump_data",
    "train_critic_and_policy",
    "save_checkpoints",
    "load_checkpoints",
    "save_models",
    "update_ref_with_policy",
)
"""Methods of the trainer whose overrides must not be coroutines."""

READ_ONLY_ATTRIBUTES: Mapping[str, str] = {"global_step": _STEPS, "total_training_steps": _STEPS}
"""Attributes of the trainer that can be read but not set."""

_OWN_RUN = "override get_trainer, or `train` of the trainer that it returns"
_OWN_CLIENT = (
    "the run creates the client from generator.*. For servers that run elsewhere set "
    "generator.run_engines_locally=false and generator.external_server_urls; the generator of get_generator may also "
    "call its own client"
)
EXPERIMENT_REPLACEMENTS: Mapping[str, str] = {
    "_setup_trainer": _OWN_RUN,
    "_setup_generator": "override get_generator; skyrl_train.entrypoints.main_generate runs an evaluation alone",
    "get_inference_client": _OWN_CLIENT,
    "_get_new_inference_client": _OWN_CLIENT,
    "get_trajectory_logger": "completions go to the trackers of trainer.logger; register another one with "
    "sk.register.tracker",
}
"""Members of BasePPOExp -> the replacement of each."""

_OWN_EPISODES = (
    "write a multi-turn environment, or override `generate` and call the method there for every entry of the input"
)
GENERATOR_REPLACEMENTS: Mapping[str, str] = {
    "_validate_cfg": "the configuration is checked before the run starts",
    "_compute_cache_salt": "engines never reuse prompts that were cached with other weights",
    "agent_loop": _OWN_EPISODES,
    "generate_batched": "override `generate`",
    "_env_init": _OWN_EPISODES,
    "_env_step": _OWN_EPISODES,
    "_run_in_executor_if_available": "environments run in processes of their own",
    "_setup_env_extras": "override `generate`, and change input_batch['env_extras'] before super() is called",
    "_post_process_agent_loop_output": "override `generate`, and change what super() returns",
    "_zero_reward_if_not_stop": "set generator.zero_reward_on_non_stop, or override `generate` and change "
    "the rewards that super() returns",
    "_build_per_token_rewards": "override `generate`, and change the rewards that super() returns",
    "get_obs_ids_from_obs": _OWN_EPISODES,
    "_update_chat_history": _OWN_EPISODES,
    "_update_agent_state_by_retokenizing_chat_history": _OWN_EPISODES,
    "_update_agent_loop_state_with_multiturn_chat_template": _OWN_EPISODES,
    "_update_agent_loop_state_with_singleturn_chat_template": _OWN_EPISODES,
}
"""Members of SkyRLGymGenerator -> the replacement of each."""

CLIENT_REPLACEMENTS: Mapping[str, str] = dict.fromkeys(
    (
        "sleep",
        "wake_up",
        "pause_generation",
        "resume_generation",
        "abort_generation",
        "init_weight_update_communicator",
        "update_named_weights",
        "teardown",
    ),
    "remove the call: the run itself sends weights to the engines, and puts them to sleep and wakes them",
)
"""Members of InferenceEngineClient -> the replacement of each."""


def reject_overrides(subclass: type, base: type, table: Mapping[str, str]) -> None:
    """Reject overrides of methods that the run never calls.

    Args:
        subclass: The subclass to check, with its bases up to `base`.
        base: The class of this package.
        table: Method names -> the advice for the error message.

    Raises:
        ConfigError: A class between `subclass` and `base` defines a method of `table`.
    """
    for cls in subclass.__mro__[: subclass.__mro__.index(base)]:
        for name in sorted(table.keys() & vars(cls).keys()):
            raise ConfigError(
                f"{subclass.__name__}.{name}: the run does not call this method, so overriding it has no effect. "
                f"Instead: {table[name]} ({DOCS_PAGE})."
            )


def raise_unsupported_attribute(owner: str, table: Mapping[str, str], name: str) -> NoReturn:
    """Raise AttributeError for an attribute that the class does not have, with the replacement if there is one.

    Args:
        owner: The name of the class.
        table: Attribute names -> the advice for the error message.
        name: The attribute.
    """
    advice = (
        f"Instead: {table[name]} ({DOCS_PAGE})."
        if name in table
        else f"{DOCS_PAGE} lists the attributes that {owner} has."
    )
    raise AttributeError(f"{owner} of skyrl_train has no {name!r}. {advice}", name=name, obj=None)


def referenced_names(subclass: type) -> set[str]:
    """Return the names of attributes and globals that the class's own methods use. Inherited methods do not count."""
    functions = (getattr(value, "__func__", value) for value in vars(subclass).values())
    return {
        name
        for function in functions
        if inspect.isfunction(function)
        for code in _codes(inspect.unwrap(function).__code__)
        for name in code.co_names
    }


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def reject_custom_loop(subclass: type) -> None:
    """Raise ConfigError if a trainer overrides `train` and no method of its class calls super().train()."""
    if inspect.isfunction(vars(subclass).get("train")) and "train" not in referenced_names(subclass):
        raise ConfigError(
            f"{subclass.__name__}.train never calls super().train(), but a custom training loop is not supported here. "
            "Override the method of the step that you change, use trainer.fully_async.* for asynchronous rollouts, or "
            f"write the loop with sk.session(cfg), which gives access to learner and engines ({DOCS_PAGE})."
        )


def reject_coroutines(subclass: type, base: type) -> None:
    """Raise ConfigError if a class from `subclass` up to `base` defines a method of SYNC_METHODS as a coroutine."""
    for cls in subclass.__mro__[: subclass.__mro__.index(base)]:
        for name in SYNC_METHODS:
            if inspect.iscoroutinefunction(vars(cls).get(name)):
                raise ConfigError(
                    f"{subclass.__name__}.{name} is a coroutine, but must be a plain method, as in SkyRL. Remove "
                    "`async`."
                )


def reject_misspelled_overrides(subclass: type, base: type) -> None:
    """Raise ConfigError for a method whose name is almost that of a public method of `base`.

    Methods that the subclass itself calls are accepted, and those that override a method of another base.
    """
    hooks = [name for name, value in vars(base).items() if inspect.isfunction(value) and not name.startswith("_")]
    for name in sorted(vars(subclass).keys() - vars(base).keys() - referenced_names(subclass)):
        close = difflib.get_close_matches(name, hooks, n=1, cutoff=0.9)
        if close and inspect.isfunction(vars(subclass)[name]) and not hasattr(subclass.__base__, name):
            raise ConfigError(
                f"{subclass.__name__}.{name}: the run does not call this method. Did you mean {close[0]}? If not, "
                f"choose a name that differs more ({DOCS_PAGE})."
            )
