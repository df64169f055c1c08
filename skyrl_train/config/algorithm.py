"""trainer.algorithm: advantages, losses and their coefficients."""

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
    """How the coefficient of the KL penalty on rewards changes during training."""

    type: str = config_field("fixed", choices=("fixed", "adaptive"))
    """`fixed` keeps the coefficient at `kl_loss_coef`; `adaptive` changes it to bring the measured KL divergence close
    to `kl_target`."""
    kl_target: float = config_field(0.1, range=POSITIVE)
    """KL divergence per token (nats) that `adaptive` aims at."""
    horizon: int = config_field(10000, range=AT_LEAST_ONE)
    """Number of samples over which `adaptive` reacts; a larger number reacts more slowly."""


@dataclass
class OffPolicyCorrectionConfig(Section):
    """Corrections for the difference between the policy that sampled a rollout and the policy that is trained on it.

    The ratio of a token is its probability under the trainer's policy before the update, divided by its probability
    under the engine's policy. The ratio of a sequence is the product over its tokens.
    """

    tis_ratio_type: str | None = config_field(None, choices=(None, "token", "sequence"), spellings={"none": None})
    """Truncated importance sampling: weight the loss by the ratio of each `token` or of the whole `sequence`; null
    turns it off."""
    token_tis_ratio_clip_high: float = config_field(2.0, range=POSITIVE)
    """Upper bound of the ratio of a token."""
    sequence_tis_ratio_clip_high: float = config_field(5.0, range=POSITIVE)
    """Upper bound of the ratio of a sequence."""
    sequence_mask_metric: str | None = config_field(
        None, choices=(None, "product", "geometric"), spellings={"none": None}
    )
    """Mask whole sequences by the `product` or by the `geometric` mean of the ratios of their tokens; null turns it
    off."""
    geo_mask_high: float = config_field(1.01, range=POSITIVE)
    """Sequences whose geometric mean is above this are masked."""
    geo_mask_low: float = config_field(0.99, range=NON_NEGATIVE)
    """Sequences whose geometric mean is below this are masked."""
    product_mask_high: float = config_field(2.0, range=POSITIVE)
    """Sequences whose product is above this are masked."""
    product_mask_low: float = config_field(0.5, range=NON_NEGATIVE)
    """Sequences whose product is below this are masked."""
    outlier_token_is_threshold_low: float | None = config_field(None, range=NON_NEGATIVE)
    """A sequence is masked if the ratio of any of its tokens is below this; null turns it off."""
    outlier_token_is_threshold_high: float | None = config_field(None, range=POSITIVE)
    """A sequence is masked if the ratio of any of its tokens is above this; null turns it off."""
    token_mask_eps_low: float | None = config_field(None, range=NON_NEGATIVE)
    """A token is masked if its ratio is below 1 minus this; null turns it off."""
    token_mask_eps_high: float | None = config_field(None, range=NON_NEGATIVE)
    """A token is masked if its ratio is above 1 plus this; null turns it off."""
    token_mask_is_threshold_low: float | None = config_field(None, range=NON_NEGATIVE)
    """SkyRL's newer way to write `token_mask_eps_low`: the ratio itself; null turns it off."""
    token_mask_is_threshold_high: float | None = config_field(None, range=POSITIVE)
    """SkyRL's newer way to write `token_mask_eps_high`: the ratio itself; null turns it off."""


@dataclass
class SAPOConfig(Section):
    """Soft adaptive policy optimization (`policy_loss_type=sapo`)."""

    tau_pos: float = config_field(1.0, range=POSITIVE)
    """Temperature of the gate for tokens with a positive advantage."""
    tau_neg: float = config_field(1.05, range=POSITIVE)
    """Temperature of the gate for tokens with a negative advantage."""


@dataclass
class DynamicSamplingConfig(Section):
    """Training on useful groups only. A group is useful if its rewards, before penalties for length, differ."""

    type: str | None = config_field(None, choices=(None, "filter", "replace"), spellings={"none": None})
    """`filter` drops the other groups and draws more prompts until the batch is full. `replace` draws prompts until
    `min_replace_ratio` of the batch is useful, and then repeats the useful groups in place of the others. null turns
    dynamic sampling off. With either, the number of prompts that a step takes from the data varies, so `epochs` only
    determines the number of steps."""
    max_sample_batches: int = config_field(30, range=AT_LEAST_MINUS_ONE)
    """The run stops if this many batches of prompts were drawn for one step and too few groups are useful; -1 sets no
    limit."""
    min_replace_ratio: float = config_field(0.3, range=FRACTION)
    """If a smaller share of the batch is useful, `replace` drops the other groups and draws more prompts."""


@dataclass
class ClipCovConfig(Section):
    """Clip-Cov (`policy_loss_type=clip_cov`): no loss on some tokens of high covariance of log-prob and advantage."""

    clip_ratio: float = config_field(0.0002, range=FRACTION)
    """Share of all tokens that are clipped."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance of tokens that may be clipped."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance of tokens that may be clipped."""


@dataclass
class KLCovConfig(Section):
    """KL-Cov (`policy_loss_type=kl_cov`): a penalty on the tokens of highest covariance of log-prob and advantage."""

    kl_cov_frac: float = config_field(0.2, range=FRACTION)
    """Share of all tokens that get a KL penalty."""
    ppo_kl_coef: float = config_field(1.0, range=NON_NEGATIVE)
    """Coefficient of that penalty."""


@dataclass
class CISPOConfig(Section):
    """CISPO (`policy_loss_type=cispo`)."""

    cispo_eps_clip_low: float = config_field(0.0, range=NON_NEGATIVE, aliases="clip_low")
    """The importance weight is at least 1 minus this."""
    cispo_eps_clip_high: float = config_field(5.0, range=NON_NEGATIVE, aliases="clip_high")
    """The importance weight is at most 1 plus this."""
    cispo_anchor: str = config_field("old", choices=("old", "rollout"), aliases="trainer.algorithm.cispo_anchor")
    """Which log-probs the importance weight is taken against: the trainer's before the step's first update (`old`), or
    the engine's (`rollout`)."""


@dataclass
class DPPOConfig(Section):
    """DPPO (`policy_loss_type=dppo_tv` or `dppo_kl`)."""

    delta_low: float = config_field(0.2, range=NON_NEGATIVE)
    """`dppo_tv`: a token whose probability is below the engine's by more than this gets no gradient that would lower it
    further."""
    delta_high: float = config_field(0.2, range=NON_NEGATIVE)
    """`dppo_tv`: a token whose probability is above the engine's by more than this gets no gradient that would raise it
    further."""
    tv_threshold: float | None = config_field(None, range=NON_NEGATIVE)
    """Both bounds at once, instead of `delta_low` and `delta_high`."""
    kl_threshold: float = config_field(0.05, range=NON_NEGATIVE)
    """`dppo_kl`: the same for the binary KL divergence (nats) between the two probabilities."""


@dataclass
class OverlongBufferConfig(Section):
    """DAPO's soft penalty on responses that come close to `max_generate_length` (arXiv:2503.14476, eq. 13)."""

    len: int = config_field(0, range=NON_NEGATIVE, aliases="trainer.algorithm.overlong_buffer_len")
    """Length (tokens) of the zone before the limit in which the penalty grows from 0 to `penalty_factor`; 0 turns the
    penalty off. A conversation is penalised for its longest turn."""
    penalty_factor: float = config_field(
        1.0, range=NON_NEGATIVE, aliases="trainer.algorithm.overlong_buffer_penalty_factor"
    )
    """The full penalty. It is subtracted from the reward of a response that reaches the limit, and of every response
    that was cut off by length."""


@dataclass
class SFTConfig(Section):
    """Supervised fine-tuning (`skyrl_train.entrypoints.main_sft`)."""

    loss_type: str = config_field("sft", choices=SFT_LOSSES, plugins=True)
    """`sft` is the negative log-likelihood; `minor_sft` pulls less on a sequence that the policy already finds likelier
    than the reference does."""
    minor_beta: float = config_field(0.1, range=POSITIVE)
    """Temperature of `minor_sft`."""


@dataclass
class AlgorithmConfig(Section):
    """How rewards become a gradient."""

    advantage_estimator: str = config_field("grpo", choices=ADVANTAGE_ESTIMATORS, plugins=True)
    """How advantages are computed from rewards."""
    kl_ctrl: KLCtrlConfig = config_field(factory=KLCtrlConfig)
    kl_estimator_type: str = config_field("k3", choices=KL_ESTIMATORS, plugins=True)
    """Estimator of the KL divergence to the reference."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reward. Cannot be combined with `use_kl_loss`."""
    use_kl_loss: bool = True
    """Add the KL divergence to the loss. Cannot be combined with `use_kl_in_reward`."""
    kl_loss_coef: float = config_field(0.001, range=NON_NEGATIVE, usual=Range(1e-6, 10))
    """Coefficient of the KL divergence, in the loss or in the reward. With 0 no reference model is needed."""
    use_entropy_loss: bool = False
    """Subtract the entropy from the loss."""
    entropy_loss_coef: float = config_field(0.01, range=NON_NEGATIVE, usual=Range(1e-6, 1))
    """Coefficient of the entropy."""
    advantage_batch_normalize: bool = False
    """Normalise advantages over the whole batch to mean 0 and standard deviation 1."""
    value_head_prefix: str = "value_head"
    """Name of the critic's output layer."""
    policy_loss_type: str = config_field(
        "regular", choices=POLICY_LOSSES, plugins=True, aliases="ppo_loss_type", spellings={"dppo": "dppo_tv"}
    )
    """The policy loss. `regular` is PPO's clipped surrogate."""
    loss_reduction: str = config_field("token_mean", choices=REDUCTIONS, plugins=True)
    """How the losses of tokens are combined, always over the whole mini-batch."""
    grpo_norm_by_std: bool = True
    """Divide the advantages of a group by the standard deviation of its rewards; false is Dr. GRPO."""
    zero_variance_filter: bool = False
    """Keep groups whose rewards, penalties included, are all equal out of the loss. They stay in the batch."""
    router_aux_loss_coef: float = config_field(0.0, range=NON_NEGATIVE)
    """Coefficient of a loss that spreads a mixture of experts' tokens evenly over them, sequence by sequence
    (DeepSeek-V3, arXiv:2412.19437, eq. 17; the mean over layers). 0 turns it off."""
    lambd: float = config_field(1.0, range=FRACTION)
    """Lambda of generalised advantage estimation."""
    gamma: float = config_field(1.0, range=FRACTION)
    """Discount per token."""
    eps_clip_low: float = config_field(0.2, range=FRACTION)
    """The probability ratio is clipped from below at 1 minus this."""
    eps_clip_high: float = config_field(0.2, range=NON_NEGATIVE, usual=Range(1e-5, 5))
    """The probability ratio is clipped from above at 1 plus this."""
    clip_ratio_c: float = config_field(3.0, range=Range(1, exclusive_low=True))
    """The second bound of `policy_loss_type=dual_clip`, for tokens with a negative advantage."""
    tis_imp_ratio_cap: float = -1.0
    """Upper bound of the ratio of a token with `use_tis`."""
    use_tis: bool = False
    """Older name of `off_policy_correction.tis_ratio_type=token`."""
    max_seq_len: int | None = config_field(None, range=AT_LEAST_ONE)
    """Denominator (tokens) of `seq_mean_token_sum_norm`; null is `max_input_length` + `max_generate_length`."""
    off_policy_correction: OffPolicyCorrectionConfig = config_field(factory=OffPolicyCorrectionConfig)
    sapo: SAPOConfig = config_field(factory=SAPOConfig)
    value_clip: float | None = config_field(0.2, range=POSITIVE)
    """The critic's loss clips new values to within this distance of the old ones; null does not clip."""
    dynamic_sampling: DynamicSamplingConfig = config_field(factory=DynamicSamplingConfig)
    clip_cov: ClipCovConfig = config_field(factory=ClipCovConfig)
    kl_cov: KLCovConfig = config_field(factory=KLCovConfig)
    cispo: CISPOConfig = config_field(factory=CISPOConfig)
    dppo: DPPOConfig = config_field(factory=DPPOConfig)
    overlong_buffer: OverlongBufferConfig = config_field(factory=OverlongBufferConfig)
    sft: SFTConfig = config_field(factory=SFTConfig)
