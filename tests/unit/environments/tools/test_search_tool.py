from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skyrl_train.environments.tools.base import ToolBox, ToolResult
from skyrl_train.environments.tools.search import SearchTool
from skyrl_train.errors import ConfigError
from tests.support.web_server import Request, Response, web_server


def search_response(*passages: Any) -> Response:
    return Response(json.dumps({"result": [list(passages)]}).encode())


def passage(text: str) -> dict[str, Any]:
    return {"document": {"id": "1", "contents": text}, "score": 1.0}


def ask(answer: Callable[[Request], Response], query: str = "who?", **settings: Any) -> ToolResult:
    with web_server(answer) as server:
        box = ToolBox([SearchTool(search_url=f"{server.url}/retrieve", **settings)])
        try:
            return box.call("search", {"query": query})
        finally:
            box.close()


def test_search_uses_skyrl_protocol_and_numbers_passages():
    asked: list[Any] = []

    def answer(request: Request) -> Response:
        asked.append((request.method, request.path, json.loads(request.body)))
        return search_response(passage(' "Paris"\nCapital. '), {"contents": "bare"}, passage("one too many"))

    result = ask(answer, "  capital \ud800", topk=2)
    assert result == ToolResult('Doc 1: "Paris"\nCapital.\nDoc 2: bare')
    assert asked == [("POST", "/retrieve", {"queries": ["capital ?"], "topk": 2, "return_scores": True})]


def test_temporary_retriever_failure_is_retried():
    answers = iter([Response(status=503), Response(status=500), search_response(passage("there"))])
    assert ask(lambda request: next(answers)) == ToolResult("Doc 1: there")


@pytest.mark.parametrize(
    "answer",
    [
        Response(b"no json"),
        Response(b"{}"),
        Response(b'{"result": [[{"document": {}}]]}'),
        Response(b'{"result": [["text"]]}'),
        Response(b"[" * 100_000),
        Response(b'{"result": []}', status=404),
        Response(status=302, headers={"Location": "http://127.0.0.1:1/"}),
        Response(bytes(9 * 2**20)),
    ],
)
def test_invalid_response_is_request_failure(answer: Response):
    result = ask(lambda request: answer)
    assert result.error == "RequestFailed"
    assert len(result.text) < 1000


def test_unavailable_retriever_fails_at_deadline():
    released = threading.Event()

    def hang(request: Request) -> Response:
        released.wait(60)
        return search_response()

    with web_server(hang) as server:
        box = ToolBox([SearchTool(search_url=server.url, timeout=0.3)])
        assert box.call("search", {"query": "x"}).error == "RequestFailed"
        box.close()
        released.set()
    box = ToolBox([SearchTool(search_url=server.url, timeout=0.3)])  # its port is closed now
    assert box.call("search", {"query": "x"}).error == "RequestFailed"
    box.close()


def test_empty_result_and_empty_query_are_reported():
    assert ask(lambda request: search_response()).text == "No search results found."
    assert ask(lambda request: search_response(), " \n").error == "tool_error"


def test_invalid_search_url_is_a_config_error():
    with pytest.raises(ConfigError, match="search_url='localhost:8000'"):
        SearchTool(search_url="localhost:8000")


LOCAL = """
import runpy
import sys
from pathlib import Path

folder = Path(sys.argv[1])
sys.argv = ["bm25", str(folder / "corpus.jsonl"), str(folder / "index")]
runpy.run_module("skyrl_train.environments.tools.bm25", run_name="__main__")  # like `python -m`
from skyrl_train.environments.tools import bm25
from skyrl_train.environments.tools.base import ToolBox
from skyrl_train.environments.tools.search import SearchTool
from skyrl_train.errors import ConfigError, DataError

for corpus in ("corpus.jsonl", "corpus.parquet", "index"):
    box = ToolBox([SearchTool(corpus=str(folder / corpus), topk=2)])
    answer = box.call("search", {"query": "What is the capital of France?"}).text
    assert answer == "Doc 1: Paris\\nIs the capital of France.", corpus
    assert box.call("search", {"query": "cats"}).text.count("Doc ") == 2
    assert box.call("search", {"query": "the of"}).text == "No search results found."
    assert box.call("search", {"query": "zebra \\x00 \\U0001f600"}).text == "No search results found."
    box.close()
assert "numba" not in sys.modules
assert bm25.open_index(str(folder / "index")) is bm25.open_index(str(folder / "index"))
cases = (("gone", ConfigError), ("bad.jsonl", DataError), ("empty.jsonl", DataError), ("incomplete", ConfigError))
for path, error in cases:
    (folder / "incomplete").mkdir(exist_ok=True)
    try:
        bm25.open_index(str(folder / path))
    except error as raised:
        assert path in str(raised) or "corpus" in str(raised), raised
    else:
        raise AssertionError(path)
"""


def test_bm25_searches_corpus_file_and_saved_index(tmp_path: Path):
    """The search runs in a separate process, with the imports of an environment process."""
    rows = [
        {"title": "Paris", "text": "Is the capital of France."},
        {"title": "Cats", "text": "Cats chase mice."},
        {"title": "Dogs", "text": "Dogs chase cats."},
        {"title": "Cows", "text": "Cows graze."},
    ]
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    contents = [{"contents": f"{row['title']}\n{row['text']}"} for row in rows]
    pq.write_table(pa.Table.from_pylist(contents), tmp_path / "corpus.parquet")
    (tmp_path / "bad.jsonl").write_text('{"id": 1}\n')
    (tmp_path / "empty.jsonl").write_text('{"text": "the"}\n')
    process = subprocess.run(
        [sys.executable, "-W", "error", "-c", LOCAL, str(tmp_path)], capture_output=True, text=True
    )
    assert process.returncode == 0, process.stderr
    assert "4 documents" in process.stdout
