"""Questions answered in SQL (SkyRL-SQL): queries to explore the database with, turn by turn, then one as the answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.tools.base import cut, harmless
from skyrl_train.environments.tools.sql import QueryError, QueryLimits, Rows, find_database, query
from skyrl_train.errors import ConfigError, DataError

FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}
"""Where SkyRL-SQL's archive has the databases of a row's `data`; others are in db_path itself."""
DEFAULT_TURNS = 5
MAX_OBSERVATION = 9000
"""Characters."""
EXPLORING = QueryLimits(wall_s=10.0, max_rows=50)
SCORING = QueryLimits(wall_s=20.0, max_rows=100_000, max_value=100_000, max_characters=20_000_000)
SQL_TOKEN = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|[()]|\w+", re.DOTALL)


def between(text: str, tag: str) -> list[str]:
    """What stands in each <tag>...</tag>, from its opening to the next closing."""
    found, at = [], 0
    opening, closing = f"<{tag}>", f"</{tag}>"
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
        found.append(text[start + len(opening) : end].strip())
        at = end + len(closing)
    return found


def has_top_level_order(sql: str) -> bool:
    """Whether the rows of the statement itself are in order, not only those of a part in brackets."""
    depth, words = 0, [""]
    for token in SQL_TOKEN.finditer(sql):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0 and not token[0].startswith(("--", "/*")):
            words.append(token[0].lower())
    return any(pair == ("order", "by") for pair in pairwise(words))


def same_result(found: Rows, wanted: Rows, ordered: bool) -> bool:
    """As many columns, whatever they are called, and equal rows as often: in the same order where that is asked for.

    1 equals 1.0, and numbers are equal that agree in 10 digits: sums depend on the order in which rows come.
    """
    if found.more or len(found.columns) != len(wanted.columns) or len(found.rows) != len(wanted.rows):
        return False
    rows, others = ([tuple(map(_comparable, row)) for row in result.rows] for result in (found, wanted))
    return rows == others if ordered else Counter(rows) == Counter(others)


def _comparable(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) else value


class Text2SQLEnv(TextEnv):
    """One question about one database. The reward comes with the last turn:

    1.0 where the one <solution>query</solution> gives the same result as the row's gold query: the same rows equally
    often, in the same order where the gold query orders them (see `same_result`); 0.0 where it gives another one or
    fails; -1.0 without exactly one solution, so several solutions in a turn are no answer, nor is none when the turns
    end or the response is truncated. What stands before a turn's last "</think>" is thinking, and neither.

    Before, a turn's first <sql>query</sql> is run and its rows, or SQLite's error, are the observation. Queries only
    read, one database, with a deadline each. The row names it by `db_id`, and by `data` where it is of SkyRL-SQL's
    archive, both within the folder `db_path` and nowhere else. `max_turns` of the row or of the generator counts.
    """

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        if not Path(str(env_config.get("db_path"))).expanduser().is_dir():
            key = "environment.skyrl_gym.text2sql.db_path"
            raise ConfigError(f"{key}={env_config.get('db_path')!r} is no folder; name the one with the databases.")

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        spec, name = self.extras.get("reward_spec"), self.extras.get("db_id")
        gold = spec.get("ground_truth") if isinstance(spec, Mapping) else None
        if not isinstance(gold, str) or not isinstance(name, str) or not name:
            raise ValueError('the row needs db_id="<database>" and reward_spec={"ground_truth": "<gold query>"}')
        self.gold = gold
        folder = FOLDERS.get(str(self.extras.get("data")))
        self.database = find_database(
            Path(str(self.env_config.get("db_path"))).expanduser(), f"{folder}/{name}" if folder else name
        )
        self.max_turns = int(self.extras.get("max_turns") or DEFAULT_TURNS)
        self.turns = self.failed_queries = 0

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        action = action.rpartition("</think>")[2]
        solutions = between(action, "solution")
        if solutions or self.turns >= self.max_turns:
            reward = self._score(solutions[0]) if len(solutions) == 1 else -1.0
            return StepOutput([], reward, done=True, metadata=self._metrics(len(solutions) == 1))
        queries = between(action, "sql")
        text = self._explore(queries[0]) if queries else "Error: write one <sql>query</sql>, or the <solution>."
        left = self.max_turns - self.turns
        reminder = f"<reminder>You have {left} turn{'s' * (left != 1)} left to complete the task.</reminder>"
        observation = f"<observation>\n{cut(harmless(text), MAX_OBSERVATION)}\n{reminder}\n</observation>"
        return StepOutput([{"role": "user", "content": observation}], 0.0, done=False)

    def _explore(self, sql: str) -> str:
        try:
            found = query(self.database, sql, EXPLORING)
        except QueryError as error:
            self.failed_queries += 1
            return f"Error: {error}"
        lines = [" | ".join(found.columns), *(" | ".join(map(_cell, row)) for row in found.rows)]
        count = f"first {len(found.rows)} rows; there are more" if found.more else f"{len(found.rows)} rows"
        return "\n".join([*lines, f"({count})"])

    def _score(self, sql: str) -> float:
        try:
            wanted = query(self.database, self.gold, SCORING)
        except QueryError as error:
            raise DataError(f"the gold query of {self.database.name} fails: {error}") from error
        if wanted.more:
            raise DataError(f"the gold query of {self.database.name} has too many rows to compare")
        try:
            found = query(self.database, sql, SCORING)
        except QueryError:
            self.failed_queries += 1
            return 0.0
        return float(same_result(found, wanted, has_top_level_order(self.gold)))

    def _metrics(self, has_solution: bool) -> dict[str, Any]:
        return {"turns": self.turns, "failed_queries": self.failed_queries, "has_solution": has_solution}


def _cell(value: Any) -> str:
    return "NULL" if value is None else str(value).replace("\n", "\\n")
