"""BM25 search in a local corpus (Robertson & Zaragoza 2009), with the library bm25s.

    python -m skyrl_train.environments.tools.bm25 corpus.jsonl index/

writes an index, which all processes then share by mapping it into memory. A corpus file works without this step: every
environment process indexes it at its first search. That is fast enough for up to about 100,000 short documents.
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
    """A set of documents and their BM25 statistics, in memory or mapped from a folder.

    Args:
        retriever: A `bm25s.BM25` object that has indexed the documents.
        documents: The documents: strings, or mappings with the key "contents".
    """

    def __init__(self, retriever: Any, documents: Sequence[Any]):
        self._retriever = retriever
        self._documents = documents

    def __len__(self) -> int:
        return len(self._documents)

    def search(self, query: str, k: int) -> list[tuple[str, float]]:
        """Return the `k` best (contents, score) pairs, best first; fewer if few documents share a word with `query`."""
        words = _library().tokenize([query], stopwords=STOPWORDS, return_ids=False, show_progress=False)
        if not words[0]:
            return []
        count = min(k, len(self))
        numbers, scores = self._retriever.retrieve(words, k=count, show_progress=False)
        matches = zip(numbers[0].tolist(), scores[0].tolist(), strict=True)
        return [(self._contents(number), score) for number, score in matches if score > 0]

    def save(self, folder: Path) -> None:
        """Write the index and its documents to a folder, which `open_index` can map.

        Raises:
            ConfigError: The folder exists and is not empty.
        """
        if folder.exists() and any(folder.iterdir()):
            raise ConfigError(f"{folder}: the folder for the index is not empty; name a new or an empty folder.")
        self._retriever.save(str(folder), corpus=[{"contents": text} for text in self._documents], show_progress=False)

    def _contents(self, number: int) -> str:
        document = self._documents[number]
        return document["contents"] if isinstance(document, dict) else document


def build_index(documents: Sequence[str]) -> Index:
    """Return a BM25 index of documents, which is kept in memory.

    Raises:
        DataError: No document contains a word.
        ConfigError: bm25s is not installed.
    """
    library = _library()
    words = library.tokenize(list(documents), stopwords=STOPWORDS, show_progress=False)
    if not words.vocab:
        raise DataError("The corpus has no document that contains a word; check the file's text columns.")
    retriever = library.BM25()
    retriever.index(words, show_progress=False)
    return Index(retriever, documents)


def open_index(path: str) -> Index:
    """Return the index that a folder holds, or index a corpus file. Thread-safe.

    The process caches the index; it opens the path again only after the file changed.

    Raises:
        DataError: The corpus or the saved index cannot be read.
        ConfigError: Nothing usable is at `path`, or bm25s is not installed.
    """
    location, stat = _locate(path)
    key = (str(location.resolve()), stat.st_mtime_ns, stat.st_size)
    with _opening:  # several episodes may make their first search at the same time
        if key not in _open:
            _open[key] = (
                _load_index(location) if location.is_dir() else build_index(list(read_documents(str(location))))
            )
        return _open[key]


def check(path: str) -> None:
    """Raise ConfigError if the corpus does not exist or bm25s is not installed. Neither is loaded."""
    _locate(path)
    if importlib.util.find_spec("bm25s") is None:
        raise ConfigError(NOT_INSTALLED)


def _locate(path: str) -> tuple[Path, os.stat_result]:
    location = Path(path).expanduser()
    try:
        return location, (location / "params.index.json" if location.is_dir() else location).stat()
    except OSError as error:
        raise ConfigError(
            f"corpus={path!r}: {error.strerror}; name a .jsonl or .parquet file, or a folder made by "
            "`python -m skyrl_train.environments.tools.bm25 CORPUS FOLDER`."
        ) from error


def read_documents(path: str) -> Iterator[str]:
    """Yield the documents of a corpus file: the column `contents`, or `title` and `text` joined by a line feed.

    Raises:
        DataError: A row has no text, or the file cannot be read; the message names the row.
    """
    for location, row in read_rows(path):
        text = row.get("contents", row.get("text"))
        if not isinstance(text, str):
            raise DataError(
                f"{location}: needs text in `contents` or `text`, got {text!r:.80}; columns: {sorted(row)}."
            )
        title = row.get("title")
        yield f"{title}\n{text}" if isinstance(title, str) and "contents" not in row else text


def _load_index(folder: Path) -> Index:
    try:
        retriever = _library().BM25.load(str(folder), load_corpus=True, mmap=True, allow_pickle=False)
    except (OSError, ValueError, KeyError, json.JSONDecodeError) as error:
        raise DataError(f"{folder}: the saved index is incomplete or corrupt ({error}); make it again.") from error
    documents, retriever.corpus = retriever.corpus, None  # so that `retrieve` returns document numbers
    return Index(retriever, documents)


def _library() -> Any:
    """Import bm25s without numba, which it would load for a backend that is not used here.

    That halves the import time. Also, vLLM does not start in a process that imported numba with other settings than
    its own.
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
    """Index the corpus file of the first argument and save the index to the folder of the second."""
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
