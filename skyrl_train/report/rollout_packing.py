"""How rollouts are laid out inside their files, so that a token takes few bytes and little time.

Most columns are stored as they are read. Three are not:

- trained is not stored: it follows from loss_spans.
- old_logprobs and ref_logprobs are stored by their difference to rollout_logprobs, which they are close to: that of
  the bit patterns, as integers, with the sign in the lowest bit ("old_logprobs_from_rollout"). It is exact, and its
  upper bytes are zeros.
- messages refer to the text where they repeat it: {"messages": [...], "text": [[1, 0, 900]]} says that the content of
  message 1 is text[0:900].

Log-probs look random to any compressor but for sign and exponent, so their bytes are stored by place, all first ones
before all second ones (BYTE_STREAM_SPLIT). Ids repeat as words do, advantages are the same all along a response, and
prompts that a group shares are within zstd's reach: these are stored as they are.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from skyrl_train.data.json_values import jsonable

DERIVED = "trained"
NEXT_TO = "rollout_logprobs"
"""What other log-probs are stored by their difference to."""
CLOSE = ("old_logprobs", "ref_logprobs")
_SUFFIX = "_from_rollout"
_SHORTEST_REFERENCE = 16
"""Characters of a message that are worth a reference to the text."""
_LEVELS = {"text": 9, "messages": 3, "env_extras": 3, "response_ids": 6}
"""Of zstd, where a higher one than 1 saves more than it costs."""
_REPEATED = ("uid", "data_source", "env_class", "status", "error", "stop_reason", "env_metrics", "env_extras", "detail")
_PAGE_BYTES = 8 << 20
"""Of a page, beyond which the compressor forgets: a group's prompts are in one."""
_DICTIONARY_BYTES = 64 << 20
_MAX_RESPONSE = 1 << 24
"""Tokens of a response; more is damage, and would take the memory of the reader."""


def stored_columns(names: Sequence[str], schema: pa.Schema) -> list[str]:
    """The columns of a file with this schema from which those named are made."""
    found: set[str] = set()
    for name in names:
        if name == DERIVED:
            found |= {"loss_spans", "response_tokens"}
        elif name == "messages":
            found |= {"messages", "text"}
        elif name + _SUFFIX in schema.names:
            found |= {name + _SUFFIX, NEXT_TO}
        else:
            found.add(name)
    return sorted(found & {*schema.names})


def packed(table: pa.Table) -> pa.Table:
    """The columns to store for these rollouts."""
    for name in CLOSE:
        if name not in table.column_names:
            continue
        ours, theirs = (_one(table[column]) for column in (name, NEXT_TO))
        offsets = _offsets(ours)
        if ours.null_count == 0 and theirs.null_count == 0 and offsets.equals(_offsets(theirs)):
            values = _bits(ours) - _bits(theirs)
            folded = pa.array((values << 1) ^ (values >> 31))
            place = table.column_names.index(name)
            table = table.set_column(place, name + _SUFFIX, pa.ListArray.from_arrays(offsets, folded))
    return table


def unpacked(table: pa.Table, wanted: pa.Schema) -> pa.Table:
    """The wanted columns of what is stored; null where it is of a version that did not have them."""
    return pa.table([_column(table, field) for field in wanted], schema=wanted)


def write_options(schema: pa.Schema) -> dict[str, Any]:
    """How Parquet stores packed rollouts: arguments of its writer."""
    leaves = {field.name: f"{field.name}.list.element" for field in schema if pa.types.is_list(field.type)}
    split = [leaf for name, leaf in leaves.items() if name.removesuffix(_SUFFIX) in (NEXT_TO, *CLOSE)]
    return {
        "compression": "zstd",
        "compression_level": {leaves.get(name, name): at for name, at in _LEVELS.items() if name in schema.names},
        "use_dictionary": [name for name in _REPEATED if name in schema.names],
        "column_encoding": dict.fromkeys(split, "BYTE_STREAM_SPLIT"),
        "data_page_size": _PAGE_BYTES,
        "dictionary_pagesize_limit": _DICTIONARY_BYTES,
        "write_statistics": False,
        "store_schema": False,
    }


def pack_messages(messages: Sequence[Any], text: str, known: Sequence[str] = ()) -> str:
    """A conversation as it is stored: JSON, in which contents that are in the text are references to it.

    `known`: the JSON of the first messages, where the caller has it already.
    """
    found = list(known)
    references: list[tuple[int, int, int]] = []
    after = 0
    for place in range(len(found), len(messages)):
        message = messages[place]
        content = message.get("content") if isinstance(message, Mapping) else None
        long = isinstance(content, str) and len(content) >= _SHORTEST_REFERENCE
        start = text.find(str(content), after) if long else -1
        if start < 0:
            found.append(dumped(message))
            continue
        after = start + len(str(content))
        references.append((place, start, after))
        found.append(dumped({**message, "content": ""}))
    inside = f"[{', '.join(found)}]"
    return f'{{"messages": {inside}, "text": {json.dumps(references)}}}' if references else inside


def dumped(value: Any) -> str:
    """As JSON of valid Unicode: lone surrogates are escaped, and numbers that are none are null.

    What JSON does not know is text, as `str` has it.
    """
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, default=_known)
        text.encode()
        return text
    except UnicodeEncodeError:
        return json.dumps(value, allow_nan=False, default=_known)
    except ValueError:
        return dumped(_finite(json.loads(json.dumps(value, default=_known))))


def _known(value: Any) -> Any:
    try:
        return jsonable(value)
    except TypeError:
        return str(value)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _column(table: pa.Table, field: pa.Field) -> pa.ChunkedArray | pa.Array:
    name = field.name
    if name == DERIVED:
        return _masks(table)
    if name == "messages":
        pairs = zip(table["messages"].to_pylist(), table["text"].to_pylist(), strict=True)
        return pa.array([_unpacked_messages(*pair) for pair in pairs], pa.string())
    if name + _SUFFIX in table.column_names:
        folded, theirs = (_one(table[column]) for column in (name + _SUFFIX, NEXT_TO))
        kept = folded.flatten().to_numpy(zero_copy_only=False)
        values = (kept.view(np.uint32) >> 1).view(np.int32) ^ -(kept & 1)
        numbers = (values + _bits(theirs)).view(np.float32)
        return pa.ListArray.from_arrays(_offsets(folded), pa.array(numbers)).cast(field.type)
    if name not in table.column_names:
        return pa.nulls(len(table), field.type)
    return table[name].cast(field.type)


def _unpacked_messages(stored: str | None, text: str | None) -> str | None:
    if stored is None or not stored.startswith("{"):
        return stored
    held = json.loads(stored)
    for place, start, stop in held["text"]:
        held["messages"][place]["content"] = (text or "")[start:stop]
    return dumped(held["messages"])


def _masks(table: pa.Table) -> pa.Array:
    """[rows][L] whether a token is in a span of the loss."""
    lengths = table["response_tokens"].to_numpy()
    if len(lengths) and not 0 <= lengths.min() <= lengths.max() <= _MAX_RESPONSE:
        raise ValueError(f"response_tokens is not from 0 to {_MAX_RESPONSE} everywhere")
    offsets = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
    spans = _one(table["loss_spans"])
    flat = spans.flatten()
    start, stop = (flat.field(name).to_numpy(zero_copy_only=False) for name in ("start", "stop"))
    begin = np.repeat(offsets[:-1], np.diff(_offsets(spans)))
    steps = np.zeros(int(offsets[-1]) + 1, np.int32)
    np.add.at(steps, begin + start, 1)
    np.add.at(steps, begin + stop, -1)
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.cumsum(steps[:-1]) > 0))


def _one(column: pa.ChunkedArray) -> pa.ListArray:
    return column.combine_chunks()


def _offsets(lists: pa.ListArray) -> pa.Array:
    """From 0, whatever the lists are a part of."""
    return pa.array(np.asarray(lists.offsets) - lists.offsets[0].as_py(), pa.int32())


def _bits(lists: pa.ListArray) -> np.ndarray[Any, np.dtype[np.int32]]:
    return lists.flatten().to_numpy(zero_copy_only=False).view(np.int32)
