"""Redaction of credentials: values of environment variables, and user names and passwords in URLs.

Everything that a run saves, prints or sends to trackers passes through `redact`.
"""

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
"""Words that mark a variable as a credential anywhere in its name."""
CREDENTIAL_PARTS = frozenset({"PWD", "PAT", "DSN", "PASS", "CREDS"})
"""Words that mark a variable as a credential only between underscores, unlike in PATH and DSNAME."""
_NON_CREDENTIAL_WORDS = re.compile("TOKENIZ|AUTHOR(?!I)|KEYBOARD")
"""Harmless words that contain one of CREDENTIAL_WORDS. The path of a tokenizer, for example, is not a secret."""
_CONNECTION_STRING_PART = re.compile(r"(\w+)\s*=\s*([^;\s]+)")
"""One part of a connection string such as `AccountName=team;AccountKey=...`."""
_FOLDERS = frozenset({"PWD", "OLDPWD"})
_MIN_SECRET_LENGTH = 8
"""Minimum length of secrets (characters). Shorter values ("none", "1") would redact ordinary words."""
_USER_INFO = re.compile(
    r"""(?<=://)(?:[^\s/?#"'<>\\]{1,200}@|[^\s/:@"'<>\\]{0,200}:(?!\d{1,5}(?:[/?#]|$))[^\s@"'<>\\]{0,200}@)"""
)
"""User name and password of a URL, also if the password contains characters that should have been escaped."""
_URI = re.compile(r"\s*[A-Za-z][\w+.-]{0,30}://\S*\s*$")
_MAX_USER_LENGTH = 8
"""Maximum length (characters) of a user name without a password, such as git@. A longer one is taken for a token."""

T = TypeVar("T")


def is_credential_name(variable: str) -> bool:
    """True if the name of a variable suggests that it holds a credential. Modes such as RAY_AUTH_MODE do not."""
    name = _NON_CREDENTIAL_WORDS.sub("", variable.upper())
    if name in _FOLDERS or name.endswith("_MODE"):
        return False
    return any(word in name for word in CREDENTIAL_WORDS) or not CREDENTIAL_PARTS.isdisjoint(name.split("_"))


def secret_variables(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables that hold secrets: credentials by name, and URLs with user information."""
    return {
        name: content
        for name, content in environ.items()
        if is_credential_name(name) or ("://" in content and _USER_INFO.search(content))
    }


def redact(value: T, environ: Mapping[str, str] = os.environ) -> T:
    """Return a copy of a plain value without secrets, for everything that is saved, displayed or sent.

    Values of `secret_variables` are replaced with `<NAME>`, also where they are escaped as in JSON, Python, HTML or
    URLs. Each line of a value with several lines counts. User name and password in any URL are replaced with `***`.

    Args:
        value: Text, or nested mappings, lists and tuples with texts. Tuples become lists. Keys are redacted, too.
        environ: Environment variables whose secrets are redacted.
    """
    secrets = _replacements(tuple(secret_variables(environ).items()))
    return _map_strings(value, lambda text: _replace_secrets(text, secrets))  # type: ignore[no-any-return]


def contains_secret(value: Any) -> bool:
    """True if `redact` would change a text in a plain value."""
    is_secret = False

    def check(text: str) -> str:
        nonlocal is_secret
        is_secret = is_secret or redact(text) != text
        return text

    _map_strings(value, check)
    return is_secret


def contains_password(value: Any) -> bool:
    """True if a plain value is or contains a text that is a URL with a password or token."""
    passwords: list[str] = []

    def check(text: str) -> str:
        if _URI.match(text):
            passwords.extend(match[0] for match in _USER_INFO.finditer(text) if _has_password(match[0]))
        return text

    _map_strings(value, check)
    return bool(passwords)


def find_secret_pieces(pieces: Sequence[str], environ: Mapping[str, str] = os.environ) -> list[bool]:
    """Return, for each piece of a text, True if it overlaps a secret that `redact` replaces.

    Args:
        pieces: Consecutive parts of the text, such as tokens.
        environ: Environment variables whose secrets are searched for.
    """
    text = "".join(pieces)
    spans = list(_find_secret_spans(text, _replacements(tuple(secret_variables(environ).items()))))
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
    return _USER_INFO.sub(lambda match: "***@" if _has_password(match[0]) else match[0], text)


def _find_secret_spans(text: str, secrets: Mapping[str, str]) -> Iterator[tuple[int, int]]:
    for content in secrets:
        start = -1
        while (start := text.find(content, start + 1)) >= 0:
            yield start, start + len(content)
    yield from (match.span() for match in _USER_INFO.finditer(text) if _has_password(match[0]))


def _has_password(user_info: str) -> bool:
    return ":" in user_info or len(user_info.removesuffix("@")) > _MAX_USER_LENGTH


@lru_cache(maxsize=16)
def _replacements(variables: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return secret texts -> their replacements, longest first."""
    replacements = {
        form: f"<{name}>"
        for name, content in variables
        for text in _secret_texts(name, content)
        for form in _escaped_forms(text.strip())
        if len(form) >= _MIN_SECRET_LENGTH
    }
    return dict(sorted(replacements.items(), key=lambda secret: len(secret[0]), reverse=True))


def _secret_texts(name: str, content: str) -> Iterator[str]:
    if is_credential_name(name):
        yield content
        yield from content.splitlines()
        yield from (value for part, value in _CONNECTION_STRING_PART.findall(content) if is_credential_name(part))
    for match in _USER_INFO.finditer(content):
        user, colon, password = match[0].removesuffix("@").partition(":")
        yield from (password, unquote(password)) if colon else (user,) if _has_password(user) else ()


def _escaped_forms(text: str) -> set[str]:
    """Return a text and its escaped forms in JSON, Python, HTML and URLs, also escaped twice."""
    forms = {text}
    for _ in range(2):
        forms |= {escape(form) for form in forms for escape in _ESCAPES}
    return forms


_ESCAPES: tuple[Callable[[str], str], ...] = (
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
