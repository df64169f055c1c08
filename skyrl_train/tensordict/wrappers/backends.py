"""The public wrappers, which differ only in their engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from skyrl_train.config.choices import ENGINES
from skyrl_train.engines.base import InferenceEngine
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import load_causal_lm, load_config, load_tokenizer
from skyrl_train.tensordict.wrappers.base import SETTINGS, LLMWrapperBase
from skyrl_train.tensordict.wrappers.engine_view import EngineView
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.hf_module import ModuleScorer, check_shared, sharing_weights
from skyrl_train.tensordict.wrappers.inputs import EngineInput
from skyrl_train.tensordict.wrappers.parameters import Generation
from skyrl_train.weight_sync.protocol import dtype_of


@dataclass(eq=False)
class _Owned:
    """An engine that a wrapper made and shares with its versions; closed once."""

    engine: Any
    tokenizer: Any
    closing: Callable[[], None] | None = None
    """Releases the resources on which the engine runs."""
    shared: tuple[nn.Module, nn.Module] | None = None
    """The user's module and the engine's, which has the same weights."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The engine's keywords."""
    closed: bool = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            try:
                call(self.engine.close(), "closing an engine", 60.0)
            finally:
                if self.closing is not None:
                    self.closing()


class _MadeWrapper(LLMWrapperBase):
    """A wrapper over a given engine (or a worker or wrapper that has one), or over a new one for a model's path.

    Keywords that are not settings of a wrapper are passed to the new engine.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **options: Any):
        settings = {name: options.pop(name) for name in SETTINGS & set(options)}
        self_made = None
        engine = model.engine if isinstance(model, EngineView | LLMWrapperBase) else model
        if not hasattr(engine, "capabilities"):
            tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
            self_made = self._made(model, tokenizer, options)
            engine, tokenizer = self_made.engine, self_made.tokenizer
        elif options:
            raise TypeError(
                f"{type(self).__name__} has no settings {sorted(options)}; keywords of an engine are only "
                "allowed with a model's path."
            )
        if tokenizer is None and isinstance(model, EngineView) and settings.get("input_mode") != "tokens":
            tokenizer = model.tokenizer
        try:
            super().__init__(engine, tokenizer=tokenizer, **settings)
        except BaseException:
            if self_made is not None:
                self_made.close()
            raise
        self._owned, self._view = self_made, model if isinstance(model, EngineView) else getattr(model, "_view", None)
        if self._view is not None:
            self.model = self._view  # as in TorchRL, whose weight updaters ask the policy for it

    def _made(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> _Owned:
        if not isinstance(model, str):
            raise ConfigError(f"{type(self).__name__} takes a model's path or an engine, got {type(model).__name__}.")
        tokenizer = tokenizer or load_tokenizer(model)
        return _Owned(self._start(model, tokenizer, options), tokenizer)

    def _start(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> InferenceEngine:
        """Return a new engine. Not abstract, because a subclass may override `_made` instead."""
        raise NotImplementedError(f"{type(self).__name__} overrides neither _made nor _start. Override one of them.")

    def get_new_version(self, **changes: Any) -> Any:
        new = super().get_new_version(**changes)
        new._owned = new._owned or self._owned
        return new

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_owned": None}  # the copy calls the same engine, which remains the original's


class TransformersWrapper(_MadeWrapper):
    """A wrapper over transformers in this process, for a model's path or a Hugging Face model.

    The Hugging Face model is not modified and remains the caller's: other wrappers can share it, and it can be run and
    trained. It is the attribute `model`. With `generate`, an engine samples from the same weights in its own
    module. With `generate=False`, log-probs are those of the model in its current training mode; they have a gradient
    unless it is turned off (`torch.no_grad()`).
    """

    _reads_rectangles = True

    def __init__(self, model: Any, *, generate: bool = True, pad_model_input: bool | None = None, **options: Any):
        """Wrap a model.

        Args:
            model: A model's path or hub name, a Hugging Face model, an engine, or a wrapper or worker that has one.
            generate: True to sample, False to compute the log-probs of given sequences.
            pad_model_input: How a module reads rows: as one padded rectangle (True) or each in a separate forward
                (False). The default is a rectangle where a gradient is needed. Engines read rows without padding.
            options: Settings of LLMWrapperBase. With a path also `device`, `dtype`, `rope_scaling` and `rope_theta`;
                other keywords are passed to the engine.

        Raises:
            ConfigError: If loading options are given for a model that is already loaded, or a setting is wrong.
        """
        if isinstance(model, str):
            options["tokenizer"] = options.get("tokenizer") or load_tokenizer(model)
            loading = {name: options.pop(name) for name in _OF_LOADING & set(options)}
            if isinstance(dtype := loading.pop("dtype", "float32"), str):
                dtype = dtype_of(dtype)
            model = load_causal_lm(model, dtype=dtype, device=options.get("device") or "cpu", key="model", **loading)
        wrapped = isinstance(model, LLMWrapperBase)
        if isinstance(model, nn.Module) and not wrapped and (given := sorted(_OF_LOADING & set(options))):
            raise ConfigError(
                f"{given} only apply when a model is loaded from a path. Leave them out for a loaded model."
            )
        module = model.model if wrapped else model
        if wrapped and isinstance(model.engine, ModuleScorer):
            model = module  # its engine cannot sample
        if isinstance(module, nn.Module) and model is module and not generate:
            model = ModuleScorer(module)
        super().__init__(model, generate=generate, pad_model_input=pad_model_input, **options)
        if isinstance(module, nn.Module):
            self.model = module  # makes its parameters this module's

    def _made(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> _Owned:
        from skyrl_train.engines.transformers.engine import TransformersEngine

        if not isinstance(model, nn.Module):
            raise ConfigError(f"TransformersWrapper takes a model, its path or an engine, got {type(model).__name__}.")
        own = sharing_weights(model)
        device = next(model.parameters()).device
        engine = TransformersEngine(own, tokenizer, device=device, **options)
        return _Owned(engine, tokenizer, None, (model, own), options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Describe a copy, which makes an engine of its own over its copy of the model."""
        if self._owned is None or self._owned.shared is None:
            return super().__reduce_ex__(protocol)
        settings = {**self._given, **self._owned.options, "tokenizer": self.tokenizer}
        return partial(type(self), **settings), (self.model,)

    def _answer(self, rows: Sequence[EngineInput], generation: Generation) -> list[Any]:
        if isinstance(self._engine, ModuleScorer):
            padded = torch.is_grad_enabled() if self.pad_model_input is None else self.pad_model_input
            return self._engine.log_probs([row.ids for row in rows], generation.sampling.temperature or 1.0, padded)
        if self._owned is not None and self._owned.shared is not None:
            check_shared(*self._owned.shared)
        return super()._answer(rows, generation)

    def _logits(self, rows: list[list[int]]) -> Tensor:
        if not isinstance(self.model, nn.Module):
            return super()._logits(rows)
        return ModuleScorer(self.model).logits(rows, self.pad_model_input is not False)


class vLLMWrapper(_MadeWrapper):
    """A wrapper over vLLM, for a model's path, an AsyncVLLM, a worker or a `vllm.LLM`.

    A path starts an engine in this process; other keywords are those of VLLMEngine and vLLM's EngineArgs.
    """

    def _made(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> _Owned:
        if not any(kind.__name__ == "LLM" and kind.__module__.startswith("vllm.") for kind in type(model).__mro__):
            return super()._made(model, tokenizer, options)
        if options:
            raise TypeError(f"vLLMWrapper has no settings {sorted(options)}; the vllm.LLM has been made without them.")
        from skyrl_train.engines.vllm.llm import LLMEngine

        return _Owned(LLMEngine(model), model.get_tokenizer() if tokenizer is None else tokenizer)

    def _start(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> InferenceEngine:
        from skyrl_train.engines.vllm.engine import VLLMEngine

        return VLLMEngine(model, **options)


class SGLangWrapper(_MadeWrapper):
    """A wrapper over SGLang in this process; other keywords are those of SGLangEngine and SGLang's ServerArgs.

    `model` may also be the http(s) URL of an SGLang server; the keywords are then those of AsyncSGLang.connect.
    """

    def _made(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> _Owned:
        if not (isinstance(model, str) and model.startswith(("http://", "https://"))):
            return super()._made(model, tokenizer, options)
        from skyrl_train.tensordict.wrappers.sglang_server import AsyncSGLang

        server = AsyncSGLang.connect(model, **options)
        return _Owned(server.engine, tokenizer or server.tokenizer, server.close)

    def _start(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> InferenceEngine:
        from skyrl_train.engines.sglang.engine import SGLangEngine

        return SGLangEngine(model, tokenizer, **options)


class RemoteWrapper(_MadeWrapper):
    """A wrapper over an engine behind `skyrl-train serve`: `model` is the server's URL, `token` its API key."""

    def _made(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> _Owned:
        if not isinstance(model, str):
            raise ConfigError(f"RemoteWrapper takes a URL or an engine, got {type(model).__name__}.")
        from skyrl_train.engines.http.remote import RemoteEngine

        token, deadline_s = options.pop("token", ""), options.pop("connect_timeout", 60.0)

        async def connected() -> InferenceEngine:
            return await RemoteEngine(model, token, **options).connect(deadline_s)

        return _Owned(call(connected(), f"connecting to {model}", deadline_s + 5.0), tokenizer)


class RemoteTransformersWrapper(_MadeWrapper):
    """A TransformersWrapper whose engine runs in a separate Ray actor; Ray is started if necessary.

    Keys, settings and properties belong to this object: only prompts and answers are sent.
    """

    def __init__(
        self,
        model: Any,
        max_concurrency: int = 16,
        validate_model: bool = True,
        actor_name: str | None = None,
        num_gpus: float | None = None,
        num_cpus: float = 1,
        **options: Any,
    ):
        """Start the actor; return once its model is loaded.

        Args:
            model: Path or hub name.
            max_concurrency: Maximum number of sequences sampled at the same time.
            validate_model: Check that the model's configuration can be read before starting an actor.
            actor_name: Name of the actor in messages.
            num_gpus: None for an accelerator if Ray has any, 0 for a CPU. 1 changes nothing.
            num_cpus: Number of threads on a CPU.
            options: Settings of LLMWrapperBase; other keywords are passed to TransformersEngine.

        Raises:
            ConfigError: For wrong values, an unreadable model, or if Ray lacks the resources.
        """
        if not isinstance(model, LLMWrapperBase):  # a version of a wrapper already has its actor
            options |= {"max_concurrency": max_concurrency, "validate_model": validate_model}
            options |= {"actor_name": actor_name, "num_gpus": num_gpus, "num_cpus": num_cpus}
        super().__init__(model, **options)

    def _made(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> _Owned:
        concurrency, validate = options.pop("max_concurrency"), options.pop("validate_model")
        name, gpus, cpus = options.pop("actor_name"), options.pop("num_gpus"), options.pop("num_cpus")
        if not isinstance(model, str):
            raise ConfigError(f"RemoteTransformersWrapper takes a model's path or name, got {type(model).__name__}.")
        if type(concurrency) is not int or concurrency < 1 or gpus not in (None, 0, 1) or not cpus > 0:
            raise ConfigError(
                f"max_concurrency={concurrency}, num_gpus={gpus}, num_cpus={cpus}: max_concurrency must be an "
                "integer of at least 1, num_gpus one of [0, 1, None], and num_cpus above 0."
            )
        if validate:
            load_config(model, key="model")
        tokenizer = tokenizer or load_tokenizer(model)
        wanted = {"model": model, "max_num_seqs": concurrency, "threads": max(1, int(cpus)), **options}
        if gpus == 0:
            wanted.setdefault("device", "cpu")
        from skyrl_train.tensordict.wrappers.ray_engine import engine_in_actor

        engine, closing = engine_in_actor(
            ENGINES["transformers"], wanted, name=name or f"transformers of {model}", start_ray=True
        )
        return _Owned(engine, tokenizer, closing)


_OF_LOADING = frozenset({"dtype", "rope_scaling", "rope_theta"})
