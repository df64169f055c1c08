from __future__ import annotations

import hashlib
import resource
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from skyrl_train.environments.tools.base import ToolBox
from skyrl_train.environments.tools.sql import QueryError, QueryLimits, SQLTool, find_database, query
from skyrl_train.errors import ConfigError, DataError

GENEROUS_LIMITS = QueryLimits(wall_s=60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("databases")
    (root / "shop").mkdir()
    with closing(sqlite3.connect(root / "shop" / "shop.sqlite")) as connection, connection:
        connection.execute("create table item (name text, price real, photo blob)")
        items = [("pen", 1.5, b"abc"), ("ink\nred", None, None), ("é", float("inf"), b"")]
        connection.executemany("insert into item values (?, ?, ?)", items)
    with closing(sqlite3.connect(root.parent / "outside.sqlite")) as connection, connection:
        connection.execute("create table secret (x)")
    (root / "link.sqlite").symlink_to(root.parent / "outside.sqlite")
    return root


@pytest.fixture
def shop(folder: Path) -> Iterator[Path]:
    """A database that must be unchanged at the end of the test, without other files next to it."""
    path = find_database(folder, "shop")
    before = hashlib.sha256(path.read_bytes()).hexdigest()
    yield path
    assert hashlib.sha256(path.read_bytes()).hexdigest() == before
    assert [entry.name for entry in path.parent.iterdir()] == ["shop.sqlite"]


def test_query_returns_rows(shop: Path):
    result = query(shop, "select * from item order by rowid", GENEROUS_LIMITS)
    assert result.columns == ["name", "price", "photo"] and not result.more
    assert result.rows == [["pen", 1.5, "<3 bytes>"], ["ink\nred", None, None], ["é", "inf", "<0 bytes>"]]
    recursive = "with recursive n(x) as (select 1 union all select x + 1 from n limit 5) select sum(x) from n"
    assert query(shop, recursive, GENEROUS_LIMITS).rows == [[15]]
    assert query(shop, "select sql from sqlite_schema", GENEROUS_LIMITS).rows[0][0].startswith("CREATE TABLE item")


@pytest.mark.parametrize(
    "sql",
    [
        "insert into item values ('x', 1, null)",
        "update item set price = 0",
        "delete from item",
        "drop table item",
        "create table t (x)",
        "create temp table t (x)",
        "attach database '/tmp/x.sqlite' as other",
        "vacuum into '/tmp/stolen.sqlite'",
        "pragma table_info(item)",
        "pragma writable_schema = on",
        "select load_extension('/tmp/evil.so')",
        "select * from pragma_database_list",
        "begin",
        "analyze",
        "select 1; drop table item",
        "select * from nothing",
        "not sql at all",
        "select '\0'",
    ],
)
def test_statements_that_write_are_rejected(shop: Path, sql: str):
    with pytest.raises(QueryError):
        query(shop, sql, GENEROUS_LIMITS)


@pytest.mark.parametrize(
    "sql",
    [
        "with recursive n(x) as (select 1 union all select x + 1 from n) select count(*) from n",
        "select count(*) from item a, item b, item c, item d, item e, item f, item g, item h, item i, item j, item k, "
        "item l, item m, item n, item o, item p, item q, item r",
    ],
)
def test_endless_query_times_out(shop: Path, sql: str):
    with pytest.raises(QueryError, match="timed out"):
        query(shop, sql, QueryLimits(wall_s=0.3))


@pytest.mark.parametrize(
    "sql",
    [
        "select length(randomblob(1000000000))",
        "select hex(zeroblob(1000000000))",
        "select length(replace(hex(zeroblob(1000000)), '0', hex(zeroblob(1000000))))",
        "with recursive n(x) as (select 'a' union all select x || x from n) select length(x) from n",
    ],
)
def test_query_memory_is_limited(shop: Path, sql: str):
    started = time.monotonic()
    with pytest.raises(QueryError):
        query(shop, sql, QueryLimits(wall_s=20.0))
    assert time.monotonic() - started < 120


def children_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


@pytest.mark.parametrize(
    "sql",
    [
        "select instr(hex(zeroblob(8000000)), hex(zeroblob(4000000)) || '1')",
        "select instr(printf('%.*c', 8000000, 'a'), printf('%.*c', 4000000, 'a') || 'b')",
    ],
)
def test_uninterruptible_query_is_killed_at_deadline(shop: Path, sql: str):
    """The query process ends itself, even if the environment process that waits for it is killed."""
    before = children_cpu_seconds()
    with pytest.raises(QueryError, match="timed out"):
        query(shop, sql, QueryLimits(wall_s=0.5))
    assert children_cpu_seconds() - before < 4.0


def test_results_are_truncated(shop: Path):
    many = "with recursive n(x) as (select 1 union all select x + 1 from n limit 100000) select x from n"
    result = query(shop, many, GENEROUS_LIMITS)
    assert (len(result.rows), result.more) == (100, True)
    wide = f"select {', '.join(['1'] * 101)}"
    with pytest.raises(QueryError, match="101 columns; at most 100"):
        query(shop, wide, GENEROUS_LIMITS)
    ((long,),) = query(shop, "select hex(zeroblob(100000))", GENEROUS_LIMITS).rows
    assert long.endswith("... (200000 characters)") and len(long) < 1100
    heavy = "with recursive n(x) as (select 1 union all select x + 1 from n limit 500) select hex(zeroblob(400)) from n"
    assert len(query(shop, heavy, QueryLimits(wall_s=60, max_rows=500)).rows) == 125


@pytest.mark.parametrize("name", ["../outside", "../outside.sqlite", "link", "/etc/passwd", "none", "", ".", "a\0b"])
def test_database_must_be_inside_folder(folder: Path, name: str):
    with pytest.raises(DataError, match="There is no database"):
        find_database(folder, name)


def test_databases_are_found_by_dataset_names(folder: Path):
    for name in ("shop", "shop/shop", "shop/shop.sqlite"):
        assert find_database(folder, name) == (folder / "shop" / "shop.sqlite").resolve()


def test_sql_tool_returns_table_or_error(folder: Path):
    box = ToolBox([SQLTool(str(folder), "shop", wall_s=60.0, max_rows=2)])
    try:
        table = box.call("sql", {"query": "select name, price from item order by rowid"}).text
        assert table == "name | price\npen | 1.5\nink\\nred | NULL\n(first 2 rows; there are more)"
        failed = box.call("sql", {"query": "select cost from item"})
        assert (failed.text, failed.error) == ("Error: no such column: cost", "tool_error")
    finally:
        box.close()


def test_settings_are_checked_when_a_run_starts(folder: Path):
    SQLTool.check(folder=str(folder))
    SQLTool.check(folder=str(folder), database="shop")
    with pytest.raises(ConfigError, match=r"sql\.folder='/no/such/place' is not a folder"):
        SQLTool.check(folder="/no/such/place")
    with pytest.raises(DataError, match="no database 'bar'"):
        SQLTool.check(folder=str(folder), database="bar")
    assert SQLTool.from_row == ("database",)
