"""Imports TorchRL's parts for language models, without its choice of how processes start.

TorchRL itself asks for the start method that it needs wherever it starts a process.
"""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing

MODULES = ("envs.llm", "modules.llm", "objectives.llm", "data.llm", "collectors.llm", "envs.llm.transforms")

if importlib.util.find_spec("torchrl") is not None:
    _method = multiprocessing.get_start_method(allow_none=True)
    for _name in (*MODULES, "weight_update.llm"):
        importlib.import_module(f"torchrl.{_name}")
    multiprocessing.set_start_method(_method, force=True)
