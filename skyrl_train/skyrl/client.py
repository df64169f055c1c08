"""SkyRL's inference engine client, an adapter over the run's `EngineClient`."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from numpy.typing import ArrayLike

from skyrl_train.config.schema import Config
from skyrl_train.data.chat import decode_response, get_reasoning_opening, render_prompt
from skyrl_train.data.control_tokens import find_end_of_turn_token
from skyrl_train.data.messages import continues_last_message
from skyrl_train.engines.base import Completion, InferenceEngine, SampleRequest, SamplingParams, parse_token_ids
from skyrl_train.engines.client import EngineClient
from skyrl_train.engines.http.chat_sampler import ChatSampler, Generate as GenerateFunction
from skyrl_train.engines.http.dialects import chat_completions
from skyrl_train.engines.http.json_body import InvalidBodyError, check_unknown_members, read_json, write_json
from skyrl_train.engines.http.openai import Translator
from skyrl_train.engines.http.protocol import Limits
from skyrl_train.engines.sampling_params import parse_sampling_params, request_seed, with_stop_token
from skyrl_train.errors import ConfigError, DataError, UnsupportedParameter
from skyrl_train.skyrl.interface import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.skyrl.seed_scope import current_seed_scope
from skyrl_train.skyrl.unsupported import CLIENT_REPLACEMENTS, raise_unsupported_attribute

_NO_EFFECT = frozenset({"skip_special_tokens", "include_stop_str_in_output", "no_stop_trim", "detokenize", "logprobs"})
"""vLLM's and SGLang's parameters that change only decoding, or request values that are always returned."""
_OTHER_NAMES = {"min_new_tokens": "min_tokens", "max_completion_tokens": "max_tokens"}


class InferenceEngineClient:
    """The client that SkyRL's generators call. The run itself puts engines to sleep, wakes them and syncs weights.

    The seed of a request follows from the run's seed, the call of the generator's `generate` (its step, or its prompt
    with fully asynchronous rollouts), the session, and the index of the request in the session. The same calls
    therefore give the same tokens. Methods of SkyRL's client that have no counterpart raise AttributeError with advice.
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
    def engines(self) -> list[InferenceEngine]:
        """The engines that are alive."""
        return self._client.engines

    async def generate(self, input_batch: InferenceEngineInput) -> InferenceEngineOutput:
        """Sample one completion for each prompt and return them in the order of the prompts.

        `responses` are the texts that environments grade. They keep reasoning markers that are special tokens, and
        begin with the reasoning marker that the prompt opened, if any. `response_ids` are only the sampled tokens.

        Args:
            input_batch: Either `prompts` (messages) or `prompt_token_ids`. `sampling_params` override the configured
                ones, `session_ids` keep the requests of an episode on one engine.

        Raises:
            ValueError: There are neither prompts nor token ids, or both.
            ConfigError: A sampling parameter is not valid.
            EngineError: No engine could answer.
        """
        prompts, token_ids = input_batch.get("prompts"), input_batch.get("prompt_token_ids")
        if (prompts is None) == (token_ids is None):
            raise ValueError("input_batch: must have either `prompts` or `prompt_token_ids`, and not both.")
        if token_ids is None:
            options = dict(self._config.generator.chat_template_kwargs)
            token_ids = [render_prompt(self.tokenizer, messages, options) for messages in prompts or ()]
        sampling = self._sampling(input_batch.get("sampling_params"))
        sessions = input_batch.get("session_ids") or [None] * len(token_ids)
        requests = [self._request(ids, sampling, session) for ids, session in zip(token_ids, sessions, strict=True)]
        completions = await self._client.generate(requests)
        continued = [continues_last_message(messages) for messages in prompts] if prompts else [False] * len(token_ids)
        openings = [
            "" if continues else get_reasoning_opening(self.tokenizer, list(ids))
            for continues, ids in zip(continued, token_ids, strict=True)
        ]
        return InferenceEngineOutput(
            responses=[
                opening + decode_response(self.tokenizer, completion.token_ids)
                for opening, completion in zip(openings, completions, strict=True)
            ],
            response_ids=[completion.token_ids.tolist() for completion in completions],
            stop_reasons=[completion.stop_reason for completion in completions],
            response_logprobs=[completion.full_logprobs.tolist() for completion in completions],
        )

    def _sampling(self, overrides: Mapping[str, Any] | None) -> SamplingParams:
        """Return the parameters of a request, or the configured ones; both also stop at the end-of-turn token."""
        end = find_end_of_turn_token(self.tokenizer, self._config.generator.chat_template_kwargs)
        if overrides is None:
            return with_stop_token(parse_sampling_params(self._config.generator.sampling_params), end)
        named = {_OTHER_NAMES.get(name, name): value for name, value in overrides.items() if name not in _NO_EFFECT}
        lengths = {"max_tokens", "max_generate_length", "max_new_tokens"}
        if not any(named.get(name) for name in lengths):
            named["max_tokens"] = self._config.generator.sampling_params.max_generate_length
        return with_stop_token(parse_sampling_params(named), end)

    def _request(self, token_ids: ArrayLike, sampling: SamplingParams, session: Any) -> SampleRequest:
        scope, name = current_seed_scope(), "" if session is None else str(session)
        index = scope.next_request_index(name)
        request_id = f"skyrl.{scope.name}.{name}.{index}"
        return SampleRequest(
            request_id=request_id,
            token_ids=parse_token_ids(f"request {request_id!r}", token_ids),
            sampling=sampling,
            seed=request_seed(self._config.trainer.seed, f"{scope.name} {name}", index, 0, 0),
            session=name and f"skyrl.{scope.name}.{name}",
            deadline_s=self._config.trainer.timeouts.rollout_s,
        )

    async def chat_completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one of OpenAI's chat completion requests.

        Args:
            request_payload: {"json": BODY, "headers": {...}}. Headers are ignored. A `session_id` in the body keeps the
                requests of an episode on one engine. Streaming is not supported.

        Returns:
            OpenAI's response, or {"error": {...}} with code 400 if the body is not valid.

        Raises:
            EngineError: No engine could answer.
        """
        return await self._respond(request_payload, self._complete_chat)

    async def completion(self, request_payload: Mapping[str, Any]) -> dict[str, Any]:
        """Answer one of OpenAI's text completion requests.

        Args:
            request_payload: {"json": BODY, "headers": {...}}, as in `chat_completion`. Streaming is not supported.

        Returns:
            OpenAI's response, or {"error": {...}} with code 400 if the body is not valid.

        Raises:
            EngineError: No engine could answer.
        """
        return await self._respond(request_payload, self._complete_text)

    async def _respond(
        self, payload: Mapping[str, Any], complete: Callable[[Any, GenerateFunction], Awaitable[Any]]
    ) -> dict[str, Any]:
        body = dict(payload.get("json") or {})
        session = body.pop("session_id", None)
        if body.get("stream"):
            return _error("stream=true: streaming is not supported here. Remove `stream` from the body.", "stream")
        body.setdefault("model", self.model_name)

        async def generate(requests: Sequence[SampleRequest]) -> list[Completion]:
            if body.get("seed") is None:
                requests = [self._with_seed(request, session) for request in requests]
            return await self._client.generate(requests)

        try:
            response: dict[str, Any] = json.loads(write_json(await complete(body, generate)))
            return response
        except InvalidBodyError as error:
            return _error(str(error), error.param)
        except (ConfigError, DataError, UnsupportedParameter) as error:
            return _error(str(error), None)

    def _with_seed(self, request: SampleRequest, session: str | None) -> SampleRequest:
        """Return a request with the seed of its position in the session."""
        seeded = self._request(request.token_ids, request.sampling, session)
        return replace(seeded, top_logprobs=request.top_logprobs, json_schema=request.json_schema)

    async def _complete_chat(self, body: Any, generate: GenerateFunction) -> Any:
        parsed = read_json(json.dumps(body).encode(), keep_nulls=True)
        check_unknown_members(chat_completions.ChatCompletionRequest, parsed)
        call = chat_completions.parse(parsed)
        generator = self._config.generator
        sampler = ChatSampler(
            self.tokenizer,
            generate,
            limits=Limits(),
            defaults=SamplingParams(max_tokens=generator.sampling_params.max_generate_length),
            deadline_s=self._config.trainer.timeouts.rollout_s,
            chat_template_kwargs=dict(generator.chat_template_kwargs),
        )
        return call.respond(await sampler.sample(call.request))

    async def _complete_text(self, body: Any, generate: GenerateFunction) -> Any:
        translator = Translator(
            self.tokenizer,
            limits=Limits(),
            default_max_tokens=self._config.generator.sampling_params.max_generate_length,
            deadline_s=self._config.trainer.timeouts.rollout_s,
        )
        call = translator.text(read_json(json.dumps(body).encode()), None)
        return translator.to_response(call, await generate(call.requests))

    async def reset_prefix_cache(self) -> None:
        """Clear the prefix caches of all engines."""
        await self._client.reset_prefix_cache()

    def __getattr__(self, name: str) -> NoReturn:
        raise_unsupported_attribute(type(self).__name__, CLIENT_REPLACEMENTS, name)


def _error(message: str, param: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "Bad Request", "param": param, "code": 400}}
