"""A run's rollouts as pages show them: rows of a table, one with its conversation and tokens, those of a prompt."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from skyrl_train.config.secrets import spells_secret
from skyrl_train.errors import DataError
from skyrl_train.report.plain_json import from_json
from skyrl_train.report.rollout_files import HIDDEN_TOKEN, RolloutFiles
from skyrl_train.report.rollout_index import PREVIEW, RolloutIndex
from skyrl_train.report.rollout_query import Query

_log = logging.getLogger(__name__)
_ROW = ("step", "uid", "group", "sample", "source", "reward", "status", "stop_reason", "tokens", "turns")
_SCALARS = (
    "step", "uid", "group", "sample", "env_class", "raw_reward", "status", "error", "detail", "stop_reason",
    "temperature", "min_version", "max_version", "prompt_tokens", "response_tokens",
)  # fmt: skip
_OF_TOKENS = {
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
        self._files = RolloutFiles(run)
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
        return self.whole(found.slice(0, 1).to_pylist()[0])

    def whole(self, row: Mapping[str, Any], tokens: bool = True) -> dict[str, Any]:
        """All of a rollout, given a row of RolloutFiles.table. Raises DataError if its columns do not fit together."""
        try:
            return self._whole(row, tokens)
        except (ValueError, TypeError, LookupError, OverflowError) as error:
            where = f"step {row['step']}, sample {row['sample']} of the prompt {str(row['uid'])[:40]!r}"
            raise DataError(f"{where}: this rollout is damaged and cannot be shown: {error}") from error

    def _whole(self, row: Mapping[str, Any], tokens: bool) -> dict[str, Any]:
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
        secret = spells_secret(texts)
        ids = [HIDDEN_TOKEN if hides else one for one, hides in zip(ids, secret, strict=True)]
        sampled = np.zeros(len(response), bool)
        for turn in row["turns"] or []:
            sampled[turn["start"] : turn["stop"]] = True
        columns = {name: _shortest(row[column]) or nothing for name, column in _OF_TOKENS.items()}
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
