"""What can be chosen by name: tables name -> "module:object". Nothing is imported until a name is used.

The registries of the packages that hold these objects are built on these tables, so a name is written once.
"""

from __future__ import annotations

ADVANTAGE_ESTIMATORS = {"grpo": "skyrl_train.algorithms.advantages:grpo"}

POLICY_LOSSES = {"regular": "skyrl_train.algorithms.losses:clipped_surrogate"}

KL_ESTIMATORS = {
    "k1": "skyrl_train.algorithms.kl:k1",
    "k2": "skyrl_train.algorithms.kl:k2",
    "k3": "skyrl_train.algorithms.kl:k3",
    "abs": "skyrl_train.algorithms.kl:abs_kl",
}

REDUCTIONS = {
    "token_mean": "skyrl_train.algorithms.reductions:token_mean",
    "sequence_mean": "skyrl_train.algorithms.reductions:sequence_mean",
    "seq_mean_token_sum_norm": "skyrl_train.algorithms.reductions:seq_mean_token_sum_norm",
}

STRATEGIES = {
    "single": "skyrl_train.strategies.single:SingleStrategy",
    "fsdp2": "skyrl_train.strategies.fsdp2:FSDP2Strategy",
    "fsdp": "skyrl_train.strategies.fsdp2:FSDP2Strategy",
}

ENGINES = {
    "sglang": "skyrl_train.engines.sglang.engine:SGLangEngine",
    "transformers": "skyrl_train.engines.transformers.engine:TransformersEngine",
    "vllm": "skyrl_train.engines.vllm.engine:VLLMEngine",
}

ENVIRONMENTS = {
    "arithmetic": "skyrl_train.environments.arithmetic:ArithmeticEnv",
    "gsm8k": "skyrl_train.environments.gsm8k:GSM8KEnv",
}

TRACKERS = {
    "console": "skyrl_train.report.console:ConsoleTracker",
    "tensorboard": "skyrl_train.report.tensorboard:TensorboardTracker",
    "wandb": "skyrl_train.report.wandb:WandbTracker",
}
"""Besides the JSONL file, which is always written."""

SCHEDULES = (
    "constant",
    "constant_with_warmup",
    "cosine",
    "cosine_with_restarts",
    "inverse_sqrt",
    "linear",
    "polynomial",
)
"""Learning-rate schedules of transformers that need no more than warm-up and total steps."""
