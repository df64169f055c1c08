"""The list of parts, with cheap and informative ones first. A part imports its module only when it runs."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.gpu_check.report import Report, Setting


@dataclass(frozen=True)
class Part:
    """A part: function `run` of a module of this package, or the function named after a colon."""

    name: str
    what: str
    module: str

    def load(self) -> Callable[[Setting, Report], None]:
        module, _, function = self.module.partition(":")
        run: Callable[[Setting, Report], None] = getattr(
            importlib.import_module(f"tests.gpu_check.{module}"), function or "run"
        )
        return run


PARTS = (
    Part("environment", "machine, versions, imports", "environment"),
    Part("attention", "packed attention, compared with SDPA", "attention"),
    Part("groups", "single-rank NCCL, deadlines", "groups"),
    Part("ipc", "200 syncs through shared memory while copies are late", "ipc"),
    Part("sync", "a colocated sync of 1.5B parameters", "ipc:run_large"),
    Part("update", "FSDP2 updates in bfloat16 and float32, compared with float32 on the CPU", "update"),
    Part("transformers", "the transformers engine's conformance", "engines:run_transformers"),
    Part("training", "tokens per second and MFU of updates, 0.6B parameters at 16,384 tokens", "training"),
    Part("vllm", "vLLM without graphs: conformance, sleep, syncs", "engines:run_vllm_eager"),
    Part("vllm-graphs", "vLLM with CUDA graphs: conformance, sleep, syncs", "engines:run_vllm_graphs"),
    Part("vllm-decode", "decoding with our vLLM engine and with bare vLLM", "decoding"),
    Part("sglang", "SGLang with CUDA graphs: conformance, sleep, syncs", "engines:run_sglang_graphs"),
    Part("quickstart", "the quickstart, colocated", "quickstart"),
    Part("agreement", "log-probs of engines and trainer in bfloat16, batch-invariant modes", "agreement"),
    Part("sglang-eager", "SGLang without graphs: conformance, sleep, syncs", "engines:run_sglang_eager"),
    Part("sglang-decode", "decoding with SGLang", "decoding:run_sglang"),
    Part("colocated", "tokens per second of updates of 1.5B parameters, alone and beside a sleeping vLLM", "colocated"),
    Part("recurrent", "kernels of recurrent layers, compared with definitions in float64", "recurrent"),
    Part(
        "vllm-variants",
        "decoding with fewer CUDA graphs, with n-gram drafts, and with bare vLLM's first runner",
        "decoding:run_variants",
    ),
    Part("training-short", "tokens per second and MFU of updates, 0.6B at 2,048 tokens", "training:run_short"),
    Part("switch", "seconds of each stage of the switch between vLLM and trainer, in each mode", "switch"),
)
