"""vLLM's start arguments, sampling parameters and capabilities. Imports vLLM: see engine.py."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import vllm
from vllm import EngineArgs, SamplingParams, envs
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine.llm_engine import LLMEngine

from skyrl_train.cluster.addresses import BIND_ADDRESS, choose_interface
from skyrl_train.engines.base import MAX_TOP_LOGPROBS, PAUSE_MODES, SAMPLING_PARAM_NAMES, Capabilities, SampleRequest
from skyrl_train.engines.graph_sizes import get_graph_sizes
from skyrl_train.engines.vllm.model_runner import expected_model_runner, select_model_runner
from skyrl_train.engines.vllm.model_support import check_model
from skyrl_train.errors import ConfigError
from skyrl_train.models.composite import is_composite, to_composite_overrides
from skyrl_train.models.layer_sizes import get_layer_sizes
from skyrl_train.models.loading import build_meta_model, has_untied_head, load_config
from skyrl_train.models.padding_free import get_vllm_max_length
from skyrl_train.models.recurrent_layers import RECURRENT_LAYER_TYPES, get_recurrent_mixers
from skyrl_train.storage.download_cache import local_copy
from skyrl_train.weight_sync.protocol import WEIGHT_ROUTES

SEED = "seed"
"""Key of a request's seed in `extra_args`. With vLLM's own field for it, vLLM creates a generator for each request."""
TOP_LOGPROBS = "top_logprobs"
"""Key of a request's number of most likely tokens in `extra_args`."""
MIN_P = "min_p"
"""Key of a request's min-p in `extra_args`, which the sampler of the V2 model runner reads."""
GRAMMAR_BACKEND = "guidance"
"""vLLM's name of the back end of JSON schemas: the one that rejects keywords that it does not support."""
_CPU_MLA_DIM = 576
"""The dimension for which vLLM's CPU kernel of latent attention is compiled: that of DeepSeek-V2 and V3."""
_CPU_CACHE_BYTES = 4 << 30
"""Upper limit of the KV cache on a CPU. Below it the cache has the size of max_num_seqs full sequences."""
_CPU_BLOCK_TOKENS = 128
"""Number of tokens of a block of the KV cache on a CPU. vLLM never uses one of the blocks."""
_NO_LORA = "LoRA adapters are off; start the engine with max_lora_rank above 0 (generator.engine_init_kwargs)."


def engine_arguments(model: str, on_cpu: bool, max_lora_rank: int, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for vLLM's EngineArgs. A model at a URI is downloaded.

    Args:
        model: Folder, URI or hub name of the model.
        on_cpu: True to serve on a CPU.
        max_lora_rank: Largest rank of LoRA adapters; 0 turns LoRA off.
        overrides: Arguments of EngineArgs, which take precedence over the defaults. It may also contain
            `expert_parallel_size` (above 1, vLLM distributes experts over all ranks), `rope_scaling`, `rope_theta`,
            `keeps_routing` to return the experts of each token in `Completion.routing`, and `batch_invariant`, which
            selects kernels whose results do not depend on the batch, in this process and its children.

    Raises:
        ConfigError: The model cannot be loaded, or vLLM cannot serve it exactly (on a CPU).
    """
    overrides = dict(overrides)
    if overrides.pop("batch_invariant", False):
        enable_batch_invariance(on_cpu)
    keeps_routing = overrides.pop("keeps_routing", False)
    rope = {name: overrides.pop(name, None) for name in ("rope_scaling", "rope_theta")}
    arguments: dict[str, Any] = {
        "model": local_copy(model),
        "tensor_parallel_size": 1,
        "enable_expert_parallel": overrides.pop("expert_parallel_size", 1) > 1,
        "enable_lora": max_lora_rank > 0,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": 1 + MAX_TOP_LOGPROBS,
        "structured_outputs_config": {"backend": GRAMMAR_BACKEND},
        "worker_extension_cls": "skyrl_train.engines.vllm.worker.WorkerExtension",
        "async_scheduling": not on_cpu,  # On a CPU a step has ended when it returns, and vLLM turns this off itself.
        "disable_log_stats": True,
        "generation_config": "vllm",
        "trust_remote_code": False,
        "seed": 0,
    }
    if max_lora_rank:
        arguments["max_lora_rank"] = max_lora_rank
    config = load_config(model, **rope)
    hf_overrides: dict[str, Any] = {}
    if any(value is not None for value in rope.values()):
        hf_overrides["rope_parameters"] = config.get_text_config().rope_parameters
    check_model(model, config, on_cpu=on_cpu, dtype=overrides.get("dtype", "auto"))
    if _has_recurrent_layers(config):
        # The learner's dtype for states. vLLM's default is that of the weights, or float16 for Nemotron-H.
        arguments["mamba_ssm_cache_dtype"] = "float32"
    if has_untied_head(model):
        hf_overrides["tie_word_embeddings"] = False
    hf_overrides |= _query_scales(config.get_text_config())
    if is_composite(config):
        arguments["language_model_only"] = True
        hf_overrides = to_composite_overrides(config, hf_overrides)
    if hf_overrides:
        arguments["hf_overrides"] = hf_overrides
    if keeps_routing:
        arguments |= {"enable_return_routed_experts": True, "enable_prefix_caching": True}
    if not on_cpu:
        arguments["enable_sleep_mode"] = True
    arguments |= overrides
    if (speculative := arguments.get("speculative_config")) is not None:
        if expected_model_runner(on_cpu) == "V1":
            raise ConfigError(
                f"speculative_config={speculative}: speculative decoding requires vLLM's V2 model runner, and this "
                "engine uses V1. Serve on GPUs without VLLM_USE_V2_MODEL_RUNNER=0, or set "
                "generator.speculative.method=null."
            )
        arguments["speculative_config"] = speculative = dict(speculative)
        if speculative.get("method") == "ngram":  # The same drafts in V2. vLLM rejects "ngram" with async scheduling.
            speculative["method"] = "ngram_gpu"
        if (draft := speculative.get("model")) is not None:
            speculative["model"] = local_copy(draft)
        arguments["worker_extension_cls"] = "skyrl_train.engines.vllm.drafts.WorkerExtension"
    if not on_cpu and not arguments.get("enforce_eager") and not _chooses_graph_sizes(arguments):
        arguments["cudagraph_capture_sizes"] = _choose_graph_sizes(arguments)
    if arguments["tensor_parallel_size"] > 1:
        arguments.setdefault("distributed_executor_backend", "mp")
    if arguments.setdefault("nnodes", 1) > 1:
        _listen_for_other_nodes()
        # vLLM's peer check uses ranks as device indices of this process, which only sees the devices of its own node.
        arguments.setdefault("disable_custom_all_reduce", True)
    return {**arguments, **(_cpu_arguments(config, arguments) if on_cpu else {})}


_GRAPH_SIZE_ARGUMENTS = frozenset({"cudagraph_capture_sizes", "max_cudagraph_capture_size"})
_VLLM_LARGEST_GRAPH = 1024
"""Number of tokens that vLLM's own graph sizes never exceed: 512 before Blackwell, 1,024 since."""


def _chooses_graph_sizes(arguments: dict[str, Any]) -> bool:
    """True if the user chooses the sizes of CUDA graphs, or vLLM has to, because it chooses the number of drafts."""
    config, drafts = arguments.get("compilation_config") or {}, arguments.get("speculative_config") or {}
    return bool(
        (drafts and not drafts.get("num_speculative_tokens"))
        or "num_speculative_tokens_per_batch_size" in drafts
        or not isinstance(config, dict)
        or _GRAPH_SIZE_ARGUMENTS & (arguments.keys() | config.keys())
    )


def _choose_graph_sizes(arguments: dict[str, Any]) -> list[int]:
    """Return sizes in tokens, up to vLLM's largest size for mixed batches, or to all requests decoding if that is more.

    vLLM captures no graph of decoding requests for more than max_num_seqs, so that number must be among the sizes. With
    drafts a request that decodes has one more token than it has drafts.
    """
    requests = arguments["max_num_seqs"]
    rows = 1 + ((arguments.get("speculative_config") or {}).get("num_speculative_tokens") or 0)
    decoding = {rows * size for size in get_graph_sizes(requests)}
    sizes = decoding | set(get_graph_sizes(min(2 * requests * rows, _VLLM_LARGEST_GRAPH)))
    limit = arguments.get("max_num_batched_tokens") or max(sizes)
    return sorted(size for size in sizes if size <= limit)


def _query_scales(text: Any) -> dict[str, Any]:
    """Return Ministral 3's scaling of queries in long contexts under vLLM's keys; vLLM ignores transformers' keys."""
    rope = getattr(text, "rope_parameters", None) or {}
    if (beta := rope.get("llama_4_scaling_beta")) is None or getattr(text, "llama_4_scaling", None) is not None:
        return {}
    length = rope["original_max_position_embeddings"]
    return {"llama_4_scaling": {"original_max_position_embeddings": length, "beta": beta}}


def _listen_for_other_nodes() -> None:
    """Make the ranks of this node listen on the address at which the run's other nodes reach it."""
    address = os.environ.get(BIND_ADDRESS)
    if address is not None:
        os.environ["VLLM_HOST_IP"] = address
        choose_interface(address)


def configure_threads(threads: int | None, ranks: int, on_cpu: bool) -> None:
    """Set the number of CPU threads, and on a CPU vLLM's thread binding through environment variables.

    By default vLLM would bind the threads of all processes on a node to the same cores.

    Args:
        threads: CPU threads of this process; None leaves the setting alone.
        ranks: Number of ranks on this node. One rank is not bound, several are bound to one core each.
        on_cpu: True if the model is served on a CPU.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if not on_cpu:
        return
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    binding = "nobind" if ranks == 1 else "|".join(str(rank) for rank in range(ranks))
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", binding)


def create_engine(arguments: dict[str, Any], name: str, on_cpu: bool) -> LLMEngine:
    """Start vLLM and load the model. On an accelerator this sets torch to one CPU thread afterwards.

    Args:
        arguments: Arguments of EngineArgs.
        name: The engine's name, for error messages.
        on_cpu: True if the model is served on a CPU.

    Raises:
        ConfigError: vLLM rejects the arguments.
    """
    select_model_runner(arguments, on_cpu)
    try:
        engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(f"Engine {name!r}: vLLM {vllm.__version__} cannot start: {error}") from error
    if not on_cpu:
        torch.set_num_threads(1)  # Threads that spin between operations on small tensors would slow down every step.
    return engine


def enable_batch_invariance(on_cpu: bool) -> None:
    """Select vLLM's batch-invariant kernels for this process and its children, through an environment variable.

    vLLM reads the variable when its attention module is imported and when a rank starts, so this must come first.

    Raises:
        ConfigError: The engine is on a CPU, for which there are no such kernels, or this process has already imported
            vLLM's attention without them.
    """
    if on_cpu:
        raise ConfigError(
            "generator.batch_invariant=true is not supported on a CPU: vLLM has no batch-invariant kernels for CPUs. "
            "Set it to false."
        )
    if not envs.VLLM_BATCH_INVARIANT and "vllm.v1.attention.ops.triton_unified_attention" in sys.modules:
        raise ConfigError(
            "generator.batch_invariant=true: this process has already started an engine without batch-invariant "
            "kernels. Start a new process."
        )
    os.environ["VLLM_BATCH_INVARIANT"] = "1"


def _cpu_arguments(config: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that differ on a CPU: no compilation, and a KV cache of the size that is needed.

    Raises:
        ConfigError: vLLM cannot serve the model on a CPU.
    """
    text, model = config.get_text_config(), arguments["model"]
    length = arguments["max_model_len"] or get_vllm_max_length(text)
    head_sizes = get_layer_sizes(text, "head_dim") or [text.hidden_size // text.num_attention_heads]
    if invalid_sizes := [size for size in head_sizes if size % 32]:
        raise ConfigError(
            f"vLLM's attention on CPUs requires a head size that is a multiple of 32; {model} has {invalid_sizes[0]}. "
            "Set generator.backend=transformers."
        )
    if (rank := getattr(text, "kv_lora_rank", None)) and (mla_dim := rank + text.qk_rope_head_dim) != _CPU_MLA_DIM:
        raise ConfigError(
            f"vLLM's latent attention (MLA) on CPUs requires kv_lora_rank + qk_rope_head_dim = {_CPU_MLA_DIM}; "
            f"{model} has {mla_dim}. Set generator.backend=transformers."
        )
    experts = ModelArchConfigConvertorBase(config, text).get_num_experts()
    if arguments["enable_lora"] and experts and not HAS_TRITON:
        raise ConfigError(
            f"max_lora_rank={arguments.get('max_lora_rank')}: vLLM {vllm.__version__} cannot serve LoRA for a mixture "
            f"of experts without Triton for this CPU (triton-cpu); {model} has {experts} experts. Remove max_lora_rank "
            "from generator.engine_init_kwargs and set trainer.policy.model.lora.sync=merged, or set "
            "generator.backend=transformers."
        )
    heads = max(get_layer_sizes(text, "num_key_value_heads"), default=text.num_attention_heads)
    bytes_per_token = 2 * text.num_hidden_layers * heads * head_sizes[-1] * 4
    padded_length = -(-length // _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
    needed = (bytes_per_token * padded_length + _state_bytes(config)) * arguments["max_num_seqs"]
    needed += bytes_per_token * _CPU_BLOCK_TOKENS
    return {
        "enforce_eager": True,
        "kv_cache_memory_bytes": arguments.get("kv_cache_memory_bytes") or max(64 << 20, min(needed, _CPU_CACHE_BYTES)),
    }


def _has_recurrent_layers(config: Any) -> bool:
    return not RECURRENT_LAYER_TYPES.isdisjoint(getattr(config.get_text_config(), "layer_types", None) or ())


def _state_bytes(config: Any) -> int:
    """Return the bytes of the recurrent states of one sequence, twice, because vLLM pads the pages of its cache."""
    if not _has_recurrent_layers(config):
        return 0
    mixers = get_recurrent_mixers(build_meta_model(config, torch.float32)).values()
    return 2 * torch.float32.itemsize * sum(prod(shape) for mixer in mixers for shape in mixer.state_shapes)


def sampling_params(request: SampleRequest, stop_tokens: Sequence[int] = (), *, drafts: bool = False) -> SamplingParams:
    """Return vLLM's parameters for one sample, with the request's seed and both log-probs of every token.

    Args:
        request: The request.
        stop_tokens: End-of-sequence tokens of the model, which apply unless the request ignores them.
        drafts: True for an engine with speculative decoding, for which vLLM rejects min-p. Our sampler applies it.
    """
    sampling = request.sampling
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        stop=list(sampling.stop),
        stop_token_ids=[*sampling.stop_token_ids, *(() if sampling.ignore_eos else stop_tokens)],
        ignore_eos=sampling.ignore_eos,
        min_p=0.0 if drafts else sampling.min_p,
        extra_args={SEED: request.seed % 2**64, TOP_LOGPROBS: request.top_logprobs, MIN_P: sampling.min_p},
        logprobs=1 + request.top_logprobs,  # for the columns of DualLogprobSampler
        structured_outputs=None if request.json_schema is None else StructuredOutputsParams(json=request.json_schema),
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=False,
        skip_clone=True,  # these belong to one request
        routed_experts_prompt_start=request.known_routing,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def vllm_capabilities(name: str, ranks: int, max_lora_rank: int, nodes: int = 1) -> Capabilities:
    """Return the capabilities of a vLLM engine, whose `max_model_len` is not known yet.

    Args:
        name: The engine's name.
        ranks: Number of its ranks on all nodes.
        max_lora_rank: Largest rank of LoRA adapters; 0 if LoRA is off.
        nodes: Number of nodes. An engine on several nodes accepts adapters only from weight syncs.
    """
    engine = f"vLLM {vllm.__version__}"
    refusals = {
        "score.temperature": f"{engine} returns log-probs of prompts at temperature 1 only.",
        "pipeline_parallel_size": f"with it {engine} has a pending batch between two steps; use tensor parallelism.",
    }
    if not max_lora_rank:
        refusals["adapter"] = _NO_LORA
    elif nodes > 1:
        refusals["adapter"] = (
            f"the engine runs on {nodes} nodes, and only one would load the adapter; only weight syncs reach all nodes."
        )
    return Capabilities(
        name=name,
        sampling=SAMPLING_PARAM_NAMES,
        weight_routes=WEIGHT_ROUTES,
        weight_ranks=ranks,
        lora=max_lora_rank > 0 and nodes == 1,
        synced_adapter_rank=max_lora_rank,
        pause_modes=PAUSE_MODES,
        keeps_fingerprints=False,
        score_temperature=False,
        partial_tokens=True,
        max_top_logprobs=MAX_TOP_LOGPROBS,
        json_schema=True,
        refusals=refusals,
    )
