"""Tests that routers record, replay and count experts, with weights from the routers' own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from skyrl_train.errors import ConfigError
from skyrl_train.models import routing
from skyrl_train.models.logprob_model import LogprobModel
from skyrl_train.models.routing import Routers
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.padded_reference import grouped_batch
from tests.support.routing_reference import explicit_router_aux_loss

KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral", "granitemoehybrid")


def make_model(kind: str, dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> LogprobModel:
    model = tiny_model(kind, dtype=dtype).train()
    model.set_experts_implementation("eager")  # the default has no kernel for float64
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    logprob_model = LogprobModel(model)
    logprob_model.routers.record_routed_experts = True
    return logprob_model


def compute_logprobs(
    model: LogprobModel, replayed_experts: Tensor | None = None, share: bool = False
) -> tuple[Tensor, Tensor]:
    """Return log-probs [T], and the routed experts [T, L, k]."""
    batch = grouped_batch([(6, [4, 9, 4, 1]), (3, [2])])
    repeated = batch.shared_prompt_lengths() if share else None
    logprobs = model(model.lay_out(batch, repeated, replayed_experts)).logprobs
    assert model.routed_experts is not None
    return logprobs, model.routed_experts


def gradients(model: LogprobModel, logprobs: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    logprobs.sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def choose_other_experts(choices: Tensor, experts: int = 4) -> Tensor:
    """Return as many experts as `choices` has, none of which are the first choices."""
    return torch.stack([(choices[..., 0] + 1) % experts, (choices[..., 0] + 3) % experts], -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [False, True])
def test_router_replays_experts(kind: str, share: bool) -> None:
    with double_precision():
        model = make_model(kind, torch.float64)
        own, choices = compute_logprobs(model, share=share)
        layers = 1 if kind == "deepseek_v3" else 2  # the first layer of deepseek_v3 has no experts
        assert choices.shape == (len(own), layers, 2)
        replayed, replayed_experts = compute_logprobs(model, choices, share)
        torch.testing.assert_close(replayed, own)
        assert torch.equal(replayed_experts.sort(-1).values, choices.sort(-1).values)
        changed, changed_experts = compute_logprobs(model, choose_other_experts(choices), share)
        assert torch.equal(changed_experts, choose_other_experts(choices))
        assert float((changed - own).detach().abs().max()) > 1e-3
        partly_open = torch.where(torch.arange(len(own))[:, None, None] % 2 == 0, choices, -1)
        partly_replayed, _ = compute_logprobs(model, partly_open, share)
        torch.testing.assert_close(partly_replayed, own)


def test_replayed_experts_get_the_model_weights() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.float64)
    router: Any = Routers(model).modules[0]
    hidden = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    experts = torch.tensor([[3, 1], [0, 2], [2, 1], [1, 0], [3, 0]])
    routers = Routers(model)
    with routers.forward_pass(experts.unsqueeze(1).expand(-1, 2, -1)), double_precision():
        _, weights, indices = router(hidden)
    assert torch.equal(indices, experts)
    probabilities = linear(hidden, router.weight).softmax(-1).gather(1, experts)
    expected = probabilities / probabilities.sum(-1, keepdim=True) if router.norm_topk_prob else probabilities
    torch.testing.assert_close(weights, expected)


def test_bfloat16_model_routes_in_float32() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    unpatched: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16).model.layers[0].mlp.gate
    router: Any = Routers(model).modules[0]
    hidden = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = linear(hidden.float(), router.weight.float())
    assert torch.equal(router(hidden)[0], exact)
    assert not torch.equal(unpatched(hidden)[0].float(), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_recomputed_layer_replays_its_experts(kind: str) -> None:
    with double_precision():
        expected: dict[str, Tensor] = {}
        for checkpointing in (False, True):
            model = make_model(kind, torch.float64, checkpointing)
            experts = choose_other_experts(compute_logprobs(model)[1])
            actual = gradients(model, compute_logprobs(model, experts)[0])
            expected = expected or actual
            assert actual.keys() == expected.keys()
            for name, gradient in actual.items():
                torch.testing.assert_close(gradient, expected[name], msg=name)


def test_recomputed_layers_count_tokens_once() -> None:
    model = make_model("qwen3_moe", checkpointing=True)
    model.routers.reset_load_metrics()
    logprobs, choices = compute_logprobs(model)
    gradients(model, logprobs)
    expected = torch.cat([torch.bincount(choices[:, layer].flatten().long(), minlength=4) for layer in range(2)])
    counted: list[Tensor] = []

    def sum_over_ranks(counts: Tensor) -> Tensor:
        counted.append(counts)
        return torch.tensor([4, 4, 4, 4, 8, 8, 0, 0])  # the sum over all ranks

    load_metrics = model.routers.collect_load_metrics(sum_over_ranks)
    assert load_metrics == {"router_load_max": 1.5, "unused_expert_fraction": 0.25}
    assert torch.equal(counted[0], expected)
    compute_logprobs(model)
    assert model.routers.collect_load_metrics(sum_over_ranks) == {}, "counting has stopped"


class UnsupportedRouter(torch.nn.Module):
    """A router that returns something else than supported routers."""

    top_k, num_experts = 2, 4

    def __init__(self, route: Any):
        super().__init__()
        self.route = route

    def forward(self, hidden: Tensor) -> Any:
        return self.route(hidden)


@pytest.mark.parametrize(
    "route",
    [
        lambda hidden: (hidden.topk(2).indices, hidden),
        lambda hidden: (hidden, hidden.topk(2).values),
        lambda hidden: (hidden, hidden[:, :2], hidden.argsort()[:, :2]),
    ],
    ids=["no weights", "no indices", "no top k"],
)
def test_unsupported_router_cannot_replay(route: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    router = UnsupportedRouter(route)
    monkeypatch.setattr(routing, "_routers", lambda model: iter([(0, router)]))
    routers, hidden = Routers(tiny_model()), torch.randn(3, 4)
    routers.reset_load_metrics()
    with routers.forward_pass():
        router(hidden)
    with (
        routers.forward_pass(torch.zeros(3, 1, 2, dtype=torch.int16)),
        pytest.raises(ConfigError, match="UnsupportedRouter chooses"),
    ):
        router(hidden)


def test_dense_model_has_no_routers() -> None:
    routers = Routers(tiny_model())
    routers.reset_load_metrics()
    assert (routers.modules, routers.num_layers_and_top_k, routers.collect_load_metrics(lambda counts: counts)) == (
        [],
        (0, 0),
        {},
    )


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("checkpointing", [None, {"use_reentrant": False}, {"use_reentrant": True}])
@pytest.mark.parametrize("kind", KINDS)
def test_router_aux_loss_gradient_ignores_micro_batch_size(
    kind: str, checkpointing: dict[str, bool] | None, share: bool
) -> None:
    batch = grouped_batch([(6, [4, 9, 4, 1]), (3, [2])])
    with double_precision():
        model: Any = tiny_model(kind, dtype=torch.float64).train()
        model.set_experts_implementation("eager")
        model.set_attn_implementation("eager")
        expected_loss = explicit_router_aux_loss(model, batch, 0.5)
        expected_loss.backward()
        expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        for size in (1, 3, len(batch)):
            logprob_model = make_model(kind, torch.float64)
            if checkpointing is not None:
                logprob_model.model.gradient_checkpointing_enable(checkpointing)
            logprob_model.routers.reset_load_metrics()
            logprob_model.router_aux_loss_weight = 0.5 / int(batch.loss_mask.sum())
            for micro_batch in batch.split_micro_batches(max_sequences=size):
                shared = micro_batch.shared_prompt_lengths() if share else None
                scores = logprob_model(logprob_model.lay_out(micro_batch, shared))
                (scores.logprobs * 0.0).sum().backward()
            assert logprob_model.routers.collect_load_metrics(lambda x: x)["router_aux_loss"] == pytest.approx(
                expected_loss.item(), rel=1e-6
            )
            for name, parameter in logprob_model.model.named_parameters():
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                torch.testing.assert_close(gradient, expected.get(name, torch.zeros_like(gradient)), msg=name)
