"""Credentials of the environment, by the names of their variables: never in files, trackers or messages of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

CREDENTIAL_WORDS = ("KEY", "TOKEN", "SECRET", "PASSW", "PASSPHRASE", "_PASS", "CREDENTIAL", "AUTH", "COOKIE", "JWT")
_SHORTEST_SECRET = 8
"""Shorter values of credential variables ("none", "1") would blank out ordinary words."""

T = TypeVar("T")


def looks_like_credential(variable: str) -> bool:
    """Whether the name is that of a credential; how one is asked for (RAY_AUTH_MODE) is none."""
    return any(word in variable.upper() for word in CREDENTIAL_WORDS) and not variable.upper().endswith("_MODE")


def redact(value: T, environ: Mapping[str, str] = os.environ) -> T:
    """The same plain value without the contents of credential variables, for whatever is saved, shown or sent away."""
    secrets = {
        content.strip(): f"<{name}>"
        for name, content in environ.items()
        if looks_like_credential(name) and len(content.strip()) >= _SHORTEST_SECRET
    }
    longest_first = dict(sorted(secrets.items(), key=lambda secret: len(secret[0]), reverse=True))
    return _replace(value, longest_first)  # type: ignore[no-any-return]


def _replace(value: Any, secrets: Mapping[str, str]) -> Any:
    if isinstance(value, Mapping):
        return {_replace(key, secrets): _replace(item, secrets) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_replace(item, secrets) for item in value]
    if isinstance(value, str):
        for content, name in secrets.items():
            value = value.replace(content, name)
    return value
