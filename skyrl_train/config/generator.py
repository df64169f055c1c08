"""Configuration section `generator`: inference engines, sampling and rollouts."""

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
"""Names of engine keys in newer versions of SkyRL; `{name}` is the key's own name."""
SPECULATIVE_METHODS = ("ngram", "draft_model", "eagle", "eagle3", "mtp")
SPECULATIVE_CONFIG_ALIAS = "generator.inference_engine.speculative_config.{name}"
"""Names of the keys of `generator.speculative` in newer versions of SkyRL, which passes them to vLLM."""


@dataclass
class SamplingConfig(Section):
    """Sampling parameters of training rollouts."""

    max_generate_length: int = config_field(
        1024, range=AT_LEAST_ONE, typical_range=Range(2, 262_144), aliases="max_new_tokens"
    )
    """Maximum number of tokens that are sampled per turn."""
    repetition_penalty: float = config_field(1.0, range=REPETITION_PENALTY_RANGE)
    """Penalty on tokens that occurred before: their positive logits are divided by it, their negative logits are
    multiplied by it. 1 turns it off."""
    temperature: float = config_field(1.0, range=TEMPERATURE_RANGE, typical_range=Range(0.05, 2))
    """Divisor of the logits. 0 is greedy sampling, which training rollouts do not allow."""
    top_p: float = config_field(1.0, range=POSITIVE_FRACTION)
    """Sample from the smallest set of tokens whose probabilities add up to at least this. 1 turns it off."""
    min_p: float = config_field(0.0, range=FRACTION)
    """Sample from tokens whose probability is at least this fraction of the most likely token's probability. 0 turns it
    off."""
    top_k: int = config_field(-1, range=AT_LEAST_MINUS_ONE, value_aliases={None: -1})
    """Sample from this number of most likely tokens. -1 turns it off."""
    logprobs: int | None = config_field(1, range=NON_NEGATIVE)
    """Number of log-probs that are returned for each sampled token."""
    stop: list[str] | None = None
    """Strings that end a turn. null uses none."""


@dataclass
class EvalSamplingConfig(SamplingConfig):
    """Sampling parameters of evaluation, which is greedy by default."""

    max_generate_length: int = config_field(
        interpolation("generator.sampling_params.max_generate_length"), range=AT_LEAST_ONE, aliases="max_new_tokens"
    )
    """Maximum number of tokens that are sampled per turn. By default it follows training."""
    temperature: float = config_field(0.0, range=TEMPERATURE_RANGE)
    """Divisor of the logits. 0 is greedy sampling."""


@dataclass
class ChatTemplateConfig(Section):
    """Chat template that renders conversations."""

    source: str = config_field("name", choices=("name", "file"))
    """Kind of `name_or_path`: the `name` of a built-in template, or the path of a template `file`."""
    name_or_path: str | None = None
    """Name or path of the template. null uses the tokenizer's own template."""


@dataclass
class RateLimitConfig(Section):
    """Limits on the number and the start rate of concurrent episodes, for environments or engines with low capacity."""

    enabled: bool = False
    """Apply the limits. The set of episodes that run at the same time then depends on timing."""
    trajectories_per_second: float | None = config_field(None, range=POSITIVE)
    """Maximum number of episodes that start per second. null sets no limit."""
    max_concurrency: int | None = config_field(None, range=AT_LEAST_ONE)
    """Maximum number of concurrent episodes, or the number of samples per prompt if that is larger. null sets no
    limit."""


@dataclass
class SpeculativeConfig(Section):
    """Speculative decoding: a draft proposes tokens, and the engine checks several of them in one step. Tokens and
    log-probs stay the same."""

    method: str | None = config_field(
        None,
        choices=(None, *SPECULATIVE_METHODS),
        unavailable_reason={
            "suffix": "Suffix decoding is not supported: vLLM has it only in its V1 model runner.",
        },
        aliases=SPECULATIVE_CONFIG_ALIAS,
    )
    """Where drafts come from: `ngram` (earlier tokens of the sequence), `draft_model` (a smaller model with the same
    tokenizer), `eagle` or `eagle3` (a head that was trained for the policy), or `mtp` (the policy's own layers for
    multi-token prediction). null turns it off."""
    model: str | None = config_field(None, aliases=SPECULATIVE_CONFIG_ALIAS)
    """Folder, URI or hub name of the draft model or EAGLE head. Its weights stay as loaded: weight syncs do not change
    it."""
    num_speculative_tokens: int = config_field(
        3, range=AT_LEAST_ONE, typical_range=Range(1, 16), aliases=SPECULATIVE_CONFIG_ALIAS
    )
    """Number of tokens that are drafted per step."""
    prompt_lookup_min: int = config_field(2, range=AT_LEAST_ONE, aliases=SPECULATIVE_CONFIG_ALIAS)
    """Minimum number of tokens at the end of the sequence that `ngram` must find earlier in it."""
    prompt_lookup_max: int = config_field(4, range=AT_LEAST_ONE, aliases=SPECULATIVE_CONFIG_ALIAS)
    """Maximum number of tokens at the end of the sequence that `ngram` looks for. The longest match is used."""


@dataclass
class GeneratorConfig(OpenSection):
    """Inference engines and rollouts."""

    model_name: str = interpolation("trainer.policy.model.path")
    """Name of the engines' model. By default it follows the policy."""
    model_dtype: str = config_field(
        "bfloat16", choices=("bfloat16", "float16", "float32"), aliases=INFERENCE_ENGINE_ALIAS
    )
    """Data type of the engines' weights."""
    run_engines_locally: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Start the engines in the run's own cluster. false uses running servers, one engine per server: servers of
    `skyrl_train.entrypoints.serve`, or vLLM's or SGLang's own servers if `backend` is one of these."""
    num_inference_engines: int = config_field(1, range=AT_LEAST_ONE, aliases="generator.inference_engine.num_engines")
    """Number of engines to start."""
    max_engine_restarts: int = 3
    """Maximum number of engine restarts in a run, including failed ones. A dead engine is restarted with the current
    weights. If an engine dies after this number of restarts, the run stops."""
    backend: str = config_field("vllm", choices=ENGINES, aliases=INFERENCE_ENGINE_ALIAS)
    """Inference engine that generates responses."""
    weight_sync_backend: str = config_field(
        "nccl", choices=("nccl", "gloo"), aliases=INFERENCE_ENGINE_ALIAS, value_aliases={"delta": "nccl"}
    )
    """Library of the collectives that send weights to the engines: `nccl` on GPUs, `gloo` on CPUs."""
    weight_sync_check: str = config_field("fingerprint", choices=("off", "fingerprint", "probe"))
    """Verification of weight syncs. Every sync compares a fingerprint (sum of bit patterns) of each tensor.
    `fingerprint` also compares the engines' log-probs with the trainer's once before the first step if either side
    computes in half precision. `probe` compares log-probs after every sync. `off` compares fingerprints alone."""
    weight_sync_route: str = config_field("auto", choices=("auto", "broadcast", "ipc", "checkpoint", "in_process"))
    """Transport of weights: `broadcast` (collectives), `ipc` (shared memory of one node), `checkpoint` (files in a
    shared folder) or `in_process` (arguments of the calls). `auto` is `ipc` if every engine is colocated with trainer
    ranks, otherwise `broadcast`."""
    weight_sync_folder: str | None = None
    """Folder for `weight_sync_route=checkpoint` and for vLLM's and SGLang's own servers. Trainer and engines must see
    it under the same path. null uses the run's folder."""
    weight_sync_only_changed: bool = False
    """Send only elements whose bits changed since the last sync, with their positions, or the whole tensor if that is
    smaller. Trainer ranks keep a copy of their shards in host memory, and every vLLM engine (on each of its nodes),
    SGLang engine and server a copy of the complete model."""
    weight_transfer_threshold_cuda_ipc_GB: float = config_field(1.0, range=POSITIVE, aliases=INFERENCE_ENGINE_ALIAS)
    """Size (GiB) of the buckets in which weights are sent."""
    external_proxy_url: str | None = config_field(None, aliases=INFERENCE_ENGINE_ALIAS)
    """URL of a router in front of external servers. Requires `external_server_urls`."""
    external_server_urls: list[str] | None = config_field(None, aliases=INFERENCE_ENGINE_ALIAS)
    """Other name of `remote_inference_engine_urls`. If both are set, this key takes precedence."""
    inference_engine_tensor_parallel_size: int = config_field(
        1, range=AT_LEAST_ONE, aliases=("tensor_parallel_size", "generator.inference_engine.tensor_parallel_size")
    )
    """Size of an engine's tensor-parallel group: number of accelerators that every layer is sharded over."""
    inference_engine_pipeline_parallel_size: int = config_field(
        1, range=AT_LEAST_ONE, aliases="generator.inference_engine.pipeline_parallel_size"
    )
    """Number of pipeline stages of an engine."""
    inference_engine_expert_parallel_size: int = config_field(
        1, range=AT_LEAST_ONE, aliases="generator.inference_engine.expert_parallel_size"
    )
    """Size of an engine's expert-parallel group: number of accelerators that the experts are distributed over."""
    inference_engine_data_parallel_size: int = config_field(
        1, range=AT_LEAST_ONE, aliases="generator.inference_engine.data_parallel_size"
    )
    """Number of data-parallel copies of the model in one engine. Each copy is started as a separate engine."""
    n_samples_per_prompt: int = config_field(5, range=AT_LEAST_ONE, typical_range=Range(1, 1_024))
    """Number of responses that are sampled per prompt (the size of a group)."""
    async_engine: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Run engines asynchronously."""
    batched: bool = False
    """Send multi-turn conversations to the engines in lockstep: one batch per turn, with all conversations. This is as
    reproducible as a single turn, and every turn waits for its slowest conversation. false continues each conversation
    independently after its first turn."""
    max_input_length: int = config_field(
        interpolation("trainer.max_prompt_length"),
        range=AT_LEAST_ONE,
        value_aliases={None: interpolation("trainer.max_prompt_length")},
    )
    """Maximum length (tokens) of a conversation before its next turn is sampled. By default it follows
    `trainer.max_prompt_length`."""
    vllm_v1_disable_multiproc: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Run vLLM's scheduler in the engine's own process."""
    enable_prefix_caching: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Reuse the KV cache for prompts that begin with the same tokens."""
    enable_chunked_prefill: bool = config_field(True, aliases=INFERENCE_ENGINE_ALIAS)
    """Split long prompts so that they do not delay the sampling of other responses."""
    max_num_batched_tokens: int = config_field(8192, range=AT_LEAST_ONE, aliases=INFERENCE_ENGINE_ALIAS)
    """Maximum number of tokens per step of the engine."""
    enforce_eager: bool = config_field(False, aliases=INFERENCE_ENGINE_ALIAS, skyrl_default=True)
    """Run the engine without CUDA graphs. CUDA graphs cost memory and start-up time, and make decoding of small models
    two to four times faster. A CPU has no CUDA graphs. SkyRL's default is true."""
    batch_invariant: bool = False
    """Use kernels of vLLM or SGLang whose results for a request do not depend on the other requests in the batch. They
    are slower. Without them the same seed may give different tokens in another batch, mainly in half precision. It
    requires GPUs."""
    speculative: SpeculativeConfig = config_field(factory=SpeculativeConfig)
    fully_sharded_loras: bool = config_field(False, aliases=INFERENCE_ENGINE_ALIAS)
    """Shard adapters over tensor-parallel ranks."""
    enable_ray_prometheus_stats: bool = config_field(False, aliases=INFERENCE_ENGINE_ALIAS)
    """Export vLLM's statistics through Ray."""
    gpu_memory_utilization: float = config_field(
        0.8, range=POSITIVE_FRACTION, typical_range=Range(0.1, 0.98), aliases=INFERENCE_ENGINE_ALIAS
    )
    """Fraction of an accelerator's memory that an engine may use."""
    max_num_seqs: int = config_field(1024, range=AT_LEAST_ONE, aliases=INFERENCE_ENGINE_ALIAS)
    """Maximum number of sequences in an engine's batch. On GPUs, CUDA graphs cover all batches up to it. For vLLM's and
    SGLang's own servers, the maximum number of concurrent requests to a server."""
    remote_inference_engine_urls: list[str] = config_field(
        factory=lambda: ["127.0.0.1:8001"], aliases="generator.inference_engine.remote_urls"
    )
    """Servers for `run_engines_locally=false`, as `host:port` or URLs. Their token is read from the environment
    variable SKYRL_API_KEY."""
    enable_http_endpoint: bool = config_field(False, aliases=INFERENCE_ENGINE_ALIAS)
    """Serve the run's engines over HTTP."""
    http_endpoint_host: str = config_field("127.0.0.1", aliases=INFERENCE_ENGINE_ALIAS)
    """Network address on which the HTTP endpoint listens."""
    http_endpoint_port: int = config_field(8000, range=Range(1, 65535), aliases=INFERENCE_ENGINE_ALIAS)
    """Port of the HTTP endpoint."""
    served_model_name: str | None = config_field(None, aliases=INFERENCE_ENGINE_ALIAS)
    """Name of the model at the HTTP endpoint. null is the name of the engines' model."""
    max_turns: int = config_field(1, range=AT_LEAST_ONE)
    """Maximum number of turns of a conversation. Environments read it as `extras["max_turns"]`. A row's own `max_turns`
    applies if it is lower."""
    chat_template: ChatTemplateConfig = config_field(factory=ChatTemplateConfig)
    chat_template_kwargs: dict[str, Any] = config_field(factory=dict)
    """Variables for the chat template, for example `+generator.chat_template_kwargs.enable_thinking=false`."""
    engine_init_kwargs: dict[str, Any] = config_field(factory=dict, aliases=INFERENCE_ENGINE_ALIAS)
    """Keyword arguments that are passed to the engine unchanged."""
    override_existing_update_group: str = config_field(
        "auto",
        choices=("auto", "enable", "disable"),
        value_aliases={True: "enable", False: "disable"},
        aliases=INFERENCE_ENGINE_ALIAS,
    )
    """Replace the weight-update group of a remote server."""
    sampling_params: SamplingConfig = config_field(factory=SamplingConfig)
    use_conversation_multi_turn: bool = True
    """Make every turn a separate message. false writes all turns into one assistant message."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """If a stop string ended a turn, append the end-of-turn token. That token is not trained on."""
    retokenize_chat_history: bool = False
    """Render and tokenize the complete conversation again before every turn. Requires `step_wise_trajectories=true`."""
    rate_limit: RateLimitConfig = config_field(factory=RateLimitConfig)
    eval_sampling_params: EvalSamplingConfig = config_field(factory=EvalSamplingConfig)
    eval_n_samples_per_prompt: int = config_field(1, range=AT_LEAST_ONE)
    """Number of responses per prompt in evaluation. They are all equal at evaluation's default temperature, 0."""
    eval_n_samples_by_data_source: dict[str, int] = config_field(factory=dict, range=AT_LEAST_ONE)
    """Number of responses per prompt in evaluation for some values of the rows' `data_source`, for example
    `{aime: 32}`. All other prompts have `eval_n_samples_per_prompt`."""
    zero_reward_on_non_stop: bool = False
    """In training, lower the reward of a response that did not end with a stop token or stop string: to at most 0, and
    to at most the lowest reward of the group's responses that did. No reward is raised."""
    apply_overlong_filtering: bool = False
    """Mask responses that were truncated by length: they have no loss. Their rewards still count in the statistics of
    their groups."""
    over_provisioning: float = config_field(0.0, range=NON_NEGATIVE)
    """Extra prompts that each step starts, as a fraction of the prompts that it needs. The step takes the prompts that
    finish first and aborts the others. The selection depends on timing, so runs are no longer reproducible, and slow
    prompts are trained on less often."""
    rope_scaling: dict[str, Any] | None = interpolation("trainer.rope_scaling")
    """Scaling of rotary embeddings in the engines' model. By default it follows the trainer."""
    rope_theta: float | None = config_field(interpolation("trainer.rope_theta"), range=POSITIVE)
    """Base of rotary embeddings in the engines' model. By default it follows the trainer."""
    own: dict[str, Any] = config_field(factory=dict)
    """Keys for your own code. `+generator.my_key=3` is stored here and read as `cfg.generator.my_key`."""
    step_wise_trajectories: bool = config_field(False, aliases="step_wise_training")
    """Support chat templates that rewrite the history, as those of thinking models do: where the template changes
    earlier turns, a new training sequence begins. The episode remains one sample, and turns that only extend the
    conversation share a sequence."""
