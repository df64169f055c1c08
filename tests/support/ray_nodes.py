"""Several Ray nodes on this machine: each with a loopback address and resources of its own, and each can be lost.

    with raylets([{"trainer": 2}, {"engine": 1}]) as nodes:
        program = subprocess.Popen(command, env=os.environ | nodes.environment)
        nodes.kill(2)

Node 0 is the head, where the driver is: it has no CPU unless it is given some, so that ranks and engines are on the
others. What joins is a program of its own: Ray reads the variables that say how when it is imported.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import psutil

from tests.support.process_state import wait_for_exit

OBJECT_STORE_BYTES = 100_000_000
STARTS_WITHIN_S = 180.0
REPOSITORY = Path(__file__).parents[2]
_LOST_SOON = {"health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""A killed node counts as lost after 2 s, instead of 20 by default. A slow node has the usual time."""
_OF_NODES = {
    "PYTHONPATH": str(REPOSITORY),  # for workers, whose folder is another one
    "GRPC_ENABLE_FORK_SUPPORT": "0",  # for clients, as docs/guides/clusters.md says
}
_LONGEST_TEMPORARY = 30
"""Maximum length in characters: the path of a socket has 107, of which Ray's names take 77."""


@dataclass(frozen=True)
class RayNodes:
    """The nodes of one cluster. The head is the first."""

    address: str
    """Address of the cluster, "host:port": its RAY_ADDRESS."""
    addresses: list[str]
    """Addresses of the nodes, which Ray calls IP addresses."""
    environment: dict[str, str]
    """Environment variables with which a program joins this cluster."""
    program: subprocess.Popen[str]
    """Process that has started the nodes, and starts more on request."""

    @property
    def host(self) -> psutil.Process:
        return psutil.Process(self.program.pid)

    def add(self, **node: Any) -> None:
        """Add a node, described as in Ray's `Cluster.add_node`, at the next address."""
        assert self.program.stdin is not None and self.program.stdout is not None
        prefix, _, last = self.addresses[-1].rpartition(".")
        self.addresses.append(f"{prefix}.{int(last) + 1}")
        self.program.stdin.write(json.dumps(node | {"node_ip_address": self.addresses[-1]}) + "\n")
        self.program.stdin.flush()
        assert any(line.startswith("JOINED") for line in self.program.stdout), (
            "the node did not join; see the output above"
        )

    def raylet(self, index: int) -> psutil.Process:
        """Return the node's own process. Raises StopIteration if it has ended."""
        mine = f"--node_ip_address={self.addresses[index]}"
        children = self.host.children()
        return next(one for one in children if one.name() == "raylet" and mine in one.cmdline())

    def processes(self, index: int) -> list[psutil.Process]:
        """Return the node's raylet and its descendants, such as workers; for the head, Ray's tables too."""
        raylet = self.raylet(index)
        tables = [one for one in self.host.children() if one.name() == "gcs_server"] if index == 0 else []
        return [raylet, *raylet.children(recursive=True), *tables]

    def kill(self, index: int) -> None:
        """Lose a node as if its machine lost power: all of its processes are killed without a shutdown."""
        self.raylet(index).suspend()  # or it would start others while these are killed
        for process in self.processes(index):
            with suppress(psutil.NoSuchProcess):
                process.suspend()
        killed = self.processes(index)
        for process in reversed(killed):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        assert all(wait_for_exit(one.pid) for one in killed), killed


@contextmanager
def ray_nodes(
    nodes: Sequence[Mapping[str, float]],
    *,
    cpus: Sequence[float] | float = 2,
    labels: Sequence[Mapping[str, str]] = (),
    folders: Sequence[str] = (),
    head_cpus: float = 0,
    client_port: int | None = None,
    system: Mapping[str, Any] | None = None,
) -> Iterator[RayNodes]:
    """A head and one more node for each of `nodes`, which are their custom resources, in a Ray session of their own.

    Args:
        cpus: Of each of `nodes`, which are made up: slots are counted in them.
        labels: Of each of `nodes`.
        folders: Working folders of the processes of each of `nodes`: /proc/self/cwd is another folder on each node.
        head_cpus: Of the head.
        client_port: Where the head listens for Ray clients (`ray://`).
        system: Settings of Ray's own (`_system_config`) besides how soon a node counts as lost.
    """
    folder = tempfile.mkdtemp(prefix="ray-")
    assert len(folder) <= _LONGEST_TEMPORARY, f"{folder} is too long for socket paths: set TMPDIR to a shorter folder"
    counts = [cpus] * len(nodes) if isinstance(cpus, int | float) else cpus
    # Below 127.1.0.0 as programs listen at 127.0.0.1 and its neighbours; a pair of numbers for each process.
    first, second = divmod(os.getpid() % 50_000, 250)
    addresses = [f"127.{first + 1}.{second + 1}.{index + 1}" for index in range(len(nodes) + 1)]
    described = [_node(addresses[0], head_cpus, {"driver": 1.0}, ray_client_server_port=client_port)]
    for address, count, one, own_labels, own_folder in zip_longest(
        addresses[1:], counts, nodes, labels, folders[: len(nodes)]
    ):
        described.append(_node(address, count, one, labels=own_labels, folder=own_folder))
    # A token of its own: other clusters of this machine are not this one's.
    environment = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": uuid.uuid4().hex, "RAY_USAGE_STATS_ENABLED": "0"}
    host = subprocess.Popen(
        [sys.executable, "-m", __name__, folder, json.dumps(described), json.dumps(_LOST_SOON | dict(system or {}))],
        env=os.environ | environment | _OF_NODES,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # Ctrl-C in a terminal is the test's
    )
    assert host.stdin is not None and host.stdout is not None
    process = psutil.Process(host.pid)
    try:
        joined = next((line.split()[1] for line in host.stdout if line.startswith("CLUSTER ")), None)
        assert joined is not None, "the cluster did not start; see the output above"
        yield RayNodes(joined, addresses, environment | {"RAY_ADDRESS": joined}, host)
    finally:
        family = process.children(recursive=True) if process.is_running() else []
        with suppress(BrokenPipeError):
            host.stdin.close()
        try:
            host.wait(timeout=30)
        except subprocess.TimeoutExpired:
            host.kill()
            host.wait()
        host.stdout.close()
        _end(family)
        shutil.rmtree(folder, ignore_errors=True)


def _node(address: str, cpus: float, resources: Mapping[str, float], **more: Any) -> dict[str, Any]:
    given = {name: value for name, value in more.items() if value is not None}
    return {"node_ip_address": address, "num_cpus": cpus, "resources": dict(resources), **given}


def _end(family: Sequence[psutil.Process]) -> None:
    """Kill what is left of a cluster: the agents of a raylet look for it for a minute."""
    for one in family:
        with suppress(psutil.NoSuchProcess):
            one.kill()
    psutil.wait_procs(family, timeout=20)


def _host(folder: str, nodes: Sequence[dict[str, Any]], system: Mapping[str, Any]) -> None:
    """Start the nodes. End them when the parent process closes its end of the pipe or dies."""
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    Path(get_ray_address_file(None)).parent.mkdir(parents=True, exist_ok=True)  # where Ray writes, and makes no folder
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    cluster = Cluster()
    common = {"object_store_memory": OBJECT_STORE_BYTES, "include_dashboard": False}
    for index, node in enumerate(nodes):
        head = {"temp_dir": folder, "_system_config": dict(system)} if index == 0 else {}
        os.chdir(node.pop("folder", folder))
        cluster.add_node(wait=False, **(common | head | node))
    cluster.wait_for_nodes(STARTS_WITHIN_S)
    print(f"CLUSTER {cluster.address}", flush=True)
    for line in sys.stdin:
        cluster.add_node(**(common | json.loads(line)))
        cluster.wait_for_nodes(STARTS_WITHIN_S)
        print("JOINED", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    _host(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
