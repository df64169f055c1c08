"""The parts, cheapest and most telling first. A part imports what it needs when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.gpu_check.report import Report, Setting


@dataclass(frozen=True)
class Part:
    """`run` of a module of this package, or the function named after a colon."""

    name: str
    what: str
    module: str

    def load(self) -> Callable[[Setting, Report], None]:
        module, _, function = self.module.partition(":")
        found: Callable[[Setting, Report], None] = getattr(
            importlib.import_module(f"tests.gpu_check.{module}"), function or "run"
        )
        return found


PARTS = (
    Part("environment", "machine, versions, imports", "environment"),
    Part("attention", "packed attention against SDPA", "attention"),
    Part("groups", "single-rank NCCL, deadlines", "groups"),
    Part("ipc", "200 syncs through shared memory while copies are late", "ipc"),
    Part("sync", "a colocated sync of 1.5B parameters", "ipc:run_large"),
    Part("update", "FSDP2 updates in bfloat16 and float32 against float32 on the CPU", "update"),
    Part("transformers", "the transformers engine's conformance", "engines:run_transformers"),
    Part("training", "trainer-only tokens per second and MFU, 0.6B at 16k tokens", "training"),
    Part("vllm", "vLLM without graphs: conformance, sleep, syncs", "engines:run_vllm_eager"),
    Part("vllm-graphs", "vLLM with CUDA graphs: the same", "engines:run_vllm_graphs"),
    Part("vllm-decode", "decoding with vLLM, ours against bare", "decoding"),
    Part("sglang", "SGLang with CUDA graphs: conformance, sleep, syncs", "engines:run_sglang_graphs"),
    Part("quickstart", "the quickstart, colocated", "quickstart"),
    Part("agreement", "log-probs of engines and trainer in bfloat16, batch-invariant modes", "agreement"),
    Part("sglang-eager", "SGLang without graphs: conformance, sleep, syncs", "engines:run_sglang_eager"),
    Part("sglang-decode", "decoding with SGLang", "decoding:run_sglang"),
    Part("colocated", "tokens per second of updates of 1.5B parameters, alone and beside vLLM asleep", "colocated"),
)
