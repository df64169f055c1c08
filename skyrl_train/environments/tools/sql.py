"""The sql tool: a model's queries on SQLite databases. SQLite's authorizer allows only reads."""

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
"""Time that a query's process has to start on a busy machine, besides the time limit of the query."""
MEMORY_MB = 1024
"""Maximum address space of a query's process, in MiB."""
_QUERY_PROCESS = Path(__file__).with_name("sql_query_process.py")
SUFFIXES = (".sqlite", ".sqlite3", ".db")


@dataclass(frozen=True)
class QueryLimits:
    """Limits of one query: its time in seconds, and the part of its result that is returned."""

    wall_s: float = 10.0
    max_rows: int = 100
    max_columns: int = 100
    max_value: int = 1000
    """Maximum characters of one value; a longer string is truncated."""
    max_characters: int = 100_000
    """Maximum characters of all values together."""


@dataclass(frozen=True, slots=True)
class QueryResult:
    """The result of a query. Values are str, int, float or None; a note of its length replaces a blob."""

    columns: list[str]
    rows: list[list[Any]]
    more: bool
    """True if the query has further rows that the limits left out."""


class QueryError(Exception):
    """An error of a query; the message is SQLite's, "timed out", or names the limit that the query exceeded."""


def find_database(folder: str | Path, name: str) -> Path:
    """Return the resolved path of database `name` in `folder`.

    Args:
        folder: Folder that holds the databases.
        name: Path of the file below `folder`, or NAME for NAME.sqlite or, as in Spider and BIRD, NAME/NAME.sqlite. The
            suffixes .sqlite3 and .db work as well.

    Raises:
        DataError: No such file exists in the folder; a path or a link that leads out of the folder does not count.
    """
    root = Path(folder).resolve()
    stem = Path(name).name
    candidates = [
        Path(name),
        *(Path(f"{name}{end}") for end in SUFFIXES),
        *(Path(name, stem + end) for end in SUFFIXES),
    ]
    for candidate in candidates if "\0" not in name else []:
        path = (root / candidate).resolve()
        if path.is_file() and path.is_relative_to(root):
            return path
    raise DataError(f"There is no database {name!r:.200} in {root}; name a database by its path below that folder.")


def query(database: Path, sql: str, limits: QueryLimits | None = None) -> QueryResult:
    """Run one read-only statement in a separate process and wait for its result. Thread-safe.

    A database that has a write-ahead log next to it may change meanwhile; any other database is opened as immutable.

    Args:
        database: Path of the SQLite file.
        sql: The statement.
        limits: Limits of time and size; None for the defaults.

    Raises:
        QueryError: SQLite rejects the statement (for example because it writes), the time is over, the result has too
            many columns, or the query needs too much memory.
    """
    limits = limits or QueryLimits()
    immutable = not Path(f"{database}-wal").exists()
    request = {"database": str(database), "sql": sql, "immutable": immutable, **vars(limits)}
    limiter = shutil.which("prlimit")
    options = [f"--as={MEMORY_MB * 2**20}", "--core=0", "--nofile=32", "--"]
    limit_command = [limiter, *options] if limiter else []
    try:
        process = subprocess.run(
            [*limit_command, sys.executable, "-I", "-S", str(_QUERY_PROCESS)],
            input=json.dumps(request).encode("ascii"),
            capture_output=True,
            timeout=limits.wall_s + START_TIMEOUT_S,
            env={},
            start_new_session=True,
        )
        response = json.loads(process.stdout)
    except subprocess.TimeoutExpired:
        raise QueryError("timed out") from None
    except ValueError:
        if process.returncode in (-signal.SIGALRM, -signal.SIGKILL):
            raise QueryError("timed out") from None
        raise QueryError("the query ended its process: it needs too much memory") from None
    if "error" in response:
        raise QueryError(response["error"])
    return QueryResult(**response)


class SQLTool(Tool):
    """A tool that runs read-only queries on one SQLite database.

    Args:
        folder: Folder that holds the databases; only the configuration sets it.
        database: Name of the database in `folder` (see `find_database`); a row may override it.
        wall_s: Maximum seconds of one query.
        max_rows: Maximum rows of a result.
        max_output: Maximum characters of a result.
    """

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
        """Check that the folder of the databases, and the configured database if any, exist.

        Raises:
            ConfigError: The folder does not exist.
            DataError: The database is not in it.
        """
        folder = Path(settings["folder"])
        if not folder.is_dir():
            key = "environment.skyrl_gym.tool_use.tool_settings.sql.folder"
            raise ConfigError(f"{key}={str(folder)!r} is not a folder; set it to the folder that holds the databases.")
        if settings.get("database") is not None:
            find_database(folder, settings["database"])

    async def call(self, arguments: dict[str, Any]) -> str:
        """Run a query on the row's database and return the result as text: one line of column names, one per row, and
        the count.

        Raises:
            ToolError: The query fails or takes too long.
            DataError: The row names no database, or one that does not exist.
        """
        if self._database is None:
            raise DataError('The row names no database; add tool_settings={"sql": {"database": "<name>"}} to it.')
        path = find_database(self._folder, str(self._database))
        try:
            result = await asyncio.to_thread(query, path, arguments["query"], self._limits)
        except QueryError as error:
            raise ToolError(f"Error: {error}") from error
        lines = [" | ".join(result.columns), *(" | ".join(map(_cell, row)) for row in result.rows)]
        count = f"first {len(result.rows)} rows; there are more" if result.more else f"{len(result.rows)} rows"
        return "\n".join([*lines, f"({count})"])


def _cell(value: Any) -> str:
    return "NULL" if value is None else str(value).replace("\n", "\\n")
