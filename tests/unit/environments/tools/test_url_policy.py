from __future__ import annotations

import asyncio
import gzip
import threading
import time
import zlib
from collections.abc import Sequence

import pytest

from skyrl_train.environments.tools.base import ToolBox, ToolError
from skyrl_train.environments.tools.fetch import FetchTool, Page, fetch
from skyrl_train.environments.tools.url_policy import Target, UrlNotAllowed, UrlPolicy, is_public
from skyrl_train.errors import ConfigError
from tests.support.web_server import Request, Response, WebServer, web_server

POLICY = UrlPolicy(["wiki.test", "docs.test:8443"])


def get(url: str, policy: UrlPolicy, max_bytes: int = 2**20, deadline_s: float = 20.0) -> Page:
    return asyncio.run(fetch(url, policy, max_bytes, deadline_s))


def policy_resolving_to(*addresses: str) -> UrlPolicy:
    """Return a policy that resolves every name to these addresses."""

    async def lookup(host: str, port: int) -> Sequence[str]:
        return addresses

    return UrlPolicy(["wiki.test"], lookup=lookup)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("https://wiki.test", Target("https", "wiki.test", 443)),
        ("http://EN.Wiki.Test./a?b=c#d", Target("http", "en.wiki.test", 80)),
        ("HTTPS://wiki.test:80/%20", Target("https", "wiki.test", 80)),
        ("https://docs.test:8443/", Target("https", "docs.test", 8443)),
    ],
)
def test_listed_domains_and_subdomains_are_allowed(url: str, target: Target):
    assert POLICY.check_url(url) == target


@pytest.mark.fault("F26")
@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://wiki.test/",
        "javascript:alert(1)",
        "data:text/html,x",
        "view-source:http://wiki.test/",
        "wiki.test",
        "//wiki.test/",
        "http:wiki.test",
        "http:///wiki.test",
        "http://notwiki.test/",
        "http://wiki.test.evil.test/",
        "http://wiki.test:22/",
        "https://docs.test/",
        "http://wiki.test@evil.test/",
        "http://evil.test@wiki.test/",
        "http://a:b@wiki.test/",
        "http://wiki.test\\@evil.test/",
        "http://evil.test\\.wiki.test/",
        "http://evil.test%2f.wiki.test/",
        "http://evil.test#.wiki.test/",
        "http://wiki.test /",
        "http://wiki.test\t.evil.test/",
        "http://wiki.test/\r\nHost: evil.test",
        "http://wiki。test/",
        "http://ｗiki.test/",
        "http://wiki.test:99999/",
        "http://wiki.test:-1/",
        "http://wiki.test/" + "a" * 3000,
        "http://127.0.0.1/",
        "http://127.1/",
        "http://127.0.0.1./",
        "http://2130706433/",
        "http://0x7f000001/",
        "http://0x7f.1/",
        "http://017700000001/",
        "http://0177.0.0.1/",
        "http://[::1]/",
        "http://[::ffff:127.0.0.1]/",
        "http://[::ffff:7f00:1]/",
        "http://0/",
        "http://localhost/",
        "",
    ],
)
def test_other_urls_are_rejected(url: str):
    with pytest.raises(UrlNotAllowed):
        POLICY.check_url(url)
    with pytest.raises(UrlNotAllowed):
        get(url, POLICY)


@pytest.mark.fault("F26")
def test_numeric_hosts_are_rejected_with_wildcard():
    for host in ("127.1", "0x7f.1", "2130706433", "8.8.8.8", "[::1]", "a.1"):
        with pytest.raises(UrlNotAllowed, match="numeric"):
            UrlPolicy(["*"]).check_url(f"http://{host}/")
    assert UrlPolicy(["*"]).check_url("http://any.test/").host == "any.test"


@pytest.mark.fault("F26")
@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "127.8.8.8",
        "10.1.2.3",
        "172.16.0.1",
        "192.168.0.1",
        "169.254.169.254",
        "192.0.0.192",
        "192.31.196.1",
        "192.52.193.1",
        "192.175.48.1",
        "2620:4f:8000::1",
        "2001:1::1",
        "3fff::1",
        "5f00::1",
        "100:0:0:1::1",
        "100.100.100.200",
        "168.63.129.16",
        "0.0.0.0",
        "255.255.255.255",
        "224.0.0.1",
        "240.0.0.1",
        "192.0.2.1",
        "::",
        "::1",
        "::ffff:10.0.0.1",
        "::127.0.0.1",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd00:ec2::254",
        "fec0::1",
        "ff02::1",
        "64:ff9b::7f00:1",
        "64:ff9b:1::a00:1",
        "2002:7f00:1::",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "2001:db8::1",
    ],
)
def test_private_addresses_are_rejected(address: str):
    assert not is_public(address)
    for found in ((address,), ("93.184.215.14", address)):
        with pytest.raises(UrlNotAllowed, match="not a public address"):
            get("http://wiki.test/", policy_resolving_to(*found))


def test_public_addresses_are_public():
    for address in ("93.184.215.14", "8.8.8.8", "2606:4700:4700::1111", "::ffff:8.8.8.8"):
        assert is_public(address)
    target = Target("http", "wiki.test", 80)
    assert asyncio.run(policy_resolving_to("8.8.8.8", "8.8.8.8", "8.8.4.4").resolve(target)) == ["8.8.8.8", "8.8.4.4"]
    with pytest.raises(UrlNotAllowed, match="has no address"):
        asyncio.run(policy_resolving_to().resolve(target))


@pytest.mark.parametrize("domain", ["http://wiki.test", "127.0.0.1", "wiki.test/", "[::1]", "*.wiki.test", "", "a..b"])
def test_invalid_domain_is_a_config_error(domain: str):
    with pytest.raises(ConfigError, match="domains: "):
        UrlPolicy([domain])
    with pytest.raises(ConfigError, match="allow_private: "):
        UrlPolicy([], ["127.0.0.1"])


@pytest.mark.fault("F26")
def test_redirect_to_private_address_is_rejected():
    with web_server(lambda request: Response(b"secret")) as secret:
        hops = {
            "/there": f"{secret.url}/",
            "/file": "file:///etc/passwd",
            "/short": f"http://127.1:{secret.port}/",
            "/user": f"http://wiki.test@127.0.0.1:{secret.port}/",
            "/twice": "/there",
            "/round": "/round",
        }

        def answer(request: Request) -> Response:
            return Response(status=302, headers={"Location": hops[request.path]})

        with web_server(answer) as open_server:
            policy = UrlPolicy(["wiki.test"], [open_server.at])
            for path in hops:
                with pytest.raises(UrlNotAllowed):
                    get(open_server.url + path, policy)
            assert len(open_server.requests) == 5 + 1 + 6
        assert secret.requests == []


def test_allowed_redirect_is_followed():
    answers = {"/a": Response(status=301, headers={"Location": "b?x=1"}), "/b?x=1": Response(b"here")}
    with web_server(lambda request: answers[request.path]) as server:
        page = get(f"{server.url}/a", UrlPolicy([], [server.at]))
        assert (page.url, page.body, page.status) == (f"{server.url}/b?x=1", b"here", 200)


@pytest.mark.fault("F26")
def test_dns_rebinding_connects_to_checked_address():
    looked_up: list[str] = []
    with web_server(lambda request: Response(b"pinned")) as server:

        async def rebinding(host: str, port: int) -> Sequence[str]:
            looked_up.append(host)
            return ["127.0.0.1"] if len(looked_up) == 1 else ["127.0.0.2"]  # no server listens there

        policy = UrlPolicy([], [f"own.test:{server.port}"], lookup=rebinding)
        assert get(f"http://own.test:{server.port}/", policy).body == b"pinned"
        assert looked_up == ["own.test"]
        assert server.requests[0].headers["Host"] == f"own.test:{server.port}"

        async def private(host: str, port: int) -> Sequence[str]:
            looked_up.append(host)
            return ["127.0.0.1"]

        with pytest.raises(UrlNotAllowed, match="not a public address"):
            get("http://wiki.test/", UrlPolicy(["wiki.test"], lookup=private))
        assert len(server.requests) == 1


@pytest.mark.fault("F26")
@pytest.mark.parametrize("coding", ["gzip", "deflate", "identity", "br", "gzip, gzip"])
def test_decompressed_size_is_limited(coding: str):
    bomb = {"gzip": gzip.compress(bytes(2**26)), "deflate": zlib.compress(bytes(2**26))}.get(coding, bytes(2**21))
    with web_server(lambda request: Response(bomb, headers={"Content-Encoding": coding})) as server:
        with pytest.raises(UrlNotAllowed, match=r"more than 1048576 bytes|encoding"):
            get(server.url, UrlPolicy([], [server.at]), max_bytes=2**20)


def test_compressed_response_is_read():
    content = b"x" * 10**6
    with web_server(lambda request: Response(gzip.compress(content), headers={"Content-Encoding": "gzip"})) as server:
        assert get(server.url, UrlPolicy([], [server.at])).body == content


def test_unresponsive_server_ends_at_deadline():
    released = threading.Event()

    def answer(request: Request) -> Response:
        released.wait(60)
        return Response()

    with web_server(answer) as server:
        with pytest.raises(ToolError, match=r"did not answer within 0\.3 s"):
            get(server.url, UrlPolicy([], [server.at]), deadline_s=0.3)
        released.set()


def test_environment_proxies_and_cookies_are_ignored(monkeypatch: pytest.MonkeyPatch):
    with web_server(lambda request: Response(b"direct", headers={"Set-Cookie": "a=1"})) as server:
        monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
        assert get(server.url, UrlPolicy([], [server.at])).body == b"direct"


def fetch_tool_box(server: WebServer) -> ToolBox:
    return ToolBox([FetchTool(domains=[], allow_private=[server.at])])


def test_fetch_tool_returns_visible_text():
    html = (
        b"<html><head><title>no</title></head><body><h1>Big &amp; bold</h1><script>evil()</script>"
        b"<p>One <a href='/two'>two</a>\n  three</p></body></html>"
    )
    with web_server(lambda request: Response(html, 404 if request.path == "/none" else 200)) as server:
        box = fetch_tool_box(server)
        assert box.call("fetch", {"url": server.url}).text == "Big & bold\nOne two (/two)\nthree"
        refused = box.call("fetch", {"url": "http://169.254.169.254/latest"})
        assert (refused.error, "numeric address" in refused.text) == ("tool_error", True)
        missing = box.call("fetch", {"url": f"{server.url}/none"})
        assert (missing.error, "status 404" in missing.text) == ("tool_error", True)
        box.close()


def html(text: str, content_type: str = "text/html; charset=utf-8") -> str:
    return Page("http://wiki.test/", 200, content_type, text.encode()).text()


def test_invisible_elements_are_skipped():
    page = "<!DOCTYPE html><!-- a > b --><HEAD><title>no<body>1 < 2 &lt; 3<SCRIPT>if (a < b) {}</script><br/>"
    assert html(f"{page}<A class=x HREF='/a?b&amp;c'>go</A> <b>on</b><svg><p>no</p></svg>.<style>p") == (
        "1 < 2 < 3\ngo (/a?b&c) on."
    )
    assert Page("u", 200, "text/html; charset=iso-8859-1", b"caf\xe9").text() == "café"
    assert Page("u", 200, "text/html; charset=punycode", "café".encode()).text() == "café"
    assert html("<b>as it is</b>", "text/plain") == "<b>as it is</b>"


@pytest.mark.fault("F26")
@pytest.mark.parametrize(
    "unit", ["<!--", "<a ", "</", "<", "<a href='", "< ", "<svg></p>", "<a>", "</a>", "&", "<?", " \n"]
)
def test_hostile_page_is_parsed_in_linear_time(unit: str):
    start = time.process_time()
    html(unit * (2**20 // len(unit)) + ">")
    assert time.process_time() - start < 20.0
