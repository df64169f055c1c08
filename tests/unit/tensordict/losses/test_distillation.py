"""Distillation against the formula, and against TorchRL's own loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDictBase

from skyrl_train.tensordict.losses.distillation import DistillationLoss, k3_kl_token_estimate
from tests.support.edge_case_batches import current_logprobs, edge_case_batch
from tests.support.tensordict_batches import LAYOUTS, TablePolicy, as_tensordict

BATCH = edge_case_batch("regular")


def rows(layout: str) -> TensorDictBase:
    """Conversations with a teacher's log-probs."""
    data = as_tensordict(BATCH, layout)
    return data.rename_key_(("next", "ref_log_probs"), ("next", "teacher_log_probs"))


def student() -> TablePolicy:
    return TablePolicy(current_logprobs(BATCH))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("direction", ["reverse", "forward"])
@pytest.mark.parametrize("assistant_only", [True, False])
def test_loss_is_mean_of_sequence_means(layout: str, direction: str, assistant_only: bool):
    loss = DistillationLoss(student(), kl_direction=direction, assistant_only=assistant_only)
    assert BATCH.ref_logprobs is not None
    counted = BATCH.loss_mask if assistant_only else BATCH.position_ids > 0
    difference = BATCH.ref_logprobs - current_logprobs(BATCH).detach()
    difference = difference if direction == "reverse" else -difference
    values = difference.exp() - 1 - difference
    means = [values[counted & (BATCH.sequence_ids == index)].mean() for index in range(len(BATCH))]
    found = loss(rows(layout))
    torch.testing.assert_close(found.loss_distill.detach(), torch.stack(means).mean())
    torch.testing.assert_close(found.kl_to_teacher, torch.stack(means).mean())
    found.loss_distill.backward()
    assert loss.actor_network.table.grad.any()


def test_reductions_keys_and_class_are_torchrls(torchrl: Any):
    each = DistillationLoss(student(), reduction="none")(rows("ragged")).loss_distill
    assert each.shape == (len(BATCH),)
    total = DistillationLoss(student(), reduction="sum", normalize_by_seq_length=False)
    assert isinstance(total, torchrl.objectives.llm.DistillationLoss)
    total.set_keys(teacher_log_prob=("next", "other", "full"))
    data = rows("ragged").rename_key_(("next", "teacher_log_probs"), ("next", "other"))
    lengths = torch.bincount(BATCH.sequence_ids[BATCH.loss_mask])
    torch.testing.assert_close(total(data).loss_distill, (each * lengths).sum())


def test_unusable_teacher_is_refused():
    with pytest.raises(KeyError, match=r"Teacher log-probs.*RetrieveLogProb"):
        DistillationLoss(student())(as_tensordict(BATCH, "ragged"))
    data = rows("ragged")
    for row in data.unbind(0):
        row["next", "teacher_log_probs", "full"] *= row["masks", "all_assistant_mask"]
    assert DistillationLoss(student())(data).loss_distill.isfinite()
    with pytest.raises(RuntimeError, match="assistant_only=False"):
        DistillationLoss(student(), assistant_only=False)(data)
    wrong: list[dict[str, Any]] = [{"kl_direction": "both"}, {"reduction": "median"}]
    for settings in wrong:
        with pytest.raises(ValueError, match="must be one of"):
            DistillationLoss(student(), **settings)


def test_gradient_remains_far_from_teacher():
    far = torch.tensor([-12.0], requires_grad=True)
    k3_kl_token_estimate(torch.tensor([-0.1]), far).sum().backward()
    assert far.grad is not None and far.grad.item() < -1e4
