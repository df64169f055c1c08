from __future__ import annotations

import pytest
import torch
from tensordict import TensorDict

from skyrl_train.tensordict.envs.llm_env import LLMHashingEnv, make_gsm8k_env
from skyrl_train.testing.tiny_models import byte_tokenizer

ROWS = [{"question": "How many clips?", "answer": "48 + 24 = 72\n#### 72"}]


def test_gsm8k_question_is_in_base_prompt():
    env = make_gsm8k_env(ROWS, num_envs=2, repeats=2, tokenizer=byte_tokenizer())
    root = env.reset()
    assert all("User: How many clips?. Assistant: <think>" in text for text in root["text"])
    root["text_response"] = ["</think><answer>72</answer>", "</think><answer>1</answer>"]
    following = env.step(root)["next"]
    torch.testing.assert_close(following["reward"].flatten(), torch.tensor([1.0, 0.1]))
    assert following["text"][0].endswith("<think></think><answer>72</answer>") and following["done"].all()
    with pytest.warns(UserWarning, match="No tokenizer"):
        make_gsm8k_env(ROWS)


def test_hashes_name_prefixes_the_same_in_every_process():
    env = LLMHashingEnv(tokenizer=byte_tokenizer())
    root = env.make_tensordict(["ab", "ab"])
    assert root["hashing"][0] == root["hashing"][1]
    root["action"] = torch.tensor([[5], [6]])
    following = env.step(root)["next"]
    assert following["hashing"][0] != following["hashing"][1]
    assert following["text"][0].startswith("ab")
    again = LLMHashingEnv(vocab_size=10)
    found = again.reset(TensorDict(observation=torch.tensor([[1, 2]]), batch_size=[1]))["hashing"]
    assert int(found) == -6578062687609052266
    with pytest.raises(TypeError, match="vocab_size"):
        LLMHashingEnv()
