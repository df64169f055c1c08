"""The choice between vLLM's two model runners, V1 and V2. This module is imported before vLLM."""

from __future__ import annotations

import logging
import os
from typing import Any

VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
_USERS_CHOICE = os.environ.get(VARIABLE)
"""The user's value of the variable, which engines of this process overwrite."""

log = logging.getLogger(__name__)


def select_model_runner(arguments: dict[str, Any], on_cpu: bool) -> None:
    """Set vLLM's variable for the next engine of this process and its children.

    The user's value of VLLM_USE_V2_MODEL_RUNNER wins. On accelerators vLLM chooses V2, unless Triton is missing or V2
    lacks a feature that the engine uses, and logs the reason.

    Args:
        arguments: Arguments of EngineArgs.
        on_cpu: True to serve on a CPU.
    """
    from vllm import envs

    choice = _USERS_CHOICE
    if choice is None and on_cpu:
        choice = "0"  # V2 requires Triton.
    elif choice is None and arguments.get("logits_processors"):
        log.warning("logits_processors: using vLLM's V1 model runner, for which these classes are written")
        choice = "0"
    envs.disable_envs_cache()
    if choice is None:
        os.environ.pop(VARIABLE, None)
    else:
        os.environ[VARIABLE] = choice


def expected_model_runner(on_cpu: bool) -> str:
    """Return "V1" or "V2": the runner of an engine that uses no feature which V2 lacks."""
    choice = _USERS_CHOICE if _USERS_CHOICE is not None else str(int(not on_cpu))
    return "V2" if choice.lower() in ("1", "true") else "V1"
