"""TorchRL's vLLM classes in their intended use: vLLM in Ray actors, sampled from and updated by this process."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from skyrl_train.cluster.ray_cluster import Cluster
from skyrl_train.tensordict.wrappers.async_vllm import AsyncVLLM
from skyrl_train.tensordict.wrappers.backends import vLLMWrapper
from skyrl_train.tensordict.wrappers.vllm_workers import make_vllm_worker
from skyrl_train.testing.tiny_models import byte_tokenizer, save_tiny_model, tiny_model
from tests.support.weight_targets import score

ROW = [5, 9, 77, 30]
pytestmark = [pytest.mark.on_demand, pytest.mark.slow, pytest.mark.timeout(600)]


def test_replicas_sample_and_load_verified_weights(tmp_path: Path):
    vllm = pytest.importorskip("vllm", reason="scripts/cpu_engines installs vllm")
    model, trained = save_tiny_model(tmp_path, "qwen3"), tiny_model("qwen3", seed=3)
    options: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "max_num_seqs": 2, "threads": 1}
    args = vllm.AsyncEngineArgs(model=model, max_model_len=64, enforce_eager=True)
    with Cluster(), AsyncVLLM.from_pretrained(model, num_replicas=2, compile=False, **options) as service:
        params = vllm.SamplingParams(max_tokens=3, logprobs=1, ignore_eos=True)
        outputs = service.generate(["hello", "you"], params)
        assert [len(one.outputs[0].token_ids) for one in outputs] == [3, 3]
        assert service.update_weights(trained) == 1
        service.init_weight_update_group()
        assert service.update_weights(iter(trained.state_dict().items())) == 2
        scorer = vLLMWrapper(service, tokenizer=byte_tokenizer(), input_mode="tokens", generate=False, inplace=False)
        found = scorer(TensorDict(tokens=torch.tensor([ROW] * 3), batch_size=(3,)))
        for row in found.unbind(0):
            torch.testing.assert_close(row["log_probs"].full[1:].tolist(), score(trained, [ROW])[0], atol=1e-4, rtol=0)
    assert AsyncVLLM(args)._options == {"model": model, "max_model_len": 64, "enforce_eager": True, "dtype": "float32"}


def test_a_worker_in_an_actor_samples_and_takes_weights(tmp_path: Path):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed; scripts/cpu_engines installs it")
    model, trained = save_tiny_model(tmp_path, "qwen3"), tiny_model("qwen3", seed=3)
    with (
        Cluster(),
        make_vllm_worker(model_name=model, device="cpu", max_model_len=64, max_num_seqs=2, threads=1) as worker,
    ):
        wrapper = vLLMWrapper(worker, tokenizer=byte_tokenizer(), input_mode="text", inplace=False)
        out = wrapper(TensorDict(text=["hello"], batch_size=(1,)), max_new_tokens=4, temperature=0.0)
        assert len(out[0]["tokens"].response) <= 4
        assert worker.update_weights(trained) == 1
        assert worker.check_weights_changed()
        scorer = wrapper.get_new_version(generate=False, input_mode="tokens")
        found = scorer(TensorDict(tokens=torch.tensor(ROW)))["log_probs"].full[1:]
        torch.testing.assert_close(found.tolist(), score(trained, [ROW])[0], atol=1e-4, rtol=0)
