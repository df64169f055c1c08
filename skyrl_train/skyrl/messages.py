"""SkyRL's functions that turn messages, which an agent has collected, into tokens to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.skyrl.interface import ConversationType

_BASE = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Begin."}]
"""What stands before messages whose tokens are wanted: a template may open a conversation in a way of its own."""


def get_generation_prompt_ids(tokenizer: Any) -> list[int]:
    """The tokens that open an answer."""
    closed, opened = _ids(tokenizer, _BASE), _ids(tokenizer, _BASE, add_generation_prompt=True)
    return opened[len(closed) :]


def encode_messages_subset(messages: ConversationType, tokenizer: Any) -> list[int]:
    """The tokens of messages that stand somewhere in a conversation. Raises ValueError without any."""
    if not messages:
        raise ValueError("messages: there are none.")
    before, whole = _ids(tokenizer, _BASE), _ids(tokenizer, [*_BASE, *messages])
    return whole[len(before) :]


def get_response_ids_and_loss_mask_from_messages(
    messages: ConversationType, tokenizer: Any, assistant_logprobs: Sequence[Sequence[float]] | None = None
) -> tuple[list[int], list[int], list[float] | None]:
    """The tokens of messages after a prompt, with a mask of those that the model said: from the end of the header of an
    answer to its end-of-turn token.

    The text is tokenised again, which need not give the tokens that were sampled: a generator that has these should
    return them instead.

    Args:
        assistant_logprobs: Of every answer's tokens.

    Raises ValueError for roles other than user, tool and assistant, and for log-probs of other lengths than answers.
    """
    header = get_generation_prompt_ids(tokenizer)
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    answers = 0
    for message in messages:
        tokens = encode_messages_subset([message], tokenizer)
        said = range(0)
        if message["role"] == "assistant":
            said = _sampled_range(tokens, header, tokenizer.eos_token_id)
            answers += 1
        elif message["role"] not in ("user", "tool"):
            raise ValueError(f"role={message['role']!r}: must be user, tool or assistant after the prompt.")
        ids += tokens
        mask += [int(place in said) for place in range(len(tokens))]
        if assistant_logprobs is not None:
            told = list(assistant_logprobs[answers - 1]) if said else []
            if len(told) != len(said):
                raise ValueError(f"assistant_logprobs[{answers - 1}]: {len(told)} of an answer of {len(said)} tokens.")
            logprobs += [0.0] * said.start + told + [0.0] * (len(tokens) - said.start - len(told))
    return ids, mask, None if assistant_logprobs is None else logprobs


def _sampled_range(tokens: Sequence[int], header: Sequence[int], end: int) -> range:
    """The places of an answer's own tokens, its end-of-turn token included; what follows is the template's."""
    if list(tokens[: len(header)]) != list(header):
        raise ValueError("The chat template does not open an answer as it opens the one to be generated.")
    last = max((place for place, token in enumerate(tokens) if token == end), default=len(tokens) - 1)
    return range(len(header), last + 1)


def _ids(tokenizer: Any, messages: Sequence[Any], **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
