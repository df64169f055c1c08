"""SkyRL's client of the inference engines, in front of the run's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from numpy.typing import ArrayLike

from skyrl_train.config.schema import Config
from skyrl_train.data.chat import decode_response, get_reasoning_opening, render_prompt
from skyrl_train.data.control_tokens import find_end_of_turn_token
from skyrl_train.data.messages import continues_last_message
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams, parse_token_ids
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.json_body import InvalidBodyError, read_json
from skyrl_train.engines.http.openai import Translator
from skyrl_train.engines.http.protocol import Limits
from skyrl_train.engines.sampling_params import parse_sampling_params, request_seed, with_stop_token
from skyrl_train.errors import ConfigError, DataError, UnsupportedParameter
from skyrl_train.skyrl.interface import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.skyrl.seed_scope import current_seed_scope
from skyrl_train.skyrl.unsupported import CLIENT_REPLACEMENTS, raise_unsupported_attribute

_NO_EFFECT = frozenset({"skip_special_tokens", "include_stop_str_in_output", "no_stop_trim", "detokenize", "logprobs"})
"""Parameters of vLLM's and SGLang's that say how to decode, or to return what always is returned."""
_OTHER_NAMES = {"min_new_tokens": "min_tokens", "max_completion_tokens": "max_tokens"}


class InferenceEngineClient:
    """What generators call. Its engines sleep, wake and get weights by themselves.

    Seeds follow from the run's seed, from the call of `generate` that asks (its step, or its prompt where rollouts run
    ahead), the session, and the number of the request in it: the same calls give the same tokens.
    """

    def __init__(self, client: EngineClient, tokenizer: Any, config: Config):
        self._client = client
        self._config = config
        self.tokenizer = tokenizer
        self.model_name = config.generator.served_model_name or config.trainer.policy.model.path
        self.backend = config.generator.backend
        self.enable_http_endpoint = config.generator.enable_http_endpoint
        self.http_endpoint_host = config.generator.http_endpoint_host
        self.http_endpoint_port = config.generator.http_endpoint_port

    @property
    def engines(self) -> list[Any]:
        """The engines that are alive."""
        return self._client.engines

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Return one completion of each prompt.

        `responses` are what environments grade: they keep the markers of reasoning that are special tokens, and begin
        with the marker of reasoning that the prompt opened. `response_ids` are only what was sampled.

        Raises:
            ValueError: There are neither prompts nor token ids, or both.
        """
        prompts, token_ids = input_batch.get("prompts"), input_batch.get("prompt_token_ids")
        if (prompts is None) == (token_ids is None):
            raise ValueError("Give either `prompts` or `prompt_token_ids`, but not both.")
        if token_ids is None:
            options = dict(self._config.generator.chat_template_kwargs)
            token_ids = [render_prompt(self.tokenizer, messages, options) for messages in prompts or ()]
        sampling = self._sampling(input_batch.get("sampling_params"))
        sessions = input_batch.get("session_ids") or [None] * len(token_ids)
        requests = [self._request(ids, sampling, session) for ids, session in zip(token_ids, sessions, strict=True)]
        completions = await self._client.generate(requests)
        continued = [continues_last_message(messages) for messages in prompts] if prompts else [False] * len(token_ids)
        openings = [
            "" if goes_on else get_reasoning_opening(self.tokenizer, list(ids))
            for goes_on, ids in zip(continued, token_ids, strict=True)
        ]
        answered = list(zip(openings, completions, strict=True))
        return InferenceEngineOutput(
            responses=[start + decode_response(self.tokenizer, one.token_ids) for start, one in answered],
            response_ids=[one.token_ids.tolist() for one in completions],
            stop_reasons=[one.stop_reason for one in completions],
            response_logprobs=[one.full_logprobs.tolist() for one in completions],
        )

    def _sampling(self, given: Mapping[str, Any] | None) -> SamplingParams:
        """Return `given`, or the configured parameters; both also end at the end-of-turn token."""
        end = find_end_of_turn_token(self.tokenizer, self._config.generator.chat_template_kwargs)
        if given is None:
            return with_stop_token(parse_sampling_params(self._config.generator.sampling_params), end)
        named = {_OTHER_NAMES.get(name, name): value for name, value in given.items() if name not in _NO_EFFECT}
        lengths = {"max_tokens", "max_generate_length", "max_new_tokens"}
        if not any(named.get(name) for name in lengths):
            named["max_tokens"] = self._config.generator.sampling_params.max_generate_length
        return with_stop_token(parse_sampling_params(named), end)

    def _request(self, token_ids: ArrayLike, sampling: SamplingParams, session: Any) -> SampleRequest:
        where, name = current_seed_scope(), "" if session is None else str(session)
        number = where.next_request_index(name)
        id = f"skyrl.{where.name}.{name}.{number}"
        return SampleRequest(
            request_id=id,
            token_ids=parse_token_ids(f"request {id!r}", token_ids),
            sampling=sampling,
            seed=request_seed(self._config.trainer.seed, f"{where.name} {name}", number, 0, 0),
            session=name and f"skyrl.{where.name}.{name}",
            deadline_s=self._config.trainer.timeouts.rollout_s,
        )

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """OpenAI's chat completion: {"json": BODY, "headers": {}} -> its answer, or {"error": {...}}.

        A `session_id` in the body keeps the requests of an episode on one engine. Raises EngineError.
        """
        return await self._openai("chat", request_payload)

    async def completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """OpenAI's text completion, in the same way."""
        return await self._openai("text", request_payload)

    async def _openai(self, kind: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        generator = self._config.generator
        translator = Translator(
            self.tokenizer,
            limits=Limits(),
            default_max_tokens=generator.sampling_params.max_generate_length,
            deadline_s=self._config.trainer.timeouts.rollout_s,
            chat_template_kwargs=dict(generator.chat_template_kwargs),
        )
        body = dict(payload.get("json") or {})
        session = body.pop("session_id", None)
        if body.get("stream"):
            return _error("stream: an answer in this process comes whole; leave it out.", "stream")
        body.setdefault("model", self.model_name)
        try:
            call = getattr(translator, kind)(read_json(json.dumps(body).encode()), None)
            requests = [
                self._request(one.token_ids, one.sampling, session) if body.get("seed") is None else one
                for one in call.requests
            ]
            completions: list[Completion] = await self._client.generate(requests)
            return translator.to_response(call, completions)
        except InvalidBodyError as error:
            return _error(str(error), error.param)
        except (ConfigError, DataError, UnsupportedParameter) as error:
            return _error(str(error), None)

    async def reset_prefix_cache(self) -> None:
        """Forget cached prompts."""
        await self._client.reset_prefix_cache()

    def __getattr__(self, name: str) -> NoReturn:
        raise_unsupported_attribute(type(self).__name__, CLIENT_REPLACEMENTS, name)


def _error(message: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Bad Request", "param": param, "code": 400}}
