"""What each token id of a tokenizer reads as, for those who look at tokens without it."""

from __future__ import annotations

import re
from typing import Any

_ANCHOR = "a"
"""Decoded before each token: some decoders drop the space that a text begins with."""
_REPLACED = "\ufffd"
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = sorted({*range(0x100)} - {*_PRINTABLE})
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + n): byte for n, byte in enumerate(_OTHERS)}
"""How tokenizers that work on bytes spell them in the names of tokens."""


def vocabulary_texts(tokenizer: Any) -> list[str]:
    """The text of each token id, 0 to len(tokenizer) - 1; bytes that are no text by themselves appear as <0xE2>."""
    ids = range(len(tokenizer))
    anchor = list(tokenizer.encode(_ANCHOR, add_special_tokens=False))
    before = tokenizer.decode(anchor)
    texts = _decoded(tokenizer, [[*anchor, token] for token in ids])
    names = tokenizer.convert_ids_to_tokens(list(ids))
    return [
        text.removeprefix(before) if _REPLACED not in text and text.startswith(before) else _of_bytes(name or "")
        for text, name in zip(texts, names, strict=True)
    ]


def _decoded(tokenizer: Any, sequences: list[list[int]]) -> list[str]:
    fast = getattr(tokenizer, "backend_tokenizer", None)
    if fast is not None:  # on all cores, and other threads go on meanwhile
        return list(fast.decode_batch(sequences, skip_special_tokens=False))
    return list(tokenizer.batch_decode(sequences, skip_special_tokens=False))


def _of_bytes(name: str) -> str:
    """What a token of this name reads as, if it spells bytes; else its name."""
    if not all(character in _BYTES for character in name):
        return name
    text = bytes(_BYTES[character] for character in name).decode("utf-8", "surrogateescape")
    return re.sub("[\udc80-\udcff]", lambda one: f"<0x{ord(one[0]) - 0xDC00:02X}>", text)
