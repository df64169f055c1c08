"""Decides which URLs a tool may visit, and to which addresses its connections may go.

The model writes the URLs, and pages redirect to further ones. So a URL must match a narrow grammar that every parser
reads alike, and its host must be in a list of domains. The host's addresses are looked up here, once: connections go to
the checked addresses, so a name that resolves differently the next time (rebinding) gains nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from skyrl_train.environments.tools.base import ToolError
from skyrl_train.errors import ConfigError

Lookup = Callable[[str, int], Awaitable[Sequence[str]]]

MAX_URL = 2048
URL = re.compile(
    r"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{1,5}))?(?P<rest>[/?#][!-\[\]-~]*)?",
    re.IGNORECASE,
)
"""No user-info, no backslash, no escapes or non-ASCII characters in the host, no control characters or spaces."""
HOST_PORT = re.compile(r"(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\]):(?P<port>[0-9]{1,5})")
DOMAIN = re.compile(r"(?P<host>[a-z0-9_-]+(\.[a-z0-9_-]+)*)(:(?P<port>[0-9]{1,5}))?")
NUMBER = re.compile(r"([0-9]+|0x[0-9a-f]*)")
PORTS = {"http": 80, "https": 443}
SPECIAL_V4 = """
    0.0.0.0/8 10.0.0.0/8 100.64.0.0/10 127.0.0.0/8 169.254.0.0/16 172.16.0.0/12 192.0.0.0/24 192.0.2.0/24
    192.31.196.0/24 192.52.193.0/24 192.88.99.0/24 192.168.0.0/16 192.175.48.0/24 198.18.0.0/15 198.51.100.0/24
    203.0.113.0/24 240.0.0.0/4
"""
SPECIAL_V6 = """
    ::/128 ::1/128 64:ff9b::/96 64:ff9b:1::/48 100::/64 100:0:0:1::/64 2001::/23 2001:db8::/32 2002::/16
    2620:4f:8000::/48 3fff::/20 5f00::/16 fc00::/7 fe80::/10 fec0::/10
"""
SPECIAL_PURPOSE_NETWORKS = tuple(ipaddress.ip_network(text) for text in (SPECIAL_V4 + SPECIAL_V6).split())
"""IANA's registries of special-purpose addresses (RFC 6890), whole, and fec0::/10, which they no longer list. What
Python calls global leaves out some of them, and differs between its versions."""
CLOUD_PLATFORM_ADDRESSES = frozenset({ipaddress.ip_address("168.63.129.16")})
"""Public addresses of services of the machine's own host: Azure's."""


class UrlNotAllowed(ToolError):
    """A URL that may not be visited; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a checked URL. `host` is lower case, without a final dot."""

    scheme: str
    host: str
    port: int


async def system_lookup(host: str, port: int) -> Sequence[str]:
    """All addresses that this machine's resolver returns for a name."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in found]


class UrlPolicy:
    """Allows the URLs of `domains`, but no address of this machine or its networks.

    Args:
        domains: Names that may be visited, including all their subdomains, on ports 80 and 443; `name:port` adds a
            port. "*" is every public name.
        allow_private: Entries `host:port`, written exactly as in the URLs, that may be visited whatever their address.
            For one's own servers and for tests; read from the configuration only.
        lookup: (host, port) -> addresses, for tests.

    Raises ConfigError for an entry of another form.

    Example:
        Guard(["wikipedia.org"]).target("https://en.wikipedia.org/a")   gives   Target("https", "en.wikipedia.org", 443)
        Guard(["wikipedia.org"]).target("http://127.1/")                raises  Refused
    """

    def __init__(self, domains: Sequence[str], allow_private: Sequence[str] = (), lookup: Lookup = system_lookup):
        self.domains = tuple(domain.lower() for domain in domains)
        self.allow_private = frozenset(entry.lower() for entry in allow_private)
        self.lookup = lookup
        for key, entries, form in (("domains", self.domains, DOMAIN), ("allow_private", self.allow_private, HOST_PORT)):
            for entry in entries:
                fits = form.fullmatch(entry)
                number = bool(fits) and key == "domains" and _is_number(fits["host"]) if fits else False
                if (not fits and not (key == "domains" and entry == "*")) or number:
                    what = "a domain, domain:port or *" if key == "domains" else "host:port"
                    raise ConfigError(f"{key}: {entry!r} is not {what}; addresses belong in allow_private.")

    def check_url(self, url: str) -> Target:
        """The destination of `url`. Raises Refused if it may not be visited. Does no lookup; see `addresses`."""
        if len(url) > MAX_URL:
            raise UrlNotAllowed(f"the address has {len(url)} characters; at most {MAX_URL} are allowed")
        parts = URL.fullmatch(url)
        if parts is None:
            raise UrlNotAllowed(f"{url!r:.200} is not a plain http:// or https:// address")
        scheme = parts["scheme"].lower()
        return self.check_host(scheme, parts["host"], int(parts["port"] or PORTS[scheme]))

    def check_host(self, scheme: str, host: str, port: int) -> Target:
        """Like `target`, for a host and a port. Raises Refused."""
        host = host.lower().removesuffix(".")
        if f"{host}:{port}" in self.allow_private:
            return Target(scheme, host, port)
        if host.startswith("[") or _is_number(host):
            raise UrlNotAllowed(f"{host} is a numeric address; only names may be visited")
        if not 0 < port < 65536 or not any(_covers(domain, host, port) for domain in self.domains):
            raise UrlNotAllowed(f"{host}:{port} may not be visited; allowed: {', '.join(self.domains) or 'nothing'}")
        return Target(scheme, host, port)

    async def resolve(self, target: Target) -> list[str]:
        """The only addresses to connect to. Raises Refused if one of them is not public."""
        host = target.host.strip("[]")
        try:
            found = list(dict.fromkeys(await self.lookup(host, target.port)))
        except (OSError, UnicodeError) as error:
            raise UrlNotAllowed(f"{target.host} has no address: {error}") from error
        if f"{target.host}:{target.port}" not in self.allow_private:
            for address in found:
                if not is_public(address):
                    raise UrlNotAllowed(f"{target.host} leads to {address}, which is not a public address")
        if not found:
            raise UrlNotAllowed(f"{target.host} has no address")
        return found


def is_public(text: str) -> bool:
    """Whether an address is on the public internet.

    An IPv4-mapped address counts as the address in it; other forms that embed one (6to4, Teredo, NAT64) do not count.
    """
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped is not None:
            return is_public(str(address.ipv4_mapped))
        if address.scope_id is not None:
            return False
    special = any(address in network for network in SPECIAL_PURPOSE_NETWORKS if network.version == address.version)
    refused = (
        address.is_multicast or address.is_reserved or address.is_unspecified or address in CLOUD_PLATFORM_ADDRESSES
    )
    return address.is_global and not special and not refused


def _is_number(host: str) -> bool:
    """Whether browsers read it as an IPv4 address: its last part is a decimal, octal or hexadecimal number."""
    return NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _covers(domain: str, host: str, port: int) -> bool:
    name, _, own = domain.partition(":")
    if port not in ((int(own),) if own else PORTS.values()):
        return False
    return name == "*" or host == name or host.endswith(f".{name}")
