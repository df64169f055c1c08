"""Log-probs of given tokens under a policy for losses on tensordicts, and entropy if it has a distribution.

An actor has `get_dist(tensordict)`, or is called and returns a tensordict with ("log_probs", "full"), with a gradient
if one is needed; the same if `get_dist` raises NotImplementedError. A distribution has `log_prob(ids)` (nats) and
`entropy()` for [B, L] positions; rows are padded on the left to the longest. The rows of a call are as given, or padded
in any way, with ("tokens", "full") and an attention mask that identify the tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase, lazy_stack
from torch import Tensor

from skyrl_train.tensordict.ragged import Column, Key, TokenLayout, column

ATTENTION: Key = ("masks", "all_attention_mask")
ASSISTANT: Key = ("masks", "all_assistant_mask")
PROMPT: Key = ("tokens", "prompt")
LOG_PROBS: Key = ("log_probs", "full")


@dataclass(frozen=True)
class Scored:
    """B sequences scored by the current policy, in the form of the trainer's own losses: [T], without padding."""

    layout: TokenLayout
    mask: Tensor
    """[T] bool: tokens that count."""
    logprobs: Tensor
    """[T] nats, with a gradient."""
    entropy: Tensor | None
    """[T] nats."""


def check_actor(actor: Any) -> None:
    """Raise ValueError for a wrapper that would generate instead of scoring."""
    if getattr(actor, "generate", None) is True:
        raise ValueError(
            "The actor has generate=True, but a loss scores given tokens. Use actor.get_new_version(generate=False)."
        )


def check_choice(name: str, value: Any, allowed: Iterable[Any]) -> None:
    """Raise ValueError for a setting that is not one of the allowed values."""
    if value not in allowed:
        raise ValueError(f"{name}={value!r} must be one of {', '.join(map(str, allowed))}.")


def read(
    tensordict: TensorDictBase, key: Key, what: str, error: type[Exception] = ValueError, *, source: str = ""
) -> Column:
    """Return a required entry of a tensordict [B].

    If it is missing, raises `error` with its description `what` and `source`, an instruction for how to get it.
    """
    value = column(tensordict, key)
    if value is None:
        found = ", ".join(sorted(map(str, tensordict.keys(include_nested=True, leaves_only=True))))
        advice = f"{source}, or name another key with set_keys." if source else "Name another key with set_keys."
        raise error(f"Couldn't find the {what} {key!r} in the input data; entries are {found}. {advice}")
    return value


def score(
    actor: Any,
    tensordict: TensorDictBase,
    action: Key,
    strategy: str,
    *,
    entropy: int,
    log_probs: Key = LOG_PROBS,
) -> Scored:
    """Score the tokens at `action` of a tensordict [B] with `actor`, which gets a copy without padding.

    The result is on the batch's device, wherever the policy computes. `strategy` is `token_mask`'s. Unless it is 0,
    `entropy` is the number of samples that estimate an entropy without a closed form. A policy without distributions
    writes `log_probs`.

    Raises ValueError for a missing actor, tokens or masks, for different shapes, or if entropy is requested from a
    policy that only has log-probs.
    """
    if actor is None:
        raise ValueError("The loss has no actor_network. Give it the policy to train.")
    actor, tokens = _reader_of(actor, action), read(tensordict, action, "action")
    layout = TokenLayout.of(tokens, column(tensordict, ATTENTION))
    mask = token_mask(tensordict, tokens, layout, strategy)
    ids = list(layout.flat(tokens, action).split(layout.present.sum(1).tolist()))
    distribution = _distribution(actor, _unpadded(tensordict, ids, layout, action))
    if distribution is None:
        if entropy:
            raise ValueError("The policy only gives log-probs, which have no entropy. Use entropy_bonus=False.")
        found = _called(actor, _unpadded(tensordict, ids, layout, action), ids, action, log_probs)
        return Scored(layout, mask, found, None)
    theirs, device = TokenLayout.of(ids, None), layout.present.device
    found = distribution.log_prob(theirs.rectangle(ids, action)).to(device)
    logprobs = theirs.flat(found, "log-probs of the policy")
    spread = theirs.flat(_entropy(distribution, entropy).to(device), "entropy of the policy") if entropy else None
    return Scored(layout, mask, logprobs, spread)


def token_mask(tensordict: TensorDictBase, tokens: Column, layout: TokenLayout, strategy: str) -> Tensor:
    """Return the mask [T] of tokens that count. It never includes a row's first token, which has no log-prob.

    The strategy "rlhf" counts the assistant's tokens, in all turns, "sft" those after the prompt (the assistant's if
    the prompt is not known), "generic" all. Raises ValueError if the masks that it needs are missing.
    """
    assistant, prompts = column(tensordict, ASSISTANT), column(tensordict, PROMPT)
    if strategy == "rlhf" or (strategy == "sft" and prompts is None):
        if assistant is None:
            raise ValueError(
                f"masking_strategy={strategy!r} needs {ASSISTANT!r}{' or the prompt' if strategy == 'sft' else ''}, "
                "which the tensordict lacks."
            )
        mask = layout.flat(assistant, ASSISTANT).bool()
    elif not layout.padding_known:
        raise ValueError(f"masking_strategy={strategy!r} needs {ATTENTION!r}: otherwise padding looks like tokens.")
    elif strategy == "sft":
        assert prompts is not None
        mask = layout.after(tokens, prompts)
    else:
        mask = torch.ones_like(layout.sequence_ids, dtype=torch.bool)
    return mask & ~layout.first_tokens


def _unpadded(tensordict: TensorDictBase, ids: list[Tensor], layout: TokenLayout, action: Key) -> TensorDictBase:
    """Return rows without padding, and without the log-probs of sampling, so that the policy's cannot be confused."""
    assistant = column(tensordict, ASSISTANT)
    said = None if assistant is None else layout.flat(assistant, ASSISTANT).split([len(row) for row in ids])
    result = []
    for index, (row, tokens) in enumerate(zip(tensordict.unbind(0), ids, strict=True)):
        plain = row.exclude("tokens", "masks", "log_probs").copy()
        plain.set(action, tokens)
        plain.set(ATTENTION, torch.ones_like(tokens, dtype=torch.bool))
        if said is not None:
            plain.set(ASSISTANT, said[index])
        result.append(plain)
    return lazy_stack(result)


def _reader_of(actor: Any, action: Key) -> Any:
    """Return the actor in tokens mode: in another mode, a wrapper would not score the tokens that were sampled."""
    key = (action,) if isinstance(action, str) else action
    if not hasattr(actor, "input_mode") or (actor.input_mode, list(actor.in_keys)) == ("tokens", [key]):
        return actor
    return actor.get_new_version(input_mode="tokens", input_key=key)


def _distribution(actor: Any, tensordict: TensorDictBase) -> Any:
    # TorchRL's `get_dist` masks with the wrong shape; its `_get_generic_dist` is what its own loss calls.
    ask = getattr(actor, "_get_generic_dist", None) or getattr(actor, "get_dist", None)
    with suppress(NotImplementedError):
        return None if ask is None else ask(tensordict)
    return None


def _entropy(distribution: Any, samples: int) -> Tensor:
    """[B, L]; estimated from samples if there is no closed form, with an unbiased gradient."""
    with suppress(NotImplementedError):
        return distribution.entropy()  # type: ignore[no-any-return]
    try:
        logs = distribution.log_prob(distribution.sample((samples,)))
    except NotImplementedError:
        raise ValueError(
            "The policy's distribution has no entropy and cannot be sampled. Use entropy_bonus=False."
        ) from None
    # -log p, with the gradient -log p grad(log p): the expectation of grad(log p) alone, TorchRL's, is 0
    fixed = logs.detach()
    return -(fixed * (1 + logs - fixed)).mean(0)  # type: ignore[no-any-return]


def _called(actor: Any, tensordict: TensorDictBase, ids: list[Tensor], action: Key, log_probs: Key) -> Tensor:
    """Return the log-probs [T] from a call of an actor without distributions."""
    result = actor(tensordict).to(ids[0].device)
    values, theirs = read(result, log_probs, "policy's log-probs", KeyError), column(result, action)
    if theirs is None:
        return TokenLayout.of(ids, None).flat(values, log_probs)
    layout = TokenLayout.of(theirs, column(result, ATTENTION))
    if not torch.equal(layout.flat(theirs, action), torch.cat(ids)):
        raise ValueError(
            "The policy scored other tokens than those that were sampled, because it rendered the text again. Use "
            'input_mode="tokens".'
        )
    return layout.flat(values, log_probs)
