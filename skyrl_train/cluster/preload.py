"""What Ray's workers import before they know what they will be: `RAY_preload_python_modules` names this module."""

from __future__ import annotations

import os

from skyrl_train.imports import PRELOAD_ENV, import_without_gc

import_without_gc(filter(None, os.environ.get(PRELOAD_ENV, "").split(",")))
