"""Part 6: FSDP2's updates on the device against the same updates in float32 on the CPU.

Gradients of micro-batches are accumulated in the two ways of a run: reduced once at the end with unsharded layers, or
after every micro-batch with layers that are resharded. The bound for bfloat16 is a floor plus twice the error of the
same updates in bfloat16 on the CPU: a device may round at other places, but not more coarsely.
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
"""Maximum number of CPU threads. More of them wait for one another at every operation if the machine is busy."""
ROWS = 3
"""Number of sequences of a micro-batch."""
REDUCTIONS = {
    "once": FSDPConfig(reshard_after_forward=False, reduce_once=True),
    "every micro-batch": FSDPConfig(reshard_after_forward=True, reduce_once=False),
}
"""Settings for when gradients are reduced."""
NATS_FLOOR = 1e-4
RATIO_FLOOR = 1e-3


@dataclass(frozen=True)
class UpdateResults:
    """Log-probs and gradient norms of a worker that has run UPDATES updates."""

    before: Tensor
    """[T] log-probs of the loss's tokens (nats)."""
    after: Tensor
    """[T] the same log-probs after all updates."""
    norms: Tensor
    """[UPDATES] norms of the gradient."""

    def errors(self, exact: UpdateResults) -> dict[str, float]:
        """Return the differences from exact results, by name."""
        return {
            "log-probs before, mean nats": float((self.before - exact.before).abs().mean()),
            "log-probs after, mean nats": float((self.after - exact.after).abs().mean()),
            "gradient norm, ratio less 1": float((self.norms / exact.norms - 1).abs().max()),
        }


def run(setting: Setting, report: Report) -> None:
    """Compare three updates of a random model on one rank, then offload its state and load it again."""
    sizes = {"hidden_size": 64} if setting.toy else {"hidden_size": 256, "layers": 4, "vocab_size": 2048}
    lengths = (9, 4, 12, 9, 2, 7, 9, 5) if setting.toy else (300, 200, 512, 64, 700, 128, 33, 33)
    with tempfile.TemporaryDirectory() as folder:
        path = save_tiny_model(Path(folder), "qwen3", **sizes)
        # The CPU workers come last, because they make torch deterministic in this process, which a GPU worker is not.
        device_results = {
            (reduction, dtype): run_updates(path, "fsdp2", setting.device, dtype, lengths, reduction, report)
            for reduction in REDUCTIONS
            for dtype in ("bfloat16", "float32")
        }
        rounded = run_updates(path, "fsdp2", "cpu", "bfloat16", lengths)
        exact = run_updates(path, "single", "cpu", "float32", lengths)
    rounding_errors = rounded.errors(exact)
    for (reduction, dtype), results in device_results.items():
        for name, error in results.errors(exact).items():
            floor = RATIO_FLOOR if "ratio" in name else NATS_FLOOR
            bound = floor + (2 * rounding_errors[name] if dtype == "bfloat16" else 0)
            report.at_most(f"{dtype}, reduced {reduction}: {name}", error, bound)


def run_updates(
    path: str,
    strategy: str,
    device: str,
    dtype: str,
    lengths: tuple[int, ...],
    reduction: str = "once",
    report: Report | None = None,
) -> UpdateResults:
    threads = min(CPU_THREADS, os.cpu_count() or 1) if device == "cpu" else None
    spec = tiny_spec(
        path,
        strategy=STRATEGIES[strategy],
        device=device,
        dtype=dtype,
        threads=threads,
        fsdp_config=REDUCTIONS[reduction],
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
            check_offload(worker, f"{dtype}, reduced {reduction}", after, batch, report)
        return UpdateResults(before, after, torch.tensor(norms))
    finally:
        worker.close()


def check_offload(worker: LearnerWorker, what: str, logprobs: Tensor, batch: TrainBatch, report: Report) -> None:
    """Offload the worker's state and load it again. The log-probs must stay bitwise equal."""
    start = time.perf_counter()
    freed = worker.offload()
    offload_s = time.perf_counter() - start
    start = time.perf_counter()
    worker.onload()
    onload_s = time.perf_counter() - start
    report.note(f"{what}: offload, onload, s; bytes", f"{offload_s:.3g}, {onload_s:.3g}; {freed:,}")
    same = torch.equal(worker.forward([batch], 1)[batch.loss_mask], logprobs)
    report.note(f"{what}: log-probs unchanged by offload and onload", same, "True", same)
