from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.data.dataset import load_prompts
from skyrl_train.environments.tasks import text2sql
from skyrl_train.environments.tasks.text2sql import Text2SQLEnv, extract_tagged, has_top_level_order_by
from skyrl_train.environments.tools.sql import QueryLimits
from skyrl_train.errors import ConfigError, DataError

SCRIPT = Path(__file__).parents[4] / "examples" / "text2sql" / "text2sql_dataset.py"
ENDLESS = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Databases as in SkyRL-SQL's archive, a database outside of it, and a secret next to them."""
    root = tmp_path_factory.mktemp("sql")
    for place in ("data/spider/database/farm/farm.sqlite", "data/farm.sqlite", "outside.sqlite"):
        path = root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(path)
        connection.executescript(
            "CREATE TABLE animals (species TEXT, age INT, weight REAL);"
            "INSERT INTO animals VALUES ('pig', 3, 0.1), ('pig', 3, 0.2), ('hen', 1, 0.3), ('hen', NULL, 1e15);"
        )
        connection.close()
    (root / "data" / "link.sqlite").symlink_to(root / "outside.sqlite")
    return root / "data"


def environment(folder: Path, gold: str, **row: Any) -> Text2SQLEnv:
    extras = {"db_id": "farm", "data": "spider", "reward_spec": {"ground_truth": gold}, **row}
    return Text2SQLEnv({"db_path": str(folder)}, extras)


def reward(folder: Path, gold: str, answer: str) -> float:
    output = environment(folder, gold).step(f"<think>so</think><solution>{answer}</solution>")
    assert output.done
    return output.reward


SPECIES = "SELECT species FROM animals"


@pytest.mark.parametrize(
    ("gold", "answer", "expected"),
    [
        (SPECIES, "SELECT species FROM animals", 1.0),
        (SPECIES, "SELECT species AS s FROM animals ORDER BY age;", 1.0),  # names and order do not matter
        (SPECIES, "SELECT DISTINCT species FROM animals", 0.0),  # duplicates count
        (SPECIES, "SELECT species, age FROM animals", 0.0),
        (SPECIES, "SELECT species FROM animals LIMIT 3", 0.0),
        (f"{SPECIES} ORDER BY species", f"{SPECIES} ORDER BY species DESC", 0.0),
        (f"{SPECIES} ORDER BY species", f"{SPECIES} ORDER BY 1", 1.0),
        (f"SELECT * FROM ({SPECIES} ORDER BY species)", f"{SPECIES} ORDER BY species DESC", 1.0),
        ("SELECT count(*) FROM animals", "SELECT 4.0", 1.0),
        ("SELECT sum(weight) FROM animals WHERE age > 0", "SELECT 0.3 + 0.2 + 0.1", 1.0),
        ("SELECT age FROM animals WHERE age IS NULL", "SELECT NULL", 1.0),
        ("SELECT age FROM animals WHERE age IS NULL", "SELECT 'NULL'", 0.0),
        ("SELECT 1, 2 WHERE 0", "SELECT 1 WHERE 0", 0.0),  # empty results with different columns
        (SPECIES, "SELEKT", 0.0),
        (SPECIES, "", 0.0),
        (SPECIES, f"{SPECIES}; DROP TABLE animals", 0.0),
        (SPECIES, "DELETE FROM animals RETURNING species", 0.0),
        (SPECIES, "ATTACH 'x' AS y", 0.0),
    ],
)
def test_query_results_are_compared(folder: Path, gold: str, answer: str, expected: float):
    assert reward(folder, gold, answer) == expected


@pytest.mark.parametrize(
    ("sql", "ordered"),
    [
        ("SELECT a FROM t ORDER BY a", True),
        ("select a from t order\n by a limit 1", True),
        ("SELECT a FROM t UNION SELECT b FROM u ORDER BY 1", True),
        ("WITH x AS (SELECT 1) SELECT * FROM x ORDER  /* hm */ BY 1", True),
        ("SELECT a FROM (SELECT a FROM t ORDER BY a)", False),
        ("SELECT rank() OVER (ORDER BY a) FROM t", False),
        ("SELECT 'x ORDER BY y' FROM t -- ORDER BY a", False),
        ('SELECT "order" FROM by', False),
        ("SELECT '(' FROM t ORDER BY a", True),
        ("SELECT a, '''' FROM t ORDER BY a", True),
    ],
)
def test_order_matters_if_gold_query_orders(sql: str, ordered: bool):
    assert has_top_level_order_by(sql) is ordered


@pytest.mark.fault("F13")
@pytest.mark.parametrize(
    "text",
    [
        f"<solution>{SPECIES}</solution> or <solution>SELECT 1</solution>",
        f"<solution>{SPECIES}</solution><solution>{SPECIES}</solution>",
    ],
)
def test_several_solutions_get_minus_one(folder: Path, text: str):
    output = environment(folder, SPECIES).step(text)
    assert (output.reward, output.done, output.metadata["has_solution"]) == (-1.0, True, False)


@pytest.mark.fault("F15")
@pytest.mark.parametrize("text", ["", "no idea", f"<solution>{SPECIES}", f"<sql>{SPECIES}</sql>"])
def test_last_turn_without_solution_gets_minus_one(folder: Path, text: str):
    output = environment(folder, SPECIES, max_turns=1).step(text)
    assert (output.reward, output.done) == (-1.0, True)


def test_queries_are_answered_until_solution(folder: Path):
    env = environment(folder, SPECIES, max_turns=4)
    texts = (
        "<sql>SELECT species, age FROM animals WHERE age IS NOT 3</sql>",
        "<sql>SELECT plant FROM animals</sql> <sql>SELECT 1</sql>",
        "I wonder <sql>SELECT",
    )
    outputs = [env.step(text) for text in texts]
    assert [(output.reward, output.done) for output in outputs] == [(0.0, False)] * 3
    observations = [output.observations[0]["content"] for output in outputs]
    assert observations[0] == (
        "<observation>\nspecies | age\nhen | 1\nhen | NULL\n(2 rows)\n"
        "<reminder>You have 3 turns left to complete the task.</reminder>\n</observation>"
    )
    assert "Error: no such column: plant" in observations[1] and "2 turns left" in observations[1]
    assert "Error: write one <sql>" in observations[2] and "1 turn left" in observations[2]
    assert [output.tool_calls for output in outputs] == [
        [{"name": "sql", "arguments": "SELECT species, age FROM animals WHERE age IS NOT 3"}],
        [{"name": "sql", "arguments": "SELECT plant FROM animals", "error": "query_error"}],
        [],
    ]
    assert outputs[0].observations[0]["role"] == "user"
    last = env.step(f"<solution>{SPECIES}</solution>")
    assert (last.reward, last.done) == (1.0, True)
    assert last.metadata == {"turns": 4, "failed_queries": 1, "has_solution": True}


def test_observations_and_queries_are_limited(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(text2sql, "EXPLORATION_LIMITS", QueryLimits(wall_s=0.5, max_rows=50))
    monkeypatch.setattr(text2sql, "SCORING_LIMITS", QueryLimits(wall_s=0.5))
    env = environment(folder, SPECIES, max_turns=9)
    before = time.monotonic()
    many = env.step("<sql>SELECT a.age FROM animals a, animals b, animals c</sql>").observations[0]["content"]
    assert "(first 50 rows; there are more)" in many
    wide = env.step("<sql>SELECT hex(zeroblob(50000)), char(27, 0) FROM animals</sql>").observations[0]["content"]
    assert len(wide) < text2sql.MAX_OBSERVATION + 500
    assert "\x1b" not in wide and "\x00" not in wide
    assert "timed out" in env.step(f"<sql>{ENDLESS}</sql>").observations[0]["content"]
    assert env.step(f"<solution>{ENDLESS}</solution>").reward == 0.0
    assert time.monotonic() - before < 60


@pytest.mark.parametrize("name", ["../outside", "../outside.sqlite", "/etc/passwd", "link", "none", "farm\0", "~/farm"])
def test_database_outside_folder_is_rejected(folder: Path, name: str):
    for data in ("spider", "other"):
        with pytest.raises(DataError, match="no database"):
            environment(folder, SPECIES, db_id=name, data=data)


def test_databases_are_found_with_and_without_archive(folder: Path):
    archive = environment(folder, SPECIES).database
    assert archive == (folder / "spider/database/farm/farm.sqlite").resolve()
    assert environment(folder, SPECIES, data=None).database == (folder / "farm.sqlite").resolve()


def test_failing_gold_query_raises_data_error(folder: Path):
    with pytest.raises(DataError, match=r"the gold query of farm\.sqlite fails: no such table: plants"):
        environment(folder, "SELECT * FROM plants").step("<solution>SELECT 1</solution>")


def test_missing_database_folder_is_rejected(folder: Path):
    Text2SQLEnv.check({"db_path": str(folder)})
    with pytest.raises(ConfigError, match=r"text2sql\.db_path='/nowhere' is not a folder"):
        Text2SQLEnv.check({"db_path": "/nowhere"})


def test_tags_are_found_in_linear_time():
    assert extract_tagged("<sql> a </sql><sql>b</sql><sql>c", "sql") == ["a", "b"]
    before = time.process_time()
    for unit in ("<solution>", "</solution>", "<solution></solution>", "<"):
        extract_tagged(unit * 100_000, "solution")
    assert time.process_time() - before < 10


def test_local_rows_are_converted_and_answered(folder: Path, tmp_path: Path):
    row = {
        "schema": "CREATE TABLE animals (species TEXT)",
        "question": "Which species?",
        "external_knowledge": "",
        "sql": SPECIES,
        "db_id": "farm",
        "data": "spider",
    }
    ready = {
        "prompt": [{"role": "user", "content": "Which?"}],
        "reward_spec": {"ground_truth": SPECIES},
        "db_id": "farm",
        "data": "spider",
    }
    for split, rows in (("train", [row, ready]), ("validation", [row])):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(json.dumps(each) for each in rows))
    command = [sys.executable, str(SCRIPT), "--input", str(tmp_path), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    prompts = load_prompts([str(tmp_path / "out" / "train.parquet")], lambda messages: 1, 10, "other").prompts
    assert [prompt.messages[-1]["content"][-6:] for prompt in prompts] == ["ecies?", "Which?"]
    for prompt in prompts:
        env = Text2SQLEnv({"db_path": str(folder)}, prompt.env_extras)
        assert (prompt.env_class, env.step(f"<solution>{SPECIES}</solution>").reward) == ("text2sql", 1.0)
