"""Environments and wrappers combined, over an engine that answers from a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torchrl.envs import Transform

from skyrl_train.data.chat import render_prompt
from skyrl_train.engines.base import SampleRequest
from skyrl_train.tensordict.containers import ChatHistory
from skyrl_train.tensordict.envs.chat import ChatEnv
from skyrl_train.tensordict.envs.conversation import history_of, messages_of
from skyrl_train.tensordict.envs.gsm8k import GSM8KEnv
from skyrl_train.tensordict.envs.kl import KLRewardTransform, RetrieveLogProb
from skyrl_train.tensordict.losses.grpo import GRPOLoss
from skyrl_train.tensordict.losses.mc_advantage import MCAdvantage
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.tensordict_batches import replay_buffer

TOKENIZER = byte_tokenizer()


def policy(answer: Callable[[str], str], asked: list[list[int]] | None = None, **settings: Any) -> LLMWrapperBase:
    """A wrapper over an engine that answers the text of a prompt."""

    def sampled(request: SampleRequest) -> list[int]:
        if asked is not None:
            asked.append(list(request.token_ids))
        return [*TOKENIZER(answer(str(TOKENIZER.decode(list(request.token_ids)))))["input_ids"], TOKENIZER.eos_token_id]

    return LLMWrapperBase(ScriptedEngine(sampled), tokenizer=TOKENIZER, **settings)


@pytest.mark.parametrize("padded", [False, True])
def test_a_wrapper_answers_a_dataset_and_is_rewarded(padded: bool):
    rows = [{"question": f"What is {number} + 1?", "answer": f"#### {number + 1}"} for number in (1, 20)]
    env = GSM8KEnv(dataset=rows, shuffle=False, num_envs=2, system_prompt=None)
    played = env.rollout(1, policy(lambda text: "<answer>2</answer>", pad_output=padded))
    assert played.batch_size == (2, 1)
    assert [round(float(value), 3) for value in played["next", "reward"].flatten()] == [1.0, 0.1]
    assert played["next", "done"].all()


class Echo(Transform):
    """A tool that answers every message."""

    def _call(self, next_tensordict: TensorDictBase) -> TensorDictBase:
        for row in next_tensordict.unbind(0):
            result = {"role": "tool", "content": "4"}
            history = history_of([*messages_of(row["history"].prompt), result])
            row.set("history", ChatHistory(prompt=history, batch_size=[]))
        return next_tensordict


@pytest.mark.defect("D29")
def test_a_policy_that_prefers_tokens_reads_what_tools_said():
    asked: list[list[int]] = []
    env = ChatEnv(tokenizer=TOKENIZER, with_tokenizer=True).append_transform(Echo())
    model = policy(lambda text: "four" if "tool" in text else "call", asked, prefer_tokens=True)
    played = env.rollout(2, model, tensordict=TensorDict(query=["2 + 2?"], batch_size=[1]))
    first, second = played[0].unbind(0)
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "call"}]
    extended = [*messages, {"role": "tool", "content": "4"}]
    assert messages_of(first["history"].full) == messages
    assert messages_of(second["history"].full) == [*extended, {"role": "assistant", "content": "four"}]
    assert asked == [render_prompt(TOKENIZER, messages[:1]), render_prompt(TOKENIZER, extended)]
    assert asked[1][: len(first["tokens"].full)] == first["tokens"].full.tolist()


@pytest.mark.parametrize("padded", [False, True])
def test_rewards_lose_the_kl_to_a_reference_and_its_log_probs_are_kept(padded: bool):
    rows = [{"question": f"What is {number} + 1?", "answer": f"#### {number + 1}"} for number in (1, 20)]
    env = GSM8KEnv(dataset=rows, shuffle=False, num_envs=2)
    scores: dict[str, Any] = {"generate": False, "inplace": False}
    reference = LLMWrapperBase(ScriptedEngine(), tokenizer=TOKENIZER, log_probs_key="ref", **scores)
    env.append_transform(RetrieveLogProb(reference))
    reads: dict[str, Any] = {"input_mode": "tokens", "pad_output": padded, **scores}
    env.append_transform(KLRewardTransform(LLMWrapperBase(ScriptedEngine(), tokenizer=TOKENIZER, **reads)))
    more = policy(lambda text: f"<answer>2</answer>{' ' * text.count('20 + 1')}", pad_output=padded)
    played = env.rollout(1, more)  # the longer prompt has the longer answer: the other row is padded on both sides
    for row, reward in zip(played.unbind(0), (1.0, 0.1), strict=True):
        step, length = row[0], len(row[0]["tokens"].full)
        assert step["next", "reward"].shape == step["next", "kl_penalty"].shape == (length, 1)
        assert float(step["next", "reward"].sum()) == pytest.approx(reward)  # both engines say -1 nat
        there = step["masks"].all_attention_mask
        assert int(there.sum()) == length - (2 if padded and reward == 1.0 else 0)
        assert step["next"]["ref_log_probs"].full[there].tolist() == [0.0] + [-1.0] * (int(there.sum()) - 1)
        assert not step["next"]["ref_log_probs"].full[~there].any() and not step["next", "reward"][~there].any()
        assert float(step["next", "reward"][there][-1]) == pytest.approx(reward)
        answered = int(step["masks"].all_assistant_mask.sum())
        assert step["next"]["ref"].full.tolist().count(-1.0) == answered


@pytest.mark.parametrize("of_environment", [None, "cpu"])
@pytest.mark.parametrize("of_policy", [None, "cpu"])
def test_a_device_may_be_named_anywhere(of_environment: str | None, of_policy: str | None):
    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    env = GSM8KEnv(dataset=rows, num_envs=2, max_steps=3, device=of_environment)
    played = env.rollout(3, policy(lambda text: "well", device=of_policy), break_when_any_done=False)
    assert played.batch_size == (2, 3)
    chat = played[0, 2]["history"].full.to_chats()
    assert [turn["content"] for turn in chat[-3:]] == ["well"] * 3
    assert played["next", "reward"].device.type == "cpu"


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("mode", ["history", "tokens"])
def test_a_loss_takes_log_probs_and_reference_of_the_tokens_that_were_sampled(mode: str, padded: bool):
    """No tokenizer makes them of the text again: they are no characters."""
    trained, sampled = tiny_model(), [200, 130, 10, 255]
    engine = ScriptedEngine(lambda request: sampled)
    actor = TransformersWrapper(trained, tokenizer=TOKENIZER, generate=False, input_mode=mode, inplace=False)
    reference = actor.get_new_version(input_mode="history", log_probs_key="ref_log_probs")
    env = ChatEnv(batch_size=(2,)).append_transform(RetrieveLogProb(reference))
    given = env.reset(TensorDict(query=["hello", "you"], batch_size=[2]))
    played, following = env.step_and_maybe_reset(LLMWrapperBase(engine, tokenizer=TOKENIZER, pad_output=padded)(given))
    assert "ref_log_probs" not in set(following.keys())
    played.set("advantage", torch.ones(2, 1, 1))
    for row in played.unbind(0):
        width = len(row["tokens"].full)
        assert row["next", "ref_log_probs"].full.shape == (width,)
        ids = row["tokens"].full[row["masks"].all_attention_mask] if padded else row["tokens"].full
        wanted = trained(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[-4:, 0]
        torch.testing.assert_close(row["next", "ref_log_probs"].full[-4:], wanted.detach(), atol=1e-5, rtol=0)
        assert not row["next", "ref_log_probs"].full[:-4].any()
    out = GRPOLoss(actor, kl_to_ref_coeff=1.0)(played)
    assert out.kl_to_ref.item() == pytest.approx(0.0, abs=1e-6)
    out.loss.backward()
    assert all(parameter.grad is not None for parameter in trained.parameters())


def test_log_probs_of_module_keep_gradient_without_detach():
    actor = TransformersWrapper(tiny_model(), tokenizer=TOKENIZER, generate=False, inplace=False)
    env = ChatEnv().append_transform(RetrieveLogProb(actor, detach=False))
    stepped = env.step(policy(lambda text: "yes")(env.reset(TensorDict(query=["hello"], batch_size=[1]))))
    assert stepped["next"][0].get(("log_probs", "full")).requires_grad


@pytest.mark.parametrize("transform", [RetrieveLogProb, KLRewardTransform])
def test_data_that_is_no_lazy_stack_gets_its_log_probs_as_well(transform: Any):
    """[B] and [B, T], dense: what is written must reach the data that was given."""
    actor = TransformersWrapper(tiny_model(), tokenizer=TOKENIZER, generate=False, input_mode="tokens", inplace=False)
    scores = transform(actor, **({"assistant_only": False} if transform is RetrieveLogProb else {}))
    ids = torch.arange(10, 16).expand(2, 3, 6)
    mask = torch.ones(2, 3, 6, dtype=torch.bool)
    tokens = TensorDict(full=ids.clone(), prompt=ids[..., :2].clone(), batch_size=(2, 3))
    masks = TensorDict(all_attention_mask=mask, all_assistant_mask=mask, batch_size=(2, 3))
    following = TensorDict(reward=torch.ones(2, 3, 1, 1), batch_size=(2, 3))
    whole = TensorDict(tokens=tokens, masks=masks, next=following, batch_size=(2, 3))
    whole.set("log_probs", TensorDict(full=torch.zeros(2, 3, 6), batch_size=(2, 3)))
    key = ("ref_log_probs" if transform is KLRewardTransform else "log_probs", "full")
    found = scores(whole)["next"].get(key)
    assert found.shape == (2, 3, 6)
    alone = scores(whole[:, 0].exclude(("next", key[0])))["next"].get(key)
    assert torch.equal(alone, found[:, 0])
    assert found.any()


def test_advantages_find_the_question_of_every_environment_over_a_dataset():
    rows = [{"question": f"{n} + 1?", "answer": f"#### {n + 1}"} for n in (1, 2)]
    env = GSM8KEnv(dataset=rows, num_envs=4, repeats=2, shuffle=False)
    buffer = replay_buffer(16, batch_size=4, transform=MCAdvantage(2))
    for row in env.rollout(1, policy(lambda text: "<answer>2</answer>"))[:, 0].unbind(0):
        buffer.extend(row.unsqueeze(0))
    assert len(buffer) == 4


@pytest.mark.parametrize("role", ["assistant", "model"])
def test_the_policys_role_has_any_name(role: str):
    rows = [{"question": "1 + 1?", "answer": "#### 2"}]
    for answered in (policy(lambda text: "<answer>2</answer>"), None):
        env = GSM8KEnv(dataset=rows, policy_role=role)
        root = env.reset()
        root = answered(root) if answered else root.set("text_response", ["<answer>2</answer>"])
        assert env.step(root)["next", "success"].all()
