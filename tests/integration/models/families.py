"""The model types of transformers that can be trained, with or without a row in the table."""

from __future__ import annotations

TYPES = 178
"""The number of causal model types in transformers 5.19; the next two constants are subsets."""
EXACT = frozenset(
    (
        *("afmoe", "apertus", "arcee", "aria_text", "axk1", "biogpt", "bitnet", "cohere", "cohere2", "cohere2_moe"),
        *("falcon_h1", "granitemoehybrid", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h", "qwen3_5", "qwen3_5_moe"),
        *("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"),
        *("cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2", "deepseek_v3", "diffllama", "dots1", "emu3"),
        *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe", "flex_olmo", "fuyu", "gemma", "gemma2", "gemma3"),
        *("gemma3_text", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text", "glm"),
        *("glm4", "glm4_moe", "glm4_moe_lite", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_oss", "granite"),
        *("granite_swa", "granitemoe", "granitemoe_swa", "granitemoeshared", "helium", "hrm_text", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "hy_v3", "hyperclovax", "jais2", "jetmoe", "laguna", "llama", "llama4", "llama4_text"),
        *("longcat_flash", "mellum", "mllama"),
        *("mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral"),
        *("nanochat", "olmo", "olmo2", "olmo3", "olmoe", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe"),
        *("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open", "starcoder2", "vaultgemma"),
        "youtu",
    )
)
"""Types that the learner computes exactly. All others are rejected: see test_families.py."""
NOT_BUILT = {
    "gemma3n": "its vision tower needs the package timm",
    "gemma4_assistant": "it has no vocabulary of its own",
    "gemma4_unified_assistant": "it has no vocabulary of its own",
    "musicgen": "it consists of three other models",
    "musicgen_melody": "it consists of three other models",
}
"""Types of which no tiny model can be built, and why."""
EXACT_WITH_IMAGES = frozenset(
    (
        *("aria", "cohere_compass", "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid", "exaone4_5", "fuyu"),
        *("gemma3", "gemma4", "gemma4_unified", "glm46v", "glm4v", "glm4v_moe", "glm_ocr", "glmga", "got_ocr2"),
        *("hyperclovax_vision_v2", "idefics2", "idefics3", "internvl", "janus", "kimi_k25", "lighton_ocr"),
        *("llama4", "llava", "llava_next", "llava_next_video", "llava_onevision", "minimax_m3_vl", "mistral3"),
        *("mllama", "ovis2", "paddleocr_vl", "pp_chart2table", "qianfan_ocr", "qwen2_5_omni_thinker", "qwen2_5_vl"),
        *("qwen2_vl", "qwen3_omni_moe_thinker", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "step3p7", "video_llama_3"),
        *("lfm2_vl", "minicpmv4_6", "minicpmv4_7", "qwen3_5", "qwen3_5_moe", "video_llava", "vipllava"),
    )
)
"""Image-text types whose language model the learner computes exactly. All others are rejected."""
_DEFAULT = "a small version of its default configuration does not run"
NOT_BUILT_WITH_IMAGES = {
    **dict.fromkeys(("fast_vlm", "gemma3n", "perception_lm"), "its vision tower needs the package timm"),
    **dict.fromkeys(
        (
            *("chameleon", "cosmos3_edge", "deepseek_ocr2", "diffusion_gemma", "emu3", "ernie4_5_vl_moe", "evolla"),
            *("granite4_vision", "hunyuan_vl", "nemotron_h_omni", "vision-encoder-decoder"),
        ),
        _DEFAULT,
    ),
}
"""Image-text types of which no tiny model can be built, and why."""
