"""Engines that a run has started, and the file in its folder that changes their number."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.cluster.placement import ResourcePool
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.schema import TimeoutsConfig
from skyrl_train.engines.base import Capabilities
from skyrl_train.experiment import engines
from skyrl_train.experiment.engines import build_engine
from skyrl_train.experiment.placement import RolePlacement


class Started:
    """A handle of an engine that has."""

    capabilities = Capabilities("unknown")

    async def get_attribute(self, attribute: str, deadline_s: float) -> Capabilities:
        return Capabilities("engine 1")

    def cache_attributes(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities


@pytest.mark.defect("newcomers-on-other-nodes-are-told-loopback")
@pytest.mark.parametrize("single_machine", [True, False])
def test_loopback_is_no_address_for_an_engine_of_a_cluster_that_has_grown(
    monkeypatch: pytest.MonkeyPatch, single_machine: bool
):
    """Ranks of a run that began on one node would give it: see test_sync.py and test_learner.py."""
    monkeypatch.setattr(engines, "spawn", lambda *args, **kwargs: Started())
    cluster: Any = SimpleNamespace(is_single_node=single_machine, num_cpus=2.0)
    group: Any = None
    slots = RolePlacement(
        ResourcePool(group, num_slots=1, cpus_per_slot=1.0, gpus_per_slot=0.0, actors_per_slot=1, min_cores_per_slot=1),
        1,
    )
    engine: Any = asyncio.run(
        build_engine(1, cluster, GeneratorConfig(), TimeoutsConfig(), slots, "cpu", member_index=0)
    )
    assert engine.capabilities.other_machine != single_machine
    assert engine.capabilities.name == "engine 1"


def test_an_engine_over_two_nodes_is_a_process_on_each_that_meet_on_the_first(monkeypatch: pytest.MonkeyPatch):
    started: list[tuple[str, int, str, dict[str, Any]]] = []
    bound: list[Any] = []

    class Process(Started):
        def link_lifetimes(self, parts: list[Any], cluster: Any) -> None:
            bound.append((self, parts))

    processes = [Process(), Process()]

    def spawn(cluster: Any, target: str, kwargs: dict[str, Any], *, index: int, name: str, **more: Any) -> Process:
        started.append((target, index, name, kwargs))
        return processes[len(started) - 1]

    async def address(cluster: Any, slots: ResourcePool, index: int, deadline_s: float) -> tuple[str, int]:
        return f"node of slot {index}", 7

    monkeypatch.setattr(engines, "spawn", spawn)
    monkeypatch.setattr(engines, "find_free_address", address)
    cluster: Any = SimpleNamespace(is_single_node=False, num_cpus=8.0)
    group: Any = None
    slots = RolePlacement(
        ResourcePool(
            group, 8, cpus_per_slot=1.0, gpus_per_slot=0.0, actors_per_slot=1, min_cores_per_slot=1, slots_per_bundle=2
        ),
        2,
        slots_per_member=4,
        nodes_per_member=2,
    )
    generator = GeneratorConfig(backend="vllm", inference_engine_tensor_parallel_size=4)
    engine = asyncio.run(build_engine(1, cluster, generator, TimeoutsConfig(), slots, "cpu"))
    (first, at, name, kwargs), (second, at_second, name_second, kwargs_second) = started
    assert (at, name, at_second, name_second) == (4, "engine 1", 6, "engine 1 node 1")
    assert (first.rpartition(":")[2], second.rpartition(":")[2]) == ("VLLMEngine", "VLLMWorkerNode")
    meeting = {"nnodes": 2, "master_addr": "node of slot 4", "master_port": 7, "slot": 4}
    assert meeting.items() <= kwargs.items()
    assert kwargs_second == kwargs | {"node_rank": 1}
    assert bound == [(engine, [processes[1]])]
