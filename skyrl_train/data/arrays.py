"""How tokens and their numbers are held from an engine's answer to the batch: as arrays of numpy."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

Tokens = NDArray[np.int32]
"""Token ids."""
LogProbs = NDArray[np.float32]
"""nats"""
Span = tuple[int, int]
"""[start, stop) of tokens."""
Scalar = TypeVar("Scalar", bound=np.generic)
_LARGE = 1 << 20
"""Bytes from which on an array is worth pages of its own."""


class WholeNumbers:
    """An annotation: pydantic, which describes HTTP's bodies, is to see an array as a list of whole numbers."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(list[int])


def token_array(ids: ArrayLike) -> Tokens:
    """These ids; an array of the right type is not copied."""
    return np.asarray(ids, np.int32)


def logprob_array(values: ArrayLike) -> LogProbs:
    """These numbers; an array of the right type is not copied."""
    return np.asarray(values, np.float32)


def fresh(length: int, dtype: type[Scalar]) -> NDArray[Scalar]:
    """[length] zeros, in pages that are there once they are written.

    numpy and torch ask for huge pages, for which the kernel moves other memory away first: that takes several times as
    long as to write them, and a single number makes 2 MiB of one.
    """
    size = length * np.dtype(dtype).itemsize
    if size < _LARGE:
        return np.zeros(length, dtype)
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype)


def give_back() -> None:
    """Return freed memory to the system: glibc keeps what was many small arrays."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def plain_ids(ids: Sequence[int] | Tokens) -> tuple[int, ...]:
    """These ids as Python's own integers: some of what reads them knows no others."""
    if not isinstance(ids, np.ndarray) and {*map(type, ids)} <= {int}:
        return tuple(ids)
    return tuple(np.asarray(ids).tolist())


def joined(one: NDArray[Any], other: NDArray[Any]) -> NDArray[Any]:
    """One after the other. It is not copied if the first is empty, unless it is a part of something larger."""
    if len(one):
        return np.concatenate((one, other))
    return other if other.flags.owndata else other.copy()


def spans_of(mask: Sequence[object] | NDArray[Any]) -> list[Span]:
    """The stretches in which a mask is true: [0, 1, 1, 0, 1] -> [(1, 3), (4, 5)]."""
    edges = np.flatnonzero(np.diff(np.asarray(mask, bool), prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def mask_of(spans: Iterable[Span], length: int) -> NDArray[np.bool_]:
    """[length] the mask that is true in these stretches."""
    mask = np.zeros(length, bool)
    for start, stop in spans:
        mask[start:stop] = True
    return mask


def same_fields(one: Any, other: Any) -> bool:
    """Whether two dataclasses of one type are equal; arrays in their fields are if all of their elements are."""
    if type(one) is not type(other):
        return False
    pairs = ((getattr(one, f.name), getattr(other, f.name)) for f in fields(one) if f.compare)
    return all(np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)
