"""Start an engine on CUDA as a run does, with a driver that has no device: python -m tests.cuda_wheels.start."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from operator import attrgetter
from pathlib import Path
from typing import Any

from skyrl_train.config.choices import ENGINES
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.engines.graph_sizes import get_graph_sizes
from skyrl_train.experiment.engines import engine_kwargs
from skyrl_train.registry import load_object
from skyrl_train.testing.tiny_models import save_tiny_model

_CASES: dict[str, dict[str, Any]] = {
    "as it is by default": {},
    "without graphs": {"enforce_eager": True},
    "with adapters": {"max_lora_rank": 16},
    "batch-invariant": {"batch_invariant": True},
}
_DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}
CASES = {"vllm": _CASES | {"with drafts": {"speculative_config": _DRAFTS}}, "sglang": _CASES}
"""Additional arguments of each engine."""
NO_DRIVER = "Found no NVIDIA driver"
REACHED = {"vllm": "in init_device", "sglang": "in run_scheduler_process"}
"""The function in the engine's worker that accesses the device."""
GRAPH_SIZES = get_graph_sizes(GeneratorConfig().max_num_seqs)
SETTINGS: dict[str, dict[str, Any]] = {
    "vllm": {
        "model_config.enable_sleep_mode": True,
        "model_config.logprobs_mode": "processed_logprobs",
        "scheduler_config.async_scheduling": True,
        "compilation_config.cudagraph_mode.name": "FULL_AND_PIECEWISE",
        "compilation_config.cudagraph_capture_sizes": GRAPH_SIZES,
        "compilation_config.max_cudagraph_capture_size": GRAPH_SIZES[-1],
        "parallel_config.distributed_executor_backend": "uni",
    },
    "sglang": {
        "enable_memory_saver": True,
        "sampling_backend": "pytorch",
        "disable_overlap_schedule": False,
        "disable_cuda_graph": False,
        "cuda_graph_config.decode.bs": GRAPH_SIZES,
        "cuda_graph_config.decode.max_bs": GRAPH_SIZES[-1],
        "sleep_on_idle": True,
    },
}
"""Settings that the engine must derive from our default arguments. Engines silently drop conflicting arguments."""


def reaches_the_driver(engine: str, case: str) -> None:
    """Start an engine; raise RuntimeError if the start fails for another reason than the missing driver."""
    command = [sys.executable, "-m", __name__, engine, case]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600, check=False
    )
    if not done.returncode or NO_DRIVER not in done.stdout or REACHED[engine] not in done.stdout:
        raise RuntimeError(f"ended with status {done.returncode}:\n{done.stdout[-6000:]}")


def main(engine: str, case: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model = save_tiny_model(Path(folder))
        settings = GeneratorConfig(
            backend=engine,
            model_name=model,
            rope_scaling=None,
            rope_theta=None,
            engine_init_kwargs={"max_model_len": 256, **CASES[engine][case]},
        )
        arguments = engine_kwargs(settings, "cuda", engine)
        if not CASES[engine][case]:
            check_settings(engine, arguments)
        load_object(ENGINES[engine])(**arguments)


def check_settings(engine: str, arguments: dict[str, Any]) -> None:
    """Raise AssertionError if the engine derives other settings than SETTINGS."""
    config = (make_vllm_config if engine == "vllm" else make_sglang_config)(dict(arguments))
    actual = {name: attrgetter(name)(config) for name in SETTINGS[engine]}
    wrong = {name: value for name, value in actual.items() if value != SETTINGS[engine][name]}
    assert not wrong, f"{wrong} instead of {SETTINGS[engine]}"


def make_vllm_config(kwargs: dict[str, Any]) -> Any:
    from vllm import EngineArgs

    from skyrl_train.engines.vllm.arguments import engine_arguments

    model = kwargs.pop("model")
    for name in ("device", "name", "pipeline_parallel_size", "batch_invariant"):
        del kwargs[name]
    return EngineArgs(**engine_arguments(model, False, 0, kwargs)).create_engine_config()


def make_sglang_config(kwargs: dict[str, Any]) -> Any:
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.server_args import ServerArgs

    from skyrl_train.engines.sglang.arguments import engine_arguments

    kwargs.pop("pipeline_parallel_size")
    own = {name: kwargs.pop(name) for name in ("name", "device", "dtype", "max_num_seqs", "max_model_len")}
    rope = {name: kwargs.pop(name) for name in ("rope_scaling", "rope_theta")}
    config = ServerArgs(**engine_arguments(kwargs.pop("model"), **own, **rope, max_lora_rank=0, options=kwargs))
    config.resolve_once()
    return resolving_view(config)


if __name__ == "__main__":
    main(*sys.argv[1:])
