"""TorchRL's replay buffer with rows of any length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torchrl.envs import Transform

from skyrl_train.tensordict.buffer import LazyStackStorage, ReplayBuffer, SamplerWithoutReplacement
from tests.support.tensordict_batches import replay_buffer

ROWS: Any = lazy_stack([TensorDict({"tokens": {"full": torch.full((n,), n)}, "text": str(n)}) for n in (1, 2, 3)])


class Doubles(Transform):
    """Halves tokens when they are written, and doubles them when they are read."""

    def forward(self, tensordict: Any) -> Any:
        return tensordict.apply(lambda value: value * 2)

    def _inv_call(self, tensordict: Any) -> Any:
        return tensordict.apply(lambda value: value / 2)


@pytest.mark.defect("replay-buffer-not-indexable")
@pytest.mark.defect("replay-buffer-lacks-storage")
def test_buffer_is_torchrls_and_keeps_ragged_rows(torchrl: Any):
    assert ReplayBuffer is torchrl.data.ReplayBuffer
    buffer = ReplayBuffer(storage=LazyStackStorage(2), sampler=SamplerWithoutReplacement(), batch_size=1)
    buffer.extend(ROWS)
    assert sorted(len(row["tokens", "full"]) for row in buffer[:].unbind(0)) == [2, 3]
    assert sorted(batch["text"][0] for batch in buffer) == ["2", "3"]
    buffer.empty()
    assert len(buffer) == 0


@pytest.mark.defect("replay-buffer-lacks-transforms")
def test_buffer_transforms_apply_to_writes_and_reads():
    buffer = replay_buffer(8, shuffle=False, transform=Doubles())
    buffer.extend(ROWS)
    assert [row["tokens", "full"].tolist() for row in buffer[:].unbind(0)] == [[1], [2, 2], [3, 3, 3]]
