"""Policy that decides which URLs a tool may visit and to which IP addresses it may connect.

The model writes the URLs, and pages redirect to further URLs. Therefore a URL must match a narrow grammar that all
parsers interpret alike, and its host must be in a list of domains. The policy resolves the host once, and connections
go to the checked addresses. So a name that resolves to another address the next time (DNS rebinding) gains nothing.
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
"""Grammar of a URL: no user info, no backslash, no escapes or non-ASCII characters in the host, no control characters,
no spaces."""
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
"""All of IANA's special-purpose address registries (RFC 6890), and fec0::/10, which these no longer list. Python's
`is_global` alone does not suffice: it accepts some of them and differs between Python versions."""
CLOUD_PLATFORM_ADDRESSES = frozenset({ipaddress.ip_address("168.63.129.16")})
"""Public addresses at which a cloud platform (Azure) serves its own virtual machines."""


class UrlNotAllowed(ToolError):
    """An error for a URL that may not be visited, or a response that is not accepted; the message says why."""


@dataclass(frozen=True, slots=True)
class Target:
    """The destination of a checked URL. `host` is in lower case, without a final dot."""

    scheme: str
    host: str
    port: int


async def system_lookup(host: str, port: int) -> Sequence[str]:
    """Return all IP addresses that this machine's resolver returns for a name. Raises OSError if it finds none."""
    addresses = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(address[0]) for *_, address in addresses]


class UrlPolicy:
    """A policy that allows the URLs of some domains, but no address of this machine or its networks.

    Args:
        domains: Names that may be visited, with all their subdomains, on ports 80 and 443. An entry `name:port` allows
            the name on that port instead. "*" allows every public name.
        allow_private: Entries `host:port`, written exactly as in the URLs, that may be visited at any IP address. They
            are for your own servers and for tests, and must come from the configuration only.
        lookup: Function (host, port) -> IP addresses; tests replace it.

    Raises:
        ConfigError: An entry has another form.

    Example:
        UrlPolicy(["wikipedia.org"]).check_url("https://en.wikipedia.org/a")
            returns Target("https", "en.wikipedia.org", 443)
        UrlPolicy(["wikipedia.org"]).check_url("http://127.1/")
            raises UrlNotAllowed
    """

    def __init__(self, domains: Sequence[str], allow_private: Sequence[str] = (), lookup: Lookup = system_lookup):
        self.domains = tuple(domain.lower() for domain in domains)
        self.allow_private = frozenset(entry.lower() for entry in allow_private)
        self.lookup = lookup
        for key, entries, form in (("domains", self.domains, DOMAIN), ("allow_private", self.allow_private, HOST_PORT)):
            for entry in entries:
                match = form.fullmatch(entry)
                is_address = match is not None and key == "domains" and _is_number(match["host"])
                if (match is None and not (key == "domains" and entry == "*")) or is_address:
                    expected = "a domain, domain:port or *" if key == "domains" else "host:port"
                    raise ConfigError(f"{key}: {entry!r} is not {expected}; IP addresses belong in allow_private.")

    def check_url(self, url: str) -> Target:
        """Return the destination of a URL, without resolving its host (see `resolve`).

        Raises:
            UrlNotAllowed: The URL is too long, does not match the grammar, or may not be visited.
        """
        if len(url) > MAX_URL:
            raise UrlNotAllowed(f"the address has {len(url)} characters; at most {MAX_URL} are allowed")
        parts = URL.fullmatch(url)
        if parts is None:
            raise UrlNotAllowed(f"{url!r:.200} is not a plain http:// or https:// address")
        scheme = parts["scheme"].lower()
        return self.check_host(scheme, parts["host"], int(parts["port"] or PORTS[scheme]))

    def check_host(self, scheme: str, host: str, port: int) -> Target:
        """Return the destination for a host and a port, without resolving the host.

        Args:
            scheme: "http" or "https".
            host: Name, or IP address (IPv6 in brackets).
            port: Port number.

        Raises:
            UrlNotAllowed: The host is an IP address that `allow_private` does not list with this port, or no entry of
                `domains` covers the host and the port.
        """
        host = host.lower().removesuffix(".")
        if f"{host}:{port}" in self.allow_private:
            return Target(scheme, host, port)
        if host.startswith("[") or _is_number(host):
            raise UrlNotAllowed(f"{host} is a numeric address; only names may be visited")
        if not 0 < port < 65536 or not any(_covers(domain, host, port) for domain in self.domains):
            raise UrlNotAllowed(f"{host}:{port} may not be visited; allowed: {', '.join(self.domains) or 'nothing'}")
        return Target(scheme, host, port)

    async def resolve(self, target: Target) -> list[str]:
        """Resolve a checked destination and return its IP addresses, the only ones that a tool may connect to.

        Raises:
            UrlNotAllowed: The host has no address, or has an address that is not public and `allow_private` does not
                list the host and the port.
        """
        host = target.host.strip("[]")
        try:
            addresses = list(dict.fromkeys(await self.lookup(host, target.port)))
        except (OSError, UnicodeError) as error:
            raise UrlNotAllowed(f"{target.host} has no address: {error}") from error
        if f"{target.host}:{target.port}" not in self.allow_private:
            for address in addresses:
                if not is_public(address):
                    raise UrlNotAllowed(f"{target.host} leads to {address}, which is not a public address")
        if not addresses:
            raise UrlNotAllowed(f"{target.host} has no address")
        return addresses


def is_public(text: str) -> bool:
    """True if `text` is an IP address on the public internet.

    An IPv4-mapped IPv6 address is as public as its IPv4 address. Other forms that embed an IPv4 address (6to4, Teredo,
    NAT64) are not public.
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
    excluded = (
        address.is_multicast or address.is_reserved or address.is_unspecified or address in CLOUD_PLATFORM_ADDRESSES
    )
    return address.is_global and not special and not excluded


def _is_number(host: str) -> bool:
    """True if browsers read `host` as an IPv4 address: its last part is a decimal, octal or hexadecimal number."""
    return NUMBER.fullmatch(host.rpartition(".")[2]) is not None


def _covers(domain: str, host: str, port: int) -> bool:
    name, _, own = domain.partition(":")
    if port not in ((int(own),) if own else PORTS.values()):
        return False
    return name == "*" or host == name or host.endswith(f".{name}")
