"""Conversations -> token ids, such that no message can inject control tokens.

A chat template marks turns with control tokens (`<|im_start|>`, `<|eot_id|>`, ...). A tokenizer finds these anywhere in
a rendered string, so a prompt that spells one could end its own turn or speak as the system. Here control tokens come
only from the template; if a message spells one, it is encoded as plain characters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike

from skyrl_train.data.arrays import token_array
from skyrl_train.data.control_tokens import ANSWER, MarkingTemplate, marking_template
from skyrl_train.data.trajectory import Message
from skyrl_train.data.vocabulary import decode_continuation
from skyrl_train.errors import DataError


@dataclass(slots=True)
class LastRendered:
    """How a conversation was rendered last, up to the header of an answer: the next time its text begins so, unless the
    template writes it anew. That is all there is to know of the text, which may be long, of thousands of conversations.
    """

    messages: int | None = None
    length: int = 0
    hashed: int = 0

    def note(self, messages: int, text: str) -> None:
        self.messages, self.length, self.hashed = messages, len(text), hash(text)

    def begins(self, messages: int, text: str) -> bool:
        """Whether so many messages were rendered, to what `text` begins with."""
        return self.messages == messages and hash(text[: self.length]) == self.hashed


def render_prompt(
    tokenizer: Any,
    messages: Sequence[Message],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    last: LastRendered | None = None,
) -> list[int]:
    """Ids of `messages` and the answer's header, as by `apply_chat_template(messages, add_generation_prompt=True)`.

    The ids differ from it only if a message spells a control token. Raises DataError if the template rejects them.
    `last`: see `render_continuation`.
    """
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    text = chat.text(len(messages), open_answer=True)
    if last is not None:
        last.note(len(messages), text)
    return chat.encode(text)


def render_continuation(
    tokenizer: Any,
    messages: Sequence[Message],
    answers: Sequence[int],
    chat_template_kwargs: Mapping[str, Any] | None = None,
    *,
    verbatim: bool = False,
    last: LastRendered | None = None,
) -> list[int] | None:
    """Ids between the last answer and the next one: the end of its turn, the messages after it, the next header.

    `answers` are the indices in `messages` of the model's own answers. Their tokens are kept elsewhere, so a
    placeholder is rendered for each; `verbatim` renders their texts, for templates that handle some text (reasoning)
    specially. `last`: of this conversation under the same options, whose earlier messages are not rendered again then.

    Returns None if the template now renders the messages before the last answer, or the answer itself, differently.
    Raises DataError if it rejects the messages.
    """
    if not verbatim:
        own = set(answers)
        messages = [
            {**message, "content": ANSWER} if place in own else message for place, message in enumerate(messages)
        ]
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    between = chat.after_answer(answers[-1], last)
    return None if between is None else chat.encode(between)


def rewrites_history(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> bool:
    """Whether the template renders earlier turns differently once a conversation continues; some drop old reasoning.

    Raises DataError if it rejects a conversation of user and assistant.
    """
    for answer in ("sure", "<think>\nwell\n</think>\n\nsure"):
        turns = ("user", "one"), ("assistant", answer), ("user", "two"), ("assistant", answer), ("user", "three")
        messages = [{"role": role, "content": content} for role, content in turns]
        chats = [_Chat.of(tokenizer, messages[:count], chat_template_kwargs) for count in (3, 5)]
        if any(chat.after_answer(len(chat.messages) - 2) is None for chat in chats):
            return True
    return False


def encode_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of text without any template; control tokens spelt in it are encoded as plain characters."""
    return marking_template(tokenizer).controls.encode(tokenizer, text)


def encode_prompt(tokenizer: Any, text: str, *, add_special_tokens: bool = True) -> list[int]:
    """Return the ids of a prompt of plain text, in which control tokens may be spelt.

    Args:
        add_special_tokens: Puts before it what the tokenizer puts before texts, such as BOS, unless it begins so. What
            the tokenizer puts after texts, such as EOS, is never added, as a completion continues the prompt.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not add_special_tokens:
        return ids
    plain, full = (tokenizer("a", add_special_tokens=added)["input_ids"] for added in (False, True))
    starts = (start for start in range(len(full)) if full[start : start + len(plain)] == plain)
    prefix: list[int] = full[: next(starts, 0)]
    return ids if ids[: len(prefix)] == prefix else prefix + ids


def decode_answer(tokenizer: Any, ids: ArrayLike) -> str:
    """The text of a model's answer, without control tokens; `skip_special_tokens` alone keeps some role markers."""
    tokens = token_array(ids)
    return str(tokenizer.decode(tokens[~marking_template(tokenizer).controls.among(tokens)], skip_special_tokens=True))


def plain_text(message: Message) -> str:
    """The text of a message, without its other content."""
    content = message["content"]
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content or ""


def decode_completion(tokenizer: Any, ids: ArrayLike, prompt: ArrayLike) -> str:
    """Return the text, without control tokens, that continues a prompt of plain text.

    It may begin with a space, which `decode_answer` drops with tokenizers that write spaces before words. After a
    control token a new text begins.
    """
    controls = marking_template(tokenizer).controls
    last = token_array(prompt)[-1:].tolist()
    if not last or last[0] in controls.names:
        return decode_answer(tokenizer, ids)
    tokens = token_array(ids)
    return decode_continuation(tokenizer, tokens[~controls.among(tokens)].tolist())


def unread_tokens(tokenizer: Any) -> Collection[int]:
    """Return the ids of tokens that `decode_answer` and `decode_completion` leave out of a text."""
    return marking_template(tokenizer).controls.names.keys()


def is_control(tokenizer: Any, token: int) -> bool:
    """Whether a token is a control token, which no text encodes to."""
    return token in marking_template(tokenizer).controls.ids


def render_messages(tokenizer: Any, messages: Sequence[Message]) -> list[int]:
    """Ids of `messages` without an answer's header, for a model that reads but does not answer.

    Raises DataError if the template rejects them.
    """
    chat = _Chat.of(tokenizer, messages, None)
    return chat.encode(chat.text(len(messages)))


def render_conversation(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> tuple[list[int], list[bool]]:
    """Ids of a finished conversation, and a mask of those that the assistant must produce: (ids [L], mask [L]).

    The mask covers the text between an answer's header and the end of its turn, including the token that ends the turn
    (a model that never learns it never stops), but nothing after that token, such as ChatML's line break. Headers and
    answers are encoded separately, as in a rollout.

    Raises DataError if the template rewrites earlier turns when later ones follow (some drop old reasoning): split such
    a conversation into one row per answer.
    """
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    whole = chat.text(len(messages))
    ids: list[int] = []
    mask: list[bool] = []
    done = 0
    for index, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = chat.before_answer(index), chat.text(index + 1)
        if not (whole.startswith(after) and after.startswith(before)):
            raise DataError(
                f"the chat template renders message {index} differently once other messages follow it; "
                "split the conversation into one row per assistant message."
            )
        header, answer = chat.encode(whole[done : len(before)]), chat.encode(after[len(before) :])
        ends = [place for place, token in enumerate(answer) if token in chat.template.controls.ids]
        learnt = ends[-1] + 1 if ends else len(answer)
        ids += header + answer
        mask += [False] * len(header) + [True] * learnt + [False] * (len(answer) - learnt)
        done = len(after)
    rest = chat.encode(whole[done:])
    ids, mask = ids + rest, mask + [False] * len(rest)
    return ids, [False, *mask[1:]] if mask else mask  # nothing precedes the first token


def render_header(
    tokenizer: Any, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any] | None = None
) -> list[int]:
    """Ids of the answer's header after a conversation. Raises DataError if the template changes earlier messages."""
    chat = _Chat.of(tokenizer, messages, chat_template_kwargs)
    before, after = chat.text(len(messages)), chat.text(len(messages), open_answer=True)
    if not after.startswith(before):
        raise DataError("the chat template renders a conversation differently once an answer is to follow it.")
    return chat.encode(after[len(before) :])


@dataclass(frozen=True)
class _Chat:
    """Messages and the template that renders them, as text in which its control tokens are marked."""

    tokenizer: Any
    messages: list[Message]
    options: dict[str, Any]
    template: MarkingTemplate

    @classmethod
    def of(cls, tokenizer: Any, messages: Sequence[Message], options: Mapping[str, Any] | None) -> _Chat:
        return cls(tokenizer, list(messages), dict(options or {}), marking_template(tokenizer, options))

    def text(self, count: int, open_answer: bool = False) -> str:
        """The first `count` messages as the template renders them, with marks."""
        return self._rendered(self.messages[:count], open_answer)

    def _rendered(self, messages: list[Message], open_answer: bool) -> str:
        return self.template.render(self.tokenizer, messages, open_answer, self.options)

    def before_answer(self, place: int) -> str:
        """The rendered text before the answer at `place`, which ends with its header.

        Templates cannot open an answer to nothing: the header of a first message is that of an answer to a question
        or, where the template writes another or none, what precedes the answer's text.
        """
        if place:
            return self.text(place, open_answer=True)
        question = [{"role": "user", "content": "?"}]
        closed, opened = self._rendered(question, False), self._rendered(question, True)
        before, found, _ = self._rendered([{**self.messages[0], "content": ANSWER}], False).partition(ANSWER)
        if not found:
            raise DataError("the chat template does not render the answer with which the conversation begins.")
        header = opened[len(closed) :]
        if opened.startswith(closed) and header and header in before:
            return before[: before.rindex(header) + len(header)]
        return before

    def after_answer(self, place: int, last: LastRendered | None = None) -> str | None:
        """The rendered text after the answer at `place`, with a header for the next; None if the rest has changed.

        White space around an answer is ignored: templates may insert or strip it.
        """
        answer, last = self.messages[place]["content"], last or LastRendered()
        after = self.text(len(self.messages), open_answer=True)
        if last.begins(place, after):
            length: int | None = last.length
        else:
            before = self.before_answer(place)
            length = len(before) if after.startswith(before) else None
        last.note(len(self.messages), after)
        if length is None:
            return None
        rest = after[length:]
        if rest.startswith(answer):
            return rest[len(answer) :]
        rest, answer = rest.lstrip(), answer.strip()
        return rest[len(answer) :] if rest.startswith(answer) else None

    def encode(self, text: str) -> list[int]:
        return self.template.controls.encode(self.tokenizer, text)
