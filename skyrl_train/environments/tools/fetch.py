"""Web pages over HTTP for a model: every hop and address is checked, and every answer has a bounded size."""

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
"""Elements whose content is invisible -> pattern of their end."""
CHARSETS = re.compile(r"utf|iso|cp\d|koi8|gb|big5|euc|shift_jis|ascii|mac")
TAG = re.compile(r"<(/?)([a-zA-Z][a-zA-Z0-9]*)")
HREF = re.compile(r"\shref\s*=\s*(\"[^\"]*\"|'[^']*'|[^\s\"'>]+)", re.IGNORECASE)
BLOCK_ELEMENTS = frozenset(
    {"p", "div", "br", "li", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section", "article", "pre"}
)


@dataclass(frozen=True, slots=True)
class Page:
    """The response after the last redirect."""

    url: str
    status: int
    content_type: str
    body: bytes

    def text(self) -> str:
        """The body as text; for HTML its visible text, with the targets of links."""
        content = self.body.decode(_charset(self.content_type), errors="replace")
        if "html" not in self.content_type:
            return content
        shown = "".join(_visible_text(content))
        return re.sub(r"[ \t]*\n\s*", "\n", re.sub(r"[ \t]+", " ", shown)).strip()


def _charset(content_type: str) -> str:
    """The charset that the server names, if it is one of the web's: some of Python's others take quadratic time."""
    named = re.search(r"charset=[\"']?([\w-]+)", content_type)
    with contextlib.suppress(LookupError, ValueError):
        if named and CHARSETS.match(name := codecs.lookup(named[1]).name):
            return name
    return "utf-8"


def _visible_text(page: str) -> Iterator[str]:
    """The visible text of HTML, with the targets of links. Every search continues where the last one ended, and the
    page ends at a search that finds nothing: `html.parser` takes quadratic time, hours for a hostile page."""
    links: list[str] = []
    at = 0
    while (begun := page.find("<", at)) >= 0:
        yield unescape(page[at:begun])
        if (tag := TAG.match(page, begun)) is None and not page.startswith(("<!", "<?"), begun):  # 1 < 2
            yield "<"
            at = begun + 1
            continue
        end = "-->" if page.startswith("<!--", begun) else ">"
        if (ends := page.find(end, begun + 1)) < 0:
            return
        at = ends + len(end)
        if tag is None:
            continue
        closes, name = bool(tag[1]), tag[2].lower()
        if name in BLOCK_ELEMENTS:
            yield "\n"
        elif name == "a" and not closes:
            href = HREF.search(page, begun, at)
            links.append(unescape(href[1].strip("\"'")) if href else "")
        elif name == "a" and links and (link := links.pop()):
            yield f" ({link[:300]})"
        elif name in INVISIBLE_ELEMENTS and not closes:
            over = INVISIBLE_ELEMENTS[name].search(page, at)
            if over is None:
                return
            at = over.start()
    yield unescape(page[at:])


class _PolicyResolver(AbstractResolver):
    """Gives aiohttp the addresses to connect to: the guard's, looked up once per connection."""

    def __init__(self, url_policy: UrlPolicy):
        self.url_policy = url_policy

    async def resolve(self, host: str, port: int = 0, family: int = socket.AF_INET) -> list[ResolveResult]:
        # The scheme does not matter here: `target` has already accepted the host and the port.
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
    """GET `url`, following at most 5 redirects.

    Raises Refused if the guard refuses any hop, or if the body has more than `max_bytes` after decompression, which
    stops there; ToolError if the server gives no HTTP answer within `deadline_s`.
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
            await url_policy.resolve(target)  # aiohttp asks no resolver about a numeric address
        async with session.get(url, allow_redirects=False) as response:
            where = response.headers.get("Location")
            if response.status not in REDIRECTS or where is None:
                body = await _read(response, max_bytes)
                return Page(url, response.status, response.headers.get("Content-Type", "").lower(), body)
            url = urljoin(url, where)
    raise UrlNotAllowed(f"more than {MAX_REDIRECTS} redirects")


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """The body, decompressed as far as `max_bytes`."""
    coding = response.headers.get("Content-Encoding", "identity").strip().lower()
    if coding != "identity" and coding not in WINDOW_BITS:
        raise UrlNotAllowed(f"the content encoding {coding!r:.50} is not read")
    inflate = None if coding == "identity" else zlib.decompressobj(WINDOW_BITS[coding])
    body = bytearray()
    async for chunk in response.content.iter_chunked(READ_SIZE):
        body += chunk if inflate is None else inflate.decompress(chunk, max_bytes + 1 - len(body))
        if len(body) > max_bytes:
            raise UrlNotAllowed(f"the answer has more than {max_bytes} bytes")
    return bytes(body)


class FetchTool(Tool):
    """Reads one web page as text, without running any script in it.

    Settings: `domains` and `allow_private` (see `Guard`), `max_bytes` and `timeout` (seconds).
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
        page = await fetch(arguments["url"].strip(), self.url_policy, self.max_bytes, self.timeout)
        if page.status >= 400:
            raise ToolError(f"{page.url} answered with status {page.status}")
        return page.text()
