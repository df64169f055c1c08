"""generator: engines, sampling and how conversations are rolled out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from skyrl_train.config.choices import ENGINES
from skyrl_train.config.section import (
    AT_LEAST_MINUS_ONE,
    AT_LEAST_ONE,
    FRACTION,
    NON_NEGATIVE,
    POSITIVE,
    POSITIVE_FRACTION,
    REPETITION_PENALTY_RANGE,
    TEMPERATURE_RANGE,
    OpenSection,
    Range,
    Section,
    config_field,
    interpolation,
)

INFERENCE_ENGINE_ALIAS = "generator.inference_engine.{name}"
"""Where newer versions of SkyRL keep the keys of engines."""


@dataclass
class SamplingConfig(Section):
    """How responses are sampled."""

    max_generate_length: int = config_field(1024, range=AT_LEAST_ONE, usual=Range(2, 262_144), aliases="max_new_tokens")
    """Maximum number of tokens per turn."""
    repetition_penalty: float = config_field(1.0, range=REPETITION_PENALTY_RANGE)
    """Divides the logits of tokens that occurred before; 1 turns it off."""
    temperature: float = config_field(1.0, range=TEMPERATURE_RANGE, usual=Range(0.05, 2))
    """Divides the logits; 0 is greedy sampling."""
    top_p: float = config_field(1.0, range=POSITIVE_FRACTION)
    """Sample from the smallest set of tokens whose probabilities add up to at least this; 1 turns it off."""
    min_p: float = config_field(0.0, range=FRACTION)
    """Sample from tokens whose probability is at least this share of the likeliest token's; 0 turns it off."""
    top_k: int = config_field(-1, range=AT_LEAST_MINUS_ONE, spellings={None: -1})
    """Sample from this many of the likeliest tokens; -1 turns it off."""
    logprobs: int | None = config_field(1, range=NON_NEGATIVE)
    """How many log-probs are returned for each sampled token."""
    stop: list[str] | None = None
    """Strings that end a turn."""


@dataclass
class EvalSamplingConfig(SamplingConfig):
    """How responses are sampled in evaluation: greedily by default."""

    max_generate_length: int = config_field(
        interpolation("generator.sampling_params.max_generate_length"), range=AT_LEAST_ONE, aliases="max_new_tokens"
    )
    """Maximum number of tokens per turn."""
    temperature: float = config_field(0.0, range=TEMPERATURE_RANGE)


@dataclass
class ChatTemplateConfig(Section):
    """Which chat template renders conversations."""

    source: str = config_field("name", choices=("name", "file"))
    """`name`: `name_or_path` is the name of a built-in template. `file`: it is the path of a template."""
    name_or_path: str | None = None
    """The template; null uses the tokenizer's own."""


@dataclass
class RateLimitConfig(Section):
    """Limits on running episodes, for environments or engines that cannot take more."""

    enabled: bool = False
    """Apply the limits. Which episodes run at the same time then depends on timing."""
    trajectories_per_second: float | None = config_field(None, range=POSITIVE)
    """Maximum number of episodes that begin per second; null sets no limit."""
    max_concurrency: int | None = config_field(None, range=AT_LEAST_ONE)
    """Maximum number of episodes that run at the same time, or the number of samples of one prompt if that is larger;
    null sets no limit."""


@dataclass
class GeneratorConfig(OpenSection):
    """Engines and the rollouts they serve."""

    model_name: str = interpolation("trainer.policy.model.path")
    """Name of the model for tokenizers and engines. By default it follows the policy."""
    model_dtype: str = config_field(
        "bfloat16", choices=("bfloat16", "float16", "float32"), aliases=INFERENCE_ENGINE_ALIAS
    )
    """Data type of the engines' weights."""
    run_engines_locally: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Start engines in this cluster. false uses servers, each of which is one engine: those of
    `skyrl_train.entrypoints.serve`, or vLLM's or SGLang's own servers if `backend` is one of these."""
    num_inference_engines: int = config_field(1, range=AT_LEAST_ONE, aliases="generator.inference_engine.num_engines")
    """Number of engines to start."""
    max_engine_restarts: int = 3
    """How often, in the whole run, an engine that died is started again with the current weights. After that the run
    stops."""
    backend: str = config_field("vllm", choices=ENGINES, aliases=INFERENCE_ENGINE_ALIAS)
    """Which engine generates."""
    weight_sync_backend: str = config_field(
        "nccl", choices=("nccl", "gloo"), aliases=INFERENCE_ENGINE_ALIAS, spellings={"delta": "nccl"}
    )
    """Collectives that carry weights to the engines."""
    weight_sync_check: str = config_field("fingerprint", choices=("off", "fingerprint", "probe"))
    """How it is verified that weights arrived: `fingerprint` compares sums of bit patterns, and in half precision the
    log-probs of the first prompts once before the first step; `probe` compares them after every sync. `off` leaves out
    all but the fingerprints."""
    weight_sync_route: str = config_field("auto", choices=("auto", "broadcast", "ipc", "checkpoint", "in_process"))
    """How weights travel: `broadcast` (collectives), `ipc` (memory of one machine), `checkpoint` (a shared folder) or
    `in_process` (in the calls themselves). `auto` is `ipc` if every engine shares its slots with the trainer, otherwise
    `broadcast`."""
    weight_sync_folder: str | None = None
    """Folder for `weight_sync_route=checkpoint` and for vLLM's and SGLang's own servers. Trainer and engines must see
    it under the same path; null uses the run's folder."""
    weight_sync_only_changed: bool = False
    """Leave out tensors that did not change by a single bit since the last sync, for engines that can load a part of
    the model."""
    weight_transfer_threshold_cuda_ipc_GB: float = config_field(1.0, range=POSITIVE, aliases=INFERENCE_ENGINE_ALIAS)
    """Size (GiB) of the buckets in which weights travel."""
    external_proxy_url: str | None = config_field(None, aliases=INFERENCE_ENGINE_ALIAS)
    """A router in front of external servers. Requires `external_server_urls`."""
    external_server_urls: list[str] | None = config_field(None, aliases=INFERENCE_ENGINE_ALIAS)
    """Other name of `remote_inference_engine_urls`; if both are set, this one counts."""
    inference_engine_tensor_parallel_size: int = config_field(
        1, range=AT_LEAST_ONE, aliases=("tensor_parallel_size", "generator.inference_engine.tensor_parallel_size")
    )
    """Size of an engine's tensor-parallel group: the accelerators that every layer is split over."""
    inference_engine_pipeline_parallel_size: int = config_field(
        1, range=AT_LEAST_ONE, aliases="generator.inference_engine.pipeline_parallel_size"
    )
    """Number of pipeline stages that an engine's layers are split into."""
    inference_engine_expert_parallel_size: int = config_field(
        1, range=AT_LEAST_ONE, aliases="generator.inference_engine.expert_parallel_size"
    )
    """Number of accelerators that an engine's experts are split over."""
    inference_engine_data_parallel_size: int = config_field(
        1, range=AT_LEAST_ONE, aliases="generator.inference_engine.data_parallel_size"
    )
    """Number of copies of the model inside one engine."""
    n_samples_per_prompt: int = config_field(5, range=AT_LEAST_ONE, usual=Range(1, 1_024))
    """Responses per prompt: the size of a group."""
    async_engine: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Run engines asynchronously."""
    batched: bool = False
    """Send conversations of several turns to the engines turn by turn, all of them together. This is as reproducible as
    a single turn, and as slow as the slowest conversation. false: each conversation continues on its own after its
    first turn."""
    max_input_length: int = config_field(
        interpolation("trainer.max_prompt_length"),
        range=AT_LEAST_ONE,
        spellings={None: interpolation("trainer.max_prompt_length")},
    )
    """Maximum length (tokens) of a conversation before its next turn is sampled."""
    vllm_v1_disable_multiproc: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Run vLLM's scheduler in the engine's own process."""
    enable_prefix_caching: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Reuse the KV cache for prompts that begin with the same tokens."""
    enable_chunked_prefill: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Split long prompts so that they do not delay the sampling of other responses."""
    max_num_batched_tokens: int = config_field(8192, range=AT_LEAST_ONE, aliases=INFERENCE_ENGINE_ALIAS)
    """Maximum number of tokens per step of the engine."""
    enforce_eager: bool = config_field(False, aliases=INFERENCE_ENGINE_ALIAS, skyrl_default=True)
    """Run the engine without CUDA graphs, which cost memory and time at the start and make decoding of small models two
    to four times faster. On a CPU there are none. SkyRL's default is true."""
    batch_invariant: bool = False
    """Kernels of vLLM or SGLang whose results for a request do not depend on what else is in the batch. They are
    slower; without them the same seed may give other tokens in another batch, in half precision above all."""
    fully_sharded_loras: bool = config_field(False, aliases=INFERENCE_ENGINE_ALIAS)
    """Shard adapters over tensor-parallel ranks."""
    enable_ray_prometheus_stats: bool = config_field(False, aliases=INFERENCE_ENGINE_ALIAS)
    """Export vLLM's statistics through Ray."""
    gpu_memory_utilization: float = config_field(
        0.8, range=POSITIVE_FRACTION, usual=Range(0.1, 0.98), aliases=INFERENCE_ENGINE_ALIAS
    )
    """Share of an accelerator's memory that an engine may use."""
    max_num_seqs: int = config_field(1024, range=AT_LEAST_ONE, aliases=INFERENCE_ENGINE_ALIAS)
    """Maximum number of sequences in an engine's batch; what vLLM's and SGLang's own servers are sent at a time."""
    remote_inference_engine_urls: list[str] = config_field(
        factory=lambda: ["127.0.0.1:8001"], aliases="generator.inference_engine.remote_urls"
    )
    """Servers for `run_engines_locally=false`. Their token is read from the environment variable SKYRL_API_KEY."""
    enable_http_endpoint: bool = config_field(False, aliases=INFERENCE_ENGINE_ALIAS)
    """Serve the engines over HTTP."""
    http_endpoint_host: str = config_field("127.0.0.1", aliases=INFERENCE_ENGINE_ALIAS)
    """Address of the HTTP endpoint."""
    http_endpoint_port: int = config_field(8000, range=Range(1, 65535), aliases=INFERENCE_ENGINE_ALIAS)
    """Port of the HTTP endpoint."""
    served_model_name: str | None = config_field(None, aliases=INFERENCE_ENGINE_ALIAS)
    """Name of the model at the HTTP endpoint."""
    max_turns: int = config_field(1, range=AT_LEAST_ONE)
    """Maximum number of turns of a conversation; environments get it as `extras["max_turns"]`. A row's own `max_turns`
    applies if it is lower."""
    chat_template: ChatTemplateConfig = config_field(factory=ChatTemplateConfig)
    chat_template_kwargs: dict[str, Any] = config_field(factory=dict)
    """Variables for the chat template, e.g. `+generator.chat_template_kwargs.enable_thinking=false`."""
    engine_init_kwargs: dict[str, Any] = config_field(factory=dict, aliases=INFERENCE_ENGINE_ALIAS)
    """Arguments that are passed to the engine unchanged."""
    override_existing_update_group: str = config_field(
        "auto",
        choices=("auto", "enable", "disable"),
        spellings={True: "enable", False: "disable"},
        aliases=INFERENCE_ENGINE_ALIAS,
    )
    """Replace the weight-update group of a remote server."""
    sampling_params: SamplingConfig = config_field(factory=SamplingConfig)
    use_conversation_multi_turn: bool = True
    """Make every turn a message of its own; false writes all turns into one assistant message."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """If a stop string ended a turn, append the token that ends turns. That token is not trained on."""
    retokenize_chat_history: bool = False
    """With step_wise_trajectories: render and tokenise the whole conversation again before every turn."""
    rate_limit: RateLimitConfig = config_field(factory=RateLimitConfig)
    eval_sampling_params: EvalSamplingConfig = config_field(factory=EvalSamplingConfig)
    eval_n_samples_per_prompt: int = config_field(1, range=AT_LEAST_ONE)
    """Responses per prompt in evaluation. They are all equal at the default temperature of evaluation, 0."""
    zero_reward_on_non_stop: bool = False
    """In training, lower the reward of a response that did not end by itself to at most 0, and to at most the lowest
    reward of the responses in its group that did. No reward is ever raised."""
    apply_overlong_filtering: bool = False
    """Keep responses that were cut off by length out of the loss; their rewards still count in the statistics of their
    groups."""
    over_provisioning: float = config_field(0.0, range=NON_NEGATIVE)
    """Begin each step with more prompts than it needs, by this fraction. The step takes the prompts that finish first
    and aborts the others. Which ones these are depends on timing, so runs are no longer reproducible, and slow prompts
    are seen less often."""
    rope_scaling: dict[str, Any] | None = interpolation("trainer.rope_scaling")
    """Scaling of rotary embeddings in the engines' model. By default it follows the trainer."""
    rope_theta: float | None = config_field(interpolation("trainer.rope_theta"), range=POSITIVE)
    """Base of rotary embeddings in the engines' model. By default it follows the trainer."""
    own: dict[str, Any] = config_field(factory=dict)
    """Keys for your own code: `+generator.my_key=3` is stored here, and read as `cfg.generator.my_key`."""
    step_wise_trajectories: bool = config_field(False, aliases="step_wise_training")
    """For chat templates that rewrite the history (thinking models): when that happens, what the model reads next
    begins a new sequence. The episode stays one sample, and turns that merely continue stay one sequence."""
