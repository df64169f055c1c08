"""Weights from the model that is trained to the engine that samples: proven, numbered, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torchrl.envs import StepCounter

from skyrl_train.errors import WeightSyncError
from skyrl_train.tensordict.collectors.llm_collector import LLMCollector
from skyrl_train.tensordict.collectors.vllm_updater import vLLMUpdaterV2
from skyrl_train.tensordict.collectors.weight_updaters import EngineUpdater, WeightUpdaterBase
from skyrl_train.tensordict.envs.chat import DatasetChatEnv
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.tensordict.wrappers.weight_sync import weights_of
from skyrl_train.testing.scripted_engine import ScriptedEngine
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model

TOKENIZER = byte_tokenizer()
SETTINGS: dict[str, Any] = {"tokenizer": TOKENIZER, "input_mode": "tokens"}


@pytest.fixture
def policy() -> Iterator[TransformersWrapper]:
    wrapper = TransformersWrapper(tiny_model(), generate_kwargs={"max_new_tokens": 6}, **SETTINGS)
    yield wrapper
    wrapper.close()


@pytest.fixture
def collects(policy: TransformersWrapper) -> LLMCollector:
    """One turn of one conversation a batch."""
    env = DatasetChatEnv(dataset=[{"query": "hello"}], input_mode="tokens", tokenizer=TOKENIZER)
    env.append_transform(StepCounter(1))
    return LLMCollector(env, policy=policy, dialog_turns_per_batch=1, flatten_data=True, track_policy_version=True)


def difference(collects: LLMCollector, model: nn.Module) -> tuple[float, int]:
    """Largest, in nats, of a turn's log-probs from the model's; and the version that the turn carries."""
    batch = next(iter(collects))
    assert batch is not None
    scores = TransformersWrapper(model, generate=False, inplace=False, **SETTINGS)(batch.select("tokens", "masks"))
    theirs = scores[0]["log_probs"].full.detach()[len(batch[0]["tokens"].prompt) :]
    return float((batch[0]["log_probs"].response - theirs).abs().max()), int(batch[0]["policy_version"])


@pytest.mark.defect("wrapper-modifies-module")
def test_a_policy_over_the_trained_model_itself_may_be_updated_too(collects: LLMCollector, policy: TransformersWrapper):
    with torch.no_grad():
        for parameter in policy.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    before = [parameter.clone() for parameter in policy.model.parameters()]
    collects.update_policy_weights_(policy.model)
    gap, carried = difference(collects, policy.model)
    assert gap < 1e-4 and carried == 1
    assert all(map(torch.equal, before, policy.model.parameters()))


def test_a_turn_is_sampled_by_the_weights_of_its_version(collects: LLMCollector):
    for version in (1, 2):
        trained = tiny_model(seed=version)
        collects.update_policy_weights_(trained)
        gap, carried = difference(collects, trained)
        assert gap < 1e-4
        assert carried == collects.policy_version == version
        assert asyncio.run(collects.policy.engine.health()).version == version


def test_weights_come_in_several_forms():
    model = tiny_model()
    wrapper = TransformersWrapper(model, generate=False, **SETTINGS)
    parameters = dict(model.named_parameters())
    for source in (model, wrapper, model.state_dict(), TensorDict.from_module(model)):
        found = weights_of(source)
        assert found.keys() == parameters.keys()  # the tied head once
        assert all(torch.equal(found[name], parameters[name]) for name in parameters)
    with pytest.raises(ValueError, match="give a module with parameters"):
        weights_of("policy")  # type: ignore[arg-type]


def test_what_does_not_fit_changes_nothing_and_the_next_push_works(collects: LLMCollector):
    trained = tiny_model(seed=1)
    tensors = weights_of(trained)
    with pytest.raises(WeightSyncError, match=r"the engine has model\.norm\.weight, but"):
        collects.update_policy_weights_({name: t for name, t in tensors.items() if name != "model.norm.weight"})
    assert difference(collects, tiny_model()) == (pytest.approx(0.0, abs=1e-4), 0)
    broken = {**tensors, "model.norm.weight": tensors["model.norm.weight"] * torch.nan}
    with pytest.raises(WeightSyncError, match=r"model\.norm\.weight contains NaN"):
        collects.update_policy_weights_(broken)
    collects.update_policy_weights_(trained)
    assert difference(collects, trained) == (pytest.approx(0.0, abs=1e-4), 1)


class _Collector:
    """A fake collector with the attributes that an updater uses."""

    def __init__(self) -> None:
        self.policy_version = 0

    def increment_version(self) -> None:
        self.policy_version += 1

    def no_sampling(self) -> Any:

        return nullcontext()


def test_whoever_samples_with_other_weights_has_another_version():
    engines = [ScriptedEngine(name="one"), ScriptedEngine(name="two")]
    updater, collector = EngineUpdater(engines, source={"weight": torch.ones(2)}), _Collector()
    hooked: list[int] = []
    updater.init()
    updater.register_collector(collector)
    updater.register_post_hook(lambda: hooked.append(collector.policy_version))
    updater.push_weights(worker_ids=1)
    assert [engine.version for engine in engines] == [0, 1]
    assert collector.policy_version == 1
    updater.push_weights({"weight": torch.zeros(2)})
    assert [engine.version for engine in engines] == [2, 2]
    updater()
    assert [engine.version for engine in engines] == [3, 3]
    assert hooked == [1, 2, 3]
    with pytest.raises(ValueError, match=r"worker_ids=\[2\] are unknown; the workers are \[0, 1\]"):
        updater.push_weights(worker_ids=[2])
    other = _Collector()
    updater.register_collector(other)
    updater.push_weights()
    assert (collector.policy_version, other.policy_version) == (4, 1)
    assert [engine.version for engine in engines] == [4, 4]
    updater.close()


def test_an_updater_is_found_for_a_policy(policy: TransformersWrapper):
    found = WeightUpdaterBase.from_policy(policy)
    assert isinstance(found, EngineUpdater)
    assert found.engines == [policy.engine]
    assert WeightUpdaterBase.from_policy(lambda td: td) is None
    assert WeightUpdaterBase.from_policy(policy.get_new_version(generate=False)) is None
    with pytest.raises(ValueError, match="has no source="):
        found.push_weights()


@pytest.mark.parametrize("updates", [EngineUpdater, vLLMUpdaterV2])
def test_a_push_that_fails_at_the_second_worker_uses_its_number_up(updates: type[EngineUpdater]):
    engines = [ScriptedEngine(name="one"), ScriptedEngine(name="two")]
    updater, collector, weights = updates(engines), _Collector(), {"weight": torch.ones(2)}
    updater.register_collector(collector)
    engines[1].failures["begin_weights"] = WeightSyncError("no room")
    with pytest.raises(WeightSyncError, match="no room"):
        updater.push_weights(weights)
    assert [engine.version for engine in engines] == [1, 0]
    assert collector.policy_version == 1
    engines[1].failures.clear()
    updater.push_weights(weights)
    assert [engine.version for engine in engines] == [2, 2]
    assert collector.policy_version == 2


@pytest.mark.parametrize("route", ["broadcast", "checkpoint"])
def test_routes_that_need_more_are_refused(route: str):
    with pytest.raises(ValueError, match=r"route='broadcast'|needs folder="):
        EngineUpdater(ScriptedEngine(), route=route)
    with pytest.raises(ValueError, match="engine 'scripted' has no weight route 'checkpoint'"):
        EngineUpdater(ScriptedEngine(), route="checkpoint", folder="weights")
