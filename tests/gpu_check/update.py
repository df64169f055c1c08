"""Part 6: FSDP2's updates on the device against the same updates in float32 on the CPU.

In the two ways that runs have, of micro-batches that are added up: layers kept and gradients reduced once, and neither.
The bound for bfloat16 is twice the error of the same updates in bfloat16 on the CPU, beyond a floor: a device may round
elsewhere, but not more coarsely.
"""

from __future__ import annotations

import os
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from skyrl_train.config.choices import STRATEGIES
from skyrl_train.config.schema import FSDPConfig
from skyrl_train.data.batch import TrainBatch
from skyrl_train.learner.worker import LearnerWorker, MiniBatch
from skyrl_train.metrics import Metrics
from skyrl_train.testing.tiny_models import save_tiny_model
from tests.gpu_check.report import Report, Setting
from tests.support.learner_specs import policy_batch, tiny_spec

UPDATES = 3
CPU_THREADS = 4
"""Maximum number of CPU threads. With all of a busy machine's, threads wait for one another at every operation."""
ROWS = 3
"""Number of sequences of a micro-batch."""
WAYS = {
    "once": FSDPConfig(reshard_after_forward=False, reduce_once=True),
    "every micro-batch": FSDPConfig(reshard_after_forward=True, reduce_once=False),
}
"""Settings for when gradients are reduced."""
NATS_FLOOR = 1e-4
RATIO_FLOOR = 1e-3


@dataclass(frozen=True)
class Course:
    """The results of a worker."""

    before: Tensor
    """[T] log-probs of the loss's tokens (nats)."""
    after: Tensor
    """[T] the same log-probs after all updates."""
    norms: Tensor
    """[UPDATES] norms of the gradient."""

    def errors(self, exact: Course) -> dict[str, float]:
        return {
            "log-probs before, mean nats": float((self.before - exact.before).abs().mean()),
            "log-probs after, mean nats": float((self.after - exact.after).abs().mean()),
            "gradient norm, ratio less 1": float((self.norms / exact.norms - 1).abs().max()),
        }


def run(setting: Setting, report: Report) -> None:
    """Compare three updates of one rank with a random model, then offload its state and load it again."""
    sizes = {"hidden_size": 64} if setting.toy else {"hidden_size": 256, "layers": 4, "vocab_size": 2048}
    lengths = (9, 4, 12, 9, 2, 7, 9, 5) if setting.toy else (300, 200, 512, 64, 700, 128, 33, 33)
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder), "qwen3", **sizes)
        # The CPU last: its workers make torch deterministic in this process, which a device need not be.
        ours = {
            (way, dtype): course(path, "fsdp2", setting.device, dtype, lengths, way, report)
            for way in WAYS
            for dtype in ("bfloat16", "float32")
        }
        rounded = course(path, "fsdp2", "cpu", "bfloat16", lengths)
        exact = course(path, "single", "cpu", "float32", lengths)
    coarse = rounded.errors(exact)
    for (way, dtype), found in ours.items():
        for name, error in found.errors(exact).items():
            floor = RATIO_FLOOR if "ratio" in name else NATS_FLOOR
            bound = floor + (2 * coarse[name] if dtype == "bfloat16" else 0)
            report.at_most(f"{dtype}, reduced {way}: {name}", error, bound)


def course(
    path: str,
    strategy: str,
    device: str,
    dtype: str,
    lengths: tuple[int, ...],
    way: str = "once",
    report: Report | None = None,
) -> Course:
    threads = min(CPU_THREADS, os.cpu_count() or 1) if device == "cpu" else None
    spec = tiny_spec(
        path, strategy=STRATEGIES[strategy], device=device, dtype=dtype, threads=threads, fsdp_config=WAYS[way]
    )
    worker = LearnerWorker(spec, 0, 1)
    try:
        worker.setup(*worker.address())
        batch = policy_batch(lengths)
        batch = batch.with_tokens(old_logprobs=None, ref_logprobs=worker.forward([batch], 1))
        before, norms = worker.forward([batch], 1)[batch.loss_mask], []
        for _ in range(UPDATES):
            metrics = Metrics()
            parts = batch.split_micro_batches(max_sequences=ROWS)
            metrics.merge(worker.update(MiniBatch(parts, len(parts), int(batch.loss_mask.sum()))))
            norms.append(metrics.flush()["policy/grad_norm"])
        after = worker.forward([batch], 1)[batch.loss_mask]
        if report is not None:
            move(worker, f"{dtype}, reduced {way}", after, batch, report)
        return Course(before, after, torch.tensor(norms))
    finally:
        worker.close()


def move(worker: LearnerWorker, what: str, after: Tensor, batch: TrainBatch, report: Report) -> None:
    """Offload and onload. The log-probs must be the same bits."""
    start = time.perf_counter()
    freed = worker.offload()
    away = time.perf_counter() - start
    start = time.perf_counter()
    worker.onload()
    back = time.perf_counter() - start
    report.note(f"{what}: offload, onload, s; bytes", f"{away:.3g}, {back:.3g}; {freed:,}")
    same = torch.equal(worker.forward([batch], 1)[batch.loss_mask], after)
    report.note(f"{what}: log-probs unchanged by it", same, "True", same)
