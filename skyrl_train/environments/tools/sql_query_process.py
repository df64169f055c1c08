"""Program that runs one SQL query in a process that can be killed: JSON request on stdin, JSON response on stdout."""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
import time
from urllib.parse import quote

ALLOWED_ACTIONS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, 33}
"""Actions that the authorizer allows. 33 is SQLITE_RECURSIVE, which the sqlite3 module does not define."""
DENIED_FUNCTIONS = {"load_extension", "fts3_tokenizer", "readfile", "writefile", "edit"}
PROGRESS_INTERVAL = 1000
"""Number of instructions of SQLite's virtual machine between two checks of the deadline."""
OVERTIME_S = 0.25
"""Time that SQLite has to notice the deadline before a signal ends the process. A single SQL function may run far
longer without checking the deadline."""
MAX_VALUE = 2**24
"""Maximum bytes of a string or blob, also of one that exists only during the query."""


def answer(request: dict) -> dict:
    """Run a query and return its result or an error.

    Args:
        request: "database" (path), "sql", "immutable" (bool), and the fields of `sql.QueryLimits`.

    Returns:
        {"columns", "rows", "more"}, where "more" is True if the limits left rows out; or {"error"}, a sentence.
    """
    deadline = time.monotonic() + request["wall_s"]
    # The default action of the signal ends this process, even if it is busy or orphaned.
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, request["wall_s"] + OVERTIME_S)
    uri = f"file:{quote(request['database'])}?mode=ro" + ("&immutable=1" if request["immutable"] else "")
    connection = sqlite3.connect(uri, uri=True, isolation_level=None)
    connection.text_factory = lambda raw: raw.decode("utf-8", "replace")
    if hasattr(connection, "setlimit"):
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE)
        connection.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    connection.set_progress_handler(lambda: time.monotonic() > deadline, PROGRESS_INTERVAL)
    connection.set_authorizer(_allow_only_reads)
    try:
        cursor = connection.execute(request["sql"])
        columns = [name[0] for name in cursor.description or ()]
        if len(columns) > request["max_columns"]:
            return {"error": f"the result has {len(columns)} columns; at most {request['max_columns']} can be returned"}
        rows: list[list[object]] = []
        left = request["max_characters"]
        for row in cursor:
            values = [_to_json_value(value, request["max_value"]) for value in row]
            left -= sum(len(str(value)) for value in values)
            if len(rows) == request["max_rows"] or left < 0:
                return {"columns": columns, "rows": rows, "more": True}
            rows.append(values)
        return {"columns": columns, "rows": rows, "more": False}
    except (sqlite3.Error, sqlite3.Warning, ValueError, OverflowError, MemoryError) as error:
        late = time.monotonic() > deadline
        return {"error": "timed out" if late else f"{error or type(error).__name__}"}


def _allow_only_reads(
    action: int, first: str | None, second: str | None, database: str | None, trigger: str | None
) -> int:
    allowed = action in ALLOWED_ACTIONS and (second or "").lower() not in DENIED_FUNCTIONS
    return sqlite3.SQLITE_OK if allowed else sqlite3.SQLITE_DENY


def _to_json_value(value: object, max_chars: int) -> object:
    if isinstance(value, bytes):
        return f"<{len(value)} bytes>"
    if isinstance(value, str) and len(value) > max_chars:
        return f"{value[:max_chars]}... ({len(value)} characters)"
    if isinstance(value, float) and value - value != 0:  # infinities are not JSON
        return str(value)
    return value


if __name__ == "__main__":
    json.dump(answer(json.load(sys.stdin)), sys.stdout)
