"""SQL for a model, over databases that it can read but not change: SQLite's authorizer allows only reads."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.environments.tools.base import Tool, ToolError
from skyrl_train.errors import ConfigError, DataError

START_TIMEOUT_S = 30.0
"""Time for a query's process to start on a busy machine; not counted as the query's time."""
MEMORY_MB = 1024
_INSIDE = Path(__file__).with_name("sql_query_process.py")
SUFFIXES = (".sqlite", ".sqlite3", ".db")


@dataclass(frozen=True)
class QueryLimits:
    """The time that one query may take, and how much of its result is returned."""

    wall_s: float = 10.0
    max_rows: int = 100
    max_columns: int = 100
    max_value: int = 1000
    """Characters of one value."""
    max_characters: int = 100_000
    """Characters of all values in total."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """A result: values are str, int, float or None; a blob is replaced by its length."""

    columns: list[str]
    rows: list[list[Any]]
    more: bool
    """Whether there are further rows that the limits left out."""


class QueryError(Exception):
    """A query failed; the message is SQLite's, or "timed out"."""


def find_database(folder: str | Path, name: str) -> Path:
    """Find database `name` in `folder`: the file itself, NAME.sqlite, or NAME/NAME.sqlite as in Spider and BIRD.

    Raises DataError if there is none, or if the name or a link leads out of the folder.
    """
    root = Path(folder).resolve()
    stem = Path(name).name
    places = [Path(name), *(Path(f"{name}{end}") for end in SUFFIXES), *(Path(name, stem + end) for end in SUFFIXES)]
    for place in places if "\0" not in name else []:
        path = (root / place).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path
    raise DataError(f"there is no database {name!r:.200} in {root}; name one by its path below that folder.")


def query(database: Path, sql: str, limits: QueryLimits | None = None) -> QueryResult:
    """Run one read-only statement in a separate process. Raises QueryError. Thread-safe.

    A database with a write-ahead log next to it is opened as one that may change, any other one as immutable.
    """
    limits = limits or QueryLimits()
    immutable = not Path(f"{database}-wal").exists()
    request = {"database": str(database), "sql": sql, "immutable": immutable, **vars(limits)}
    limiter = shutil.which("prlimit")
    options = [f"--as={MEMORY_MB * 2**20}", "--core=0", "--nofile=32", "--"]
    limit_command = [limiter, *options] if limiter else []
    try:
        done = subprocess.run(
            [*limit_command, sys.executable, "-I", "-S", str(_INSIDE)],
            input=json.dumps(request).encode("ascii"),
            capture_output=True,
            timeout=limits.wall_s + START_TIMEOUT_S,
            env={},
            start_new_session=True,
        )
        answer = json.loads(done.stdout)
    except subprocess.TimeoutExpired:
        raise QueryError("timed out") from None
    except ValueError:
        if done.returncode in (-signal.SIGALRM, -signal.SIGKILL):
            raise QueryError("timed out") from None
        raise QueryError("the query ended its process: it needs too much memory") from None
    if "error" in answer:
        raise QueryError(answer["error"])
    return QueryResult(**answer)


class SQLTool(Tool):
    """Runs queries on one database. A row may choose it among those in the folder that the configuration names."""

    name = "sql"
    description = "Runs one SQLite query that only reads, and returns its rows; sqlite_schema lists the tables."
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {"query": {"type": "string", "description": "One SELECT statement."}},
        "required": ["query"],
    }
    from_row = ("database",)

    def __init__(
        self,
        folder: str,
        database: str | None = None,
        wall_s: float = 10.0,
        max_rows: int = 50,
        max_output: int = 8192,
    ):
        self.max_output = max_output
        self.deadline_s = wall_s + 2 * START_TIMEOUT_S
        self._folder, self._database = folder, database
        self._limits = QueryLimits(wall_s=wall_s, max_rows=max_rows)

    @classmethod
    def check(cls, **settings: Any) -> None:
        folder = Path(settings["folder"])
        if not folder.is_dir():
            key = "environment.skyrl_gym.tool_use.tool_settings.sql.folder"
            raise ConfigError(f"{key}={str(folder)!r} is not a folder; name the one that holds the databases.")
        if settings.get("database") is not None:
            find_database(folder, settings["database"])

    async def call(self, arguments: dict[str, Any]) -> str:
        if self._database is None:
            raise DataError('the row needs tool_settings={"sql": {"database": "<name>"}}')
        path = find_database(self._folder, str(self._database))
        try:
            found = await asyncio.to_thread(query, path, arguments["query"], self._limits)
        except QueryError as error:
            raise ToolError(f"Error: {error}") from error
        lines = [" | ".join(found.columns), *(" | ".join(map(_cell, row)) for row in found.rows)]
        count = f"first {len(found.rows)} rows; there are more" if found.more else f"{len(found.rows)} rows"
        return "\n".join([*lines, f"({count})"])


def _cell(value: Any) -> str:
    return "NULL" if value is None else str(value).replace("\n", "\\n")
