"""Reasoning in rollouts: environments see reasoning that the prompt opened, and sampled tokens do not change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tokenizers import AddedToken

from skyrl_train.data.messages import Message, Prompt
from skyrl_train.data.reasoning import final_answer
from skyrl_train.data.trajectory import OK
from skyrl_train.environments import registry
from skyrl_train.environments.base import StepOutput
from skyrl_train.testing.tiny_models import CHATML, byte_tokenizer
from tests.unit.rollouts.test_multi_turn import (
    END,
    PROMPT,
    ToyEnvironments,
    answer_with,
    contexts,
    ids,
    play,
    trained,
    until,
    user,
)

OPENING = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
KEEPING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""A template that also renders the opening of reasoning in the history."""
HARMONY = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|return|>")
GPT_OSS = (
    "{% for m in messages %}{% if '<|channel|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}"
    "<|start|>{{ m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)


def tokenizer_with(template: str, *special: str) -> Any:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken(token, special=True) for token in special]})
    tokenizer.chat_template = template
    return tokenizer


class RegisteredEnvironments:
    """Environments of the registry, run in this process."""

    async def start(self, env_class: str, prompt: Prompt) -> Any:
        environment = registry.make(env_class, {}, prompt.env_extras)

        class Session:
            messages: list[Message] = environment.init(prompt.messages)[0]

            async def step(self, text: str) -> StepOutput:
                return environment.step(text)  # type: ignore[no-any-return]

            async def close(self) -> None:
                environment.close()

        return Session()


@pytest.mark.parametrize(
    ("env", "right"), [("gsm8k", "#### 42"), ("multiply", r"\boxed{42}"), ("ifeval", "no commas here")]
)
def test_truncated_reasoning_opened_by_the_prompt_earns_nothing(env: str, right: str):
    truth = '{"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}' if env == "ifeval" else "42"
    row = replace(PROMPT, env_class=env, env_extras={"reward_spec": {"method": "rule", "ground_truth": truth}})
    rewards = []
    for text in (f"perhaps, {right}", f"no, no</think>\n\n{right}"):
        answer = answer_with(text, end="</think>" in text)
        group, _ = play(answer, RegisteredEnvironments(), prompt=row, tokenizer=tokenizer_with(OPENING), max_turns=1)  # type: ignore[arg-type]
        (item,) = group.trajectories
        assert item.status == OK and trained(item)[: len(ids(text))] == ids(text)
        rewards.append(item.reward)
    assert rewards == [0.0, 1.0]


@pytest.mark.parametrize(
    ("template", "settings", "openings"),
    [
        (KEEPING, {}, 2),
        (KEEPING, {"step_wise_trajectories": True}, 2),
        (OPENING, {"step_wise_trajectories": True}, 1),
        (OPENING, {"step_wise_trajectories": True, "retokenize_chat_history": True}, 1),
    ],
)
def test_text_begins_with_what_the_prompt_opened(template: str, settings: dict[str, Any], openings: int):
    environments, tokenizer = ToyEnvironments(until(2)), tokenizer_with(template)
    group, engine = play(answer_with("a</think>b"), environments, tokenizer=tokenizer, **settings)
    (item,) = group.trajectories
    assert environments.episodes[0].texts == ["<think>\na</think>b"] * 2
    assert (item.status, trained(item)) == (OK, [*ids("a</think>b"), END] * 2)
    answers = [message["content"] for message in item.messages if message["role"] == "assistant"]
    assert answers == ["<think>\na</think>b"] * 2
    first, second = contexts(engine)
    assert tokenizer.decode(first).endswith("assistant\n<think>\n")
    assert tokenizer.decode(second).count("<think>") == openings


def test_reasoning_stays_open_within_one_message():
    environments = ToyEnvironments(until(3))
    texts = iter(["<think>a", "b", "c</think>d"])
    play(lambda request: ids(next(texts)), environments, use_conversation_multi_turn=False)
    assert environments.episodes[0].texts == ["<think>a", "<think>b", "<think>c</think>d"]


def test_channel_stays_open_within_one_message():
    environments, tokenizer = ToyEnvironments(until(2)), tokenizer_with(GPT_OSS, *HARMONY)
    texts = ("<|channel|>analysis<|message|>a", "b<|end|><|start|>assistant<|channel|>final<|message|>c")
    turns = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    play(lambda request: turns.pop(0), environments, tokenizer=tokenizer, use_conversation_multi_turn=False)
    assert [final_answer(text) for text in environments.episodes[0].texts] == ["", "c"]


def test_channels_are_graded_and_the_history_has_only_answers():
    environments, tokenizer = ToyEnvironments(until(2)), tokenizer_with(GPT_OSS, *HARMONY)
    text = "<|channel|>analysis<|message|>41<|end|><|start|>assistant<|channel|>final<|message|>42<|return|>"
    sampled = tokenizer.encode(text, add_special_tokens=False)
    group, engine = play(lambda request: sampled, environments, tokenizer=tokenizer, step_wise_trajectories=True)
    (item,) = group.trajectories
    assert (item.status, trained(item)) == (OK, sampled * 2)
    assert [final_answer(text) for text in environments.episodes[0].texts] == ["42", "42"]
    assert "41" in environments.episodes[0].texts[0]
    assert tokenizer.decode(contexts(engine)[1]) == (
        "<|start|>user<|message|>go<|end|><|start|>assistant<|channel|>final<|message|>42<|end|>"
        "<|start|>user<|message|>more 1<|end|><|start|>assistant"
    )


def test_special_think_tokens_reach_the_environment():
    environments, tokenizer = ToyEnvironments(until(1)), tokenizer_with(CHATML, "[THINK]", "[/THINK]")
    sampled = tokenizer.encode("[THINK]41[/THINK]42", add_special_tokens=False)
    play(lambda request: sampled, environments, tokenizer=tokenizer)
    assert environments.episodes[0].texts == ["[THINK]41[/THINK]42"]


def test_rows_with_tools_and_an_open_answer_are_continued():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for t in tools %}{{ t.function.name }}{% endfor %}" + tokenizer.chat_template
    prompt = Prompt("7", [user("2 + 2?"), {"role": "assistant", "content": "The answer"}], "toy")
    prompt.env_extras["tools"] = [{"type": "function", "function": {"name": "add"}}]
    group, engine = play(
        answer_with(" is 4"), environments := ToyEnvironments(until(2)), prompt=prompt, tokenizer=tokenizer
    )
    (item,) = group.trajectories
    read = [str(tokenizer.decode(context)) for context in contexts(engine)]
    assert read[0] == "add<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\nThe answer"
    assert read[1].startswith(f"{read[0]} is 4<|im_end|>\n<|im_start|>user\nmore 1<|im_end|>\n")
    assert environments.episodes[0].texts == ["The answer is 4", " is 4"]
    assert [message["content"] for message in item.messages[:3]] == ["2 + 2?", "The answer is 4", "more 1"]
    assert tokenizer.decode(trained(item)) == " is 4<|im_end|> is 4<|im_end|>"
