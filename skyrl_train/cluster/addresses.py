"""Where the processes of a run listen: on loopback on a single machine, else on their node's own address."""

from __future__ import annotations

import errno
import os
import random
import socket
from contextlib import closing
from pathlib import Path

import psutil

NODE_ADDRESS = "SKYRL_NODE_ADDRESS"
"""Environment variable of an actor: the address at which other machines reach its node."""
BIND_ADDRESS = "SKYRL_GROUP_ADDRESS"
"""Environment variable of an actor: the address at which the run's other actors reach it, loopback on one node."""
LOOPBACK = "127.0.0.1"


EPHEMERAL_PORTS_FILE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_ATTEMPTS = 32


def free_address(host: str = LOOPBACK) -> tuple[str, int]:
    """(host, a free port of it). Raises OSError if the host is not this machine.

    Whoever asks listens only seconds later. In between, Linux may give any port of its ephemeral range to a connection
    that leaves the machine, so the port is one above the range where there are some. Which one is not the business of a
    run's seed: two runs on one machine have the same.
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
    """A socket that listens at this address alone. Raises OSError if the address is not this machine's, or in use.

    torch's stores listen on all addresses unless they are given one: pass `listen(...).detach()`, which they close.
    """
    family, address = _resolved(host, port)
    return socket.create_server(address, family=family, backlog=socket.SOMAXCONN)


def local_address_towards(host: str, port: int) -> str:
    """The address of this machine from which it reaches `host`. Raises OSError if there is no way to it."""
    family, address = _resolved(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def find_interface(address: str) -> str | None:
    """Name of the network interface that has this address; None if none has."""
    for name, found in psutil.net_if_addrs().items():
        if any(one.address.partition("%")[0] == address for one in found):
            return name
    return None


_INTERFACE = "GLOO_SOCKET_IFNAME"
_CHOSEN = "SKYRL_CHOSE_INTERFACE"
"""Environment variable: `choose_interface` has set the other one, here or in the process that started this one."""


def choose_interface(address: str) -> None:
    """Have gloo's groups listen at this address, those that torch makes later, too; until `forget_interface`."""
    interface = find_interface(address)
    if interface is not None and _INTERFACE not in os.environ:
        os.environ[_INTERFACE] = interface
        os.environ[_CHOSEN] = "1"


def reset_interface() -> None:
    """Undo `choose_interface`, if it has done anything."""
    if os.environ.pop(_CHOSEN, None):
        os.environ.pop(_INTERFACE, None)


def configured_interface() -> str:
    """The interface that this machine's user wants gloo to use; empty if gloo is to choose."""
    return "" if _CHOSEN in os.environ else os.environ.get(_INTERFACE, "")


def _last_ephemeral_port() -> int:
    """65,535, which leaves none above, where it is not known."""
    try:
        return int(EPHEMERAL_PORTS_FILE.read_text().split()[1])
    except OSError:
        return 2**16 - 1


def _resolved(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Both ends of a connection must choose the same of a name's addresses: the first, IPv4 before IPv6."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(found, key=lambda one: one[0] != socket.AF_INET)
    return family, (str(address[0]), port)
