"""What vLLM can do, and what it refuses and why. Imports vLLM: see engine.py."""

from __future__ import annotations

import vllm

from skyrl_train.engines.base import PAUSE_MODES, SAMPLING, Capabilities
from skyrl_train.weight_sync.wire import ROUTES

_NO_LORA = "adapters are off; start it with max_lora_rank above 0 (generator.engine_init_kwargs)."


def vllm_capabilities(name: str, ranks: int, max_lora_rank: int, nodes: int = 1) -> Capabilities:
    engine = f"vLLM {vllm.__version__}"
    refusals = {
        "score.temperature": f"{engine} gives log-probs of prompts at temperature 1 only.",
        "partial_weights": f"{engine} takes a layer's weights only together.",
        "pipeline_parallel_size": f"{engine} has a batch under way between two steps then; use tensor parallelism.",
    }
    if not max_lora_rank:
        refusals["adapter"] = _NO_LORA
    elif nodes > 1:
        refusals["adapter"] = f"it is on {nodes} nodes, of which one alone would see it; syncs bring adapters to all."
    return Capabilities(
        name=name,
        sampling=SAMPLING,
        weight_routes=ROUTES,
        weight_ranks=ranks,
        lora=max_lora_rank > 0 and nodes == 1,
        synced_adapter_rank=max_lora_rank,
        pause_modes=PAUSE_MODES,
        partial_weights=False,
        keeps_fingerprints=False,
        score_temperature=False,
        refusals=refusals,
    )
