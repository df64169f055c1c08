"""Imports of idle Ray workers before they become actors. Ray imports this module through RAY_preload_python_modules."""

from __future__ import annotations

import os

from skyrl_train.imports import PRELOAD_ENV, import_without_gc

import_without_gc(filter(None, os.environ.get(PRELOAD_ENV, "").split(",")))
