"""What vLLM is started with and asked for, and what it can do. Imports vLLM: see engine.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch
import vllm
from vllm import EngineArgs, SamplingParams, envs
from vllm.sampling_params import RequestOutputKind
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine.llm_engine import LLMEngine

from skyrl_train.cluster.addresses import BIND_ADDRESS, choose_interface
from skyrl_train.engines.base import PAUSE_MODES, SAMPLING_PARAM_NAMES, Capabilities, SampleRequest
from skyrl_train.engines.vllm.composites import check_composite
from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import is_composite, to_composite_overrides
from skyrl_train.models.layer_sizes import get_layer_sizes
from skyrl_train.models.loading import has_untied_head, load_config
from skyrl_train.storage.download_cache import local_copy
from skyrl_train.weight_sync.protocol import WEIGHT_ROUTES

SEED = "seed"
"""A request's seed is in its `extra_args`: in vLLM's own place for it, vLLM would make a generator for each request."""
_LATENT = 576
"""What vLLM's kernel of latent attention for CPUs is compiled for: the size of DeepSeek-V2 and V3."""
_CPU_CACHE_BYTES = 4 << 30
"""Upper limit for keys and values on a CPU, which otherwise take what max_num_seqs full sequences need."""
_NO_LORA = "adapters are off; start it with max_lora_rank above 0 (generator.engine_init_kwargs)."


def engine_arguments(model: str, on_cpu: bool, max_lora_rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments for EngineArgs; `given` ones take precedence over defaults.

    In addition to the arguments of EngineArgs, `given` may contain expert_parallel_size (vLLM distributes experts over
    all ranks, or not at all), rope_scaling, rope_theta, and batch_invariant, which is of this process and its children:
    kernels whose results do not depend on the batch. Raises ConfigError for a model that cannot be loaded, or cannot be
    served on a CPU.
    """
    given = dict(given)
    if given.pop("batch_invariant", False):
        enable_batch_invariance(on_cpu)
    rope = {name: given.pop(name, None) for name in ("rope_scaling", "rope_theta")}
    arguments: dict[str, Any] = {
        "model": local_copy(model),
        "tensor_parallel_size": 1,
        "enable_expert_parallel": given.pop("expert_parallel_size", 1) > 1,
        "enable_lora": max_lora_rank > 0,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "skyrl_train.engines.vllm.worker.WorkerExtension",
        "async_scheduling": not on_cpu,  # vLLM itself turns it off on a CPU, whose steps end before they return
        "disable_log_stats": True,
        "generation_config": "vllm",
        "trust_remote_code": False,
        "seed": 0,
    }
    if max_lora_rank:
        arguments["max_lora_rank"] = max_lora_rank
    config = load_config(model, **rope)
    changed: dict[str, Any] = {}
    if any(one is not None for one in rope.values()):
        changed["rope_parameters"] = config.get_text_config().rope_parameters
    if config.get_text_config().model_type == "apertus" and given.get("dtype") == "float32":
        raise ConfigError(
            "generator.model_dtype=float32: vLLM keeps the parameters of Apertus' activation in bfloat16, so its "
            "log-probs would differ from the learner's. Use bfloat16 or generator.backend=transformers."
        )
    if has_untied_head(model):
        changed["tie_word_embeddings"] = False
    changed |= _query_scales(config.get_text_config())
    if is_composite(config):
        check_composite(model, config)
        arguments["language_model_only"] = True
        changed = to_composite_overrides(config, changed)
    if changed:
        arguments["hf_overrides"] = changed
    if not on_cpu:
        arguments["enable_sleep_mode"] = True
    arguments |= given
    if arguments["tensor_parallel_size"] > 1:
        arguments.setdefault("distributed_executor_backend", "mp")
    if arguments.setdefault("nnodes", 1) > 1:
        _listen_for_other_nodes()
        # Its check of peers takes ranks for devices of this process, which sees those of its part alone.
        arguments.setdefault("disable_custom_all_reduce", True)
    return {**arguments, **(_cpu_arguments(config, arguments) if on_cpu else {})}


def _query_scales(text: Any) -> dict[str, Any]:
    """Return how Ministral 3 scales queries in long contexts, in the words of vLLM, which ignores transformers' own."""
    rope = getattr(text, "rope_parameters", None) or {}
    if (beta := rope.get("llama_4_scaling_beta")) is None or getattr(text, "llama_4_scaling", None) is not None:
        return {}
    length = rope["original_max_position_embeddings"]
    return {"llama_4_scaling": {"original_max_position_embeddings": length, "beta": beta}}


def _listen_for_other_nodes() -> None:
    """Have the ranks of this node listen where the run's other processes reach it."""
    address = os.environ.get(BIND_ADDRESS)
    if address is not None:
        os.environ["VLLM_HOST_IP"] = address
        choose_interface(address)


def configure_threads(threads: int | None, ranks: int, on_cpu: bool) -> None:
    """Leave the placement of threads to the system: on a CPU vLLM would bind all processes' to the same cores.

    `ranks`: those on this node.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if not on_cpu:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    bound = "nobind" if ranks == 1 else "|".join(str(rank) for rank in range(ranks))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", bound)


def create_engine(arguments: dict[str, Any], name: str, on_cpu: bool) -> LLMEngine:
    """vLLM with these arguments. Raises ConfigError for what it refuses."""
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"Engine {name!r}: vLLM {vllm.__version__} refuses to start: {error}") from error
    if not on_cpu:
        torch.set_num_threads(1)  # loading is over: threads that spin between two small tensors slow down a step
    return engine


def enable_batch_invariance(on_cpu: bool) -> None:
    """vLLM reads the variable where its attention is imported, and when a rank starts: after this.

    Raises ConfigError on a CPU, which has no such kernels, and if it is too late.
    """
    if on_cpu:
        raise ConfigError("generator.batch_invariant=true: vLLM's kernels for CPUs have no such mode; set false.")
    if not envs.VLLM_BATCH_INVARIANT and "vllm.v1.attention.ops.triton_unified_attention" in sys.modules:
        raise ConfigError("generator.batch_invariant=true: this process has had an engine without; start a new one.")
    os.environ["VLLM_BATCH_INVARIANT"] = "1"


def _cpu_arguments(config: Any, given: dict[str, Any]) -> dict[str, Any]:
    """The arguments that differ on a CPU: no compilation, a cache of the size needed."""
    text = config.get_text_config()
    length = given["max_model_len"] or text.max_position_embeddings
    head_sizes = get_layer_sizes(text, "head_dim") or [text.hidden_size // text.num_attention_heads]
    if wrong := [size for size in head_sizes if size % 32]:
        raise ConfigError(
            f"vLLM's attention on CPUs needs a head size that 32 divides; {given['model']} has {wrong[0]}. "
            "Set generator.backend=transformers."
        )
    if (rank := getattr(text, "kv_lora_rank", None)) and (latent := rank + text.qk_rope_head_dim) != _LATENT:
        raise ConfigError(
            f"vLLM's latent attention (MLA) on CPUs needs kv_lora_rank + qk_rope_head_dim to be {_LATENT}; "
            f"{given['model']} has {latent}. Set generator.backend=transformers."
        )
    if text.model_type == "minimax_m2":
        raise ConfigError(
            f"vLLM's routing on CPUs knows sigmoid scores only with groups of experts, which {given['model']} does not "
            "have. Set generator.backend=transformers."
        )
    experts = ModelArchConfigConvertorBase(config, text).get_num_experts()
    if given["enable_lora"] and experts and not HAS_TRITON:
        raise ConfigError(
            f"max_lora_rank={given.get('max_lora_rank')}: vLLM {vllm.__version__} cannot serve LoRA for a mixture of "
            f"experts without a Triton for this CPU (triton-cpu); {given['model']} has {experts} experts. Leave "
            "max_lora_rank out of generator.engine_init_kwargs and set trainer.policy.model.lora.sync=merged, or set "
            "generator.backend=transformers."
        )
    heads = max(get_layer_sizes(text, "num_key_value_heads"), default=text.num_attention_heads)
    bytes_per_token = 2 * text.num_hidden_layers * heads * head_sizes[-1] * 4
    needed = bytes_per_token * length * given["max_num_seqs"]
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": given.get("kv_cache_memory_bytes") or max(64 << 20, min(needed, _CPU_CACHE_BYTES)),
    }


def sampling_params(request: SampleRequest, ends: Sequence[int] = ()) -> SamplingParams:
    """Return vLLM's parameters for one sample with its own seed and both log-probs of every token.

    `ends`: the tokens that end a response of this model.
    """
    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        stop=list(sampling.stop),
        stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else ends)],
        ignore_eos=sampling.ignore_eos,
        extra_args={SEED: request.seed % 2**64},
        logprobs=1,
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


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
        sampling=SAMPLING_PARAM_NAMES,
        weight_routes=WEIGHT_ROUTES,
        weight_ranks=ranks,
        lora=max_lora_rank > 0 and nodes == 1,
        synced_adapter_rank=max_lora_rank,
        pause_modes=PAUSE_MODES,
        partial_weights=False,
        keeps_fingerprints=False,
        score_temperature=False,
        refusals=refusals,
    )
