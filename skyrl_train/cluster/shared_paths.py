"""Check that files and folders exist on every node that uses them, before anything is loaded."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from skyrl_train.errors import ClusterLost, ConfigError

_MAX_NODES_IN_ERROR = 8
"""Maximum number of nodes that an error names."""


@dataclass(frozen=True)
class SharedPath:
    """A path that processes on several nodes use."""

    key: str
    """Configuration key of the path, for error messages."""
    path: str
    nodes: frozenset[str]
    """Ray's ids of the nodes that use the path."""
    is_written: bool = False
    """True if the nodes write there. Then it must be the driver's own folder, not another one of the same name."""


def check_shared_paths(paths: Iterable[SharedPath], within_s: float) -> None:
    """Raise an error if a node does not see a path that it uses.

    A relative path that the driver does not see is skipped, for example the name of a model on the hub. So is a path
    that neither the driver nor any node sees: its reader reports it.

    Args:
        paths: Paths to check.
        within_s: Seconds that the nodes may take to answer.

    Raises:
        ConfigError: Some nodes do not see a path. Names all of these paths and the addresses of up to 8 nodes for each.
        ClusterLost: A node was lost or does not answer in time.
    """
    checked = [path for path in paths if os.path.isabs(path.path) or os.path.exists(path.path)]
    with _probe_files(checked) as probes:
        nodes = sorted(frozenset[str]().union(*(path.nodes for path in checked)))
        missing = _query_missing(nodes, sorted(set(probes)), within_s)
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    problems = []
    for path, probe in zip(checked, probes, strict=True):
        exists = os.path.exists(path.path) or any(probe not in absent for absent in missing.values())
        without_path = sorted(addresses.get(node, node) for node in path.nodes if probe in missing[node])
        if without_path and exists:
            problems.append(_describe_problem(path, without_path))
    if problems:
        raise ConfigError("\n".join(problems))


def _describe_problem(path: SharedPath, addresses: Sequence[str]) -> str:
    """Return the message for a path that the nodes with these addresses do not see."""
    missing = "the driver's folder" if path.is_written else "it"
    names = ", ".join(addresses[:_MAX_NODES_IN_ERROR]) + (", ..." if len(addresses) > _MAX_NODES_IN_ERROR else "")
    copy_hint = "" if path.is_written else ", or copy it to the same place on each"
    count = f"{len(addresses)} of the {len(path.nodes)} nodes that use it"
    return (
        f"{path.key}={path.path!r}: {count} do not see {missing}: {names}. "
        f"Give a path on a disk that all of them share{copy_hint}."
    )


@contextmanager
def _probe_files(paths: Sequence[SharedPath]) -> Iterator[list[str]]:
    """Yield the path that each node checks, one for each of `paths`.

    For a folder that nodes write to, this is a temporary file in it, so that another folder of the same name does not
    pass. The files are removed on exit.
    """
    probes = [
        str(Path(path.path) / f".seen-by-nodes-{uuid.uuid4().hex[:8]}") if path.is_written else path.path
        for path in paths
    ]
    created = [Path(probe) for path, probe in zip(paths, probes, strict=True) if path.is_written]
    try:
        for file in created:
            file.touch()
        yield probes
    finally:
        for file in created:
            with suppress(OSError):
                file.unlink(missing_ok=True)


def _query_missing(nodes: Sequence[str], probes: Sequence[str], within_s: float) -> dict[str, set[str]]:
    """Return for each node, by its id, the paths that do not exist there."""
    refs = [
        ray.remote(_find_missing)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(list(probes))
        for node in nodes
    ]
    try:
        answers = ray.get(refs, timeout=within_s)
    except RayError as error:
        raise ClusterLost(f"a node of this run did not report which files it sees: {error}") from error
    return dict(zip(nodes, map(set, answers), strict=True))


def _find_missing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]
