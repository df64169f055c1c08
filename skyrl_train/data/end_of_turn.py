"""The token that ends an answer, read off the chat template.

A base model's configuration names a token such as `<|endoftext|>` as its end of sequence, while the chat template
closes turns with another one, such as `<|im_end|>`. Generation must stop at both.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile
from typing import Any

from skyrl_train.data.control_tokens import ANSWER, MarkingTemplate, marking_template
from skyrl_train.errors import DataError


def end_of_turn_token(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> int | None:
    """Return the id of the control token with which the chat template closes an answer.

    The token must follow the answer's text directly, or after white space. Of several in a row, those that the template
    writes both after the last answer and after an earlier one close the turn, and the last of them counts. If the two
    have none in common, the last answer's token counts: gpt-oss closes an answer with `<|return|>`, which it rewrites
    to `<|end|>` in the history. There `<|end|>` also closes the analysis that precedes an answer, so it is no end of a
    turn. If the template writes nothing after the last answer, the token with which the next message begins counts
    (`<|user|>` in GLM).

    Returns:
        None without a tokenizer or template, if the template rejects a conversation of user and assistant, and if it
        closes answers with text or not at all.
    """
    options = dict(chat_template_kwargs or {})
    if tokenizer is None or not (options.get("chat_template") or getattr(tokenizer, "chat_template", None)):
        return None
    template = marking_template(tokenizer, options)
    last = _closing_tokens(tokenizer, template, options, followed=False)
    earlier = _closing_tokens(tokenizer, template, options, followed=True)
    shared = [id for id, _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, earlier, strict=False))]
    closing = shared or last or earlier[:1]
    return closing[-1] if closing else None


def end_of_turn_name(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Return the spelling of the end-of-turn token, or else of the end of sequence; empty if there is neither."""
    end = end_of_turn_token(tokenizer, chat_template_kwargs)
    end = getattr(tokenizer, "eos_token_id", None) if end is None else end
    return "" if end is None else str(tokenizer.convert_ids_to_tokens(end))


def _closing_tokens(
    tokenizer: Any, template: MarkingTemplate, options: Mapping[str, Any], *, followed: bool
) -> list[int]:
    """Return the control tokens right after an answer, which is `followed` by another message or the last one."""
    turns = [("user", "?"), ("assistant", ANSWER), ("user", "?")][: 3 if followed else 2]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = template.render(tokenizer, messages, False, options)
        ids = template.controls.encode(tokenizer, text.partition(ANSWER)[2].lstrip())
    except DataError:
        return []
    return list(takewhile(template.controls.ids.__contains__, ids))
