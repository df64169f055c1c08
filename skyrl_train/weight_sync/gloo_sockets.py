"""Ends what a gloo group is waiting for: torch's own `abort` does nothing for gloo, and its destructor waits, too.

A gloo device listens at a port of its own, and ranks connect to each other's. Shutting these connections down makes
transfers under way fail, at both of their ends.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil
import torch.distributed as dist

_one_at_a_time = threading.Lock()
Address = tuple[str, int]
"""(IP address, port)"""


def new_device(host: str, interface: str) -> tuple[Any, Address]:
    """A gloo device, and where it listens: at `host`, or at an interface's address, with port 0 if that is unknown."""
    gloo: Any = dist.ProcessGroupGloo  # whose methods are not typed
    with _one_at_a_time:
        before = _listening()
        device = gloo.create_device(hostname="" if interface else host, interface=interface)
        new = _listening() - before
    return device, new.pop() if len(new) == 1 else (host, 0)


def end_connections(own: Address, others: Sequence[Address]) -> None:
    """Shut down this process's connections between these devices; no error for those that are gone."""
    for one in psutil.Process().net_connections("tcp"):
        if not one.raddr or not (one.laddr.port == own[1] or _plain(one.raddr) in others):
            continue
        with suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as connection:
            if connection.getsockname()[1] == one.laddr.port:  # or another thread has the descriptor by now
                connection.shutdown(socket.SHUT_RDWR)


def _listening() -> set[Address]:
    found = psutil.Process().net_connections("tcp")
    return {_plain(one.laddr) for one in found if one.status == psutil.CONN_LISTEN}


def _plain(address: Any) -> Address:
    """IPv4 addresses as such, also if the socket is one of IPv6."""
    return str(address.ip).removeprefix("::ffff:"), int(address.port)
