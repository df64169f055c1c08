"""What a weight sync costs the requests that are under way, for every engine and every trainer.fully_async.on_sync.

    python scripts/benchmarks/pauses.py [--engines transformers vllm sglang] [--repeats 7] [--json FILE]

64 requests with prompts of 60 tokens and answers of 132 to 195, one after the other in each of 64 places, on an engine
in this process (qwen3 of hidden size 256 with 4 layers, fp32, CPU). A sync as a run has it: the client pauses the
engine between two tokens, the publisher sends every weight, the engine goes on. Medians of

- pause: from the call until nothing is sampled any more,
- sync: manifest, transfer, load, fingerprints, commit,
- first token: from the end of the sync until a request that came during the pause has its first token; what is read
  again comes before it,
- a decode step beside the 64, while nothing pauses: 16 more tokens of one more request, by 16.
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
from skyrl_train.data.arrays import token_array
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.client import EngineClient
from skyrl_train.registry import load_object
from skyrl_train.testing.tiny_models import save_tiny_model, tiny_model
from skyrl_train.weight_sync.publish import WeightPublisher

NEW_TOKENS = MAX_MODEL_LEN - PROMPT_TOKENS - 1
DECODED = 16
TIMED = "pause", "sync", "first token", "decode step"
SHAPE: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 256, "layers": 4}


async def keep_busy(client: EngineClient, number: int) -> None:
    """One request after the other."""
    generator = torch.Generator().manual_seed(number)
    for turn in range(10**6):
        ids = tuple(torch.randint(3, VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist())
        sampling = SamplingParams(max_tokens=NEW_TOKENS - number, ignore_eos=True)
        await client.generate([SampleRequest(f"{number}.{turn}", token_array(ids), sampling, seed=turn)])


def one_more(name: str, tokens: int) -> SampleRequest:
    return SampleRequest(name, token_array((5, 6, 7)), SamplingParams(max_tokens=tokens, ignore_eos=True), seed=0)


async def measure(kind: str, model: str, held: dict[str, Tensor], on_sync: str, repeats: int) -> dict[str, Any]:
    given = {
        "dtype": "float32",
        "device": "cpu",
        "threads": 1,
        "max_num_seqs": PROMPTS + 1,
        "max_model_len": MAX_MODEL_LEN,
    }
    engine = load_object(ENGINES[kind])(model=model, name=kind, **given)
    publisher = WeightPublisher(Trainer(held, 1 << 24), lambda: [engine], route="ipc", deadline_s=60.0)
    client = EngineClient([engine], deadline_s=600.0)
    busy = [asyncio.ensure_future(keep_busy(client, number)) for number in range(PROMPTS)]
    taken: dict[str, list[float]] = {name: [] for name in TIMED}
    try:
        while (await engine.health()).running < PROMPTS:
            await asyncio.sleep(0.01)
        for repeat in range(repeats + 1):
            spent = []
            for tokens in (1, 1 + DECODED):
                start = time.perf_counter()
                await client.generate([one_more(f"more.{repeat}.{tokens}", tokens)])
                spent.append(time.perf_counter() - start)
            taken["decode step"].append((spent[1] - spent[0]) / DECODED)
            start = time.perf_counter()
            async with client.paused(PAUSES[on_sync]):
                paused = time.perf_counter()
                first = asyncio.ensure_future(client.generate([one_more(f"late.{repeat}", 1)]))
                await publisher.publish(1 + repeat)
                synced = time.perf_counter()
            await first
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
