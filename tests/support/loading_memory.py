"""The memory that ranks allocate while they load a model, without mapped files.

`python -m tests.support.loading_memory` measures a model of 1 GiB, saved in float32 and in bfloat16.
"""

from __future__ import annotations

import gc
import sys
import threading
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import transformers.optimization  # with peft, whose code a rank imports while it is set up  # noqa: F401

from skyrl_train.cluster.addresses import free_address
from skyrl_train.config.choices import STRATEGIES
from skyrl_train.learner.worker import LearnerWorker
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.support.learner_specs import tiny_spec
from tests.support.rank_processes import run_ranks

RANKS = 4


def anonymous_bytes() -> int:
    """Return the bytes of memory of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def peak_of_loading(path: str, folder: Path, ranks: int = RANKS, strategy: str = "fsdp2", **changes: object) -> int:
    """Return the sum in bytes over ranks of the peak memory of loading, beyond the memory before."""
    port = free_address()[1]
    run_ranks(_load, [(rank, ranks, path, folder, port, strategy, changes) for rank in range(ranks)], folder)
    return sum(int((folder / f"peak_{rank}").read_text()) for rank in range(ranks))


def _load(rank: int, ranks: int, path: str, folder: Path, port: int, strategy: str, changes: dict[str, object]) -> None:
    worker = LearnerWorker(tiny_spec(path, strategy=STRATEGIES[strategy], **changes), rank, ranks)
    torch.ones(8, 8) @ torch.ones(8, 8)  # threads and libraries that any computation starts
    gc.collect()
    before, done, peak = anonymous_bytes(), threading.Event(), [0]

    def sample() -> None:
        while not done.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    sampler = threading.Thread(target=sample)
    sampler.start()
    worker.setup("127.0.0.1", port)
    done.set()
    sampler.join()
    (folder / f"peak_{rank}").write_text(str(max(peak[0], anonymous_bytes()) - before))
    worker.close()


def main() -> None:
    save = partial(save_tiny_model, hidden_size=1536, layers=12, vocab_size=32_000)
    for strategy in sys.argv[1:] or ["fsdp2"]:
        for kind in ("qwen2", "qwen3_moe"):
            for dtype in (torch.float32, torch.bfloat16):
                with TemporaryDirectory() as name:
                    folder = Path(name)
                    path = save(folder / "model", kind, dtype=dtype)
                    files = sum(file.stat().st_size for file in (folder / "model").glob("*.safetensors"))
                    whole = files * 4 // dtype.itemsize
                    peak = peak_of_loading(path, folder, strategy=strategy)
                    print(
                        f"{strategy} {kind} {whole >> 20} MiB in float32, saved in {dtype}: {RANKS} ranks take "
                        f"{peak >> 20} MiB, {peak / whole:.2f} of the model"
                    )


if __name__ == "__main__":
    main()
