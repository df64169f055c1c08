"""SGLang's own server: `python -m sglang.launch_server`. Imports no SGLang."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from skyrl_train.data.arrays import Tokens, plain_ids
from skyrl_train.engines.base import SampleRequest
from skyrl_train.engines.http.native_server import NativeServer, Sampled
from skyrl_train.engines.sampling import SLEEPING
from skyrl_train.errors import EngineError, WeightSyncError

_ANOTHER = "it is no SGLang server; see generator.backend."


class SGLangServer(NativeServer):
    """SGLang's server. Its log-probs are temperature-scaled, without truncation. It does not support seeds."""

    seeds = False

    async def start(self, deadline_s: float) -> None:
        self.kind = "SGLang"
        info = await self.connection.until_there(self._info, deadline_s)
        self.kind = f"SGLang {info['version']}"
        self.max_model_len = info["max_req_input_len"]
        self._frees_memory = bool(info.get("enable_memory_saver"))
        self.sampling = self.SAMPLING
        self.refusals = {"seed": f"{self.kind} samples every batch from one stream of random numbers."}

    async def _info(self) -> Any:
        status, raw = await self.connection.once("GET", "/server_info")
        if status == 503:  # starting
            return None
        if status != 200:
            raise self.refusal(status, "/server_info", raw, {status: _ANOTHER})
        info = await self.ask("GET", "/server_info")
        if not isinstance(info, dict) or not {"version", "max_req_input_len"} <= info.keys():
            raise EngineError(f"Engine {self.connection.name!r} at {self.connection.url}: {_ANOTHER}")
        ready, _ = await self.connection.once("GET", "/ready")
        return info if ready == 200 else None

    async def sample(self, rid: str, request: SampleRequest) -> Sampled:
        sampling = request.sampling
        answer = await self._generate(
            rid,
            request.token_ids,
            {
                "max_new_tokens": sampling.max_tokens,
                "temperature": sampling.temperature,
                "stop": list(sampling.stop),
                "stop_token_ids": list(sampling.stop_token_ids),
                "ignore_eos": sampling.ignore_eos,
            },
            logprob_start_len=-1,
        )
        meta = answer["meta_info"]
        return Sampled(
            token_ids=list(answer["output_ids"]),
            logprobs=[-9999.0 if one is None else one for one, *_ in meta.get("output_token_logprobs") or ()],
            stop_reason=meta["finish_reason"]["type"],
            cached_tokens=meta.get("cached_tokens") or 0,
        )

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        answer = await self._generate("", token_ids, {"max_new_tokens": 0, "temperature": 0.0}, logprob_start_len=0)
        logprobs = [logprob for logprob, *_ in answer["meta_info"]["input_token_logprobs"][1:]]
        return [math.nan if one is None else one for one in logprobs]

    async def _generate(self, rid: str, token_ids: Sequence[int] | Tokens, sampling: Any, **options: Any) -> Any:
        """Sends every parameter for which a model's generation config may have a default."""
        off = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "skip_special_tokens": False}
        body = {"input_ids": plain_ids(token_ids), "sampling_params": off | sampling, "return_logprob": True, **options}
        if rid:
            body["rid"] = rid
        return await self.ask("POST", "/generate", body, once=bool(rid))

    async def abort(self, rids: Sequence[str]) -> None:
        await asyncio.gather(*(self.ask("POST", "/abort_request", {"rid": rid}) for rid in rids if rid))

    async def load(self, folder: str) -> None:
        try:
            await self.ask("POST", "/update_weights_from_disk", {"model_path": folder, "flush_cache": True})
        except EngineError as error:
            raise WeightSyncError(f"{error} (the weights are in {folder}: can the server read that?)") from error

    async def reset_prefix_cache(self) -> None:
        await self.ask("POST", "/flush_cache", params={"timeout": "10"})

    async def sleep(self, level: int) -> frozenset[str]:
        tags = SLEEPING if level >= 2 else SLEEPING - {"weights"}
        if self._frees_memory:
            await self.ask("POST", "/release_memory_occupation", {"tags": sorted(tags)})
        return tags

    async def wake_up(self, tags: Sequence[str]) -> None:
        if self._frees_memory:
            await self.ask("POST", "/resume_memory_occupation", {"tags": list(tags)})

    async def check(self) -> None:
        await self.ask("GET", "/ready", deadline_s=30.0)
