"""Transforms that add log-probs of other models, and a KL penalty in the reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import LazyStackedTensorDict, TensorDictBase
from tensordict.utils import NestedKey
from torchrl.data import Composite, Unbounded
from torchrl.envs import Compose, Transform

from skyrl_train.tensordict.containers import LogProbs
from skyrl_train.tensordict.envs.conversation import part
from skyrl_train.tensordict.envs.rows import add_spec, rows_of
from skyrl_train.tensordict.ragged import nested_stack

FullKey = tuple[str, str]


class _StepScores(Transform):  # type: ignore[misc]
    """A base of transforms that write values of one step's tokens, [L] per row, into "next".

    In the specs they belong to the rewards: the next observation does not have them.
    """

    scores: Sequence[tuple[NestedKey, tuple[int, ...]]] = ()
    """The keys that it writes, and the shape of each for one row; -1 is the number of tokens."""
    needs_next = False
    """True if it reads what a step has written into "next"."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the values into data of any batch size, in place: into "next" or, without "next", beside the tokens.

        Raises KeyError if there is no "next", but the transform changes the reward there.
        """
        following = tensordict.get("next", None)
        if following is not None:
            return tensordict.set("next", self._step(tensordict, following))
        if self.needs_next:
            raise KeyError(
                f"{type(self).__name__} changes rewards, but the tensordict has no 'next'. Pass data of steps."
            )
        names = {key if isinstance(key, str) else key[0] for key, _ in self.scores}
        _update(tensordict, self._step(tensordict, tensordict), names)
        return tensordict

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        before, following = rows_of(tensordict), rows_of(next_tensordict)
        self._score(before, following)
        return nested_stack(following, next_tensordict.batch_size)

    def _score(self, before: Sequence[TensorDictBase], following: Sequence[TensorDictBase]) -> None:
        """Write the values of steps, whose observations and actions are `before`, into the rows `following`."""
        raise NotImplementedError

    def transform_reward_spec(self, reward_spec: Composite) -> Composite:
        for key, shape in self.scores:
            spec = Unbounded(shape=(*reward_spec.shape, *shape), device=reward_spec.device)
            add_spec(reward_spec, key, spec, LogProbs)
        return reward_spec


class RetrieveLogProb(_StepScores):
    """A transform that writes `model`'s log-probs of every step, [L] per row in nats, into "next".

    If the policy wrote ("tokens", "full") and masks, these tokens are scored, and each value is at its token's
    position. Otherwise, a model in history mode renders the conversation, and the values belong to the ids that it
    makes. With `assistant_only`, tokens that the assistant did not write have 0.

    Args:
        model: A policy wrapper with generate=False and its own `log_probs_key`, e.g. "ref_log_probs".
        log_probs_full_key: (container, "full"); the model's own by default.
        detach: Detach the log-probs; with detach=False the model's log-probs must have a gradient, else ValueError.
        device: The result's device; the model's by default.
        tokenizer_kwargs, tokenizer, padding_side: Accepted without effect, for compatibility with TorchRL.
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
        if getattr(model, "generate", False) is not False:
            raise ValueError(
                f"{type(self).__name__} needs a model made with generate=False, which scores given tokens. Use "
                "model.get_new_version(generate=False)."
            )
        if getattr(model, "return_log_probs", True) is False:
            raise ValueError(
                f"{type(self).__name__} needs a model with return_log_probs=True. Use "
                "model.get_new_version(return_log_probs=True)."
            )
        mode = getattr(model, "input_mode", "history")
        if assistant_only and mode != "history":
            raise ValueError(
                f"The model must have `input_mode='history'` when assistant_only=True, but has {mode!r}. Use such a "
                "model, or assistant_only=False."
            )
        self.source: FullKey = (getattr(model, "log_probs_key", "log_probs"), "full")
        self.log_probs_full_key: FullKey = log_probs_full_key or self.source
        super().__init__(list(getattr(model, "in_keys", ())), [self.log_probs_full_key])
        self.scores = [(self.log_probs_full_key, (-1,))]
        self.__dict__["model"] = model  # no submodule: the environment does not move it, nor save it with its state
        self.mode, self.assistant_only, self.detach, self.device = mode, assistant_only, detach, device

    def _score(self, before: Sequence[TensorDictBase], following: Sequence[TensorDictBase]) -> None:
        needed = (("tokens", "full"), ("masks", "all_attention_mask"), ("masks", "all_assistant_mask"))
        sampled = all(part(row, *key) is not None for row in before for key in needed)
        model, mode = (self._of_tokens(), "tokens") if sampled else (self.model, self.mode)
        given = LazyStackedTensorDict(*(row.select(mode, "masks", strict=False).copy() for row in before), stack_dim=0)
        with torch.set_grad_enabled(not self.detach):
            scored = model(given).unbind(0)
        for row, ref, out in zip(before, scored, following, strict=True):
            values = ref.get(self.source)
            if mode == "tokens":
                values = _placed(row, ref, values)
            if self.assistant_only:
                mask = (row if sampled else ref).get(("masks", "all_assistant_mask"))
                values = values.masked_fill(~mask.to(values.device, torch.bool), 0.0)
            if not self.detach and not values.requires_grad:
                raise ValueError(
                    "detach=False needs log-probs with a gradient, but the model's have none. Use its get_dist in a "
                    "loss."
                )
            values = values.detach() if self.detach else values
            name = self.log_probs_full_key[0]
            out.set(name, out.get(name).copy() if name in out.keys() else LogProbs(batch_size=[]))  # noqa: SIM118
            out.set(self.log_probs_full_key, values if self.device is None else values.to(self.device))

    def _of_tokens(self) -> Any:
        renewed = getattr(self.model, "get_new_version", None)
        if self.mode == "tokens" or renewed is None:
            return self.model
        if "tokens_model" not in self.__dict__:
            self.__dict__["tokens_model"] = renewed(input_mode="tokens", input_key=("tokens", "full"))
        return self.__dict__["tokens_model"]


class KLComputation(_StepScores):
    """A transform that writes the KL estimate of each token, and subtracts `coeff` × KL from the reward.

    The estimate is log π(token) − log π_ref(token), [L] per row under `kl_key`. Where both are 0, as for the tokens
    that `RetrieveLogProb(assistant_only=True)` leaves out, it is 0; NaN marks positions without a score.

    A step's reward is assigned to its last token, so that the sum over tokens, [L, 1], is reward − `coeff` × Σ kl,
    however long the sequence is.

    Args:
        gen_log_probs_full_key: Log-probs of the policy in "next", else those that it wrote when it sampled the step;
            then tokens that were not sampled in the step have 0.
        ref_log_probs_full_key: Log-probs of the reference in "next".
        kl_key: Key of the estimates.
        add_to_reward: False leaves the reward unchanged.
        coeff: Coefficient of the KL in the reward.
        padding_side: Accepted without effect, for compatibility with TorchRL.
    """

    def __init__(
        self,
        gen_log_probs_full_key: FullKey = ("log_probs", "full"),
        ref_log_probs_full_key: FullKey = ("ref_log_probs", "full"),
        *,
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float = 1.0,
        padding_side: str = "left",
    ):
        keys = [gen_log_probs_full_key, ref_log_probs_full_key]
        super().__init__([*keys, *(["reward"] if add_to_reward else [])], [kl_key])
        self.gen_log_probs_full_key, self.ref_log_probs_full_key = keys
        self.kl_key, self.add_to_reward, self.coeff = kl_key, add_to_reward, coeff
        self.scores = [(kl_key, (-1,)), *([("reward", (-1, 1))] if add_to_reward else [])]

    def _score(self, before: Sequence[TensorDictBase], following: Sequence[TensorDictBase]) -> None:
        for row, out in zip(before, following, strict=True):
            gen, ref = out.get(self.gen_log_probs_full_key, None), out.get(self.ref_log_probs_full_key, None)
            sampled = gen is None
            gen = row.get(self.gen_log_probs_full_key, None) if sampled else gen
            for key, values in ((self.gen_log_probs_full_key, gen), (self.ref_log_probs_full_key, ref)):
                if values is None:
                    raise ValueError(
                        f"KLComputation found no log-probs under {key!r}. Append it after a RetrieveLogProb that "
                        "writes them, or use a policy with return_log_probs=True."
                    )
            if gen.shape != ref.shape:
                raise ValueError(
                    f"The policy has log-probs of shape {tuple(gen.shape)}, the reference of {tuple(ref.shape)}. Give "
                    "both models the same tokenizer, chat template and pad_output."
                )
            mask = _counted(row, len(ref), assistant_only=True) if sampled else None
            out.set(self.kl_key, kl := _estimates(gen, ref, mask))
            if self.add_to_reward and (reward := out.get("reward", None)) is not None:
                out.set("reward", _penalized(row, reward, self.coeff * kl))


class RetrieveKL(Compose):  # type: ignore[misc]
    """A composition of a `RetrieveLogProb` for a policy and for a reference, and a `KLComputation`.

    Args:
        gen_model: A wrapper of the policy with generate=False, or "from_collector" for the log-probs that the policy
            wrote when it sampled the step, which are exact and need no second pass.
        ref_model: A wrapper of the reference with generate=False and a `log_probs_key` of its own.
        gen_model_factory, ref_model_factory: Functions that make the models.
        assistant_only: True to count only tokens that the assistant wrote; then both models need input_mode="history".
        detach, device: Arguments of `RetrieveLogProb`.
        gen_log_probs_full_key, ref_log_probs_full_key: Keys of the log-probs in "next".
        kl_key, add_to_reward, coeff: Arguments of `KLComputation`.
        use_ray_service: Only False: let `ref_model_factory` return a remote wrapper instead.
        tokenizer, tokenizer_kwargs, history_key, padding_side: Accepted without effect, for compatibility with TorchRL.
    """

    def __init__(
        self,
        gen_model: Any = "from_collector",
        ref_model: Any = None,
        *,
        gen_model_factory: Callable[[], Any] | None = None,
        ref_model_factory: Callable[[], Any] | None = None,
        assistant_only: bool = True,
        history_key: str = "history",
        tokenizer_kwargs: Any = None,
        detach: bool = True,
        device: torch.device | str | None = None,
        tokenizer: Any = None,
        padding_side: str = "left",
        gen_log_probs_full_key: FullKey = ("log_probs", "full"),
        ref_log_probs_full_key: FullKey = ("ref_log_probs", "full"),
        kl_key: NestedKey = "kl_penalty",
        add_to_reward: bool = True,
        coeff: float = 1.0,
        use_ray_service: bool = False,
    ):
        sampled = isinstance(gen_model, str) and gen_model_factory is None
        if gen_model_factory is not None:
            gen_model = _made(None if isinstance(gen_model, str) else gen_model, gen_model_factory, "gen_model", False)
        ref_model = _made(ref_model, ref_model_factory, "ref_model", use_ray_service)
        if not sampled:
            padded = [getattr(model, "pad_output", None) for model in (gen_model, ref_model)]
            if padded[0] != padded[1]:
                raise ValueError(
                    f"pad_output mismatch: gen_model has {padded[0]}, ref_model {padded[1]}. Give both the same value."
                )
            keys = [getattr(model, "log_probs_key", name) for model, name in ((gen_model, "gen"), (ref_model, "ref"))]
            if keys[0] == keys[1]:
                raise ValueError(
                    f"gen_model and ref_model have the same log_probs_key {keys[0]!r}. Give them different ones with "
                    "get_new_version(log_probs_key=...)."
                )
        parts = [] if sampled else [(gen_model, gen_log_probs_full_key)]
        scores = [
            RetrieveLogProb(model, log_probs_full_key=key, assistant_only=assistant_only, detach=detach, device=device)
            for model, key in [*parts, (ref_model, ref_log_probs_full_key)]
        ]
        kl = KLComputation(
            gen_log_probs_full_key, ref_log_probs_full_key, kl_key=kl_key, add_to_reward=add_to_reward, coeff=coeff
        )
        super().__init__(*scores, kl)


class KLRewardTransform(RetrieveLogProb):
    """A transform that subtracts `coef` × KL(policy ‖ reference) from the reward, token by token, as `KLComputation`.

    The estimate counts the tokens of the assistant (`assistant_only`) or all tokens after the prompt, and is 0
    elsewhere. A reward that already has one value per token keeps its values. Writes into "next", [L, 1] per row over
    ("tokens", "full"): "kl_penalty", and the reward minus coef × kl; also the reference's log-probs [L]
    under ("ref_log_probs", "full").

    Args:
        ref_model, ref_model_factory: A policy wrapper in tokens mode with generate=False, or a function that makes one;
            exactly one of them.
        in_keys: Key of the reward.
        out_keys: Keys of reward, penalty and container of the log-probs; or only the reward's.
        log_prob_key: The policy's log-probs: (container, "full").
        device: Device of the reference's log-probs; the policy's by default.
        add_to_reward: False leaves the reward unchanged.
        tokenizer, padding_side: Accepted without effect, for compatibility with TorchRL.
        use_ray_service: Only False: let `ref_model_factory` return a remote wrapper instead.
    """

    needs_next = True

    def __init__(
        self,
        ref_model: Any = None,
        *,
        ref_model_factory: Callable[[], Any] | None = None,
        coef: float = 1.0,
        in_keys: Sequence[str] | None = None,
        out_keys: Sequence[str] | None = None,
        log_prob_key: FullKey = ("log_probs", "full"),
        device: torch.device | str | None = None,
        add_to_reward: bool = True,
        tokenizer: Any = None,
        assistant_only: bool = True,
        padding_side: str = "left",
        use_ray_service: bool = False,
    ):
        inputs = list(in_keys or ("reward",))
        outputs = list(out_keys or inputs)
        outputs = [*outputs, "kl_penalty", "ref_log_probs"] if len(outputs) == 1 else outputs
        if len(inputs) != 1 or len(outputs) != 3:
            raise ValueError(
                f"in_keys={in_keys!r} must name the reward, and out_keys={out_keys!r} reward, penalty and reference "
                "log-probs."
            )
        model = _made(ref_model, ref_model_factory, "ref_model", use_ray_service)
        mode = getattr(model, "input_mode", "tokens")
        if mode != "tokens":
            raise ValueError(
                f"KLRewardTransform needs a model with input_mode='tokens', got {mode!r}. Use "
                "model.get_new_version(input_mode='tokens')."
            )
        super().__init__(model, log_probs_full_key=(outputs[2], "full"), assistant_only=False, device=device)
        self.in_keys, self.out_keys = inputs, [*outputs[:2], self.log_probs_full_key]
        self.coef, self.log_prob_key, self.add_to_reward = coef, log_prob_key, add_to_reward
        self.only_assistant = assistant_only
        self.scores = [*self.scores, (outputs[1], (-1, 1)), *([(outputs[0], (-1, 1))] if add_to_reward else [])]

    def _score(self, before: Sequence[TensorDictBase], following: Sequence[TensorDictBase]) -> None:
        super()._score(before, following)
        for row, out in zip(before, following, strict=True):
            reference, own = out.get(self.log_probs_full_key), row.get(self.log_prob_key, None)
            own = row.get((self.log_prob_key[0], "response"), None) if own is None else own
            reward = out.get(self.in_keys[0], None)
            if own is None or (self.add_to_reward and reward is None):
                key = self.log_prob_key if own is None else self.in_keys[0]
                raise KeyError(
                    f"KLRewardTransform: the key {key!r} is missing. Use a policy with return_log_probs=True, and "
                    "append the transform after the one that writes the reward."
                )
            before_own = len(reference) - len(own)
            if before_own < 0:
                raise ValueError(
                    f"The policy has {len(own)} log-probs, but the reference model scored only {len(reference)} "
                    "tokens. Give both models the same tokenizer and chat template."
                )
            mask = _counted(row, len(reference), self.only_assistant)
            mask[:before_own] = False
            kl = _estimates(torch.nn.functional.pad(own, (before_own, 0)), reference, mask)
            out.set(self.out_keys[1], kl.unsqueeze(-1))
            if self.add_to_reward:
                out.set(self.out_keys[0], _penalized(row, reward, self.coef * kl))


def _estimates(own: torch.Tensor, reference: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """[L]: own - reference; 0 outside the mask and where one of them is NaN."""
    kl = (own - reference.to(own.device)).nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
    return kl if mask is None else kl.masked_fill(~mask.to(kl.device), 0.0)


def _penalized(row: TensorDictBase, reward: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    """[L, 1]: the reward minus the penalty [L]. A single reward is assigned to the last token that is not padding."""
    values = reward.reshape(-1)
    if len(values) not in (1, len(penalty)):
        raise ValueError(f"The reward has {len(values)} values for {len(penalty)} tokens. Give 1, or 1 per token.")
    if len(values) != len(penalty):
        attention = _attention(row)
        last = -1 if attention is None or len(attention) != len(penalty) else int(attention.nonzero()[-1])
        single, values = values[0], torch.zeros_like(penalty)
        values[last] = single
    return (values - penalty).unsqueeze(-1)


def _counted(row: TensorDictBase, length: int, assistant_only: bool) -> torch.Tensor:
    """[L] bool: the assistant's tokens, or all tokens after the prompt. Raises KeyError if neither can be found."""
    assistant = part(row, "masks", "all_assistant_mask")
    if assistant_only and assistant is not None:
        return assistant.clone()
    prompt = row.get(("tokens", "prompt"), None)
    if prompt is None:
        raise KeyError(
            "KL needs ('masks', 'all_assistant_mask') or ('tokens', 'prompt') to find the response. Use a policy that "
            "writes one of them."
        )
    attention = _attention(row)
    mask = torch.ones(length, dtype=torch.bool) if attention is None else attention.clone()
    mask[: len(prompt)] = False
    return mask


def _attention(row: TensorDictBase) -> torch.Tensor | None:
    """[L] bool over ("tokens", "full"): True for tokens, False for padding; None if the row has no mask."""
    attention = part(row, "masks", "all_attention_mask")
    return None if attention is None else attention.bool()


def _placed(row: TensorDictBase, scored: TensorDictBase, values: torch.Tensor) -> torch.Tensor:
    """The model's values, without its own padding, at the positions of the policy's padded tokens; 0 in padding."""
    padded, attention = _attention(scored), _attention(row)
    if padded is not None and len(padded) == len(values):
        values = values[padded.to(values.device)]
    if attention is None or len(values) != int(attention.sum()):
        return values
    return values.new_zeros(len(attention)).masked_scatter(attention.to(values.device), values)


def _update(tensordict: TensorDictBase, values: TensorDictBase, keys: set[str]) -> None:
    """Copy entries of a lazy stack to a tensordict of the same batch size, whose rows may have different lengths."""
    if isinstance(tensordict, LazyStackedTensorDict):
        dim = tensordict.stack_dim
        for row, source in zip(tensordict.unbind(dim), values.unbind(dim), strict=True):
            _update(row, source, keys)
        return
    for key in keys & set(values.keys()):
        try:
            tensordict.set(key, values.get(key))
        except RuntimeError:  # tensors of different lengths do not stack
            tensordict.set(key, values.get(key, as_nested_tensor=True, layout=torch.jagged))


def _made(model: Any, factory: Callable[[], Any] | None, name: str, use_ray_service: bool) -> Any:
    if use_ray_service:
        raise ValueError(
            "use_ray_service=True is not supported. Let ref_model_factory return a remote wrapper instead."
        )
    if (model is None) == (factory is None):
        raise ValueError(f"Give exactly one of {name} and {name}_factory.")
    return factory() if factory is not None else model
