"""Texts and bytes of single tokens: of every id of a vocabulary, and of the tokens of one text."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

_ANCHOR = "a"
"""Decoded before each token: some decoders drop the space that a text begins with."""
_REPLACED = "\ufffd"
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(0x100)} - {*_PRINTABLE})
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}
"""How byte-level tokenizers spell bytes in the names of tokens."""
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""How tokenizers with byte fallback name the tokens of single bytes."""
_WINDOW = 64
"""Characters that are searched for the next token after one whose text was not found."""


def get_vocabulary_texts(tokenizer: Any) -> list[str]:
    """Return the text of each token id, 0 to len(tokenizer) - 1; bytes that are no complete character read <0xE2>."""
    return [_readable(token.data) for token in _read_spellings(tokenizer, range(len(tokenizer)))]


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of one token id as `vocabulary_texts` does; control tokens have their name."""
    (spelling,) = _read_spellings(tokenizer, [token])
    return _readable(spelling.data)


def decode_continuation(tokenizer: Any, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Return the text that tokens add to a text before them: with the space that a text would not begin with."""
    anchor = _anchor(tokenizer)
    before = tokenizer.decode(anchor, skip_special_tokens=skip_special_tokens)
    text = str(tokenizer.decode([*anchor, *tokens], skip_special_tokens=skip_special_tokens))
    if text.startswith(before):
        return text.removeprefix(before)
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))


class TokenPart(NamedTuple):
    """A token's part of a text."""

    text: str
    """A character of several tokens belongs to the one that completes it."""
    data: bytes
    """UTF-8; of a character of several tokens the bytes of this one."""


class TokenAligner:
    """Divides texts among the tokens that they were decoded from."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known: dict[int, _Spelling] = {}

    def align(self, text: str, tokens: Sequence[int], omitted: Collection[int] = ()) -> list[TokenPart]:
        """Return the part of each token. The parts' texts, joined, are always the text.

        Args:
            text: What the tokenizer decodes from the tokens. Spaces that it dropped are tolerated.
            tokens: [L] ids.
            silent: Ids that were left out of the text, such as control tokens. Their parts are empty.
        """
        parts = [TokenPart("", b"")] * len(tokens)
        unplaced: list[int] = []  # tokens before `at` that do not read as the text does there
        at = 0
        for places, run in self._runs(tokens, omitted):
            start, reading = _locate_run(run, text, at, search=bool(unplaced))
            if start < 0:
                unplaced += places
                continue
            if unplaced:
                parts[unplaced[-1]] = TokenPart(text[at:start], text[at:start].encode())
                unplaced = []
            for place, part in zip(places, reading, strict=True):
                parts[place] = part
            at = start + len(_joined(reading))
        if at < len(text) and parts:
            place = unplaced[-1] if unplaced else -1
            parts[place] = TokenPart(parts[place].text + text[at:], parts[place].data + text[at:].encode())
        return parts

    def _runs(self, tokens: Sequence[int], omitted: Collection[int]) -> Iterator[tuple[list[int], list[_Spelling]]]:
        """Yield places and spellings of tokens to read together: single ones, or neighbours that are bytes."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._known]
        self._known.update(zip(new, _read_spellings(self._tokenizer, new), strict=True))
        places: list[int] = []
        run: list[_Spelling] = []
        for place, token in enumerate(tokens):
            spelling = self._known[token]
            if token in omitted or not spelling.data:
                continue
            if run and not (spelling.is_bytes and run[-1].is_bytes):
                yield places, run
                places, run = [], []
            places.append(place)
            run.append(spelling)
        if run:
            yield places, run


class _Spelling(NamedTuple):
    data: bytes
    is_bytes: bool
    """True if these bytes alone are not characters, or if this is the byte-fallback token of one byte."""


def _read_spellings(tokenizer: Any, tokens: Sequence[int]) -> list[_Spelling]:
    """Return what each token adds to a text before it."""
    if not tokens:
        return []
    anchor = _anchor(tokenizer)
    before = tokenizer.decode(anchor)
    texts = _decoded(tokenizer, [[*anchor, token] for token in tokens])
    names = tokenizer.convert_ids_to_tokens(list(tokens))
    return [
        _spelling(name or "", text.removeprefix(before) if text.startswith(before) else None)
        for text, name in zip(texts, names, strict=True)
    ]


def _spelling(name: str, text: str | None) -> _Spelling:
    """Read a token's bytes from its text, or from its name if the text has none or replaced them."""
    byte = _FALLBACK.fullmatch(name)
    if text is not None and _REPLACED not in text:
        return _Spelling(text.encode(), byte is not None)
    if byte is not None:
        return _Spelling(bytes.fromhex(byte[1]), True)
    if name and all(character in _BYTES for character in name):
        data = bytes(_BYTES[character] for character in name)
        return _Spelling(data, _REPLACED in data.decode("utf-8", "replace"))
    return _Spelling((name if text is None else text).encode(), False)


def _locate_run(run: Sequence[_Spelling], text: str, at: int, *, search: bool) -> tuple[int, list[TokenPart]]:
    """Return where the run's tokens stand in the text, at `at` or soon after it, and their parts; -1 if nowhere."""
    exact = _read(run)
    readings = [exact]
    if exact[0].text.startswith(" "):  # decoders drop spaces at the beginning and before punctuation
        readings.append([TokenPart(exact[0].text[1:], exact[0].data[1:]), *exact[1:]])
    if all(one.is_bytes and len(one.data) == 1 for one in run):  # byte fallback: one wrong byte makes all of them wrong
        readings.append([TokenPart(_REPLACED, one.data) for one in run])
    for reading in readings:
        if (read := _joined(reading)) and text.startswith(read, at):
            return at, reading
    read = _joined(exact)
    return text.find(read, at, at + _WINDOW + len(read)) if search else -1, exact


def _read(run: Sequence[_Spelling]) -> list[TokenPart]:
    decoder = getincrementaldecoder("utf-8")("replace")
    last = len(run) - 1
    return [TokenPart(decoder.decode(one.data, final=place == last), one.data) for place, one in enumerate(run)]


def _joined(parts: Sequence[TokenPart]) -> str:
    return "".join(part.text for part in parts)


def _readable(data: bytes) -> str:
    text = data.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda one: f"<0x{ord(one[0]) - 0xDC00:02X}>", text)


def _anchor(tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(_ANCHOR, add_special_tokens=False))


def _decoded(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:  # on all cores, and other threads go on meanwhile
        return list(fast.decode_batch(sequences, skip_special_tokens=False))
    return list(tokenizer.batch_decode(sequences, skip_special_tokens=False))
