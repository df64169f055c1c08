"""Texts and bytes of single tokens, for a complete vocabulary and for the tokens of a decoded text."""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

_ANCHOR = "a"
"""Text that is decoded before each token, because some decoders drop a space at the beginning of a text."""
_REPLACED = "\ufffd"
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(0x100)} - {*_PRINTABLE})
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}
"""Characters that byte-level tokenizers write for bytes in the names of tokens -> the bytes."""
_FALLBACK = re.compile("<0x([0-9A-F]{2})>")
"""Names of single-byte tokens of tokenizers with byte fallback."""
_WINDOW = 64
"""Number of characters that are searched for the next token after a token whose text was not found."""


def get_vocabulary_texts(tokenizer: Any) -> list[str]:
    """Return the text of each token id, from 0 to len(tokenizer) - 1.

    A byte that is not part of a complete character is written as in <0xE2>.
    """
    return [_to_readable_text(token.data) for token in _read_token_bytes(tokenizer, range(len(tokenizer)))]


def token_text(tokenizer: Any, token: int) -> str:
    """Return the text of one token id, as in `get_vocabulary_texts`. The text of a control token is its name."""
    (token_bytes,) = _read_token_bytes(tokenizer, [token])
    return _to_readable_text(token_bytes.data)


def decode_continuation(tokenizer: Any, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
    """Decode tokens as the continuation of a text, so that a space at their beginning is kept.

    Args:
        tokenizer: A Hugging Face tokenizer.
        tokens: Token ids [L].
        skip_special_tokens: Leave out special tokens.
    """
    anchor = _encode_anchor(tokenizer)
    before = tokenizer.decode(anchor, skip_special_tokens=skip_special_tokens)
    text = str(tokenizer.decode([*anchor, *tokens], skip_special_tokens=skip_special_tokens))
    if text.startswith(before):
        return text.removeprefix(before)
    return str(tokenizer.decode(list(tokens), skip_special_tokens=skip_special_tokens))


class TokenPart(NamedTuple):
    """The part of a text that belongs to one token."""

    text: str
    """Characters of the token. A character of several tokens belongs to the token that completes it."""
    data: bytes
    """UTF-8 bytes of the token. Of a character of several tokens it has only this token's bytes."""


class TokenAligner:
    """Splits texts into the parts of the tokens that they were decoded from. It caches the bytes of tokens.

    Args:
        tokenizer: A Hugging Face tokenizer.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._known: dict[int, _TokenBytes] = {}

    def align(self, text: str, tokens: Sequence[int], omitted: Collection[int] = ()) -> list[TokenPart]:
        """Return the part of each token [L]. The texts of the parts, joined, are always `text`.

        Text whose tokens cannot be determined belongs to one of the tokens around it.

        Args:
            text: Text that the tokenizer decoded from the tokens. It may lack spaces that the decoder dropped.
            tokens: Token ids [L].
            omitted: Ids that were left out of the text, such as control tokens. Their parts are empty.
        """
        parts = [TokenPart("", b"")] * len(tokens)
        unplaced: list[int] = []  # indices of tokens before `position` whose texts differ from the text there
        position = 0
        for indices, run in self._iter_runs(tokens, omitted):
            start, run_parts = _locate_run(run, text, position, search=bool(unplaced))
            if start < 0:
                unplaced += indices
                continue
            if unplaced:
                parts[unplaced[-1]] = TokenPart(text[position:start], text[position:start].encode())
                unplaced = []
            for index, part in zip(indices, run_parts, strict=True):
                parts[index] = part
            position = start + len(_join_texts(run_parts))
        if position < len(text) and parts:
            index = unplaced[-1] if unplaced else -1
            rest = text[position:]
            parts[index] = TokenPart(parts[index].text + rest, parts[index].data + rest.encode())
        return parts

    def _iter_runs(
        self, tokens: Sequence[int], omitted: Collection[int]
    ) -> Iterator[tuple[list[int], list[_TokenBytes]]]:
        """Yield the indices and bytes of tokens to decode together: a single token, or consecutive byte tokens."""
        new = [token for token in dict.fromkeys(tokens) if token not in self._known]
        self._known.update(zip(new, _read_token_bytes(self._tokenizer, new), strict=True))
        indices: list[int] = []
        run: list[_TokenBytes] = []
        for index, token in enumerate(tokens):
            token_bytes = self._known[token]
            if token in omitted or not token_bytes.data:
                continue
            if run and not (token_bytes.is_partial and run[-1].is_partial):
                yield indices, run
                indices, run = [], []
            indices.append(index)
            run.append(token_bytes)
        if run:
            yield indices, run


def get_token_parts(tokenizer: Any, tokens: Sequence[int]) -> list[TokenPart]:
    """Return each token as a text of its own. Bytes that are no complete character have the text `<0xC3>`."""
    return [TokenPart(_to_readable_text(each.data), each.data) for each in _read_token_bytes(tokenizer, tokens)]


class _TokenBytes(NamedTuple):
    data: bytes
    is_partial: bool
    """True if the bytes alone are not complete characters, or if this is a byte-fallback token."""


def _read_token_bytes(tokenizer: Any, tokens: Sequence[int]) -> list[_TokenBytes]:
    """Return the bytes that each token adds to a text before it."""
    if not tokens:
        return []
    anchor = _encode_anchor(tokenizer)
    before = tokenizer.decode(anchor)
    texts = _decode_batch(tokenizer, [[*anchor, token] for token in tokens])
    names = tokenizer.convert_ids_to_tokens(list(tokens))
    return [
        _to_token_bytes(name or "", text.removeprefix(before) if text.startswith(before) else None)
        for text, name in zip(texts, names, strict=True)
    ]


def _to_token_bytes(name: str, text: str | None) -> _TokenBytes:
    """Return a token's bytes from its text, or from its name if the text is unknown or has replacement characters."""
    byte = _FALLBACK.fullmatch(name)
    if text is not None and _REPLACED not in text:
        return _TokenBytes(text.encode(), byte is not None)
    if byte is not None:
        return _TokenBytes(bytes.fromhex(byte[1]), True)
    if name and all(character in _BYTES for character in name):
        data = bytes(_BYTES[character] for character in name)
        return _TokenBytes(data, _REPLACED in data.decode("utf-8", "replace"))
    return _TokenBytes((name if text is None else text).encode(), False)


def _locate_run(run: Sequence[_TokenBytes], text: str, position: int, *, search: bool) -> tuple[int, list[TokenPart]]:
    """Return the index of a run's text and the parts of its tokens; the index is -1 if the text is not found.

    The text must be at `position`, or with `search` at most _WINDOW characters after it.
    """
    exact = _decode_run(run)
    variants = [exact]
    if exact[0].text.startswith(" "):  # decoders drop spaces at the beginning and before punctuation
        variants.append([TokenPart(exact[0].text[1:], exact[0].data[1:]), *exact[1:]])
    if all(token.is_partial and len(token.data) == 1 for token in run):  # one invalid byte replaces the whole run
        variants.append([TokenPart(_REPLACED, token.data) for token in run])
    for parts in variants:
        if (run_text := _join_texts(parts)) and text.startswith(run_text, position):
            return position, parts
    run_text = _join_texts(exact)
    return text.find(run_text, position, position + _WINDOW + len(run_text)) if search else -1, exact


def _decode_run(run: Sequence[_TokenBytes]) -> list[TokenPart]:
    decoder = getincrementaldecoder("utf-8")("replace")
    last = len(run) - 1
    return [TokenPart(decoder.decode(token.data, final=index == last), token.data) for index, token in enumerate(run)]


def _join_texts(parts: Sequence[TokenPart]) -> str:
    return "".join(part.text for part in parts)


def _to_readable_text(data: bytes) -> str:
    text = data.decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda match: f"<0x{ord(match[0]) - 0xDC00:02X}>", text)


def _encode_anchor(tokenizer: Any) -> list[int]:
    return list(tokenizer.encode(_ANCHOR, add_special_tokens=False))


def _decode_batch(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:  # it uses all cores and releases the GIL
        return list(fast.decode_batch(sequences, skip_special_tokens=False))
    return list(tokenizer.batch_decode(sequences, skip_special_tokens=False))
