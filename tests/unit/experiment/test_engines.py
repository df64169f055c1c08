"""Starting engines on one node and on several."""

from __future__ import annotations

import asyncio
import logging
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


class StartedEngine:
    """A handle of an engine that has started."""

    capabilities = Capabilities("unknown")

    async def get_attribute(self, attribute: str, deadline_s: float) -> Any:
        return Capabilities("engine 1") if attribute == "capabilities" else {"weights": 1.5}

    def cache_attributes(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities


@pytest.mark.defect("added-engines-use-loopback-address")
@pytest.mark.parametrize("single_machine", [True, False])
def test_engines_use_no_loopback_on_grown_cluster(monkeypatch: pytest.MonkeyPatch, single_machine: bool):
    """Ranks of a run that began on one node would offer loopback: see test_sync.py and test_learner.py."""
    monkeypatch.setattr(engines, "spawn", lambda *args, **kwargs: StartedEngine())
    cluster: Any = SimpleNamespace(is_single_node=single_machine, num_cpus=2.0)
    group: Any = None
    role_placement = RolePlacement(
        ResourcePool(group, num_slots=1, cpus_per_slot=1.0, gpus_per_slot=0.0, actors_per_slot=1, min_cores_per_slot=1),
        1,
    )
    engine: Any = asyncio.run(
        build_engine(1, cluster, GeneratorConfig(), TimeoutsConfig(), role_placement, "cpu", member_index=0)
    )
    assert engine.capabilities.other_machine != single_machine
    assert engine.capabilities.name == "engine 1"


def test_start_is_logged_by_phase(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    monkeypatch.setattr(engines, "spawn", lambda *args, **kwargs: StartedEngine())
    cluster: Any = SimpleNamespace(is_single_node=True, num_cpus=2.0)
    group: Any = None
    pool = ResourcePool(group, 1, cpus_per_slot=1.0, gpus_per_slot=0.0, actors_per_slot=1, min_cores_per_slot=1)
    with caplog.at_level(logging.INFO, "skyrl_train"):
        asyncio.run(build_engine(0, cluster, GeneratorConfig(), TimeoutsConfig(), RolePlacement(pool, 1), "cpu"))
    assert caplog.messages == ["engine 0 ready after 0.0 s: process and imports 0.0, weights 1.5."]


def test_multi_node_engine_starts_process_per_node(monkeypatch: pytest.MonkeyPatch):
    started: list[tuple[str, int, str, dict[str, Any]]] = []
    linked: list[Any] = []

    class Process(StartedEngine):
        def link_lifetimes(self, parts: list[Any], cluster: Any) -> None:
            linked.append((self, parts))

    processes = [Process(), Process()]

    def spawn(cluster: Any, target: str, kwargs: dict[str, Any], *, index: int, name: str, **options: Any) -> Process:
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
    rendezvous = {"nnodes": 2, "master_addr": "node of slot 4", "master_port": 7, "slot": 4}
    assert rendezvous.items() <= kwargs.items()
    assert kwargs_second == kwargs | {"node_rank": 1}
    assert linked == [(engine, [processes[1]])]
