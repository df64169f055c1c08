"""Environments and wrappers together, over an engine that answers from a function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tensordict import TensorDict, TensorDictBase

from skyrl_train.data.chat import render_prompt
from skyrl_train.engines.base import SampleRequest
from skyrl_train.policies.wrapper import LLMWrapperBase
from skyrl_train.tensordict_envs.base import Transform
from skyrl_train.tensordict_envs.chat import ChatEnv
from skyrl_train.tensordict_envs.conversation import conversation, messages_of
from skyrl_train.tensordict_envs.gsm8k import GSM8KEnv
from skyrl_train.tensordict_envs.kl import KLRewardTransform, RetrieveLogProb
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer

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

    def after_step(self, root: TensorDictBase, following: TensorDictBase) -> TensorDictBase:
        for row in following.unbind(0):
            told = {"role": "tool", "content": "4"}
            row.set("history", conversation([*messages_of(row["history"].prompt), told]))
        return following


@pytest.mark.defect("D29")
def test_a_policy_that_prefers_tokens_reads_what_tools_said():
    asked: list[list[int]] = []
    env = ChatEnv(tokenizer=TOKENIZER, with_tokenizer=True)
    env.append_transform(Echo())
    model = policy(lambda text: "four" if "tool" in text else "call", asked, prefer_tokens=True)
    played = env.rollout(2, model, tensordict=TensorDict(query=["2 + 2?"], batch_size=[1]))
    first, second = played[0].unbind(0)
    messages = [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "call"}]
    told = [*messages, {"role": "tool", "content": "4"}]
    assert messages_of(first["history"].full) == messages
    assert messages_of(second["history"].full) == [*told, {"role": "assistant", "content": "four"}]
    assert asked == [render_prompt(TOKENIZER, messages[:1]), render_prompt(TOKENIZER, told)]
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
