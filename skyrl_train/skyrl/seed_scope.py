"""Which rollouts a generator's calls belong to: their seeds and names follow from it, not from time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field


@dataclass
class SeedScope:
    """One call of `generate`, or (by default) all calls that nobody asked for."""

    name: str
    _calls: Counter[str] = field(default_factory=Counter)

    def next_request_index(self, session: str) -> int:
        """How many requests of that session there were before, within the scope."""
        self._calls[session] += 1
        return self._calls[session] - 1


_scope: ContextVar[SeedScope | None] = ContextVar("scope", default=None)
_OUTSIDE = SeedScope("outside")


@contextmanager
def seed_scope(name: str) -> Iterator[None]:
    """Requests made inside, also by tasks that begin there, belong to a scope of that name."""
    token = _scope.set(SeedScope(name))
    try:
        yield
    finally:
        _scope.reset(token)


def current_seed_scope() -> SeedScope:
    return _scope.get() or _OUTSIDE
