"""Chat templates that mark the control tokens which they write, so that nothing else becomes one.

Rendered text does not tell what wrote it: a tokenizer finds `<|im_end|>` in a message as in the template. So the
template writes a mark wherever it would write a control token. Marks alone become control tokens, and what is between
them is text. Whatever the template does to the texts of messages and options (joins, cuts, changes them) makes no mark,
as marks contain a number that nobody outside this process knows.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from skyrl_train.data.messages import Message
from skyrl_train.data.reasoning import MARKER_PATTERN, reasoning_tokens
from skyrl_train.data.token_arrays import Tokens
from skyrl_train.errors import DataError

log = logging.getLogger(__name__)

TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
)
"""What a template or `apply_chat_template` raises if it does not take messages or options."""
ROLES = ("system", "developer", "user", "assistant", "tool", "function", "observation", "ipython")
"""Roles of which a template may make control tokens, as in `'<|' + message['role'] + '|>'`."""
ANSWER_TAG_PATTERN = re.compile(MARKER_PATTERN.pattern + r"|</?(?:answer|tool\w*|function\w*|parameter\w*)>")
"""What answers contain and histories repeat: not control tokens unless the tokenizer says that they are special."""
BRACKETED_PATTERN = re.compile(r"[^\w\s].*\w.*[^\w\s]", re.DOTALL)
"""The shape of a marker; other added tokens are words or white space."""
_NONCE = f"{secrets.randbelow(10**20):020}"
ASSISTANT_PLACEHOLDER = f"{secrets.randbelow(10**20):020}"
"""Stands for an answer: no message contains it. Digits, as templates do not change them."""
_MARKS, _MARK = re.compile(rf"<\|{_NONCE}:([0-9]+)\|>"), f"<|{_NONCE}:%d|>"
_ROLES, _ROLE = re.compile(rf"<\|{_NONCE}@([a-z]+)\|>"), f"<|{_NONCE}@%s|>"
_BREAK = f"<|{_NONCE}|>"
_MAX_TEMPLATES = 16


@dataclass(frozen=True)
class ControlTokens:
    """The control tokens of a tokenizer under one chat template."""

    names: Mapping[int, str]
    """Id -> spelling, the longest first."""
    ids: frozenset[int]
    """Those that no text may become."""
    pattern: re.Pattern[str]
    """Finds any of them."""
    lstrip_ids: frozenset[int]
    """Those that swallow white space before them (`AddedToken.lstrip`)."""
    rstrip_ids: frozenset[int]
    space_guards: tuple[str, str]
    """What texts are encoded after so that no space is added to them: after a control token, within a text."""

    @classmethod
    def from_tokenizer(cls, tokenizer: Any, written: Iterable[int]) -> ControlTokens:
        """All tokens that the tokenizer calls special, and added ones that mark turns in the template's output.

        Args:
            written: Ids that the template writes around harmless messages.
        """
        added = tokenizer.added_tokens_decoder
        found = dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        found |= {id: token.content for id, token in added.items() if token.special}
        markers = {id: added[id].content for id in written if id in added and id not in found}
        found |= {
            id: name
            for id, name in markers.items()
            if BRACKETED_PATTERN.fullmatch(name) and not ANSWER_TAG_PATTERN.fullmatch(name)
        }
        names = dict(sorted(found.items(), key=lambda item: len(item[1]), reverse=True))
        ids = set(names)
        ends = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.sep_token_id, tokenizer.cls_token_id}
        if tokenizer.unk_token_id not in ends:  # ordinary text can encode to it
            ids.discard(tokenizer.unk_token_id)
        return cls(
            names,
            frozenset(ids),
            re.compile("|".join(map(re.escape, names.values())) or r"(?!)"),
            frozenset(id for id in names if id in added and added[id].lstrip),
            frozenset(id for id in names if id in added and added[id].rstrip),
            _find_space_guards(tokenizer, names),
        )

    def mark(self, text: str) -> str:
        """`text` with a mark for each control token spelt in it."""
        numbers = {name: id for id, name in self.names.items()}
        return self.pattern.sub(lambda found: _MARK % numbers[found[0]], text)

    def unmark(self, text: str) -> str:
        return _MARKS.sub(lambda found: self.names[int(found[1])], text)

    def find_control_tokens(self, tokens: Tokens) -> NDArray[np.bool_]:
        """[L] which of these are control tokens."""
        return self._table.take(tokens, mode="clip")

    @cached_property
    def reasoning(self) -> dict[int, str]:
        """Id -> spelling of those that separate a model's reasoning from its answer."""
        found = reasoning_tokens(self.names.values())
        return {id: name for id, name in self.names.items() if name in found}

    @cached_property
    def _table(self) -> NDArray[np.bool_]:
        """By id; the last entry is for all that are larger."""
        table = np.zeros(max(self.ids, default=0) + 2, bool)
        table[list(self.ids)] = True
        return table

    @cached_property
    def role_token_marks(self) -> dict[str, str]:
        """A control token's spelling with a marked role in it -> its mark."""
        pairs = ((id, name, role) for id, name in self.names.items() for role in ROLES if role in name)
        return {name.replace(role, _ROLE % role): _MARK % id for id, name, role in pairs}

    def encode(self, tokenizer: Any, marked: str) -> list[int]:
        """Ids [L] of rendered text: its marks are control tokens, nothing else is.

        Raises DataError if it is not Unicode text, or if the tokenizer has only control tokens for a part of it.
        """
        try:
            marked.encode()  # tokenizers raise TypeError
        except UnicodeEncodeError as error:
            raise DataError(f"half a surrogate pair at character {error.start} of the messages is no text.") from error
        texts, wanted = _split_marks(marked)
        ids = self._encode_rendered(tokenizer, texts, wanted)
        return self._encode_separately(tokenizer, texts, wanted) if ids is None else ids

    def matches(self, tokenizer: Any, marked: str, text: str) -> bool:
        """Whether marked text is `text`, and its marks are the control tokens that the tokenizer finds in it."""
        return self.unmark(marked) == text and self._encode_rendered(tokenizer, *_split_marks(marked)) is not None

    def _encode_rendered(self, tokenizer: Any, texts: list[str], wanted: list[int]) -> list[int] | None:
        """Ids of the text as the tokenizer reads it; None if it finds other control tokens in it, or elsewhere.

        Spellings are compared, as ids do not show where they come from, and ids, as normalization makes control tokens
        of what is spelt differently.
        """
        pieces, starts, at = [texts[0]], [], len(texts[0])
        for id, text in zip(wanted, texts[1:], strict=True):
            name = self.names[id]
            pieces += [name, text]
            starts.append(at)
            at += len(name) + len(text)
        rendered = "".join(pieces)
        found = (match.start() for match in self.pattern.finditer(rendered))
        if any(next(found, None) != start for start in [*starts, None]):
            return None
        ids: list[int] = tokenizer(rendered, add_special_tokens=False)["input_ids"]
        return ids if [id for id in ids if id in self.ids] == [id for id in wanted if id in self.ids] else None

    def _encode_separately(self, tokenizer: Any, texts: list[str], wanted: list[int]) -> list[int]:
        """Ids of control tokens and of the texts around them, which are encoded alone."""
        for place, id in enumerate(wanted):
            if id in self.lstrip_ids:
                texts[place] = texts[place].rstrip()
            if id in self.rstrip_ids:
                texts[place + 1] = texts[place + 1].lstrip()
        keys = [("", texts[0]), *((self.space_guards[0], text) for text in texts[1:])]
        ids_of = self._encode_plain(tokenizer, list(dict.fromkeys(keys)))
        ids = list(ids_of[keys[0]])
        for id, key in zip(wanted, keys[1:], strict=True):
            ids += [id, *ids_of[key]]
        return ids

    def _encode_plain(self, tokenizer: Any, left: list[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
        """(lead, text) -> ids without control tokens, of pieces as long as possible."""
        found: dict[tuple[str, str], list[int]] = {}
        inside = self.space_guards[1]
        for cut in (self._split_at_controls, self._split_controls, list):
            cuts = {(lead, text): cut(text) or [""] for lead, text in left}
            heads = [(lead, pieces[0]) for (lead, _), pieces in cuts.items()]
            tails = {(inside, piece) for pieces in cuts.values() for piece in pieces[1:]}
            ids_of = _encode_after_leads(tokenizer, [*heads, *tails])
            for (lead, text), pieces in cuts.items():
                rest = [id for piece in pieces[1:] for id in ids_of[inside, piece]]
                found[lead, text] = ids_of[lead, pieces[0]] + rest
            left = [key for key in left if not self.ids.isdisjoint(found[key])]
            if not left:
                return found
        raise DataError(f"the tokenizer cannot encode {left[0][1][:100]!r} as text; remove it from the messages.")

    def _split_at_controls(self, text: str) -> list[str]:
        """What is spelt often is then encoded once."""
        return [piece for piece in re.split(f"({self.pattern.pattern})", text) if piece]

    def _split_controls(self, text: str) -> list[str]:
        """Control tokens as characters, for vocabularies that also have them as words."""
        pieces = self._split_at_controls(text)
        return [part for piece in pieces for part in (piece if self.pattern.fullmatch(piece) else [piece])]


def _split_marks(marked: str) -> tuple[list[str], list[int]]:
    """The texts around marks, one more than these, and the control tokens that they stand for."""
    parts = _MARKS.split(marked)
    return parts[::2], [int(id) for id in parts[1::2]]


def _encode_after_leads(tokenizer: Any, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], list[int]]:
    """(lead, text) -> ids of the text as they are after the lead, special tokens spelt out.

    All in one call, which costs as much as encoding a hundred characters.
    """
    keys = list(dict.fromkeys(keys))
    leads = list(dict.fromkeys(lead for lead, _ in keys if lead))
    texts = [*leads, *(lead + text for lead, text in keys)]
    encoded = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    before = {"": [], **dict(zip(leads, encoded, strict=False))}
    found = {}
    for (lead, text), ids in zip(keys, encoded[len(leads) :], strict=True):
        size = len(before[lead])
        if ids[:size] == before[lead]:
            found[lead, text] = ids[size:]
        else:  # the two have merged
            found[lead, text] = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return found


def _find_space_guards(tokenizer: Any, names: Mapping[int, str]) -> tuple[str, str]:
    """What keeps a tokenizer from adding a space to text that follows a control token, and to text inside another.

    Sentencepiece's add one to the beginning of whatever is encoded, or only to the beginning of the whole.
    """

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    line, alone, joined = ids("\n"), ids("x"), ids("\nx")
    if joined == line + alone or joined[: len(line)] != line:
        return "", ""
    after = next((ids(name + "x")[1:] for id, name in names.items() if ids(name + "x")[:1] == [id]), alone)
    return "\n" if after == joined[len(line) :] else "", "\n"


class _Role(str):
    """A role that is equal to what it was, and is written with a mark."""

    def __str__(self) -> str:
        return _ROLE % str.__str__(self)

    def __add__(self, other: str) -> str:
        return str(self) + other

    def __radd__(self, other: str) -> str:
        return other + str(self)


@dataclass(frozen=True)
class MarkingTemplate:
    """A chat template of a tokenizer, as it renders marks in the place of its control tokens."""

    controls: ControlTokens
    source: str | None
    """None if the tokenizer has no template."""
    variables: Mapping[str, str]
    """bos_token, eos_token... with marks."""
    mode: str = "literals"
    """What is marked.

    "literals": the control tokens in the template's source.
    "roles": also roles, for templates that make control tokens of them.
    "messages": those spelt in messages and options are broken, and all that are rendered count; for templates that make
    control tokens in other ways. These do not notice one that they join from several texts.
    """
    cache: dict[str, Any] = field(default_factory=dict, compare=False)
    """Results of the modules that examine this template, kept for as long as it is."""

    def render(
        self, tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        """`messages` as text with marks. Raises DataError if the template does not take them."""
        try:
            return self._render_marked(tokenizer, messages, add_generation_prompt, options)
        except TEMPLATE_ERRORS as error:
            reason = _ROLES.sub(r"\1", self.controls.unmark(str(error))).replace(_NONCE, "")
            raise DataError(f"the chat template does not take these messages: {reason}") from error

    def _render_marked(
        self, tokenizer: Any, messages: Sequence[Message], add_generation_prompt: bool, options: Mapping[str, Any]
    ) -> str:
        if self.mode == "roles":
            messages = [
                {**message, "role": _Role(message["role"])} if message.get("role") in ROLES else message
                for message in messages
            ]
        if self.mode == "messages":
            messages, options = self._break_tokens(list(messages)), self._break_tokens(dict(options))
        text: str = tokenizer.apply_chat_template(
            list(messages),
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            **{**self.variables, **options, "chat_template": self.source},
        )
        if self.mode == "roles":
            for name, mark in self.controls.role_token_marks.items():
                text = text.replace(name, mark)
            text = _ROLES.sub(r"\1", text)
        return self.controls.mark(text).replace(_BREAK, "") if self.mode == "messages" else text

    def _break_tokens(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.controls.pattern.sub(lambda found: found[0][:1] + _BREAK + found[0][1:], value)
        if isinstance(value, Mapping):
            return {self._break_tokens(key): self._break_tokens(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._break_tokens(item) for item in value]
        return value


_TEMPLATES: WeakKeyDictionary[Any, dict[Any, MarkingTemplate]] = WeakKeyDictionary()


def get_marking_template(tokenizer: Any, options: Mapping[str, Any] | None = None) -> MarkingTemplate:
    """The template of a tokenizer, or the one that `options["chat_template"]` gives or names.

    Made once for each state of the tokenizer.
    """
    options = options or {}
    try:
        source = tokenizer.get_chat_template(options.get("chat_template"), options.get("tools"))
    except ValueError:
        source = None
    named = tokenizer.special_tokens_map
    key = source, len(tokenizer), len(tokenizer.extra_special_tokens), *named.items()
    kept = _TEMPLATES.setdefault(tokenizer, {})
    template = kept.get(key)
    if template is None:
        if len(kept) >= _MAX_TEMPLATES:
            kept.clear()
        template = kept[key] = _make_template(tokenizer, source, named)
    return template


def _make_template(tokenizer: Any, source: str | None, named: Mapping[str, str]) -> MarkingTemplate:
    """The first way of marking under which harmless conversations are rendered as without marks."""
    if source is None:
        return MarkingTemplate(ControlTokens.from_tokenizer(tokenizer, ()), None, {})
    rendered = list(_render_harmless(tokenizer, source))
    texts = [text for _, open_answer, text in rendered if not open_answer]
    encoded = tokenizer(texts or [source], add_special_tokens=False)["input_ids"]
    controls = ControlTokens.from_tokenizer(tokenizer, set().union(*encoded))
    marked = controls.mark(source), {name: controls.mark(token) for name, token in named.items()}
    for way in ("literals", "roles"):
        template = MarkingTemplate(controls, *marked, way)
        try:
            if all(
                controls.matches(tokenizer, template.render(tokenizer, messages, open_answer, {}), text)
                for messages, open_answer, text in rendered
            ):
                return template
        except DataError:
            continue
    log.warning("The chat template makes control tokens in a way of its own: texts that it joins are not watched.")
    return MarkingTemplate(controls, source, {}, "messages")


def _render_harmless(tokenizer: Any, source: str) -> Iterator[tuple[list[Message], bool, str]]:
    """(messages, whether an answer is opened, text) of conversations that the template takes, out of every role."""
    talk = [("user", "x"), ("assistant", "y"), ("user", "z")]
    tool = [*talk[:2], ("tool", "w"), ("assistant", "y")]
    for turns in (talk[:1], talk, [("system", "v"), *talk], tool):
        for parts in (False, True):
            messages: list[Message] = [
                {"role": role, "content": [{"type": "text", "text": text}] if parts else text} for role, text in turns
            ]
            for add_generation_prompt in (False, True):
                try:
                    text = tokenizer.apply_chat_template(
                        messages, tokenize=False, add_generation_prompt=add_generation_prompt, chat_template=source
                    )
                except TEMPLATE_ERRORS:
                    continue
                yield messages, add_generation_prompt, text


# -- the token that ends an answer -------------------------------------------------------------------------------------


def find_end_of_turn_token(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> int | None:
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
    template = get_marking_template(tokenizer, options)
    last = _closing_tokens(tokenizer, template, options, followed=False)
    earlier = _closing_tokens(tokenizer, template, options, followed=True)
    shared = [id for id, _ in takewhile(lambda pair: pair[0] == pair[1], zip(last, earlier, strict=False))]
    closing = shared or last or earlier[:1]
    return closing[-1] if closing else None


def find_end_of_turn_name(tokenizer: Any, chat_template_kwargs: Mapping[str, Any] | None = None) -> str:
    """Return the spelling of the end-of-turn token, or else of the end of sequence; empty if there is neither."""
    end = find_end_of_turn_token(tokenizer, chat_template_kwargs)
    end = getattr(tokenizer, "eos_token_id", None) if end is None else end
    return "" if end is None else str(tokenizer.convert_ids_to_tokens(end))


def _closing_tokens(
    tokenizer: Any, template: MarkingTemplate, options: Mapping[str, Any], *, followed: bool
) -> list[int]:
    """Return the control tokens right after an answer, which is `followed` by another message or the last one."""
    turns = [("user", "?"), ("assistant", ASSISTANT_PLACEHOLDER), ("user", "?")][: 3 if followed else 2]
    messages = [{"role": role, "content": content} for role, content in turns]
    try:
        text = template.render(tokenizer, messages, False, options)
        ids = template.controls.encode(tokenizer, text.partition(ASSISTANT_PLACEHOLDER)[2].lstrip())
    except DataError:
        return []
    return list(takewhile(template.controls.ids.__contains__, ids))
