"""What listens at a port: at which addresses without a token, who may ask, and what is said if it cannot listen."""

from __future__ import annotations

import errno
import hmac
import ipaddress
import socket
from dataclasses import dataclass

from skyrl_train.errors import ConfigError

API_KEY_ENV = "SKYRL_API_KEY"
"""The environment variable with the token: never a key of the configuration, which is saved and printed."""


@dataclass(frozen=True)
class Listener:
    """Something that listens, as messages call it, and the keys of its address."""

    name: str
    host_key: str
    port_key: str

    def check_token(self, token: str | None, host: str) -> None:
        """Raises ConfigError for a token that no header carries, and without one for a host that others can reach."""
        if token is None:
            if not is_loopback(host):
                raise ConfigError(
                    f"{self.host_key}={host!r} can be reached from other machines, and no token protects it: "
                    f"set the environment variable {API_KEY_ENV} to a secret, or use 127.0.0.1."
                )
        elif not token or not all("!" <= character <= "~" for character in token):
            raise ConfigError(
                f"{API_KEY_ENV} must be letters, digits and signs without blanks; its value is not shown here."
            )

    def check_address(self, host: str, port: int) -> None:
        """Raises ConfigError if the address cannot be listened at."""
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in found:
                try:
                    socket.create_server(address, family=family).close()
                except OSError as error:
                    if family != socket.AF_INET6 or error.errno not in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                        raise  # a machine without IPv6 still has its other addresses
        except OSError as error:
            raise self.cannot_listen(host, port, error) from error

    def cannot_listen(self, host: str, port: int, error: OSError) -> ConfigError:
        return ConfigError(
            f"{self.port_key}={port}: {self.name} cannot listen at {host}:{port}: {error.strerror or error}. "
            f"Choose another {self.port_key}, or another {self.host_key} of this machine."
        )


def is_loopback(host: str) -> bool:
    """Whether a host is only reached from its own machine."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_authorized(authorization: str, token: str) -> bool:
    """Whether a header `Authorization` is `Bearer <token>`."""
    scheme, _, given = authorization.partition(" ")
    same = hmac.compare_digest(given.strip().encode(errors="surrogateescape"), token.encode())
    return same and scheme.lower() == "bearer"


def socket_url(listening: socket.socket) -> str:
    """The address, e.g. http://127.0.0.1:8000, with the port that was taken."""
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
