"""Adapters for TRL and for reward models, with rows of any length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict, lazy_stack
from torch import Tensor, nn

from skyrl_train.tensordict.trl_interop import HFRewardModelWrapper, TorchRLBufferDataset
from tests.support.tensordict_batches import replay_buffer

ROWS: Any = lazy_stack(
    [TensorDict({"query": f"{n}?", "tokens": {"full": torch.full((n,), n)}, "done": torch.ones(1)}) for n in (1, 2, 3)]
)


def test_dataset_yields_ragged_rows_as_dicts(torchrl: Any):
    buffer = replay_buffer(8, shuffle=False)
    buffer.extend(ROWS)
    dataset = TorchRLBufferDataset(buffer, batch_size=3, device="cpu")
    assert isinstance(dataset, torchrl.modules.llm.TorchRLBufferDataset)
    rows = list(dataset)
    assert [row["tokens.full"].tolist() for row in rows] == [[1], [2, 2], [3, 3, 3]]
    assert [row["query"] for row in rows] == ["1?", "2?", "3?"]
    assert [row["query"] for row in dataset.as_hf_dataset()] == ["1?", "2?", "3?"]
    chosen = list(TorchRLBufferDataset(buffer, batch_size=3, keys=["query"], num_batches=2))
    assert len(chosen) == 6 and chosen[0].keys() == {"query"}
    with pytest.raises(KeyError, match="a row has no"):
        list(TorchRLBufferDataset(buffer, batch_size=1, keys=["prompt"]))


class SumsTokens(nn.Module):
    config = SimpleNamespace(pad_token_id=9)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        assert (input_ids[attention_mask == 0] == 9).all()
        return SimpleNamespace(logits=(input_ids * attention_mask).sum(-1, keepdim=True).float())


def test_reward_models_score_ragged_rows(torchrl: Any):
    wrapper = HFRewardModelWrapper(SumsTokens(), reward_key=("next", "reward"))
    assert isinstance(wrapper, torchrl.modules.llm.HFRewardModelWrapper)
    assert wrapper(ROWS.copy())["next", "reward"].tolist() == [1, 4, 9]
    masked: Any = lazy_stack(
        [row.copy().set(("masks", "all_attention_mask"), row["tokens", "full"] > 0) for row in ROWS.unbind(0)]
    )
    padded = TensorDict(
        {"tokens": {"full": torch.tensor([[1, 9]])}, "masks": {"all_attention_mask": torch.tensor([[1, 0]])}}, [1]
    )
    assert wrapper(masked)["next", "reward"].tolist() == [1, 4, 9]
    assert wrapper(padded)["next", "reward"].tolist() == [1]
