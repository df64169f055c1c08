"""Weights that a policy is trained to reach the engine that samples for it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model

from skyrl_train.errors import ConfigError
from skyrl_train.tensordict.collectors.vllm_updater import vLLMUpdater, vLLMUpdaterV2
from skyrl_train.tensordict.wrappers import weight_sync as weights
from skyrl_train.tensordict.wrappers.backends import TransformersWrapper
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.weight_targets import score

ROWS = [[5, 9, 77, 30], [8, 8, 250]]


class Collector:
    """A fake collector with the methods that an updater calls."""

    def __init__(self, policy: Any):
        self.policy, self.policy_version = policy, 0

    def increment_version(self) -> None:
        self.policy_version += 1

    def no_sampling(self) -> Any:
        return nullcontext()


@pytest.fixture(scope="module")
def sampler() -> Iterator[TransformersWrapper]:
    made = TransformersWrapper(tiny_model(), tokenizer=byte_tokenizer())
    yield made
    made.close()


def served(sampler: Any) -> list[list[float]]:
    return call(sampler.engine.score(ROWS), "score", 60.0)


def adapted() -> Any:
    """A model under training, with an adapter that changes what it says."""
    model: Any = get_peft_model(tiny_model(seed=1), LoraConfig(r=4, target_modules=["q_proj", "down_proj"]))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.2)
    return model


@pytest.mark.defect("D35")
@pytest.mark.parametrize("v2", [False, True])
def test_push_merges_adapters_and_is_one_version(sampler: TransformersWrapper, v2: bool):
    model, collector = adapted(), Collector(sampler)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    if v2:
        updater: Any = vLLMUpdater(v2=True, vllm_engine=sampler)
        assert isinstance(updater, vLLMUpdaterV2)
    else:
        metadata = {name: (p.dtype, p.shape) for name, p in tiny_model().named_parameters()}
        updater = vLLMUpdater(model_metadata=metadata, vllm_tp_size=1)
    updater.register_collector(collector)
    updater.init()
    optimized = getattr(updater, "push_weights_from_transformers_optimized", None)
    push_weights = partial(optimized, batch_size=1) if optimized else updater.push_weights
    hooks: list[int] = []
    updater.register_post_hook(lambda: hooks.append(collector.policy_version))
    try:
        for push in (1, 2):
            with torch.no_grad():
                model.base_model.model.model.norm.weight.mul_(1.1)
            push_weights(model)
            plain = copy.deepcopy(model).merge_and_unload()
            torch.testing.assert_close(served(sampler), score(plain, ROWS), atol=1e-4, rtol=0)
            assert collector.policy_version == push
            assert call(sampler.engine.health(), "health", 10.0).version == push
    finally:
        updater.close()
    assert hooks == [1, 2]
    changed = [name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])]
    assert changed == ["base_model.model.model.norm.weight"]
    assert not any(getattr(module, "merged", False) for module in model.modules())


def test_shapes_are_checked_without_merging(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(weights, "_merged", lambda *_: pytest.fail("a tensor was merged for its shape"))
    metadata = {name: (p.dtype, p.shape) for name, p in tiny_model().named_parameters()}
    weights.check_metadata(weights.weights_of(adapted()), metadata)


@pytest.mark.defect("D35")
def test_unusable_updaters_raise(sampler: TransformersWrapper):
    updater, model = vLLMUpdater(), tiny_model(seed=2)
    with pytest.raises(RuntimeError, match="register_collector"):
        updater.init({})
    with pytest.raises(RuntimeError, match="init"):
        updater.push_weights(model)
    collector = Collector(sampler)
    updater.register_collector(collector)
    with pytest.raises(RuntimeError, match="model_metadata"):
        updater.init()
    updater.init({"lm_head.weight": (torch.float32, torch.Size([1]))})
    with pytest.raises(ConfigError, match=r"lm_head\.weight"):
        updater.push_weights(model)
    other = vLLMUpdater(vllm_tp_size=2, model_metadata={"a": (torch.float32, torch.Size([1]))})
    other.register_collector(collector)
    with pytest.raises(ConfigError, match="vllm_tp_size=2"):
        other.init()
    updater.close()
    with pytest.raises(TypeError, match="vllm_engine"):
        vLLMUpdater(vllm_engine=sampler)
    with pytest.raises(TypeError, match="master_port"):
        vLLMUpdater(master_port=1, v2=True, vllm_engine=sampler)
    with pytest.raises(ConfigError, match="no inference engine"):
        vLLMUpdater(v2=True, vllm_engine=model)
    assert collector.policy_version == 0
