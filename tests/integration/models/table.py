"""Models that each part of the package can run: the source of docs/reference/models.md and of these tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Architecture:
    """A row of the table.

    `kind` is that of skyrl_train.testing.tiny_models, `config` gives the tiny model the features of real ones, and
    `note` is for the page.
    """

    name: str
    kind: str
    config: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


@dataclass(frozen=True)
class Refusal:
    """A cell that is not supported.

    `message` is a regular expression of the error at start, and `missing` is the explanation on the page.
    """

    message: str
    missing: str


@dataclass(frozen=True)
class Column:
    """A column of the table.

    `what` is the meaning of a yes and its test. `in_ci` is the architecture whose cell is tested for every change.
    """

    name: str
    what: str
    in_ci: str
    refused: Mapping[str, Refusal] = field(default_factory=dict)


_UNTIED = {"tie_word_embeddings": False}
_WINDOW = {"sliding_window": 6}
_WIDE = {"hidden_size": 128}
"""Hidden size for heads of size 32 in models whose code derives the head size from it."""
_LLAMA_3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
_ALTERNATING = ["sliding_attention", "full_attention"]
_SHARED_EXPERTS = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_DEEPSEEK_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 1024,
}
_DEEPSEEK = {
    "rope_parameters": _DEEPSEEK_ROPE,
    # Head sizes of the released model, because vLLM's CPU kernel supports no others.
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    # Most weights are in experts, as in the released model.
    "n_routed_experts": 8,
    "moe_intermediate_size": 1024,
    # In its config.json, but not in transformers' class: vLLM and SGLang read them.
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "moe_layer_freq": 1,
}
_MINIMAX = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    # In its config.json, but not in transformers' class: vLLM and SGLang read them.
    "rotary_dim": 32,
    "scoring_func": "sigmoid",
    "num_mtp_modules": 0,
    "use_routing_bias": True,
    "use_qk_norm": True,
}
ARCHITECTURES = (
    Architecture("Llama 3", "llama", _UNTIED | {"rope_parameters": _LLAMA_3_ROPE}, "with the RoPE of Llama 3.1 to 3.3"),
    Architecture("Qwen2.5", "qwen2", _WIDE),
    Architecture("Qwen3", "qwen3"),
    Architecture("Qwen3-MoE", "qwen3_moe", _UNTIED),
    Architecture(
        "Gemma 3",
        "gemma3_text",
        _WINDOW | {"layer_types": _ALTERNATING},
        "text only: a checkpoint of `Gemma3ForCausalLM`",
    ),
    Architecture(
        "Mistral", "mistral", _UNTIED | {"sliding_window": None}, "7B 0.2 and later, without a sliding window"
    ),
    Architecture("Mistral 0.1", "mistral", _UNTIED | _WINDOW, "7B 0.1 and its descendants, with a sliding window"),
    Architecture("DeepSeek-V3", "deepseek_v3", _UNTIED | _DEEPSEEK, "also R1, from a checkpoint in bfloat16"),
    Architecture("gpt-oss", "gpt_oss", _UNTIED | _WINDOW, "from a checkpoint in bfloat16"),
    Architecture(
        "Gemma 4",
        "gemma4_text",
        _WINDOW | {"layer_types": _ALTERNATING, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 320},
        "text only: a checkpoint of `Gemma4ForCausalLM`",
    ),
    Architecture("GLM-4", "glm4", _UNTIED, "the dense models of April 2025 (`Glm4ForCausalLM`)"),
    Architecture("GLM-4.5", "glm4_moe", _UNTIED | _SHARED_EXPERTS | {"use_qk_norm": True}, "also 4.6 and 4.7"),
    Architecture("OLMo 3", "olmo3", _UNTIED | _WIDE | _WINDOW | {"layer_types": _ALTERNATING}),
    Architecture("MiniMax-M2", "minimax_m2", _UNTIED | _MINIMAX),
    Architecture("ERNIE 4.5", "ernie4_5", note="the dense models"),
    Architecture("SmolLM3", "smollm3", _WIDE | {"no_rope_layers": [1, 0]}),
    Architecture("Phi-3", "phi3", _UNTIED | _WIDE, "also Phi-4"),
    Architecture("Hunyuan", "hunyuan_v1_dense", {"use_qk_norm": True}, "the dense models"),
    Architecture("EXAONE 4", "exaone4", _UNTIED | _WIDE | _WINDOW | {"layer_types": _ALTERNATING}),
    Architecture("Mixtral", "mixtral", _UNTIED | _WIDE | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Architecture("Apertus", "apertus", _UNTIED | _WIDE | {"rope_parameters": _LLAMA_3_ROPE}),
)
_NO_EXPERTS = Refusal(
    r"transformers has no expert-parallel plan for \w+: set trainer\.policy\.expert_parallel_size to 1\.",
    "the model has no experts",
)
_DENSE = (
    *("Llama 3", "Qwen2.5", "Qwen3", "Gemma 3", "Mistral", "Mistral 0.1", "Gemma 4", "GLM-4", "OLMo 3", "ERNIE 4.5"),
    *("SmolLM3", "Phi-3", "Hunyuan", "EXAONE 4", "Apertus"),
)
_NO_PLAN = r"transformers has no tensor-parallel plan for \w+: set trainer\.policy\.tensor_parallel_size to 1\."
_UNKNOWN_STYLE = r"transformers' tensor-parallel plan has '\w+' for model\.layers\.0\.\S+, which is not supported"
_FUSED = Refusal(_UNKNOWN_STYLE, "transformers' tensor-parallel plan does not divide the fused projections")
_WIDE_NORMS = Refusal(_UNKNOWN_STYLE, "the query and key norms span all heads, so ranks cannot divide the heads")
_NOT_IN_SGLANG = "Engine '.*': SGLang cannot serve models of type '{}': {}"
_NOT_ON_CPUS = (
    r"Engine '.*': SGLang cannot serve models of type '{}': its attention on CPUs \(torch_native\) {}; set gene"
)
COLUMNS = (
    Column(
        "padding-free",
        "The learner packs sequences into one row without padding. The gradient of every parameter in float64 equals "
        "that of the Hugging Face model on a padded batch.",
        in_ci="Gemma 3",
    ),
    Column(
        "shared prompts",
        "The model processes the prompt of a group only once. The gradient is the same.",
        in_ci="Llama 3",
    ),
    Column(
        "LoRA",
        "Adapters are on all linear layers and on all experts (`target_parameters`). Their gradients equal those of a "
        "Hugging Face model with weights W + s B A on a padded batch. Routers stay frozen.",
        in_ci="DeepSeek-V3",
    ),
    Column(
        "TP",
        "Tensor parallelism (`trainer.policy.tensor_parallel_size`). The summed gradient of two ranks equals that of "
        "one process on a padded batch.",
        in_ci="DeepSeek-V3",
        refused={
            "gpt-oss": Refusal(
                _NO_PLAN,
                "transformers has no tensor-parallel plan for it; use expert or sequence parallelism instead",
            ),
            "Hunyuan": Refusal(
                _NO_PLAN, "transformers has no tensor-parallel plan for it; use sequence parallelism instead"
            ),
            **dict.fromkeys(("GLM-4", "Phi-3"), _FUSED),
            **dict.fromkeys(("OLMo 3", "MiniMax-M2"), _WIDE_NORMS),
        },
    ),
    Column(
        "SP",
        "Sequence parallelism (`trainer.policy.sequence_parallel_size`), with the test of TP.",
        in_ci="Gemma 3",
    ),
    Column(
        "EP",
        "Expert parallelism (`trainer.policy.expert_parallel_size`), with the test of TP but different sequences on "
        "each rank.",
        in_ci="gpt-oss",
        refused=dict.fromkeys(_DENSE, _NO_EXPERTS),
    ),
    Column(
        "transformers",
        "The embedded engine on a CPU. The log-probs of its samples differ from the learner's by at most 0.0001 nats, "
        "before and after a weight sync.",
        in_ci="gpt-oss",
    ),
    Column(
        "vllm",
        "vLLM on a CPU, with the test of transformers.",
        in_ci="gpt-oss",
        refused={
            "Apertus": Refusal(
                r"vLLM keeps the parameters of Apertus' activation in bfloat16",
                "vLLM keeps the parameters of its activation in bfloat16; serve it in bfloat16, not in float32",
            ),
            "MiniMax-M2": Refusal(
                r"vLLM's expert routing on CPUs supports sigmoid scores only with groups of experts",
                "vLLM's expert routing on CPUs does not support its sigmoid scores",
            ),
        },
    ),
    Column(
        "sglang",
        "SGLang on a CPU, with the test of transformers.",
        in_ci="Qwen3",
        refused={
            "Mistral 0.1": Refusal(
                r"Engine '.*': SGLang cannot serve models of type 'mistral': its code for them has full attention, "
                "but this model has a sliding window of 6 tokens; set generator",
                "SGLang ignores its sliding window, also on GPUs; only contexts within the window are supported",
            ),
            "Gemma 4": Refusal(
                _NOT_IN_SGLANG.format("gemma4_text", r"its code reads one head size, .* have \[32, 512\]"),
                "SGLang reads one head size, but the layers of Gemma 4 have two",
            ),
            "OLMo 3": Refusal(
                _NOT_IN_SGLANG.format("olmo3", "its code for them reads one set of RoPE parameters"),
                "SGLang reads one set of RoPE parameters, but OLMo 3 has one for each kind of layer",
            ),
            **{
                name: Refusal(
                    _NOT_IN_SGLANG.format(kind, "it has no code for them"),
                    "SGLang runs it with transformers' class, but does not support that class's tensor-parallel plan",
                )
                for name, kind in (("ERNIE 4.5", "ernie4_5"), ("SmolLM3", "smollm3"))
            },
            "Apertus": Refusal(
                "generator.model_dtype=float32: SGLang keeps the parameters of Apertus' activation in bfloat16",
                "SGLang keeps the parameters of its activation in bfloat16; serve it in bfloat16, not in float32",
            ),
            **{
                name: Refusal(
                    _NOT_IN_SGLANG.format(kind, "its code for them does not run with its attention on CPUs"),
                    "SGLang's code for it does not run with its attention on CPUs",
                )
                for name, kind in (
                    ("EXAONE 4", "exaone4"),
                    ("Hunyuan", "hunyuan_v1_dense"),
                    ("MiniMax-M2", "minimax_m2"),
                )
            },
            "DeepSeek-V3": Refusal(
                _NOT_ON_CPUS.format("deepseek_v3", r"does not support latent attention \(MLA\)"),
                "SGLang's attention on CPUs does not support multi-head latent attention (MLA)",
            ),
            "gpt-oss": Refusal(
                _NOT_ON_CPUS.format("gpt_oss", "has no attention sinks"),
                "SGLang's attention on CPUs does not support attention sinks",
            ),
        },
    ),
)
ENGINES = ("transformers", "vllm", "sglang")


def architecture(name: str) -> Architecture:
    return next(row for row in ARCHITECTURES if row.name == name)


def column(name: str) -> Column:
    return next(column_ for column_ in COLUMNS if column_.name == name)


@dataclass(frozen=True)
class CompositeRow:
    """A row of the page's second table: a composite checkpoint that is used as a text model.

    `kind` is that of tests/support/multimodal_models.py, and `shape` its options there.
    """

    name: str
    kind: str
    engines: tuple[str, ...]
    shape: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""


COMPOSITES = (
    CompositeRow("Gemma 3", "gemma3", ("transformers", "vllm")),
    CompositeRow("Gemma 4", "gemma4", ("transformers", "vllm")),
    CompositeRow("Mistral 3", "mistral3", ("transformers", "vllm"), note="also Ministral 3"),
    CompositeRow("Llama 4", "llama4", ("transformers", "vllm")),
    CompositeRow("Qwen2.5-VL", "qwen2_5_vl", ("transformers", "vllm"), {"hidden_size": 128}),
    CompositeRow("Qwen3-VL", "qwen3_vl", ("transformers", "vllm")),
    CompositeRow("Qwen3-VL-MoE", "qwen3_vl_moe", ("transformers",)),
    CompositeRow("GLM-4V", "glm4v", ("transformers",), {"hidden_size": 128}),
    CompositeRow("InternVL", "internvl", ("transformers", "vllm")),
)
"""Composites whose text is computed exactly: see test_composites.py and test_composite_engines.py."""


def composite(name: str) -> CompositeRow:
    return next(row for row in COMPOSITES if row.name == name)


@dataclass(frozen=True)
class HybridRow:
    """A row of the page's third table: a model with recurrent layers.

    `kind` and `config` make the tiny model, as in `Architecture`; the shapes are those that vLLM supports on CPUs.
    `vllm` are the data types in which vLLM serves it on a CPU, with bounds of the mean difference of its log-probs from
    the learner's in float32, in nats. `note` is the reason why other types are missing.
    """

    name: str
    kind: str
    layers: str
    vllm: Mapping[str, float] = field(default_factory=dict)
    note: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)


_DELTA_NET = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
_MANY = {"num_experts_per_tok": 8}
"""More than the two experts of other tiny models: rounding in bfloat16 changes which experts are chosen."""
_TIED = {"tie_word_embeddings": True}
_BFLOAT16_ONLY = "vLLM's gated delta nets on CPUs compute in bfloat16 only"
_DISAGREES = "its log-probs in vLLM on CPUs differ from the learner's"
HYBRIDS = (
    HybridRow(
        "Qwen3-Next",
        "qwen3_next",
        "gated delta nets, experts",
        {"bfloat16": 0.09},
        _BFLOAT16_ONLY,
        _DELTA_NET | {"num_experts": 16} | _MANY,
    ),
    HybridRow("Qwen3.5", "qwen3_5_text", "gated delta nets", {"bfloat16": 0.045}, _BFLOAT16_ONLY, _DELTA_NET | _TIED),
    HybridRow(
        "Qwen3.5-MoE",
        "qwen3_5_moe_text",
        "gated delta nets, experts",
        {"bfloat16": 0.09},
        _BFLOAT16_ONLY,
        _DELTA_NET | {"num_experts": 16} | _MANY,
    ),
    HybridRow(
        "Granite 4 hybrid",
        "granitemoehybrid",
        "Mamba2, experts",
        {"float32": 1e-4, "bfloat16": 0.06},
        config={"mamba_n_groups": 1, "num_local_experts": 16} | _MANY,
    ),
    HybridRow("Falcon-H1", "falcon_h1", "Mamba2", {"float32": 1e-4, "bfloat16": 0.03}),
    HybridRow(
        "Nemotron-H", "nemotron_h", "Mamba2, experts", note="vLLM's experts on CPUs do not support its activation"
    ),
    HybridRow("LFM2", "lfm2", "short convolutions", note=_DISAGREES),
    HybridRow("LFM2-MoE", "lfm2_moe", "short convolutions, experts", note=_DISAGREES),
    HybridRow(
        "Kimi-Linear",
        "kimi_linear",
        "Kimi delta attention, experts",
        note="vLLM's cache for its layers does not start on CPUs, and it has not been tested on GPUs",
    ),
)
"""Models with recurrent layers: see test_hybrid_engines.py and tests/integration/runs/test_hybrid_vllm.py."""


def hybrid(name: str) -> HybridRow:
    return next(row for row in HYBRIDS if row.name == name)


def hybrid_cells() -> list[tuple[str, str]]:
    """Return (hybrid, data type) of everything that vLLM serves on a CPU."""
    return [(row.name, dtype) for row in HYBRIDS for dtype in row.vllm]
