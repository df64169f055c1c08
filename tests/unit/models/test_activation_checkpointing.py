"""Selective checkpointing: what is computed again in backward, and that gradients keep their bits."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.metrics import Metrics
from skyrl_train.models import flash_attention, ragged_attention
from skyrl_train.models.activation_checkpointing import SELECTIVE, enable_checkpointing
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.testing.tiny_models import HYBRID_KINDS, tiny_model
from tests.support.learner_specs import FULL_OBJECTIVE, policy_batch
from tests.unit.models.test_flash_attention import reference_backward, reference_forward

KINDS = ("qwen2", "gemma2", "gpt_oss", "qwen3_moe", "qwen3_5_text")
OTHER_KINDS = ("qwen3", "llama", "mistral", "gemma", "phi3", "olmo2", "glm4", "deepseek_v3", *HYBRID_KINDS)


class OperatorCounter(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def run_update(kind: str, mode: bool | str, *, frozen: bool = False) -> tuple[dict[str, Tensor], Counter[str]]:
    """Return the gradients of an update, and the operators that its forward and backward passes ran."""
    torch.manual_seed(0)
    model = tiny_model(kind, layers=4)
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    enable_checkpointing(model, mode, use_reentrant=False)
    policy, batch = LogprobModel(model).train(), policy_batch((9, 4, 12, 9))
    with OperatorCounter() as operators:
        logprobs, entropy = policy(policy.lay_out(batch), True)
        FULL_OBJECTIVE(batch, logprobs, entropy, int(batch.loss_mask.sum()), Metrics()).backward()
    gradients = {name: weight.grad for name, weight in policy.named_parameters() if weight.grad is not None}
    return gradients, operators.counts


def assert_equal_bits(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert actual.keys() == expected.keys() and expected
    assert [name for name in expected if not torch.equal(actual[name], expected[name])] == []


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.on_demand) for kind in OTHER_KINDS)])
def test_checkpointing_keeps_the_gradient_bits(kind: str) -> None:
    expected, _ = run_update(kind, False)
    for mode in (True, SELECTIVE):
        assert_equal_bits(run_update(kind, mode)[0], expected)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3_moe"])
def test_selective_recomputes_neither_products_nor_attention(kind: str) -> None:
    kept, selective, recomputed = (run_update(kind, mode)[1] for mode in (False, SELECTIVE, True))
    attention = "aten::_scaled_dot_product_flash_attention_for_cpu"
    for operator in ("aten::mm", attention):
        assert selective[operator] == kept[operator] < recomputed[operator]
    elementwise = "aten::silu"
    assert kept[elementwise] < selective[elementwise] == recomputed[elementwise]


@pytest.mark.parametrize("frozen", [False, True])
def test_selective_keeps_fused_attention(frozen: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    class Attend(torch.autograd.Function):
        """A kernel that PyTorch's operators do not show."""

        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, starts: Tensor, scale: float) -> Tensor:
            calls.append(1)
            output, lse, _ = reference_forward(query, key, value, starts, starts, 0, 0, False, scale, (-1, 0))
            ctx.save_for_backward(query, key, value, output, lse)
            ctx.starts, ctx.scale = starts, scale
            return output

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
            options = (ctx.starts, ctx.starts, 0, 0, False, None, ctx.scale, (-1, 0))
            return *reference_backward(gradient, *ctx.saved_tensors, *options), None, None

    def kernel(query: Tensor, key: Tensor, value: Tensor, *, cu_seqlens_q: Tensor, **options: Any) -> Tensor:
        result: Tensor = Attend.apply(query, key, value, cu_seqlens_q, options["softmax_scale"])
        return result

    fused = flash_attention.flash_attention("fused", kernel)
    monkeypatch.setattr(ragged_attention, "get_flash_kernel", lambda query, value, **features: fused)
    expected, _ = run_update("qwen2", False, frozen=frozen)
    for mode, num_passes in ((True, 3), (SELECTIVE, 2)):  # the check of the loaded model is the first
        calls.clear()
        assert_equal_bits(run_update("qwen2", mode, frozen=frozen)[0], expected)
        assert len(calls) == 4 * num_passes
