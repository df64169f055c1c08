"""How tokens and their numbers are held from an engine's answer to the batch: as arrays of numpy."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Annotated, Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic_core import core_schema

Span = tuple[int, int]
"""[start, stop) of tokens."""
Scalar = TypeVar("Scalar", bound=np.generic)
_MIN_MMAP_BYTES = 1 << 20
"""Bytes from which on an array is worth pages of its own."""


class JsonList:
    """An annotation of an array that HTTP bodies hold as a list: pydantic reads it, and describes the list."""

    def __init__(self, item: core_schema.CoreSchema, dtype: type[np.generic]):
        self._items, self._dtype = core_schema.list_schema(item), dtype

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(lambda items: np.array(items, self._dtype), self._items)


Tokens = Annotated[NDArray[np.int32], JsonList(core_schema.int_schema(ge=-(2**31), le=2**31 - 1), np.int32)]
"""Token ids."""
LogProbs = Annotated[NDArray[np.float32], JsonList(core_schema.nullable_schema(core_schema.float_schema()), np.float32)]
"""nats; HTTP bodies have null for NaN."""


def to_token_array(ids: ArrayLike) -> Tokens:
    """These ids; an array of the right type is not copied."""
    return np.asarray(ids, np.int32)


def to_logprob_array(values: ArrayLike) -> LogProbs:
    """These numbers; an array of the right type is not copied."""
    return np.asarray(values, np.float32)


def lazy_zeros(length: int, dtype: type[Scalar]) -> NDArray[Scalar]:
    """[length] zeros, in pages that are there once they are written.

    numpy and torch ask for huge pages, for which the kernel moves other memory away first: that takes several times as
    long as to write them, and a single number makes 2 MiB of one.
    """
    size = length * np.dtype(dtype).itemsize
    if size < _MIN_MMAP_BYTES:
        return np.zeros(length, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype)


def trim_memory() -> None:
    """Return freed memory to the system: glibc keeps what was many small arrays."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def to_int_tuple(ids: Sequence[int] | Tokens) -> tuple[int, ...]:
    """These ids as Python's own integers: some of what reads them knows no others."""
    if not isinstance(ids, np.ndarray) and {*map(type, ids)} <= {int}:
        return tuple(ids)
    return tuple(np.asarray(ids).tolist())


def append_array(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """One after the other. It is not copied if the first is empty, unless it is a part of something larger."""
    if len(one):
        return np.concatenate((one, other))
    return other if other.flags.owndata else other.copy()


def mask_to_spans(mask: Sequence[object] | NDArray[Any]) -> list[Span]:
    """The stretches in which a mask is true: [0, 1, 1, 0, 1] -> [(1, 3), (4, 5)]."""
    edges = np.flatnonzero(np.diff(np.asarray(mask, bool), prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def spans_to_mask(spans: Iterable[Span], length: int) -> NDArray[np.bool_]:
    """[length] the mask that is true in these stretches."""
    mask = np.zeros(length, bool)
    for start, stop in spans:
        mask[start:stop] = True
    return mask


def fields_equal(one: Any, other: Any) -> bool:
    """Whether two dataclasses of one type are equal; arrays in their fields are if all of their elements are."""
    if type(one) is not type(other):
        return False
    pairs = ((getattr(one, f.name), getattr(other, f.name)) for f in fields(one) if f.compare)
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)
