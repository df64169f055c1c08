"""TorchRL's weight sync schemes: weights arrive in the engine complete, and count as one version."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrl.weight_update import llm

from skyrl_train.errors import ConfigError, WeightSyncError
from skyrl_train.tensordict import (
    SGLangWeightSyncScheme,
    TransformersWrapper,
    VLLMDoubleBufferSyncScheme,
    VLLMWeightSyncScheme,
    get_model_metadata,
    get_sglang_model_metadata,
)
from skyrl_train.tensordict.wrappers.event_loop import call
from skyrl_train.testing.tiny_models import byte_tokenizer, tiny_model
from tests.support.weight_targets import score
from tests.unit.tensordict.collectors.test_vllm_updater import ROWS, Collector, adapted, served


@pytest.fixture(scope="module")
def sampler() -> Iterator[TransformersWrapper]:
    made = TransformersWrapper(tiny_model(), tokenizer=byte_tokenizer())
    yield made
    made.close()


@pytest.mark.defect("D35")
def test_sender_updates_engine_as_one_version(sampler: TransformersWrapper):
    model, collectors = adapted(), [Collector(sampler), Collector(sampler)]
    scheme = VLLMWeightSyncScheme(gpus_per_replica=1, num_replicas=1)
    sender = scheme.create_sender()
    assert isinstance(scheme, llm.VLLMWeightSyncScheme) and isinstance(sender, llm.VLLMWeightSender)
    with pytest.raises(RuntimeError, match="Call init_all_workers_group first"):
        sender.update_weights()
    sender.register_collector(collectors[0])
    sender.init_all_workers_group(get_model_metadata(model), vllm_engine=sampler)
    sender.register_collector(collectors[1])
    with pytest.raises(RuntimeError, match="No model registered"):
        sender.update_weights()
    sender.register_model(model)
    sender.update_weights()
    torch.testing.assert_close(served(sampler), score(model.merge_and_unload(), ROWS), atol=1e-4, rtol=0)
    assert [one.policy_version for one in collectors] == [1, 1]
    with pytest.raises(ConfigError, match="model_metadata"):
        sender.update_weights({"model.norm.weight": torch.ones(64)})
    sender.shutdown()


def test_metadata_has_the_names_that_are_sent():
    model = adapted()
    assert get_model_metadata(model) == {name: (p.dtype, p.shape) for name, p in tiny_model().named_parameters()}
    assert get_sglang_model_metadata is get_model_metadata


def test_receiver_loads_weights_into_its_engine(sampler: TransformersWrapper):
    receiver = VLLMWeightSyncScheme().create_receiver(sampler)
    receiver.init_all_workers_group()
    receiver.apply_weights(trained := tiny_model(seed=3))
    torch.testing.assert_close(served(sampler), score(trained, ROWS), atol=1e-4, rtol=0)
    assert not receiver.poll_and_apply()


def test_folder_passes_each_update_once(sampler: TransformersWrapper, tmp_path: Path):
    scheme = VLLMDoubleBufferSyncScheme(str(tmp_path / "new"))
    sender, receiver = scheme.create_sender(), scheme.create_receiver(sampler)
    assert isinstance(sender, llm.VLLMDoubleBufferWeightSender)
    assert isinstance(receiver, llm.VLLMDoubleBufferWeightReceiver)
    with pytest.raises(RuntimeError, match="register_model first"):
        sender.update_weights()
    assert not receiver.poll_and_apply()
    sender.register_model(trained := tiny_model(seed=4))
    sender.update_weights()
    version = call(sampler.engine.health(), "health", 10.0).version
    assert [receiver.poll_and_apply(), receiver.poll_and_apply()] == [True, False]
    torch.testing.assert_close(served(sampler), score(trained, ROWS), atol=1e-4, rtol=0)
    assert call(sampler.engine.health(), "health", 10.0).version == version + 1
    sender.update_weights({"model.norm.weight": torch.ones(64)})
    with pytest.raises(WeightSyncError, match="does not send it"):
        receiver.poll_and_apply()


def test_server_that_does_not_answer_raises():
    sender: Any = SGLangWeightSyncScheme("http://127.0.0.1:9", num_gpus=1).create_sender()
    assert isinstance(sender, llm.SGLangWeightSender)
    with pytest.raises(RuntimeError, match="Call init_all_workers_group first"):
        sender.update_weights()
    sender.shutdown()
