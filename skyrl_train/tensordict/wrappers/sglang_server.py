"""SGLang with the interface of TorchRL's AsyncSGLang: an engine started here, or a server that runs elsewhere."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torchrl.modules.llm.backends import RLSGLangEngine

from skyrl_train.config.choices import ENGINES
from skyrl_train.engines.base import Completion, InferenceEngine, SampleRequest
from skyrl_train.engines.http.connection import Connection
from skyrl_train.engines.http.native import NativeEngine
from skyrl_train.engines.http.native_servers import SGLangServer
from skyrl_train.errors import ConfigError, DeadlineExceeded, EngineError
from skyrl_train.listeners import API_KEY_ENV
from skyrl_train.models.loading import load_tokenizer
from skyrl_train.registry import load_object
from skyrl_train.tensordict.wrappers.engine_view import EngineView
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.tensordict.wrappers.parameters import read_generate_kwargs


class AsyncSGLang(EngineView, RLSGLangEngine):  # type: ignore[misc]
    """An SGLang engine, started here from `model_path` (`close` ends it) or running at `server_url`.

    All prompts of a call are sampled concurrently, and calls may come from several threads.
    """

    def __init__(
        self,
        server_url: str | None = None,
        model_path: str | None = None,
        tp_size: int = 1,
        dp_size: int = 1,
        timeout: float = 300.0,
        *,
        tokenizer: Any = None,
        dtype: str | None = None,
        token: str | None = None,
        connect_timeout: float = 30.0,
        weight_folder: str | None = None,
        **server_kwargs: Any,
    ):
        """Start an engine, or connect to a server.

        Args:
            server_url: URL of a running server.
            model_path: Model to start; with `server_url`, the server's model, if it has another path here.
            tp_size: Number of accelerators of an engine that is started here.
            dp_size: Only 1.
            timeout: Seconds for a call.
            tokenizer: A tokenizer or its path; the model's by default.
            dtype: Data type of the weights; float32 on a CPU, else bfloat16.
            token: The server's --api-key; by default the environment variable SKYRL_API_KEY.
            connect_timeout: Seconds to wait for the server.
            weight_folder: A folder for weight updates that the server can read too; a temporary one by default.
            server_kwargs: Arguments of SGLangEngine.

        Raises:
            ConfigError: For wrong or missing arguments.
            ConnectionError: If no SGLang server answers within `connect_timeout`.
        """
        if dp_size != 1:
            raise ConfigError(f"dp_size={dp_size}: an AsyncSGLang is a single replica. Make {dp_size} of them.")
        on_cpu = not torch.cuda.is_available()
        self.server_url = server_url
        dtype = dtype or ("float32" if on_cpu else "bfloat16")
        device = server_kwargs.pop("device", "cpu" if on_cpu else "cuda")
        closing = None
        if server_url is not None:
            if server_kwargs or tp_size != 1:
                given = sorted(server_kwargs) or ["tp_size"]
                raise ConfigError(f"{given} cannot be changed on a running server (server_url). Leave them out.")
            key = os.environ.get(API_KEY_ENV, "") if token is None else token
            with ExitStack() as stack:
                if weight_folder is None:
                    weight_folder = tempfile.mkdtemp(prefix="skyrl-sglang-")
                    stack.callback(shutil.rmtree, weight_folder, ignore_errors=True)
                engine, model_path = _reach(server_url, key, model_path, dtype, device, weight_folder, connect_timeout)
                closing = stack.pop_all().close
        elif model_path is not None:
            tokenizer = load_tokenizer(tokenizer or model_path) if isinstance(tokenizer or "", str) else tokenizer
            server_kwargs |= {"dtype": dtype, "device": device, "tensor_parallel_size": tp_size}
            engine = load_object(ENGINES["sglang"])(model_path, tokenizer, **server_kwargs)
        else:
            raise ConfigError("AsyncSGLang needs server_url (a running server) or model_path (a model to start).")
        super().__init__(engine, model_path, dtype=dtype, timeout=timeout, closing=closing, tokenizer=tokenizer)

    @classmethod
    def connect(cls, server_url: str, **options: Any) -> AsyncSGLang:
        """Connect to a running server. Raises ConnectionError if no SGLang server answers there."""
        return cls(server_url, **options)

    @classmethod
    def from_pretrained(cls, model_name: str, tp_size: int = 1, dp_size: int = 1, **options: Any) -> AsyncSGLang:
        """Start SGLang on this machine; see the constructor."""
        return cls(model_path=model_name, tp_size=tp_size, dp_size=dp_size, **options)

    def generate(
        self,
        prompts: str | Sequence[str] | None = None,
        sampling_params: Mapping[str, Any] | None = None,
        *,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | Tensor | Sequence[Tensor] | None = None,
        return_logprobs: bool = False,
        return_text: bool = True,
        timeout: float | None = None,
        **more_sampling_params: Any,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Sample answers, and block until all have ended.

        Args:
            prompts: One or several texts. Give either these or `input_ids`.
            sampling_params: Parameters of sampling, as in tensordict/wrappers/parameters.py; None for the defaults.
            input_ids: Token ids of one or several prompts.
            return_logprobs: True to return log-probs.
            return_text: False leaves out "text".
            timeout: Seconds for all answers; None for the default.
            more_sampling_params: Further parameters of sampling, which take precedence.

        Returns:
            A dict for a single prompt; a list of dicts for a list of prompts or `n` samples, with the samples of a
            prompt next to each other. A dict has "text", "output_ids" and "meta_info": finish_reason, prompt_tokens,
            completion_tokens and, with `return_logprobs`, output_token_logprobs: (nats, id, None) for each token,
            before truncation.

        Raises:
            ConfigError: Not exactly one of `prompts` and `input_ids` is given, or a prompt is empty.
            DeadlineExceeded: The answers took longer than `timeout`.
        """
        if (prompts is None) == (input_ids is None):
            raise ConfigError("Must provide either prompts or input_ids. Cannot provide both.")
        rows, one = _rows(prompts if input_ids is None else input_ids)
        given = {"skip_special_tokens": True, **(sampling_params or {}), **more_sampling_params}
        generation = read_generate_kwargs(given, None)
        requests, done, texts = self._sample([self._ids(row) for row in rows], generation, timeout, self.engine)
        answers = [_answer(*each, return_logprobs, return_text) for each in zip(requests, done, texts, strict=True)]
        return answers[0] if one and generation.num_samples is None else answers

    def generate_batch(
        self, prompts: Sequence[str], sampling_params: Mapping[str, Any] | None = None, **options: Any
    ) -> list[dict[str, Any]]:
        """Sample answers to a list of texts; see `generate`."""
        return self.generate(list(prompts), sampling_params, **options)  # type: ignore[return-value]

    def flush_cache(self) -> bool:
        """Clear the prefix cache and return True."""
        self.reset_prefix_cache()
        return True

    def get_dp_size(self) -> int:
        """Return 1: an AsyncSGLang is one replica."""
        return 1


def _rows(given: Any) -> tuple[list[Any], bool]:
    """The prompts, texts or ids, and whether there was a single one outside a list."""
    if isinstance(given, str):
        return [given], True
    rows = given.tolist() if isinstance(given, Tensor) else list(given)
    single = bool(rows) and all(isinstance(one, int) for one in rows)
    return ([rows], True) if single else (rows, False)


def _answer(request: SampleRequest, done: Completion, text: str, logprobs: bool, with_text: bool) -> dict[str, Any]:
    matched = {} if done.stop_text is None else {"matched": done.stop_text}
    meta: dict[str, Any] = {
        "id": request.request_id,
        "finish_reason": {"type": done.stop_reason, **matched},
        "prompt_tokens": len(request.token_ids),
        "completion_tokens": len(done.token_ids),
        "weight_version": str(done.versions[-1].version) if done.versions else None,
    }
    ids = done.token_ids.tolist()
    if logprobs:
        pairs = zip(done.full_logprobs.tolist(), ids, strict=True)
        meta["output_token_logprobs"] = [(nats, i, None) for nats, i in pairs]
    answer = {"output_ids": ids, "meta_info": meta}
    return {"text": text, **answer} if with_text else answer


def _reach(
    url: str, token: str, model: str | None, dtype: str, device: str, folder: str, deadline_s: float
) -> tuple[InferenceEngine, str]:
    """An engine over a server, and the path of its model."""

    async def connected() -> tuple[InferenceEngine, str]:
        path = model if model is not None else await _served(Connection(url, token, name=url), deadline_s)
        server = SGLangServer(Connection(url, token, name=url), 600.0)
        engine = NativeEngine(server, model=path, dtype=dtype, device=device, folder=folder)
        return await engine.connect(deadline_s), path

    try:
        return call(connected(), f"connecting to {url}", 2 * deadline_s + 60.0)
    except (DeadlineExceeded, EngineError) as error:
        raise ConnectionError(
            f"No SGLang server answers at {url}: {str(error).rstrip('.')}. Start one there, or correct server_url."
        ) from error


async def _served(connection: Connection, deadline_s: float) -> str:
    """The path of a server's model."""

    async def asked() -> tuple[int, bytes] | None:
        status, raw = await connection.request("GET", "/server_info")
        return None if status == 503 else (status, raw)

    await connection.open()
    try:
        status, raw = await connection.wait_until_ready(asked, deadline_s)
    finally:
        await connection.close()
    try:
        path = json.loads(raw)["model_path"] if status == 200 else None
    except (ValueError, KeyError, TypeError):
        path = None
    if not isinstance(path, str):
        raise EngineError(
            f"/server_info returned HTTP status {status} without a model_path, so this is not an SGLang server."
        )
    return path
