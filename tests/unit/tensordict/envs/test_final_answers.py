"""Graders and tools of tensordict environments read the final answer alone."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.tensordict import ChatEnv, GSM8KEnv, GSM8KRewardParser, IFEvalEnv, MLGymWrapper, PythonInterpreter
from skyrl_train.tensordict.containers import ChatHistory
from skyrl_train.tensordict.envs.conversation import last_response
from skyrl_train.tensordict.envs.gsm8k import given_answer
from skyrl_train.tensordict.envs.rewards import answers_in
from skyrl_train.tensordict.envs.text import Tokenizer
from skyrl_train.tensordict.envs.tools import TOOL_BLOCK
from skyrl_train.tensordict.history import History
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import CHATML, byte_tokenizer

HARMONY = "<|channel|>analysis<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>{}"
ROWS = [{"question": "?", "answer": "#### 42"}]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>#### 41</think>#### 42", "42"),
        ("<think>#### 42", None),
        ("<think><answer>42</answer>", None),
        ("[THINK]<answer>41</answer>[/THINK]<answer>42</answer>", "42"),
        (HARMONY.format("#### 41", "#### 42"), "42"),
    ],
)
def test_answer_is_read_after_the_reasoning(text: str, answer: str | None):
    assert given_answer(text) == answer
    root = GSM8KEnv(dataset=ROWS)
    state = root.reset()
    state["text_response"] = [text]
    assert root.step(state)["next", "reward"].item() == (1.0 if answer else 0.0)


def test_torchrl_tags_are_read_after_the_reasoning():
    text = "<think><answer>41</answer></think><answer>42</answer>"
    assert GSM8KRewardParser.extract_tags(text) == ("<answer>41</answer>", "42")


@pytest.mark.parametrize(("text", "followed"), [("[THINK]a, b[/THINK]fine", 1.0), ("<think>fine", 0.0)])
def test_instructions_apply_to_the_answer(text: str, followed: float):
    row = {"key": 1, "prompt": "?", "instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}]}
    environment = IFEvalEnv(dataset=[row])
    state = environment.reset()
    state["text_response"] = [text]
    score = environment.step(state)["next", "ifeval_score"][0]
    assert score.prompt_level_strict_acc.item() == followed


def test_blocks_in_reasoning_are_not_run_and_every_fence_is_read():
    transform = PythonInterpreter()
    environment = ChatEnv(batch_size=(1,)).append_transform(transform)
    ran: list[str] = []
    transform._answers = lambda place, row, calls: ran.extend(c.arguments["code"] for c in calls) or []  # type: ignore
    for text in (
        "<think>```python\n1\n```",
        "[THINK]```python\n1\n```[/THINK]```python\n2\n```",
        '~~~py title="a"\n3\n~~~\n````python\n4\n````',
    ):
        state = environment.reset(TensorDict(query=["?"], batch_size=[1]))
        state["text_response"] = [text]
        environment.step(state)
    assert ran == ["2", "3", "4"]


class Echo(TextEnv):
    def step(self, action: str) -> StepOutput:
        return StepOutput([{"role": "user", "content": action}], 1.0, done=False)


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<think>```\nrm\n```</think>```c++ x=1\nls\n```", 1.0),
        ("<think>```\nls\n```", -1.0),
        ("~~~sh\nls\n~~~", 1.0),
    ],
)
def test_only_block_of_the_answer_is_the_action(text: str, reward: float):
    environment = MLGymWrapper(Echo, reward_wrong_format=-1.0)
    state = environment.reset(TensorDict(query=["?"], batch_size=[1]))
    state["text_response"] = [text]
    following = environment.step(state)["next"]
    assert following["reward"].item() == reward
    if reward > 0:
        assert following["history"].prompt[0][-1].content == "ls"


@pytest.mark.parametrize("mode", ["text", "tokens", "history"])
def test_prompt_that_opens_reasoning_is_known(mode: str):
    tokenizer: Any = byte_tokenizer()
    tokenizer.chat_template = CHATML + "{% if add_generation_prompt %}<think>\n{% endif %}"
    settings: dict[str, Any] = {"with_tokenizer": True} if mode == "history" else {}
    environment = GSM8KEnv(dataset=ROWS, input_mode=mode, tokenizer=tokenizer, **settings)
    rewards = []
    for text in ("#### 42", "a</think>#### 42"):
        state = environment.reset()
        if mode == "tokens":
            state["tokens_response"] = torch.tensor([tokenizer.encode(text, add_special_tokens=False)])
            state["tokens"].response = state["tokens_response"]
        else:
            state["text_response"] = [text]
        rewards.append(environment.step(state)["next", "reward"].item())
        assert last_response(state[0], tokenizer) == "<think>\n" + text
    assert rewards == [0.0, 1.0]


def test_reading_answers_and_calls_takes_linear_time():
    began = time.process_time()
    answers_in("<answer>" * 10**5)
    assert len(TOOL_BLOCK.findall("<tool>x\n" * 10**5 + "{}</tool>")) == 1
    assert answers_in("<answer>41<answer>42</answer>") == ["42"]
    assert time.process_time() - began < 5


def test_decoding_that_skips_special_tokens_keeps_reasoning_markers():
    tokenizer: Any = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[THINK]", "[/THINK]"]})
    sampled = tokenizer.encode("[THINK]41[/THINK]42<|im_end|>", add_special_tokens=False)
    transform = Tokenizer([], [], ["said"], ["action"], tokenizer=tokenizer)
    root = transform.inv(TensorDict(action=torch.tensor([sampled]), batch_size=[1]))
    assert list(root["said"]) == ["[THINK]41[/THINK]42"]
    engine = ScriptedEngine(lambda request: sampled)
    wrapper = LLMWrapperBase(engine, tokenizer=tokenizer, generate_kwargs={"skip_special_tokens": True})
    history = History.from_chats([[{"role": "user", "content": "?"}]])
    out = wrapper(TensorDict(history=ChatHistory(prompt=history, batch_size=(1,)), batch_size=(1,)))
    assert out["history"].response[0][0].content == "[THINK]41[/THINK]42"
    assert out["text"].response == ["[THINK]41[/THINK]42"]
