"""torchrl itself, for tests beside it."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

import tests.support.torchrl  # noqa: F401 - before it is imported by others


@pytest.fixture(scope="session")
def torchrl() -> ModuleType:
    """The library with its parts for language models."""
    return importlib.import_module("torchrl")
