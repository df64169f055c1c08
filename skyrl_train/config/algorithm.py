"""Configuration section `trainer.algorithm`: advantages, losses and their coefficients."""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.config.choices import ADVANTAGE_ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES, REDUCTIONS, SFT_LOSSES
from skyrl_train.config.section import (
    AT_LEAST_MINUS_ONE,
    AT_LEAST_ONE,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    Range,
    Section,
    config_field,
)


@dataclass
class KLCtrlConfig(Section):
    """Controller of the coefficient of the KL penalty on rewards (`use_kl_in_reward`)."""

    type: str = config_field("fixed", choices=("fixed", "adaptive"))
    """`fixed` keeps the coefficient at `kl_loss_coef`. `adaptive` changes it after every step to bring the measured KL
    divergence close to `kl_target`."""
    kl_target: float = config_field(0.1, range=POSITIVE)
    """Target KL divergence per token (nats) of `adaptive`."""
    horizon: int = config_field(10000, range=AT_LEAST_ONE)
    """Number of samples over which `adaptive` reacts. A larger number reacts more slowly."""


@dataclass
class OffPolicyCorrectionConfig(Section):
    """Corrections for the difference between the policy that sampled a rollout and the policy that is trained on it.

    The ratio of a token is its probability under the trainer's policy before the update, divided by its probability
    under the engine's policy. The ratio of a sequence is the product over its tokens.
    """

    tis_ratio_type: str | None = config_field(None, choices=(None, "token", "sequence"), value_aliases={"none": None})
    """Truncated importance sampling: weight the loss by the ratio of each `token` or of each `sequence`. null turns it
    off."""
    token_tis_ratio_clip_high: float = config_field(2.0, range=POSITIVE)
    """Upper bound of a token's ratio with `tis_ratio_type=token`."""
    sequence_tis_ratio_clip_high: float = config_field(5.0, range=POSITIVE)
    """Upper bound of a sequence's ratio with `tis_ratio_type=sequence`."""
    sequence_mask_metric: str | None = config_field(
        None, choices=(None, "product", "geometric"), value_aliases={"none": None}
    )
    """Mask complete sequences by the `product` or by the `geometric` mean of the ratios of their tokens. null turns it
    off."""
    geo_mask_high: float = config_field(1.01, range=POSITIVE)
    """With `sequence_mask_metric=geometric`, mask sequences whose geometric mean is above this."""
    geo_mask_low: float = config_field(0.99, range=NON_NEGATIVE)
    """With `sequence_mask_metric=geometric`, mask sequences whose geometric mean is below this."""
    product_mask_high: float = config_field(2.0, range=POSITIVE)
    """With `sequence_mask_metric=product`, mask sequences whose product is above this."""
    product_mask_low: float = config_field(0.5, range=NON_NEGATIVE)
    """With `sequence_mask_metric=product`, mask sequences whose product is below this."""
    outlier_token_is_threshold_low: float | None = config_field(None, range=NON_NEGATIVE)
    """Mask a sequence if the ratio of any of its tokens is below this. null turns it off."""
    outlier_token_is_threshold_high: float | None = config_field(None, range=POSITIVE)
    """Mask a sequence if the ratio of any of its tokens is above this. null turns it off."""
    token_mask_eps_low: float | None = config_field(None, range=NON_NEGATIVE)
    """Mask a token if its ratio is below 1 minus this. null turns it off."""
    token_mask_eps_high: float | None = config_field(None, range=NON_NEGATIVE)
    """Mask a token if its ratio is above 1 plus this. null turns it off."""
    token_mask_is_threshold_low: float | None = config_field(None, range=NON_NEGATIVE)
    """Mask a token if its ratio is below this. null turns it off. Newer versions of SkyRL have this key instead of
    `token_mask_eps_low`."""
    token_mask_is_threshold_high: float | None = config_field(None, range=POSITIVE)
    """Mask a token if its ratio is above this. null turns it off. Newer versions of SkyRL have this key instead of
    `token_mask_eps_high`."""


@dataclass
class SAPOConfig(Section):
    """Soft adaptive policy optimization (`policy_loss_type=sapo`)."""

    tau_pos: float = config_field(1.0, range=POSITIVE)
    """Temperature of the gate for tokens with a positive advantage."""
    tau_neg: float = config_field(1.05, range=POSITIVE)
    """Temperature of the gate for tokens with a negative advantage."""


@dataclass
class DynamicSamplingConfig(Section):
    """Dynamic sampling: train only on groups whose rewards, before length penalties, differ ("useful" groups)."""

    type: str | None = config_field(None, choices=(None, "filter", "replace"), value_aliases={"none": None})
    """`filter` drops the other groups and draws more prompts until the batch is full. `replace` draws prompts until
    `min_replace_ratio` of the batch is useful, and then repeats the useful groups in place of the others. null turns
    dynamic sampling off. With `filter` and `replace` the number of prompts that a step takes from the data varies, so
    `epochs` only determines the number of steps."""
    max_sample_batches: int = config_field(30, range=AT_LEAST_MINUS_ONE)
    """Maximum number of batches of prompts that are drawn for one step. The run stops if too few of their groups are
    useful. -1 sets no limit."""
    min_replace_ratio: float = config_field(0.3, range=FRACTION)
    """Minimum useful share of the batch for `replace`. Below it, `replace` drops the other groups and draws more
    prompts."""


@dataclass
class ClipCovConfig(Section):
    """Clip-Cov (`policy_loss_type=clip_cov`): no loss on some tokens of high covariance of log-prob and advantage."""

    clip_ratio: float = config_field(0.0002, range=FRACTION)
    """Fraction of all tokens that are removed from the loss."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of tokens that may be removed."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance of tokens that may be removed."""


@dataclass
class KLCovConfig(Section):
    """KL-Cov (`policy_loss_type=kl_cov`): a KL penalty on tokens with a high covariance of log-prob and advantage."""

    kl_cov_frac: float = config_field(0.2, range=FRACTION)
    """Fraction of all tokens that get the KL penalty: those with the highest covariance."""
    ppo_kl_coef: float = config_field(1.0, range=NON_NEGATIVE)
    """Coefficient of the KL penalty."""


@dataclass
class CISPOConfig(Section):
    """CISPO (`policy_loss_type=cispo`): REINFORCE with a clipped importance weight."""

    cispo_eps_clip_low: float = config_field(0.0, range=NON_NEGATIVE, aliases="clip_low")
    """The importance weight is clipped from below at 1 minus this."""
    cispo_eps_clip_high: float = config_field(5.0, range=NON_NEGATIVE, aliases="clip_high")
    """The importance weight is clipped from above at 1 plus this."""
    cispo_anchor: str = config_field("old", choices=("old", "rollout"), aliases="trainer.algorithm.cispo_anchor")
    """Denominator of the importance weight: the trainer's log-probs before the step's first update (`old`), or the
    engine's log-probs (`rollout`)."""


@dataclass
class DPPOConfig(Section):
    """DPPO (`policy_loss_type=dppo_tv` or `dppo_kl`): a trust region around the engine's probability of a token."""

    delta_low: float = config_field(0.2, range=NON_NEGATIVE)
    """With `dppo_tv`, a token whose probability is below the engine's by more than this gets no gradient that would
    lower it further."""
    delta_high: float = config_field(0.2, range=NON_NEGATIVE)
    """With `dppo_tv`, a token whose probability is above the engine's by more than this gets no gradient that would
    raise it further."""
    tv_threshold: float | None = config_field(None, range=NON_NEGATIVE)
    """Value of both `delta_low` and `delta_high`. It cannot be combined with either. null uses these two keys."""
    kl_threshold: float = config_field(0.05, range=NON_NEGATIVE)
    """With `dppo_kl`, the bound of the binary KL divergence (nats) between a token's two probabilities. Beyond it the
    token gets no gradient that would move its probability further away."""


@dataclass
class OverlongBufferConfig(Section):
    """DAPO's soft penalty on responses that come close to `max_generate_length` (arXiv:2503.14476, eq. 13)."""

    len: int = config_field(0, range=NON_NEGATIVE, aliases="trainer.algorithm.overlong_buffer_len")
    """Length (tokens) of the zone before the limit in which the penalty grows from 0 to `penalty_factor`. 0 turns the
    penalty off. A conversation is penalized for its longest turn."""
    penalty_factor: float = config_field(
        1.0, range=NON_NEGATIVE, aliases="trainer.algorithm.overlong_buffer_penalty_factor"
    )
    """Full penalty. It is subtracted from the reward of a response that reaches the limit, and of every response that
    was truncated by length."""


@dataclass
class SFTConfig(Section):
    """Supervised fine-tuning (`skyrl_train.entrypoints.main_sft`)."""

    loss_type: str = config_field("sft", choices=SFT_LOSSES, allows_plugins=True)
    """Loss function. `sft` is the negative log-likelihood. `minor_sft` gives less weight to a sequence that the policy
    already finds more likely than the reference does."""
    minor_beta: float = config_field(0.1, range=POSITIVE)
    """Temperature of `minor_sft`."""


@dataclass
class AlgorithmConfig(Section):
    """Advantage estimation, policy loss and regularization."""

    advantage_estimator: str = config_field("grpo", choices=ADVANTAGE_ESTIMATORS, allows_plugins=True)
    """Estimator that computes advantages from rewards."""
    kl_ctrl: KLCtrlConfig = config_field(factory=KLCtrlConfig)
    kl_estimator_type: str = config_field("k3", choices=KL_ESTIMATORS, allows_plugins=True)
    """Estimator of the KL divergence from the reference."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reward. Cannot be combined with `use_kl_loss`."""
    use_kl_loss: bool = True
    """Add the KL divergence to the loss. Cannot be combined with `use_kl_in_reward`."""
    kl_loss_coef: float = config_field(0.001, range=NON_NEGATIVE, typical_range=Range(1e-6, 10))
    """Coefficient of the KL divergence in the loss or in the reward. With 0 the KL divergence needs no reference
    model."""
    use_entropy_loss: bool = False
    """Subtract the policy's entropy, multiplied by `entropy_loss_coef`, from the loss."""
    entropy_loss_coef: float = config_field(0.01, range=NON_NEGATIVE, typical_range=Range(1e-6, 1))
    """Coefficient of the entropy with `use_entropy_loss`."""
    advantage_batch_normalize: bool = False
    """Normalize the advantages of the whole batch to mean 0 and standard deviation 1."""
    value_head_prefix: str = "value_head"
    """Name of the critic's output layer."""
    policy_loss_type: str = config_field(
        "regular",
        choices=POLICY_LOSSES,
        allows_plugins=True,
        aliases="ppo_loss_type",
        value_aliases={"dppo": "dppo_tv"},
    )
    """The policy loss. `regular` is PPO's clipped surrogate."""
    loss_reduction: str = config_field("token_mean", choices=REDUCTIONS, allows_plugins=True)
    """Reduction of the token losses to one number, always over the whole mini-batch."""
    grpo_norm_by_std: bool = True
    """With `advantage_estimator=grpo`, divide the advantages of a group by the standard deviation of its rewards. false
    is Dr. GRPO."""
    zero_variance_filter: bool = False
    """Mask groups whose rewards, penalties included, are all equal: they have no loss, but stay in the batch."""
    router_aux_loss_coef: float = config_field(0.0, range=NON_NEGATIVE)
    """Coefficient of the auxiliary loss that balances the load of a mixture of experts within each sequence
    (DeepSeek-V3, arXiv:2412.19437, eq. 17; averaged over layers). 0 turns it off."""
    lambd: float = config_field(1.0, range=FRACTION)
    """Lambda of generalized advantage estimation (`advantage_estimator=gae`)."""
    gamma: float = config_field(1.0, range=FRACTION)
    """Discount factor per token, for `advantage_estimator=gae` and `reinforce++`."""
    eps_clip_low: float = config_field(0.2, range=FRACTION)
    """The probability ratio is clipped from below at 1 minus this."""
    eps_clip_high: float = config_field(0.2, range=NON_NEGATIVE, typical_range=Range(1e-5, 5))
    """The probability ratio is clipped from above at 1 plus this."""
    clip_ratio_c: float = config_field(3.0, range=Range(1, exclusive_low=True))
    """Second bound of `policy_loss_type=dual_clip`, for tokens with a negative advantage."""
    tis_imp_ratio_cap: float = -1.0
    """Upper bound of a token's ratio with `use_tis`. It must be set to more than 0 with `use_tis=true`."""
    use_tis: bool = False
    """Older name of `off_policy_correction.tis_ratio_type=token`. The upper bound is then `tis_imp_ratio_cap`."""
    max_seq_len: int | None = config_field(None, range=AT_LEAST_ONE)
    """Denominator (tokens) of `loss_reduction=seq_mean_token_sum_norm`. null is `generator.max_input_length` plus
    `generator.sampling_params.max_generate_length`."""
    off_policy_correction: OffPolicyCorrectionConfig = config_field(factory=OffPolicyCorrectionConfig)
    sapo: SAPOConfig = config_field(factory=SAPOConfig)
    value_clip: float | None = config_field(0.2, range=POSITIVE)
    """The critic's loss clips a new value to within this distance of the old value. null does not clip."""
    dynamic_sampling: DynamicSamplingConfig = config_field(factory=DynamicSamplingConfig)
    clip_cov: ClipCovConfig = config_field(factory=ClipCovConfig)
    kl_cov: KLCovConfig = config_field(factory=KLCovConfig)
    cispo: CISPOConfig = config_field(factory=CISPOConfig)
    dppo: DPPOConfig = config_field(factory=DPPOConfig)
    overlong_buffer: OverlongBufferConfig = config_field(factory=OverlongBufferConfig)
    sft: SFTConfig = config_field(factory=SFTConfig)
