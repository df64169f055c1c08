"""generator: engines, sampling and how conversations are rolled out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_train.config.section import OpenSection, Section, interpolation


@dataclass
class SamplingConfig(Section):
    """How responses are sampled."""

    max_generate_length: int = 1024
    """Tokens per turn at most; `max_new_tokens` is accepted as another name."""
    repetition_penalty: float = 1.0
    """Divides the logits of tokens already seen; 1 is off."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy."""
    top_p: float = 1.0
    """Samples from the smallest set of tokens with this probability; 1 is off."""
    min_p: float = 0.0
    """Samples from tokens with at least this share of the likeliest token's probability; 0 is off."""
    top_k: int = -1
    """Samples from this many likeliest tokens; -1 is off."""
    logprobs: int | None = 1
    """Log-probs of the sampled tokens are always returned here."""
    stop: list[str] | None = None
    """Strings that end a turn."""


@dataclass
class EvalSamplingConfig(SamplingConfig):
    """How responses are sampled in evaluation: greedy unless told otherwise."""

    max_generate_length: int = interpolation("generator.sampling_params.max_generate_length")
    """Tokens per turn at most."""
    temperature: float = 0.0
    """Divides the logits; 0 is greedy."""


@dataclass
class ChatTemplateConfig(Section):
    """Which chat template renders conversations."""

    source: str = "name"
    """`name` looks `name_or_path` up among the built-in ones, `file` reads it from that path."""
    name_or_path: str | None = None
    """null uses the tokenizer's own template."""


@dataclass
class RateLimitConfig(Section):
    """How many episodes run, for environments or engines that bear no more."""

    enabled: bool = False
    """Limit them. Which run together then depends on timing."""
    trajectories_per_second: float | None = None
    """Episodes that begin a second at most; null is no limit."""
    max_concurrency: int | None = None
    """Episodes under way at most, unless the samples of one prompt are more; null is no limit."""


@dataclass
class GeneratorConfig(OpenSection):
    """Engines and the rollouts they serve."""

    model_name: str = interpolation("trainer.policy.model.path")
    """Name of the model for tokenizers and engines; follows the policy."""
    model_dtype: str = "bfloat16"
    """Data type of the engines' weights: `bfloat16`, `float16` or `float32`."""
    run_engines_locally: bool = True
    """Start engines in this cluster; false uses servers, one engine each: those of `skyrl_train.entrypoints.serve`, or
    vLLM's or SGLang's own where `backend` says so."""
    num_inference_engines: int = 1
    """Engines to start."""
    max_engine_restarts: int = 3
    """Engines that die are started again, with the current weights, this often in a run; then the run stops."""
    backend: str = "vllm"
    """Which engine: `vllm`, `sglang` or `transformers`."""
    weight_sync_backend: str = "nccl"
    """Collectives that carry weights to the engines: `nccl` or `gloo`."""
    weight_sync_check: str = "fingerprint"
    """Proof that weights arrived: `off`, `fingerprint` (sums of bit patterns) or `probe` (log-probs of a text too)."""
    weight_sync_route: str = "auto"
    """How weights travel: `broadcast`, `ipc` (one machine's memory), `checkpoint` (a shared folder) or `in_process` (in
    the calls themselves); `auto` is ipc where every engine shares its slots with the trainer, else broadcast."""
    weight_sync_folder: str | None = None
    """For `weight_sync_route=checkpoint` and for vLLM's and SGLang's own servers: a folder that trainer and engines see
    under one path; null is the run's."""
    weight_sync_only_changed: bool = False
    """Leave out tensors whose bits are those of the last sync, for engines that can load a part."""
    weight_transfer_threshold_cuda_ipc_GB: float = 1.0
    """Size (GB) of the buckets in which weights travel."""
    external_proxy_url: str | None = None
    """A router in front of external servers."""
    external_server_urls: list[str] | None = None
    """Other name of `remote_inference_engine_urls`, which it goes before."""
    inference_engine_tensor_parallel_size: int = 1
    """Accelerators that a layer of an engine is split over; `tensor_parallel_size` is accepted as another name."""
    inference_engine_pipeline_parallel_size: int = 1
    """Stages that an engine's layers are split into."""
    inference_engine_expert_parallel_size: int = 1
    """Accelerators that an engine's experts are split over."""
    inference_engine_data_parallel_size: int = 1
    """Copies inside one engine."""
    n_samples_per_prompt: int = 5
    """Responses per prompt: the size of a group."""
    async_engine: bool = True
    """Engines are always asynchronous here."""
    batched: bool = False
    """Conversations of several turns go to the engines turn by turn, all together: as reproducible as one turn is, and
    as slow as the slowest. false: each goes on by itself after its first turn."""
    max_input_length: int = interpolation("trainer.max_prompt_length")
    """Tokens of a conversation at most before its next turn is sampled."""
    vllm_v1_disable_multiproc: bool = True
    """Run vLLM's scheduler in the engine's own process."""
    enable_prefix_caching: bool = True
    """Reuse the cache of prompts that begin the same."""
    enable_chunked_prefill: bool = True
    """Split long prompts so that they do not hold up sampling."""
    max_num_batched_tokens: int = 8192
    """Tokens per engine step at most."""
    enforce_eager: bool = True
    """Run the engine without CUDA graphs."""
    fully_sharded_loras: bool = False
    """Shard adapters over tensor-parallel ranks."""
    enable_ray_prometheus_stats: bool = False
    """Export vLLM's statistics through Ray."""
    gpu_memory_utilization: float = 0.8
    """Share of an accelerator's memory that an engine may take."""
    max_num_seqs: int = 1024
    """Sequences in an engine's batch at most."""
    remote_inference_engine_urls: list[str] = field(default_factory=lambda: ["127.0.0.1:8001"])
    """Servers for `run_engines_locally=false`; their token is the environment's SKYRL_API_KEY."""
    enable_http_endpoint: bool = False
    """Serve the engines over HTTP."""
    http_endpoint_host: str = "127.0.0.1"
    """Address of that endpoint."""
    http_endpoint_port: int = 8000
    """Port of that endpoint."""
    served_model_name: str | None = None
    """Name of the model at that endpoint."""
    max_turns: int = 1
    """Turns of a conversation at most; environments get it as `extras["max_turns"]`. A row's own `max_turns` counts
    where it is lower."""
    chat_template: ChatTemplateConfig = field(default_factory=ChatTemplateConfig)
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables for the chat template, e.g. `+generator.chat_template_kwargs.enable_thinking=false`."""
    engine_init_kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments handed to the engine as they are."""
    override_existing_update_group: str = "auto"
    """Replace a remote server's weight-update group: `auto`, `enable` or `disable`."""
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    use_conversation_multi_turn: bool = True
    """Every turn is a message of its own; false writes all turns into one assistant message."""
    append_eos_token_after_stop_str_in_multi_turn: bool = True
    """End a turn that a stop string ended with the token that ends turns; it is not trained on."""
    retokenize_chat_history: bool = False
    """With step_wise_trajectories: every turn reads the whole conversation rendered and tokenised anew."""
    rate_limit: RateLimitConfig = field(default_factory=RateLimitConfig)
    eval_sampling_params: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    eval_n_samples_per_prompt: int = 1
    """Responses per prompt in evaluation."""
    zero_reward_on_non_stop: bool = False
    """In training a response that did not end by itself gets reward 0, or less: never more than the environment gave
    it, nor than the worst of its group that did end."""
    apply_overlong_filtering: bool = False
    """A response that was cut by length is kept out of the loss; its reward stays in its group's statistics."""
    over_provisioning: float = 0.0
    """A step begins this fraction of prompts more than it needs, takes those that finish first and aborts the others.
    Which they are depends on timing: runs no longer repeat, and slow prompts are seen less often."""
    rope_scaling: dict[str, Any] | None = field(default=interpolation("trainer.rope_scaling"))
    """Rotary embedding scaling of the engines' model; follows the trainer."""
    rope_theta: float | None = interpolation("trainer.rope_theta")
    """Rotary embedding base of the engines' model; follows the trainer."""
    own: dict[str, Any] = field(default_factory=dict)
    """Keys of your own, for your own code: `+generator.my_key=3` is here, and `cfg.generator.my_key` there."""
    step_wise_trajectories: bool = False
    """Where the chat template rewrites the history (thinking models), what the model read next is a sequence of its
    own; the episode stays one sample. Turns that go on from each other stay one sequence."""
