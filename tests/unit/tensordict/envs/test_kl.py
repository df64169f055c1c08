"""Transforms that add log-probs and KL penalties, in TorchRL's ChatEnv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.data import Unbounded
from torchrl.envs import Compose, RewardScaling, Transform, TransformedEnv
from torchrl.envs.llm import ChatEnv

from skyrl_train.algorithms.advantages import grpo
from skyrl_train.tensordict import (
    KLComputation,
    KLRewardTransform,
    LogProbs,
    Masks,
    MCAdvantage,
    RetrieveKL,
    RetrieveLogProb,
    Tokens,
)
from tests.support.chat_answers import answered


class Scorer:
    """A model that gives every token the same log-prob."""

    generate = False
    return_log_probs = True

    def __init__(self, input_mode: str, value: float, log_probs_key: str = "ref_log_probs", pad_output: bool = False):
        self.input_mode, self.value = input_mode, value
        self.log_probs_key, self.pad_output = log_probs_key, pad_output

    def __call__(self, root: TensorDictBase) -> TensorDictBase:
        rows = []
        for row in root.unbind(0):
            length = len(row["tokens"].full) if self.input_mode == "tokens" else 4
            values = torch.full((length,), self.value, requires_grad=torch.is_grad_enabled())
            row.set(self.log_probs_key, LogProbs(full=values, batch_size=[]))
            row.set("masks", Masks(all_assistant_mask=torch.arange(length) >= length - 2, batch_size=[]))
            rows.append(row)
        return lazy_stack(rows)


class GivesReward(Transform):  # type: ignore[misc]
    """A transform that gives every step a reward of 1, in `parts` entries."""

    def __init__(self, parts: int = 1):
        super().__init__()
        self.parts = parts

    def _step(self, tensordict: TensorDictBase, next_tensordict: TensorDictBase) -> TensorDictBase:
        return next_tensordict.set("reward", torch.ones(*next_tensordict.batch_size, self.parts, 1))

    def transform_reward_spec(self, reward_spec: Any) -> Any:
        reward_spec["reward"] = Unbounded((*reward_spec.shape, 1, 1))
        return reward_spec


def spoken(
    lengths: tuple[int, int], *transforms: Transform, assistant: bool = True, reward: bool = True
) -> tuple[TransformedEnv, TensorDictBase]:
    """An environment, and an action of so many tokens after prompts of 3 and 4, with log-probs of -1 for the action."""
    env = TransformedEnv(ChatEnv(batch_size=(2,)), Compose(*([GivesReward()] if reward else []), *transforms))
    root = answered(env.reset(TensorDict(query=["a", "bc"], batch_size=[2])), "x", "y")
    rows = []
    for row, before, length in zip(root.unbind(0), (3, 4), lengths, strict=True):
        full = torch.arange(before + length)
        sampled = full >= before
        row = row.copy().set("tokens", Tokens(prompt=full[:before], full=full, batch_size=[]))
        row.set("log_probs", LogProbs(full=-sampled.float(), batch_size=[]))
        row.set("masks", Masks(all_assistant_mask=full == len(full) - 1 if assistant else None, batch_size=[]))
        rows.append(row)
    return env, lazy_stack(rows)


@pytest.mark.defect("D30")
@pytest.mark.parametrize("assistant_only", [True, False])
def test_kl_is_subtracted_on_the_tokens_that_count(assistant_only: bool):
    transform = KLRewardTransform(Scorer("tokens", -1.5), coef=2.0, assistant_only=assistant_only)
    env, root = spoken((3, 2), transform)
    for row, length in zip(env.step(root).unbind(0), (3, 2), strict=True):
        counted = 1 if assistant_only else length
        total = len(row["tokens"].full)
        kl = torch.tensor([0.0] * (total - counted) + [0.5] * counted).unsqueeze(-1)
        torch.testing.assert_close(row["next", "kl_penalty"], kl)
        on_the_last = torch.tensor([0.0] * (total - 1) + [1.0]).unsqueeze(-1)
        torch.testing.assert_close(row["next", "reward"], on_the_last - 2.0 * kl)
        assert row["next"]["ref_log_probs"].full.tolist() == [-1.5] * total


def test_scores_are_in_the_specs_and_leave_the_next_observation():
    env, root = spoken((3, 2), KLRewardTransform(Scorer("tokens", -1.5)), RewardScaling(0.0, 10.0))
    stepped, following = env.step_and_maybe_reset(root)
    keys = {"reward", "kl_penalty", ("ref_log_probs", "full")}
    assert set(env.full_reward_spec.keys(True, True)) == keys
    for row, scores in zip(stepped["next"].unbind(0), env.full_reward_spec.unbind(0), strict=True):
        assert scores.contains(row.select(*keys))
    assert not keys & set(following.keys(True, True))
    assert [float(row["reward"].sum()) for row in stepped["next"].unbind(0)] == [5.0, 5.0]


def test_returns_do_not_grow_with_length():
    transform = KLRewardTransform(Scorer("tokens", -1.5), coef=0.01)  # 0.5 nats a token
    env, root = spoken((40, 3), transform, assistant=False)
    stepped = lazy_stack(list(env.step(root).unbind(0)))
    returns = [1.0 - 0.01 * 0.5 * length for length in (40, 3)]
    for row, expected in zip(stepped.unbind(0), returns, strict=True):
        assert float(row["next", "reward"].sum()) == pytest.approx(expected)
    for row in stepped.unbind(0):
        row.set("group", torch.tensor(0))
        row["next"].set("done", torch.tensor([True]))
    found = MCAdvantage(2, prompt_key="group").inv(stepped.unsqueeze(1))  # [B, T]
    assert found is not None
    advantages = grpo(
        torch.tensor(returns), torch.zeros(2, dtype=torch.int64), torch.ones(2).bool(), grpo_norm_by_std=True
    )
    for row, advantage in zip(found.unbind(0), advantages, strict=True):
        torch.testing.assert_close(row["advantage"].unique(), advantage.reshape(1), rtol=1e-3, atol=1e-3)


def test_reward_per_token_keeps_its_place():
    penalties = [KLRewardTransform(Scorer("tokens", -1.5), coef=coef) for coef in (1.0, 2.0)]
    env, root = spoken((3, 2), *penalties, assistant=False)
    for row, length in zip(env.step(root)["next"].unbind(0), (3, 2), strict=True):
        assert float(row["reward"].sum()) == pytest.approx(1.0 - 3.0 * 0.5 * length)
    env, root = spoken((3, 2), GivesReward(2), penalties[0].clone(), assistant=False)
    with pytest.raises(ValueError, match="2 values for"):
        env.step(root)


@pytest.mark.defect("D30")
@pytest.mark.parametrize(
    ("change", "reward", "error", "words"),
    [
        (lambda row: row.set("log_probs", LogProbs(batch_size=[])), True, KeyError, "'full'.* is missing"),
        (lambda row: row["tokens"].set("prompt", None), True, KeyError, "all_assistant_mask"),
        (lambda row: None, False, KeyError, "'reward' is missing"),
    ],
)
def test_missing_inputs_of_a_penalty_are_named(
    change: Callable[..., Any], reward: bool, error: type[Exception], words: str
):
    env, root = spoken((3, 2), KLRewardTransform(Scorer("tokens", -1.5)), assistant=False, reward=reward)
    change(root.unbind(0)[0])
    with pytest.raises(error, match=words):
        env.step(root)


def test_penalty_may_only_be_written():
    transform = KLRewardTransform(ref_model_factory=lambda: Scorer("tokens", -1.5), add_to_reward=False)
    env, root = spoken((3, 2), transform, assistant=False)
    following = env.step(root)["next"]
    assert [float(row["kl_penalty"].sum()) for row in following.unbind(0)] == [1.5, 1.0]
    assert following["reward"].flatten().tolist() == [1.0, 1.0]


def test_unsuitable_models_are_refused():
    generates = Scorer("tokens", 0.0)
    generates.generate = True
    for make in (KLRewardTransform, RetrieveLogProb):
        with pytest.raises(ValueError, match="generate=False"):
            make(generates)
    with pytest.raises(ValueError, match="tokens"):
        KLRewardTransform(Scorer("history", 0.0))
    with pytest.raises(ValueError, match="history"):
        RetrieveLogProb(Scorer("tokens", 0.0))
    with pytest.raises(ValueError, match="exactly one"):
        KLRewardTransform()
    with pytest.raises(ValueError, match="exactly one of ref_model"):
        RetrieveKL()
    with pytest.raises(ValueError, match="same log_probs_key"):
        RetrieveKL(Scorer("history", 0.0), Scorer("history", 0.0))
    with pytest.raises(ValueError, match="pad_output mismatch"):
        RetrieveKL(Scorer("history", 0.0, "gen", pad_output=True), Scorer("history", 0.0))
    for kind in (KLRewardTransform, RetrieveKL):
        with pytest.raises(ValueError, match="use_ray_service"):
            kind(ref_model=Scorer("history", 0.0), use_ray_service=True)


@pytest.mark.parametrize("detach", [True, False])
def test_log_probs_of_a_reference_are_written_next(detach: bool):
    env = TransformedEnv(ChatEnv(batch_size=(2,)), RetrieveLogProb(Scorer("history", -3.0), detach=detach))
    root = env.reset(TensorDict(query=["a", "b"], batch_size=[2]))
    stepped, following = env.step_and_maybe_reset(answered(root, "ok", "ok"))
    for row in stepped["next"].unbind(0):
        assert row["ref_log_probs"].full.tolist() == [0.0, 0.0, -3.0, -3.0]
        assert row["ref_log_probs"].full.requires_grad != detach
    assert "ref_log_probs" not in {*stepped.keys(), *following.keys()}


@pytest.mark.defect("logprobs-require-next")
def test_log_probs_can_be_written_without_a_next_step():
    env = TransformedEnv(ChatEnv(batch_size=(2,)))
    data = answered(env.reset(TensorDict(query=["a", "b"], batch_size=[2])), "ok", "ok")
    stacked = lazy_stack([data.copy(), data.copy()], 1)
    for given in (data, stacked, lazy_stack(list(data.copy().unbind(0)))):
        found = RetrieveLogProb(Scorer("history", -3.0))(given)
        assert found is given and "next" not in set(found.keys())
        for row in (found if found.ndim == 1 else found[:, 1]).unbind(0):
            assert row["ref_log_probs"].full.tolist() == [0.0, 0.0, -3.0, -3.0]
    with pytest.raises(KeyError, match="next"):
        KLRewardTransform(Scorer("tokens", -3.0))(data)


@pytest.mark.parametrize("sampled", [True, False])
def test_kl_of_two_models_or_of_the_sampling_policy(sampled: bool):
    reference = Scorer("history", -1.5)
    gen: Any = "from_collector" if sampled else Scorer("history", -1.0, "gen_log_probs")
    transform = RetrieveKL(gen, reference, coeff=2.0)
    env, root = spoken((3, 2), transform)
    if sampled:  # the ids that the reference renders have to be those that the policy sampled
        root = lazy_stack(
            [row.copy().set("log_probs", LogProbs(full=-torch.ones(4), batch_size=[])) for row in root.unbind(0)]
        )
        for row in root.unbind(0):
            row.set("masks", Masks(all_assistant_mask=torch.arange(4) >= 2, batch_size=[]))
    stepped = env.step(root)
    for row in stepped["next"].unbind(0):
        assert row["kl_penalty"].tolist() == [0.0, 0.0, 0.5, 0.5]
        assert row["reward"].flatten().tolist() == [0.0, 0.0, -1.0, 0.0]
    assert set(env.full_reward_spec.keys(True, True)) >= {"reward", "kl_penalty", ("ref_log_probs", "full")}


def test_kl_of_given_log_probs_needs_both():
    values = {"gen": LogProbs(full=torch.tensor([-1.0, torch.nan, -2.0])), "ref": LogProbs(full=torch.full((3,), -2.0))}
    data = TensorDict(next=TensorDict(**values, reward=torch.ones(1, 1)))
    following = KLComputation(("gen", "full"), ("ref", "full"), kl_key="kl", coeff=0.5)(data)["next"]
    assert following["kl"].tolist() == [1.0, 0.0, 0.0]
    assert following["reward"].flatten().tolist() == [-0.5, 0.0, 1.0]
    with pytest.raises(ValueError, match="no log-probs under"):
        KLComputation(("gen", "full"), ("other", "full"))(data)
    data["next"].set("other", LogProbs(full=torch.zeros(2)))
    with pytest.raises(ValueError, match=r"\(3,\), the reference of \(2,\)"):
        KLComputation(("gen", "full"), ("other", "full"))(data)
