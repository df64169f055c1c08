"""The route by which weights get to the engines of a run."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.config.prepare import prepare_config
from skyrl_train.config.schema import Config
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.publisher import choose_route
from skyrl_train.testing.scripted_engine import ALL_CAPABILITIES, ScriptedEngine


def config(*overrides: str, device: str = "cuda") -> Config:
    cfg = prepare_config(
        ["trainer.policy.model.path=m", "data.train_data=[d]", *overrides], has_accelerator=False
    ).config
    return replace(cfg, device=device)


def engine(*routes: str) -> Any:
    return ScriptedEngine(capabilities=replace(ALL_CAPABILITIES, weight_routes=frozenset(routes)))


COLOCATED = ("trainer.placement.colocate_all=true", "trainer.placement.policy_num_gpus_per_node=2")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has memfd")
@pytest.mark.parametrize(
    ("overrides", "device", "is_single_node", "route"),
    [
        ((*COLOCATED, "generator.num_inference_engines=2"), "cuda", True, "ipc"),
        ((*COLOCATED, "generator.num_inference_engines=2"), "cuda", False, "ipc"),
        ((*COLOCATED, "generator.num_inference_engines=4"), "cuda", True, "broadcast"),
        ((*COLOCATED, "generator.num_inference_engines=4"), "cpu", True, "ipc"),
        ((*COLOCATED, "generator.num_inference_engines=2"), "cpu", False, "broadcast"),
        (("trainer.placement.colocate_all=false",), "cuda", True, "broadcast"),
        ((*COLOCATED, "generator.weight_sync_route=checkpoint"), "cuda", True, "checkpoint"),
    ],
)
def test_fastest_possible_route_is_chosen(overrides: tuple[str, ...], device: str, is_single_node: bool, route: str):
    cfg = config(*overrides, device=device)
    assert choose_route(cfg, [engine("broadcast", "ipc", "checkpoint")], is_single_node=is_single_node) == route


def test_unsupported_broadcast_becomes_checkpoint_unless_configured():
    engines = [engine("broadcast"), engine("checkpoint")]
    apart = "trainer.placement.colocate_all=false"
    assert choose_route(config(apart), engines) == "checkpoint"
    assert choose_route(config(apart, "generator.weight_sync_route=broadcast"), engines) == "broadcast"


def test_shared_memory_across_nodes_is_refused_on_cpus():
    cfg = config("generator.weight_sync_route=ipc", device="cpu")
    with pytest.raises(ConfigError, match=r"generator\.weight_sync_route=ipc: .* cannot share memory"):
        choose_route(cfg, [], is_single_node=False)
