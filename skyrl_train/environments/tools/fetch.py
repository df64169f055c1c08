"""The fetch tool: web pages over HTTP, with a check of every redirect and IP address and a limit on their size."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import re
import socket
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import unescape
from typing import Any
from urllib.parse import urljoin

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from skyrl_train.environments.tools.base import Tool, ToolError
from skyrl_train.environments.tools.url_policy import Target, UrlNotAllowed, UrlPolicy

MAX_REDIRECTS = 5
MAX_BYTES = 2 * 2**20
READ_SIZE = 2**16
REDIRECTS = (301, 302, 303, 307, 308)
WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
INVISIBLE_ELEMENTS = {
    name: re.compile(f"</{name}" if name != "head" else "</head|<body", re.IGNORECASE)
    for name in ("script", "style", "noscript", "template", "svg", "head")
}
"""Elements whose content is invisible, with the pattern of their end."""
CHARSETS = re.compile(r"utf|iso|cp\d|koi8|gb|big5|euc|shift_jis|ascii|mac")
TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
HREF = re.compile(r"\shref\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"'>]+)", re.IGNORECASE)
BLOCK_ELEMENTS = frozenset(
    {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "pre"}
)


@dataclass(frozen=True, slots=True)
class Page:
    """A response after the last redirect: its URL, status, content type (in lower case) and decompressed body."""

    url: str
    status: int
    content_type: str
    body: bytes

    def text(self) -> str:
        """Return the body as text; for HTML, return the visible text, with the targets of links in parentheses."""
        content = self.body.decode(_charset(self.content_type), errors="replace")
        if "html" not in self.content_type:
            return content
        visible = "".join(_visible_text(content))
        return re.sub(r"[ \t]*\n\s*", "\n", re.sub(r"[ \t]+", " ", visible)).strip()


def _charset(content_type: str) -> str:
    """Return the charset that the server names if it is common on the web, else "utf-8".

    Decoding some of Python's other charsets takes quadratic time.
    """
    named = re.search(r"charset=[\"']?([\w-]+)", content_type)
    with contextlib.suppress(LookupError, ValueError):
        if named and CHARSETS.match(name := codecs.lookup(named[1]).name):
            return name
    return "utf-8"


def _visible_text(page: str) -> Iterator[str]:
    """Yield the visible text of HTML, with the targets of links, in linear time.

    Every search continues where the last search ended, and the page ends at a search that finds nothing.
    `html.parser` would take quadratic time, which is hours for a malicious page.
    """
    links: list[str] = []
    at = 0
    while (tag_start := page.find("<", at)) >= 0:
        yield unescape(page[at:tag_start])
        if (tag := TAG.match(page, tag_start)) is None and not page.startswith(("<!", "<?"), tag_start):  # 1 < 2
            yield "<"
            at = tag_start + 1
            continue
        end = "-->" if page.startswith("<!--", tag_start) else ">"
        if (end_at := page.find(end, tag_start + 1)) < 0:
            return
        at = end_at + len(end)
        if tag is None:
            continue
        closes, name = bool(tag[1]), tag[2].lower()
        if name in BLOCK_ELEMENTS:
            yield "\n"
        elif name == "a" and not closes:
            href = HREF.search(page, tag_start, at)
            links.append(unescape(href[1].strip("\"'")) if href else "")
        elif name == "a" and links and (link := links.pop()):
            yield f" ({link[:300]})"
        elif name in INVISIBLE_ELEMENTS and not closes:
            end_tag = INVISIBLE_ELEMENTS[name].search(page, at)
            if end_tag is None:
                return
            at = end_tag.start()
    yield unescape(page[at:])


class _PolicyResolver(AbstractResolver):
    """A resolver that makes aiohttp connect only to the addresses that the URL policy returns, once per connection."""

    def __init__(self, url_policy: UrlPolicy):
        self.url_policy = url_policy

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        # The scheme does not matter here: `check_url` has already accepted the host and the port.
        addresses = await self.url_policy.resolve(Target("http", host.lower().removesuffix("."), port))
        return [
            ResolveResult(
                hostname=host,
                host=address,
                port=port,
                family=socket.AF_INET6 if ":" in address else socket.AF_INET,
                proto=0,
                flags=socket.AI_NUMERICHOST,
            )
            for address in addresses
        ]

    async def close(self) -> None:
        pass


async def fetch(url: str, url_policy: UrlPolicy, max_bytes: int = MAX_BYTES, deadline_s: float = 20.0) -> Page:
    """Send a GET request, follow at most `MAX_REDIRECTS` redirects, and return the last response.

    Args:
        url: URL, which may come from a model.
        url_policy: Policy that must allow the URL, every redirect and every IP address.
        max_bytes: Maximum bytes of the decompressed body.
        deadline_s: Maximum seconds for everything.

    Raises:
        UrlNotAllowed: The policy does not allow a URL or an address, there are too many redirects, the body is larger
            than `max_bytes`, or its content encoding is neither gzip nor deflate.
        ToolError: The server sends no valid HTTP response within `deadline_s`.
    """
    connector = aiohttp.TCPConnector(
        resolver=_PolicyResolver(url_policy), use_dns_cache=False, force_close=True, limit=1, happy_eyeballs_delay=None
    )
    headers = {"Accept-Encoding": "gzip, deflate", "User-Agent": "skyrl-train"}
    try:
        async with asyncio.timeout(deadline_s):
            async with aiohttp.ClientSession(
                connector=connector,
                headers=headers,
                auto_decompress=False,
                trust_env=False,
                cookie_jar=aiohttp.DummyCookieJar(),
            ) as session:
                return await _follow(session, url, url_policy, max_bytes)
    except TimeoutError as error:
        raise ToolError(f"{url:.200} did not answer within {deadline_s:g} s") from error
    except (aiohttp.ClientError, OSError, zlib.error) as error:
        if isinstance(error.__cause__, UrlNotAllowed):
            raise error.__cause__ from None
        raise ToolError(f"{url:.200} could not be read: {type(error).__name__}: {str(error)[:200]}") from error


async def _follow(session: aiohttp.ClientSession, url: str, url_policy: UrlPolicy, max_bytes: int) -> Page:
    for _ in range(MAX_REDIRECTS + 1):
        target = url_policy.check_url(url)
        if target.host.strip("[]").replace(".", "").isdigit() or ":" in target.host:
            await url_policy.resolve(target)  # aiohttp does not ask the resolver about an IP address
        async with session.get(url, allow_redirects=False) as response:
            location = response.headers.get("Location")
            if response.status not in REDIRECTS or location is None:
                body = await _read(response, max_bytes)
                return Page(url, response.status, response.headers.get("Content-Type", "").lower(), body)
            url = urljoin(url, location)
    raise UrlNotAllowed(f"more than {MAX_REDIRECTS} redirects")


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Return the decompressed body; stop decompressing and raise UrlNotAllowed after `max_bytes`."""
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding != "identity" and coding not in WINDOW_BITS:
        raise UrlNotAllowed(f"the content encoding {coding!r:.50} is not supported")
    inflate = None if coding == "identity" else zlib.decompressobj(WINDOW_BITS[coding])
    body = bytearray()
    async for chunk in response.content.iter_chunked(READ_SIZE):
        body += chunk if inflate is None else inflate.decompress(chunk, max_bytes + 1 - len(body))
        if len(body) > max_bytes:
            raise UrlNotAllowed(f"the answer has more than {max_bytes} bytes")
    return bytes(body)


class FetchTool(Tool):
    """A tool that returns a web page as text, without running its scripts.

    Args:
        domains: Domains that may be visited (see `UrlPolicy`).
        allow_private: Entries `host:port` that may be visited at any IP address (see `UrlPolicy`).
        max_bytes: Maximum bytes of the decompressed page.
        timeout: Maximum seconds of a call.

    Raises:
        ConfigError: An entry of `domains` or `allow_private` has a wrong form.
    """

    name = "fetch"
    description = "Read a web page as text."

    def __init__(
        self,
        domains: Sequence[str],
        allow_private: Sequence[str] = (),
        max_bytes: int = MAX_BYTES,
        timeout: float = 20.0,
    ):
        self.url_policy = UrlPolicy(domains, allow_private)
        self.max_bytes = max_bytes
        self.deadline_s = timeout + 1.0
        self.timeout = timeout
        self.parameters: dict[str, Any] = {
            "type": "object",
            "properties": {"url": {"type": "string", "description": "http:// or https:// address"}},
            "required": ["url"],
        }

    async def call(self, arguments: dict[str, Any]) -> str:
        """Download the page at `url` and return its text.

        Raises:
            ToolError: The URL is not allowed, the server does not answer in time or answers with status 400 or above,
                or the page is too large.
        """
        page = await fetch(arguments["url"].strip(), self.url_policy, self.max_bytes, self.timeout)
        if page.status >= 400:
            raise ToolError(f"{page.url} answered with status {page.status}")
        return page.text()
