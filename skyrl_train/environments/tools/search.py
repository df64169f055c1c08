"""The search tool: BM25 over a local corpus, or a retriever over HTTP with SkyRL's protocol.

POST search_url {"queries": ["..."], "topk": 3, "return_scores": true}
-> {"result": [[{"document": {"contents": "..."}, "score": 1.5}, ...]]}
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from skyrl_train.environments.tools import bm25
from skyrl_train.environments.tools.base import Tool, ToolError
from skyrl_train.environments.tools.json_request import RequestFailed, post_json
from skyrl_train.errors import ConfigError

log = logging.getLogger(__name__)

MAX_QUERY = 1000
"""Maximum number of characters of a query; the rest is ignored."""


class SearchTool(Tool):
    """A tool that returns the best passages for a query, best first, as "Doc 1: ...".

    Args:
        search_url: http:// or https:// URL of a trusted retriever; ignored if `corpus` is set.
        topk: Maximum number of passages.
        timeout: Maximum seconds for a query, including all retries.
        log_requests: True to log every query.
        corpus: A local corpus instead: a .jsonl or .parquet file, or the folder of a saved index (see bm25.py).

    Raises:
        ConfigError: `search_url` is not an HTTP URL and `corpus` is not set.
    """

    name = "search"
    description = "Search for passages of text."

    def __init__(
        self,
        search_url: str = "http://127.0.0.1:8000/retrieve",
        topk: int = 3,
        timeout: float = 30.0,
        log_requests: bool = False,
        corpus: str | None = None,
    ):
        if corpus is None and not search_url.startswith(("http://", "https://")):
            raise ConfigError(
                f"search_url={search_url!r} is not an http:// or https:// URL; set search_url to one, or set corpus."
            )
        self.search_url = search_url
        self.topk = topk
        self.timeout = timeout
        self.deadline_s = timeout + 1.0  # so that the query's own deadline, which names the server, passes first
        self.log_requests = log_requests
        self.corpus = corpus
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to search for"}},
            "required": ["query"],
        }

    async def call(self, arguments: dict[str, Any]) -> str:
        """Return the passages found for `query`, numbered as "Doc 1: ...", or "No search results found.".

        Raises:
            ToolError: The query is empty, or the search fails.
        """
        query = arguments["query"].strip()
        if not query:
            raise ToolError("The query is empty.")
        query = query[:MAX_QUERY].encode(errors="replace").decode()
        if self.log_requests:
            log.info("search: %r", query)
        texts = await self._search(query)
        passages = [f"Doc {number}: {text.strip()}" for number, text in enumerate(texts, 1)]
        return "\n".join(passages) or "No search results found."

    async def _search(self, query: str) -> list[str]:
        if self.corpus is None:
            body = {"queries": [query], "topk": self.topk, "return_scores": True}
            return parse_passages(await post_json(self.search_url, body, self.timeout), self.topk)
        try:
            async with asyncio.timeout(self.timeout):
                index = await asyncio.to_thread(bm25.open_index, self.corpus)
                return [text for text, _ in await asyncio.to_thread(index.search, query, self.topk)]
        except TimeoutError as error:
            raise RequestFailed(f"{self.corpus} was not searched within {self.timeout:g} s") from error


def parse_passages(response: Any, topk: int) -> list[str]:
    """Return the contents of the first `topk` passages in a retriever's response.

    Raises:
        RequestFailed: The response does not have the format of SkyRL's retriever.
    """
    try:
        results = response["result"][0] if response["result"] else []
        # with return_scores a passage is {"document", "score"}; some retrievers return only the document
        documents = [item.get("document", item) for item in results[:topk]]
        return [str(document["contents"]) for document in documents]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise RequestFailed(f"the retriever answered with {response!r:.200}") from error
