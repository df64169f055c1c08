"""200 syncs over memory that two processes share, with copies as late as those of an accelerator."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.weight_sync import ipc
from skyrl_train.weight_sync.buckets import fingerprint, plan_buckets
from skyrl_train.weight_sync.receiver import WeightReceiver
from tests.gpu_check.ipc import SYNCS, LateCopyStore, Trainer, send_overlapped
from tests.support.deferred_copies import DeferredCopyMode, wait_for_copies


@pytest.mark.defect("ipc-page-sent-before-filled")
@pytest.mark.defect("ipc-page-refilled-before-read")
def test_syncs_succeed_with_late_copies(monkeypatch: pytest.MonkeyPatch):
    """Delay the copies; tests/gpu/test_ipc.py does the same on a device, whose streams are late by themselves."""
    monkeypatch.setattr(ipc, "wait_for_copies", wait_for_copies)
    shapes = {f"layer.{index}.weight": (8, 8) for index in range(8)}
    trainer = Trainer(shapes, "cpu", bucket_bytes=2 * 8 * 8 * 2, delayed=True)  # four buckets in two buffers
    loaded = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    receiver = WeightReceiver(LateCopyStore(loaded, "cpu"), "engine")
    trainers, engines = DeferredCopyMode(), DeferredCopyMode()
    trainer.sender.connect("ipc", "", 2, 60.0)
    receiver.connect("ipc", "", 1, 2, 60.0)
    for version in range(1, SYNCS + 1):
        trainer.version = version
        with trainers:
            manifest = trainer.sender.prepare_manifest(version)
        with engines:
            receiver.begin(manifest)
        send_overlapped(plan_buckets(manifest), trainers.inside(trainer.sender.send), engines.inside(receiver.receive))
        with engines:
            receiver.commit(version)
        engines.synchronize()
        assert {name: fingerprint(tensor) for name, tensor in loaded.items()} == {
            spec.name: spec.fingerprint for spec in manifest.tensors
        }
        trainer.sender.mark_delivered(version)
    trainer.sender.close()
    receiver.close()
