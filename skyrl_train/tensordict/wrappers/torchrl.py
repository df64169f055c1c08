"""Makes a wrapper usable by TorchRL's own environments, collectors and losses. torchrl itself is not imported."""

from __future__ import annotations

from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skyrl_train.tensordict.containers import ChatHistory
from skyrl_train.tensordict.history import History, converted
from skyrl_train.tensordict.ragged import column
from skyrl_train.tensordict.wrappers.base import LLMWrapperBase
from skyrl_train.tensordict.wrappers.distributions import LLMMaskedCategorical


class ForTorchRL(TensorDictModuleBase):
    """An adapter of a wrapper for TorchRL's ChatEnv, LLMCollector and GRPOLoss.

    It reads conversations from TorchRL's History, and writes them in the same classes. Losses get distributions in the
    layout of their batch: rows of a lazy stack are padded on the left, rectangles stay as they are. TorchRL's text and
    tokens modes need no adapter: use the wrapper itself.
    """

    def __init__(self, wrapper: LLMWrapperBase):
        super().__init__()
        self.wrapper = wrapper
        self.in_keys, self.out_keys = wrapper.in_keys, wrapper.out_keys

    @property
    def model(self) -> Any:
        """The wrapper's model."""
        return self.wrapper.model

    def register_collector(self, collector: Any) -> None:
        """Register the collector with the wrapper; see `LLMWrapperBase.register_collector`."""
        self.wrapper.register_collector(collector)

    def forward(self, tensordict: TensorDictBase, **generate_kwargs: Any) -> TensorDictBase:
        """Like the wrapper's `forward`, including `inplace`."""
        wrapper = self.wrapper
        key, field = wrapper.history_key, "prompt" if wrapper.generate else "full"
        theirs = tensordict.get(key, None)
        given = None if theirs is None else theirs.get(field, None)
        if wrapper.input_mode != "history" or given is None or isinstance(given, History):
            return wrapper(tensordict, **generate_kwargs)  # type: ignore[no-any-return]
        ours = tensordict.exclude(key)
        ours.set(key, ChatHistory(**{field: converted(given, History)}, batch_size=tensordict.batch_size))
        out = wrapper(ours, **generate_kwargs)
        if (found := out.get(key, None)) is not None:
            parts = {name: found.get(name, None) for name in ("prompt", "response", "full")}
            chats = {name: converted(part, type(given)) for name, part in parts.items() if part is not None}
            out.set(key, type(theirs)(**chats, batch_size=out.batch_size))
        if wrapper.inplace is not True:
            return out  # type: ignore[no-any-return]
        for name in self.out_keys:
            tensordict.set(name, out.get(name))
        return tensordict

    def get_dist(self, tensordict: TensorDictBase, mask: Tensor | str = "generic", **_: Any) -> LLMMaskedCategorical:
        """Return the wrapper's distributions in the batch's layout. TorchRL's other keywords are ignored."""
        found = self.wrapper.get_dist(tensordict, mask)
        attention = column(tensordict, (self.wrapper.masks_key, "all_attention_mask"))
        if attention is None or isinstance(mask, Tensor):
            return found
        assert found.mask is not None
        rows = [row.bool().to(found.logits.device) for row in attention]
        present = pad_sequence(rows, batch_first=True, padding_value=False, padding_side="left")  # [B, L]
        places = torch.arange(found.logits.shape[1], device=present.device)
        filled = places >= len(places) - present.sum(1, keepdim=True)  # [B, T], padded on the left
        logits = found.logits.new_zeros(*present.shape, found.logits.shape[-1])
        counts = torch.zeros_like(present)
        counts[present] = found.mask[filled]
        return LLMMaskedCategorical(logits.index_put((present,), found.logits[filled]), counts)

    # TorchRL's losses call one of these, by masking_strategy.
    def _get_sft_dist(self, tensordict: TensorDictBase, **_: Any) -> LLMMaskedCategorical:
        return self.get_dist(tensordict, "sft")

    def _get_rlhf_dist(self, tensordict: TensorDictBase, **_: Any) -> LLMMaskedCategorical:
        return self.get_dist(tensordict, "rlhf")

    def _get_generic_dist(self, tensordict: TensorDictBase, **_: Any) -> LLMMaskedCategorical:
        return self.get_dist(tensordict, "generic")
