"""SkyRL's import path of its algorithm functions and registries."""

from skyrl_train.skyrl.functions import (
    AdaptiveKLController,
    AdvantageEstimator,
    FixedKLController,
    PolicyLossType,
    compute_approx_kl,
    masked_mean,
    masked_var,
    masked_whiten,
    normalize_advantages_dict,
    reduce_loss,
)
from skyrl_train.skyrl.registries import (
    AdvantageEstimatorRegistry,
    PolicyLossRegistry,
    register_advantage_estimator,
    register_policy_loss,
    sync_registries,
)

__all__ = [
    "AdaptiveKLController",
    "AdvantageEstimator",
    "AdvantageEstimatorRegistry",
    "FixedKLController",
    "PolicyLossRegistry",
    "PolicyLossType",
    "compute_approx_kl",
    "masked_mean",
    "masked_var",
    "masked_whiten",
    "normalize_advantages_dict",
    "reduce_loss",
    "register_advantage_estimator",
    "register_policy_loss",
    "sync_registries",
]
