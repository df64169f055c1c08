"""Whether an exported folder is the policy of a checkpoint: it is loaded as everybody loads it, and compared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from skyrl_train.data.chat import render_prompt
from skyrl_train.errors import CheckpointError, DataError
from skyrl_train.learner.saved_policy import SavedPolicy
from skyrl_train.models.loading import max_positions
from skyrl_train.models.lora import adapter_of, with_adapter
from skyrl_train.storage.copies import local_copy

ALLOWED_NATS = {torch.float32: 1e-3, torch.bfloat16: 0.2}
"""The mean difference of log-probs, by the dtype of the export: weights are rounded to it, sums never are."""
_SEQUENCES, _TOKENS = 4, 128
_PROMPT = "What is 2 + 2?"


@dataclass(frozen=True)
class Agreement:
    """How far an export and its checkpoint agree."""

    num_tensors: int
    """That were compared bit by bit, and are equal."""
    num_tokens: int
    """Whose log-probs were compared."""
    mean_nats: float
    """Mean absolute difference of their log-probs."""
    largest_nats: float
    from_base: bool = False
    """True for merged adapters of a checkpoint that does not record its base model, as of an earlier version."""


def check_model(policy: SavedPolicy, folder: Path, dtype: torch.dtype) -> Agreement:
    """Compare a folder in `dtype` with a policy, as a model that plain transformers loads.

    Raises CheckpointError if a weight is not the checkpoint's rounded to `dtype`, or if log-probs differ by more than
    ALLOWED_NATS.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = model.state_dict()
    agreement = _agreement(policy, folder, model, _compared(folder, loaded, policy.merged(dtype)), dtype)
    return replace(agreement, from_base=policy.adapters is not None and not policy.base_is_compared)


def check_adapter(policy: SavedPolicy, folder: Path, base: str) -> Agreement:
    """Compare a folder with a policy, as an adapter that plain peft loads on the model at `base`.

    Raises CheckpointError as `check_model` does. The base has the values that the run has rounded it to.
    """
    start: Any = AutoModelForCausalLM.from_pretrained(local_copy(base), dtype=policy.frozen_dtype)
    model = with_adapter(start.float(), folder)
    compared = _compared(folder, adapter_of(model), policy.adapter().items())
    return _agreement(policy, folder, model, compared, torch.float32)


def check_prompt(tokenizer: Any, folder: Path, chat_template_kwargs: Mapping[str, Any]) -> None:
    """Raise CheckpointError unless the tokenizer in `folder` writes a prompt with the ids of the training.

    Args:
        tokenizer: The tokenizer of the training, with its chat template.
        folder: The export, whose tokenizer is loaded by plain transformers.
        chat_template_kwargs: Variables of the chat template. A template among them is ignored: exports have their own.
    """
    variables = {name: value for name, value in chat_template_kwargs.items() if name != "chat_template"}
    expected = _prompt_ids(tokenizer, variables)
    if (got := _prompt_ids(AutoTokenizer.from_pretrained(folder), variables)) != expected:
        raise CheckpointError(
            f"{folder}: once its tokenizer is loaded, a prompt has the ids {got}, but in training it had {expected}. "
            "The export is not kept."
        )


def _prompt_ids(tokenizer: Any, chat_template_kwargs: Mapping[str, Any]) -> list[int]:
    """Return the ids of a prompt; those of its text alone if there is no chat template, or if it rejects the prompt."""
    with suppress(DataError):
        if tokenizer.chat_template:
            return render_prompt(tokenizer, [{"role": "user", "content": _PROMPT}], chat_template_kwargs)
    return list(tokenizer(_PROMPT)["input_ids"])


def _compared(folder: Path, loaded: dict[str, Tensor], expected: Iterable[tuple[str, Tensor]]) -> int:
    """The number of tensors, all of which are equal."""
    names = []
    for name, tensor in expected:
        got = loaded.get(name)
        if got is None or got.shape != tensor.shape or not torch.equal(got, tensor.to(got.dtype)):
            wrong = "absent" if got is None else "not what it is in the checkpoint"
            raise CheckpointError(f"{folder}: {name} is {wrong} once the folder is loaded. The export is not kept.")
        names.append(name)
    return len(names)


@torch.no_grad()
def _agreement(policy: SavedPolicy, folder: Path, model: Any, num_tensors: int, dtype: torch.dtype) -> Agreement:
    longest = min(_TOKENS, max_positions(model) or _TOKENS)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(policy.config.get_text_config().vocab_size, (_SEQUENCES, longest), generator=generator)
    rows = [model(input_ids=row[None], use_cache=False).logits[0, :-1].float().log_softmax(-1) for row in ids]
    got = torch.stack([row.gather(-1, one[1:, None])[:, 0] for row, one in zip(rows, ids, strict=True)])
    difference = (got - policy.logprobs(ids)).abs()
    mean, largest = float(difference.mean()), float(difference.max())
    if not mean <= ALLOWED_NATS[dtype]:
        raise CheckpointError(
            f"{folder}: once it is loaded, log-probs of {difference.numel()} tokens differ from the checkpoint's by "
            f"{mean:.3g} nats in the mean and up to {largest:.3g}; {ALLOWED_NATS[dtype]:g} is allowed. The weights are "
            "the same, so its configuration is another one, as when an adapter is loaded on a model that the run has "
            "changed (trainer.policy.model_config_kwargs, trainer.rope_scaling): export such a run without --adapter."
        )
    return Agreement(num_tensors, difference.numel(), mean, largest)
