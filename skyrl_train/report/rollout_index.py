"""All rollouts of a run, found by what a person looks for.

What filters and orders need of every rollout is in memory, about 100 bytes each. Texts are read from the files when
they are searched or shown, or ahead of that, and kept up to TEXTS_KEPT_BYTES.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from skyrl_train.report.plain_json import from_json
from skyrl_train.report.rollout_files import RolloutFiles, step_file
from skyrl_train.report.rollout_query import Query

TEXTS_KEPT_BYTES = 1 << 30
QUANTILES = (10, 25, 75, 90)
_SEVERAL = 3
"""Rewards that differ: with fewer, quantiles show nothing."""
PREVIEW = 240
"""Characters."""
_READ = ("step", "uid", "group", "sample", "data_source", "reward", "status", "stop_reason", "response_tokens", "turns")
_FRAME = re.compile(r'[\d\s{}\[\],:"]*')
_NAMES = json.dumps({"messages": [{"role": "user assistant system tool", "content": "", "tool_calls": []}], "text": []})
"""What is in the JSON of conversations, whatever is said in them: names, and signs and numbers like those of _FRAME."""
_FACETS = {"sources": "source", "statuses": "status", "stop_reasons": "stop_reason"}
READ_AHEAD_BYTES = 256 << 20
_SEARCHES_KEPT = 16
_BLOCK_BYTES = 8 << 20
_BYTES_A_TOKEN = 5
"""About what a token's text takes."""
_log = logging.getLogger(__name__)
_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class Found:
    """A page of the rollouts that a query leaves: columns of the index, and how many there are in all."""

    total: int
    page: pa.Table


class RolloutIndex:
    """Not for several threads at a time.

    Example: `RolloutIndex(Path("runs/a")).find(Query(reward_min=1.0, text="wait")).total`
    """

    def __init__(self, run: Path):
        self._run, self._files = Path(run), RolloutFiles(run)
        self._stamps: dict[int, _Stamp] = {}
        self._steps: dict[int, pa.Table] = {}
        self._quantiles_of: dict[int, list[float]] = {}
        self._rewards_of: dict[int, set[float]] = {}
        """Some that differ, of each step: as many as tell whether there are more than two."""
        self._all = _indexed(self._files.table([], _READ), [0])
        self.quantiles: dict[str, dict[int, float]] = {}
        """reward/p10 and so on: of the rewards of each step's rollouts, as of the last refresh. None if all are one of
        two: quantiles would jump between these, and the mean says all."""
        self._texts: OrderedDict[int, pa.Table] = OrderedDict()
        self._texts_bytes = 0
        self._searches: OrderedDict[str, dict[int, NDArray[np.bool_]]] = OrderedDict()
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "rollouts")

    def refresh(self) -> None:
        """Take in steps that are new or were taken again, and let go of those that are gone."""
        now = {step: stamp for step in self._files.steps() if (stamp := _stamp(step_file(self._run, step)))}
        if now == self._stamps:
            return
        changed = [step for step, stamp in now.items() if self._stamps.get(step) != stamp]
        for step in self._stamps.keys() - now.keys() | {*changed}:
            self._forget(step)
        self._take_in(changed)
        self._stamps = now
        self._all = pa.concat_tables(
            [self._all.slice(0, 0), *(self._steps[step] for step in sorted(self._steps))]
        ).combine_chunks()
        self.quantiles = self._quantiles()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def table(self) -> pa.Table:
        """A row of every rollout, as it was trained on.

        The columns are step, uid, group, sample, source, reward, status, stop_reason, tokens (sampled tokens),
        response_tokens (tokens between turns included), turns, and `row`, the rollout's place in its step. `reward` is
        null where the rollout failed.
        """
        return self._all

    def facets(self) -> dict[str, list[Any]]:
        """What there is to choose from, over all rollouts."""
        values = {name: sorted(self._all[column].unique().drop_null().to_pylist()) for name, column in _FACETS.items()}
        return {"steps": sorted(self._steps), **values}

    def find(self, query: Query) -> Found:
        """The rollouts that a query asks for, in its order."""
        found = self._all.filter(_condition(query)) if len(self._all) else self._all
        if query.text and len(found):
            found = self._with_text(found, query.text)
        if query.order != "step" and len(found):
            name, direction = query.order.lstrip("-"), "descending" if query.order[0] == "-" else "ascending"
            keys = {name: direction} | {"step": "ascending"} if name != "step" else {name: direction}
            found = found.take(pc.sort_indices(found, sort_keys=[*keys.items(), ("row", "ascending")]))
        return Found(len(found), found.slice(query.offset, query.limit))

    def previews(self, page: pa.Table) -> list[str]:
        """How the responses of these rows begin."""
        places: dict[int, list[tuple[int, int]]] = {}
        for place, (step, row) in enumerate(zip(page["step"].to_pylist(), page["row"].to_pylist(), strict=True)):
            places.setdefault(step, []).append((place, row))
        found = [""] * len(page)
        for together in self._blocks(sorted(places)):  # a page may have a row of each of hundreds of steps
            for step, texts in self._texts_of(together):
                for place, row in places[step]:
                    if row < len(texts):  # else its file is gone meanwhile
                        found[place] = (texts["text"][row].as_py() or "")[:PREVIEW]
        return found

    def _take_in(self, steps: Sequence[int]) -> None:
        """Read these steps."""
        read = zip(steps, self._pool.map(self._read, steps), strict=True)
        tables = {step: table for step, table in read if table is not None}
        if not tables:
            return
        lengths = [len(table) for table in tables.values()]
        whole = _indexed(pa.concat_tables(tables.values()), lengths)
        begins = [0, *accumulate(lengths)]
        for step, begin, length in zip(tables, begins, lengths, strict=False):
            self._steps[step] = table = whole.slice(begin, length)
            values = pc.quantile(table["reward"], [percent / 100 for percent in QUANTILES]).to_pylist()
            self._quantiles_of[step] = [value for value in values if value is not None]
            self._rewards_of[step] = {*pc.unique(table["reward"]).drop_null()[:_SEVERAL].to_pylist()}

    def _read(self, step: int) -> pa.Table | None:
        """None for a file that is no whole one: it may be being copied, and is read again once it has changed."""
        try:
            found = self._files.table([step], _READ)
        except OSError as error:
            _log.warning("Step %d is left out: %s", step, error)
            return None
        if found["group"].null_count or found["sample"].null_count:
            _log.warning("Step %d is left out: its rollouts have no group or no sample.", step)
            return None
        place = found.schema.get_field_index("step")  # the file's name says it: others go by that
        return found.set_column(place, "step", pa.array(np.full(len(found), step, np.int32)))

    def _conversations(self, step: int) -> pa.Table:
        """Without rows where the file cannot be read."""
        try:
            return self._files.conversations(step)
        except OSError as error:
            _log.warning("Step %d is not searched: %s", step, error)
            return pa.table({name: pa.array([], pa.string()) for name in ("text", "messages")})

    def _quantiles(self) -> dict[str, dict[int, float]]:
        if len(set().union(*self._rewards_of.values())) < _SEVERAL:
            return {}
        known = {step: values for step, values in self._quantiles_of.items() if values}
        columns = {f"reward/p{percent}": place for place, percent in enumerate(QUANTILES)} if known else {}
        return {name: {step: values[place] for step, values in known.items()} for name, place in columns.items()}

    def _with_text(self, found: pa.Table, text: str) -> pa.Table:
        """The rows whose conversation has it."""
        known = self._searches.setdefault(text, {})
        self._searches.move_to_end(text)
        while len(self._searches) > _SEARCHES_KEPT:
            self._searches.popitem(last=False)
        steps = found["step"].unique().to_pylist()
        unknown = [step for step in steps if step not in known]
        for together in self._blocks(unknown):
            texts = self._texts_of(together)
            has = _has(pa.concat_tables([table for _, table in texts]), text).to_numpy()
            ends = accumulate(len(table) for _, table in texts)
            known |= {step: has[end - len(table) : end] for (step, table), end in zip(texts, ends, strict=True)}
        mask = np.zeros(len(found), bool)
        rows, begin = found["row"].to_numpy(), 0
        for step, count in zip(*np.unique(found["step"].to_numpy(), return_counts=True), strict=True):
            places = slice(begin, begin := begin + int(count))
            if len(known[step]) == len(self._steps[step]):  # else its file has changed meanwhile
                mask[places] = known[step][rows[places]]
        return found.filter(pa.array(mask))

    def read_ahead(self) -> bool:
        """Read the texts of some more steps, the latest first, up to READ_AHEAD_BYTES; False if there are none left."""
        unread = [step for step in sorted(self._steps, reverse=True) if step not in self._texts]
        if not unread or self._texts_bytes >= READ_AHEAD_BYTES:
            return False
        self._texts_of(next(self._blocks(unread)))
        return True

    def _blocks(self, steps: Sequence[int]) -> Iterator[list[int]]:
        """Steps of which texts are read at a time: about _BLOCK_BYTES, or of one step what it has."""
        block: list[int] = []
        size = 0
        for step in steps:
            more = (pc.sum(self._steps[step]["response_tokens"]).as_py() or 0) * _BYTES_A_TOKEN
            if block and size + more > _BLOCK_BYTES:
                yield block
                block, size = [], 0
            block.append(step)
            size += more
        if block:
            yield block

    def _texts_of(self, steps: Iterable[int]) -> list[tuple[int, pa.Table]]:
        """The texts of steps; those of the steps asked for last are kept."""
        wanted = sorted(steps)
        unread = [step for step in wanted if step not in self._texts]
        read = dict(zip(unread, self._pool.map(self._conversations, unread), strict=True))
        self._texts |= read
        self._texts_bytes += sum(texts.nbytes for texts in read.values())
        found = [(step, self._texts[step]) for step in wanted]
        for step in wanted:
            self._texts.move_to_end(step)
        while self._texts_bytes > TEXTS_KEPT_BYTES:
            self._texts_bytes -= self._texts.popitem(last=False)[1].nbytes
        return found

    def _forget(self, step: int) -> None:
        self._steps.pop(step, None)
        self._quantiles_of.pop(step, None)
        self._rewards_of.pop(step, None)
        if (texts := self._texts.pop(step, None)) is not None:
            self._texts_bytes -= texts.nbytes
        for known in self._searches.values():
            known.pop(step, None)


def _indexed(read: pa.Table, lengths: Sequence[int]) -> pa.Table:
    """`lengths`: of its steps, which follow each other."""
    worked = pc.equal(read["status"], "ok")
    rows = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    columns = {
        **{name: read[name] for name in ("step", "uid", "group", "sample")},
        "source": read["data_source"],
        "reward": pc.if_else(worked, read["reward"], pa.scalar(None, pa.float64())),
        **{name: read[name] for name in ("status", "stop_reason")},
        "tokens": _sampled_tokens(read["turns"]),
        "response_tokens": read["response_tokens"],
        "turns": pc.fill_null(pc.list_value_length(read["turns"]), 0),
        "row": pa.chunked_array([rows]),
    }
    return pa.table(columns)


def _sampled_tokens(turns: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the number of sampled tokens of every rollout, from its turns."""
    counts = np.zeros(len(turns), np.int32)
    rows, spans = pc.list_parent_indices(turns), pc.list_flatten(turns)
    read = pc.fill_null(pc.struct_field(spans, "observation_tokens"), 0)  # files of earlier versions lack it
    lengths = pc.subtract(pc.subtract(pc.struct_field(spans, "stop"), pc.struct_field(spans, "start")), read)
    np.add.at(counts, rows.to_numpy(), pc.fill_null(lengths, 0).to_numpy())
    return pa.chunked_array([counts])


def _condition(query: Query) -> pc.Expression:
    condition = pc.scalar(True)
    for column, value in (
        ("step", query.step),
        ("source", query.source),
        ("status", query.status),
        ("stop_reason", query.stop_reason),
    ):
        if value is not None:
            condition &= pc.field(column) == value
    for column, least, most in (
        ("step", query.step_from, query.step_to),
        ("reward", query.reward_min, query.reward_max),
        ("tokens", query.tokens_min, query.tokens_max),
    ):
        if least is not None:
            condition &= pc.field(column) >= least
        if most is not None:
            condition &= pc.field(column) <= most
    return condition


def _spellings(text: str) -> Sequence[str]:
    """A text as it is in a JSON string: its signs may be escaped there, or only those that must be."""
    return tuple(dict.fromkeys(json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)))


def _has(texts: pa.Table, text: str) -> pa.ChunkedArray:
    """Whether each conversation has a text."""
    found, elsewhere = _matches(texts["text"], text), pa.chunked_array([[False] * len(texts)], pa.bool_())
    for spelling in _spellings(text):
        elsewhere = pc.or_(elsewhere, _matches(texts["messages"], spelling))
    if _FRAME.fullmatch(text) or text.lower() in _NAMES.lower():
        said = np.zeros(len(texts), bool)
        for place in pc.indices_nonzero(pc.and_not(elsewhere, found)).to_pylist():
            words = _said(from_json(texts["messages"][place].as_py(), []))
            said[place] = any(text.lower() in one.lower() for one in words)
        elsewhere = pa.chunked_array([said])
    return pc.or_(found, elsewhere)


def _matches(column: pa.ChunkedArray, text: str) -> pa.ChunkedArray:
    return pc.fill_null(pc.match_substring(column, text, ignore_case=True), False)


def _said(value: Any) -> Iterator[str]:
    """The texts in the JSON of a conversation, without names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            if name != "role":
                yield from _said(one)
    elif isinstance(value, list):
        for one in value:
            yield from _said(one)


def _stamp(file: Path) -> _Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
