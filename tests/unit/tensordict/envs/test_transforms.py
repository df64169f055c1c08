from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from skyrl_train.tensordict.envs.chat import ChatEnv
from skyrl_train.tensordict.envs.conversation import messages_of
from skyrl_train.tensordict.envs.llm_env import LLMEnv, LLMHashingEnv
from skyrl_train.tensordict.envs.primer import DataLoadingPrimer, as_nested_tensor, as_padded_tensor
from skyrl_train.testing.tiny_models import byte_tokenizer

RAGGED = [
    TensorDict(ids=torch.tensor([1, 2, 3]), n=torch.tensor(1)),
    TensorDict(ids=torch.tensor([4]), n=torch.tensor(2)),
]


def said(root: TensorDictBase) -> TensorDictBase:
    root["text_response"] = ["ok"] * len(root)
    return root


def test_ragged_rows_are_nested_or_padded_on_the_left():
    nested, padded = as_nested_tensor(RAGGED), as_padded_tensor(RAGGED)
    assert [row.tolist() for row in nested["ids"].unbind()] == [[1, 2, 3], [4]]
    assert padded["ids"].tolist() == [[1, 2, 3], [0, 0, 4]] and padded["n"].tolist() == [1, 2]
    with pytest.raises(ValueError, match="-1"):
        as_padded_tensor(RAGGED, dim=-1)


def test_a_primer_takes_exactly_one_loader_and_only_rows():
    cases: list[dict[str, Any]] = [{}, {"dataloader": [], "dataloader_factory": list}]
    for settings in cases:
        with pytest.raises(ValueError, match="exactly one"):
            DataLoadingPrimer(**settings)
    with pytest.raises(TypeError, match="int"):
        DataLoadingPrimer([1]).take(1)
    with pytest.raises(ValueError, match="one dimension"):
        DataLoadingPrimer([TensorDict(batch_size=[2, 2])]).take(1)
    with pytest.raises(ValueError, match="no rows"):
        DataLoadingPrimer([]).take(1)


def test_a_factory_makes_the_loader_of_every_pass_and_stacks_are_chosen_by_name():
    passes: list[int] = []

    def loader() -> list[TensorDict]:
        passes.append(len(passes))
        return RAGGED

    primer = DataLoadingPrimer(dataloader_factory=loader, stack_method="as_padded_tensor", batch_size=(4,))
    assert primer()["ids"].tolist() == [[1, 2, 3], [0, 0, 4]] * 2 and passes == [0, 1]


def test_llm_env_puts_texts_and_ids_after_each_other_and_ends_with_the_eos():
    with pytest.warns(DeprecationWarning, match="ChatEnv"):
        env = LLMEnv.from_dataloader([{"text": "one "}], num_envs=2)
    root = env.reset()
    root["text_response"] = ["two", "three"]
    assert env.step(root)["next", "text"] == ["one two", "one three"]
    with pytest.warns(DeprecationWarning, match="ChatEnv"):
        env = LLMEnv(from_text=False, eos_token_id=9, assign_reward=True, assign_done=True, batch_size=(2,))
    root = env.reset(TensorDict(tokens=torch.tensor([[1, 2], [3, 4]]), batch_size=[2]))
    root["tokens_response"] = torch.tensor([[5, 9], [9, 5]])
    following = env.step(root)["next"]
    assert following["tokens"].tolist() == [[1, 2, 5, 9], [3, 4, 9, 5]]
    assert following["done"].tolist() == [[True], [False]] and following["reward"].shape == (2, 2, 1)
    assert following["token_done"].flatten().tolist() == [False, True, False, False]
    with pytest.warns(DeprecationWarning, match="ChatEnv"), pytest.raises(ValueError, match="from_text"):
        LLMEnv(assign_reward=True)


def test_hashes_name_prefixes_the_same_in_every_process_and_differ_where_they_do():
    env = LLMHashingEnv(tokenizer=byte_tokenizer(), batch_size=(2,))
    root = env.reset(TensorDict(text=["ab", "ab"], batch_size=[2]))
    assert root["hashing"][0] == root["hashing"][1] and root["hash"].equal(root["hashing"])
    root["action"] = torch.tensor([[5], [6]])
    following = env.step(root)["next"]
    assert following["hashing"][0] != following["hashing"][1]
    assert following["observation"].shape == (2, 3) and following["text"][0].startswith("ab")
    again = LLMHashingEnv(vocab_size=10)
    assert (
        int(again.reset(TensorDict(observation=torch.tensor([[1, 2]]), batch_size=[1]))["hashing"])
        == -6578062687609052266
    )
    with pytest.raises(TypeError, match="vocab_size"):
        LLMHashingEnv()


def test_messages_survive_histories():
    root: Any = ChatEnv().reset(TensorDict(query=["a\n\n b "], batch_size=[1]))
    assert messages_of(root[0]["history"].prompt) == [{"role": "user", "content": "a\n\n b "}]


def test_settings_that_cannot_work_are_reported():
    with pytest.raises(ValueError, match="stack_dim=1"):
        as_padded_tensor([TensorDict(ids=torch.ones(2))], stack_dim=1)
    with pytest.raises(ValueError, match="with_tokenizer"):
        ChatEnv(input_mode="text", tokenizer=byte_tokenizer(), with_tokenizer=True)
