"""The base class of wrappers: a language model on any engine as a tensordict module."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partialmethod
from itertools import islice
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.modules.llm import LLMWrapperBase as TorchRLWrapperBase

from skyrl_train.data.chat import is_control_token
from skyrl_train.engines.base import InferenceEngine
from skyrl_train.engines.sampling_params import check_supported, with_stop_token
from skyrl_train.errors import ConfigError
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.models.stop_tokens import get_eos_tokens
from skyrl_train.tensordict.history import pad_id
from skyrl_train.tensordict.ragged import Key, column, rows_of
from skyrl_train.tensordict.wrappers.dispatcher import Dispatcher
from skyrl_train.tensordict.wrappers.distributions import LLMMaskedCategorical
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.inputs import MODES, EngineInput, Reader, lookup
from skyrl_train.tensordict.wrappers.outputs import Answer, Layout, generated, in_layout_of, scored, stacked_logits
from skyrl_train.tensordict.wrappers.parameters import Generation, common_names, overridden, read_generate_kwargs
from skyrl_train.tensordict.wrappers.requests import numbered, sample_requests

_CONTAINERS = ("text", "masks", "tokens", "log_probs", "history")

log = logging.getLogger(__name__)


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


class LLMWrapperBase(TorchRLWrapperBase):  # type: ignore[misc]
    """A TorchRL wrapper over an engine of this project: a tensordict module that continues prompts or, with
    `generate=False`, computes log-probs of whole sequences.

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
    _dispatcher: Dispatcher | None = None
    input_mode, generate, generate_kwargs, tokenizer_kwargs, chat_template = (_Setting() for _ in range(5))
    history_key, text_key, tokens_key, masks_key, log_probs_key = (_Setting() for _ in range(5))
    attention_mask_key, chat_template_name, prefer_tokens = (_Setting() for _ in range(3))
    return_text, return_tokens, return_masks, return_history = (_Setting() for _ in range(4))
    min_batch_size, max_batch_size, batching_timeout = (_Setting() for _ in range(3))
    dist_params_keys: ClassVar = ["logits"]

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
        given = {name: value for name, value in locals().items() if name in SETTINGS}
        super().__init__()
        given |= {"generate_kwargs": common_names(generate_kwargs), "tokenizer_kwargs": dict(tokenizer_kwargs or {})}
        self._given = given
        self.model: Any = model.engine if isinstance(model, LLMWrapperBase) else model
        self._engine = self.model
        self.device = None if device is None else torch.device(device)
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer
        self.pad_output, self.pad_model_input, self.timeout = pad_output, pad_model_input, timeout
        self.layout = torch.strided if layout is None and not pad_output else layout
        self.generation = read_generate_kwargs(generate_kwargs, num_samples)
        self.num_samples = self.generation.num_samples
        self.inplace = (self.num_samples is None) if inplace is None else inplace
        self.return_log_probs = return_log_probs is not False
        self._refuse()
        self._reader = self._make_reader(input_mode, input_key)
        self.in_keys = [self._reader.key]
        missing = {"text": self.tokenizer is None, "history": input_mode != "history"}
        written = [name for name in _CONTAINERS if given[f"return_{name}"] is not False and not missing.get(name)]
        self.out_keys = [given[f"{name}_key"] for name in written]
        self.log_prob_keys = [(log_probs_key, "response"), (log_probs_key, "full")]
        if (min_batch_size, max_batch_size) != (None, None) if batching is None else batching:
            self._dispatcher = Dispatcher(self._answer_batch, min_batch_size, max_batch_size, batching_timeout)

    # -- the engine -------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> InferenceEngine:
        """The engine that answers the calls."""
        return self._engine  # type: ignore[no-any-return]

    def close(self) -> None:
        """Close the engine if this wrapper, or the one of which it is a version, made it."""

    # -- forward ----------------------------------------------------------------------------------------------------

    def forward(
        self,
        tensordict: TensorDictBase,
        *,
        tensordict_out: TensorDictBase | None = None,
        logits_only: bool = False,
        **generate_kwargs: Any,
    ) -> TensorDictBase:
        """Sample continuations of the prompts in a tensordict, or compute log-probs of its sequences; blocks meanwhile.

        A prompt that leaves the model no room gets an empty response, with a warning; a ChatEnv then ends its row.

        Args:
            tensordict: Input of any batch size.
            tensordict_out: Tensordict to write into, instead of the one that `inplace` chooses.
            logits_only: True writes "logits" instead of log-probs, [B, T, V] or ragged rows; [b, t] predicts token t.
                Needs generate=False and a module.
            generate_kwargs: Override the wrapper's for this call.

        Raises:
            ConfigError: For missing inputs, empty rows or unsupported parameters.
            TypeError: For inputs of another type.
            DeadlineExceeded: After `timeout` seconds.
            NotImplementedError: For `logits_only` without logits.
        """
        rows = self._reader.read(rows_of(tensordict))
        generation = self.generation
        if generate_kwargs:
            own = overridden(self._given["generate_kwargs"], generate_kwargs)
            generation = read_generate_kwargs(own, self._given["num_samples"])
        count = generation.num_samples if self.generate and not logits_only else None
        layout = Layout(
            tuple(tensordict.batch_size) + (() if count is None else (count,)),
            self.pad_output,
            pad_id(self.tokenizer),
            self.return_log_probs,
            generation.skip_special_tokens,
            self.layout is torch.jagged,
        )
        if not logits_only:
            return self._place(tensordict, tensordict_out, self._containers(rows, generation, layout), layout.shape)
        containers = scored(rows, None, self.tokenizer, layout)
        containers["logits"] = stacked_logits(self._scaled_logits(rows), [len(row.ids) for row in rows], layout)
        return self._place(tensordict, tensordict_out, containers, layout.shape)

    def _answer(self, rows: Sequence[EngineInput], generation: Generation) -> list[Any]:
        """The samples of each row or, when scoring, its log-probs: the only method that calls the engine."""
        what = f"engine {self.engine.capabilities.name!r}"
        if not self.generate:
            scoring = self.engine.score([row.ids for row in rows], generation.sampling.temperature or 1.0)
            return call(scoring, f"{what}.score", self.timeout)
        check_supported(generation.sampling, self.engine.capabilities)
        limit, count = self.engine.capabilities.max_model_len, generation.num_samples or 1
        fitting = [row for row in rows if not limit or len(row.ids) < limit]
        if surplus := len(rows) - len(fitting):
            log.warning("%d prompts leave no room in max_model_len=%d: their responses are empty", surplus, limit)
        copies = [row.copy for row in fitting]
        generation = replace(generation, sampling=with_stop_token(generation.sampling, self._reader.end_of_turn))
        requests = sample_requests([row.ids for row in fitting], generation, self.engine.capabilities, copies)
        done = call(self.engine.generate(requests), f"{what}.generate", self.timeout) if requests else []
        answers = iter([Answer(c.token_ids.tolist(), c.full_logprobs.tolist(), c.stop_reason == "stop") for c in done])
        empty = [Answer([], [], ended=False)] * count
        return [list(islice(answers, count)) if not limit or len(row.ids) < limit else empty for row in rows]

    def _answer_batch(self, rows: Sequence[EngineInput], key: tuple[Generation, bool]) -> list[Any]:
        """Answer rows of several threads, which all have computed gradients, or none."""
        generation, gradients = key
        with torch.set_grad_enabled(gradients):
            return self._answer(rows, generation)

    def _containers(self, rows: list[EngineInput], generation: Generation, layout: Layout) -> dict[str, Any]:
        if generation.seed is not None:  # here, because a batch also has rows of other calls
            copies = numbered([row.ids for row in rows])
            rows = [replace(row, copy=copy) for row, copy in zip(rows, copies, strict=True)]
        if self._dispatcher is None:
            answers = self._answer(rows, generation)
        else:
            answers = self._dispatcher.submit(rows, (generation, torch.is_grad_enabled()), self.timeout)
        if not self.generate:
            return scored(rows, answers, self.tokenizer, layout)
        rows = [row for row, samples in zip(rows, answers, strict=True) for _ in samples]
        flat = [answer for samples in answers for answer in samples]
        # The tokenizer's own ids end a turn, and so do control tokens at which an answer stopped.
        last = {answer.ids[-1] for answer in flat if answer.ended and answer.ids}
        controls = {i for i in last if self.tokenizer is not None and is_control_token(self.tokenizer, i)}
        return generated(rows, flat, self.tokenizer, get_eos_tokens(self.tokenizer) | controls, layout)

    def _place(
        self, given: TensorDictBase, out: TensorDictBase | None, containers: dict[str, Any], shape: tuple[int, ...]
    ) -> TensorDictBase:
        if out is None:
            if self.inplace is not False and shape != given.batch_size:
                raise ConfigError(
                    f"num_samples adds a dimension to the output: inplace={self.inplace!r} must be False."
                )
            if self.inplace is False:
                out = TensorDict(batch_size=shape, device=given.device)
            else:
                out = given if self.inplace is True else given.empty()
        for name, container in containers.items():
            key = self._given.get(f"{name}_key", name)
            if name == "logits" or key in self.out_keys:
                out.set(key, container if self.device is None else container.to(self.device))
        return out

    # -- distributions ---------------------------------------------------------------------------------------------

    def get_dist(
        self, tensordict: TensorDictBase, mask: torch.Tensor | str = "generic", *, mask_key: Key | None = None
    ) -> LLMMaskedCategorical:
        """Return the token distributions of whole sequences [B, T]; `mask` selects the positions that count.

        The positions are those of `(tokens, "full")` in the batch: a rectangle with a mask stays as it is, other rows
        are padded on the left. Tokens that a policy sampled are scored in all input modes, if the batch has them.

        Args:
            tensordict: The sequences [B].
            mask: "sft": the tokens after `(tokens, "prompt")`, or the assistant's tokens if no prompt is given. "rlhf":
                the assistant's, in all turns. "generic": all tokens. A sequence's first token, which was not sampled,
                never counts. A tensor [B, T] or [B, T, V] selects positions or tokens.
            mask_key: Key of a mask [B, T] in the batch, instead of `mask`.

        Raises:
            NotImplementedError: There are no logits.
            ConfigError: The mask is unknown, or a sequence does not begin with its prompt.
        """
        if self.generate:
            raise NotImplementedError("get_dist needs generate=False: use get_new_version(generate=False).")
        records = rows_of(tensordict)
        reader = self._reader_of_sampled(records)
        rows = reader.read(records)
        logits = self._scaled_logits(rows)
        if mask_key is not None:
            mask = tensordict.get(mask_key, as_padded_tensor=True, padding_side="left", padding_value=False)
        if isinstance(mask, torch.Tensor):
            placed, _ = in_layout_of(self._attention(tensordict, rows), logits, None)
            return LLMMaskedCategorical(placed if placed.shape[1] == mask.shape[1] else logits, mask)
        if mask not in ("sft", "rlhf", "generic"):
            raise ConfigError(f"mask={mask!r} is not one of ['generic', 'rlhf', 'sft'] or a tensor.")
        length = logits.shape[1]
        counts = torch.zeros(len(rows), length, dtype=torch.bool, device=logits.device)
        for place, (record, row) in enumerate(zip(records, rows, strict=True)):
            own = [True] * len(row.ids)
            if mask != "generic":
                own = row.assistant if mask == "rlhf" else reader.response(record, row.ids, row.assistant)
            counts[place, length - len(row.ids) + 1 :] = torch.tensor(own[1:])
        return LLMMaskedCategorical(*in_layout_of(self._attention(tensordict, rows), logits, counts))

    def _reader_of_sampled(self, records: Sequence[TensorDictBase]) -> Reader:
        """The reader of the tokens that the policy sampled, if all rows have them, else the wrapper's own."""
        keys = ((self.tokens_key, "full"), (self.masks_key, "all_assistant_mask"))
        if all(isinstance(lookup(row, key, bare=False), torch.Tensor) for row in records for key in keys):
            return self._make_reader("tokens", keys[0])
        return self._reader

    def _attention(self, tensordict: TensorDictBase, rows: Sequence[EngineInput]) -> list[torch.Tensor] | None:
        """The attention masks of the batch's tokens, or None if it has none of these rows."""
        for key in ((self.masks_key, "all_attention_mask"), self.attention_mask_key):
            found = None if key is None else column(tensordict, key)
            if found is not None and [int(one.sum()) for one in found] == [len(row.ids) for row in rows]:
                return [one.bool() for one in found]
        return None

    # TorchRL's losses call them by these names.
    _get_dist_with_prompt_mask = partialmethod(get_dist, mask="sft")
    _get_dist_with_assistant_mask = partialmethod(get_dist, mask="rlhf")
    _get_dist_with_attention_mask = partialmethod(get_dist, mask="generic")
    _get_dist_with_custom_mask = get_dist

    def log_prob(self, tensordict: TensorDictBase) -> torch.Tensor:
        """Return the log-probs [B, T] (nats) of a batch's tokens, in the layout of `get_dist`; raises like it."""
        rows = self._reader_of_sampled(records := rows_of(tensordict)).read(records)
        length = max(len(row.ids) for row in rows)
        ids = torch.tensor([[0] * (length - len(row.ids)) + row.ids for row in rows])
        ids = in_layout_of(self._attention(tensordict, rows), ids, None)[0]
        return self.get_dist(tensordict).log_prob(ids)

    @property
    def dist_sample_keys(self) -> list[tuple[str, str]]:
        """Key of the sampled tokens."""
        return [(self.tokens_key, "response")]

    def _scaled_logits(self, rows: Sequence[EngineInput]) -> torch.Tensor:
        return self._logits([row.ids for row in rows]) / (self.generation.sampling.temperature or 1.0)

    def _logits(self, rows: list[list[int]]) -> torch.Tensor:
        """[B, T, V], padded on the left, shifted right by one."""
        name = type(self).__name__.removesuffix("Wrapper")
        raise NotImplementedError(
            f"{name} does not return logits. Use TransformersWrapper(module, generate=False) for distributions."
        )

    # -- versions, batching ----------------------------------------------------------------------------------------

    def get_new_version(self, **changes: Any) -> LLMWrapperBase:
        """Return a wrapper over the same engine with some settings of the constructor changed.

        Changing `generate` or `input_mode` resets `input_key`, and `generate=False` resets `return_log_probs`, to the
        default for the new mode, unless they are also given.

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
        return type(self)(self, **{**given, "tokenizer": self.tokenizer, **changes})

    @property
    def batching(self) -> bool:
        """True if calls of several threads share batches."""
        return self._dispatcher is not None

    def cleanup_batching(self, flush: bool = False) -> None:
        """Empty the queue of calls that wait for a batch; new ones are accepted. Does nothing without batching.

        Args:
            flush: True answers the waiting calls without waiting for more, blocking for at most 60 seconds. False
                raises `concurrent.futures.CancelledError` in their callers.
        """
        if self._dispatcher is not None:
            self._dispatcher.cleanup(flush)

    def get_batching_state(self) -> dict[str, Any]:
        """Return the state of batching under TorchRL's names (`Dispatcher.state`); only `batching_enabled` if off."""
        if self._dispatcher is None:
            return {"batching_enabled": False}
        return {"batching_enabled": True, **self._dispatcher.state()}

    # -- settings ---------------------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        sizes = self.min_batch_size, self.max_batch_size
        if self.input_mode not in MODES:
            raise ConfigError(f"input_mode must be one of {list(MODES)}, got {self.input_mode!r}.")
        if self.inplace not in (True, False, "empty"):
            raise ConfigError(f"inplace={self.inplace!r} is not True, False or 'empty'.")
        if self.num_samples is not None and self.inplace is not False:
            raise ConfigError(f"num_samples={self.num_samples} needs inplace=False, got {self.inplace!r}.")
        if not self.generate and not self.return_log_probs:
            raise ConfigError("return_log_probs must be True with generate=False, which computes nothing else.")
        if self._given["batching"] is False and sizes != (None, None):
            raise ConfigError(
                f"batching=False contradicts min_batch_size={sizes[0]}, max_batch_size={sizes[1]}. Leave them out."
            )
        scores_histories = self.input_mode == "history" and not self.generate  # a loss reads only their tokens
        if self.tokenizer is None and self.input_mode != "tokens" and not scores_histories:
            raise ConfigError(f"input_mode={self.input_mode!r} needs a tokenizer: pass tokenizer=.")
        if self.pad_model_input is not None and (self.generate or not self._reads_rectangles):
            where = "TransformersWrapper(module, generate=False)"
            raise ConfigError(f"pad_model_input={self.pad_model_input} only applies to {where}. Leave it out.")
        if self.layout not in (None, torch.strided, torch.jagged) or (self.layout is torch.jagged and self.pad_output):
            raise ConfigError(f"layout={self.layout}: give torch.strided, or torch.jagged without pad_output.")
        if not self.timeout > 0:
            raise ConfigError(f"timeout={self.timeout}: give seconds above 0.")

    def _make_reader(self, mode: str, key: str | tuple[str, ...] | None) -> Reader:
        key = key or (self._given[f"{mode}_key"], "prompt" if self.generate else "full")
        key = (key,) if isinstance(key, str) else tuple(key)
        return Reader(mode, key, self.tokenizer, self._given, whole=not self.generate)


SETTINGS = frozenset(inspect.signature(LLMWrapperBase.__init__).parameters) - {"self", "model"}
"""Names of the settings that every wrapper takes; other keywords are passed to the engine that it makes."""
