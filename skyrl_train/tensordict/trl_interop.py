"""TorchRL's adapters for TRL and Hugging Face reward models, for rows of any length."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from tensordict import NonTensorData, TensorDictBase, is_leaf_nontensor
from torchrl.modules.llm.trl_interop import (
    HFRewardModelWrapper as TorchRLRewardModelWrapper,
    TorchRLBufferDataset as TorchRLTorchRLBufferDataset,
)

from skyrl_train.tensordict.ragged import TokenLayout, column


class TorchRLBufferDataset(TorchRLTorchRLBufferDataset):  # type: ignore[misc]
    """A dataset of a replay buffer's rows, as dicts with keys such as "tokens.full". TorchRL's fails on ragged rows."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Sample batches and yield their rows. Raises KeyError for a key that a row lacks."""
        for _ in count() if self._num_batches is None else range(self._num_batches):
            for row in self._replay_buffer.sample(self._batch_size).unbind(0):
                keys = self._keys
                if keys is None:
                    keys = row.keys(include_nested=True, leaves_only=True, is_leaf=is_leaf_nontensor)
                yield {key if isinstance(key, str) else ".".join(key): self._value(row, key) for key in keys}

    def _value(self, row: TensorDictBase, key: Any) -> Any:
        value = row.get(key)
        if value is None:
            raise KeyError(f"keys={self._keys!r}: a row has no {key!r}. Leave it out, or write it into every row.")
        if isinstance(value, NonTensorData):
            return value.data
        return value if self._device is None else value.to(self._device)


class HFRewardModelWrapper(TorchRLRewardModelWrapper):  # type: ignore[misc]
    """A module that writes a Hugging Face reward model's score of each row, [B]. TorchRL's fails on ragged rows."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the rewards into `tensordict` [B] and return it; ragged rows are padded on the right for the model.

        Raises KeyError for missing tokens, or for a missing mask of rectangles.
        """
        tokens = column(tensordict, self._token_key)
        if tokens is None or isinstance(tokens, torch.Tensor):
            return super().forward(tensordict)  # type: ignore[no-any-return]
        mask = None if self._attention_mask_key is None else column(tensordict, self._attention_mask_key)
        layout = TokenLayout.of(tokens, mask)
        pad = getattr(getattr(self.model, "config", None), "pad_token_id", None) or 0
        rows = layout.flat(tokens, self._token_key).split(layout.present.sum(1).tolist())
        ids = torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=pad)
        present = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        return tensordict.set(self._reward_key, self._reward_module(ids, present))
