"""TorchRL's general collectors run our environments and wrappers in several processes."""

from __future__ import annotations

from typing import Any

import pytest
from torchrl.collectors import MultiAsyncCollector, MultiSyncCollector

import tests.support.torchrl  # noqa: F401 - before the imports below, with their warnings
from skyrl_train.tensordict import GSM8KEnv, TransformersWrapper
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model

ROWS = [{"question": f"{n} + {n} = ?", "answer": f"#### {2 * n}"} for n in range(1, 5)]


def make_env() -> GSM8KEnv:
    return GSM8KEnv(dataset=ROWS, num_envs=2, shuffle=False)


def make_policy() -> TransformersWrapper:
    return TransformersWrapper(tiny_model(), tokenizer=byte_tokenizer(), generate_kwargs={"max_new_tokens": 4})


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", [MultiSyncCollector, pytest.param(MultiAsyncCollector, marks=pytest.mark.on_demand)])
def test_two_workers_collect_turns(kind: Any):
    collector = kind(
        [make_env] * 2,
        policy_factory=make_policy,
        frames_per_batch=4,
        total_frames=8,
        use_buffers=False,
        trust_policy=True,
    )
    try:
        batches = list(collector)
    finally:
        collector.shutdown()
    assert [batch.numel() for batch in batches] == [4, 4]
    for row in batches[0].reshape(-1).unbind(0):
        assert len(row["log_probs"].response) == len(row["tokens"].response) <= 4
        assert row["next", "done"].all()
