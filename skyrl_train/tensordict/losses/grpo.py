"""GRPO on tensordicts: TorchRL's names and arguments over the trainer's own losses, KL estimator and reductions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torchrl.objectives.llm import grpo as torchrl_grpo

from skyrl_train.algorithms.corrections import effective_sample_size
from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.losses import cispo, clipped_surrogate
from skyrl_train.algorithms.ratios import importance_ratios
from skyrl_train.algorithms.reductions import sequence_mean, token_mean
from skyrl_train.tensordict.losses.scoring import (
    ASSISTANT,
    ATTENTION,
    PROMPT,
    Scored,
    check_actor,
    check_choice,
    read,
    score,
)
from skyrl_train.tensordict.ragged import Key, flattened

AGGREGATIONS = {"token_mean": token_mean, "prompt_mean": sequence_mean}
"""TorchRL's names; its `prompt_mean` gives every sequence the same weight, like the trainer's `sequence_mean`."""
REDUCTIONS = (None, "mean", "sum", "none")
MASKS = {"sft": [PROMPT, ATTENTION], "rlhf": [ASSISTANT], "generic": [ATTENTION]}
"""The entries that each masking strategy reads."""
ADVANTAGE_SOURCE = "Use a replay buffer with the transform MCAdvantage"
REFERENCE_SOURCE = (
    "Append KLRewardTransform(add_to_reward=False), or RetrieveLogProb(log_probs_full_key=('ref_log_probs', 'full')), "
    "to the environment"
)


def total_loss(self: Any) -> Any:
    """Return the sum of all loss_*, on which to call `backward`."""
    return sum(value for name, value in self.items() if name.startswith("loss_"))


class GRPOLossOutput(torchrl_grpo.GRPOLossOutput):  # type: ignore[misc]
    """Losses and statistics over the tokens that count, as float64 scalars; None if their term is disabled.

    `clip_fraction` is the share of clipped tokens, `kl_approx` the mean of sample_log_prob - log_prob in nats, `ESS`
    the effective sample size of the importance ratios, divided by the number of tokens (1 if on-policy). With
    aggregation or reduction "none", the loss_* are rectangles [B, L], 0 on tokens that do not count.
    """

    loss = property(total_loss)


class DAPOLossOutput(torchrl_grpo.DAPOLossOutput):  # type: ignore[misc]
    """The fields of GRPOLossOutput, from DAPO."""

    loss = property(total_loss)


class CISPOLossOutput(torchrl_grpo.CISPOLossOutput):  # type: ignore[misc]
    """The fields of GRPOLossOutput, from CISPO."""

    loss = property(total_loss)


class GRPOLoss(torchrl_grpo.GRPOLoss):  # type: ignore[misc]
    """Clipped policy gradient with optional entropy bonus and KL terms (arXiv:2402.03300). For actors see scoring.py.

    loss_objective       sum_t w_t -min(r A, clip(r, 1 - low, 1 + high) A)
    loss_entropy         sum_t w_t -entropy_coeff H_t
    loss_kl_to_*         sum_t w_t coeff k3(log_prob, reference's or sampling policy's)

    w are the weights of the aggregation over the tokens that count: 1 / tokens for "token_mean", 1 / (tokens of the
    sequence * sequences) for "prompt_mean". Sums are float64, like the trainer's. `set_keys` changes the keys `action`,
    `sample_log_prob`, `advantage` (one value per row or per token) and `ref_log_probs`.
    """

    output_type: Any = GRPOLossOutput

    def __init__(
        self,
        actor_network: Any = None,
        *,
        clip_epsilon: float | tuple[float, float] = 0.2,
        kl_mask_threshold: float | None = None,
        aggregation: str = "token_mean",
        entropy_bonus: bool = True,
        samples_mc_entropy: int = 1,
        entropy_coeff: float = 0.01,
        gamma: float | None = None,
        reduction: str | None = None,
        clip_value: float | None = None,
        kl_to_ref_coeff: float | None = None,
        kl_to_inference_coeff: float | None = None,
        device: torch.device | str | None = None,
        masking_strategy: str = "sft",
        ref_log_prob_padding_side: str = "left",
        ref_log_prob_padding_value: float = 0.0,
    ):
        """Configure the loss.

        Args:
            actor_network: The policy, which computes log-probs; see scoring.py.
            clip_epsilon: Clipping range (low, high) of the ratio, or one number for both.
            kl_mask_threshold: Leave out tokens for which half the squared log-ratio to the sampling policy is larger.
            aggregation: "token_mean", "prompt_mean", or "none" for token-level losses.
            entropy_bonus: Add the entropy term, which needs a policy with a distribution.
            samples_mc_entropy: Number of samples that estimate an entropy without a closed form.
            entropy_coeff: Coefficient of the entropy.
            gamma: Only None.
            reduction: "mean" (also None), "sum", or "none" for token-level losses.
            clip_value: Only None: GRPO has no critic.
            kl_to_ref_coeff: Coefficient of the KL to the reference; None and 0 turn it off and need no reference.
            kl_to_inference_coeff: Coefficient of the KL to the sampling policy; None turns it off.
            device: Device of the clipping bounds.
            masking_strategy: "sft", "rlhf" or "generic"; see `scoring.token_mask`.
            ref_log_prob_padding_side: Accepted for TorchRL's sake: padding is never read.
            ref_log_prob_padding_value: The same.

        Raises:
            ValueError: For a value that is not allowed, or an actor with generate=True.
        """
        settings = {**locals(), "clip_epsilon": (0.0, 0.0)}
        pair = (clip_epsilon, clip_epsilon) if isinstance(clip_epsilon, int | float) else clip_epsilon
        good = isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(one, int | float) for one in pair)
        _check(good and min(pair) >= 0, "clip_epsilon", clip_epsilon, "a number, or two, of at least 0")
        low, high = pair
        check_choice("aggregation", aggregation, (*AGGREGATIONS, "none"))
        check_choice("reduction", reduction, REDUCTIONS)
        check_choice("masking_strategy", masking_strategy, MASKS)
        _check(gamma is None, "gamma", gamma, "None, because GRPO does not discount: discount advantages beforehand")
        _check(clip_value is None, "clip_value", clip_value, "None, because GRPO has no critic")
        _check(samples_mc_entropy >= 1, "samples_mc_entropy", samples_mc_entropy, "at least 1")
        check_actor(actor_network)
        # super() of a subclass is TorchRL's DAPO, with another signature in 0.14.0
        torchrl_grpo.GRPOLoss.__init__(**settings)
        for name, value in (("low", low), ("high", high)):  # float32, as in TorchRL, would round them
            bound = torch.tensor(value, dtype=torch.float64, device=self.clip_epsilon_low.device)
            self.register_buffer(f"clip_epsilon_{name}", bound)
        self.out_keys = ["loss_objective", "clip_fraction", "kl_approx", "ESS"]
        self.out_keys += ["entropy", "loss_entropy"] if entropy_bonus else []
        self.out_keys += ["loss_kl_to_ref", "kl_to_ref"] if kl_to_ref_coeff else []
        self.out_keys += ["loss_kl_to_inference", "kl_to_inference"] if kl_to_inference_coeff is not None else []

    @property
    def clip_epsilon(self) -> tuple[float, float]:
        """Clipping range (low, high) of the ratio."""
        return float(self.clip_epsilon_low), float(self.clip_epsilon_high)

    def _set_in_keys(self) -> None:
        names = self.tensor_keys
        reference = [names.ref_log_probs] if getattr(self, "kl_to_ref_coeff", None) else []
        self.in_keys = [names.action, names.sample_log_prob, names.advantage, *reference, *MASKS[self.masking_strategy]]

    def policy_loss(self, logprobs: Tensor, advantages: Tensor, mask: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens' losses and a mask of those that were clipped, both [T]; variants of GRPO override this.

        `logprobs`, `advantages`, `mask` and `old` (log-probs of sampling) are [T].
        """
        low, high = self.clip_epsilon
        return clipped_surrogate(logprobs, advantages, mask, old_logprobs=old, eps_clip_low=low, eps_clip_high=high)

    def forward(self, tensordict: TensorDictBase) -> Any:
        """Compute the losses of the sequences in a tensordict of any batch size, which is not changed.

        Returns an instance of `output_type`. Raises ValueError for a missing action or advantage or for different
        shapes, KeyError for missing log-probs, RuntimeError if the log-probs of sampling or of the reference require a
        gradient.
        """
        rows, names = flattened(tensordict), self.tensor_keys
        advantages = read(rows, names.advantage, "advantage", source=ADVANTAGE_SOURCE)
        read(rows, names.action, "action")
        old = read(rows, names.sample_log_prob, "log-prob of sampling", KeyError)
        samples = self.samples_mc_entropy if self.entropy_bonus else 0
        scored = score(self.actor_network, rows, names.action, self.masking_strategy, entropy=samples)
        layout = scored.layout
        advantage = layout.spread(advantages, names.advantage).to(scored.logprobs.device)
        inference = constant(layout.flat(old, names.sample_log_prob), names.sample_log_prob)
        reference = None
        if self.kl_to_ref_coeff:
            values = read(rows, names.ref_log_probs, "ref log-prob", KeyError, source=REFERENCE_SOURCE)
            reference = constant(layout.flat(values, names.ref_log_probs), names.ref_log_probs)
        return self._output(scored, advantage, inference, reference)

    def _output(self, scored: Scored, advantage: Tensor, inference: Tensor, reference: Tensor | None) -> Any:
        logprobs, mask = scored.logprobs, scored.mask
        if self.kl_mask_threshold is not None:
            distance = (logprobs.detach() - inference).square() / 2
            mask = mask & (distance <= self.kl_mask_threshold)
        values, clipped = self.policy_loss(logprobs, advantage, mask, inference)
        frozen = logprobs.detach()
        found = {
            "loss_objective": self._reduced(values, mask, scored),
            "clip_fraction": mean_over(clipped, mask),
            "kl_approx": mean_over(inference - frozen, mask),
            "ESS": effective_sample_size(importance_ratios(frozen, inference, mask)[mask]),
        }
        if scored.entropy is not None:
            entropy = torch.where(mask, scored.entropy, 0.0)
            found["entropy"] = mean_over(entropy.detach(), mask)
            found["loss_entropy"] = -self.entropy_coeff * self._reduced(entropy, mask, scored)
        for name, coefficient, other in (
            ("kl_to_ref", self.kl_to_ref_coeff, reference),
            ("kl_to_inference", self.kl_to_inference_coeff, inference),
        ):
            if coefficient is not None and other is not None:
                kl = k3(logprobs, other, mask)
                found[name] = mean_over(kl.detach(), mask)
                found[f"loss_{name}"] = coefficient * self._reduced(kl, mask, scored)
        return self.output_type(**found, batch_size=[])

    def _reduced(self, values: Tensor, mask: Tensor, scored: Scored) -> Tensor:
        """[T], 0 outside the mask, to float64: a scalar, or [B, L] without reduction."""
        if "none" in (self.aggregation, self.reduction):
            return scored.layout.unflatten(values.double())
        if self.reduction == "sum":
            return values.double().sum()
        ids = scored.layout.sequence_ids
        return (values * AGGREGATIONS[self.aggregation](mask, ids, ids, max_seq_len=1)).sum()


class DAPO(GRPOLoss, torchrl_grpo.DAPO):  # type: ignore[misc]
    """GRPO with a wider upper bound (Clip-Higher, arXiv:2503.14476) and the same weight for every token."""

    output_type: Any = DAPOLossOutput

    def __init__(
        self,
        actor_network: Any = None,
        *,
        clip_epsilon: float | tuple[float, float] = (0.2, 0.28),
        **settings: Any,
    ):
        super().__init__(actor_network, clip_epsilon=clip_epsilon, **settings)


class CISPO(GRPOLoss, torchrl_grpo.CISPOLoss):  # type: ignore[misc]
    """A loss in which clipped tokens keep their gradient (arXiv:2506.13585, eq. 4-5).

    loss_objective       sum_t w_t -sg[clip(r, 1 - low, 1 + high)] A log_prob
    """

    output_type: Any = CISPOLossOutput

    def policy_loss(self, logprobs: Tensor, advantages: Tensor, mask: Tensor, old: Tensor) -> tuple[Tensor, Tensor]:
        clip = {"cispo_eps_clip_low": self.clip_epsilon[0], "cispo_eps_clip_high": self.clip_epsilon[1]}
        return cispo(logprobs, advantages, mask, old_logprobs=old, frozen_logprobs=logprobs.detach(), **clip)


CISPOLoss = CISPO
"""TorchRL's name for it."""


def mean_over(values: Tensor, mask: Tensor) -> Tensor:
    """Return the float64 mean of `values` over the tokens in the mask; 0 if there are none."""
    return torch.where(mask, values.double(), 0.0).sum() / mask.sum().clamp(min=1)


def constant(values: Tensor, key: Key) -> Tensor:
    """Return `values` unchanged. Raises RuntimeError, naming `key`, if they require a gradient."""
    if values.requires_grad:
        raise RuntimeError(f"{key!r} requires a gradient; log-probs of another policy are constants, so detach them.")
    return values


def _check(good: bool, name: str, value: Any, allowed: str) -> None:
    if not good:
        raise ValueError(f"{name}={value!r} must be {allowed}.")
