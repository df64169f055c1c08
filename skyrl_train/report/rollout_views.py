"""Search over a run's rollouts, and the JSON objects with which pages show them.

`RolloutIndex` finds the rollouts that match a `Query`, and `RolloutViews` makes the objects of a page. The columns for
filters and sort orders are in memory, about 100 bytes per rollout. Texts are read from the files when they are searched
or shown, or ahead of that, and cached up to TEXT_CACHE_BYTES.
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
from skyrl_train.report.session_views import objects_in, session_view
from skyrl_train.report.untrusted_files import from_json

ORDERS = ("step", "-step", "reward", "-reward", "tokens", "-tokens")
MAX_ROWS = 500
_MAX_TEXT_CHARS = 1000


@dataclass(frozen=True)
class Query:
    """A search for rollouts: filters, sort order, and the page of the result.

    Ranges include both ends. A failed rollout has no reward: it is in no range of rewards, and sorted last.
    """

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
    """Text that must occur in the conversation, ignoring case."""
    order: str = "step"
    """One of ORDERS; "-" means descending. Rollouts that are equal in it have the order of training."""
    offset: int = 0
    limit: int = 50

    @classmethod
    def from_params(cls, params: Mapping[str, str]) -> Query:
        """Return the query of a URL's parameters, in which an empty value means the default.

        Raises:
            DataError: If a parameter is unknown, or its value is invalid.
        """
        parsers: dict[str, Callable[[str, str], Any]] = {
            "order": _parse_order,
            "text": _parse_text,
            "limit": _parse_limit,
            "offset": _parse_offset,
        }
        parsers |= dict.fromkeys(("step", "step_from", "step_to", "tokens_min", "tokens_max"), parse_int32)
        parsers |= dict.fromkeys(("reward_min", "reward_max"), _parse_float)
        names = [field.name for field in fields(cls)]
        if unknown := sorted(params.keys() - {*names}):
            raise DataError(f"{unknown[0][:40]!r} is not a parameter of rollouts. Choose from {', '.join(names)}.")
        return cls(**{name: parsers.get(name, _parse_str)(name, value) for name, value in params.items() if value})


def parse_int32(name: str, value: str) -> int:
    """Return the signed 32-bit integer that the value of parameter `name` holds. Raises DataError if it holds none."""
    try:
        number = int(value)
    except ValueError:
        raise DataError(f"{name}={value[:40]!r} is not an integer.") from None
    if not -(2**31) <= number < 2**31:
        raise DataError(f"{name}={number!r} is out of range. It must be from {-(2**31)} to {2**31 - 1}.")
    return number


def _parse_offset(name: str, value: str) -> int:
    number = parse_int32(name, value)
    if number < 0:
        raise DataError(f"{name}={number} must be at least 0.")
    return number


def _parse_limit(name: str, value: str) -> int:
    number = parse_int32(name, value)
    if not 1 <= number <= MAX_ROWS:
        raise DataError(f"{name}={number} must be from 1 to {MAX_ROWS}. Get later rows with the parameter offset.")
    return number


def _parse_float(name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = float("nan")
    if number != number:
        raise DataError(f"{name}={value[:40]!r} is not a number.")
    return number


def _parse_order(name: str, value: str) -> str:
    if value not in ORDERS:
        raise DataError(f"{name}={value[:40]!r} is not one of {', '.join(ORDERS)}.")
    return value


def _parse_text(name: str, value: str) -> str:
    if len(value) > _MAX_TEXT_CHARS:
        raise DataError(f"{name} has {len(value)} characters; at most {_MAX_TEXT_CHARS} are allowed.")
    return value


def _parse_str(name: str, value: str) -> str:
    return value


# -- pages -------------------------------------------------------------------------------------------------------------

_log = logging.getLogger(__name__)
_ROW_COLUMNS = ("step", "uid", "group", "sample", "source", "reward", "status", "stop_reason", "tokens", "turns")
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
"""Text that pages show for a token that spells a secret."""


class RolloutViews:
    """JSON objects about a run's rollouts for pages. Not thread-safe: the caller must hold a lock."""

    def __init__(self, run: Path):
        """Read from the folder of a run, which may still be active."""
        self.index = RolloutIndex(run)
        self._files = RolloutReader(run)
        self._vocabulary: dict[int, str] | None = None

    def close(self) -> None:
        """Stop the threads of the index. Methods that read files must not be called afterwards."""
        self.index.close()

    def rollouts(self, query: Query) -> dict[str, Any]:
        """Return a page of the rollouts that match a query, after looking for new files.

        Files that cannot be read are skipped with a warning.

        Returns:
            `total`: number of matching rollouts; `rows`: those of the page, with a preview of the response; `facets`:
            the values that each filter offers, see `RolloutIndex.facets`.
        """
        self.index.refresh()
        result = self.index.find(query)
        return {"total": result.total, "rows": self._rows(result.page), "facets": self.index.facets()}

    def group(self, step: int, uid: str, group: int | None = None) -> dict[str, Any]:
        """Return the samples of a prompt in a step, as `rows`, and the messages of the `prompt`.

        Args:
            step: Step that trained on the group.
            uid: Unique id of the prompt.
            group: Index of the group, for a prompt that the step has more than once; None for all of them.

        Raises:
            DataError: If there is no such rollout, for example because its file was deleted.
            OSError: If the file of the step cannot be read.
        """
        self.index.refresh()
        condition = _is_group(step, uid, group)
        rows = self.index.table.filter(condition).sort_by([("group", "ascending"), ("sample", "ascending")])
        stored = self._files.table([step], ["messages"], condition)
        if not len(rows) or not len(stored):
            raise DataError(f"step {step} has no rollouts of the prompt {uid[:40]!r}. They may have been deleted.")
        return {"rows": self._rows(rows), "prompt": _prompt_messages(from_json(stored["messages"][0].as_py(), []))}

    def rollout(self, step: int, uid: str, sample: int, group: int | None = None) -> dict[str, Any]:
        """Return all details of one rollout, as `rollout_details` does.

        Args:
            step: Step that trained on the rollout.
            uid: Unique id of the prompt.
            sample: Index among the samples of the prompt.
            group: Index of the group, for a prompt that the step has more than once; None for the first one.

        Raises:
            DataError: If there is no such rollout, or it is damaged.
            OSError: If the file of the step cannot be read.
        """
        table = self._files.table([step], filter=_is_group(step, uid, group) & (pc.field("sample") == sample))
        if not len(table):
            raise DataError(
                f"step {step} has no sample {sample} of the prompt {uid[:40]!r}. Its rollouts may have been deleted."
            )
        return self.rollout_details(table.slice(0, 1).to_pylist()[0])

    def rollout_details(self, row: Mapping[str, Any], tokens: bool = True) -> dict[str, Any]:
        """Return all details of a rollout as a JSON object: scalars, messages, turns, metrics, session and tokens.

        Args:
            row: A row of `RolloutReader.table` with all columns.
            tokens: True to include the token view; otherwise `tokens` is None in the result.

        Raises:
            DataError: If the columns do not fit together.
        """
        try:
            return self._rollout_details(row, tokens)
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            location = f"step {row['step']}, sample {row['sample']} of the prompt {str(row['uid'])[:40]!r}"
            raise DataError(f"{location}: this rollout is damaged and cannot be shown: {error}") from error

    def _rollout_details(self, row: Mapping[str, Any], tokens: bool) -> dict[str, Any]:
        return {
            **{name: row[name] for name in _SCALARS},
            "source": row["data_source"],
            "reward": row["reward"] if row["status"] == "ok" else None,
            "preview": (row["text"] or "")[:PREVIEW],
            "messages": objects_in(from_json(row["messages"], [])),
            "text": row["text"] or "",
            "turns": [
                {**turn, "tool_calls": objects_in(from_json(turn["tool_calls"], []))} for turn in row["turns"] or []
            ],
            "env_metrics": _mapping(from_json(row["env_metrics"], {})),
            "env_extras": _mapping(from_json(row["env_extras"], {})),
            "session": session_view(from_json(row["session"], None), row["trained"] or [], row["advantages"] or []),
            "tokens": self._tokens(row) if tokens else None,
        }

    def _rows(self, page: pa.Table) -> list[dict[str, Any]]:
        rows = page.select(list(_ROW_COLUMNS)).to_pylist()
        previews = self.index.previews(page)
        return [{**row, "preview": preview} for row, preview in zip(rows, previews, strict=True)]

    def _tokens(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return lists over the tokens of prompt and response, with None for values that a token does not have."""
        prompt, response = row["prompt_ids"] or [], row["response_ids"] or []
        ids = [*prompt, *response]
        nothing: list[float | None] = [None] * len(response)
        vocabulary = self._token_texts()
        texts = [SECRET if token == HIDDEN_TOKEN else vocabulary.get(token, f"<{token}>") for token in ids]
        is_secret = find_secret_pieces(texts)
        ids = [HIDDEN_TOKEN if secret else token for token, secret in zip(ids, is_secret, strict=True)]
        is_sampled = np.zeros(len(response), bool)
        for turn in row["turns"] or []:
            is_sampled[turn["start"] : turn["stop"]] = True
        columns = {name: _shortest_floats(row[column]) or nothing for name, column in _TOKEN_COLUMNS.items()}
        pairs = zip(columns["logprobs"], is_sampled.tolist(), strict=True)
        columns["logprobs"] = [value if sampled else None for value, sampled in pairs]
        return {
            "ids": ids,
            "texts": [SECRET if secret else text for text, secret in zip(texts, is_secret, strict=True)],
            "prompt": len(prompt),
            "trained": [False] * len(prompt) + (row["trained"] or [False] * len(response)),
            "restarts": [{"start": len(prompt) + restart["start"]} for restart in row["restarts"] or []],
            **{name: [None] * len(prompt) + values for name, values in columns.items()},
        }

    def _token_texts(self) -> dict[int, str]:
        if self._vocabulary is None:
            try:
                self._vocabulary = self._files.vocabulary() or None  # a run writes it after its first step
            except OSError as error:
                _log.warning("The texts of tokens cannot be read, so token ids are shown instead: %s", error)
                self._vocabulary = {}
        return self._vocabulary or {}


def _is_group(step: int, uid: str, group: int | None) -> pc.Expression:
    condition = (pc.field("step") == step) & (pc.field("uid") == uid)
    return condition if group is None else condition & (pc.field("group") == group)


def _shortest_floats(values: Sequence[float] | None) -> list[float | None]:
    """Return 32-bit numbers with as few digits as distinguish them from all other 32-bit numbers."""
    return [float(str(value)) for value in np.asarray(values or [], np.float32)]


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _prompt_messages(messages: Any) -> list[Any]:
    """Return the messages before the first one of the assistant."""
    prompt = []
    for message in objects_in(messages):
        if message.get("role") == "assistant":
            break
        prompt.append(message)
    return prompt


# -- the index ---------------------------------------------------------------------------------------------------------

TEXT_CACHE_BYTES = 1 << 30
"""Maximum size of the cache of texts."""
QUANTILES = (10, 25, 75, 90)
"""Percentiles of the rewards of each step."""
_MIN_DISTINCT_REWARDS = 3
"""Minimum number of distinct rewards in a run for quantiles: with fewer they would jump between the same values."""
PREVIEW = 240
"""Number of characters of a response in a row of a page."""
_READ_COLUMNS = (
    "step",
    "uid",
    "group",
    "sample",
    "data_source",
    "reward",
    "status",
    "stop_reason",
    "response_tokens",
    "turns",
)
_JSON_SYNTAX = re.compile(r'[\d\s{}\[\],:"]*')
_JSON_NAMES = json.dumps(
    {"messages": [{"role": "user assistant system tool", "content": "", "tool_calls": []}], "text": []}
)
"""Names that the JSON of every conversation contains, whatever its texts are, like the characters of _JSON_SYNTAX."""
_FACETS = {"sources": "source", "statuses": "status", "stop_reasons": "stop_reason"}
READ_AHEAD_BYTES = 256 << 20
"""Maximum size of the texts that `RolloutIndex.read_ahead` caches."""
_MAX_CACHED_SEARCHES = 16
BLOCK_BYTES = 8 << 20
"""Approximate size of the texts that are read at a time."""
_BYTES_PER_TOKEN = 5
"""Approximate size of a token's text."""
_Stamp = tuple[int, int, int]
"""Modification time in ns, size and inode of a file: they change if the file is replaced."""


@dataclass(frozen=True)
class SearchResult:
    """A page of the rollouts that match a query, with columns of the index, and the total number of matches."""

    total: int
    page: pa.Table


class RolloutIndex:
    """An index of a run's rollouts for filtering, sorting and text search. Not thread-safe.

    Example: `RolloutIndex(Path("runs/a")).find(Query(reward_min=1.0, text="wait")).total`
    """

    def __init__(self, run: Path):
        """Create an empty index of the rollouts in the folder of a run. `refresh` reads them."""
        self._run, self._files = Path(run), RolloutReader(run)
        self._stamps: dict[int, _Stamp] = {}
        self._steps: dict[int, pa.Table] = {}
        self._step_quantiles: dict[int, list[float]] = {}
        self._step_rewards: dict[int, set[float]] = {}
        """Up to _MIN_DISTINCT_REWARDS distinct rewards of each step."""
        self.table = _index_table(self._files.table([], _READ_COLUMNS), [0])
        """One row per rollout, sorted by step and then by row in the step's file.

        The columns are step, uid, group, sample, source, reward, status, stop_reason, tokens (sampled tokens),
        response_tokens (including tokens between turns), turns, and `row`, the rollout's index in its step. `reward` is
        null if the rollout failed.
        """
        self.quantiles: dict[str, dict[int, float]] = {}
        """Percentiles of rewards, "reward/p10" and so on -> step -> value, as of the last refresh. Empty if the run has
        only one or two distinct rewards."""
        self._texts: OrderedDict[int, pa.Table] = OrderedDict()
        self._texts_bytes = 0
        self._searches: OrderedDict[str, dict[int, NDArray[np.bool_]]] = OrderedDict()
        self._pool = ThreadPoolExecutor(min(8, os.cpu_count() or 1), "rollouts")

    def refresh(self) -> None:
        """Read the files of steps that are new or have changed, and drop steps whose files are gone.

        A file that cannot be read is skipped with a warning, and read again once it has changed.
        """
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
        """Stop the reader threads without waiting for them. Methods that read files must not be called afterwards."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def facets(self) -> dict[str, list[Any]]:
        """Return the distinct `steps`, `sources`, `statuses` and `stop_reasons` of all rollouts, sorted."""
        values = {name: sorted(self.table[column].unique().drop_null().to_pylist()) for name, column in _FACETS.items()}
        return {"steps": sorted(self._steps), **values}

    def find(self, query: Query) -> SearchResult:
        """Return the page of the rollouts that match a query, in its order, as of the last refresh.

        A text search reads the conversations that are not cached. Files that cannot be read match no text.
        """
        matches = self.table.filter(_condition(query)) if len(self.table) else self.table
        if query.text and len(matches):
            matches = self._with_text(matches, query.text)
        if query.order != "step" and len(matches):
            name, direction = query.order.lstrip("-"), "descending" if query.order[0] == "-" else "ascending"
            keys = {name: direction} | {"step": "ascending"} if name != "step" else {name: direction}
            matches = matches.take(pc.sort_indices(matches, sort_keys=[*keys.items(), ("row", "ascending")]))
        return SearchResult(len(matches), matches.slice(query.offset, query.limit))

    def previews(self, page: pa.Table) -> list[str]:
        """Return the start of each row's response, at most PREVIEW characters; "" if its file is gone.

        Args:
            page: Rows of the index with the columns step and row.
        """
        positions: dict[int, list[tuple[int, int]]] = {}
        for position, (step, row) in enumerate(zip(page["step"].to_pylist(), page["row"].to_pylist(), strict=True)):
            positions.setdefault(step, []).append((position, row))
        previews = [""] * len(page)
        for block in self._blocks(sorted(positions)):  # a page may have one row of each of hundreds of steps
            for step, texts in self._texts_of(block):
                for position, row in positions[step]:
                    if row < len(texts):  # else the file was replaced or deleted in the meantime
                        previews[position] = (texts["text"][row].as_py() or "")[:PREVIEW]
        return previews

    def _add_steps(self, steps: Sequence[int]) -> None:
        loaded = zip(steps, self._pool.map(self._read, steps), strict=True)
        tables = {step: table for step, table in loaded if table is not None}
        if not tables:
            return
        lengths = [len(table) for table in tables.values()]
        all_rows = _index_table(pa.concat_tables(tables.values()), lengths)
        begins = [0, *accumulate(lengths)]
        for step, begin, length in zip(tables, begins, lengths, strict=False):
            self._steps[step] = table = all_rows.slice(begin, length)
            values = pc.quantile(table["reward"], [percent / 100 for percent in QUANTILES]).to_pylist()
            self._step_quantiles[step] = [value for value in values if value is not None]
            self._step_rewards[step] = {*pc.unique(table["reward"]).drop_null()[:_MIN_DISTINCT_REWARDS].to_pylist()}

    def _read(self, step: int) -> pa.Table | None:
        """Return the columns of a step that the index needs; None for an incomplete file, which may be being copied."""
        try:
            table = self._files.table([step], _READ_COLUMNS)
        except OSError as error:
            _log.warning("The rollouts of step %d cannot be read and are left out: %s", step, error)
            return None
        if table["group"].null_count or table["sample"].null_count:
            _log.warning("The rollouts of step %d are left out: some have no group or no sample.", step)
            return None
        index = table.schema.get_field_index("step")  # replaced by the step of the file's name, which finds the file
        return table.set_column(index, "step", pa.array(np.full(len(table), step, np.int32)))

    def _conversations(self, step: int) -> pa.Table:
        """Return the texts of a step; no rows if the file cannot be read."""
        try:
            return self._files.conversations(step)
        except OSError as error:
            _log.warning("The texts of step %d cannot be read and are not searched: %s", step, error)
            return pa.table({name: pa.array([], pa.string()) for name in ("text", "messages")})

    def _quantiles(self) -> dict[str, dict[int, float]]:
        if len(set().union(*self._step_rewards.values())) < _MIN_DISTINCT_REWARDS:
            return {}
        known = {step: values for step, values in self._step_quantiles.items() if values}
        columns = {f"reward/p{percent}": index for index, percent in enumerate(QUANTILES)} if known else {}
        return {name: {step: values[index] for step, values in known.items()} for name, index in columns.items()}

    def _with_text(self, table: pa.Table, text: str) -> pa.Table:
        """Return the rows whose conversation contains a text. The rows must be sorted by step."""
        known = self._searches.setdefault(text, {})
        self._searches.move_to_end(text)
        while len(self._searches) > _MAX_CACHED_SEARCHES:
            self._searches.popitem(last=False)
        steps = table["step"].unique().to_pylist()
        unknown = [step for step in steps if step not in known]
        for block in self._blocks(unknown):
            texts = self._texts_of(block)
            contains = _contains(pa.concat_tables([step_texts for _, step_texts in texts]), text).to_numpy()
            ends = accumulate(len(step_texts) for _, step_texts in texts)
            known |= {
                step: contains[end - len(step_texts) : end] for (step, step_texts), end in zip(texts, ends, strict=True)
            }
        mask = np.zeros(len(table), bool)
        rows, begin = table["row"].to_numpy(), 0
        for step, count in zip(*np.unique(table["step"].to_numpy(), return_counts=True), strict=True):
            span = slice(begin, begin := begin + int(count))
            if len(known[step]) == len(self._steps[step]):  # else the file has changed since the last refresh
                mask[span] = known[step][rows[span]]
        return table.filter(pa.array(mask))

    def read_ahead(self) -> bool:
        """Cache the texts of one more block of steps, the latest first. Blocks while it reads files.

        Return False, and read nothing, if all texts are cached or the cache has READ_AHEAD_BYTES.
        """
        unread = [step for step in sorted(self._steps, reverse=True) if step not in self._texts]
        if not unread or self._texts_bytes >= READ_AHEAD_BYTES:
            return False
        self._texts_of(next(self._blocks(unread)))
        return True

    def _blocks(self, steps: Sequence[int]) -> Iterator[list[int]]:
        """Split steps into blocks whose texts have about BLOCK_BYTES. A block has at least one step."""
        block: list[int] = []
        size = 0
        for step in steps:
            step_bytes = (pc.sum(self._steps[step]["response_tokens"]).as_py() or 0) * _BYTES_PER_TOKEN
            if block and size + step_bytes > BLOCK_BYTES:
                yield block
                block, size = [], 0
            block.append(step)
            size += step_bytes
        if block:
            yield block

    def _texts_of(self, steps: Iterable[int]) -> list[tuple[int, pa.Table]]:
        """Return (step, texts) of the steps in ascending order. The cache keeps the most recently used steps."""
        requested = sorted(steps)
        unread = [step for step in requested if step not in self._texts]
        loaded = dict(zip(unread, self._pool.map(self._conversations, unread), strict=True))
        self._texts |= loaded
        self._texts_bytes += sum(texts.nbytes for texts in loaded.values())
        result = [(step, self._texts[step]) for step in requested]
        for step in requested:
            self._texts.move_to_end(step)
        while self._texts_bytes > TEXT_CACHE_BYTES:
            self._texts_bytes -= self._texts.popitem(last=False)[1].nbytes
        return result

    def _forget(self, step: int) -> None:
        self._steps.pop(step, None)
        self._step_quantiles.pop(step, None)
        self._step_rewards.pop(step, None)
        if (texts := self._texts.pop(step, None)) is not None:
            self._texts_bytes -= texts.nbytes
        for known in self._searches.values():
            known.pop(step, None)


def _index_table(table: pa.Table, lengths: Sequence[int]) -> pa.Table:
    """Return the rows of the index for the stored rollouts of consecutive steps with these lengths."""
    has_succeeded = pc.equal(table["status"], "ok")
    rows = np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])
    columns = {
        **{name: table[name] for name in ("step", "uid", "group", "sample")},
        "source": table["data_source"],
        "reward": pc.if_else(has_succeeded, table["reward"], pa.scalar(None, pa.float64())),
        **{name: table[name] for name in ("status", "stop_reason")},
        "tokens": _sampled_tokens(table["turns"]),
        "response_tokens": table["response_tokens"],
        "turns": pc.fill_null(pc.list_value_length(table["turns"]), 0),
        "row": pa.chunked_array([rows]),
    }
    return pa.table(columns)


def _sampled_tokens(turns: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return the number of sampled tokens of every rollout, from its turns."""
    counts = np.zeros(len(turns), np.int32)
    rows, spans = pc.list_parent_indices(turns), pc.list_flatten(turns)
    observed = pc.fill_null(pc.struct_field(spans, "observation_tokens"), 0)  # files of earlier versions lack it
    lengths = pc.subtract(pc.subtract(pc.struct_field(spans, "stop"), pc.struct_field(spans, "start")), observed)
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
    for column, minimum, maximum in (
        ("step", query.step_from, query.step_to),
        ("reward", query.reward_min, query.reward_max),
        ("tokens", query.tokens_min, query.tokens_max),
    ):
        if minimum is not None:
            condition &= pc.field(column) >= minimum
        if maximum is not None:
            condition &= pc.field(column) <= maximum
    return condition


def _spellings(text: str) -> Sequence[str]:
    """Return the forms that a text can have in a JSON string: with minimal escapes, and with all non-ASCII escaped."""
    return tuple(dict.fromkeys(json.dumps(text, ensure_ascii=ascii_only)[1:-1] for ascii_only in (False, True)))


def _contains(texts: pa.Table, text: str) -> pa.ChunkedArray:
    """Return booleans: True if a conversation contains a text, ignoring case."""
    in_response, in_messages = _matches(texts["text"], text), pa.chunked_array([[False] * len(texts)], pa.bool_())
    for spelling in _spellings(text):
        in_messages = pc.or_(in_messages, _matches(texts["messages"], spelling))
    if _JSON_SYNTAX.fullmatch(text) or text.lower() in _JSON_NAMES.lower():  # the match may be JSON, not a text
        mask = np.zeros(len(texts), bool)
        for row in pc.indices_nonzero(pc.and_not(in_messages, in_response)).to_pylist():
            parts = _conversation_texts(from_json(texts["messages"][row].as_py(), []))
            mask[row] = any(text.lower() in part.lower() for part in parts)
        in_messages = pa.chunked_array([mask])
    return pc.or_(in_response, in_messages)


def _matches(column: pa.ChunkedArray, text: str) -> pa.ChunkedArray:
    return pc.fill_null(pc.match_substring(column, text, ignore_case=True), False)


def _conversation_texts(value: Any) -> Iterator[str]:
    """Yield all texts in the JSON of a conversation, except keys and roles."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for name, item in value.items():
            if name != "role":
                yield from _conversation_texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _conversation_texts(item)


def _stamp(file: Path) -> _Stamp | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
