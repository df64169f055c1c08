"""A run's rollouts as pages show them, found by what a person looks for.

`Query` is what is asked, `RolloutIndex` finds it, `RolloutViews` makes the objects of a page. What filters and orders
need of every rollout is in memory, about 100 bytes each. Texts are read from the files when they are searched or shown,
or ahead of that, and kept up to TEXTS_KEPT_BYTES.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from skyrl_train.config.redaction import find_secret_pieces
from skyrl_train.errors import DataError
from skyrl_train.report.rollout_files import HIDDEN_TOKEN, RolloutReader, step_file
from skyrl_train.report.untrusted_files import from_json

ORDERS = ("step", "-step", "reward", "-reward", "tokens", "-tokens")
MAX_ROWS = 500
_MAX_TEXT_CHARS = 1000


@dataclass(frozen=True)
class Query:
    """Ranges include their ends. A failed rollout has no reward: no range of rewards has it, and it comes last."""

    step: int | None = None
    step_from: int | None = None
    step_to: int | None = None
    source: str | None = None
    status: str | None = None
    stop_reason: str | None = None
    reward_min: float | None = None
    reward_max: float | None = None
    tokens_min: int | None = None
    tokens_max: int | None = None
    text: str = ""
    """Anywhere in the conversation, in small letters or capitals."""
    order: str = "step"
    """"-" is downwards. Equal ones, and those of a step, are as they were trained on."""
    offset: int = 0
    limit: int = 50

    @classmethod
    def from_params(cls, given: Mapping[str, str]) -> Query:
        """That of a URL's parameters, of which empty ones ask nothing. Raises DataError."""
        readers: dict[str, Callable[[str, str], Any]] = {
            "order": _order,
            "text": _text,
            "limit": _rows,
            "offset": _count,
        }
        readers |= dict.fromkeys(("step", "step_from", "step_to", "tokens_min", "tokens_max"), parse_int32)
        readers |= dict.fromkeys(("reward_min", "reward_max"), _number)
        known = [field.name for field in fields(cls)]
        if unknown := sorted(given.keys() - {*known}):
            raise DataError(f"{unknown[0][:40]!r} is no parameter of rollouts, which are {', '.join(known)}.")
        read = {name: readers.get(name, _word)(name, value) for name, value in given.items() if value}
        return cls(**read)


def parse_int32(name: str, value: str) -> int:
    """Of 32 bits. Raises DataError."""
    try:
        number = int(value)
    except ValueError:
        raise DataError(f"{name}={value[:40]!r} is not a whole number.") from None
    if not -(2**31) <= number < 2**31:
        raise DataError(f"{name}={number} is out of range: it has at most 31 bits.")
    return number


def _count(name: str, value: str) -> int:
    number = parse_int32(name, value)
    if number < 0:
        raise DataError(f"{name}={number} must be at least 0.")
    return number


def _rows(name: str, value: str) -> int:
    number = parse_int32(name, value)
    if not 1 <= number <= MAX_ROWS:
        raise DataError(f"{name}={number} must be from 1 to {MAX_ROWS}; ask for the next page by offset.")
    return number


def _number(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if number != number:
        raise DataError(f"{name}={value[:40]!r} is not a number.")
    return number


def _order(name: str, value: str) -> str:
    if value not in ORDERS:
        raise DataError(f"{name}={value[:40]!r} is not one of {', '.join(ORDERS)}.")
    return value


def _text(name: str, value: str) -> str:
    if len(value) > _MAX_TEXT_CHARS:
        raise DataError(f"{name} has {len(value)} characters; at most {_MAX_TEXT_CHARS} are searched for.")
    return value


def _word(name: str, value: str) -> str:
    return value


# -- pages -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_ROW = ("step", "uid", "group", "sample", "source", "reward", "status", "stop_reason", "tokens", "turns")
_SCALARS = (
    "step", "uid", "group", "sample", "env_class", "raw_reward", "status", "error", "detail", "stop_reason",
    "temperature", "min_version", "max_version", "prompt_tokens", "response_tokens",
)  # fmt: skip
_TOKEN_COLUMNS = {
    "logprobs": "rollout_logprobs",
    "old_logprobs": "old_logprobs",
    "ref_logprobs": "ref_logprobs",
    "advantages": "advantages",
    "rewards": "token_rewards",
}


SECRET = "<secret>"
"""The text of a token that spells a secret, when it was written or here."""


class RolloutViews:
    """The objects of a page, of the rollouts that there are when it asks. Not for several threads at a time."""

    def __init__(self, run: Path):
        self.index = RolloutIndex(run)
        self._files = RolloutReader(run)
        self._vocabulary: dict[int, str] | None = None

    def close(self) -> None:
        self.index.close()

    def rollouts(self, query: Query) -> dict[str, Any]:
        """A page of the rows that a query asks for, how many there are in all, and what can be chosen."""
        self.index.refresh()
        found = self.index.find(query)
        return {"total": found.total, "rows": self._rows(found.page), "facets": self.index.facets()}

    def group(self, step: int, uid: str, group: int | None = None) -> dict[str, Any]:
        """The samples of a prompt in a step, and the prompt. `group`: of a prompt that the step has twice.

        Raises DataError if there is none.
        """
        self.index.refresh()
        condition = _is(step, uid, group)
        rows = self.index.table.filter(condition).sort_by([("group", "ascending"), ("sample", "ascending")])
        kept = self._files.table([step], ["messages"], _is(step, uid, group))
        if not len(rows) or not len(kept):
            raise DataError(f"step {step} has no rollouts of the prompt {uid[:40]!r}; they may be gone by now.")
        return {"rows": self._rows(rows), "prompt": _opening(from_json(kept["messages"][0].as_py(), []))}

    def rollout(self, step: int, uid: str, sample: int, group: int | None = None) -> dict[str, Any]:
        """Raises DataError if there is none."""
        found = self._files.table([step], filter=_is(step, uid, group) & (pc.field("sample") == sample))
        if not len(found):
            raise DataError(
                f"step {step} has no sample {sample} of the prompt {uid[:40]!r}; its rollouts may be gone by now."
            )
        return self.rollout_details(found.slice(0, 1).to_pylist()[0])

    def rollout_details(self, row: Mapping[str, Any], tokens: bool = True) -> dict[str, Any]:
        """All of a rollout, given a row of RolloutFiles.table. Raises DataError if its columns do not fit together."""
        try:
            return self._rollout_details(row, tokens)
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            where = f"step {row['step']}, sample {row['sample']} of the prompt {str(row['uid'])[:40]!r}"
            raise DataError(f"{where}: this rollout is damaged and cannot be shown: {error}") from error

    def _rollout_details(self, row: Mapping[str, Any], tokens: bool) -> dict[str, Any]:
        return {
            **{name: row[name] for name in _SCALARS},
            "source": row["data_source"],
            "reward": row["reward"] if row["status"] == "ok" else None,
            "preview": (row["text"] or "")[:PREVIEW],
            "messages": _messages(from_json(row["messages"], [])),
            "text": row["text"] or "",
            "turns": [
                {**turn, "tool_calls": _messages(from_json(turn["tool_calls"], []))} for turn in row["turns"] or []
            ],
            "env_metrics": _mapping(from_json(row["env_metrics"], {})),
            "env_extras": _mapping(from_json(row["env_extras"], {})),
            "tokens": self._tokens(row) if tokens else None,
        }

    def _rows(self, page: pa.Table) -> list[dict[str, Any]]:
        rows = page.select(list(_ROW)).to_pylist()
        previews = self.index.previews(page)
        return [{**row, "preview": preview} for row, preview in zip(rows, previews, strict=True)]

    def _tokens(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Over prompt and response; what tokens were not sampled with, or not trained on, is null."""
        prompt, response = row["prompt_ids"] or [], row["response_ids"] or []
        ids = [*prompt, *response]
        nothing: list[float | None] = [None] * len(response)
        vocabulary = self._texts()
        texts = [SECRET if one == HIDDEN_TOKEN else vocabulary.get(one, f"<{one}>") for one in ids]
        secret = find_secret_pieces(texts)
        ids = [HIDDEN_TOKEN if hides else one for one, hides in zip(ids, secret, strict=True)]
        sampled = np.zeros(len(response), bool)
        for turn in row["turns"] or []:
            sampled[turn["start"] : turn["stop"]] = True
        columns = {name: _shortest(row[column]) or nothing for name, column in _TOKEN_COLUMNS.items()}
        pairs = zip(columns["logprobs"], sampled.tolist(), strict=True)
        columns["logprobs"] = [value if was else None for value, was in pairs]
        return {
            "ids": ids,
            "texts": [SECRET if hides else text for text, hides in zip(texts, secret, strict=True)],
            "prompt": len(prompt),
            "trained": [False] * len(prompt) + (row["trained"] or [False] * len(response)),
            "restarts": [{"start": len(prompt) + one["start"]} for one in row["restarts"] or []],
            **{name: [None] * len(prompt) + values for name, values in columns.items()},
        }

    def _texts(self) -> dict[int, str]:
        if self._vocabulary is None:
            try:
                self._vocabulary = self._files.vocabulary() or None  # a run writes it after its first step
            except OSError as error:
                _log.warning("Tokens are shown by their ids: %s", error)
                self._vocabulary = {}
        return self._vocabulary or {}


def _is(step: int, uid: str, group: int | None) -> pc.Expression:
    condition = (pc.field("step") == step) & (pc.field("uid") == uid)
    return condition if group is None else condition & (pc.field("group") == group)


def _shortest(values: Sequence[float] | None) -> list[float | None]:
    """Numbers of 32 bits with as few digits as tell them apart from all others of 32 bits."""
    return [float(str(one)) for one in np.asarray(values or [], np.float32)]


def _messages(value: Any) -> list[dict[str, Any]]:
    """Those of a list, whatever a file holds in its place."""
    return [one for one in value if isinstance(one, dict)] if isinstance(value, list) else []


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _opening(messages: Any) -> list[Any]:
    """The messages before the first answer."""
    opening = []
    for message in _messages(messages):
        if message.get("role") == "assistant":
            break
        opening.append(message)
    return opening


# -- the index ---------------------------------------------------------------------------------------------------------

TEXT_CACHE_BYTES = 1 << 30
QUANTILES = (10, 25, 75, 90)
_MIN_DISTINCT_REWARDS = 3
"""Rewards that differ: with fewer, quantiles show nothing."""
PREVIEW = 240
"""Characters."""
_READ = ("step", "uid", "group", "sample", "data_source", "reward", "status", "stop_reason", "response_tokens", "turns")
_FRAME = re.compile(r'[\d\s{}\[\],:"]*')
_NAMES = json.dumps({"messages": [{"role": "user assistant system tool", "content": "", "tool_calls": []}], "text": []})
"""What is in the JSON of conversations, whatever is said in them: names, and signs and numbers like those of _FRAME."""
_FACETS = {"sources": "source", "statuses": "status", "stop_reasons": "stop_reason"}
READ_AHEAD_BYTES = 256 << 20
_MAX_CACHED_SEARCHES = 16
BLOCK_BYTES = 8 << 20
_BYTES_PER_TOKEN = 5
"""About what a token's text takes."""
_Stamp = tuple[int, int, int]


@dataclass(frozen=True)
class SearchResult:
    """A page of the rollouts that a query leaves: columns of the index, and how many there are in all."""

    total: int
    page: pa.Table


class RolloutIndex:
    """Not for several threads at a time.

    Example: `RolloutIndex(Path("runs/a")).find(Query(reward_min=1.0, text="wait")).total`
    """

    def __init__(self, run: Path):
        self._run, self._files = Path(run), RolloutReader(run)
        self._stamps: dict[int, _Stamp] = {}
        self._steps: dict[int, pa.Table] = {}
        self._quantiles_of: dict[int, list[float]] = {}
        self._rewards_of: dict[int, set[float]] = {}
        """Some that differ, of each step: as many as tell whether there are more than two."""
        self.table = _indexed(self._files.table([], _READ), [0])
        """A row of every rollout, in the order of steps and of the rows of a step.

        The columns are step, uid, group, sample, source, reward, status, stop_reason, tokens (sampled tokens),
        response_tokens (tokens between turns included), turns, and `row`, the rollout's place in its step. `reward` is
        null where the rollout failed.
        """
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
        self._add_steps(changed)
        self._stamps = now
        self.table = pa.concat_tables(
            [self.table.slice(0, 0), *(self._steps[step] for step in sorted(self._steps))]
        ).combine_chunks()
        self.quantiles = self._quantiles()

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def facets(self) -> dict[str, list[Any]]:
        """What there is to choose from, over all rollouts."""
        values = {name: sorted(self.table[column].unique().drop_null().to_pylist()) for name, column in _FACETS.items()}
        return {"steps": sorted(self._steps), **values}

    def find(self, query: Query) -> SearchResult:
        """The rollouts that a query asks for, in its order."""
        found = self.table.filter(_condition(query)) if len(self.table) else self.table
        if query.text and len(found):
            found = self._with_text(found, query.text)
        if query.order != "step" and len(found):
            name, direction = query.order.lstrip("-"), "descending" if query.order[0] == "-" else "ascending"
            keys = {name: direction} | {"step": "ascending"} if name != "step" else {name: direction}
            found = found.take(pc.sort_indices(found, sort_keys=[*keys.items(), ("row", "ascending")]))
        return SearchResult(len(found), found.slice(query.offset, query.limit))

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

    def _add_steps(self, steps: Sequence[int]) -> None:
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
            self._rewards_of[step] = {*pc.unique(table["reward"]).drop_null()[:_MIN_DISTINCT_REWARDS].to_pylist()}

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
        if len(set().union(*self._rewards_of.values())) < _MIN_DISTINCT_REWARDS:
            return {}
        known = {step: values for step, values in self._quantiles_of.items() if values}
        columns = {f"reward/p{percent}": place for place, percent in enumerate(QUANTILES)} if known else {}
        return {name: {step: values[place] for step, values in known.items()} for name, place in columns.items()}

    def _with_text(self, found: pa.Table, text: str) -> pa.Table:
        """The rows whose conversation has it."""
        known = self._searches.setdefault(text, {})
        self._searches.move_to_end(text)
        while len(self._searches) > _MAX_CACHED_SEARCHES:
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
        """Steps of which texts are read at a time: about BLOCK_BYTES, or of one step what it has."""
        block: list[int] = []
        size = 0
        for step in steps:
            more = (pc.sum(self._steps[step]["response_tokens"]).as_py() or 0) * _BYTES_PER_TOKEN
            if block and size + more > BLOCK_BYTES:
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
        while self._texts_bytes > TEXT_CACHE_BYTES:
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
            words = _conversation_texts(from_json(texts["messages"][place].as_py(), []))
            said[place] = any(text.lower() in one.lower() for one in words)
        elsewhere = pa.chunked_array([said])
    return pc.or_(found, elsewhere)


def _matches(column: pa.ChunkedArray, text: str) -> pa.ChunkedArray:
    return pc.fill_null(pc.match_substring(column, text, ignore_case=True), False)


def _conversation_texts(value: Any) -> Iterator[str]:
    """The texts in the JSON of a conversation, without names."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, one in value.items():
            if name != "role":
                yield from _conversation_texts(one)
    elif isinstance(value, list):
        for one in value:
            yield from _conversation_texts(one)


def _stamp(file: Path) -> _Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
