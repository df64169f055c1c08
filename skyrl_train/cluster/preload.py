"""What Ray's workers import before they know what they will be: `RAY_preload_python_modules` names this module."""

from __future__ import annotations

import os

from skyrl_train.imports import import_modules

MODULES = "SKYRL_PRELOAD"
"""A variable of ours, set for the length of Ray's start: the modules, separated by commas."""

import_modules(filter(None, os.environ.get(MODULES, "").split(",")))
