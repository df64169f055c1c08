"""The scope of engine requests: their seeds and names follow from the rollouts they belong to, not from time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class SeedScope:
    """The requests of one call of a generator's `generate`, or all requests outside such a call."""

    name: str
    _calls: Counter[str] = field(default_factory=Counter)

    def next_request_index(self, session: str) -> int:
        """Count a request of the session, and return its index within the scope, from 0."""
        self._calls[session] += 1
        return self._calls[session] - 1


_scope: ContextVar[SeedScope | None] = ContextVar("scope", default=None)
_OUTSIDE = SeedScope("outside")


@contextmanager
def seed_scope(name: str) -> Iterator[None]:
    """Let requests belong to a new scope while the context is open, also those of tasks that start inside."""
    token = _scope.set(SeedScope(name))
    try:
        yield
    finally:
        _scope.reset(token)


def current_seed_scope() -> SeedScope:
    """Return the innermost open scope, or that of requests outside any scope."""
    return _scope.get() or _OUTSIDE
