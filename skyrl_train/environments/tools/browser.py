"""The browser tool: Chromium, driven by Playwright, which reaches the network only through a filtering proxy."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

import psutil

from skyrl_train.aio import with_timeout
from skyrl_train.config.redaction import is_credential_name
from skyrl_train.environments.tools.base import Tool, ToolError
from skyrl_train.environments.tools.proxy import DENIED_HEADER, FilteringProxy
from skyrl_train.environments.tools.url_policy import UrlPolicy
from skyrl_train.errors import ConfigError

PROGRAMS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--force-webrtc-ip-handling-policy=disable_non_proxied_udp",
    "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",  # only the proxy resolves names
    "--js-flags=--max-old-space-size=512",
)
MAX_TABS = 5
CLOSE_TIMEOUT_S = 1.5
SETTLE_MS = 100
PAGE_TIMEOUT_S = 5.0
"""Time that a page's process has to respond on a busy machine; a page that does not respond is stuck in a script."""
PAGE_CRASHED_MESSAGE = "the page did not answer any more, so it was closed; goto opens another one."
NEW_TAB_TIMEOUT_S = 5.0
ATTEMPTS = 10
NAVIGATION_ERRORS = ("interrupted by another navigation", "Execution context was destroyed")
READ_PAGE_SCRIPT = """() => {
    document.querySelectorAll('[data-element]').forEach(e => e.removeAttribute('data-element'));
    const shown = [...document.querySelectorAll(
        'a[href],button,input:not([type=hidden]),textarea,select,[role=button]'
    )].filter(e => e.getClientRects().length).slice(0, 200);
    shown.forEach((e, i) => e.setAttribute('data-element', i + 1));
    const named = e => String(
        e.innerText || e.value || e.placeholder || e.getAttribute('aria-label') || e.name || ''
    ).trim().slice(0, 80);
    return {
        title: String(document.title).slice(0, 200),
        text: String(document.body ? document.body.innerText : '').slice(0, 100000),
        elements: shown.map(e => [e.tagName.toLowerCase(), named(e), String(e.href || '').slice(0, 300)]),
    };
}"""
"""Script that returns a page's title, text and elements. It runs in the page, so its result is untrusted."""
OPENS_TAB_SCRIPT = """e => {
    const link = e.closest('a[href],area[href]');
    const form = ['submit', 'image'].includes(e.type) ? e.form : null;
    if (!link && !form) return false;
    const own = link ? link.getAttribute('target') : e.getAttribute('formtarget') || form.getAttribute('target');
    const base = document.querySelector('base[target]');
    const name = String(own || (base && base.getAttribute('target')) || '').toLowerCase();
    const frames = [...document.querySelectorAll('iframe[name],frame[name]')];
    return !['', '_self', '_parent', '_top', ...frames.map(frame => frame.name.toLowerCase())].includes(name);
}"""
"""Script that returns true if a click on an element should open a tab."""


class BrowserTool(Tool):
    """A tool that visits web pages (goto, click, type, read, back) and returns their text and numbered elements.

    Every episode has its own browser with one context, which the first call starts. A call that exceeds its deadline
    ends the browser, and the next call starts a new one. A page whose script does not end, or whose process crashed, is
    closed. Every connection, including redirects and everything that a page loads, goes through a `FilteringProxy`.
    Downloads, service workers and URLs other than http(s) are disabled.

    Args:
        domains: Domains that may be visited (see `UrlPolicy`).
        allow_private: Entries `host:port` that may be visited at any IP address (see `UrlPolicy`).
        executable: Chromium's path or name; None for the first of `PROGRAMS` that is on PATH.
        timeout: Maximum seconds of a call.
        max_bytes: Maximum bytes of network traffic in an episode.

    Raises:
        ConfigError: Chromium or Playwright is not installed, or an entry of `domains` or `allow_private` is wrong.
    """

    name = "browser"
    description = (
        "Visit web pages. goto opens an address; click and type act on an element by the number that the page's "
        "listing gives it; read shows the page again; back returns to the one before."
    )
    parameters = {  # noqa: RUF012
        "type": "object",
        "properties": {
            "action": {"type": "string", "enum": ["goto", "click", "type", "read", "back"]},
            "url": {"type": "string", "description": "for goto"},
            "element": {"type": "integer", "description": "for click and type"},
            "text": {"type": "string", "description": "for type"},
        },
        "required": ["action"],
    }

    def __init__(
        self,
        domains: Sequence[str],
        allow_private: Sequence[str] = (),
        executable: str | None = None,
        timeout: float = 30.0,
        max_bytes: int = 64 * 2**20,
    ):
        self.url_policy = UrlPolicy(domains, allow_private)
        self.executable = _chromium(executable)
        _library()
        self.deadline_s = timeout
        self.max_bytes = max_bytes
        self._proxy: FilteringProxy | None = None
        self._context: Any = None
        self._open: AsyncExitStack | None = None
        self._interrupted = False
        """True while a call runs, and after it was canceled; then the browser must be ended before the next call."""

    async def call(self, arguments: dict[str, Any]) -> str:
        """Run one action of the browser and return the page as text. The first call starts the browser.

        Raises:
            ToolError: The action fails or lacks an argument, a URL is not allowed, or the page has crashed.
        """
        if self._interrupted or (self._context is not None and not self._context.browser.is_connected()):
            await self.close()
        self._interrupted = True
        try:
            if await self._close_crashed_tabs() and arguments["action"] != "goto":
                raise ToolError(PAGE_CRASHED_MESSAGE)
            page = await self._page()
            await self._act(page, arguments)
            rendered = await self._render_page()
            self._interrupted = False
            return rendered
        except _library().Error as error:  # Playwright's own errors, including timeouts
            reason = PAGE_CRASHED_MESSAGE if await self._close_crashed_tabs() else str(error).splitlines()[0][:300]
            self._interrupted = self._context is None
            raise ToolError(f"{arguments['action']} failed: {reason}") from error
        except ToolError:
            self._interrupted = False
            raise
        finally:
            if self._interrupted and self._proxy is not None:
                _kill(self._proxy)

    async def _act(self, page: Any, arguments: dict[str, Any]) -> None:
        action = arguments["action"]
        if action == "goto":
            url = _required_argument(arguments, "url").strip()
            self.url_policy.check_url(url)  # the proxy would deny the URL, too, but with a less clear message
            response = await _retried(page, lambda: page.goto(url))
            if response is not None and response.headers.get(DENIED_HEADER):
                raise ToolError((await response.text())[:500])
        elif action in ("click", "type"):
            number = int(_required_argument(arguments, "element"))
            element = page.locator(f'[data-element="{number}"]').first
            if await element.count() == 0:
                raise ToolError(f"there is no element {number}; read shows which there are.")
            await (self._click(element) if action == "click" else element.fill(_required_argument(arguments, "text")))
        elif action == "back" and await page.go_back() is None and len(self._context.pages) > 1:
            await page.close()

    async def _click(self, element: Any) -> None:
        """Click, and wait for the document that the click opens, if any, in this tab or in a new tab.

        Stop waiting after 0.7 of the deadline, so that the page can be returned as it is.
        """
        opens_tab = await element.evaluate(OPENS_TAB_SCRIPT)
        loop = asyncio.get_running_loop()
        until = loop.time() + 0.7 * self.deadline_s
        with _Navigations(self._context) as navigations:
            await element.click()
            with contextlib.suppress(TimeoutError, _library().TimeoutError):
                async with asyncio.timeout_at(until):
                    await asyncio.sleep(SETTLE_MS / 1000)  # time for a navigation to begin
                    if opens_tab:
                        with contextlib.suppress(TimeoutError):
                            await with_timeout(min(NEW_TAB_TIMEOUT_S, 0.2 * self.deadline_s), navigations.begun.wait())
                    await navigations.finish()
                    await self._context.pages[-1].wait_for_load_state()

    async def _render_page(self) -> str:
        page = await self._page()
        content = await _retried(page, lambda: page.evaluate(READ_PAGE_SCRIPT))
        elements = [
            f"[{number}] {tag} {name}{f' -> {link}' if link else ''}"
            for number, (tag, name, link) in enumerate(content["elements"], 1)
        ]
        listing = "\n".join(["", "Elements:", *elements]) if elements else ""
        return f"{content['title']}\n{page.url}\n\n{content['text']}{listing}"

    async def _close_crashed_tabs(self) -> bool:
        """Close the tabs that do not respond or have crashed; return True if the newest tab was one of them."""
        tabs = list(self._context.pages) if self._context is not None else []
        responsive = await asyncio.gather(*map(self._responds, tabs))
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await asyncio.gather(*(tab.close() for tab, alive in zip(tabs, responsive, strict=True) if not alive))
        return bool(tabs) and not responsive[-1]

    async def _responds(self, page: Any) -> bool:
        try:
            async with asyncio.timeout(min(PAGE_TIMEOUT_S, 0.2 * self.deadline_s)):
                await page.evaluate("0")
        except TimeoutError:
            return False
        except _library().Error as error:  # other errors mean that the tab is navigating to another document
            return "crashed" not in str(error)
        return True

    async def _page(self) -> Any:
        """Return the newest tab, which a link may have opened; start the browser if necessary."""
        if self._context is None:
            await self._start()
        return self._context.pages[-1] if self._context.pages else await self._context.new_page()

    async def _start(self) -> None:
        root = os.geteuid() == 0
        self._open = AsyncExitStack()
        self._proxy = await self._open.enter_async_context(FilteringProxy(self.url_policy, self.max_bytes))
        playwright = await self._open.enter_async_context(_library().async_playwright())
        browser = await playwright.chromium.launch(
            executable_path=self.executable,
            args=[*FLAGS],
            # Chromium's own sandbox does not start as root. Users who want it must train as another user.
            chromium_sandbox=not root,
            proxy={"server": f"http://127.0.0.1:{self._proxy.port}", "bypass": "<-loopback>"},
            env={name: value for name, value in os.environ.items() if not is_credential_name(name)},
            handle_sigint=False,
            handle_sigterm=False,
            handle_sighup=False,
        )
        context = await browser.new_context(accept_downloads=False, service_workers="block")
        context.set_default_timeout(700 * self.deadline_s)
        context.on("page", self._limit_tabs)
        self._context = context

    def _limit_tabs(self, page: Any) -> None:
        if len(self._context.pages) > MAX_TABS:
            self._closing = asyncio.ensure_future(page.close())

    async def close(self) -> None:
        """End the browser and its driver, and ignore errors. The next call starts a new browser."""
        opened, proxy, context = self._open, self._proxy, self._context
        self._open = self._proxy = self._context = None
        self._interrupted = False
        if opened is None or proxy is None:
            return
        with contextlib.suppress(Exception):
            if context is not None:
                await with_timeout(CLOSE_TIMEOUT_S, context.browser.close())
        _kill(proxy)  # in case it did not close
        with contextlib.suppress(Exception):
            await with_timeout(CLOSE_TIMEOUT_S, opened.aclose())


class _Navigations:
    """A context manager that tracks the requests for top-level documents in all tabs of a browser context.

    Playwright's click waits only for a navigation of its own tab, and a new tab joins the context's pages only when its
    document has arrived.
    """

    def __init__(self, context: Any):
        self.begun = asyncio.Event()
        self._pending: set[Any] = set()
        self._context = context
        self._handlers = {"request": self._began, "requestfinished": self._ended, "requestfailed": self._ended}

    def __enter__(self) -> _Navigations:
        for event, handler in self._handlers.items():
            self._context.on(event, handler)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for event, handler in self._handlers.items():
            self._context.remove_listener(event, handler)

    async def finish(self) -> None:
        """Wait until no request is pending. The next request of a redirect follows within `SETTLE_MS`."""
        while self._pending:
            await asyncio.sleep(SETTLE_MS / 1000)

    def _began(self, request: Any) -> None:
        if request.is_navigation_request() and _top_level(request):
            self.begun.set()
            self._pending.add(request)

    def _ended(self, request: Any) -> None:
        self._pending.discard(request)


def _top_level(request: Any) -> bool:
    try:
        return request.frame.parent_frame is None
    except _library().Error:  # a new tab has no frame before its document arrives
        return True


async def _retried(page: Any, attempt: Callable[[], Awaitable[Any]]) -> Any:
    """Return the result of `attempt`, and retry it while another navigation interrupts it.

    After a failed navigation, Chromium may still be loading its error page when the next call comes.
    """
    for _ in range(ATTEMPTS - 1):
        try:
            return await attempt()
        except _library().Error as error:
            if not any(words in str(error) for words in NAVIGATION_ERRORS):
                raise
        await page.wait_for_timeout(SETTLE_MS)
    return await attempt()


def _kill(proxy: FilteringProxy) -> None:
    """Kill the browser that uses `proxy`, among the descendants of this process."""
    mark = f"127.0.0.1:{proxy.port}"
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(mark in argument for argument in process.cmdline()):
                process.kill()


def _required_argument(arguments: dict[str, Any], name: str) -> Any:
    if name not in arguments:
        raise ToolError(f"{arguments['action']} needs the argument {name!r}.")
    return arguments[name]


def find_browser() -> tuple[bool, str | None]:
    """Look for Playwright and for a browser that it can drive.

    Returns:
        True if Playwright is installed, and the path of the first browser of `PROGRAMS` on PATH, or None.
    """
    path = next((program for name in PROGRAMS if (program := shutil.which(name))), None)
    return importlib.util.find_spec("playwright") is not None, path


def _chromium(executable: str | None) -> str:
    for name in (executable,) if executable else PROGRAMS:
        if path := shutil.which(name):
            return path
    problem = (
        f"executable={executable!r} is not a program" if executable else f"none of {', '.join(PROGRAMS)} is on PATH"
    )
    raise ConfigError(
        f"The browser tool finds no browser: {problem}. Run scripts/browser_tools, which installs Debian's Chromium."
    )


def _library() -> Any:
    try:
        import playwright.async_api
    except ImportError as error:
        raise ConfigError(
            "the browser tool needs Playwright; install it with: pip install 'skyrl-train[browser]'."
        ) from error
    return playwright.async_api
