"""vLLM's V2 model runner on a CPU: its kernels run in Triton's interpreter, which is slow but exact."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}
"""Variables of a process that uses the V2 model runner; they count when Triton and vLLM are imported."""

DRAFTS = "SKYRL_TEST_DRAFTS"
"""Variable of a process whose engines decode speculatively: a key of `SPECULATIVE_CONFIGS`."""
SPECULATIVE_CONFIGS: dict[str, dict[str, Any]] = {
    "draft_model": {"method": "draft_model", "num_speculative_tokens": 3},
    "eagle": {"method": "eagle", "num_speculative_tokens": 3},
    "eagle3": {"method": "eagle3", "num_speculative_tokens": 3},
    "ngram": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3},
}


def is_requested() -> bool:
    """Return True if this process was started with `ENVIRONMENT`."""
    return ENVIRONMENT.items() <= os.environ.items()


def engine_options() -> dict[str, Any]:
    """Return the arguments of VLLMEngine that `DRAFTS` asks for."""
    name = os.environ.get(DRAFTS)
    return {"speculative_config": SPECULATIVE_CONFIGS[name]} if name else {}


def enable() -> None:
    """Let vLLM find a Triton backend for CPUs. Call this in a process with `ENVIRONMENT`, before vLLM is imported."""
    assert is_requested(), f"start this process with {ENVIRONMENT}"
    from triton.backends import backends

    backends.setdefault("cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False)))
