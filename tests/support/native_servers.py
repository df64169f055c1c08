"""vLLM's and SGLang's own servers on CPUs, started as docs/engines.md says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

import skyrl_train.engines
from skyrl_train.cluster.addresses import free_address

STUBS = Path(skyrl_train.engines.__file__).parent / "sglang" / "stubs"
TOKEN = "a-token-of-the-tests"

_VLLM = """
    -m vllm.entrypoints.openai.api_server --model {model} --dtype float32 --max-model-len {length}
    --max-num-seqs {seqs} --enforce-eager --no-enable-chunked-prefill --max-num-batched-tokens 8192
    --kv-cache-memory-bytes 134217728 --host 127.0.0.1 --port {port} --api-key {token}
"""
_VLLM_FOR_TRAINING = """
    --logprobs-mode processed_logprobs --worker-extension-cls skyrl_train.engines.vllm.worker.WorkerExtension
    --enable-prompt-tokens-details
"""
_SGLANG = """
    -m sglang.launch_server --model-path {model} --device cpu --dtype float32 --attention-backend torch_native
    --sampling-backend pytorch --grammar-backend none --disable-cuda-graph --disable-overlap-schedule
    --context-length {length_and_spare} --max-running-requests {seqs} --max-total-tokens 20480
    --mem-fraction-static 0.5 --host 127.0.0.1 --port {port} --api-key {token}
"""
_ENVIRONMENT = {
    "vllm": {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"},
    "sglang": {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STUBS), "PYTHONWARNINGS": "ignore"},
}
SPARE = 6
"""Places that SGLang wants beyond the longest request."""


class NativeServerProcess:
    """A server that is starting; `stop` ends it with everything that it started."""

    def __init__(
        self, kind: str, model: str, *, log: Path, length: int = 1024, seqs: int = 16, plain: bool = False, **env: str
    ):
        """`kind` is vllm or sglang; `plain`: vLLM's without what training wants of it. `log`: a file for its output."""
        _, port = free_address()
        self.address = f"127.0.0.1:{port}"
        command = _SGLANG if kind == "sglang" else _VLLM + ("" if plain else _VLLM_FOR_TRAINING)
        words = {"model": model, "length": length, "length_and_spare": length + SPARE, "seqs": seqs, "port": port}
        arguments = [word.format(token=TOKEN, **words) for word in command.split()]
        self.log = log
        common = {"HF_HUB_OFFLINE": "1", "TORCHDYNAMO_DISABLE": "1"}
        with log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *arguments],
                stdout=output,
                stderr=subprocess.STDOUT,
                env=os.environ | common | _ENVIRONMENT[kind] | env,
            )

    def stop(self) -> None:
        """At once. Stopping twice is harmless."""
        end(self._process)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process with everything that it started; what their resource trackers know of is gone from /dev/shm.

    SGLang's slot files (sglang_loads_*.shm, 16 KiB each) are in no tracker: a killed server leaves its own.
    """
    family = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    trackers = [member for member in family if _is_resource_tracker(member)]
    process.kill()
    process.wait()
    for member in family:
        if member not in trackers and member.is_running():
            member.kill()
    # A tracker removes what those it served left in shared memory once they are gone, and then ends by itself.
    _, alive = psutil.wait_procs(family, timeout=10)
    for member in alive:
        member.kill()


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False
