"""The base class of wrappers: a language model on any engine as a tensordict module."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any
from weakref import ref

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase

from skyrl_train.data.chat import is_control_token
from skyrl_train.engines.base import InferenceEngine
from skyrl_train.engines.sampling_params import check_supported, with_stop_token
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.models.stop_tokens import get_eos_tokens
from skyrl_train.tensordict.history import pad_id
from skyrl_train.tensordict.ragged import rows_of
from skyrl_train.tensordict.wrappers.dispatcher import Dispatcher
from skyrl_train.tensordict.wrappers.distributions import LLMMaskedCategorical
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.inputs import MODES, EngineInput, Reader
from skyrl_train.tensordict.wrappers.outputs import Answer, Layout, generated, scored
from skyrl_train.tensordict.wrappers.parameters import Generation, common_names, overridden, read_generate_kwargs
from skyrl_train.tensordict.wrappers.requests import numbered, sample_requests


class _Setting:
    """A read-only setting, as the caller gave it. Parts of the wrapper were built from it and would not change."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, wrapper: LLMWrapperBase, owner: type) -> Any:
        if wrapper is None:
            return self
        value = wrapper._given[self.name]
        return MappingProxyType(value) if isinstance(value, dict) else value

    def __set__(self, wrapper: LLMWrapperBase, value: Any) -> None:
        raise AttributeError(f"{self.name} cannot be changed after construction. Use get_new_version({self.name}=...).")


class LLMWrapperBase(TensorDictModuleBase):
    """A tensordict module that continues prompts or, with `generate=False`, computes log-probs of whole sequences.

    `model` is an engine (skyrl_train.engines), or a value from which a subclass makes one. It reads `(mode, "prompt")`
    or `(mode, "full")`, and writes the containers `text`, `tokens`, `masks`, `log_probs` and `history`, each under its
    key. A bare key (`history`, `text`, `tokens` without a container) is read too. The output has the input's batch
    size; `num_samples` adds a dimension for the samples.

    - generate_kwargs: see tensordict/wrappers/parameters.py; log-probs are at its temperature, before truncation.
    - pad_output: tensors instead of ragged rows, see tensordict/containers.py.
    - layout: torch.jagged gives nested tensors [B, ragged] if rows are not padded (one batch dimension).
    - inplace: True writes into the input, False returns a new tensordict of the outputs, "empty" one made by
      `input.empty()`; the default is True, or False with num_samples.
    - prefer_tokens: in history mode, continue `(tokens, "prompt")`, else `(tokens, "full")`, if there is one.
    - batching, min_batch_size, max_batch_size, batching_timeout: answer calls of several threads in shared batches.
    - timeout: seconds for a call, after which it raises DeadlineExceeded.
    - return_text, return_tokens, return_masks, return_history, return_log_probs: False leaves a container out.

    Raises ConfigError (a ValueError) for wrong settings or missing inputs, TypeError for inputs of other types.
    """

    _reads_rectangles = False
    generate_kwargs, tokenizer_kwargs, prefer_tokens, attention_mask_key = (
        _Setting(),
        _Setting(),
        _Setting(),
        _Setting(),
    )
    return_text, return_tokens, return_masks, return_history = _Setting(), _Setting(), _Setting(), _Setting()
    min_batch_size, max_batch_size, batching_timeout = _Setting(), _Setting(), _Setting()

    def __init__(
        self,
        model: Any,
        *,
        tokenizer: Any = None,
        input_mode: str = "history",
        input_key: str | tuple[str, ...] | None = None,
        attention_mask_key: str | None = "attention_mask",
        generate: bool = True,
        generate_kwargs: Mapping[str, Any] | None = None,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        pad_output: bool = False,
        pad_model_input: bool | None = None,
        inplace: bool | str | None = None,
        device: torch.device | str | None = None,
        layout: torch.layout | None = None,
        num_samples: int | None = None,
        chat_template_name: str | None = None,
        chat_template: str | None = None,
        return_log_probs: bool | None = None,
        return_text: bool = True,
        return_tokens: bool = True,
        return_masks: bool = True,
        return_history: bool = True,
        history_key: str = "history",
        text_key: str = "text",
        tokens_key: str = "tokens",
        masks_key: str = "masks",
        log_probs_key: str = "log_probs",
        batching: bool | None = None,
        min_batch_size: int | None = None,
        max_batch_size: int | None = None,
        batching_timeout: float = 10.0,
        prefer_tokens: bool = False,
        timeout: float = 600.0,
    ):
        given = {name: value for name, value in locals().items() if name not in ("self", "__class__", "model")}
        super().__init__()
        given |= {"generate_kwargs": common_names(generate_kwargs), "tokenizer_kwargs": dict(tokenizer_kwargs or {})}
        self._given = given
        self._engine = self.model = model
        self.history_key, self.text_key, self.tokens_key = history_key, text_key, tokens_key
        self.masks_key, self.log_probs_key, self._device = masks_key, log_probs_key, device
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.input_mode, self.generate, self.pad_output, self.timeout = input_mode, generate, pad_output, timeout
        self.pad_model_input, self.layout = pad_model_input, layout
        self.chat_template, self.chat_template_name = chat_template, chat_template_name
        self.generation = read_generate_kwargs(generate_kwargs, num_samples)
        self.num_samples = self.generation.num_samples
        self.inplace = (self.num_samples is None) if inplace is None else inplace
        self._refuse(return_log_probs, batching, min_batch_size, max_batch_size)
        self.return_log_probs = not generate or return_log_probs is not False
        self._reader = self._make_reader(given)
        self._collector: Any = None
        self.in_keys = [self._reader.key]
        self.out_keys = self._written(given)
        self.batching = (min_batch_size, max_batch_size) != (None, None) if batching is None else batching
        self._dispatcher = (
            Dispatcher(self._answer, min_batch_size, max_batch_size, batching_timeout) if self.batching else None
        )

    # -- the engine -------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> InferenceEngine:
        """The engine that answers the calls."""
        return self._engine  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the engine if this wrapper, or the one of which it is a version, made it."""

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self, tensordict: TensorDictBase, *, tensordict_out: TensorDictBase | None = None, **generate_kwargs: Any
    ) -> TensorDictBase:
        """Sample continuations of the prompts in a tensordict, or compute log-probs of its sequences; blocks meanwhile.

        Args:
            tensordict: Input of any batch size.
            tensordict_out: Tensordict to write into, instead of the one that `inplace` chooses. None: `inplace`
                chooses.
            generate_kwargs: Override the wrapper's for this call.

        Returns:
            The tensordict with the output containers; with `num_samples`, its last batch dimension is the samples.

        Raises:
            ConfigError: For missing inputs, empty rows or unsupported parameters.
            TypeError: For inputs of another type.
            DeadlineExceeded: After `timeout` seconds.
        """
        rows = self._reader.read(rows_of(tensordict))
        generation = self._generation(generate_kwargs)
        if generation.seed is not None:  # here, because a batch also has rows of other calls
            copies = numbered([row.ids for row in rows])
            rows = [replace(row, copy=copy) for row, copy in zip(rows, copies, strict=True)]
        answers = (
            self._dispatcher.submit(rows, generation, self.timeout)
            if self._dispatcher is not None
            else self._answer(rows, generation)
        )
        containers = self._containers(rows, answers, generation, tuple(tensordict.batch_size))
        samples = () if generation.num_samples is None or not self.generate else (generation.num_samples,)
        return self._place(tensordict, tensordict_out, containers, samples)

    def fits(self, tensordict: TensorDictBase) -> list[bool]:
        """Return, per row, True if the model's context has room for another token, or its limit is unknown."""
        rows, limit = rows_of(tensordict), self.engine.capabilities.max_model_len
        return [not limit or len(row.ids) < limit for row in self._reader.read(rows)]

    def _generation(self, given: Mapping[str, Any]) -> Generation:
        if not given:
            return self.generation
        return read_generate_kwargs(overridden(self._given["generate_kwargs"], given), self._given["num_samples"])

    def _answer(self, rows: Sequence[EngineInput], generation: Generation) -> list[Any]:
        """The samples of each row or, when scoring, its log-probs: the only method that calls the engine."""
        what = f"engine {self.engine.capabilities.name!r}"
        if not self.generate:
            scoring = self.engine.score([row.ids for row in rows], generation.sampling.temperature or 1.0)
            return call(scoring, f"{what}.score", self.timeout)
        check_supported(generation.sampling, self.engine.capabilities)
        copies = [row.copy for row in rows]
        generation = replace(generation, sampling=with_stop_token(generation.sampling, self._reader.end_of_turn))
        requests = sample_requests([row.ids for row in rows], generation, self.engine.capabilities, copies)
        count = generation.num_samples or 1
        done = call(self.engine.generate(requests), f"{what}.generate", self.timeout)
        answers = [Answer(c.token_ids.tolist(), c.full_logprobs.tolist(), c.stop_reason == "stop") for c in done]
        return [answers[start : start + count] for start in range(0, len(answers), count)]

    def _containers(
        self, rows: list[EngineInput], answers: list[Any], generation: Generation, shape: tuple[int, ...]
    ) -> dict[str, Any]:
        padded, pad = self.pad_output, pad_id(self.tokenizer)
        skip, jagged = generation.skip_special_tokens, self.layout is torch.jagged
        if not self.generate:
            return scored(rows, answers, self.tokenizer, Layout(shape, padded, pad, True, skip, jagged=jagged))  # type: ignore[no-any-return]
        if generation.num_samples is not None:
            shape = (*shape, generation.num_samples)
            rows = [row for row in rows for _ in range(generation.num_samples)]
        layout = Layout(shape, padded, pad, self.return_log_probs, skip, jagged=jagged)
        flat = [answer for samples in answers for answer in samples]
        return generated(rows, flat, self.tokenizer, self._ends(flat), layout)  # type: ignore[no-any-return]

    def _ends(self, answers: Sequence[Answer]) -> frozenset[int]:
        """Ids that end a turn: the tokenizer's own, and control tokens at which an answer stopped."""
        last = {answer.ids[-1] for answer in answers if answer.ended and answer.ids}
        controls = {i for i in last if self.tokenizer is not None and is_control_token(self.tokenizer, i)}
        return get_eos_tokens(self.tokenizer) | controls

    def _place(
        self, given: TensorDictBase, out: TensorDictBase | None, containers: dict[str, Any], samples: tuple[int, ...]
    ) -> TensorDictBase:
        if out is None:
            if samples and self.inplace is not False:
                raise ConfigError(
                    f"num_samples adds a dimension to the output: inplace={self.inplace!r} must be False."
                )
            if self.inplace is True:
                out = given
            elif self.inplace == "empty":
                out = given.empty()
            else:
                out = TensorDict(batch_size=(*given.batch_size, *samples), device=given.device)
        names = {"text": self.text_key, "tokens": self.tokens_key, "masks": self.masks_key}
        names |= {"log_probs": self.log_probs_key, "history": self.history_key}
        for name, container in containers.items():
            if names[name] in self.out_keys:
                moved = container if self._device is None else container.to(self._device)
                out.set(names[name], moved)
        return out

    # -- distributions ---------------------------------------------------------------------------------------------

    def get_dist(self, tensordict: TensorDictBase, mask: torch.Tensor | str = "generic") -> LLMMaskedCategorical:
        """Return the token distributions of whole sequences [B], padded on the left; `mask` selects positions.

        Named masks have the same meaning as in the losses: "sft": the tokens after `(tokens, "prompt")`, or the
        assistant's tokens if no prompt is given; "rlhf": the assistant's, in all turns; "generic": all tokens. A
        sequence's first token, which was not sampled, never counts. A mask may also be a bool tensor [B, T] or
        [B, T, V].

        Raises NotImplementedError if there are no logits, ConfigError if "sft" or "rlhf" select no token of a row.
        """
        if self.generate:
            raise NotImplementedError("get_dist needs generate=False: use get_new_version(generate=False).")
        records = rows_of(tensordict)
        rows = self._reader.read(records)
        logits = self._logits([row.ids for row in rows]) / (self.generation.sampling.temperature or 1.0)
        if isinstance(mask, torch.Tensor):
            return LLMMaskedCategorical(logits, mask)
        if mask not in ("sft", "rlhf", "generic"):
            raise ConfigError(f"mask={mask!r} is not one of ['generic', 'rlhf', 'sft'] or a tensor.")
        length = logits.shape[1]
        counts = torch.zeros(len(rows), length, dtype=torch.bool)
        for place, (record, row) in enumerate(zip(records, rows, strict=True)):
            own = [True] * len(row.ids)
            if mask != "generic":
                own = row.assistant if mask == "rlhf" else self._reader.response(record, row)
                if not any(own[1:]):
                    raise ConfigError(
                        f"mask={mask!r} selects no token of row {place}, whose loss would silently be 0. Leave the row "
                        "out or choose another mask."
                    )
            counts[place, length - len(row.ids) + 1 :] = torch.tensor(own[1:])
        return LLMMaskedCategorical(logits, counts)

    def _get_sft_dist(self, tensordict: TensorDictBase) -> LLMMaskedCategorical:
        return self.get_dist(tensordict, "sft")

    def _get_rlhf_dist(self, tensordict: TensorDictBase) -> LLMMaskedCategorical:
        return self.get_dist(tensordict, "rlhf")

    def _get_generic_dist(self, tensordict: TensorDictBase) -> LLMMaskedCategorical:
        return self.get_dist(tensordict, "generic")

    # TorchRL's losses call them by these names.
    _get_dist_with_prompt_mask = _get_sft_dist
    _get_dist_with_assistant_mask = _get_rlhf_dist
    _get_dist_with_attention_mask = _get_generic_dist

    def _get_dist_with_custom_mask(self, tensordict: TensorDictBase, mask: torch.Tensor) -> LLMMaskedCategorical:
        return self.get_dist(tensordict, mask)

    def log_prob(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return the log-probs [B, T] (nats) of a batch's tokens, padded on the left with 0; raises like `get_dist`."""
        rows = self._reader.read(rows_of(tensordict))
        length = max(len(row.ids) for row in rows)
        ids = torch.tensor([[0] * (length - len(row.ids)) + row.ids for row in rows])
        return self.get_dist(tensordict).log_prob(ids)

    def _logits(self, rows: list[list[int]]) -> torch.Tensor:
        """[B, T, V], padded on the left, shifted right by one."""
        name = type(self).__name__
        raise NotImplementedError(f"{name} has no logits: use TransformersWrapper(module, generate=False).")

    # -- versions, batching ----------------------------------------------------------------------------------------

    def get_new_version(self, **changes: Any) -> LLMWrapperBase:
        """Return a wrapper over the same engine with some settings changed. This wrapper does not change.

        All other settings keep their values, with two exceptions: changing `generate` or `input_mode` resets
        `input_key`, and `generate=False` resets `return_log_probs`, to the default for the new mode, unless they are
        also given.

        Args:
            **changes: Settings of the constructor.

        Raises:
            TypeError: A setting is unknown.
            ConfigError: A value is invalid, or the values do not fit together.
        """
        known = set(self._given)
        if unknown := set(changes) - known:
            raise TypeError(f"{type(self).__name__} has no settings {sorted(unknown)}; known: {sorted(known)}.")
        given = dict(self._given)
        if {"generate", "input_mode"} & set(changes):
            given["input_key"] = None
            if changes.get("generate") is False:  # the new version only gives log-probs
                given["return_log_probs"] = None
        return type(self)(self._model_of_versions(), **{**given, "tokenizer": self.tokenizer, **changes})

    def _model_of_versions(self) -> Any:
        return self._engine

    def cleanup_batching(self, flush: bool = False) -> None:
        """Empty the queue of calls that wait for a batch, which accepts new calls afterwards.

        Does nothing without batching.

        Args:
            flush: True runs the waiting calls now without waiting for more items, and blocks until they are answered,
                for at most 60 seconds. False cancels them: their callers get `concurrent.futures.CancelledError`.
        """
        if self._dispatcher is not None:
            self._dispatcher.cleanup(flush)

    def get_batching_state(self) -> dict[str, Any]:
        """Return the state of batching under TorchRL's names (`Dispatcher.state`); only `batching_enabled` if off."""
        if self._dispatcher is None:
            return {"batching_enabled": False}
        return {"batching_enabled": True, **self._dispatcher.state()}

    def register_collector(self, collector: Any) -> None:
        """Set `self.collector`, held only weakly; `collector` may itself be a weakref.ref."""
        self._collector = collector if isinstance(collector, ref) else ref(collector)

    @property
    def collector(self) -> Any:
        """The registered collector, or None if there is none or it no longer exists."""
        return self._collector() if self._collector is not None else None

    @property
    def log_prob_keys(self) -> list[tuple[str, str]]:
        """Keys of the log-probs in the output: of the responses, and of the full sequences."""
        return [(self.log_probs_key, "response"), (self.log_probs_key, "full")]

    # -- settings ---------------------------------------------------------------------------------------------------

    def _refuse(
        self, log_probs: bool | None, batching: bool | None, min_size: int | None, max_size: int | None
    ) -> None:
        if self.input_mode not in MODES:
            raise ConfigError(f"input_mode={self.input_mode!r} is not one of {list(MODES)}.")
        if self.inplace not in (True, False, "empty"):
            raise ConfigError(f"inplace={self.inplace!r} is not True, False or 'empty'.")
        if self.num_samples is not None and self.inplace is not False:
            raise ConfigError(f"num_samples={self.num_samples} needs inplace=False, got {self.inplace!r}.")
        if not self.generate and log_probs is False:
            raise ConfigError("return_log_probs=False with generate=False leaves no output. Set one of them to True.")
        if batching is False and (min_size is not None or max_size is not None):
            raise ConfigError(
                f"batching=False contradicts min_batch_size={min_size}, max_batch_size={max_size}. Leave them out."
            )
        if self.tokenizer is None and self.input_mode != "tokens":
            raise ConfigError(f"input_mode={self.input_mode!r} needs a tokenizer: pass tokenizer=.")
        if self.pad_model_input is not None and (self.generate or not self._reads_rectangles):
            where = "TransformersWrapper(module, generate=False)"
            raise ConfigError(f"pad_model_input={self.pad_model_input} only applies to {where}. Leave it out.")
        if self.layout not in (None, torch.strided, torch.jagged) or (self.layout is torch.jagged and self.pad_output):
            raise ConfigError(f"layout={self.layout}: give torch.strided, or torch.jagged without pad_output.")
        if not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout}: give seconds above 0.")

    def _written(self, given: dict[str, Any]) -> list[str]:
        """Keys of the containers in the output."""
        outputs = [
            (self.text_key, given["return_text"] and self.tokenizer is not None),
            (self.masks_key, given["return_masks"]),
            (self.tokens_key, given["return_tokens"]),
            (self.log_probs_key, self.return_log_probs),
            (self.history_key, given["return_history"] and self.input_mode == "history"),
        ]
        return [key for key, wanted in outputs if wanted]

    def _make_reader(self, given: dict[str, Any]) -> Reader:
        key = given["input_key"]
        if key is None:
            container = {"history": self.history_key, "text": self.text_key, "tokens": self.tokens_key}[self.input_mode]
            key = (container, "prompt" if self.generate else "full")
        return Reader(
            self.input_mode,
            (key,) if isinstance(key, str) else tuple(key),
            self.tokenizer,
            self.masks_key,
            given["attention_mask_key"],
            self.tokens_key,
            given["chat_template"],
            given["chat_template_name"],
            given["tokenizer_kwargs"],
            given["prefer_tokens"],
            whole=not self.generate,
        )


SETTINGS = frozenset(inspect.signature(LLMWrapperBase.__init__).parameters) - {"self", "model"}
"""Names of the settings that every wrapper takes; other keywords are passed to the engine that it makes."""
