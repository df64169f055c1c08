"""Transforms that add a reference model's log-probs, and a KL penalty in the reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack

from skyrl_train.tensordict.containers import LogProbs
from skyrl_train.tensordict.envs.base import Transform, keys_of

FullKey = tuple[str, str]


def check_scores(model: Any, what: str) -> None:
    """Raise ValueError for a model that generates, or that returns no log-probs."""
    if getattr(model, "generate", False) is not False:
        raise ValueError(
            f"{what} needs a model made with generate=False, which scores given tokens. Use "
            "model.get_new_version(generate=False)."
        )
    if getattr(model, "return_log_probs", True) is False:
        raise ValueError(
            f"{what} needs a model with return_log_probs=True. Use model.get_new_version(return_log_probs=True)."
        )


class _Scores(Transform):
    """A base of transforms with a model that scores whole sequences, row by row."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Apply the transform to data [B] or [B, T] that already has "next", as in a step; changes `tensordict`."""
        return tensordict.set("next", self._following(tensordict, tensordict["next"]))

    def _following(self, tensordict: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        if tensordict.batch_dims > 1:
            parts = zip(tensordict.unbind(0), following.unbind(0), strict=True)
            return lazy_stack([self._following(*part) for part in parts])
        return self.after_step(tensordict, lazy_stack([row.copy() for row in following.unbind(0)]))


class RetrieveLogProb(_Scores):
    """A transform that writes `model`'s log-probs of every step into "next", [L] per row, in nats.

    The key is `log_probs_full_key`.

    If the policy wrote ("tokens", "full") and masks, these tokens are scored, and each value is at its token's
    position. Otherwise, a model in history mode renders the conversation, and the values belong to the ids that it
    makes. With `assistant_only`, tokens that the assistant did not write have 0.

    Args:
        model: A policy wrapper with generate=False and its own `log_probs_key`, e.g. "ref_log_probs".
        log_probs_full_key: (container, "full"); the model's own by default.
        detach: Detach the log-probs; with detach=False the model's log-probs must have a gradient, else ValueError.
        device: The result's device; the model's by default.
        tokenizer_kwargs, tokenizer, padding_side: Accepted without effect, for compatibility with TorchRL: the model
            has its own tokenizer, and rows are not padded.
    """

    def __init__(
        self,
        model: Any,
        *,
        log_probs_full_key: FullKey | None = None,
        assistant_only: bool = True,
        tokenizer_kwargs: Any = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        padding_side: str = "left",
    ):
        check_scores(model, "RetrieveLogProb")
        mode = getattr(model, "input_mode", "history")
        if assistant_only and mode != "history":
            raise ValueError(
                f"assistant_only=True needs a model with input_mode='history', got {mode!r}. Use such a model, or "
                "assistant_only=False."
            )
        self.model, self.mode = model, mode
        renewed = getattr(model, "get_new_version", None)
        self._of_tokens = model if mode == "tokens" or renewed is None else renewed(input_mode="tokens")
        self.source: FullKey = (getattr(model, "log_probs_key", "log_probs"), "full")
        self.log_probs_full_key: FullKey = log_probs_full_key or self.source
        self.of_one_step = (self.log_probs_full_key[0],)
        self.assistant_only, self.detach, self.device = assistant_only, detach, device

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write log-probs into data [B] or [B, T] under "next" or, without "next", beside the tokens."""
        if "next" in keys_of(tensordict):
            return super().forward(tensordict)
        container = self.log_probs_full_key[0]
        return tensordict.set(container, self._following(tensordict, tensordict).get(container))

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        """Add the model's log-probs of the step's tokens to `following`.

        Raises:
            ValueError: `detach` is False, but the model's log-probs have no gradient.
        """
        sampled = [_has_tokens(row) for row in root.unbind(0)]
        model, mode = (self._of_tokens, "tokens") if all(sampled) else (self.model, self.mode)
        scored = scored_by(model, root, mode, with_gradient=not self.detach)
        for row, ref, out in zip(root.unbind(0), scored.unbind(0), following.unbind(0), strict=True):
            values = ref.get(self.source)
            mask = ref.get(("masks", "all_assistant_mask"), None) if self.assistant_only else None
            if all(sampled):
                values = _placed(row, _unpadded(ref, values))
                mask = row.get(("masks", "all_assistant_mask")) if self.assistant_only else None
            if mask is not None:
                values = values.masked_fill(~mask.to(values.device), 0.0)
            if not self.detach and not values.requires_grad:
                raise ValueError(
                    "detach=False needs log-probs with a gradient, but the model's have none. Use its get_dist in a "
                    "loss."
                )
            values = values.detach() if self.detach else values
            values = values if self.device is None else values.to(self.device)
            if out.get(self.log_probs_full_key[0], None) is None:
                out.set(self.log_probs_full_key[0], LogProbs(batch_size=[]))
            out.set(self.log_probs_full_key, values)
        return following


def scored_by(model: Any, root: TensorDictBase, mode: str, *, with_gradient: bool = False) -> TensorDictBase:
    """Return the output of a model that scores the sequences of a tensordict, which is not changed.

    Args:
        model: A wrapper with generate=False.
        root: The tensordict; the model gets its entries `mode` and "masks".
        mode: Key of the sequences: "tokens", "text" or "history".
        with_gradient: True to compute gradients.
    """
    with torch.set_grad_enabled(with_gradient):
        found: TensorDictBase = model(root.select(mode, "masks", strict=False).copy())
    return found


class KLRewardTransform(_Scores):
    """A transform that subtracts `coef` × KL(policy ‖ reference) from the reward, token by token.

    A step's reward is assigned to its last token, so that the sum over tokens is reward − `coef` × Σ kl, however long
    the sequence is. A reward that already has one value per token keeps its values. The padding of a policy with
    `pad_output=True` is identified by its masks, and gets 0.

    The estimate for a token is log π(token) − log π_ref(token), on the tokens of the assistant (`assistant_only`) or on
    all tokens after the prompt, and 0 elsewhere. Writes into "next", [L, 1] per row over the tokens of
    ("tokens", "full"): "kl_penalty", and the reward minus coef × kl; also the reference's log-probs [L] under
    ("ref_log_probs", "full").

    Args:
        ref_model, ref_model_factory: A policy wrapper in tokens mode with generate=False, or a function that makes one
            at the first use; exactly one of them.
        out_keys: Reward, penalty and container of the log-probs.
        log_prob_key: The policy's log-probs: (container, "full").
        device: Device of the reference's log-probs; the policy's by default.
        add_to_reward: False leaves the reward unchanged.
        tokenizer, padding_side: Accepted without effect, for compatibility with TorchRL: rows are not padded.
    """

    def __init__(
        self,
        ref_model: Any = None,
        *,
        ref_model_factory: Callable[[], Any] | None = None,
        coef: float = 1.0,
        in_keys: Sequence[str] = ("reward",),
        out_keys: Sequence[str] | None = None,
        log_prob_key: FullKey = ("log_probs", "full"),
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        tokenizer: Any = None,
        assistant_only: bool = True,
        padding_side: str = "left",
        use_ray_service: bool = False,
    ):
        if (ref_model is None) == (ref_model_factory is None):
            raise ValueError(
                "KLRewardTransform needs exactly one of ref_model and ref_model_factory. Give one of them."
            )
        if use_ray_service:
            raise ValueError(
                "use_ray_service=True is not supported. Let ref_model_factory return a remote wrapper instead."
            )
        self._made, self._factory = None, ref_model_factory
        if ref_model is not None:
            self._made = _checked(ref_model)
        self.coef, self.device = coef, device
        self.reward_key = in_keys[0]
        self.out_keys = tuple(out_keys or (in_keys[0], "kl_penalty", "ref_log_probs"))
        if len(self.out_keys) != 3:
            raise ValueError(f"out_keys={out_keys!r} must name reward, penalty and reference log-probs.")
        self.of_one_step = self.out_keys
        self.log_prob_key = log_prob_key
        self.add_to_reward, self.assistant_only = add_to_reward, assistant_only

    @property
    def ref_model(self) -> Any:
        """The reference model, which the factory makes at first use. Raises ValueError for an unsuitable model."""
        if self._made is None:
            assert self._factory is not None
            self._made = _checked(self._factory())
        return self._made

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        """Add the KL penalty and the reference model's log-probs to `following`, and subtract the penalty from the
        reward.

        Raises:
            KeyError: The reward or the policy's log-probs are missing.
            ValueError: The reward or the reference's log-probs do not fit the tokens.
        """
        model = self.ref_model
        scored = scored_by(model, root, "tokens")
        source = (getattr(model, "log_probs_key", "log_probs"), "full")
        for row, ref, out in zip(root.unbind(0), scored.unbind(0), following.unbind(0), strict=True):
            reference = _placed(row, _unpadded(ref, ref.get(source)))
            kl = self._kl(row, reference)
            reference = reference.to(kl.device if self.device is None else self.device)
            reward_key, penalty_key, ref_key = self.out_keys
            out.set(penalty_key, kl)
            out.set(ref_key, LogProbs(full=reference, batch_size=[]))
            if self.add_to_reward:
                reward = out.get(self.reward_key, None)
                if reward is None:
                    raise KeyError(
                        f"KLRewardTransform: the key {self.reward_key!r} is missing. Append it after the transform "
                        "that writes the reward."
                    )
                out.set(reward_key, _by_token(reward.reshape(-1, 1), kl, _attention(row)) - self.coef * kl)
        return following

    def _kl(self, row: TensorDictBase, reference: torch.Tensor) -> torch.Tensor:
        """[L, 1], 0 outside the mask."""
        own = row.get(self.log_prob_key, None)
        if own is None:
            own = row.get((self.log_prob_key[0], "response"), None)
        if own is None:
            raise KeyError(
                f"KLRewardTransform: the policy wrote no log-probs under {self.log_prob_key}. Use a policy with "
                "return_log_probs=True, or set log_prob_key."
            )
        if len(own) > len(reference):
            raise ValueError(
                f"The policy has {len(own)} log-probs, but the reference model scored only {len(reference)} tokens. "
                "Give both models the same tokenizer and chat template."
            )
        reference, mask = reference.to(own.device), self._mask(row, len(reference))
        mask[: len(reference) - len(own)] = False
        kl = torch.zeros_like(reference)
        kl[mask] = (own - reference[len(reference) - len(own) :])[mask[len(reference) - len(own) :]]
        return kl.unsqueeze(-1)

    def _mask(self, row: TensorDictBase, length: int) -> torch.Tensor:
        masks = row.get("masks", None)
        assistant = None if masks is None else masks.get("all_assistant_mask", None)
        if self.assistant_only and assistant is not None:
            return assistant.clone()
        prompt = row.get("tokens").get("prompt", None)
        if prompt is None:
            raise KeyError(
                "KLRewardTransform needs ('masks', 'all_assistant_mask') or ('tokens', 'prompt') to find the "
                "response. Use a policy that writes one of them."
            )
        attention = _attention(row)
        mask = torch.ones(length, dtype=torch.bool) if attention is None else attention.clone()
        mask[: len(prompt)] = False
        return mask


def _has_tokens(row: TensorDictBase) -> bool:
    """True if a row has tokens and both masks."""
    wanted = (("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask"))
    return all(key[0] in row.keys() and row.get(key, None) is not None for key in wanted)  # noqa: SIM118 - a tensordict


def _attention(row: TensorDictBase) -> torch.Tensor | None:
    """[L] bool over ("tokens", "full"): True for tokens, False for padding; None if the row has no mask."""
    masks = row.get("masks", None)
    return None if masks is None else masks.get("all_attention_mask", None)


def _unpadded(row: TensorDictBase, values: torch.Tensor) -> torch.Tensor:
    """A model's values over its tokens, without its own padding."""
    attention = _attention(row)
    return values if attention is None or len(attention) != len(values) else values[attention.to(values.device)]


def _placed(row: TensorDictBase, values: torch.Tensor) -> torch.Tensor:
    """The values of the row's tokens at the positions of the policy's padded tokens; 0 in padding."""
    attention = _attention(row)
    if attention is None or len(values) != int(attention.sum()):
        return values
    return values.new_zeros(len(attention)).masked_scatter(attention.to(values.device), values)


def _by_token(reward: torch.Tensor, kl: torch.Tensor, attention: torch.Tensor | None) -> torch.Tensor:
    """[1, 1] is assigned to the last of L tokens that is not padding; [L, 1] is returned unchanged."""
    if len(reward) == len(kl):
        return reward
    if len(reward) != 1:
        raise ValueError(
            f"KLRewardTransform: the reward has {len(reward)} values for {len(kl)} tokens. Give 1, or 1 per token."
        )
    spread = torch.zeros_like(kl)
    spread[-1 if attention is None else int(attention.nonzero()[-1])] = reward[0]
    return spread


def _checked(model: Any) -> Any:
    check_scores(model, "KLRewardTransform")
    mode = getattr(model, "input_mode", "tokens")
    if mode != "tokens":
        raise ValueError(
            f"KLRewardTransform needs a model with input_mode='tokens', got {mode!r}. Use "
            "model.get_new_version(input_mode='tokens')."
        )
    return model
