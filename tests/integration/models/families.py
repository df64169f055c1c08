"""Which model types of transformers are trained, of those that no row of the table has to stand for."""

from __future__ import annotations

TYPES = 178
"""Causal model types that transformers 5.19 knows."""
EXACT = frozenset(
    (
        *("afmoe", "apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe"),
        *("cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "emu3"),
        *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "fuyu", "gemma", "gemma2", "gemma3"),
        *("gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm"),
        *("glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite"),
        *("granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "laguna", "llama", "longcat_flash", "mellum"),
        *("mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral"),
        *("nanochat", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe"),
        *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma"),
        "youtu",
    )
)
"""Causal language models that the learner computes exactly; all others are refused. See test_families.py."""
NOT_BUILT = {
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "it has no vocabulary of its own",
    "gemma4_unified_assistant": "it has no vocabulary of its own",
    "musicgen": "it is put together from three other models",
    "musicgen_melody": "it is put together from three other models",
}
"""Causal model types of which no tiny model can be made here, and why."""
