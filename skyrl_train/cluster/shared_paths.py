"""Files and folders that must be there on every node that uses them, asked of the nodes before anything is loaded."""

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
"""Nodes that an error names."""


@dataclass(frozen=True)
class SharedPath:
    """A path that processes on these nodes (Ray's ids) use."""

    key: str
    path: str
    nodes: frozenset[str]
    is_written: bool = False
    """Whether they write there: then it must be the driver's own folder, not one of the same name."""


def check_shared_paths(paths: Iterable[SharedPath], within_s: float) -> None:
    """Raises ConfigError that names the nodes that do not see a path, ClusterLost if a node does not answer in time.

    What neither the driver nor a node sees is left to whoever reads it: a model's name on the hub, for one.
    """
    asked = [path for path in paths if os.path.isabs(path.path) or os.path.exists(path.path)]
    with _probe_files(asked) as probes:
        nodes = sorted(frozenset[str]().union(*(path.nodes for path in asked)))
        missing = _missing(nodes, sorted(set(probes)), within_s)
    found = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    problems = []
    for path, probe in zip(asked, probes, strict=True):
        somebody = os.path.exists(path.path) or any(probe not in lacks for lacks in missing.values())
        blind = sorted(found.get(node, node) for node in path.nodes if probe in missing[node])
        if blind and somebody:
            problems.append(_problem(path, blind))
    if problems:
        raise ConfigError("\n".join(problems))


def _problem(path: SharedPath, blind: Sequence[str]) -> str:
    """What to say of a path that these nodes (addresses) do not see."""
    what = "the driver's folder" if path.is_written else "it"
    named = ", ".join(blind[:_MAX_NODES_IN_ERROR]) + (", ..." if len(blind) > _MAX_NODES_IN_ERROR else "")
    copy = "" if path.is_written else ", or copy it to the same place on each"
    count = f"{len(blind)} of the {len(path.nodes)} nodes that use it"
    return (
        f"{path.key}={path.path!r}: {count} do not see {what}: {named}. "
        f"Give a path on a disk that all of them share{copy}."
    )


@contextmanager
def _probe_files(paths: Sequence[SharedPath]) -> Iterator[list[str]]:
    """What the nodes are asked for: the path, or a file that is put into a folder that they write to."""
    probes = [
        str(Path(one.path) / f".seen-by-nodes-{uuid.uuid4().hex[:8]}") if one.is_written else one.path for one in paths
    ]
    marks = [Path(probe) for one, probe in zip(paths, probes, strict=True) if one.is_written]
    try:
        for mark in marks:
            mark.touch()
        yield probes
    finally:
        for mark in marks:
            with suppress(OSError):
                mark.unlink(missing_ok=True)


def _missing(nodes: Sequence[str], probes: Sequence[str], within_s: float) -> dict[str, set[str]]:
    """Node -> what is not there."""
    asked = [
        ray.remote(_find_missing)
        .options(num_cpus=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False))
        .remote(list(probes))
        for node in nodes
    ]
    try:
        answers = ray.get(asked, timeout=within_s)
    except RayError as error:
        raise ClusterLost(f"a node with slots of this run did not say which files it sees: {error}") from error
    return dict(zip(nodes, map(set, answers), strict=True))


def _find_missing(paths: Sequence[str]) -> list[str]:
    return [path for path in paths if not os.path.exists(path)]
