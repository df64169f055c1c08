from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from skyrl_train.cluster.placement import ResourcePool
from skyrl_train.config.hydra import load_preset
from skyrl_train.config.schema import LoraConfig
from skyrl_train.errors import ConfigError
from skyrl_train.experiment.algorithm import build_policy_objective_spec
from skyrl_train.experiment.data import check_same_tokens
from skyrl_train.experiment.learner import critic_spec, reference_spec, threads_per_process
from skyrl_train.experiment.placement import RolePlacement
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model
from skyrl_train.trainer.trainer import StepSchedule
from tests.support.learner_specs import tiny_spec


def tokenizer_in(folder: Path, *more: str) -> str:
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(list(more))
    tokenizer.save_pretrained(folder)
    return str(folder)


def with_other_ids(folder: Path) -> str:
    """Write a tokenizer in which two letters have swapped ids, and return its folder."""
    path = Path(tokenizer_in(folder)) / "tokenizer.json"
    text = path.read_text()
    vocabulary = Tokenizer.from_file(str(path)).get_vocab()
    for letter, other in (("a", "b"), ("b", "a")):
        text = text.replace(f'"{letter}": {vocabulary[letter]}', f'"{letter}": {vocabulary[other]}')
    path.write_text(text)
    return str(folder)


@pytest.mark.defect("one-cpu-core-per-accelerator")
def test_accelerator_ranks_use_cores_of_their_slots() -> None:
    cluster: Any = SimpleNamespace(num_cpus=6.0)
    group: Any = None
    role = RolePlacement(
        ResourcePool(
            group, num_slots=2, cpus_per_slot=1.0, gpus_per_slot=1.0, actors_per_slot=2, min_cores_per_slot=12
        ),
        count=2,
    )
    assert threads_per_process(cluster, role, "cuda") == 12
    assert threads_per_process(cluster, role, "cpu") == 3, "a CPU slot has its share of the cluster's cores"
    assert threads_per_process(cluster, replace(role, num_concurrent=1), "cpu") == 2, (
        "an engine computes at the same time"
    )


def test_models_may_differ_in_added_tokens(tmp_path: Path) -> None:
    plain, more = tokenizer_in(tmp_path / "plain"), tokenizer_in(tmp_path / "more", "<extra>")
    check_same_tokens(plain, more, "trainer.ref.model.path")
    check_same_tokens(more, plain, "trainer.ref.model.path")


def test_reference_with_other_token_ids_is_refused(tmp_path: Path) -> None:
    policy, other = tokenizer_in(tmp_path / "policy"), with_other_ids(tmp_path / "other")
    with pytest.raises(ConfigError, match=r"trainer\.ref\.model\.path=.*: 2 tokens .* such as '[ab]'"):
        check_same_tokens(policy, other, "trainer.ref.model.path")


def test_folder_without_tokenizer_is_accepted(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "critic")
    for file in (tmp_path / "critic").glob("*token*"):
        file.unlink()
    check_same_tokens(tokenizer_in(tmp_path / "policy"), str(tmp_path / "critic"), "trainer.critic.model.path")


def test_model_is_not_compared_with_itself() -> None:
    check_same_tokens("no folder", "no folder", "trainer.ref.model.path")


def test_trained_models_have_separate_adapters():
    overrides = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=/x"]
    spec, schedule = tiny_spec("/x", lora=LoraConfig(rank=8)), StepSchedule(8, 4, 1)
    for rank in (0, 4):
        cfg = load_preset([*overrides, f"trainer.critic.model.lora.rank={rank}"])
        assert reference_spec(spec, cfg.trainer, None).lora is None
        critic = critic_spec(spec, cfg.trainer, None, build_policy_objective_spec(cfg), schedule)
        assert (critic.lora.rank if critic.lora else 0) == rank


def test_only_policy_records_allocations():
    cfg = load_preset(["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=/x"])
    spec = tiny_spec("/x", use_torch_compile=True, memory_snapshot_folder="/records")
    critic = critic_spec(spec, cfg.trainer, None, build_policy_objective_spec(cfg), StepSchedule(8, 4, 1))
    for other in (reference_spec(spec, cfg.trainer, None), critic):
        assert other.use_torch_compile
        assert other.memory_snapshot_folder is None
