"""200 syncs over pages that two processes share, whose copies are as late as an accelerator's may be."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.weight_sync import ipc
from skyrl_train.weight_sync.buckets import fingerprint, plan_buckets
from skyrl_train.weight_sync.receiver import WeightReceiver
from tests.gpu_check.ipc import SYNCS, CopiesLate, Trainer, overlapped
from tests.support.deferred_copies import DeferredCopyMode, wait_for_copies


@pytest.mark.defect("pages-handed-over-before-they-are-filled")
@pytest.mark.defect("pages-filled-before-they-are-read")
def test_no_sync_goes_wrong_although_both_ends_copy_late(monkeypatch: pytest.MonkeyPatch):
    """tests/gpu/test_ipc.py is the same on a device, whose streams are late by themselves."""
    monkeypatch.setattr(ipc, "wait_for_copies", wait_for_copies)
    shapes = {f"layer.{index}.weight": (8, 8) for index in range(8)}
    trainer = Trainer(shapes, "cpu", bucket_bytes=2 * 8 * 8 * 2, delayed=True)  # four buckets on two pages
    held = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}
    receiver = WeightReceiver(CopiesLate(held, "cpu"), "engine")
    trainers, engines = DeferredCopyMode(), DeferredCopyMode()
    trainer.sender.connect("ipc", "", 2, 60.0)
    receiver.connect("ipc", "", 1, 2, 60.0)
    for version in range(1, SYNCS + 1):
        trainer.version = version
        with trainers:
            manifest = trainer.sender.prepare_manifest(version)
        with engines:
            receiver.begin(manifest)
        overlapped(plan_buckets(manifest), trainers.inside(trainer.sender.send), engines.inside(receiver.receive))
        with engines:
            receiver.commit(version)
        engines.synchronize()
        assert {name: fingerprint(tensor) for name, tensor in held.items()} == {
            spec.name: spec.fingerprint for spec in manifest.tensors
        }
        trainer.sender.mark_delivered(version)
    trainer.sender.close()
    receiver.close()
