"""The public wrappers. Each only chooses an engine."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from skyrl_train.engines.base import InferenceEngine
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.policies.loop import call
from skyrl_train.policies.module import ModuleScorer
from skyrl_train.policies.wrapper import SETTINGS, LLMWrapperBase


class _Owned:
    """An engine that wrappers made, shared by the versions of one; closed once."""

    def __init__(self, engine: Any, tokenizer: Any):
        self.engine, self.tokenizer = engine, tokenizer
        self.closed = False

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            call(self.engine.close(), "closing an engine", 60.0)


class _MadeWrapper(LLMWrapperBase):
    """A wrapper over an engine that is given, or made of a model's path.

    Keywords that are no settings of a wrapper go to the engine that is made.
    """

    def __init__(self, model: Any, *, tokenizer: Any = None, **options: Any):
        settings = {name: value for name, value in options.items() if name in SETTINGS}
        rest = {name: value for name, value in options.items() if name not in SETTINGS}
        self_made = model if isinstance(model, _Owned) else None
        if self_made is None and not _is_engine(model):
            if isinstance(tokenizer, str):
                tokenizer = load_tokenizer(tokenizer)
            self_made = self._made(model, tokenizer, rest)
        elif rest:
            raise TypeError(
                f"{type(self).__name__} has no settings {sorted(rest)}, and makes no engine to give them to."
            )
        engine = model if self_made is None else self_made.engine
        if tokenizer is None and self_made is not None:
            tokenizer = self_made.tokenizer
        super().__init__(engine, tokenizer=tokenizer, **settings)
        self._owned = self_made

    def _made(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> _Owned:
        if not isinstance(model, str):
            raise ConfigError(f"{type(self).__name__} takes a model's path or an engine, got {type(model).__name__}.")
        tokenizer = tokenizer or load_tokenizer(model)
        return _Owned(self._start(model, tokenizer, options), tokenizer)

    def _start(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> InferenceEngine:
        raise NotImplementedError

    def _model_of_versions(self) -> Any:
        return self.model if self._owned is None else self._owned

    def close(self) -> None:
        if self._owned is not None:
            self._owned.close()


class TransformersWrapper(_MadeWrapper):
    """The engine in this process. Also takes a Hugging Face model.

    With `generate` the engine owns the model, and nobody else may run it. With `generate=False` it stays yours to
    train: log-probs are those of its weights at the time, and `get_dist` has a gradient.
    """

    def __init__(self, model: Any, *, generate: bool = True, **options: Any):
        if isinstance(model, nn.Module) and not generate:
            model = ModuleScorer(model)
        super().__init__(model, generate=generate, **options)
        if isinstance(model, ModuleScorer):
            self.network = model.module  # its parameters are this module's

    def _made(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> _Owned:
        if isinstance(model, nn.Module):
            return _Owned(self._start(model, tokenizer, options), tokenizer)
        return super()._made(model, tokenizer, options)

    def _logits(self, rows: list[list[int]]) -> Tensor:
        if not isinstance(self.model, ModuleScorer):
            return super()._logits(rows)
        return self.model.logits(rows)

    def _start(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> InferenceEngine:
        from skyrl_train.engines.transformers.engine import TransformersEngine

        return TransformersEngine(model, tokenizer, **options)


class vLLMWrapper(_MadeWrapper):
    """vLLM in this process; keywords beyond the settings are those of VLLMEngine and vLLM's EngineArgs."""

    def _start(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> InferenceEngine:
        from skyrl_train.engines.vllm.engine import VLLMEngine

        return VLLMEngine(model, **options)


class SGLangWrapper(_MadeWrapper):
    """SGLang in this process; keywords beyond the settings are those of SGLangEngine and SGLang's ServerArgs."""

    def _start(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> InferenceEngine:
        from skyrl_train.engines.sglang.engine import SGLangEngine

        return SGLangEngine(model, tokenizer, **options)


class RemoteWrapper(_MadeWrapper):
    """An engine behind our server (`skyrl-train serve`): `model` is its URL, `token` its key."""

    def _made(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> _Owned:
        if not isinstance(model, str):
            raise ConfigError(f"RemoteWrapper takes a URL or an engine, got {type(model).__name__}.")
        return _Owned(self._start(model, tokenizer, options), tokenizer)

    def _start(self, model: Any, tokenizer: Any, options: dict[str, Any]) -> InferenceEngine:
        from skyrl_train.engines.http.remote import RemoteEngine

        token, deadline_s = options.pop("token", ""), options.pop("connect_timeout", 60.0)

        async def connected() -> InferenceEngine:
            return await RemoteEngine(model, token, **options).connect(deadline_s)

        return call(connected(), f"connecting to {model}", deadline_s + 5.0)


def _is_engine(model: Any) -> bool:
    return hasattr(model, "capabilities") and hasattr(model, "score")
