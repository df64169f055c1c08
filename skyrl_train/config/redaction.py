"""Credentials of the environment and in addresses: never in files, trackers or messages of a run."""

from __future__ import annotations

import html
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar
from urllib.parse import quote, quote_plus, unquote

CREDENTIAL_WORDS = (
    "KEY", "TOKEN", "SECRET", "PASSW", "PASSPHRASE", "_PASS", "CREDENTIAL", "AUTH", "COOKIE", "JWT", "WEBHOOK",
    "CONNECTION_STRING", "CONNECTIONSTRING", "CONN_STR", "BEARER",
)  # fmt: skip
"""Anywhere in the name of a variable."""
CREDENTIAL_PARTS = frozenset({"PWD", "PAT", "DSN", "PASS", "CREDS"})
"""Between the underscores of a name: PATH and DSNAME are none."""
_NON_CREDENTIAL_WORDS = re.compile("TOKENIZ|AUTHOR(?!I)|KEYBOARD")
"""Parts of names that have one of CREDENTIAL_WORDS in them. A model's path must not be taken for a secret."""
_NAMED_PART = re.compile(r"(\w+)\s*=\s*([^;\s]+)")
"""Of a connection string: `AccountName=team;AccountKey=...`."""
_FOLDERS = frozenset({"PWD", "OLDPWD"})
_MIN_SECRET_LENGTH = 8
"""Shorter values of credential variables ("none", "1") would blank out ordinary words."""
_USER_INFO = re.compile(
    r"""(?<=://)(?:[^\s/?#"'<>\\]{1,200}@|[^\s/:@"'<>\\]{0,200}:(?!\d{1,5}(?:[/?#]|$))[^\s@"'<>\\]{0,200}@)"""
)
"""Name and password in an address, also where the password has signs that should be escaped."""
_URI = re.compile(r"\s*[A-Za-z][\w+.-]{0,30}://\S*\s*$")
_MAX_USER_LENGTH = 8
"""Characters of a name without a password, such as git@, that is not taken for a token."""

T = TypeVar("T")


def is_credential_name(variable: str) -> bool:
    """Whether the name is that of a credential; how one is asked for (RAY_AUTH_MODE) is none."""
    name = _NON_CREDENTIAL_WORDS.sub("", variable.upper())
    if name in _FOLDERS or name.endswith("_MODE"):
        return False
    return any(word in name for word in CREDENTIAL_WORDS) or not CREDENTIAL_PARTS.isdisjoint(name.split("_"))


def secret_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that hold secrets: credentials, and addresses with a password."""
    return {
        name: content
        for name, content in environ.items()
        if is_credential_name(name) or ("://" in content and _USER_INFO.search(content))
    }


def redact(value: T, environ: Mapping[str, str] = os.environ) -> T:
    """Return the same plain value without secrets, for whatever is saved, shown or sent away.

    The contents of `secret_variables` become `<NAME>`, as they are and as JSON, Python, HTML and addresses write them,
    line by line if they have several. Name and password in any address become `***`.
    """
    secrets = _secrets(tuple(secret_variables(environ).items()))
    return _map_strings(value, lambda text: _replace_secrets(text, secrets))  # type: ignore[no-any-return]


def contains_secret(value: Any) -> bool:
    """Return whether `redact` would change a plain value."""
    found = False

    def look(text: str) -> str:
        nonlocal found
        found = found or redact(text) != text
        return text

    _map_strings(value, look)
    return found


def contains_password(value: Any) -> bool:
    """Return whether a plain value is, or has in it, an address with a password."""
    found: list[str] = []

    def look(text: str) -> str:
        if _URI.match(text):
            found.extend(one[0] for one in _USER_INFO.finditer(text) if _has_password(one[0]))
        return text

    _map_strings(value, look)
    return bool(found)


def find_secret_pieces(pieces: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[bool]:
    """Return for each piece of a text, such as a token, whether it is part of a secret that `redact` replaces."""
    text = "".join(pieces)
    spans = list(_spans(text, _secrets(tuple(secret_variables(environ).items()))))
    if not spans:
        return [False] * len(pieces)
    hidden = bytearray(len(text))
    for start, stop in spans:
        hidden[start:stop] = b"\1" * (stop - start)
    stops = accumulate(map(len, pieces))
    return [any(hidden[stop - len(piece) : stop]) for piece, stop in zip(pieces, stops, strict=True)]


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, Mapping):
        return {_map_strings(key, change): _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_map_strings(item, change) for item in value]
    return change(value) if isinstance(value, str) else value


def _replace_secrets(text: str, secrets: Mapping[str, str]) -> str:
    for content, name in secrets.items():
        text = text.replace(content, name)
    if "://" not in text:
        return text
    return _USER_INFO.sub(lambda found: "***@" if _has_password(found[0]) else found[0], text)


def _spans(text: str, secrets: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    for content in secrets:
        start = -1
        while (start := text.find(content, start + 1)) >= 0:
            yield start, start + len(content)
    yield from (found.span() for found in _USER_INFO.finditer(text) if _has_password(found[0]))


def _has_password(user_info: str) -> bool:
    return ":" in user_info or len(user_info.removesuffix("@")) > _MAX_USER_LENGTH


@lru_cache(maxsize=16)
def _secrets(variables: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Text to look for -> what is shown instead, longest first."""
    found = {
        form: f"<{name}>"
        for name, content in variables
        for text in _secret_texts(name, content)
        for form in _escaped_forms(text.strip())
        if len(form) >= _MIN_SECRET_LENGTH
    }
    return dict(sorted(found.items(), key=lambda secret: len(secret[0]), reverse=True))


def _secret_texts(name: str, content: str) -> Iterator[str]:
    if is_credential_name(name):
        yield content
        yield from content.splitlines()
        yield from (value for part, value in _NAMED_PART.findall(content) if is_credential_name(part))
    for found in _USER_INFO.finditer(content):
        user, colon, password = found[0].removesuffix("@").partition(":")
        yield from (password, unquote(password)) if colon else (user,) if _has_password(user) else ()


def _escaped_forms(text: str) -> set[str]:
    """A text, and as it is written inside JSON, Python, HTML and addresses, also inside another one of them."""
    forms = {text}
    for _ in range(2):
        forms |= {write(form) for form in forms for write in _WRITERS}
    return forms


_WRITERS: tuple[Callable[[str], str], ...] = (
    lambda text: json.dumps(text)[1:-1],
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1].replace("/", "\\/"),
    lambda text: repr(text)[1:-1],
    lambda text: repr(text.encode(errors="replace"))[2:-1],
    lambda text: html.escape(text),
    lambda text: quote(text, safe="", errors="replace"),
    lambda text: quote(text, errors="replace"),
    lambda text: quote_plus(text, errors="replace"),
    lambda text: re.sub("%..", lambda code: code[0].lower(), quote(text, safe="", errors="replace")),
)
