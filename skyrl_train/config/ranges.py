"""Which numbers a key accepts, whatever the others are. A key that is not here accepts every number of its type."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.keys import leaves, value_at
from skyrl_train.config.problems import Problem
from skyrl_train.config.schema import Config


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; the ends are in it unless `above` or `below` say otherwise."""

    low: float
    high: float = math.inf
    above: bool = False
    below: bool = False

    def __contains__(self, value: float) -> bool:
        left = value > self.low if self.above else value >= self.low
        return left and (value < self.high if self.below else value <= self.high)

    def __str__(self) -> str:
        left = f"{'more than' if self.above else 'at least'} {self.low:g}"
        right = f" and {'less than' if self.below else 'at most'} {self.high:g}"
        return left if self.high == math.inf else left + right


ROLES = ("policy", "ref", "critic")
AT_LEAST_ONE = Range(1)
NOT_NEGATIVE = Range(0)
POSITIVE = Range(0, above=True)
FRACTION = Range(0, 1)
MINUS_ONE_OR_MORE = Range(-1)
LEAST_TEMPERATURE = 0.01
"""Besides 0: logits divided by less overflow, and vLLM would take this instead."""

_OPTIMIZER = {
    "lr": NOT_NEGATIVE,
    "adam_betas": Range(0, 1, below=True),
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "num_warmup_steps": NOT_NEGATIVE,
}
_LORA = {"rank": NOT_NEGATIVE, "alpha": AT_LEAST_ONE}
_MODEL = {
    "sequence_parallel_size": AT_LEAST_ONE,
    "tensor_parallel_size": AT_LEAST_ONE,
    "fsdp_config.fsdp_size": MINUS_ONE_OR_MORE,
    "deepspeed_config.zero_stage": Range(2, 3),
}
_MEGATRON = {
    "tensor_model_parallel_size": AT_LEAST_ONE,
    "pipeline_model_parallel_size": AT_LEAST_ONE,
    "context_parallel_size": AT_LEAST_ONE,
    "expert_model_parallel_size": AT_LEAST_ONE,
    "expert_tensor_parallel_size": AT_LEAST_ONE,
}
_SAMPLING = {
    "max_generate_length": AT_LEAST_ONE,
    "repetition_penalty": Range(0.01, 100),
    "temperature": NOT_NEGATIVE,
    "top_p": Range(0, 1, above=True),
    "min_p": FRACTION,
    "top_k": MINUS_ONE_OR_MORE,
    "logprobs": NOT_NEGATIVE,
}
_ALGORITHM = {
    "kl_ctrl.kl_target": POSITIVE,
    "kl_ctrl.horizon": AT_LEAST_ONE,
    "kl_loss_coef": NOT_NEGATIVE,
    "entropy_loss_coef": NOT_NEGATIVE,
    "lambd": FRACTION,
    "gamma": FRACTION,
    "eps_clip_low": FRACTION,
    "eps_clip_high": NOT_NEGATIVE,
    "clip_ratio_c": Range(1, above=True),
    "max_seq_len": AT_LEAST_ONE,
    "off_policy_correction.token_tis_ratio_clip_high": POSITIVE,
    "off_policy_correction.sequence_tis_ratio_clip_high": POSITIVE,
    "off_policy_correction.geo_mask_high": POSITIVE,
    "off_policy_correction.geo_mask_low": NOT_NEGATIVE,
    "off_policy_correction.product_mask_high": POSITIVE,
    "off_policy_correction.product_mask_low": NOT_NEGATIVE,
    "off_policy_correction.outlier_token_is_threshold_low": NOT_NEGATIVE,
    "off_policy_correction.outlier_token_is_threshold_high": POSITIVE,
    "off_policy_correction.token_mask_eps_low": NOT_NEGATIVE,
    "off_policy_correction.token_mask_eps_high": NOT_NEGATIVE,
    "dppo.tv_threshold": NOT_NEGATIVE,
    "dppo.kl_threshold": NOT_NEGATIVE,
    "overlong_buffer.len": NOT_NEGATIVE,
    "overlong_buffer.penalty_factor": NOT_NEGATIVE,
    "sft.minor_beta": POSITIVE,
    "sapo.tau_pos": POSITIVE,
    "sapo.tau_neg": POSITIVE,
    "value_clip": POSITIVE,
    "dynamic_sampling.max_sample_batches": MINUS_ONE_OR_MORE,
    "dynamic_sampling.min_replace_ratio": FRACTION,
    "clip_cov.clip_ratio": FRACTION,
    "kl_cov.kl_cov_frac": FRACTION,
    "kl_cov.ppo_kl_coef": NOT_NEGATIVE,
    "cispo.cispo_eps_clip_low": NOT_NEGATIVE,
    "cispo.cispo_eps_clip_high": NOT_NEGATIVE,
}
_TRAINER = {
    "fully_async.max_staleness_steps": NOT_NEGATIVE,
    "fully_async.num_parallel_generation_workers": AT_LEAST_ONE,
    "seed": NOT_NEGATIVE,
    "max_ckpts_to_keep": MINUS_ONE_OR_MORE,
    "ckpt_interval": MINUS_ONE_OR_MORE,
    "hf_save_interval": MINUS_ONE_OR_MORE,
    "eval_interval": MINUS_ONE_OR_MORE,
    "max_failed_fraction": FRACTION,
    "rope_theta": POSITIVE,
} | dict.fromkeys(
    (
        "placement.policy_num_nodes",
        "placement.policy_num_gpus_per_node",
        "epochs",
        "update_epochs_per_batch",
        "train_batch_size",
        "policy_mini_batch_size",
        "critic_mini_batch_size",
        "micro_train_batch_size_per_gpu",
        "micro_forward_batch_size_per_gpu",
        "max_tokens_per_microbatch",
        "eval_batch_size",
        "max_prompt_length",
        "max_steps",
    ),
    AT_LEAST_ONE,
)
_TRAINER |= {
    f"placement.{role}_num_{what}": NOT_NEGATIVE
    for role in ("ref", "critic", "reward")
    for what in ("nodes", "gpus_per_node")
}
"""0 says that it has none of its own."""
_GENERATOR = {
    "weight_transfer_threshold_cuda_ipc_GB": POSITIVE,
    "gpu_memory_utilization": Range(0, 1, above=True),
    "http_endpoint_port": Range(1, 65535),
    "rope_theta": POSITIVE,
    "over_provisioning": NOT_NEGATIVE,
    "rate_limit.trajectories_per_second": POSITIVE,
} | dict.fromkeys(
    (
        "num_inference_engines",
        *(f"inference_engine_{kind}_parallel_size" for kind in ("tensor", "pipeline", "expert", "data")),
        "n_samples_per_prompt",
        "eval_n_samples_per_prompt",
        "max_input_length",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_turns",
        "rate_limit.max_concurrency",
    ),
    AT_LEAST_ONE,
)


def _below(prefix: str, table: dict[str, Range]) -> dict[str, Range]:
    return {f"{prefix}.{name}": allowed for name, allowed in table.items()}


RANGES: dict[str, Range] = {
    **_below("trainer", _TRAINER),
    **_below("trainer.algorithm", _ALGORITHM),
    **{name: POSITIVE for name in leaves() if name.startswith("trainer.timeouts.")},
    **{key: item for role in ROLES for key, item in _below(f"trainer.{role}", _MODEL).items()},
    **_below("trainer.policy.megatron_config", _MEGATRON),
    **_below("trainer.ref.megatron_config", _MEGATRON),
    **_below("trainer.policy.optimizer_config", _OPTIMIZER),
    **_below("trainer.critic.optimizer_config", _OPTIMIZER),
    **_below("trainer.policy.model.lora", _LORA),
    **_below("trainer.critic.model.lora", _LORA),
    **_below("data.curriculum", {"min_pass_rate": FRACTION, "max_pass_rate": FRACTION}),
    **_below("generator", _GENERATOR),
    **_below("generator.sampling_params", _SAMPLING),
    **_below("generator.eval_sampling_params", _SAMPLING),
    **_below("environment.skyrl_gym", {"max_env_workers": NOT_NEGATIVE, "search.topk": AT_LEAST_ONE}),
    "environment.skyrl_gym.search.timeout": POSITIVE,
    "environment.skyrl_gym.openenv.timeout": POSITIVE,
    "environment.skyrl_gym.openenv.max_response_bytes": AT_LEAST_ONE,
    "environment.skyrl_gym.math.timeout": POSITIVE,
    **{
        f"environment.skyrl_gym.{name}.format_score": FRACTION
        for name in ("gsm8k", "gsm8k_multi_turn", "multiply", "countdown")
    },
    **dict.fromkeys(
        (
            "environment.skyrl_gym.searchcode.timeout",
            "environment.skyrl_gym.searchcode.python_timeout",
            "environment.skyrl_gym.llm_as_a_judge.timeout",
        ),
        POSITIVE,
    ),
    "environment.skyrl_gym.searchcode.topk": AT_LEAST_ONE,
    "environment.skyrl_gym.lcb.test_timeout_s": POSITIVE,
    "environment.skyrl_gym.lcb.timeout_s": POSITIVE,
    "environment.skyrl_gym.lcb.max_tests": AT_LEAST_ONE,
}


def out_of_range(config: Config) -> Iterator[Problem]:
    """Numbers outside their key's range."""
    for name in leaves():
        value = value_at(config, name)
        for number in value if isinstance(value, (list, tuple)) else (value,):
            if name in RANGES and _is_number(number) and number not in RANGES[name]:
                yield Problem(name, number, str(RANGES[name]))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
