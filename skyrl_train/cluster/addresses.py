"""Addresses at which the processes of a run listen: loopback on a single node, else the node's own address."""

from __future__ import annotations

import errno
import os
import random
import socket
from contextlib import closing
from pathlib import Path

import psutil

NODE_ADDRESS = "SKYRL_NODE_ADDRESS"
"""Environment variable of an actor: the address at which other nodes reach its node."""
BIND_ADDRESS = "SKYRL_GROUP_ADDRESS"
"""Environment variable of an actor: the address at which the run's other actors reach it. Loopback on a single node."""
LOOPBACK = "127.0.0.1"


EPHEMERAL_PORTS_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 32


def free_address(host: str = LOOPBACK) -> tuple[str, int]:
    """Return a host and a port of it that is free now.

    The caller listens only seconds later. Until then Linux may give any port of its ephemeral range to an outgoing
    connection, so the port is above that range if possible. It does not depend on the run's seed, because two runs on
    one machine may have the same seed.

    Raises:
        OSError: The host is not an address of this machine.
    """
    above = range(_last_ephemeral_port() + 1, 2**16)
    for port in random.SystemRandom().sample(above, min(_ATTEMPTS, len(above))):
        try:
            listen(host, port).close()
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
        else:
            return host, port
    with closing(listen(host, 0)) as probe:
        return host, int(probe.getsockname()[1])


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens at this address and at no other.

    torch's stores listen on all addresses unless they get a socket: pass `listen(...).detach()`, which they close.

    Raises:
        OSError: The address is in use or does not belong to this machine.
    """
    family, address = _resolve(host, port)
    return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)


def local_address_towards(host: str, port: int) -> str:
    """Return the address of this machine from which it reaches a host.

    Raises:
        OSError: The host's name cannot be resolved, or there is no route to it.
    """
    family, address = _resolve(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def find_interface(address: str) -> str | None:
    """Return the name of the network interface that has this address, or None if there is none."""
    for name, addresses in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in addresses):
            return name
    return None


_INTERFACE = "GLOO_SOCKET_IFNAME"
_CHOSEN = "SKYRL_CHOSE_INTERFACE"
"""Environment variable: `choose_interface` has set the other variable, in this process or in its parent."""


def choose_interface(address: str) -> None:
    """Make gloo's process groups listen on the interface that has this address, until `reset_interface`.

    Sets GLOO_SOCKET_IFNAME, which also affects groups that torch creates later. Does nothing if the variable is set
    already or no interface has the address.
    """
    interface = find_interface(address)
    if interface is not None and _INTERFACE not in os.environ:
        os.environ[_INTERFACE] = interface
        os.environ[_CHOSEN] = "1"


def reset_interface() -> None:
    """Unset GLOO_SOCKET_IFNAME if `choose_interface` has set it."""
    if os.environ.pop(_CHOSEN, None):
        os.environ.pop(_INTERFACE, None)


def configured_interface() -> str:
    """Return the interface that the user chose for gloo with GLOO_SOCKET_IFNAME, or "" if gloo may choose."""
    return "" if _CHOSEN in os.environ else os.environ.get(_INTERFACE, "")


def _last_ephemeral_port() -> int:
    """Return the last port of the ephemeral range; 65,535, which leaves no port above it, if the range is unknown."""
    try:
        return int(EPHEMERAL_PORTS_FILE.read_text().split()[1])
    except OSError:
        return 2**16 - 1


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Return the first address of a name, IPv4 before IPv6: both ends of a connection must choose the same one."""
    entries = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(entries, key=lambda entry: entry[0] != socket.AF_INET)
    return family, (str(address[0]), port)
