from __future__ import annotations

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torchrl.envs import StepCounter

from skyrl_train.tensordict.envs.chat import ChatEnv, DatasetChatEnv
from skyrl_train.tensordict.envs.primer import DataLoadingPrimer, as_nested_tensor, as_padded_tensor

RAGGED = [TensorDict(ids=torch.tensor([1, 2, 3])), TensorDict(ids=torch.tensor([4]))]


def test_ragged_rows_are_nested_or_padded():
    nested, padded = as_nested_tensor(RAGGED), as_padded_tensor(RAGGED)
    assert [row.tolist() for row in nested["ids"].unbind()] == [[1, 2, 3], [4]]
    assert padded["ids"].tolist() == [[1, 2, 3], [0, 0, 4]]


def test_loader_without_rows_is_refused():
    cases: list[dict[str, Any]] = [{}, {"dataloader": [], "dataloader_factory": list}]
    for settings in cases:
        with pytest.raises(ValueError, match=r"exactly one|Cannot provide both"):
            DataLoadingPrimer(**settings)
    with pytest.raises(TypeError, match="int"):
        DataLoadingPrimer([1])
    with pytest.raises(ValueError, match="one dimension"):
        DataLoadingPrimer([TensorDict(batch_size=[2, 2])])
    with pytest.raises(ValueError, match="no rows"):
        DataLoadingPrimer([])
    with pytest.raises(ValueError, match="repeats=-1"):
        DataLoadingPrimer([{"query": "a"}], repeats=-1)


def test_primer_takes_batch_size_of_environment():
    env = ChatEnv(batch_size=(3,)).append_transform(DataLoadingPrimer([{"text": ["a", "b"], "n": [1, 2]}]))
    assert env.reset()["query"] == ["a", "b", "a"]
    ragged = DataLoadingPrimer([{"query": "a", "ids": torch.arange(size)} for size in (3, 1)], batch_size=(2,))
    root = ChatEnv(batch_size=(2,)).append_transform(ragged).reset()
    assert [len(row["ids"]) for row in root.unbind(0)] == [3, 1]


def test_partial_reset_keeps_other_rows():
    rows = [{"query": str(number), "answer": number} for number in range(6)]
    env = DatasetChatEnv(dataset=rows, shuffle=False, num_envs=3).append_transform(StepCounter(5))
    root = env.reset()
    for row in root.unbind(0):
        row["history"].full = row["history"].prompt
    _, root = env.step_and_maybe_reset(root)
    root = env.reset(root.set("_reset", torch.tensor([[False], [True], [False]])))
    assert root["query"] == ["0", "3", "2"] and list(root["answer"]) == [0, 3, 2]
    assert root["step_count"].flatten().tolist() == [1, 0, 1]
    assert [row["history"].prompt[0].content for row in root.unbind(0)] == ["0", "3", "2"]
