"""Search for passages: a local corpus by BM25, or a retriever over HTTP with SkyRL's protocol.

POST search_url {"queries": ["..."], "topk": 3, "return_scores": true}
-> {"result": [[{"document": {"contents": "..."}, "score": 1.5}, ...]]}
"""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import aiohttp

from skyrl_train.environments.tools import bm25
from skyrl_train.environments.tools.base import Tool, ToolError
from skyrl_train.errors import ConfigError

log = logging.getLogger(__name__)

MAX_QUERY = 1000
MAX_ANSWER = 8 * 2**20
"""Bytes of a retriever's answer."""
FIRST_PAUSE_S = 0.25
LAST_PAUSE_S = 4.0


class RetrieverFailed(Exception):
    """The retriever gave no usable answer: nothing that the model did."""


class SearchTool(Tool):
    """Passages for a query, best first, as "Doc 1: ...".

    Settings: `corpus` (a .jsonl or .parquet file, or a saved index, see bm25.py) or else `search_url` (a server of the
    configuration's, trusted), `topk` passages, `timeout` seconds for a query with all its retries, `log_requests`.
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
            raise ConfigError(f"search_url={search_url!r} is not an http:// or https:// address; set it, or corpus.")
        self.search_url = search_url
        self.topk = topk
        self.timeout = timeout
        self.deadline_s = timeout + 1.0  # so that it is the query's own deadline that says what was waited for
        self.log_requests = log_requests
        self.corpus = corpus
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": {"query": {"type": "string", "description": "what to search for"}},
            "required": ["query"],
        }

    async def call(self, arguments: dict[str, Any]) -> str:
        query = arguments["query"].strip()
        if not query:
            raise ToolError("The query is empty.")
        query = query[:MAX_QUERY].encode(errors="replace").decode()
        if self.log_requests:
            log.info("search: %r", query)
        try:
            async with asyncio.timeout(self.timeout):
                found = await self._search(query)
        except TimeoutError as error:
            source = self.corpus or self.search_url
            raise RetrieverFailed(f"{source} did not answer within {self.timeout:g} s") from error
        passages = [f"Doc {number}: {text.strip()}" for number, text in enumerate(found, 1)]
        return "\n".join(passages) or "No search results found."

    async def _search(self, query: str) -> list[str]:
        if self.corpus is None:
            return await self._ask(query)
        index = await asyncio.to_thread(bm25.open_index, self.corpus)
        return [text for text, _ in await asyncio.to_thread(index.search, query, self.topk)]

    async def _ask(self, query: str) -> list[str]:
        """The retriever's passages. Asks again while it cannot be reached or has an error of its own (5xx, 429)."""
        body = {"queries": [query], "topk": self.topk, "return_scores": True}
        pause = FIRST_PAUSE_S
        async with aiohttp.ClientSession(trust_env=False) as session:
            while True:
                try:
                    async with session.post(self.search_url, json=body, allow_redirects=False) as response:
                        status, answer = response.status, await read_at_most(response, MAX_ANSWER)
                    if status < 500 and status != 429:
                        return passages_of(status, answer, self.topk)
                    reason = f"status {status}"
                except aiohttp.ClientError as error:
                    reason = f"{type(error).__name__}: {error}"
                log.warning("%s: %s; asking again", self.search_url, reason)
                await asyncio.sleep(pause)
                pause = min(2 * pause, LAST_PAUSE_S)


async def read_at_most(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """The body. Raises RetrieverFailed where it has more than `limit` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_chunked(2**16):
        body += chunk
        if len(body) > limit:
            raise RetrieverFailed(f"{response.url} answered with more than {limit} bytes")
    return bytes(body)


def passages_of(status: int, answer: bytes, topk: int) -> list[str]:
    """The contents of a retriever's answer, at most `topk`. Raises RetrieverFailed for one of another shape."""
    try:
        content = json.loads(answer)
        if status == 200:
            results = content["result"][0] if content["result"] else []
            # with return_scores a passage is {"document", "score"}; some retrievers give the document alone
            documents = [item.get("document", item) for item in results[:topk]]
            return [str(document["contents"]) for document in documents]
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError):
        pass
    raise RetrieverFailed(f"the retriever answered with status {status} and {answer[:200]!r}")
