"""The transformers engine samples the same tokens and log-probs in every process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from skyrl_train.testing.tiny_models import save_tiny_model

_RUN = """
import asyncio, dataclasses, json, sys
from skyrl_train.engines.base import SampleRequest, SamplingParams
from skyrl_train.engines.transformers.engine import TransformersEngine

async def main(path):
    engine = TransformersEngine(path, max_num_seqs=11)
    prompts = [tuple(range(3, 3 + n)) for n in (4, 19, 7, 7, 30)]
    requests = [
        SampleRequest(f"{p}.{s}", prompt, SamplingParams(max_tokens=5 + 7 * s, temperature=0.9), seed=31 * p + s)
        for p, prompt in enumerate(prompts) for s in range(4)
    ]
    completions = await engine.generate(requests)
    await engine.close()
    results = [dataclasses.asdict(completion) | {"running_s": 0} for completion in completions]
    print(json.dumps(results, default=lambda array: array.tolist()))

asyncio.run(main(sys.argv[1]))
"""


def test_two_processes_sample_bitwise_equal_tokens(tmp_path: Path):
    path = save_tiny_model(tmp_path, hidden_size=64, layers=2)
    outputs = [
        subprocess.run([sys.executable, "-c", _RUN, path], capture_output=True, text=True, timeout=120, check=True)
        for _ in range(2)
    ]
    first, second = (json.loads(output.stdout) for output in outputs)
    assert len(first) == 20
    assert first == second
