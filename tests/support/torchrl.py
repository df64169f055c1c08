"""Imports TorchRL's language-model parts without their warnings and without their choice of how processes start."""

from __future__ import annotations

import importlib
import importlib.util
import multiprocessing
import warnings

MODULES = ("envs.llm", "modules.llm", "objectives.llm", "data.llm", "collectors.llm", "envs.llm.transforms")

if importlib.util.find_spec("torchrl") is not None:
    _method = multiprocessing.get_start_method(allow_none=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _name in (*MODULES, "weight_update.llm"):
            importlib.import_module(f"torchrl.{_name}")
    multiprocessing.set_start_method(_method, force=True)
