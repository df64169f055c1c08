"""TorchRL's AsyncVLLM: replicas of vLLM in Ray actors, with vLLM's `generate` and verified weight updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import MISSING, fields
from typing import Any

import torch
from torchrl.modules.llm.backends import RLvLLMEngine

from skyrl_train.aio import gather_all
from skyrl_train.config.choices import ENGINES
from skyrl_train.engines.base import InferenceEngine
from skyrl_train.engines.client import EngineClient
from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.wrappers.engine_view import EngineView
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.parameters import read_generate_kwargs
from skyrl_train.tensordict.wrappers.ray_engine import engine_in_actor
from skyrl_train.tensordict.wrappers.vllm_workers import KIND

_SAMPLING = (
    *("n", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "min_tokens", "stop"),
    *("stop_token_ids", "ignore_eos", "seed", "skip_special_tokens"),
)
"""Fields of vLLM's SamplingParams that engines of this project have."""
_OF_OUTPUT = ("logprobs", "prompt_logprobs", "detokenize", "output_kind", "skip_reading_prefix_cache")
"""Fields that only choose what is returned, or that vLLM sets for them."""


class AsyncVLLM(EngineView, RLvLLMEngine):  # type: ignore[misc]
    """Replicas of vLLM, each in its own Ray actor with its own accelerators. Ray is started if necessary.

    Requests go to the replica with the least load; the samples of a prompt stay together. A weight update reaches all
    replicas as one version. Wrappers, collectors and Ray actors accept the object, which stays usable in other
    processes; `shutdown` in the process that started it ends the replicas.
    """

    def __init__(
        self,
        engine_args: Any,
        num_replicas: int = 1,
        *,
        enable_prefix_caching: bool | None = None,
        timeout: float = 600.0,
    ):
        """Store the settings; `launch` starts the replicas.

        Args:
            engine_args: vLLM's AsyncEngineArgs, or a mapping of arguments of VLLMEngine and vLLM with "model". The
                dtype "auto" (default) is float32 on a CPU, else bfloat16.
            num_replicas: Number of replicas.
            enable_prefix_caching: Overrides the value of `engine_args`. A weight update clears the cache in any case.
            timeout: Seconds for loading the model, for a call and for a weight update.

        Raises:
            ConfigError: `num_replicas` is below 1.
        """
        if num_replicas < 1:
            raise ConfigError(f"num_replicas={num_replicas} must be at least 1.")
        self.engine_args, self.num_replicas = engine_args, num_replicas
        self._options = dict(engine_args) if isinstance(engine_args, Mapping) else _changed(engine_args)
        if enable_prefix_caching is not None:
            self._options["enable_prefix_caching"] = enable_prefix_caching
        on_cpu = self._options.get("device") == "cpu" or not torch.cuda.is_available()
        dtype = str(self._options.get("dtype", "auto")).removeprefix("torch.")  # also the type of the sent weights
        self._options["dtype"] = ("float32" if on_cpu else "bfloat16") if dtype == "auto" else dtype
        self.actors: list[InferenceEngine] = []
        super().__init__(None, self._options["model"], dtype=self._options["dtype"], timeout=timeout)

    @classmethod
    def launch(cls, engine_args: Any, num_replicas: int = 1, **options: Any) -> AsyncVLLM:
        """Start replicas, and return once their models are loaded; `options` are those of the constructor.

        Raises ConfigError if Ray lacks the resources, or an argument is wrong.
        """
        service = cls(engine_args, num_replicas, **options)
        ranks = service._options.get("tensor_parallel_size", 1)
        resources: dict[str, Any] = {"ranks": ranks, "start_ray": True, "deadline_s": service.timeout}
        with ExitStack() as stack:
            stack.callback(service.actors.clear)
            for number in range(num_replicas):
                name = f"{KIND} replica {number}"
                engine, closing = engine_in_actor(ENGINES[KIND], service._options, name=name, **resources)
                stack.callback(closing)
                service.actors.append(engine)
            several: Any = Replicas(service.actors, service.timeout)
            service._engine = several if num_replicas > 1 else service.actors[0]
            service._closing = stack.pop_all().close
        return service

    @classmethod
    def from_pretrained(
        cls,
        model_name: str,
        num_devices: int | None = None,
        num_replicas: int = 1,
        verbose: bool = True,
        compile: bool = True,
        enable_fp32_output: bool = False,
        *,
        timeout: float = 600.0,
        **options: Any,
    ) -> AsyncVLLM:
        """Start replicas of a model.

        Args:
            model_name: Path or hub name.
            num_devices: Number of accelerators of each replica; 1 by default.
            num_replicas: Number of replicas.
            verbose: Accepted without effect; the engines' counters are metrics.
            compile: False runs the model without compilation and CUDA graphs.
            enable_fp32_output: Require float32 logits, which need dtype="float32". Log-probs are always float32.
            timeout: Seconds for loading the model, for a call and for a weight update.
            **options: Arguments of VLLMEngine and of vLLM's EngineArgs.

        Raises:
            ConfigError: Ray lacks the resources, or an argument is wrong.
        """
        ranks = options.pop("tensor_parallel_size", None)
        if None not in (ranks, num_devices) and ranks != num_devices:
            raise ConfigError(f"tensor_parallel_size={ranks} must be num_devices={num_devices}. Leave one of them out.")
        options["tensor_parallel_size"] = ranks or num_devices or 1
        if enable_fp32_output and options.setdefault("dtype", "float32") != "float32":
            raise ConfigError(f"enable_fp32_output=True needs dtype='float32', got dtype={options['dtype']!r}.")
        if not compile:
            options["enforce_eager"] = True
        return cls.launch({"model": model_name, **options}, num_replicas, timeout=timeout)

    @property
    def engines(self) -> Sequence[InferenceEngine]:
        """The engines of the replicas. Raises RuntimeError before `launch` and after `shutdown`."""
        return self.actors if self.engine is not None else []

    def generate(
        self,
        prompts: Any = None,
        sampling_params: Any = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        timeout_seconds: float | None = None,
        actor_index: int | None = None,
    ) -> Any:
        """Sample answers, and block until all have ended; like vLLM's `LLM.generate`.

        Args:
            prompts: A text, token ids, a mapping with "prompt" or "prompt_token_ids", or a list of these.
            sampling_params: vLLM's SamplingParams, a mapping with their names, or None for vLLM's defaults.
            prompt_token_ids: Token ids of one or several prompts, instead of `prompts`.
            use_tqdm: Accepted without effect.
            timeout_seconds: Seconds for all answers; None for the default.
            actor_index: Index of the replica; None for the one with the least load.

        Returns:
            vLLM's RequestOutput for a single prompt, a list of them for a list. With `logprobs`, a token has its own
            log-prob (nats, after temperature and before truncation); `prompt_logprobs` likewise.

        Raises:
            ConfigError: Not exactly one of `prompts` and `prompt_token_ids` is given, a prompt is empty, or a parameter
                is not supported.
            DeadlineExceeded: The answers took longer than `timeout_seconds`.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise ConfigError("generate needs exactly one of prompts and prompt_token_ids.")
        given = prompts if prompt_token_ids is None else prompt_token_ids
        single = isinstance(given, str | Mapping) or all(isinstance(one, int) for one in given)
        prompts = [
            one["prompt_token_ids" if "prompt_token_ids" in one else "prompt"] if isinstance(one, Mapping) else one
            for one in ([given] if single else given)
        ]
        wanted = {"max_tokens": 16, "skip_special_tokens": True, **_parameters(sampling_params)}
        shown = {name: wanted.pop(name, None) for name in _OF_OUTPUT}
        generation = read_generate_kwargs(wanted, None)
        engine = self.engine if actor_index is None else self.actors[actor_index]
        rows = [self._ids(prompt) for prompt in prompts]
        requests, done, texts = self._sample(rows, generation, timeout_seconds, engine)
        read: list[Any] = [None] * len(rows)
        if shown["prompt_logprobs"] is not None:
            read = call(engine.score(rows), f"{self.model_path}: score", timeout_seconds or self.timeout)
        from skyrl_train.engines.vllm.llm import to_request_output

        count, outputs, wants = generation.num_samples or 1, [], shown["logprobs"] is not None
        for number, prompt in enumerate(prompts):
            mine = slice(number * count, (number + 1) * count)
            made = requests[mine][0], prompt if isinstance(prompt, str) else None, read[number]
            outputs.append(to_request_output(*made, done[mine], texts[mine], logprobs=wants))
        return outputs[0] if single else outputs

    def get_num_unfinished_requests(self, actor_index: int | None = None) -> int | list[int]:
        """Return the number of requests that a replica has, or a list with that of every replica."""
        chosen = self.engines if actor_index is None else [self.actors[actor_index]]
        healths = [call(engine.health(), f"{self.model_path}: health", self.timeout) for engine in chosen]
        counts = [health.running + health.queued for health in healths]
        return counts if actor_index is None else counts[0]


def make_async_vllm_engine(*, model_name: str, **options: Any) -> AsyncVLLM:
    """Start replicas of vLLM; see `AsyncVLLM.from_pretrained`, which has the same arguments."""
    return AsyncVLLM.from_pretrained(model_name, **options)


class Replicas:
    """Several equal engines as one engine for wrappers. Weight updates go to each of them, see `AsyncVLLM.engines`."""

    def __init__(self, engines: Sequence[InferenceEngine], deadline_s: float):
        """Route requests to `engines`; a call takes at most `deadline_s` seconds."""
        self._engines, self._deadline_s = list(engines), deadline_s
        self.capabilities = engines[0].capabilities
        self._client = EngineClient(self._engines, deadline_s=deadline_s)
        self.generate, self.close = self._client.generate, self._client.close

    def __reduce__(self) -> tuple[Any, ...]:
        return Replicas, (self._engines, self._deadline_s)

    async def score(self, token_ids: Sequence[Sequence[int]], temperature: float = 1.0) -> list[list[float]]:
        """Return the log-probs of all tokens but the first of each sequence; every replica scores its share."""
        engines = self._client.engines
        scoring = [engine.score(token_ids[i :: len(engines)], temperature) for i, engine in enumerate(engines)]
        parts = await gather_all(scoring)
        return [parts[i % len(engines)][i // len(engines)] for i in range(len(token_ids))]


def _changed(engine_args: Any) -> dict[str, Any]:
    """The model, and the arguments of vLLM's dataclass that differ from its defaults."""
    found = {"model": engine_args.model}
    for field in fields(engine_args):
        default = field.default if field.default_factory is MISSING else field.default_factory()
        if (value := getattr(engine_args, field.name)) != default:
            found[field.name] = value
    return found


def _parameters(given: Any) -> dict[str, Any]:
    """Sampling parameters by name, from a mapping or from those of vLLM's SamplingParams that differ from a default."""
    if given is None or isinstance(given, Mapping):
        return dict(given or {})
    default = type(given)()
    names = [name for name in given.__struct_fields__ if not name.startswith("_")]
    changed = {name: getattr(given, name) for name in names if getattr(given, name) != getattr(default, name)}
    if unknown := sorted(set(changed) - {*_SAMPLING, *_OF_OUTPUT}):
        raise ConfigError(
            f"sampling_params.{unknown[0]}={changed[unknown[0]]!r} is not supported. Leave it out; known: "
            f"{', '.join(sorted({*_SAMPLING, *_OF_OUTPUT}))}."
        )
    return changed
