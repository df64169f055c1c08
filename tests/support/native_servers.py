"""vLLM's and SGLang's own servers on CPUs, started as documented in docs/concepts/engines.md."""

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
"""Number of positions that SGLang needs in addition to the longest request."""


class NativeServerProcess:
    """A server process. It may still be starting, and `stop` kills it with all its descendants."""

    def __init__(
        self, kind: str, model: str, *, log: Path, length: int = 1024, seqs: int = 16, plain: bool = False, **env: str
    ):
        """Start a server.

        Args:
            kind: "vllm" or "sglang".
            model: Folder of the model.
            log: File for the server's output.
            length: Maximum length of a prompt with its response, in tokens.
            seqs: Maximum number of running requests.
            plain: True to start vLLM without the options that training requires.
            env: Additional environment variables.
        """
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
        """Kill the server and its descendants. Stopping twice is harmless."""
        end(self._process)


def end(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its descendants. Their resource trackers remove files from /dev/shm.

    No tracker knows SGLang's files sglang_loads_*.shm (16 KiB each), so a killed server leaves them behind.
    """
    descendants = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    trackers = [descendant for descendant in descendants if _is_resource_tracker(descendant)]
    process.kill()
    process.wait()
    for descendant in descendants:
        if descendant not in trackers and descendant.is_running():
            descendant.kill()
    # When its processes have ended, a tracker removes their files from shared memory and then exits.
    _, alive = psutil.wait_procs(descendants, timeout=10)
    for descendant in alive:
        descendant.kill()


def _is_resource_tracker(process: psutil.Process) -> bool:
    try:
        return any("multiprocessing.resource_tracker" in word for word in process.cmdline())
    except psutil.NoSuchProcess:
        return False
