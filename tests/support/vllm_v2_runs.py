"""Runs of vLLM's V2 model runner on a CPU: `python -m tests.support.vllm_v2_runs NAME FOLDER`.

The process must have `vllm_v2.ENVIRONMENT`. NAME is a key of `RUNS`, and FOLDER has the model. Prints JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from skyrl_train.cluster.call_channel import CallChannel
from skyrl_train.cluster.child_process import ChildProcess
from skyrl_train.data.token_arrays import to_token_array
from skyrl_train.engines.base import Completion, SampleRequest, SamplingParams
from tests.support import vllm_v2
from tests.support.draft_heads import save_draft_head, save_mtp_model
from tests.support.vllm_async_scheduling import enable_async_scheduling
from tests.support.vllm_v2 import SPECULATIVE_CONFIGS

PROMPT = (50, 60, 70, 80, 90)
SCHEMA = json.dumps({"enum": ["ab", "ac", 12, True]})
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "truncated": {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.02},
    "penalized": {"repetition_penalty": 1.3},
}
TOP = 3
VOCABULARY, ROWS = 40, 600
SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.7},
    {"min_p": 0.1},
    {"temperature": 1.5, "top_k": 20, "top_p": 0.8, "min_p": 0.05},
]
"""Parameters of the requests of `sample_rows`."""


def logits_of_rows() -> torch.Tensor:
    """Return logits [V] with ties, also at thresholds."""
    generator = torch.Generator().manual_seed(3)
    return (torch.randn(VOCABULARY, generator=generator) * 6).round() / 4


def request(name: str, seed: int = 7, **fields: Any) -> SampleRequest:
    sampling = SamplingParams(**({"max_tokens": 8, "ignore_eos": True} | OPTIONS.get(name, {}) | fields))
    return SampleRequest(name, to_token_array(PROMPT), sampling, seed, top_logprobs=TOP if name == "temperature" else 0)


def as_dict(completion: Completion) -> dict[str, Any]:
    top = completion.top_logprobs
    return {
        "token_ids": completion.token_ids.tolist(),
        "logprobs": completion.logprobs.tolist(),
        "full_logprobs": completion.full_logprobs.tolist(),
        "top": None if top is None else [top.token_ids.tolist(), top.logprobs.tolist()],
    }


def start(folder: str, **options: Any) -> Any:
    from skyrl_train.engines.vllm.engine import VLLMEngine

    return VLLMEngine(folder, max_num_seqs=8, max_model_len=256, threads=1, name="v2", **options)


async def sample(folder: str) -> dict[str, Any]:
    """Return the completions of `OPTIONS` in one batch, of each alone, and of a schema; and the scores of the first."""
    engine = start(folder)
    together = [request(name) for name in OPTIONS]
    schema = SampleRequest("schema", to_token_array(PROMPT), SamplingParams(max_tokens=8), 1, json_schema=SCHEMA)
    *batch, in_schema = await engine.generate([*together, schema])
    alone = [(await engine.generate([request(name)]))[0] for name in ("plain", "truncated")]
    other = await engine.generate([request("plain", seed=8)])
    scores = await engine.score([[*PROMPT, *completion.token_ids.tolist()] for completion in batch])
    await engine.close()
    return {
        "uses V2": engine._uses_v2,
        "together": [as_dict(completion) for completion in batch],
        "alone": [as_dict(completion) for completion in alone],
        "other seed": as_dict(other[0]),
        "schema": as_dict(in_schema),
        "drafted": await sample_with_drafts(folder, "draft_model"),
        "scores": [row[len(PROMPT) - 1 :] for row in scores],
    }


REPEATED_PROMPT = (50, 60, 70, 80) * 4


async def sample_with_drafts(folder: str, method: str) -> dict[str, Any]:
    """Return the completions of `sample` from an engine with speculative decoding, and its counters.

    A draft model is the policy itself. The counters are of a batch without truncation, penalties and schemas, whose
    responses end with the last accepted draft of a step.
    """
    from skyrl_train.engines.vllm import sampler_v2

    config = dict(SPECULATIVE_CONFIGS[method])
    if method == "draft_model":
        config["model"] = folder
    elif method in ("eagle", "eagle3"):
        config["model"] = save_draft_head(Path(folder).parent / method, method)
    if method == "ngram":  # Verify the requests of a batch in several parts, as with large vocabularies.
        sampler_v2.get_max_chunk_logits = lambda vocab_size: 9
    engine = start(folder, speculative_config=config)
    schema = SampleRequest("schema", to_token_array(PROMPT), SamplingParams(max_tokens=8), 1, json_schema=SCHEMA)
    batch = await engine.generate([*(request(name) for name in OPTIONS), schema])
    before = await engine.health()
    await engine.generate([request(name, max_tokens=13) for name in ("plain", "temperature", "greedy")])
    after = await engine.health()
    await engine.close()
    counts = {name: getattr(after, name) - getattr(before, name) for name in ("draft_steps", "accepted_drafts")}
    return {
        "uses V2": engine._uses_v2,
        "together": [as_dict(completion) for completion in batch],
        "sampler bytes": sampler_bytes(engine),
        **counts,
    }


def sampler_bytes(engine: Any) -> int:
    """Return the size of the buffers that the memory plan counts."""
    runner = engine._core.model_executor.driver_worker.worker.model_runner
    penalties = runner.sampler.penalties_state
    tensors = [penalties.prompt_bin_mask, penalties.output_bin_counts, runner.structured_outputs_worker.grammar_bitmask]
    if runner.speculative_config.use_ngram():
        tensors.append(runner.req_states.all_token_ids.gpu)
    return sum(tensor.nbytes for tensor in tensors)


async def sample_with_mtp(folder: str) -> dict[str, Any]:
    """Return the completions of `OPTIONS` without drafts and with layers for multi-token prediction, and counters."""
    path, batches, health = save_mtp_model(Path(folder).parent / "mtp"), [], None
    for drafts in (None, {"method": "mtp", "num_speculative_tokens": 3}):
        engine = start(path, **({} if drafts is None else {"speculative_config": drafts}))
        batches.append([as_dict(completion) for completion in await engine.generate(list(map(request, OPTIONS)))])
        health = await engine.health()
        await engine.close()
    assert health is not None
    return {"batches": batches, "draft_steps": health.draft_steps, "accepted_drafts": health.accepted_drafts}


DISTURBED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.7, "ignore_eos": True},
    {"repetition_penalty": 1.2, "ignore_eos": True},
    {"temperature": 0.7, "min_tokens": 40, "stop_token_ids": list(range(3, 120))},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.8, "min_p": 0.02, "ignore_eos": True},
)
"""Parameters of the requests of `sample_disturbed`. The third response ends soon after `min_tokens`."""


async def sample_disturbed(folder: str, overlapped: bool = False) -> dict[str, Any]:
    """Return completions of one engine without drafts, and of one with n-grams that pauses interrupt.

    Args:
        folder: The model's folder.
        overlapped: True to start each step before the tokens of the previous step are known, as on GPUs.
    """

    def requests() -> list[SampleRequest]:
        every = [SamplingParams(max_tokens=60, **options) for options in DISTURBED]
        return [SampleRequest(f"{n}", to_token_array(REPEATED_PROMPT), params, n) for n, params in enumerate(every)]

    async def disturb(engine: Any) -> list[list[float]]:
        await asyncio.sleep(0.5)
        scores: list[list[float]] = await engine.score([REPEATED_PROMPT])
        for mode in ("retract", "keep"):
            await engine.pause(mode)
            await engine.reset_prefix_cache()
            await engine.resume()
            await asyncio.sleep(0.5)
        return scores

    if overlapped:
        enable_async_scheduling(pytest.MonkeyPatch())
    outcome = {}
    for name, options in (("plain", {}), ("drafts", {"speculative_config": SPECULATIVE_CONFIGS["ngram"]})):
        engine = start(folder, **options)
        assert (engine._core.batch_queue is not None) == overlapped
        completions, scores = await asyncio.gather(engine.generate(requests()), disturb(engine))
        accepted = (await engine.health()).accepted_drafts
        await engine.close()
        outcome[name] = {"completions": list(map(as_dict, completions)), "scores": scores, "accepted": accepted}
    return outcome


async def sample_rows(folder: str) -> list[dict[str, Any]]:
    """Sample `ROWS` tokens for each of `SETTINGS` from the same logits, as rows of one request each.

    Returns:
        For each setting the sampled tokens, and both log-probs of each token that was sampled.
    """
    from vllm import SamplingParams as VLLMSamplingParams
    from vllm.config import VllmConfig
    from vllm.v1.worker.cpu import shm  # noqa: F401  It replaces pinned memory by plain memory.
    from vllm.v1.worker.gpu.sample.sampler import Sampler
    from vllm.v1.worker.gpu.states import RequestState

    from skyrl_train.engines.vllm.arguments import SEED
    from skyrl_train.engines.vllm.sampler_v2 import replace_sampler

    device, count = torch.device("cpu"), len(SETTINGS)
    states = RequestState(count, 2 * ROWS, 64, 0, VOCABULARY, device)
    sampler = Sampler(VllmConfig(), count, VOCABULARY, device, states)
    worker = SimpleNamespace(apply_grammar_bitmask=None)
    replace_sampler(SimpleNamespace(sampler=sampler, structured_outputs_worker=worker, speculative_config=None), "rows")
    for index, setting in enumerate(SETTINGS):
        states.add_request(str(index), 1, [1], 1, 2 * ROWS)
        slot = states.req_id_to_index[str(index)]
        sampler.add_request(slot, VLLMSamplingParams(**setting, logprobs=1, extra_args={SEED: 2**64 - 1 - index}))
    states.apply_staged_writes()
    sampler.apply_staged_writes()
    slots = np.array([states.req_id_to_index[str(index)] for index in range(count)], np.int32)
    rows = torch.arange(count * ROWS)
    batch: Any = SimpleNamespace(
        num_reqs=count,
        idx_mapping=torch.from_numpy(slots),
        idx_mapping_np=slots,
        expanded_idx_mapping=torch.from_numpy(slots).repeat_interleave(ROWS),
        expanded_local_pos=rows.int() % ROWS,
        positions=rows % ROWS,
        input_ids=torch.ones(count * ROWS, dtype=torch.int32),
        logits_indices=rows,
        cu_num_logits=torch.arange(count + 1, dtype=torch.int32) * ROWS,
        seq_lens=torch.full((count,), 2, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.full((count,), 2, dtype=torch.int32),
    )
    output = sampler(logits_of_rows().repeat(count * ROWS, 1), batch)
    ids = output.sampled_token_ids.view(count, ROWS).numpy()
    columns = output.logprobs_tensors.logprobs.view(count, ROWS, 2).tolist()
    return [
        {
            "ids": ids[index].tolist(),
            "logprobs": dict(zip(map(str, ids[index].tolist()), columns[index], strict=True)),
        }
        for index in range(count)
    ]


def start_broken(folder: str, raises: bool) -> Any:
    """Start an engine whose V2 sampler adds 1 to all log-probs, or fails as a kernel that does not compile."""
    if vllm_v2.is_requested():
        vllm_v2.enable()
        from skyrl_train.engines.vllm import sampler_v2

        right = sampler_v2.token_logprobs

        def wrong(*args: Any) -> torch.Tensor:
            if raises:
                raise RuntimeError("no kernel image")
            return right(*args) + 1.0

        sampler_v2.token_logprobs = wrong  # type: ignore[assignment]
    return start(folder)


async def sample_with_broken_sampler(folder: str, raises: bool = False) -> dict[str, Any]:
    """Return a completion of the engine of `start_broken` in a child process."""
    target = f"tests.support.vllm_v2_runs:{start_broken.__name__}"
    child = ChildProcess("engine", target, {"folder": folder, "raises": raises}, [], traced=False)
    channel = CallChannel(child.submit, child.collect)
    (completion,) = await channel.call("generate", ([request("plain")],), {})
    uses_v2 = await channel.call("__getattribute__", ("_uses_v2",), {})
    await channel.call("close", (), {})
    return {"uses V2": uses_v2, "completion": as_dict(completion)}


async def sample_with_routing(folder: str, **options: Any) -> dict[str, Any]:
    """Return sequences of a mixture of experts with the experts of their tokens, and the number of cached tokens.

    Later turns find the first turn in the prefix cache. The last requests are scored beside, retracted, and continued
    after a reset of the prefix cache.
    """
    engine = start(folder, keeps_routing=True, block_size=32, **options)  # the cache shares complete blocks only
    prompt = list(range(3, 43))

    def requests(
        name: str, tokens: list[int], count: int, max_tokens: int, known_routing: int = 0
    ) -> list[SampleRequest]:
        params, ids = SamplingParams(max_tokens=max_tokens, ignore_eos=True), to_token_array(tokens)
        return [SampleRequest(f"{name}-{n}", ids, params, seed=n, known_routing=known_routing) for n in range(count)]

    async def disturb() -> None:
        await asyncio.sleep(0.5)
        await engine.score([prompt])
        await engine.pause("retract")
        await engine.resume()
        await asyncio.sleep(0.3)
        await engine.pause("keep")
        await engine.reset_prefix_cache()
        await engine.resume()

    sequences: list[dict[str, Any]] = []

    def add(done: list[tuple[SampleRequest, Completion]]) -> None:
        for made, completion in done:
            assert completion.routing is not None and completion.routing.dtype == np.uint8
            tokens = [*made.token_ids.tolist(), *completion.token_ids.tolist()]
            known = sequences[0]["routing"][: made.known_routing] if made.known_routing else []
            sequences.append({"tokens": tokens, "routing": [*known, *completion.routing.tolist()]})

    first = requests("first", prompt, 1, 12)
    add(list(zip(first, await engine.generate(first), strict=True)))
    known = len(sequences[0]["routing"])
    later = requests("later", [*sequences[0]["tokens"], 5, 6, 7], 3, 12, known_routing=known)
    add(list(zip(later, await engine.generate(later), strict=True)))
    cached = (await engine.health()).cached_tokens
    disturbed = requests("disturbed", [9, *prompt], 4, 100)
    completions, _ = await asyncio.gather(engine.generate(disturbed), disturb())
    add(list(zip(disturbed, completions, strict=True)))
    await engine.close()
    return {"sequences": sequences, "cached": cached}


RUNS: dict[str, Callable[[str], Coroutine[Any, Any, Any]]] = {
    "sample": sample,
    "rows": sample_rows,
    "broken": sample_with_broken_sampler,
    "failing": partial(sample_with_broken_sampler, raises=True),
    "routing": sample_with_routing,
    "routing_drafts": partial(sample_with_routing, speculative_config=SPECULATIVE_CONFIGS["ngram"]),
    "ngram": partial(sample_with_drafts, method="ngram"),
    "eagle": partial(sample_with_drafts, method="eagle"),
    "eagle3": partial(sample_with_drafts, method="eagle3"),
    "mtp": sample_with_mtp,
    "disturbed": sample_disturbed,
    "disturbed_overlapped": partial(sample_disturbed, overlapped=True),
}

if __name__ == "__main__":
    vllm_v2.enable()
    print(json.dumps(asyncio.run(RUNS[sys.argv[1]](sys.argv[2]))))
