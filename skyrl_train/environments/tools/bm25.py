"""BM25 over a corpus of one's own (Robertson & Zaragoza 2009; bm25s does the work).

    python -m skyrl_train.environments.tools.bm25 corpus.jsonl index/

writes an index once, which processes then map into memory together. A corpus file itself works too: every environment
process indexes it at its first search, which is for up to some 100,000 short documents.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.data.dataset import read_rows
from skyrl_train.errors import ConfigError, DataError

STOPWORDS = "en"
NOT_INSTALLED = "a local corpus needs bm25s; install it with: pip install 'skyrl-train[search]'."
_open: dict[tuple[str, int, int], Index] = {}
_opening = threading.Lock()


class Index:
    """Documents and their BM25 statistics, in memory or mapped from a folder."""

    def __init__(self, retriever: Any, documents: Sequence[Any]):
        self._retriever = retriever
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, k: int) -> list[tuple[str, float]]:
        """The `k` best (contents, score) pairs, best first; fewer if fewer documents share a word with the query."""
        words = _library().tokenize([query], stopwords=STOPWORDS, return_ids=False, show_progress=False)
        if not words[0]:
            return []
        count = min(k, len(self))
        numbers, scores = self._retriever.retrieve(words, k=count, show_progress=False)
        found = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
        return [(self._contents(number), score) for number, score in found if score > 0]

    def save(self, folder: Path) -> None:
        """Write the index to a folder for `open_index` to map; the folder must be empty or absent."""
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: is not empty; name a new folder for the index.")
        self._retriever.save(str(folder), corpus=[{"contents": text} for text in self._documents], show_progress=False)

    def _contents(self, number: int) -> str:
        document = self._documents[number]
        return document["contents"] if isinstance(document, dict) else document


def build_index(documents: Sequence[str]) -> Index:
    """Build an index in memory. Raises DataError if no document contains a word."""
    library = _library()
    words = library.tokenize(list(documents), stopwords=STOPWORDS, show_progress=False)
    if not words.vocab:
        raise DataError("the corpus has no document with a word in it.")
    retriever = library.BM25()
    retriever.index(words, show_progress=False)
    return Index(retriever, documents)


def open_index(path: str) -> Index:
    """Open the index saved in a folder, or index a corpus file. A process does so once, until the file changes.

    Raises DataError for an unusable corpus, ConfigError if there is none at `path`.
    """
    where, stat = _found(path)
    key = (str(where.resolve()), stat.st_mtime_ns, stat.st_size)
    with _opening:  # several episodes may make their first search at the same time
        if key not in _open:
            _open[key] = _mapped(where) if where.is_dir() else build_index(list(read_documents(str(where))))
        return _open[key]


def check(path: str) -> None:
    """Raise ConfigError if the corpus does not exist or bm25s is not installed. Neither is loaded."""
    _found(path)
    if importlib.util.find_spec("bm25s") is None:
        raise ConfigError(NOT_INSTALLED)


def _found(path: str) -> tuple[Path, os.stat_result]:
    where = Path(path).expanduser()
    try:
        return where, (where / "params.index.json" if where.is_dir() else where).stat()
    except OSError as error:
        raise ConfigError(
            f"corpus={path!r}: {error.strerror}; a .jsonl or .parquet file, or a folder made by "
            "`python -m skyrl_train.environments.tools.bm25 CORPUS FOLDER`."
        ) from error


def read_documents(path: str) -> Iterator[str]:
    """The documents of a corpus: its column `contents`, or `title` and `text`. Raises DataError naming the row."""
    for where, row in read_rows(path):
        text = row.get("contents", row.get("text"))
        if not isinstance(text, str):
            raise DataError(f"{where}: needs text in `contents` or `text`, got {text!r:.80}; columns: {sorted(row)}.")
        title = row.get("title")
        yield f"{title}\n{text}" if isinstance(title, str) and "contents" not in row else text


def _mapped(folder: Path) -> Index:
    try:
        retriever = _library().BM25.load(str(folder), load_corpus=True, mmap=True, allow_pickle=False)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise DataError(f"{folder}: is no whole index ({error}); make it again.") from error
    documents, retriever.corpus = retriever.corpus, None  # so that `retrieve` returns document numbers
    return Index(retriever, documents)


def _library() -> Any:
    """Import bm25s at the first search, without numba, which it would load for a backend that is not used here.

    That halves the import time, and vLLM does not start in a process that loaded numba differently than it does itself.
    """
    hidden = "numba" not in sys.modules
    if hidden:
        sys.modules["numba"] = None  # type: ignore[assignment]
    try:
        import bm25s
    except ImportError as error:
        raise ConfigError(NOT_INSTALLED) from error
    finally:
        if hidden:
            del sys.modules["numba"]
    return bm25s


def main() -> None:
    if len(sys.argv) != 3:
        sys.exit(f"usage: python -m skyrl_train.environments.tools.bm25 CORPUS FOLDER\n\n{__doc__}")
    try:
        index = build_index(list(read_documents(sys.argv[1])))
        index.save(Path(sys.argv[2]))
    except ConfigError as error:
        sys.exit(str(error))
    print(f"{sys.argv[2]}: {len(index)} documents")


if __name__ == "__main__":
    main()
