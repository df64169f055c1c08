"""Numpy arrays of token ids and log-probs, which carry them from an engine's response to the training batch."""

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
"""Indices [start, stop) of consecutive tokens."""
Scalar = TypeVar("Scalar", bound=np.generic)
_MIN_MMAP_BYTES = 1 << 20
"""Minimum size (bytes) of an array that gets separate memory pages."""


class JsonList:
    """A pydantic annotation of an array that HTTP bodies hold as a list.

    Args:
        item: Pydantic schema of an item of the list.
        dtype: Data type of the array.
    """

    def __init__(self, item: core_schema.CoreSchema, dtype: type[np.generic]):
        self._items, self._dtype = core_schema.list_schema(item), dtype

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> core_schema.CoreSchema:
        return core_schema.no_info_after_validator_function(lambda items: np.array(items, self._dtype), self._items)


Tokens = Annotated[NDArray[np.int32], JsonList(core_schema.int_schema(ge=-(2**31), le=2**31 - 1), np.int32)]
"""Token ids."""
LogProbs = Annotated[NDArray[np.float32], JsonList(core_schema.nullable_schema(core_schema.float_schema()), np.float32)]
"""Log-probs in nats. HTTP bodies hold null for NaN."""

TokenTable = Annotated[NDArray[np.int32], JsonList(core_schema.list_schema(core_schema.int_schema()), np.int32)]
"""Token ids, [tokens, k]."""
LogProbTable = Annotated[NDArray[np.float32], JsonList(core_schema.list_schema(core_schema.float_schema()), np.float32)]
"""Log-probs in nats, [tokens, k]."""


def to_token_array(ids: ArrayLike) -> Tokens:
    """Return token ids as an int32 array. An array of this type is not copied."""
    return np.asarray(ids, np.int32)


def to_logprob_array(values: ArrayLike) -> LogProbs:
    """Return log-probs as a float32 array. An array of this type is not copied."""
    return np.asarray(values, np.float32)


def lazy_zeros(length: int, dtype: type[Scalar]) -> NDArray[Scalar]:
    """Return an array [length] of zeros whose memory pages are allocated when they are first written.

    numpy and torch request huge pages. The kernel must move other memory to provide these, which takes several times as
    long as writing them, and a single written number allocates 2 MiB.
    """
    size = length * np.dtype(dtype).itemsize
    if size < _MIN_MMAP_BYTES:
        return np.zeros(length, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype)


def trim_memory() -> None:
    """Return freed memory to the system, since glibc keeps the memory of many small arrays. No effect without glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def to_int_tuple(ids: Sequence[int] | Tokens) -> tuple[int, ...]:
    """Return token ids as a tuple of Python integers, for libraries that do not accept numpy integers."""
    if not isinstance(ids, np.ndarray) and {*map(type, ids)} <= {int}:
        return tuple(ids)
    return tuple(np.asarray(ids).tolist())


def append_array(first: NDArray[Any], second: NDArray[Any]) -> NDArray[Any]:
    """Concatenate two arrays. If the first is empty, the second is returned, copied only if it is a view."""
    if len(first):
        return np.concatenate((first, second))
    return second if second.flags.owndata else second.copy()


def mask_to_spans(mask: Sequence[object] | NDArray[Any]) -> list[Span]:
    """Return the spans in which a mask is true: [0, 1, 1, 0, 1] -> [(1, 3), (4, 5)]."""
    edges = np.flatnonzero(np.diff(np.asarray(mask, bool), prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def spans_to_mask(spans: Iterable[Span], length: int) -> NDArray[np.bool_]:
    """Return a mask [length] that is true in the spans."""
    mask = np.zeros(length, bool)
    for start, stop in spans:
        mask[start:stop] = True
    return mask


def fields_equal(first: Any, second: Any) -> bool:
    """True if two dataclasses have the same type and equal fields. Arrays are equal if all of their elements are."""
    if type(first) is not type(second):
        return False
    pairs = ((getattr(first, f.name), getattr(second, f.name)) for f in fields(first) if f.compare)
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)
