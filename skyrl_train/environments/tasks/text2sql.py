"""Questions answered in SQL (SkyRL-SQL). The model explores the database turn by turn, then answers with one query."""

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
"""Folder of the databases in SkyRL-SQL's archive, by a row's `data`. Other databases are in db_path itself."""
DEFAULT_MAX_TURNS = 5
MAX_OBSERVATION = 9000
"""Maximum characters of an observation."""
EXPLORATION_LIMITS = QueryLimits(wall_s=10.0, max_rows=50)
SCORING_LIMITS = QueryLimits(wall_s=20.0, max_rows=100_000, max_value=100_000, max_characters=20_000_000)
SQL_TOKEN = re.compile(r"'[^']*'|\"[^\"]*\"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?\*/|[()]|\w+", re.DOTALL)


def extract_tagged(text: str, tag: str) -> list[str]:
    """Return the stripped contents of all <tag>...</tag>, each from an opening tag to the next closing tag."""
    contents, at = [], 0
    opening, closing = f"<{tag}>", f"</{tag}>"
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
        contents.append(text[start + len(opening) : end].strip())
        at = end + len(closing)
    return contents


def has_top_level_order_by(sql: str) -> bool:
    """True if a SQL statement has an ORDER BY outside of parentheses, comments and quotes."""
    depth, words = 0, [""]
    for token in SQL_TOKEN.finditer(sql):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0 and not token[0].startswith(("--", "/*")):
            words.append(token[0].lower())
    return any(pair == ("order", "by") for pair in pairwise(words))


def results_match(result: QueryResult, expected: QueryResult, ordered: bool) -> bool:
    """True if two query results have the same number of columns, and the same rows the same number of times.

    Column names are ignored. 1 equals 1.0, and numbers that agree in 10 digits are equal, because sums depend on the
    order of rows. A truncated `result` does not match.

    Args:
        result: Result of the model's query.
        expected: Result of the gold query.
        ordered: True if the rows must also have the same order.
    """
    if result.more or len(result.columns) != len(expected.columns) or len(result.rows) != len(expected.rows):
        return False
    rows, expected_rows = ([tuple(map(_comparable, row)) for row in table.rows] for table in (result, expected))
    return rows == expected_rows if ordered else Counter(rows) == Counter(expected_rows)


def _comparable(value: Any) -> Any:
    return float(f"{value:.10g}") if isinstance(value, float) else value


class Text2SQLEnv(TextEnv):
    """An environment that rewards a SQL query with the same result as the row's gold query.

    A turn with a <solution>query</solution> ends the episode, as does the last turn. The reward is

    - 1.0 if the only solution gives the same rows as the gold query, in the same order if the gold query orders them
      (see `results_match`),
    - 0.0 if its result differs or the query fails,
    - -1.0 if the turn does not have exactly one solution, for example because the response is truncated.

    In earlier turns, the first <sql>query</sql> is run. Its rows or SQLite's error are the observation. Queries can
    read only a single database, and each has a deadline. Queries and solutions are read from a turn's final answer only
    (`reasoning.final_answer`). The row names the database by `db_id`, and also by `data` if it is in SkyRL-SQL's
    archive. The database must be in the folder `db_path`. The maximum number of turns is the row's or the generator's
    `max_turns`.
    """

    @classmethod
    def parse_row(cls, extras: Mapping[str, Any]) -> tuple[str, str]:
        """Return the gold query, from `reward_spec["ground_truth"]`, and the database's name, from the column `db_id`.

        Raises:
            ValueError: The row lacks one of them.
        """
        name = extras.get("db_id")
        if not isinstance(name, str) or not name:
            raise ValueError(f'the row needs db_id="<database>", got {name!r:.80}')
        return parse_ground_truth(extras), name

    @classmethod
    def check(cls, env_config: Mapping[str, Any]) -> None:
        """Check the folder of the databases.

        Raises:
            ConfigError: `db_path` is not a folder.
        """
        if not Path(str(env_config.get("db_path"))).expanduser().is_dir():
            key = "environment.skyrl_gym.text2sql.db_path"
            raise ConfigError(
                f"{key}={env_config.get('db_path')!r} is not a folder; set it to the folder of the databases."
            )

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
        """Run a query and return the observation, and the kind of error if the query failed."""
        try:
            result = query(self.database, sql, EXPLORATION_LIMITS)
        except QueryError as error:
            self.failed_queries += 1
            return f"Error: {error}", "query_error"
        lines = [" | ".join(result.columns), *(" | ".join(map(_cell, row)) for row in result.rows)]
        count = f"first {len(result.rows)} rows; there are more" if result.more else f"{len(result.rows)} rows"
        return "\n".join([*lines, f"({count})"]), None

    def _score(self, sql: str) -> float:
        try:
            expected = query(self.database, self.gold, SCORING_LIMITS)
        except QueryError as error:
            raise DataError(
                f"the gold query of {self.database.name} fails: {error}. Correct or remove the row."
            ) from error
        if expected.more:
            raise DataError(
                f"the gold query of {self.database.name} has more than {SCORING_LIMITS.max_rows} rows. "
                "Remove the row from the data."
            )
        try:
            result = query(self.database, sql, SCORING_LIMITS)
        except QueryError:
            self.failed_queries += 1
            return 0.0
        return float(results_match(result, expected, has_top_level_order_by(self.gold)))

    def _metrics(self, has_solution: bool) -> dict[str, Any]:
        return {"turns": self.turns, "failed_queries": self.failed_queries, "has_solution": has_solution}


def _cell(value: Any) -> str:
    return "NULL" if value is None else str(value).replace("\n", "\\n")
