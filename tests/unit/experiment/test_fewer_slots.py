"""What a run asks for when there is no room for all that it was configured with."""

from __future__ import annotations

import pytest

from skyrl_train.cluster.room import FreeNode
from skyrl_train.config.hydra import load
from skyrl_train.config.predicates import Uses, slots_of
from skyrl_train.config.schema import Config
from skyrl_train.experiment.restarts import candidates, has_room


def configured(*overrides: str) -> Config:
    """Four ranks and two engines, apart."""
    return load(
        [
            "device=cpu",
            "data.train_data=[rows.jsonl]",
            "generator.backend=transformers",
            "generator.model_dtype=float32",
            "generator.weight_sync_backend=gloo",
            "trainer.bf16=false",
            "trainer.flash_attn=false",
            "trainer.placement.colocate_all=false",
            "trainer.placement.policy_num_gpus_per_node=4",
            "generator.num_inference_engines=2",
            *overrides,
        ]
    )


def shapes(config: Config, uses: Uses | None = None, added: int = 0) -> list[tuple[int, int]]:
    found = list(candidates(config, uses or Uses(), lambda one: True, added))
    assert found[0] is config, "what is configured comes first"
    slots = [slots_of(one, uses or Uses()) for one in found]
    return [(one.policy, one.engines) for one in slots]


def test_the_fewest_slots_are_given_up_and_the_trainer_s_before_an_engine_s():
    assert shapes(configured()) == [(4, 2), (3, 2), (4, 1), (2, 2), (3, 1), (1, 2), (2, 1), (1, 1)]


def test_ranks_stay_a_multiple_of_what_shares_a_model_or_a_sequence():
    pairs = shapes(configured("trainer.policy.sequence_parallel_size=2", "generator.num_inference_engines=1"))
    assert pairs == [(4, 1), (2, 1)]


def test_a_run_without_engines_gives_up_ranks_alone():
    assert shapes(configured(), Uses(val_data=False, engines=False, rewards=False)) == [(4, 0), (3, 0), (2, 0), (1, 0)]


def test_engines_that_were_added_meanwhile_are_given_up_before_ranks():
    assert shapes(configured("generator.num_inference_engines=4"), added=2)[:5] == [
        (4, 4),
        (4, 3),
        (4, 2),
        (3, 2),
        (4, 1),
    ]


@pytest.mark.defect("hosts-of-environments-have-no-room-after-a-restart")
@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        (3, (4, 2, 3)),
        (2, (4, 2, 2)),
        (1, (2, 2, 1)),
    ],
)
def test_hosts_of_environments_need_room_too_and_are_given_up_before_ranks(nodes: int, wanted: tuple[int, int, int]):
    """Each node has room for a host, and for four slots of a whole CPU beside it."""
    config = configured("environment.hosts=3", "environment.host_cpus=2", "environment.host_resources={games: 1}")
    free = [FreeNode({"CPU": 6.0, "games": 1.0}) for _ in range(nodes)]
    found = next(candidates(config, Uses(), lambda one: has_room(one, Uses(), free, cpus=24.0)))
    slots = slots_of(found, Uses())
    assert (slots.policy, slots.engines, found.environment.hosts) == wanted


@pytest.mark.parametrize(("nodes", "fit"), [(1, False), (2, True)])
def test_an_engine_needs_a_node_for_itself_or_parts_of_several(nodes: int, fit: bool):
    config = configured(
        "generator.backend=vllm",
        "generator.num_inference_engines=1",
        "generator.inference_engine_tensor_parallel_size=4",
        f"trainer.placement.nodes_per_engine={nodes}",
    )
    free = [FreeNode({"CPU": cpus}) for cpus in (3.0, 3.0, 2.0)]
    assert has_room(config, Uses(), free, cpus=9.0) == fit


def test_slots_share_the_cpus_that_hosts_leave():
    config = configured("environment.hosts=1", "environment.host_cpus=2")
    assert has_room(config, Uses(), [FreeNode({"CPU": 6.0})], cpus=6.0)
    assert not has_room(config, Uses(), [FreeNode({"CPU": 2.0})], cpus=2.0), "they leave none"
