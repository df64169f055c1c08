"""TorchRL's checks and batched environments over transforms."""

from __future__ import annotations

from typing import Any

import pytest
from tensordict import TensorDict, TensorDictBase, lazy_stack
from torchrl.envs import AsyncEnvPool, SerialEnv, Transform, check_env_specs

from skyrl_train import tensordict
from skyrl_train.tensordict import (
    AddThinkingPrompt,
    ChatEnv,
    GSM8KEnv,
    PolicyVersion,
    PythonInterpreter,
    RetrieveKL,
    RetrieveLogProb,
    SimpleToolTransform,
    Tokenizer,
    TransformersWrapper,
)
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.chat_answers import answered, chats

TOKENIZER = byte_tokenizer()
ROWS = [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "20 + 1?", "answer": "#### 21"}]


def scorer(name: str) -> TransformersWrapper:
    return TransformersWrapper(tiny_model(), tokenizer=TOKENIZER, generate=False, log_probs_key=name, inplace=False)


TRANSFORMS: dict[str, Any] = {
    "versions": lambda: [PolicyVersion()],
    "names": lambda: [PolicyVersion("uuid")],
    "tools": lambda: [PythonInterpreter(), SimpleToolTransform({"add": max})],
    "tokenizer": lambda: [Tokenizer(["query"], ["ids"], tokenizer=TOKENIZER)],
    "log_probs": lambda: [RetrieveLogProb(scorer("ref_log_probs"))],
    "kl": lambda: [RetrieveKL(scorer("gen_log_probs"), scorer("ref_log_probs"))],
    "stack": lambda: [
        PolicyVersion(),
        PythonInterpreter(),
        AddThinkingPrompt(cond=lambda row: True),
        RetrieveLogProb(scorer("ref_log_probs")),
    ],
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_specs_match_data_of_transforms(name: str):
    env = GSM8KEnv(dataset=ROWS, num_envs=1, tokenizer=TOKENIZER, max_steps=3, with_tokenizer=name == "stack")
    for transform in TRANSFORMS[name]():
        env.append_transform(transform)
    check_env_specs(env, break_when_any_done="both")


def test_transforms_are_torchrl_transforms():
    names = """KLComputation KLRewardTransform RetrieveKL RetrieveLogProb BrowserTransform ExecuteToolsInOrder
    MCPToolTransform PythonInterpreter SimpleToolTransform AddThinkingPrompt PolicyVersion IncrementalTokenizer
    Tokenizer TemplateTransform"""
    assert all(issubclass(getattr(tensordict, name), Transform) for name in names.split())


def add(a: int, b: int) -> int:
    return a + b


def made() -> Any:
    env = ChatEnv(batch_size=(1,), tokenizer=TOKENIZER, with_tokenizer=True)
    return env.append_transform(SimpleToolTransform({"add": add})).append_transform(PolicyVersion())


def called(root: TensorDictBase) -> TensorDictBase:
    return lazy_stack([answered(part, '<tool>add\n{"a": 2, "b": 3}</tool>') for part in root.unbind(0)])


def test_tools_run_in_batched_environments():
    questions = TensorDict(query=[["a"], ["bcd"]], batch_size=(2, 1))
    serial = SerialEnv(2, made)
    around = SerialEnv(2, lambda: ChatEnv(batch_size=(1,))).append_transform(SimpleToolTransform({"add": add}))
    pool = AsyncEnvPool([made, made], backend="threading", stack="lazy")
    for env in (serial, around):
        stepped = env.step(called(env.reset(questions.clone())))
        assert [chats(part)[0][-1]["content"][-2:] for part in stepped["next"].unbind(0)] == ["\n5", "\n5"]
        env.close()
    pool.async_step_send(called(pool.reset(questions.clone())))
    received = pool.async_step_recv(min_get=2)
    assert [chats(part["next"])[0][-1]["content"][-2:] for part in received.unbind(0)] == ["\n5", "\n5"]
    pool.close()
