"""Questions answered in SQL (SkyRL-SQL): the model explores the database turn by turn, then answers with one query."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from skyrl_train.data.reasoning import final_answer
from skyrl_train.environments.base import StepOutput, TextEnv
from skyrl_train.environments.tasks.gsm8k import parse_ground_truth
from skyrl_train.environments.tools.base import sanitize, tool_call_record, truncate_middle
from skyrl_train.environments.tools.sql import QueryError, QueryLimits, QueryResult, find_database, query
from skyrl_train.errors import ConfigError, DataError

FOLDERS = {"synsql": "SynSQL-2.5M/databases", "spider": "spider/database", "bird": "bird/train/train_databases"}
"""A row's `data` -> its databases' folder in SkyRL-SQL's archive; other databases are in db_path itself."""
DEFAULT_MAX_TURNS = 5
MAX_OBSERVATION = 9000
"""Maximum characters of an observation."""
EXPLORATION_LIMITS = QueryLimits(wall_s=10.0, max_rows=50)
SCORING_LIMITS = QueryLimits(wall_s=20.0, max_rows=100_000, max_value=100_000, max_characters=20_000_000)
SQL_TOKEN = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|[()]|\w+", re.DOTALL)


def extract_tagged(text: str, tag: str) -> list[str]:
    """The contents of all <tag>...</tag>, each from an opening tag to the next closing one."""
    found, at = [], 0
    opening, closing = f"<{tag}>", f"</{tag}>"
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
        found.append(text[start + len(opening) : end].strip())
        at = end + len(closing)
    return found


def has_top_level_order_by(sql: str) -> bool:
    """Whether the statement itself has an ORDER BY, not only a part of it in brackets."""
    depth, words = 0, [""]
    for token in SQL_TOKEN.finditer(sql):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0 and not token[0].startswith(("--", "/*")):
            words.append(token[0].lower())
    return any(pair == ("order", "by") for pair in pairwise(words))


def results_match(found: QueryResult, wanted: QueryResult, ordered: bool) -> bool:
    """Whether both have the same number of columns and the same rows equally often; if `ordered`, in the same order.

    Column names are ignored. 1 equals 1.0, and numbers that agree in 10 digits are equal, because sums depend on the
    order of rows.
    """
    if found.more or len(found.columns) != len(wanted.columns) or len(found.rows) != len(wanted.rows):
        return False
    rows, others = ([tuple(map(_comparable, row)) for row in result.rows] for result in (found, wanted))
    return rows == others if ordered else Counter(rows) == Counter(others)


def _comparable(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) else value


class Text2SQLEnv(TextEnv):
    """One question about one database. The last turn is rewarded:

    1.0 if the only <solution>query</solution> gives the same result as the row's gold query: the same rows equally
    often, and in the same order if the gold query orders them (see `same_result`); 0.0 if its result differs or it
    fails; -1.0 unless there is exactly one solution: several in a turn are no answer, and neither is none when the
    turns end or the response is truncated. Only a turn's final answer (`reasoning.final_answer`) contains queries and
    solutions.

    In earlier turns, the first <sql>query</sql> is run; its rows, or SQLite's error, are the observation. Queries can
    only read a single database, and each has a deadline. The row names the database by `db_id`, and also by `data` if
    it is in SkyRL-SQL's archive; it must be within the folder `db_path`. The number of turns is `max_turns` of the row
    or of the generator.
    """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[str, str]:
        """Return the gold query and the name of the database."""
        name = extras.get("db_id")
        if not isinstance(name, str) or not name:
            raise ValueError(f'the row needs db_id="<database>", got {name!r:.80}')
        return parse_ground_truth(extras), name

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        if not Path(str(env_config.get("db_path"))).expanduser().is_dir():
            key = "environment.skyrl_gym.text2sql.db_path"
            raise ConfigError(f"{key}={env_config.get('db_path')!r} is no folder; name the one with the databases.")

    def __init__(self, env_config: Mapping[str, Any] | None = None, extras: Mapping[str, Any] | None = None):
        super().__init__(env_config, extras)
        self.gold, name = self.parse_row(self.extras)
        folder = FOLDERS.get(str(self.extras.get("data")))
        self.database = find_database(
            Path(str(self.env_config.get("db_path"))).expanduser(), f"{folder}/{name}" if folder else name
        )
        self.max_turns = int(self.extras.get("max_turns") or DEFAULT_MAX_TURNS)
        self.turns = self.failed_queries = 0

    def step(self, action: str) -> StepOutput:
        self.turns += 1
        action = final_answer(action)
        solutions = extract_tagged(action, "solution")
        if solutions or self.turns >= self.max_turns:
            reward = self._score(solutions[0]) if len(solutions) == 1 else -1.0
            return StepOutput([], reward, done=True, metadata=self._metrics(len(solutions) == 1))
        queries = extract_tagged(action, "sql")
        if queries:
            text, error = self._explore(queries[0])
            calls = [tool_call_record("sql", queries[0], error)]
        else:
            text, calls = "Error: write one <sql>query</sql>, or the <solution>.", []
        left = self.max_turns - self.turns
        reminder = f"<reminder>You have {left} turn{'s' * (left != 1)} left to complete the task.</reminder>"
        observation = f"<observation>\n{truncate_middle(sanitize(text), MAX_OBSERVATION)}\n{reminder}\n</observation>"
        return StepOutput([{"role": "user", "content": observation}], 0.0, done=False, tool_calls=calls)

    def _explore(self, sql: str) -> tuple[str, str | None]:
        """What the model is told of the query, and the kind of its failure."""
        try:
            found = query(self.database, sql, EXPLORATION_LIMITS)
        except QueryError as error:
            self.failed_queries += 1
            return f"Error: {error}", "query_error"
        lines = [" | ".join(found.columns), *(" | ".join(map(_cell, row)) for row in found.rows)]
        count = f"first {len(found.rows)} rows; there are more" if found.more else f"{len(found.rows)} rows"
        return "\n".join([*lines, f"({count})"]), None

    def _score(self, sql: str) -> float:
        try:
            wanted = query(self.database, self.gold, SCORING_LIMITS)
        except QueryError as error:
            raise DataError(f"the gold query of {self.database.name} fails: {error}") from error
        if wanted.more:
            raise DataError(f"the gold query of {self.database.name} has too many rows to compare")
        try:
            found = query(self.database, sql, SCORING_LIMITS)
        except QueryError:
            self.failed_queries += 1
            return 0.0
        return float(results_match(found, wanted, has_top_level_order_by(self.gold)))

    def _metrics(self, has_solution: bool) -> dict[str, Any]:
        return {"turns": self.turns, "failed_queries": self.failed_queries, "has_solution": has_solution}


def _cell(value: Any) -> str:
    return "NULL" if value is None else str(value).replace("\n", "\\n")
