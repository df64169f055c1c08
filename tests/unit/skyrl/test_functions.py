"""SkyRL's functions and registries at SkyRL's import paths."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
import torch

from skyrl_train.algorithms.kl import k3
from skyrl_train.algorithms.registry import advantage_estimators, policy_losses
from skyrl_train.data.chat import render_conversation, render_prompt
from skyrl_train.errors import ConfigError
from skyrl_train.generators.utils import (
    apply_overlong_filtering,
    concatenate_generator_outputs,
    get_metrics_from_generator_output,
    get_response_ids_and_loss_mask_from_messages,
    get_rollout_metrics,
)
from skyrl_train.skyrl import registries
from skyrl_train.testing.tiny_models import byte_tokenizer
from skyrl_train.training_batch import TrainingInputBatch
from skyrl_train.utils.ppo_utils import (
    AdvantageEstimator,
    AdvantageEstimatorRegistry,
    PolicyLossRegistry,
    compute_approx_kl,
    masked_mean,
    masked_whiten,
    normalize_advantages_dict,
    reduce_loss,
    register_advantage_estimator,
)

VALUES = torch.tensor([[1.0, 2.0, 9.0], [4.0, 9.0, 9.0]], dtype=torch.float64)
MASK = torch.tensor([[1, 1, 0], [1, 0, 0]])


@pytest.fixture
def unregister_after_test() -> Iterator[None]:
    yield
    for name in ("mine", "other"):
        advantage_estimators.unregister(name)
        policy_losses.unregister(name)


def test_means_and_reductions_match_known_values():
    assert masked_mean(VALUES, MASK) == pytest.approx(7 / 3)
    assert masked_mean(VALUES, MASK, dim=-1).tolist() == [1.5, 4.0]
    assert masked_mean(VALUES, torch.zeros_like(MASK)) == 0
    assert reduce_loss(VALUES, MASK, "token_mean") == pytest.approx(7 / 3)
    assert reduce_loss(VALUES, MASK, "sequence_mean") == pytest.approx(2.75)
    assert reduce_loss(VALUES, MASK, "seq_mean_token_sum_norm", 10) == pytest.approx(0.35)
    with pytest.raises(ValueError, match="max_seq_len"):
        reduce_loss(VALUES, MASK, "seq_mean_token_sum_norm")
    with pytest.raises(ValueError, match="must be token_mean"):
        reduce_loss(VALUES, MASK, "mean")


def test_normalized_values_have_mean_0_and_variance_1():
    normalized = masked_whiten(VALUES, MASK)[MASK.bool()]
    assert normalized.mean() == pytest.approx(0, abs=1e-12) and normalized.var() == pytest.approx(1, rel=1e-6)
    data = TrainingInputBatch(advantages=VALUES.clone(), response_mask=MASK)
    normalized = normalize_advantages_dict(data)["advantages"][MASK.bool()]
    assert normalized.mean() == pytest.approx(0, abs=1e-12) and normalized.var(unbiased=False) == pytest.approx(1)
    with pytest.raises(ValueError, match="selects 1 values"):
        masked_whiten(VALUES, torch.tensor([[1, 0, 0], [0, 0, 0]]))


def test_kl_estimators_match_algorithms():
    policy, base = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([-1.5, -1.0, -0.5])
    mask = torch.tensor([True, True, False])
    torch.testing.assert_close(compute_approx_kl(policy, base, mask, "k3"), k3(policy, base, mask))
    assert compute_approx_kl(policy, base, kl_estimator_type="k1").tolist() == [0.5, -1.0, 0.0]
    assert compute_approx_kl(policy, base, kl_estimator_type="abs").tolist() == [0.5, 1.0, 0.0]
    assert compute_approx_kl(policy, base, kl_estimator_type="k2").tolist() == [0.125, 0.5, 0.0]
    with pytest.raises(ValueError, match="must be k1"):
        compute_approx_kl(policy, base, kl_estimator_type="k4")


def test_registries_are_those_of_the_configuration(unregister_after_test: None):
    @register_advantage_estimator("mine")
    def mine(token_level_rewards: torch.Tensor, **others: object) -> None: ...

    PolicyLossRegistry.register("mine", mine)
    assert (
        advantage_estimators.get("mine") is mine is policy_losses.get("mine") is AdvantageEstimatorRegistry.get("mine")
    )
    assert "mine" in PolicyLossRegistry.list_available()
    assert AdvantageEstimatorRegistry.get(AdvantageEstimator.GRPO) is advantage_estimators.get("grpo")
    with pytest.raises(ConfigError, match="already registered"):
        PolicyLossRegistry.register("mine", print)
    PolicyLossRegistry.unregister("mine")
    assert "mine" not in PolicyLossRegistry.list_available()


def test_task_loads_registrations_of_program(unregister_after_test: None, monkeypatch: pytest.MonkeyPatch):
    advantage_estimators.register("mine")(lambda token_level_rewards: torch.tensor(7))
    sent = registries._pack_registrations()
    assert [name for _, name, _ in pickle.loads(sent)].count("mine") == 1
    advantage_estimators.unregister("mine")
    monkeypatch.setattr(registries, "get_from_driver", lambda name: sent)
    registries.load_program_registrations()
    registries.load_program_registrations()  # the second call changes nothing
    assert advantage_estimators.get("mine")(0) == 7


def test_messages_encode_with_mask_of_assistant_tokens():
    tokenizer = byte_tokenizer()
    prompt = [{"role": "user", "content": "2 + 2 ="}]
    rest = [
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "No."},
        {"role": "assistant", "content": "4"},
    ]
    ids, mask, _ = get_response_ids_and_loss_mask_from_messages(rest, tokenizer)
    conversation, conversation_mask = render_conversation(tokenizer, [*prompt, *rest])
    assert conversation[-len(ids) :] == ids
    assert [bool(value) for value in mask] == conversation_mask[-len(mask) :]
    header = len(render_prompt(tokenizer, prompt)) - (len(conversation) - len(ids))
    sampled = sum(mask) // 2
    _, _, logprobs = get_response_ids_and_loss_mask_from_messages(rest, tokenizer, [[-1.0] * sampled, [-2.0] * sampled])
    assert logprobs is not None and len(logprobs) == len(ids)
    assert logprobs[header : header + sampled] == [-1.0] * sampled and sum(logprobs) == -3.0 * sampled
    with pytest.raises(ValueError, match="assistant_logprobs\\[0\\]: has 1 values"):
        get_response_ids_and_loss_mask_from_messages(rest, tokenizer, [[-1.0], [-1.0]])
    with pytest.raises(ValueError, match="role='system'"):
        get_response_ids_and_loss_mask_from_messages([{"role": "system", "content": "x"}], tokenizer)


def test_metrics_match_known_values():
    output = {"rewards": [1.0, 0.0, -1.0, 0.0], "response_ids": [[1], [1, 2], [1, 2, 3], [1] * 6]}
    metrics = get_metrics_from_generator_output(output, ["a", "a", "b", "b"])  # type: ignore[arg-type]
    assert metrics == {"avg_score": 0.0, "pass_at_n": 0.5, "mean_positive_reward": 0.25}
    by_token = {"rewards": [[0.5, 0.0], [0.0, 1.0], [0.0], [-1.0]]}
    assert get_metrics_from_generator_output(by_token, ["a", "a", "b", "b"])["pass_at_n"] == 0.5  # type: ignore[arg-type]
    numbers = get_rollout_metrics(output["response_ids"], output["rewards"], [{"x": 1}, {"x": 3}, {}, {}], ["e"] * 4)  # type: ignore[arg-type]
    assert numbers["generate/avg_num_tokens"] == 3 and numbers["generate/max_num_tokens"] == 6
    assert numbers["generate/avg_tokens_non_zero_rewards"] == 1 and numbers["generate/avg_tokens_zero_rewards"] == 4
    assert numbers["environment/x"] == 2
    assert apply_overlong_filtering([[1, 1], [1]], [[5, 2], [5]], 2) == [[1, 1], [0]]


def test_concatenation_keeps_custom_fields():
    output = {
        "prompt_token_ids": [[1]],
        "response_ids": [[2, 3]],
        "rewards": [1.0],
        "loss_masks": [[1, 1]],
        "stop_reasons": ["stop"],
        "rollout_logprobs": None,
        "mine": [4],
    }
    both = concatenate_generator_outputs([output, output])  # type: ignore[list-item]
    assert both["response_ids"] == [[2, 3], [2, 3]] and both["mine"] == [4, 4]  # type: ignore[typeddict-item]
    assert both["rollout_metrics"] is not None and both["rollout_logprobs"] is None
    with pytest.raises(ValueError, match="rollout_logprobs"):
        concatenate_generator_outputs([output, output | {"rollout_logprobs": [[0.0, 0.0]]}])  # type: ignore[list-item]
