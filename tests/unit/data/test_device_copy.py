from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from skyrl_train.data.device_copy import STAYS_ON_HOST, copy_to_device


@dataclass(frozen=True)
class Part:
    flags: Tensor
    lengths: tuple[int, ...] = (3, 4)
    on_host: Tensor | None = field(default=None, metadata=STAYS_ON_HOST)


@dataclass(frozen=True)
class Example:
    numbers: Tensor
    parts: tuple[Part, ...]
    empty: Tensor
    missing: Tensor | None = None


EXAMPLE = Example(
    torch.arange(6, dtype=torch.float64).view(2, 3).T,
    (Part(torch.tensor([True]), on_host=torch.ones(1)), Part(torch.tensor(False))),
    torch.zeros(0, 4, dtype=torch.int16),
)


def test_copy_has_equal_values_in_one_buffer() -> None:
    copied = copy_to_device(EXAMPLE, "cpu")
    tensors = [copied.numbers, copied.empty, *(part.flags for part in copied.parts)]
    originals = [EXAMPLE.numbers, EXAMPLE.empty, *(part.flags for part in EXAMPLE.parts)]
    for tensor, original in zip(tensors, originals, strict=True):
        assert torch.equal(tensor, original) and tensor.dtype == original.dtype
    assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
    copied.numbers.zero_()
    assert EXAMPLE.numbers.sum() == 15, "the original is not changed"
    assert copied.parts[0].lengths == (3, 4) and copied.missing is None


def test_host_fields_stay_on_the_host() -> None:
    copied = copy_to_device((EXAMPLE, EXAMPLE.parts[0]), "meta")
    assert copied[0].numbers.is_meta and copied[1].flags.is_meta
    assert copied[1].on_host is EXAMPLE.parts[0].on_host
