"""SkyRL's functions that convert the messages of an agent into tokens to train on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.skyrl.interface import ConversationType

_BASE = [{"role": "system", "content": "You help."}, {"role": "user", "content": "Begin."}]
"""Messages that precede those to encode, because a chat template may treat the start of a conversation specially."""


def get_generation_prompt_ids(tokenizer: Any) -> list[int]:
    """Return the tokens of the chat template's generation prompt, which opens an assistant message."""
    without, with_prompt = _ids(tokenizer, _BASE), _ids(tokenizer, _BASE, add_generation_prompt=True)
    return with_prompt[len(without) :]


def encode_messages_subset(messages: ConversationType, tokenizer: Any) -> list[int]:
    """Return the token ids of messages that are not at the start of a conversation.

    Raises:
        ValueError: `messages` is empty.
    """
    if not messages:
        raise ValueError("messages=[]: must have at least one message.")
    base, conversation = _ids(tokenizer, _BASE), _ids(tokenizer, [*_BASE, *messages])
    return conversation[len(base) :]


def get_response_ids_and_loss_mask_from_messages(
    messages: ConversationType, tokenizer: Any, assistant_logprobs: Sequence[Sequence[float]] | None = None
) -> tuple[list[int], list[int], list[float] | None]:
    """Return the tokens of the messages that follow a prompt, with a loss mask of the assistant's tokens.

    The mask is 1 from the end of an assistant message's header to its end-of-turn token. This function tokenizes text
    again, which may give other tokens than those that were sampled. A generator that has the sampled tokens should
    return these instead.

    Args:
        messages: The messages after the prompt, with the roles assistant, user and tool.
        tokenizer: The tokenizer, with a chat template.
        assistant_logprobs: The log-probs of each assistant message's masked tokens. None: the third result is None.

    Returns:
        Token ids, loss mask, and log-probs (0.0 outside the mask; None without `assistant_logprobs`), of equal length.

    Raises:
        ValueError: A role is another one, a number of log-probs differs from that of a message's tokens, or the
            template opens an assistant message in another way than the generation prompt.
    """
    header = get_generation_prompt_ids(tokenizer)
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    answers = 0
    for message in messages:
        tokens = encode_messages_subset([message], tokenizer)
        sampled = range(0)
        if message["role"] == "assistant":
            sampled = _sampled_range(tokens, header, tokenizer.eos_token_id)
            answers += 1
        elif message["role"] not in ("user", "tool"):
            raise ValueError(
                f"role={message['role']!r}: messages after the prompt must have the role user, tool or assistant."
            )
        ids += tokens
        mask += [int(index in sampled) for index in range(len(tokens))]
        if assistant_logprobs is not None:
            values = list(assistant_logprobs[answers - 1]) if sampled else []
            if len(values) != len(sampled):
                raise ValueError(
                    f"assistant_logprobs[{answers - 1}]: has {len(values)} values, but the message has {len(sampled)} "
                    "tokens from its header to its end-of-turn token. Give one value for each of them."
                )
            logprobs += [0.0] * sampled.start + values + [0.0] * (len(tokens) - sampled.start - len(values))
    return ids, mask, None if assistant_logprobs is None else logprobs


def _sampled_range(tokens: Sequence[int], header: Sequence[int], end: int) -> range:
    """Return the indices of an assistant message's sampled tokens, the end-of-turn token included.

    The tokens after it belong to the template.
    """
    if list(tokens[: len(header)]) != list(header):
        raise ValueError(
            "The chat template opens an assistant message in another way than its generation prompt. Collect sampled "
            "tokens in the generator instead of encoding messages."
        )
    last = max((index for index, token in enumerate(tokens) if token == end), default=len(tokens) - 1)
    return range(len(header), last + 1)


def _ids(tokenizer: Any, messages: Sequence[Any], **options: Any) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
