"""trainer.algorithm: advantages, losses and their coefficients."""

from __future__ import annotations

from dataclasses import dataclass, field

from skyrl_train.config.section import Section


@dataclass
class KLCtrlConfig(Section):
    """How the coefficient of the KL penalty in the reward moves."""

    type: str = "fixed"
    """`fixed` keeps `kl_loss_coef`; `adaptive` steers the measured KL towards `kl_target`."""
    kl_target: float = 0.1
    """KL per token (nats) that `adaptive` steers towards."""
    horizon: int = 10000
    """Samples over which `adaptive` reacts: larger is slower."""


@dataclass
class OffPolicyCorrectionConfig(Section):
    """Corrections for the distance between the policy that sampled and the policy that is trained."""

    tis_ratio_type: str | None = None
    """Truncated importance sampling per `token` or per `sequence`; null is off."""
    token_tis_ratio_clip_high: float = 2.0
    """Upper bound of a token's ratio."""
    sequence_tis_ratio_clip_high: float = 5.0
    """Upper bound of a sequence's ratio."""
    sequence_mask_metric: str | None = None
    """Mask whole sequences by the `product` or the `geometric` mean of their ratios; null is off."""
    geo_mask_high: float = 1.01
    """Sequences with a geometric mean above this are masked."""
    geo_mask_low: float = 0.99
    """Sequences with a geometric mean below this are masked."""
    product_mask_high: float = 2.0
    """Sequences with a product above this are masked."""
    product_mask_low: float = 0.5
    """Sequences with a product below this are masked."""
    outlier_token_is_threshold_low: float | None = None
    """A sequence with a token's ratio below this is masked; null is off."""
    outlier_token_is_threshold_high: float | None = None
    """A sequence with a token's ratio above this is masked; null is off."""
    token_mask_eps_low: float | None = None
    """A token with a ratio below 1 - this is masked; null is off."""
    token_mask_eps_high: float | None = None
    """A token with a ratio above 1 + this is masked; null is off."""


@dataclass
class SAPOConfig(Section):
    """Soft adaptive policy optimization (`policy_loss_type=sapo`)."""

    tau_pos: float = 1.0
    """Temperature of the gate where the advantage is positive."""
    tau_neg: float = 1.05
    """Temperature of the gate where the advantage is negative."""


@dataclass
class DynamicSamplingConfig(Section):
    """Training on useful groups alone: those whose rewards differ, before penalties for length."""

    type: str | None = None
    """`filter` drops other groups and draws more prompts until the batch is full; `replace` draws until
    `min_replace_ratio` of it are useful, and repeats those in the places of the others. null is off. A step then takes
    prompts of its own number from the data, so that passes over it (`epochs`) only say how many steps there are."""
    max_sample_batches: int = 30
    """Batches of prompts drawn for one step after which, if they are not enough, the run stops; -1 has no bound."""
    min_replace_ratio: float = 0.3
    """Share of useful groups below which `replace` drops the others and draws more prompts."""


@dataclass
class ClipCovConfig(Section):
    """Clip-Cov (`policy_loss_type=clip_cov`)."""

    clip_ratio: float = 0.0002
    """Share of tokens that are clipped."""
    clip_cov_lb: float = 1.0
    """Lower bound of the covariance that may be clipped."""
    clip_cov_ub: float = 5.0
    """Upper bound of the covariance that may be clipped."""


@dataclass
class KLCovConfig(Section):
    """KL-Cov (`policy_loss_type=kl_cov`)."""

    kl_cov_frac: float = 0.2
    """Share of tokens that get a KL penalty."""
    ppo_kl_coef: float = 1.0
    """Coefficient of that penalty."""


@dataclass
class CISPOConfig(Section):
    """CISPO (`policy_loss_type=cispo`)."""

    cispo_eps_clip_low: float = 0.0
    """The importance weight is at least 1 - this."""
    cispo_eps_clip_high: float = 5.0
    """The importance weight is at most 1 + this."""


@dataclass
class DPPOConfig(Section):
    """DPPO (`policy_loss_type=dppo_tv` or `dppo_kl`)."""

    tv_threshold: float = 0.2
    """`dppo_tv`: probabilities of a token may differ by this before its gradient is cut off."""
    kl_threshold: float = 0.05
    """`dppo_kl`: the same for the binary KL divergence (nats)."""


@dataclass
class OverlongBufferConfig(Section):
    """DAPO's soft penalty on responses that come close to `max_generate_length` (arXiv:2503.14476, eq. 13)."""

    len: int = 0
    """Tokens before the limit over which the penalty grows from 0 to all of it; 0 is off. A conversation pays for its
    longest turn."""
    penalty_factor: float = 1.0
    """What is subtracted from the reward at the limit, and from that of every response that was cut by length."""


@dataclass
class SFTConfig(Section):
    """Supervised fine-tuning (`skyrl_train.entrypoints.main_sft`)."""

    loss_type: str = "sft"
    """`sft` is the negative log-likelihood; `minor_sft` pulls less on what the policy prefers to the reference."""
    minor_beta: float = 0.1
    """Temperature of `minor_sft`."""


@dataclass
class AlgorithmConfig(Section):
    """How rewards become a gradient."""

    advantage_estimator: str = "grpo"
    """How advantages are computed."""
    kl_ctrl: KLCtrlConfig = field(default_factory=KLCtrlConfig)
    kl_estimator_type: str = "k3"
    """Estimator of the KL divergence to the reference: `k1`, `k2`, `k3`, `abs`, `k1+`, `k3+` or `k3_ratio`."""
    use_kl_in_reward: bool = False
    """Subtract the KL divergence from the reward. Not together with `use_kl_loss`."""
    use_kl_loss: bool = True
    """Add the KL divergence to the loss. Not together with `use_kl_in_reward`."""
    kl_loss_coef: float = 0.001
    """Coefficient of the KL divergence, in the loss or in the reward; 0 needs no reference model."""
    use_entropy_loss: bool = False
    """Subtract the entropy from the loss."""
    entropy_loss_coef: float = 0.01
    """Coefficient of the entropy."""
    advantage_batch_normalize: bool = False
    """Normalise advantages over the whole batch to mean 0 and standard deviation 1."""
    value_head_prefix: str = "value_head"
    """Name of the critic's output layer."""
    policy_loss_type: str = "regular"
    """`regular` is PPO's clipped surrogate."""
    loss_reduction: str = "token_mean"
    """`token_mean`, `sequence_mean`, `prompt_mean` or `seq_mean_token_sum_norm`; always over the whole mini-batch."""
    grpo_norm_by_std: bool = True
    """Divide a group's advantages by the standard deviation of its rewards; false is Dr. GRPO."""
    zero_variance_filter: bool = False
    """Keep groups whose rewards are all equal, penalties included, out of the loss; they stay in the batch."""
    lambd: float = 1.0
    """Lambda of generalised advantage estimation."""
    gamma: float = 1.0
    """Discount per token."""
    eps_clip_low: float = 0.2
    """The ratio is clipped below at 1 - this."""
    eps_clip_high: float = 0.2
    """The ratio is clipped above at 1 + this."""
    clip_ratio_c: float = 3.0
    """Second bound of `policy_loss_type=dual_clip`, where advantages are negative; above 1."""
    tis_imp_ratio_cap: float = -1.0
    """Upper bound of a token's ratio with `use_tis`."""
    use_tis: bool = False
    """The older name of `off_policy_correction.tis_ratio_type=token`."""
    max_seq_len: int | None = None
    """Denominator of `seq_mean_token_sum_norm`, in tokens; null is `max_input_length` + `max_generate_length`."""
    off_policy_correction: OffPolicyCorrectionConfig = field(default_factory=OffPolicyCorrectionConfig)
    sapo: SAPOConfig = field(default_factory=SAPOConfig)
    value_clip: float | None = 0.2
    """Values move at most this far from the old ones in an update."""
    dynamic_sampling: DynamicSamplingConfig = field(default_factory=DynamicSamplingConfig)
    clip_cov: ClipCovConfig = field(default_factory=ClipCovConfig)
    kl_cov: KLCovConfig = field(default_factory=KLCovConfig)
    cispo: CISPOConfig = field(default_factory=CISPOConfig)
    dppo: DPPOConfig = field(default_factory=DPPOConfig)
    overlong_buffer: OverlongBufferConfig = field(default_factory=OverlongBufferConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
