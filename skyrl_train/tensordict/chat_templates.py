"""Chat templates under TorchRL's names, with functions that parse a rendered text back into messages."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from torchrl.data.llm.history import (
    _CHAT_TEMPLATES as ADDED_TEMPLATES,
    _CUSTOM_INVERSE_PARSERS as ADDED_PARSERS,
    _CUSTOM_MODEL_FAMILY_KEYWORDS as ADDED_KEYWORDS,
)

from skyrl_train.data.chat_templates import TEMPLATES
from skyrl_train.errors import ConfigError

Messages = list[dict[str, Any]]
Parser = Callable[[str, Any], Messages]
"""Function (text, tokenizer or None) that parses a rendered text; the list is empty if no turn is recognized."""

_FALCON = (
    "{% for message in messages %}"
    "{% if message['role'] == 'user' %}{{ 'User: ' + message['content'] | trim + '\n\n' }}"
    "{% elif message['role'] == 'system' %}{{ message['content'] | trim + '\n\n' }}"
    "{% elif message['role'] == 'assistant' %}{{ 'Assistant: ' + message['content'] | trim + END }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
NAMED_TEMPLATES = {
    **TEMPLATES,
    "chatml_format": TEMPLATES["chatml"],
    "qwen": "{% if messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}" + TEMPLATES["chatml"],
    "llama4": re.sub(r"(start|end)_header_id", r"header_\1", TEMPLATES["llama3"]).replace("eot_id", "eot"),
    "dialogpt": "{% for message in messages %}{% if message['role'] != ('assistant' if loop.index0 % 2 else 'user') %}"
    "{{ raise_exception('DialoGPT knows only turns of user and assistant, in turn') }}{% endif %}"
    "{{ message['content'] + eos_token }}{% endfor %}",
    "falcon": _FALCON.replace("END", "'\n\n'"),
    "deepseek": "{{ bos_token or '' }}" + _FALCON.replace("END", "eos_token"),
}
"""Templates by name. "llama" is the Llama 4 or the Llama 3 template, depending on the tokenizer's control tokens."""


def add_chat_template(
    template_name: str,
    template: str,
    inverse_parser: Callable[[str], Any] | None = None,
    model_family_keywords: Sequence[str] | None = None,
) -> None:
    """Register a template under a name, for this process and for TorchRL's History. Masks need no {% generation %}.

    Args:
        template_name: The name.
        template: The Jinja template.
        inverse_parser: Function that parses a rendered text into a History or a list of messages.
        model_family_keywords: Use the template for every tokenizer whose `name_or_path` contains one of these words, in
            any case, where neither a template nor a name is given. A checkpoint at another path needs the name.

    Raises:
        ConfigError: The name already has another template.
    """
    if template_name in {*NAMED_TEMPLATES, "llama"} or (ADDED_TEMPLATES.get(template_name, template) != template):
        raise ConfigError(f"template_name={template_name!r} is the name of another template. Choose a new name.")
    ADDED_TEMPLATES[template_name] = template
    if inverse_parser is not None:
        ADDED_PARSERS[template_name] = inverse_parser
    if model_family_keywords:
        ADDED_KEYWORDS[template_name] = list(model_family_keywords)


def template_options(tokenizer: Any, template: str | None, name: str | None) -> dict[str, Any]:
    """Return rendering keywords for the given template, else for the named one; empty for the tokenizer's own.

    Without both, it is the template added with a keyword that the tokenizer's path contains, else the tokenizer's own,
    else ChatML, with a warning. Unlike in TorchRL, no built-in template is chosen by the path of a model.

    Raises ConfigError for an unknown `name`, or without a tokenizer.
    """
    if tokenizer is None:
        raise ConfigError("Conversations need a tokenizer: pass tokenizer=.")
    if template is not None:
        return {"chat_template": template}
    name = name or name_from_keywords(tokenizer)
    if name is None:
        if getattr(tokenizer, "chat_template", None):
            return {}
        warnings.warn(
            "The tokenizer has no chat template, so conversations are rendered in ChatML. Pass chat_template_name or "
            "chat_template to choose another one.",
            stacklevel=2,
        )
        name = "chatml"
    if name == "llama":
        name = "llama4" if "<|header_start|>" in tokenizer.get_vocab() else "llama3"
    known = {**ADDED_TEMPLATES, **NAMED_TEMPLATES}
    if name not in known:
        raise ConfigError(f"chat_template_name={name!r} is not one of {sorted(known)}; see add_chat_template.")
    if name in ("dialogpt", "deepseek") and not getattr(tokenizer, "eos_token", None):
        raise ConfigError(f"chat_template_name={name!r} ends turns with the tokenizer's eos_token, which is not set.")
    return {"chat_template": known[name]}


def name_from_keywords(tokenizer: Any) -> str | None:
    """Return the name of the template that was added with a keyword in the tokenizer's path, or None."""
    path = str(getattr(tokenizer, "name_or_path", "")).lower()
    return next((name for name, words in ADDED_KEYWORDS.items() if any(w.lower() in path for w in words)), None)


def parse_text(text: str, name: str | None, tokenizer: Any) -> Any:
    """Parse a rendered text into messages, or a History from a user's parser; see `History.from_text`."""
    name = name or name_from_keywords(tokenizer)
    if name is None:
        messages = PARSERS["chatml"](text, tokenizer) or PARSERS["llama"](text, tokenizer)
    elif name in PARSERS:
        messages = PARSERS[name](text, tokenizer)
    elif name in ADDED_PARSERS:
        messages = ADDED_PARSERS[name](text)
    else:
        raise ConfigError(f"chat_template_name={name!r} has no parser; known: {sorted({*PARSERS, *ADDED_PARSERS})}.")
    if messages is None or not len(messages):
        raise RuntimeError(f"No turn of {name or 'a known template'!r} was found in {text[:80]!r}.")
    return messages


def _message(role: str, content: str, is_complete: bool) -> dict[str, Any]:
    return {"role": role, "content": content, "is_complete": is_complete}


def _delimited(pattern: str) -> Parser:
    """Return a parser of turns with a role, a content and an end token, the groups of `pattern`."""
    turn = re.compile(pattern, re.DOTALL)
    return lambda text, tokenizer: [_message(found[1], found[2], bool(found[3])) for found in turn.finditer(text)]


def _end_of_text(tokenizer: Any) -> re.Pattern[str]:
    """Return the pattern of the tokenizer's eos_token; without a tokenizer, of the usual ones."""
    token = getattr(tokenizer, "eos_token", None)
    return re.compile(re.escape(token) if token else r"<｜end▁of▁sentence｜>|<\|endoftext\|>|</s>")


def _parse_dialogpt(text: str, tokenizer: Any) -> Messages:
    """Parse alternating turns of user and assistant, each followed by the end-of-text token."""
    parts = _end_of_text(tokenizer).split(text)
    roles = ("user", "assistant")
    messages = [_message(roles[i % 2], part, i < len(parts) - 1) for i, part in enumerate(parts)]
    return messages if messages[-1]["content"] else messages[:-1]


_SPEAKER = re.compile(r"(?:\A|(?<=\n\n))(User|Assistant):")


def _paragraphs(text: str, tokenizer: Any = None) -> Messages:
    """Return the turns of a text in which "User:" or "Assistant:" begins a turn; text before the first is the system's.

    A paragraph of a message that begins with one of these words cannot be told from a turn.
    """
    pieces = _SPEAKER.split(text)
    named = zip(("system", *map(str.lower, pieces[1::2])), pieces[::2], strict=True)
    return [
        _message(role, content.removesuffix("\n\n").removeprefix(" "), content.endswith("\n\n"))
        for role, content in named
        if role != "system" or content
    ]


def _parse_deepseek(text: str, tokenizer: Any) -> Messages:
    text = text.removeprefix(getattr(tokenizer, "bos_token", None) or "<｜begin▁of▁sentence｜>")
    *ended, rest = _end_of_text(tokenizer).split(text)
    messages = []
    for part, has_end in [*((part, True) for part in ended), (rest, False)]:
        for message in _paragraphs(part):
            answers = message["role"] == "assistant"
            messages.append({**message, "is_complete": has_end} if answers else message)
    return messages


_CHATML = _delimited(r"<\|im_start\|>(\w+)\n(.*?)(<\|im_end\|>|<\|endoftext\|>|\Z)")
PARSERS: dict[str, Parser] = {
    **dict.fromkeys(("chatml", "chatml_format", "qwen", "qwen3_with_thinking"), _CHATML),
    "llama3": _delimited(r"<\|start_header_id\|>(\w+)<\|end_header_id\|>\n\n(.*?)(<\|eot_id\|>|\Z)"),
    "llama4": _delimited(r"<\|header_start\|>(\w+)<\|header_end\|>\n\n(.*?)(<\|eot\|>|\Z)"),
    "llama": lambda text, tokenizer: PARSERS["llama3"](text, tokenizer) or PARSERS["llama4"](text, tokenizer),
    "dialogpt": _parse_dialogpt,
    "falcon": _paragraphs,
    "deepseek": _parse_deepseek,
}
