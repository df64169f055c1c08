"""What Ray's workers import before they know what they will be: `RAY_preload_python_modules` names this module."""

from __future__ import annotations

import os

from skyrl_train.imports import PRELOADED, import_modules

import_modules(filter(None, os.environ.get(PRELOADED, "").split(",")))
