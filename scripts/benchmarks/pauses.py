"""What a weight sync costs the requests that are under way, for every engine and every trainer.fully_async.on_sync.

    python scripts/benchmarks/pauses.py [--engines transformers vllm sglang] [--repeats 7] [--json FILE]

64 requests of 60 tokens, sampled on the whole time, on an engine in this process (qwen3 of hidden size 256 with 4
layers, fp32, CPU). A sync as a run has it: the client pauses the engine between two tokens, the publisher sends every
weight, the engine goes on. Medians of

- pause: from the call until nothing is sampled any more,
- sync: manifest, transfer, load, fingerprints, commit,
- first token: from the end of the sync until the first token of the new weights, which contains what is read again,
- a decode step of all 64 beside it, of the same run while nothing paused it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engines import KINDS, MAX_MODEL_LEN, PROMPT_TOKENS, PROMPTS, VOCABULARY
from measure import about, line
from torch import Tensor
from weight_sync import Trainer

from skyrl_train.assembly.publisher import PAUSES
from skyrl_train.config.choices import ENGINES
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.registry import load_object
from skyrl_train.testing.tiny_models import save_tiny_model, tiny_model
from skyrl_train.weight_sync.publish import WeightPublisher

NEW_TOKENS = MAX_MODEL_LEN - PROMPT_TOKENS - 1
BETWEEN_S = 0.3
"""Of undisturbed sampling between two syncs."""
TIMED = "pause", "sync", "first token", "decode step"
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 256, "layers": 4}


async def keep_busy(client: EngineClient, number: int) -> None:
    """One request after the other."""
    generator = torch.Generator().manual_seed(number)
    for turn in range(10**6):
        ids = tuple(torch.randint(3, VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist())
        sampling = SamplingParams(max_tokens=NEW_TOKENS - number, ignore_eos=True)
        await client.generate([SampleRequest(f"{number}.{turn}", ids, sampling, seed=turn)])


async def sampled(engine: Any) -> int:
    return int((await engine.health()).generated_tokens)


async def measure(kind: str, model: str, held: dict[str, Tensor], on_sync: str, repeats: int) -> dict[str, Any]:
    given = {"dtype": "float32", "device": "cpu", "threads": 1, "max_num_seqs": PROMPTS, "max_model_len": MAX_MODEL_LEN}
    engine = load_object(ENGINES[kind])(model=model, name=kind, **given)
    publisher = WeightPublisher(Trainer(held, 1 << 24), lambda: [engine], route="ipc", deadline_s=60.0)
    client = EngineClient([engine], deadline_s=600.0)
    busy = [asyncio.ensure_future(keep_busy(client, number)) for number in range(PROMPTS)]
    taken: dict[str, list[float]] = {name: [] for name in TIMED}
    try:
        while (await engine.health()).running < PROMPTS:
            await asyncio.sleep(0.01)
        for repeat in range(repeats + 1):
            counted, begun = await sampled(engine), time.perf_counter()
            await asyncio.sleep(BETWEEN_S)
            taken["decode step"].append((time.perf_counter() - begun) * PROMPTS / (await sampled(engine) - counted))
            start = time.perf_counter()
            async with client.paused(PAUSES[on_sync]):
                paused = time.perf_counter()
                await publisher.publish(1 + repeat)
                synced, counted = time.perf_counter(), await sampled(engine)
            while await sampled(engine) == counted:
                await asyncio.sleep(0.0005)
            taken["pause"].append(paused - start)
            taken["sync"].append(synced - paused)
            taken["first token"].append(time.perf_counter() - synced)
    finally:
        for one in busy:
            one.cancel()
        await asyncio.wait(busy)
        await client.close()
    return {name: statistics.median(seconds[1:]) for name, seconds in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    report = about(*(name for name in options.engines if name != "transformers"))
    print(line(report), flush=True)
    print("| engine | on_sync | pause: ms | sync: ms | first token: ms | a decode step: ms |\n" + "| --- " * 6 + "|")
    results = []
    with tempfile.TemporaryDirectory(prefix="pauses-") as name:
        model = save_tiny_model(Path(name) / "model", "qwen3", **SHAPE)
        held: dict[str, Tensor] = dict(tiny_model("qwen3", seed=1, **SHAPE).named_parameters())
        for kind in options.engines:
            for on_sync in PAUSES:
                found = asyncio.run(measure(kind, str(model), held, on_sync, options.repeats))
                results.append({"engine": kind, "on_sync": on_sync, **found})
                numbers = " | ".join(
                    f"{1000 * found[key]:.1f}" for key in ("pause", "sync", "first token", "decode step")
                )
                print(f"| {kind} | `{on_sync}` | {numbers} |", flush=True)
    if options.json:
        options.json.write_text(json.dumps(report | {"results": results}, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
