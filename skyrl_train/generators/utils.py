"""SkyRL's import path of its helper functions for generators."""

from skyrl_train.skyrl.messages import (
    encode_messages_subset,
    get_generation_prompt_ids,
    get_response_ids_and_loss_mask_from_messages,
)
from skyrl_train.skyrl.metrics import (
    apply_overlong_filtering,
    concatenate_generator_outputs,
    get_metrics_from_generator_output,
    get_rollout_metrics,
)

__all__ = [
    "apply_overlong_filtering",
    "concatenate_generator_outputs",
    "encode_messages_subset",
    "get_generation_prompt_ids",
    "get_metrics_from_generator_output",
    "get_response_ids_and_loss_mask_from_messages",
    "get_rollout_metrics",
]
