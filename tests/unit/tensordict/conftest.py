"""torchrl itself, for tests beside it."""

from __future__ import annotations

import importlib
from types import ModuleType

import pytest

import tests.support.torchrl  # noqa: F401 - before a test imports torchrl with its warnings


@pytest.fixture(scope="session")
def torchrl() -> ModuleType:
    """The library with its parts for language models."""
    return importlib.import_module("torchrl")
