"""What a run knows of an engine that it has started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.assembly import engines
from skyrl_train.assembly.engines import build_engine
from skyrl_train.assembly.layout import RoleSlots
from skyrl_train.cluster.placement import Slots
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.trainer import TimeoutsConfig
from skyrl_train.engines.base import Capabilities


class Started:
    """A handle of an engine that has."""

    capabilities = Capabilities("unknown")

    async def read(self, attribute: str, deadline_s: float) -> Capabilities:
        return Capabilities("engine 1")

    def know(self, capabilities: Capabilities) -> None:
        self.capabilities = capabilities


@pytest.mark.defect("newcomers-on-other-nodes-are-told-loopback")
@pytest.mark.parametrize("single_machine", [True, False])
def test_loopback_is_no_address_for_an_engine_of_a_cluster_that_has_grown(
    monkeypatch: pytest.MonkeyPatch, single_machine: bool
):
    """Ranks of a run that began on one node would give it: see test_publish.py and test_learner.py."""
    monkeypatch.setattr(engines, "spawn", lambda *args, **kwargs: Started())
    cluster: Any = SimpleNamespace(single_machine=single_machine, cpus=2.0)
    group: Any = None
    slots = RoleSlots(Slots(group, count=1, cpus=1.0, gpus=0.0, tenants=1, cores=1), 1)
    engine: Any = asyncio.run(build_engine(1, cluster, GeneratorConfig(), TimeoutsConfig(), slots, "cpu", place=0))
    assert engine.capabilities.other_machine != single_machine
    assert engine.capabilities.name == "engine 1"
