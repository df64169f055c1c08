"""Checks of the addresses and tokens of servers, before they listen."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import socket
from dataclasses import dataclass

from skyrl_train.errors import ConfigError

API_KEY_ENV = "SKYRL_API_KEY"
"""Environment variable with the token. It is no configuration key, because the configuration is saved and printed."""


@dataclass(frozen=True)
class Listener:
    """A server that a run may start."""

    name: str
    """Name of the server in messages."""
    host_key: str
    """Configuration key of the host."""
    port_key: str
    """Configuration key of the port."""

    def check_token(self, token: str | None, host: str) -> None:
        """Check the token (API key) of a server that will listen on `host`.

        Args:
            token: The token; None if the environment variable is not set.
            host: The address on which the server listens. On a loopback address the server needs no token.

        Raises:
            ConfigError: The token is empty, has characters that an HTTP header cannot carry, or is None although other
                machines can reach the host.
        """
        if token is None:
            if not is_loopback(host):
                raise ConfigError(
                    f"{self.host_key}={host!r} can be reached from other machines, but no token protects it: "
                    f"set the environment variable {API_KEY_ENV} to a secret, or use 127.0.0.1."
                )
        elif not token or not all("!" <= character <= "~" for character in token):
            raise ConfigError(
                f"{API_KEY_ENV} must consist of printable ASCII characters without spaces; its value is not shown here."
            )

    def check_address(self, host: str, port: int) -> None:
        """Raise an error if the server cannot listen at an address. The address is used for a moment.

        Raises:
            ConfigError: The address cannot be resolved or used.
        """
        try:
            entries = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in entries:
                try:
                    socket.create_server(address, family=family).close()
                except OSError as error:
                    if family != socket.AF_INET6 or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise  # a machine without IPv6 still has its other addresses
        except OSError as error:
            raise self.address_error(host, port, error) from error

    def address_error(self, host: str, port: int, error: OSError) -> ConfigError:
        """Return the ConfigError for an address at which listening failed with `error`."""
        return ConfigError(
            f"{self.port_key}={port}: {self.name} cannot listen at {host}:{port}: {error.strerror or error}. "
            f"Choose another {self.port_key}, or another {self.host_key} of this machine."
        )


def is_loopback(host: str) -> bool:
    """Return True if only its own machine can reach a host. A name other than "localhost" is not resolved: False."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_authorized(authorization: str, token: str) -> bool:
    """Return True if an Authorization header is `Bearer <token>`. Compares in constant time."""
    scheme, _, credentials = authorization.partition(" ")
    matches = hmac.compare_digest(credentials.strip().encode(errors="surrogateescape"), token.encode())
    return matches and scheme.lower() == "bearer"


def socket_url(listening: socket.socket) -> str:
    """Return the URL of a listening socket, e.g. http://127.0.0.1:8000."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
