"""What routers choose, with weights that they make of it themselves, and what is counted of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from skyrl_train.models.routing import Routers, load_metrics
from skyrl_train.models.token_scorer import TokenScorer
from skyrl_train.testing.tiny_models import tiny_model
from tests.support.double_precision import double_precision
from tests.support.padded_reference import grouped_batch

KINDS = ("qwen3_moe", "gpt_oss", "deepseek_v3", "mixtral")


def scorer_of(kind: str, dtype: torch.dtype = torch.float32, checkpointing: bool = False) -> TokenScorer:
    model = tiny_model(kind, dtype=dtype).train()
    model.set_experts_implementation("eager")  # the default has no kernel for float64
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    scorer = TokenScorer(model)
    scorer.routers.keeps_choices = True
    return scorer


def score(scorer: TokenScorer, routing: Tensor | None = None, share: bool = False) -> tuple[Tensor, Tensor]:
    """Log-probs, and the choices [T, L, k]."""
    batch = grouped_batch([(6, [4, 9, 4, 1]), (3, [2])])
    repeated = batch.repeated_prompts() if share else None
    tensors = (batch.input_ids, batch.position_ids, batch.offsets, batch.temperature, batch.loss_mask)
    logprobs = scorer(*tensors, False, repeated, routing).logprobs
    assert scorer.choices is not None
    return logprobs, scorer.choices


def gradients(scorer: TokenScorer, logprobs: Tensor) -> dict[str, Tensor]:
    scorer.zero_grad()
    logprobs.sum().backward()
    return {name: p.grad.clone() for name, p in scorer.named_parameters() if p.grad is not None}


def others(choices: Tensor, experts: int = 4) -> Tensor:
    """Experts that are not the chosen ones, but as many of them."""
    return torch.stack([(choices[..., 0] + 1) % experts, (choices[..., 0] + 3) % experts], -1)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [False, True])
def test_a_router_takes_the_experts_that_it_is_given(kind: str, share: bool) -> None:
    with double_precision():
        scorer = scorer_of(kind, torch.float64)
        own, choices = score(scorer, share=share)
        layers = 1 if kind == "deepseek_v3" else 2  # of which the first one has no experts
        assert choices.shape == (len(own), layers, 2)
        again, same = score(scorer, choices, share)
        torch.testing.assert_close(again, own)
        assert torch.equal(same.sort(-1).values, choices.sort(-1).values)
        changed, taken = score(scorer, others(choices), share)
        assert torch.equal(taken, others(choices))
        assert float((changed - own).detach().abs().max()) > 1e-3
        open_ones = torch.where(torch.arange(len(own))[:, None, None] % 2 == 0, choices, -1)
        left_to_it, _ = score(scorer, open_ones, share)
        torch.testing.assert_close(left_to_it, own)


def test_weights_of_given_experts_are_made_as_the_model_makes_its_own() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.float64)
    router: Any = Routers(model).modules[0]
    hidden = torch.randn(5, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    given = torch.tensor([[3, 1], [0, 2], [2, 1], [1, 0], [3, 0]])
    routers = Routers(model)
    with routers.running(given.unsqueeze(1).expand(-1, 2, -1)), double_precision():
        _, weights, indices = router(hidden)
    assert torch.equal(indices, given)
    shares = linear(hidden, router.weight).softmax(-1).gather(1, given)
    wanted = shares / shares.sum(-1, keepdim=True) if router.norm_topk_prob else shares
    torch.testing.assert_close(weights, wanted)


def test_routers_compute_in_float32_in_a_model_of_bfloat16() -> None:
    model = tiny_model("qwen3_moe", dtype=torch.bfloat16)
    plain: Any = tiny_model("qwen3_moe", dtype=torch.bfloat16).model.layers[0].mlp.gate
    router: Any = Routers(model).modules[0]
    hidden = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = linear(hidden.float(), router.weight.float())
    assert torch.equal(router(hidden)[0], exact)
    assert not torch.equal(plain(hidden)[0].float(), exact)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_is_computed_again_sends_tokens_where_they_were_sent(kind: str) -> None:
    with double_precision():
        wanted: dict[str, Tensor] = {}
        for checkpointing in (False, True):
            scorer = scorer_of(kind, torch.float64, checkpointing)
            given = others(score(scorer)[1])
            found = gradients(scorer, score(scorer, given)[0])
            wanted = wanted or found
            assert found.keys() == wanted.keys()
            for name, gradient in found.items():
                torch.testing.assert_close(gradient, wanted[name], msg=name)


def test_tokens_are_counted_once_even_if_layers_are_computed_again() -> None:
    scorer = scorer_of("qwen3_moe", checkpointing=True)
    scorer.routers.start_counting(torch.device("cpu"))
    logprobs, choices = score(scorer)
    gradients(scorer, logprobs)
    assert scorer.routers.counts is not None
    wanted = torch.stack([torch.bincount(choices[:, layer].flatten().long(), minlength=4) for layer in range(2)])
    assert torch.equal(scorer.routers.counts, wanted)
    score(scorer)
    assert torch.equal(scorer.routers.counts, 2 * wanted)


def test_the_load_is_that_of_the_busiest_expert_of_each_layer() -> None:
    counts = torch.tensor([[4, 4, 4, 4], [8, 8, 0, 0]])
    assert load_metrics(counts) == {"router_load_max": 1.5, "router_unused": 0.25}


def test_a_model_without_experts_has_no_routers() -> None:
    routers = Routers(tiny_model())
    routers.start_counting(torch.device("cpu"))
    assert (routers.modules, routers.counts, routers.shape, routers.num_experts) == ([], None, (0, 0), 0)
