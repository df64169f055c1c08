"""torchrl itself, for tests beside it."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import warnings
from types import ModuleType

import pytest

TORCHRL_MODULES = ("envs.llm", "modules.llm", "objectives.llm", "data.llm", "collectors.llm", "envs.llm.transforms")


@pytest.fixture(scope="session")
def torchrl() -> ModuleType:
    """The library with its parts for language models imported. Importing it chooses how processes start."""
    if importlib.util.find_spec("torchrl") is None:
        pytest.skip("needs the extra torchrl")
    method = multiprocessing.get_start_method(allow_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (*TORCHRL_MODULES, "weight_update.llm"):
            importlib.import_module(f"torchrl.{name}")
    multiprocessing.set_start_method(method, force=True)
    return importlib.import_module("torchrl")
