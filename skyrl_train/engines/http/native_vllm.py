"""vLLM's own server: `VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server`. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skyrl_train.data.arrays import Tokens, plain_ids, token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.http.native_server import NativeServer, Sampled
from skyrl_train.engines.sampling import SLEEPING
from skyrl_train.errors import EngineError, WeightSyncError

_DEV_MODE = "this route needs a server that was started with VLLM_SERVER_DEV_MODE=1 in its environment."
_EXTENSION = "skyrl_train.engines.vllm.worker.WorkerExtension"
_NOT_EXTENDED = ("no attribute 'reload_folder'", "'reload_folder' is not implemented")
"""Errors of a server without the extension: with VLLM_ENABLE_V1_MULTIPROCESSING on, and off."""
_CALIBRATION = (1, 2, 3)
"""Arbitrary tokens."""
_HOT = 2.0
"""A temperature at which log-probs clearly differ from those at 1; servers accept none above."""


class VLLMServer(NativeServer):
    """vLLM's server. Its routes for pausing, weights and aborts exist only in development mode, and need no token."""

    seeds = True
    _extended = True
    """Whether its workers have our extension; the first `load` finds out."""

    async def start(self, deadline_s: float) -> None:
        self.kind = "vLLM"
        self.kind = await self.connection.until_there(self._version, deadline_s)
        (model, *_) = (await self.ask("GET", "/v1/models"))["data"]
        self._served_name: str = model["id"]
        self.max_model_len = model["max_model_len"]
        if (await self.ask("GET", "/is_paused", hints={404: _DEV_MODE}))["is_paused"]:
            await self.ask("POST", "/wake_up")
        self.sampling, self.refusals = self.SAMPLING, {}
        if not await self._scales_logprobs():
            self.sampling -= {"temperature"}
            self.refusals = {
                "temperature": f"this server of {self.kind} tells log-probs at temperature 1 whatever it samples at; "
                "start it with --logprobs-mode processed_logprobs."
            }

    async def _version(self) -> str | None:
        status, raw = await self.connection.once("GET", "/version")
        if status != 200 or b'"version"' not in raw:
            raise self.refusal(status, "/version", raw, {status: "it is no vLLM server; see generator.backend."})
        ready, _ = await self.connection.once("GET", "/health")
        return f"vLLM {(await self.ask('GET', '/version'))['version']}" if ready == 200 else None

    async def _scales_logprobs(self) -> bool:
        """Whether the log-probs of sampled tokens are those at the sampling temperature."""
        hot = SampleRequest("", token_array(_CALIBRATION), SamplingParams(max_tokens=1, temperature=_HOT), 0)
        sampled = await self.sample("", hot)
        (at_one,) = (await self.score((*_CALIBRATION, *sampled.token_ids)))[-1:]
        return abs(sampled.logprobs[0] - at_one) > 1e-3

    async def sample(self, rid: str, request: SampleRequest) -> Sampled:
        sampling = request.sampling
        choice, usage = await self._complete(
            rid,
            request.token_ids,
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop=list(sampling.stop),
            stop_token_ids=list(sampling.stop_token_ids),
            ignore_eos=sampling.ignore_eos,
            seed=request.seed % 2**63,
            logprobs=0,
        )
        if choice["finish_reason"] not in ("stop", "length", "abort"):
            raise EngineError(
                f"Engine {self.connection.name!r}: {self.kind} ended a request: {choice['finish_reason']}."
            )
        return Sampled(
            token_ids=choice["token_ids"],
            logprobs=[-9999.0 if one is None else one for one in (choice["logprobs"] or {}).get("token_logprobs", [])],
            stop_reason=choice["finish_reason"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        if len(token_ids) < 2:
            return []
        choice, _ = await self._complete("", token_ids, max_tokens=1, temperature=0.0, prompt_logprobs=0)
        rows = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
        return [row[str(token)]["logprob"] for token, row in rows]

    async def _complete(self, rid: str, token_ids: Sequence[int] | Tokens, **options: Any) -> tuple[Any, Any]:
        """The only choice, and the usage. It sends every parameter for which a generation config may have a default."""
        body = {
            "model": self._served_name,
            "prompt": plain_ids(token_ids),
            "return_token_ids": True,
            "skip_special_tokens": False,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            **({"request_id": rid} if rid else {}),
            **options,
        }
        answer = await self.ask("POST", "/v1/completions", body, once=bool(rid))
        return answer["choices"][0], answer["usage"]

    async def abort(self, rids: Sequence[str]) -> None:
        ids = [f"cmpl-{rid}-0" for rid in rids]
        await self.ask("POST", "/abort_requests", {"request_ids": ids}, hints={404: _DEV_MODE})

    async def load(self, folder: str) -> None:
        try:
            if self._extended:
                try:
                    await self._call_workers("reload_folder", args=[folder])
                    return
                except EngineError as error:
                    if not any(text in str(error) for text in _NOT_EXTENDED):
                        raise
                    self._extended = False
            await self._call_workers("reload_weights", kwargs={"weights_path": folder})
        except EngineError as error:
            raise WeightSyncError(f"{error} (the weights are in {folder}: can the server read that?)") from error

    async def _call_workers(self, method: str, **options: Any) -> None:
        await self.ask("POST", "/collective_rpc", {"method": method, **options}, hints={404: _DEV_MODE})

    async def reset_prefix_cache(self) -> None:
        for _ in range(50):  # blocks of aborted requests are freed one step later
            if (await self.ask("POST", "/reset_prefix_cache", hints={404: _DEV_MODE}))["success"]:
                return
        raise EngineError(f"Engine {self.connection.name!r}: {self.kind} does not reset its prefix cache.")

    async def sleep(self, level: int) -> frozenset[str]:
        await self.ask("POST", "/sleep", params={"level": str(level)}, hints={404: _DEV_MODE})
        return SLEEPING  # at level 1 the weights move to the host

    async def wake_up(self, tags: Sequence[str]) -> None:
        await self.ask("POST", "/wake_up?" + "&".join(f"tags={tag}" for tag in tags), hints={404: _DEV_MODE})

    async def check(self) -> None:
        await self.ask("GET", "/health", deadline_s=30.0)
